"""The arena: equal budgets, apart draws and seeds, the target's rule, stored results, ratios by hand, and the pages."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from folb.cli.main import main
from folb.errors import InputError
from folb.experiments import box as boxes
from folb.experiments import execute, tune
from folb.results.run import Run
from folb_studies import arena
from folb_studies.arena import arena_advice, arena_pages, cells, contest, entries, standings
from folb_studies.arena.arena_advice import advice
from folb_studies.arena.entries import Contender, Dataset
from folb_studies.arena.standings import Standings
from folb_studies.results import FILE, Results

ROOT = Path(__file__).parents[2]
SMALL = {"sizes": [20, 30, 40], "select.K": 2, "low": 1, "high": 2}
TUNING, REPORTED = {"draws": [100, 101], "seeds": [100]}, {"draws": [0, 1], "seeds": [0, 1], "one_each": True}
A = Dataset("tiny-a", "Tiny A", "synthetic_1_1", 8, TUNING, REPORTED, set=SMALL)
B = replace(
    A, name="tiny-b", title="Tiny B", dataset="synthetic_iid", tuning={"seeds": [7]}, reported={"seeds": [0, 1]}
)
FEDAVG = Contender("fedavg", "fedavg", "FedAvg", groups=["classic"], box={"local.lr": "log:0.001..1"})
FEDPROX = Contender(
    "fedprox", "fedprox", "FedProx", groups=["classic"], box={"local.lr": "log:0.001..1", "local.mu": [0.1, 1.0]}
)
DEFAULT = Contender("plain", "fedprox", "Ours", groups=["ours"], set={"local.lr": 0.1, "local.mu": 0.01})


def complete(planned, about):
    done.append(about)
    return execute.execute(planned)


done: list[str] = []


def execute_plan(home, datasets=(A, B), contenders=(FEDPROX, DEFAULT, FEDAVG), points=2, **options):
    """Run the arena; what was run, and what was told."""
    done.clear()
    told: list[str] = []
    arena.execute_plan(datasets, contenders, home, complete, told.append, points, **options)
    return list(done), told


@pytest.fixture(autouse=True, scope="module")
def no_curves():
    """The curves of each run are not looked at here, and take half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "_picture", lambda *about: b"a picture")
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The results of a tiny arena."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLB_RUNS", str(tmp_path_factory.mktemp("runs")))
        home = Results(tmp_path_factory.mktemp("arena") / FILE)
        execute_plan(home)
        yield home


@pytest.fixture
def results(tmp_path):
    """A store without results."""
    return Results(tmp_path / FILE)


def stored(home, dataset, contender):
    return home.get(cells.name(dataset, contender))


def test_everyone_has_the_same_budget_and_is_reported_elsewhere(home):
    assert len(home.cells()) == 6
    for dataset in (A, B):
        for one in (FEDAVG, FEDPROX):
            cell = stored(home, dataset.name, one.name)
            assert cell["points"] == len(cell["tried"]) == 2
            assert all(len(point["held"]) == dataset.trials.pairs for point in cell["tried"])
            assert cell["chosen"] == cell["tried"][0]["values"] and list(cell["chosen"]) == list(one.box)
        plain = stored(home, dataset.name, "plain")
        assert (plain["points"], plain["tried"], plain["chosen"]) == (0, [], {})
    runs = stored(home, "tiny-a", "fedavg")["runs"]
    assert list(zip(runs["draw"], runs["seed"], strict=True)) == [(0, 0), (1, 1)]
    assert stored(home, "tiny-b", "fedprox")["runs"]["seed"] == [0, 1]


def test_the_target_is_a_share_of_what_tuned_fedavg_ends_with(home):
    cell = stored(home, "tiny-a", "fedavg")
    best = max(point["final"] for point in cell["tried"])
    tuning, reported = cell["target"]["tuning"], cell["target"]["reported"]
    assert np.mean(list(tuning.values())) == pytest.approx(0.97 * best, abs=1e-3)
    assert set(tuning) == {"100", "101"} and set(reported) == {"0", "1"}  # each draw has its own
    assert all(stored(home, "tiny-a", name)["target"] == cell["target"] for name in ("fedprox", "plain"))


def test_fewer_training_samples_for_the_loss_change_no_accuracy(home, results, tmp_path):
    """So results with and without them count alike. Fewer samples than are tested on would change it."""
    fewer = replace(A, loss_samples=40)
    execute_plan(results, datasets=[fewer], contenders=[FEDAVG])
    found, known = (stored(where, "tiny-a", "fedavg") for where in (results, home))
    assert found["note"] == "training loss on 40 of 81 training samples" and known["note"] == ""
    assert found["identity"] == known["identity"] and found["runs"] == known["runs"]
    assert "the training loss is of 40 samples" in "".join(arena_pages._rules(Standings([fewer], [FEDAVG], results, 2)))
    with pytest.raises(
        InputError, match=r"tiny-a: loss_samples = 5: should be at least \d+, the number of test samples"
    ):
        execute_plan(Results(tmp_path / "other" / FILE), datasets=[replace(A, loss_samples=5)], contenders=[FEDAVG])
    with pytest.raises(InputError, match="tiny-a: loss_samples = 0: should be at least 1"):
        replace(A, loss_samples=0)


def test_the_target_ignores_points_that_diverge():
    def point(settled, diverged):
        return tune.Point("", None, [], [], 0.0, 0.0, diverged, settled=settled)

    with pytest.raises(InputError, match="diverged at every point"):
        contest.settled_best([point(0.9, True)])
    assert contest.settled_best([point(0.5, False), point(0.8, False), point(0.9, True)]).settled == 0.8


def test_points_are_tuned_by_the_measure_that_is_reported(home, results):
    """FedAdam on Synthetic(1, 1): the median prefers 29, 39, 25, and the geometric mean 33, 38, 13."""
    chosen, better = [29, 39, 25], [33, 38, 13]
    assert np.median(chosen) < np.median(better)
    assert cells.merit(better, False, 100) < cells.merit(chosen, False, 100) < cells.merit([25, 39, 29], True, 100)
    assert cells.merit(chosen, False, 100) == cells.merit(chosen[::-1], False, 100)
    made_up(results, A, FEDAVG, [29, None, 25])
    cell = {**stored(results, "tiny-a", "fedavg"), "rounds": 100}
    log_mean = np.mean(list(standings.measured(cell, "rounds").values()))
    assert cells.merit([29, None, 25], False, 100)[1] == pytest.approx(log_mean)  # a run that never holds it, too


def test_a_search_ranks_its_points_by_that_measure(home, monkeypatch):
    """Whatever order the median gives them."""

    def point(held):
        return tune.Point("", None, [], held, 0.0, 0.0, False)

    one = contest.Contest(A, FEDAVG, home, complete, 2)
    monkeypatch.setattr(one, "_searched", lambda contender: ([], [[SimpleNamespace(seconds=range(100))]], [100]))
    monkeypatch.setattr(tune, "placed", lambda *about: [point([29, 39, 25]), point([33, 38, 13])])
    assert [one.held for one in one.search(FEDAVG)] == [[33, 38, 13], [29, 39, 25]]


def test_a_winner_by_an_earlier_measure_is_named_and_run_again(home, results):
    cell = stored(home, "tiny-a", "fedprox")
    assert cells.passed_over(cell) is None
    points = [{**point, "held": held} for point, held in zip(cell["tried"], ([4, 6], [5, 1]), strict=True)]
    made_up(results, A, FEDAVG, [4, 4])
    for name in ("fedavg", "fedprox"):
        cells.keep(results, stored(home, "tiny-a", name))
    cells.keep(results, {**cell, "tried": points})
    found = Standings([A], [FEDAVG, FEDPROX], results, 2)
    assert (found.outdated("tiny-a-fedavg"), found.outdated("tiny-a-fedprox")) == (
        "",
        "another tried point is better than the winner",
    )
    (said,) = arena_advice.to_know(found)
    assert said.startswith("- **Not equal.** 1 of 2 stored winners") and said.endswith("Tiny A: fedprox.")
    front = "\n".join(arena_pages._front(found))
    assert (
        "2 of 2 combinations have been run, and 1 of them are to be run again." in front and "earlier measure" in front
    )
    assert "4, 6; but 5, 1 with local.lr = " in "\n".join(arena_pages._settings(found))
    ran, _ = execute_plan(results, [A], [FEDAVG, FEDPROX])
    assert ran and all("fedprox" in about for about in ran)
    assert stored(results, "tiny-a", "fedprox")["runs"] == cell["runs"]
    front = "\n".join(arena_pages._front(Standings([A], [FEDAVG, FEDPROX], results, 2)))
    assert "2 of 2 combinations have been run." in front and "earlier measure" not in front


def test_what_is_stored_is_not_run_again_and_what_changed_is(home, tmp_path):
    ran, told = execute_plan(home)
    assert ran == [] and told[0] == "tiny-a, fedavg is done already (1 of 6)"
    wider = replace(FEDPROX, box={"local.lr": "log:0.0001..1", "local.mu": [0.1, 1.0]})
    ran, _ = execute_plan(home, contenders=[FEDAVG, wider], datasets=[A])
    assert ran and all("fedprox" in about for about in ran)
    found = Standings([A, B], [FEDAVG, FEDPROX, DEFAULT], home, 2)
    assert found.stale == [("tiny-a", "fedprox")] and found.held(A, FEDPROX) == "not run"
    execute_plan(home, contenders=[FEDPROX], datasets=[A])  # its runs are in the run store: nothing is computed
    assert not Standings([A, B], [FEDAVG, FEDPROX, DEFAULT], home, 2).stale
    assert Standings([A, B], [FEDAVG, FEDPROX, DEFAULT], home, 3).stale  # another budget
    assert not Standings([A, replace(B, title="another")], [FEDAVG, FEDPROX, DEFAULT], home, 2).stale


def test_a_contender_alone_searches_the_reference_for_the_target(home, results):
    ran, _ = execute_plan(results, datasets=[A], contenders=[DEFAULT], reference=FEDAVG)
    assert {"tiny-a, fedavg, draw 100, search", "tiny-a, fedavg, draw 101, search"} < set(ran)
    assert stored(results, "tiny-a", "plain") == stored(home, "tiny-a", "plain")
    assert stored(results, "tiny-a", "fedavg") is None


def test_a_mistake_in_one_s_own_contender_comes_before_anyone_is_run(results):
    for mine in (entries.own("nosuch", {}), entries.own("fedavg", {"local.mu": [0.1, 1.0]})):
        with pytest.raises(InputError):
            execute_plan(results, [A], entries.with_own([FEDAVG], mine))
        assert done == []


def test_every_device_takes_part_in_the_limit(home):
    limit = Contender("limit", "fedavg", "limit", box={"local.lr": "log:0.001..1"}, every_device=True)
    dataset = replace(A, every_device_rounds=5)
    one = contest.Contest(dataset, FEDAVG, home, complete, 2)
    _, planned, _ = next(one._planned(limit, dataset.report, {"local.lr": 0.1}))
    assert (planned.algorithms[0].selection.K, planned.federation.N, planned.experiment.rounds) == (3, 3, 5)
    told = execute_plan(home, [replace(A, without={"limit": "it costs too much"})], [FEDAVG, limit])[1]
    assert told[1] == "tiny-a, limit is left out (2 of 2): it costs too much"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tuning": {"draws": [1, 100], "seeds": [100]}}, r"tuning = \[1\]: should be none of the draws"),
        ({"tuning": {"draws": [100], "seeds": [1]}}, r"tuning = \[1\]: should be none of the seeds"),
        ({"tuning": {"seeds": [100]}}, "should have draws if `reported` has"),
        ({"reported": {"draws": [0, 1], "seeds": [0], "one_each": True}}, "should be as many as draws"),
        ({"reported": {"draws": [0], "seeds": []}}, "should be at least one"),
        ({"reported": {"draws": [0], "seeds": [1, 1]}}, "should be different"),
        ({"reported": {"draw": [0], "seeds": [1]}}, "did you mean 'draws'"),
        ({"name": "Tiny A"}, "name of a dataset = 'Tiny A'"),
    ],
)
def test_mistakes_in_a_dataset_are_named(changed, message):
    with pytest.raises(InputError, match=message):
        replace(A, **changed)


def test_mistakes_in_a_contender_are_named():
    with pytest.raises(InputError, match="should span at least 3 decades"):
        replace(FEDAVG, box={"local.lr": "log:0.01..1"})
    with pytest.raises(InputError, match="name of a contender = 'fed-avg'"):
        replace(FEDAVG, name="fed-avg")


# the files


def test_our_files_are_sound():
    datasets, contenders = entries.datasets(), entries.contenders()
    for dataset in datasets:
        assert dataset.report.pairs >= 10 and dataset.trials.pairs >= 3
        known = {one.name for one in contenders}
        assert set(dataset.without) <= known
    for one in contenders:
        if one.tuned:
            assert boxes.parse("local.lr", one.box["local.lr"]) == boxes.Range(0.001, 1, log=True)
    assert {"classic", "averaged", "published", "limit"} <= {group for one in contenders for group in one.groups}
    assert len(entries.chosen(contenders, ["classic"], "contenders")) == 7
    assert [one.name for one in entries.chosen(datasets, ["mnist-?"], "only")] == ["mnist-1", "mnist-2"]
    with pytest.raises(InputError, match="only = 'cifar': should fit one of synthetic_iid"):
        entries.chosen(datasets, ["cifar"], "only")


@pytest.mark.parametrize("one", [one for one in entries.contenders() if not one.every_device], ids=lambda one: one.name)
def test_every_contender_can_be_planned(one):
    given = {"box": {one.part: one.box}, "points": 12, "box_seed": 0} if one.tuned else {}
    settings = {"set": {one.part: one.set}} if one.set else {}
    _, experiment = next(A.experiments(A.trials, algorithms=[one.algorithm], **settings, **given))
    assert len(contest.plan_of(experiment).algorithms) == (12 if one.tuned else 1)


# measures and ratios


def test_measures_are_those_until_the_target_is_held():
    n = 8
    accuracy = np.array([0.1, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], np.float32)
    zeros = np.zeros((n, 2))
    counts = np.arange(1, n + 1)
    run = Run("a", {}, 5, counts, accuracy, np.ones(n), counts, 10 * counts, 2.0 * counts, *(zeros,) * 4)
    never = replace(run, test_accuracy=accuracy / 2)
    lost = replace(run, train_loss=np.full(n, np.nan))
    found = contest.measures([(3, run), (3, never), (3, lost)], {"3": 0.6})
    assert found["held"] == [2, None, None] and found["first"] == [3, None, 3]
    assert found["bytes_up"] == [3, 36, 36] and found["bytes_down"] == [30, 360, 360] and found["seconds"][0] == 6.0
    assert found["final"][0] == pytest.approx(0.9) and found["diverged"] == [False, False, True]


def made_up(home, dataset, one, held, draws=None, final=0.5, target=None):
    """Store the results of a contender, with these rounds; bytes and seconds go with them."""
    target = {"tuning": {"100": 0.7}, "reported": {"0": 0.7, "1": 0.72}} if target is None else target
    until = [dataset.rounds if at is None else at for at in held]
    cells.keep(
        home,
        {
            "dataset": dataset.name,
            "contender": one.name,
            "about": asdict(one),
            "identity": entries.digest(dataset, one, 12, target),
            "target": target,
            "points": 12,
            "rounds": dataset.rounds,
            "devices": 3,
            "tried": [{"values": {"local.lr": 0.1}, "held": [3], "final": 0.7, "diverged": False}] if one.tuned else [],
            "chosen": {"local.lr": 0.1} if one.tuned else {},
            "accuracy": [0.1],
            "runs": {
                "draw": draws or list(range(len(held))),
                "seed": list(range(len(held))),
                "held": held,
                "first": held,
                "final": [final] * len(held),
                "diverged": [False] * len(held),
                "bytes_up": [2 * n for n in until],
                "bytes_down": [3 * n for n in until],
                "seconds": [1.0 * n for n in until],
            },
        },
    )


def test_the_advice_follows_from_the_results(results):
    default = Contender("mine", "fedavg", "Mine", groups=["ours"])
    made_up(results, A, FEDAVG, [8, 6, 9, 7, 8])
    made_up(results, A, default, [4, 3, 4, 3, 4])
    assert "`mine`, untuned, needs fewer rounds than the best tuned of" in advice(
        Standings([A], [FEDAVG, default], results)
    )
    made_up(results, A, default, [16, 12, 18, 14, 17])
    assert "needs more rounds than" in advice(Standings([A], [FEDAVG, default], results))
    made_up(results, A, default, [4, 12, 4, 14, 9])
    assert "needs about as many rounds as" in advice(Standings([A], [FEDAVG, default], results))
    assert advice(Standings([A], [FEDAVG], results)) == "" and "stored winners" not in advice(
        Standings([A], [FEDAVG, default], results)
    )
    cell = stored(results, "tiny-a", "fedavg")
    results.keep("tiny-a-fedavg", {**cell, "tried": [*cell["tried"], {**cell["tried"][0], "held": [2]}]})
    said = " ".join(advice(Standings([A], [FEDAVG, default], results)).split())
    assert said.endswith("1 of the stored winners were chosen by an earlier measure and are to be run again.")


def test_what_to_know_is_computed(results):
    """Another draw, other datasets, a higher target, FOLB against the best, and what is not equal."""
    folb = Contender("folb", "folb", "FOLB", groups=["classic"], box={"local.lr": "log:0.001..1"}, note="odd")
    newer = replace(FEDPROX, groups=["published"], set={"select": "samples"})
    default = Contender("mine", "fedavg", "Mine", groups=["ours"])
    uniform = replace(default, name="even", groups=["ablation"], set={"select": "uniform"})
    everyone, datasets = [FEDAVG, folb, newer, default, uniform], [A, replace(A, name="other", title="Other")]
    curves = {"mine": [0.1] + 7 * [0.6], "fedavg": 3 * [0.1] + 5 * [0.5], "fedprox": 2 * [0.1] + 6 * [0.7]}
    for dataset, rounds in zip(datasets, (2, 1), strict=True):
        for one, held in zip(everyone, (6, 8, 4, rounds, 5), strict=True):
            made_up(results, dataset, one, 5 * [held], final=0.5 + held / 100)
            curve = curves.get(one.name, 8 * [0.1])
            cells.keep(results, {**stored(results, dataset.name, one.name), "accuracy": curve})
    found = Standings(datasets, everyone, results)
    known = {re.match(r"- \*\*([A-Za-z ]+)", line)[1]: line.split("**")[2] for line in arena_advice.to_know(found)}
    assert known["Not equal"] == " FOLB (`folb`): odd."
    assert known["FOLB"].count("1.33 [1.33, 1.33] times") == known["FOLB"].count("2.00 [2.00, 2.00] times") == 1
    assert known["The draw"].startswith(" 2 of 3 published contenders draw devices uniformly, `mine` by their samples.")
    assert "best: 0.83 [0.83, 0.83] (classic) and 1.25 [1.25, 1.25] (all published)." in known["The draw"]
    logs = np.log([2 / 4, 1 / 4])
    half = stats.t.ppf(0.975, 1) * logs.std(ddof=1) / math.sqrt(2)
    low, high = np.exp([logs.mean() - half, logs.mean() + half])
    assert f"0.35 [{low:.2f}, {high:.2f}] (all published)" in known["Other datasets"]
    half *= math.sqrt(3)  # one more: the spread of the ratios and the error of their mean
    low, high = np.exp([logs.mean() - half, logs.mean() + half])
    assert f"{low:.2f} to {high:.2f} (all published)" in known["Other datasets"]
    assert "On Tiny A it is 71.0 %, where the best published one ends with 58.0 %." in known["The target"]
    # 99 % of 0.7: ours never holds it in 8 rounds, and FedProx does from the third on
    assert f"`mine` needs {16 / 3:.2f} times the rounds of the fastest" in known["The target"]
    assert "This advantage is gone" not in advice(found)  # over two datasets nothing is certain


def test_the_advice_says_where_it_does_not_hold(results):
    default = Contender("mine", "fedavg", "Mine", groups=["ours"])
    uniform = replace(default, name="even", groups=["ablation"], set={"select": "uniform"})
    made_up(results, A, FEDAVG, [8, 6, 9, 7, 8])
    made_up(results, A, default, [4, 3, 4, 3, 4])
    made_up(results, A, uniform, [8, 7, 9, 6, 8])
    said = " ".join(advice(Standings([A], [FEDAVG, default, uniform], results)).split())
    assert "This advantage is gone with the uniform draw of devices that 1 of the 1 have (1.00 times)" in said
    assert "not certain" not in said
    made_up(results, A, uniform, [4, 3, 9, 3, 12])  # fewer rounds, with a wide interval
    said = " ".join(advice(Standings([A], [FEDAVG, default, uniform], results)).split())
    assert (
        "It is not certain with the uniform draw of devices that 1 of the 1 have (0.69 times)." in said
        and "gone at 99 %" in said
    )


def test_an_algorithm_with_a_mean_over_rounds_counts_once(results):
    """And of several datasets the advice has the interval of their mean, and that of a single one."""
    again = replace(FEDAVG, name="fedavg+ema", groups=["averaged"])
    default = Contender("mine", "fedavg", "Mine", groups=["ours"])
    datasets = [replace(A, name=name) for name in "abcd"]
    for dataset, held in zip(datasets, (2, 3, 4, 3), strict=True):
        made_up(results, dataset, FEDAVG, 5 * [8])
        made_up(results, dataset, again, 5 * [9])
        made_up(results, dataset, default, 5 * [held])
    found = Standings(datasets, [FEDAVG, again, default], results)
    said, whole = " ".join(advice(found).split()), found.overall("mine", ["classic", "averaged"])
    assert (
        "best tuned of 1 published algorithms, 1 of them also with a mean of the model over rounds: 0.36 times" in said
    )
    mean, single = ([f"{math.exp(value):.2f}" for value in one[1:3]] for one in (whole.elsewhere, whole.single))
    assert f"in the mean over 4 datasets. The mean over many others like them is probably {' to '.join(mean)}" in said
    assert f"on a single one it may be {' to '.join(single)} times." in said


def test_the_settings_behind_our_defaults_are_those_of_the_page_on_accord():
    """The page has two searches, and the note has their sum."""
    text = (ROOT / "docs/accord.md").read_text()
    note = next(one.note for one in entries.contenders() if one.name == "accord")

    def counts(text):
        return [int(n.replace(",", "")) for n in re.findall(r"(?:about|some) ([\d,]+) settings", text)]

    assert len(counts(text)) == 2 and counts(note) == [sum(counts(text))]


def test_ratios_and_intervals_are_those_by_hand(results):
    ours = replace(FEDAVG, name="ours", title="Ours", groups=["ours"])
    made_up(results, A, FEDAVG, [8, 6, None])
    made_up(results, A, FEDPROX, [8, 8, 8], final=0.6)
    made_up(results, A, ours, [4, 2, 8], final=0.55)
    found = Standings([A], [FEDAVG, FEDPROX, ours], results)
    logs = np.log(np.array([4 / 8, 2 / 8, 8 / 8]))  # to fedprox: fedavg has 8, 6 and twice 8
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
    (ratio,) = found.ratios("ours", ["classic"])
    assert (ratio.dataset, ratio.rival, ratio.whole) == ("tiny-a", "fedprox", True)
    assert ratio.effect == pytest.approx((logs.mean(), logs.mean() - half, logs.mean() + half, 3))
    assert found.ratio("tiny-a", "ours", "fedavg").value == pytest.approx(np.log([4 / 8, 2 / 6, 8 / 16]).mean())
    assert found.ratio("tiny-a", "ours", "fedavg", "bytes").value == pytest.approx(np.log([4 / 8, 2 / 6, 1 / 2]).mean())
    (accuracy,) = found.ratios("ours", ["classic"], "final")
    assert accuracy.rival == "fedprox" and accuracy.effect.value == pytest.approx(-0.05)
    assert standings.text(accuracy.effect, "final").startswith("-5.0 [")


def test_two_seeds_of_a_draw_are_one_piece_of_evidence(results):
    draws = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    rounds = [4, 4, 2, 2, 4, 4, 2, 2, 4, 4]
    made_up(results, A, FEDAVG, [8] * 10, draws=draws)
    made_up(results, A, FEDPROX, rounds, draws=draws)
    effect = Standings([A], [FEDAVG, FEDPROX], results).ratio("tiny-a", "fedprox", "fedavg")
    sd = np.std(np.log(rounds[::2]), ddof=1)
    assert effect.high - effect.value == pytest.approx(stats.t.ppf(0.975, 4) * sd / math.sqrt(5))


def test_fewer_than_five_draws_are_taken_as_pairs(results):
    made_up(results, A, FEDAVG, [8, 8, 8, 8], draws=[0, 0, 1, 1])
    made_up(results, A, FEDPROX, [4, 4, 2, 2], draws=[0, 0, 1, 1])
    effect = Standings([A], [FEDAVG, FEDPROX], results).ratio("tiny-a", "fedprox", "fedavg")
    assert effect.high - effect.value == pytest.approx(stats.t.ppf(0.975, 3) * np.std(np.log([4, 4, 2, 2]), ddof=1) / 2)


def test_over_datasets_it_is_the_mean_of_logarithms(results):
    for dataset, held in ((A, [2, 2]), (replace(A, name="other"), [8, 8])):
        made_up(results, dataset, FEDAVG, [4, 4])
        made_up(results, dataset, DEFAULT, held)
    found = Standings([A, replace(A, name="other")], [FEDAVG, DEFAULT], results).overall("plain", ["classic"])
    assert found.effect == pytest.approx((0, 0, 0, 4))


def goals(home, datasets, ours, default=None):
    """The goals' words if fedavg needs 8 rounds everywhere and ours these."""
    tuned = replace(FEDAVG, name="ours", title="Ours", groups=["ours"])
    for dataset, held in zip(datasets, ours, strict=True):
        made_up(home, dataset, FEDAVG, 3 * [8])
        made_up(home, dataset, tuned, 3 * [held])
        if default:
            made_up(home, dataset, DEFAULT, 3 * [default])
    return [goal.met for goal in Standings(datasets, [FEDAVG, tuned, DEFAULT], home).goals()]


def test_goals_follow_from_the_numbers(results):
    other = replace(A, name="other", title="Other")
    assert goals(results, [A, other], [4, 2], 4) == [True, True, False]  # its defaults: 1.41 times ours tuned
    assert goals(results, [A, other], [4, 4], 5) == [True, True, True]
    assert goals(results, [A, other], [9, 1], 5) == [False, True, False]  # on one dataset it is slower
    assert goals(results, [A, other], [8, 7], 8) == [False, False, False]
    results.drop(["other-fedavg"])
    tuned = replace(FEDAVG, name="ours", title="Ours", groups=["ours"])
    partial = Standings([A, other], [FEDAVG, tuned, DEFAULT], results)
    assert [goal.met for goal in partial.goals()] == [None, None, None]
    assert "over 1 of 2 datasets" in partial.goals()[0].reached


# pages and the command


def test_pages_from_partial_results(home, tmp_path):
    left = replace(A, name="far", title="Far", left_out="too large")
    absent = replace(A, name="absent", title="Absent")
    found = Standings([A, B, absent, left], [FEDAVG, FEDPROX, DEFAULT, replace(FEDAVG, name="more")], home, 2)
    arena_pages.write(found, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "- Far: too large." in text and "- Not run on Absent: everyone." in text
    assert "- Not run on Tiny A: more." in text and "not decided: results are missing" in text
    assert "| FedAvg (`more`) | not run | not run | not run |" in text
    assert (tmp_path / "arena.png").read_bytes().startswith(b"\x89PNG")
    assert "| `tiny-a` | local.lr = " in (tmp_path / "settings.md").read_text()
    assert "with its defaults" in (tmp_path / "measures.md").read_text()
    json.dumps(standings.document(found), allow_nan=False)


def test_pages_without_any_results(tmp_path):
    arena_pages.write(Standings([A], [FEDAVG], Results(tmp_path / FILE)), tmp_path)
    assert "Not run on Tiny A: everyone." in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "arena.png").exists()


DATASETS = """
[[dataset]]
name = "tiny"
title = "Tiny"
dataset = "synthetic_1_1"
rounds = 8
set = { sizes = [20, 30, 40], "select.K" = 2, low = 1, high = 2 }
tuning = { seeds = [7] }
reported = { seeds = [0, 1] }
"""


SECOND = DATASETS.replace('"tiny"', '"second"').replace("synthetic_1_1", "absent.csv")


def test_ones_own_contender_takes_part_with_one_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file.toml").write_text(DATASETS)
    Path("my.py").write_text("import folb\n\nmine = folb.algorithms.fedavg()\n")
    command = ["arena", "--datasets", "file.toml", "--points", "2", "--contenders", "fedavg", "--out", "here"]
    own = ["--contender", "my.py:mine", "--box", "local.lr=log:0.001..1"]
    assert main([*command, *own, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [cell["contender"] for cell in document["cells"]] == ["fedavg", "mine"]
    (ratio,) = [one for one in document["ratios"] if (one["measure"], one["against"]) == ("rounds", "classic")]
    assert (ratio["best"], ratio["value"], ratio["all_rivals_run"]) == ("fedavg", 0.0, False)  # it is FedAvg
    assert main(["arena", "--datasets", "file.toml", "--points", "2", "--pages-only", "--out", "here"]) == 0
    assert "mine" in capsys.readouterr().out and "`mine`, tuned" in Path("here/README.md").read_text()
    Path("my.py").write_text("import folb\n\nmine = folb.algorithms.fedprox()\n")
    mine = entries.own("my.py:mine", {"local.lr": "log:0.001..1"})
    assert Standings(
        entries.datasets(Path("file.toml")), [FEDAVG, mine], Results(Path("here") / FILE), 2
    ).stale  # another file now


def blocks(kind):
    """The blocks of the guide in a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / "docs/guides/arena.md").read_text(), flags=re.M | re.S)


def test_the_guides_own_table_and_own_npz_with_seeds_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,), (text,) = blocks("python"), blocks("toml")
    exec(code, {})
    Path("my_datasets.toml").write_text(text.replace("rounds = 20", "rounds = 4"))
    command = ["arena", "--datasets", "my_datasets.toml", "--contenders", "fedavg", "--points", "2"]
    assert main(command) == 0
    out, said = capsys.readouterr()
    assert said.count("hospitals.csv does not say what to test on") == 1  # of its three runs
    # only who was run is in the table, and a goal that nobody was run for is not told
    assert re.fullmatch(r"contender +hospitals +phones\nfedavg( +\S+.*)\n\nin arena: .*\n", out)
    found = Results(tmp_path / "arena" / FILE)
    assert list(found.cells()) == ["hospitals-fedavg", "phones-fedavg"]
    for cell in found.cells().values():
        assert (cell["runs"]["seed"], cell["runs"]["draw"], cell["devices"]) == ([0, 1, 2], [0, 0, 0], 8)
        assert set(cell["target"]["reported"]) == {"0"} and len(cell["tried"]) == 2
    page = Path("arena/README.md").read_text()
    assert "seeds 0 to 2" in page and not re.search("## Goals|MNIST|make pages", page)
    assert "folb arena --datasets my_datasets.toml --only hospitals --contenders fedavg,folb " in page
    assert "folb arena --datasets my_datasets.toml --pages-only " in page
    before = found.path.read_bytes()
    assert main(command) == 0 and "phones, fedavg is done already (2 of 2)" in capsys.readouterr().err
    assert main(["arena", "--pages-only"]) == 2 and Path("arena/README.md").read_text() == page
    assert "2 stored cells are of hospitals, phones: add --datasets FILE" in capsys.readouterr().err
    assert main([*command[:-1], "3"]) == 2  # a trial with another budget
    error = capsys.readouterr().err
    assert "points = 3: hospitals, fedavg is stored with 2: give another --out or --results, or --points 2" in error
    assert found.path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[dataset]]", "[[datasets]]", "file.toml: datasets = ['datasets']: should be tables, and nothing else"),
        (DATASETS, "", "file.toml: datasets = []: should be tables"),
        (DATASETS, DATASETS * 2, "file.toml: dataset = ['tiny', 'tiny']: should have different names"),
        ('title = "Tiny"\n', "", "lacks title"),
        ("tuning = ", "tunning = ", "file.toml: key of dataset = 'tunning': did you mean 'tuning'"),
        ("seeds = [7]", "seeds = 7", "tiny: tuning: seeds of trials = 7: should be a list of whole numbers"),
        ("seeds = [7]", "", "tiny: tuning: keys of trials = []: lacks seeds"),
        ("seeds = [7]", "seeds = [1]", "file.toml: tiny: tuning = [1]: should be none of the seeds that are reported"),
        ('"synthetic_1_1"', '"absent.csv"', "file.toml: tiny: dataset = 'absent.csv': no such file"),
        (DATASETS, DATASETS + SECOND, "file.toml: second: dataset = 'absent.csv': no such file"),
        ("rounds = 8", "rounds = 0", "rounds = 0: should be at least 1"),
        ('"select.K" = 2', "kay = 2", "set = 'kay'"),
        ('"synthetic_1_1"', '"own.npz"', "sizes = [20, 30, 40]: is a setting of synthetic"),
        ("rounds = 8\nset = {", 'rounds = 8\nmodel = "linear"\nset = { regression = true } #', "dataset = 'own.npz'"),
    ],
)
def test_mistakes_in_a_file_of_datasets_are_a_line(old, new, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert old in DATASETS
    text = DATASETS.replace(old, new)
    if "own.npz" in message:
        text = text.replace("synthetic_1_1", "own.npz")
    np.savez("own.npz", x=np.ones((40, 2)), y=np.arange(40) % 2, device=np.arange(40) % 4)
    Path("file.toml").write_text(text)
    assert main(["arena", "--datasets", "file.toml", "--contenders", "fedavg", "--points", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("folb: error: ") == 1
    assert not Path("arena", FILE).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "cifar"], "only = 'cifar': should fit one of"),
        (["--contenders", "fedavg,flob"], "contenders = 'flob': should fit one of"),
        (["--box", "local.lr=log:0.001..1"], "is for --contender"),
        (["--pages-only"], "has no results to make pages from"),
        (["--datasets", "absent.toml"], "datasets = 'absent.toml': cannot be read"),
        (["--contender", "folb", "--box", "local.lr=0.1..1"], "should span at least 3 decades"),
        (["--only", "sent140"], "should fit a dataset that is not left out"),
        (["--points", "0"], "points = 0: should be a whole number from 1"),
    ],
)
def test_mistakes_are_named(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["arena", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_damaged_results_are_named(results):
    results.keep("tiny-a-fedavg", {"about": asdict(FEDAVG), "runs": 3})
    with pytest.raises(InputError, match=r"tiny-a-fedavg': is damaged in .*`--drop tiny-a-fedavg` forgets it"):
        Standings([A], [FEDAVG], results)


def test_the_committed_pages_are_those_of_the_stored_results(tmp_path):
    """And the advice of the README is theirs."""
    committed = ROOT / "docs" / "arena"
    found = Standings(
        entries.datasets(), entries.contenders(), Results(ROOT / "studies" / "results" / "arena.jsonl.gz")
    )
    assert not found.stale
    arena_pages.write(found, tmp_path)
    for name in ("README.md", "measures.md", "settings.md"):
        assert (tmp_path / name).read_text() == (committed / name).read_text(), f"make pages: {name}"
    assert advice(found) in (ROOT / "README.md").read_text()
