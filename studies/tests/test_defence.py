"""The defence: battles and their stored results, losses and paces by hand, the goal, and the page."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from folb.cli.main import main
from folb.core.liars import ATTACKS
from folb.errors import InputError
from folb.experiments import execute
from folb.experiments.plan import plan
from folb_studies import defence
from folb_studies.defence import battles, defence_pages, losses, opponents
from folb_studies.defence.losses import Losses
from folb_studies.defence.opponents import Battle, Dataset, Rule
from folb_studies.results import FILE, Results

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[2]
SMALL = {"sizes": [20, 30, 40, 20, 30], "select.K": 4, "fedavg": {"local.lr": 0.05}}
TINY = Dataset(
    "tiny", "Tiny", "synthetic_1_1", 6, [0, 1], [20], attacks=["flipped_x1000"], set=SMALL, goal=True, evaluate_every=2
)
MEAN = Rule("mean", "fedavg", "FedAvg")
MEDIAN = Rule("median", "fedavg", "coordinate median", set={"robust": "median"})
TRUSTED = Rule("fltrust", "fedavg", "FLTrust", set={"robust": "fltrust"}, own_samples=True)
KRUM = Rule("krum", "fedavg", "Krum", set={"robust": "krum"}, informed=True, attacks=["gamma"])


def execute_plan(home, wanted):
    done, told = [], []

    def complete(planned, about):
        done.append(about)
        return execute.execute(planned)

    defence.execute_plan(wanted, home, complete, told.append)
    return done, told


def test_a_battle_is_run_once_and_again_if_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path / "runs"))
    home, wanted = Results(tmp_path / FILE), opponents.battles([TINY], [MEAN])
    done, told = execute_plan(home, wanted)
    assert done == ["tiny-mean-0", "tiny-mean-20"] and told[0].startswith("tiny-mean-0 (1 of 2) is done")
    pace, found = (battles.stored(home, battle) for battle in wanted)
    assert np.shape(pace["accuracy"]) == (2, 6) and list(pace["attacks"]) == ["honest"]
    assert list(found["attacks"]) == ["honest", "flipped_x1000"] and found["devices"] == 5
    honest, attacked = (np.mean(one["settled"]) for one in found["attacks"].values())
    assert honest > attacked + 0.1 and 0 < found["attacks"]["flipped_x1000"]["weight"] < 1
    assert execute_plan(home, wanted) == (
        [],
        ["tiny-mean-0 (1 of 2) is done already", "tiny-mean-20 (2 of 2) is done already"],
    )
    assert battles.stored(home, replace(wanted[1], dataset=replace(TINY, title="another"))) == found
    assert battles.stored(home, replace(wanted[1], dataset=replace(TINY, rounds=7))) is None
    assert battles.stored(home, replace(wanted[1], rule=replace(MEAN, set={"local.lr": 0.1}))) is None


def test_what_a_battle_runs():
    experiment = Battle(TINY, KRUM, 40).experiment
    assert experiment.set["fedavg"] == {
        "local.lr": 0.05,
        "robust": "krum",
        "robust.liars": 0.4,
        "attack": ["honest", "flipped_x1000", "gamma"],
        "attack.share": 0.4,
    }
    assert "fedavg" not in Battle(TINY, Rule("accord", "accord"), 40).experiment.set
    pace = Battle(TINY, KRUM, opponents.PACE).experiment
    assert (
        pace.evaluate_every == 1
        and "robust.liars" not in pace.set["fedavg"]
        and pace.set["fedavg"]["attack.share"] == 0.0
    )


def test_our_files_name_what_there_is():
    """Every rule can be planned, every attack on updates is met by every rule, and those on gradients by FOLB."""
    rules = opponents.rules()
    for rule in rules:
        assert plan(
            Battle(replace(TINY, set=SMALL | {"select.K": 5, "select.replacement": False}), rule, 20).experiment
        ).algorithms
    everything = {*opponents.EVERYWHERE, *(name for rule in rules for name in rule.attacks), "honest", "loss"}
    assert everything == set(ATTACKS.parts)
    assert sum(dataset.goal for dataset in opponents.datasets()) >= 1
    for dataset in opponents.datasets():
        assert len(dataset.seeds) == 5 and 20 in dataset.shares


# By hand


def made_up(home, rule, settled, curve=None, dataset=TINY):
    """Stored results of a rule: what it ends with under each attack, and a curve of accuracy without liars."""
    for share in (opponents.PACE, 20):
        battle = Battle(dataset, rule, share)
        seeds = len(dataset.seeds)
        one = {"settled": [0.5] * seeds, "backdoor": [0.25] * seeds, "weight": 0.1}
        found = {
            "dataset": dataset.name,
            "identity": battle.identity,
            "devices": 30,
            "seeds": list(dataset.seeds),
            "attacks": {"honest": one},
        }
        if share:
            found["attacks"] = {name: one | {"settled": list(values)} for name, values in settled.items()}
        elif curve is None:
            continue
        else:
            found["accuracy"] = [list(curve)] * seeds
        home.keep(battle.name, found)


TWO = replace(TINY, attacks=["alie", "backdoor"], rounds=20)
UP = [0.1] * 4 + [0.8] * 16  # FedAvg's: held from round 5
LATE = [0.1] * 5 + [0.8] * 15
SLOW = [0.1] * 12 + [0.8] * 8


@pytest.fixture
def home(tmp_path):
    home = Results(tmp_path / FILE)
    made_up(home, MEAN, {"honest": [0.9, 0.8], "alie": [0.5, 0.6], "backdoor": [None, 0.8]}, UP, TWO)
    made_up(home, MEDIAN, {"honest": [0.8, 0.8], "alie": [0.7, 0.76], "backdoor": [0.8, 0.8]}, LATE, TWO)
    made_up(home, TRUSTED, {"honest": [0.8, 0.8], "alie": [0.78, 0.79], "backdoor": [0.8, 0.8]}, SLOW, TWO)
    return home


def test_losses_and_paces_are_those_by_hand(home):
    found = Losses([TWO], [MEAN, MEDIAN, TRUSTED, KRUM], home)
    attack, worst = found.largest(TWO, MEAN, 20)
    assert attack == "backdoor" and worst.value == pytest.approx((0.9 + 0.0) / 2)  # what is not a number is 0
    attack, worst = found.largest(TWO, MEDIAN, 20)
    half = stats.t.ppf(0.975, 1) * np.std([0.1, 0.04], ddof=1) / math.sqrt(2)
    assert attack == "alie" and worst == pytest.approx((0.07, 0.07 - half, 0.07 + half, 2))
    assert found.target(TWO) == pytest.approx(0.97 * 0.8)
    assert found.held(TWO, MEAN) == [5, 5] and found.held(TWO, TRUSTED) == [13, 13]
    assert math.exp(found.pace(TWO, TRUSTED).value) == pytest.approx(13 / 5)
    assert found.largest(TWO, KRUM, 20) is None and found.pace(TWO, KRUM) is None
    assert found.absent == [("tiny", "krum", 0), ("tiny", "krum", 20)]
    document = json.loads(json.dumps(losses.document(found)))
    assert [one["rule"] for one in document["goal"]] == ["median", "fltrust", "mean"]


def test_the_nearest_rule_and_by_how_much_it_misses(home):
    found = Losses([TWO], [MEAN, MEDIAN, TRUSTED], home)
    assert [round(one.miss, 2) for one in found.standings(TWO)] == [2.33, 2.36, 15.0]
    said = " ".join(defence_pages.sentences(found, TWO))
    assert said == (
        "No rule meets the goal. The nearest is coordinate median: it loses at most 7.0 points (`alie`), 4.0 too many, "
        "and without an attack it needs 1.20 times the rounds of FedAvg, 0.10 too many."
    )
    made_up(home, TRUSTED, {"honest": [0.8, 0.8], "alie": [0.78, 0.79], "backdoor": [0.8, 0.8]}, UP, TWO)
    said = " ".join(defence_pages.sentences(Losses([TWO], [MEAN, MEDIAN, TRUSTED, KRUM], home), TWO))
    assert said.startswith(
        "3 of 4 rules have been run. FLTrust meets the goal. The nearest is FLTrust: it loses at most"
    )
    assert "1.5 points (`alie`), which is allowed, and without an attack it needs 1.00 times" in said
    assert "It needs samples of the server. Of the rules without, the nearest is coordinate median" in said


def test_a_rule_that_never_holds_the_target_is_slow(home):
    made_up(home, MEDIAN, {"honest": [0.8, 0.8]}, [0.1] * 20, TWO)
    found = Losses([TWO], [MEAN, MEDIAN], home)
    assert found.held(TWO, MEDIAN) == [None, None]
    assert math.exp(found.pace(TWO, MEDIAN).value) == pytest.approx(2 * 20 / 5)


def test_the_page(home, tmp_path):
    found = Losses([TWO], [MEAN, MEDIAN, TRUSTED, KRUM], home)
    defence_pages.write(found, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert "| coordinate median | 80.0 | 73.0 | 80.0 | 7.0 |" in text
    assert "| FLTrust | 25.0 (25.0) | 10.0 (alie) |" in text
    assert "- Not run on Tiny: Krum (20 % liars and the pace)." in text and "nan" not in text
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_mean_there_is_no_target(tmp_path):
    with pytest.raises(InputError, match="should have mean, which gives the target"):
        Losses([TINY], [MEDIAN], Results(tmp_path / FILE))


# The command


def written(path, **changes):
    known = {"name": "t", "title": "T", "dataset": "synthetic_1_1", "rounds": 2, "seeds": [0], "shares": [20]} | changes
    lines = [f"{key} = {json.dumps(value)}" for key, value in known.items() if value is not None]
    path.write_text("[[dataset]]\n" + "\n".join(lines))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"shares": [50]}, [], "t: shares = [50]: should be different percents from 1 to 49"),
        ({"shares": [20, 20]}, [], "t: shares = [20, 20]: should be different"),
        ({"attacks": ["flip"]}, [], "t: attacks = 'flip': did you mean"),
        ({"name": "a/b"}, [], "name of a dataset = 'a/b': should have only"),
        ({"rounds": "x"}, [], "rounds of dataset = 'x': should be a whole number"),
        ({"seed": [0]}, [], "key of dataset = 'seed': did you mean 'seeds'"),
        ({"title": None}, [], "keys of dataset = ['dataset', 'name', 'rounds', 'seeds', 'shares']: lacks title"),
        ({}, ["--shares", "30"], "shares = '30': should be some of 0, 20"),
        ({}, ["--shares", "20,30"], "shares = '20,30': should be some of 0, 20"),
        ({}, ["--shares", ","], "shares = ',': should be some of 0, 20"),
        ({}, ["--shares", "x"], "shares = 'x': should be percents, such as 0,20"),
        ({}, ["--rules", "medain"], "rules = 'medain': should fit one of mean, median"),
        ({}, ["--only", "mnist"], "only = 'mnist': should fit one of t"),
        ({}, ["--pages-only", "--shares", "20"], "shares = '20': does not go with --pages-only"),
        ({}, ["--pages-only"], "has no results to make pages from"),
    ],
)
def test_bad_input_is_a_line(changes, options, message, tmp_path, capsys):
    path = written(tmp_path / "d.toml", **changes)
    assert main(["defend", "--datasets", path, "--out", str(tmp_path / "o"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_damaged_results_are_named(home):
    whole = {"settled": [0.5], "backdoor": [0.0]}  # but for its weight
    for cell in (
        {"seeds": 3},
        {"seeds": [0], "attacks": {"honest": {"settled": []}}},
        {"seeds": [0], "attacks": {"honest": whole}, "identity": "a"},
    ):
        home.keep("tiny-mean-20", cell)
        with pytest.raises(InputError, match=r"tiny-mean-20': is damaged in .*`--drop tiny-mean-20` forgets it"):
            Losses([TWO], [MEAN], home)


def test_the_guards_page_quotes_the_worst_attacks():
    """Of the stored study; the figures are of the command that the page names (tests/test_guard.py, slow)."""
    results, worst = Results(ROOT / "studies/results/defence.jsonl.gz"), []
    for share in (10, 20):
        found = results.get(f"synthetic_1_1-guarded_folb-{share}")["attacks"]
        worst.append(min(found, key=lambda name: np.mean(found[name]["settled"])))
    page = " ".join((ROOT / "docs/guarded.md").read_text().split())
    assert f"Three do most with `attack={worst[0]}`, which need not know the guard" in page
    assert f"Six do most with `{worst[1]}`" in page


def test_pages_of_ones_own_data_are_not_replaced_by_pages_of_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own, home = ["--datasets", written(tmp_path / "d.toml")], Results(tmp_path / "defence" / FILE)
    made_up(home, MEAN, {"honest": [0.9], "alie": [0.5]}, UP, Dataset("t", "T", "synthetic_1_1", 2, [0], [20]))
    assert main(["defend", "--pages-only"]) == 2 and not Path("defence/study.md").exists()
    assert "2 stored cells are of t: add --datasets FILE" in capsys.readouterr().err
    assert main(["defend", "--pages-only", *own]) == 0
    page = Path("defence/study.md").read_text()
    assert f"folb defend --datasets {own[1]} --pages-only   # the page again, from the stored results\n" in page
    assert "`docs/attacks.md` of folb's repository says" in page and "make pages" not in page


def test_the_guide_names_every_key_of_a_dataset(tmp_path):
    page = (ROOT / "docs/attacks.md").read_text()
    (tmp_path / "d.toml").write_text(re.search(r"```toml\n(.*?)```", page, flags=re.S)[1])
    assert [one.shares for one in opponents.datasets(tmp_path / "d.toml")] == [[20]]
    for key in fields(Dataset):
        assert f"\n{key.name} = " in page or f"| `{key.name}` |" in page, key.name


def test_every_dataset_is_planned_before_the_first_run(tmp_path, capsys):
    path = Path(written(tmp_path / "d.toml"))
    path.write_text(
        path.read_text() + "\n" + path.read_text().replace('"t"', '"u"').replace("synthetic_1_1", "absent.csv")
    )
    assert main(["defend", "--datasets", str(path), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert "d.toml: u: dataset = 'absent.csv': no such file" in error and error.count("\n") == 1


def test_the_committed_page_is_that_of_the_stored_results(tmp_path, capsys):
    committed, results = ROOT / "docs" / "attacks", ROOT / "studies" / "results" / "defence.jsonl.gz"
    (tmp_path / "attacks.md").touch()  # which the page has a link to, if it is there
    assert main(["defend", "--pages-only", "--out", str(tmp_path / "attacks"), "--results", str(results)]) == 0
    assert (tmp_path / "attacks" / "study.md").read_text() == (committed / "study.md").read_text(), "make pages"
    shown = capsys.readouterr().out
    assert all(rule.name in shown for rule in opponents.rules()) and "MNIST" in shown
