"""The reproduction: experiment files, verdicts on made-up results, pages from stored ones, and the command."""

import copy
import io
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from folb.cli.main import main
from folb.errors import InputError
from folb.experiments import execute
from folb.experiments.experiment import Experiment
from folb.report import figures
from folb.report.looks import looks
from folb.store import directory
from folb_studies import draws
from folb_studies.paper import advice, arms, figure_files, pages, pictures, verdicts
from folb_studies.paper.figure_files import Arm, Claim, Front, Sentence
from folb_studies.results import FILE, Results

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[2]
KNOWN = ROOT / "studies" / "results" / "reproduction.jsonl.gz"


# made-up results


def made_up(ours, theirs, *, draws=None, rounds=100, metric="rounds", arm="a", printed=None, varied=None):
    """The results of an arm with one value a run for folb and fedavg."""

    def algorithm(values):
        n = len(values)
        runs = {name: [0.5] * n for name in ("final", "best", "mean", "loss")}
        runs |= {"rounds": [10] * n, "drops": [0] * n, "bytes_up": [1] * n, "bytes_down": [1] * n}
        curve = {str(q): [0.1, 0.5] for q in arms.QUANTILES}
        runs |= {"draw": draws or [0] * n, "seed": list(range(n)), metric: list(values)}
        return {"accuracy": curve, "loss": curve, "runs": runs}

    return {
        "figure": "made_up",
        "arm": arm,
        "name": arm.upper(),
        "quick": False,
        "identity": "0123456789abcdef",
        "experiment": {
            "dataset": "synthetic_1_1",
            "model": "logistic",
            "system": "uniform",
            "algorithms": ["folb", "fedavg"],
            "rounds": rounds,
            "seeds": list(range(len(ours))),
            "target": 0.7,
            "evaluate_every": 1,
            "set": {"folb": {"select.K": 10, "local.unit": "step"}},
        },
        "draws": len(set(draws)) if draws else 0,
        "note": "",
        "devices": 30,
        "ran_on": [{"device": "cpu", "folb": "0.1.0", "jax": "0.10.2"}],
        "chosen": [],
        "printed": printed or {},
        "varied": varied or {},
        "evaluated_rounds": [1, 2],
        "algorithms": {"folb": algorithm(ours), "fedavg": algorithm(theirs)},
    }


def claim(**given):
    given = {"metric": "rounds", "better": "folb", "worse": ["fedavg"], "arms": ["*"]} | given
    return Claim(figure="made_up", id="c", says="It is so.", **given)


def judged(made, *documents):
    named = [Arm("made_up", document["arm"], document["name"], False) for document in documents]
    return verdicts.judge(made, named, {document["arm"]: document for document in documents})


WIN = made_up([10, 12, 9, 11, 10], [20, 25, 19, 21, 22])
LOSS = made_up([20, 25, 19, 21, 22], [10, 12, 9, 11, 10], arm="b")
TIE = made_up([10, 20, 10, 20, 15], [20, 10, 20, 10, 15], arm="c")


def test_a_clear_win_holds_with_its_effect():
    verdict = judged(claim(), WIN)
    (condition,) = verdict.conditions
    assert verdict.word == verdict.text == "holds"
    expected = np.exp(np.mean(np.log(np.array([20, 25, 19, 21, 22]) / [10, 12, 9, 11, 10])))
    assert math.exp(condition.effects["fedavg"].value) == pytest.approx(expected)
    assert 1.9 < math.exp(condition.effects["fedavg"].low) < expected < math.exp(condition.effects["fedavg"].high) < 2.3
    assert verdict.effect.startswith("2.06 [")


@pytest.mark.parametrize(
    "document, note", [(LOSS, "behind in 1 of 1 conditions"), (TIE, "no clear difference")], ids=["loss", "tie"]
)
def test_a_clear_loss_and_a_tie_do_not_hold(document, note):
    assert judged(claim(), document).text == f"does not hold ({note})"


def test_a_variant_that_was_not_run_is_not_tested_with_another_ones_runs():
    simple = copy.deepcopy(WIN)
    simple["experiment"]["set"]["fedavg"] = {"rule.weights": "equal"}
    verdict = judged(claim(under=["rule.weights=equal", "rule.weights=samples"]), simple)
    assert [condition.name for condition in verdict.conditions] == ["A, rule.weights=equal"]
    assert verdict.untested == ["A, rule.weights=samples"]
    assert verdict.text == "holds (1 more not tested)"


def test_a_model_that_learns_nothing_is_not_stable():
    """It has fewer drops than the other, and no accuracy to lose."""
    dead = made_up([0, 0, 0], [5, 6, 7], metric="drops")
    dead["algorithms"]["folb"]["runs"]["mean"] = [0.1, 0.1, 0.1]
    made = claim(metric="drops", keeping={"mean": 0.02})
    assert judged(made, made_up([0, 0, 0], [5, 6, 7], metric="drops")).word == "holds"
    verdict = judged(made, dead)
    assert verdict.text == "does not hold (so only at the cost of the mean accuracy in 1 of 1 conditions)"


def test_every_opponent_is_shown_and_counts():
    """Ahead of one and behind the other is not a win, and both are reported."""
    both = copy.deepcopy(WIN)
    both["algorithms"]["fedprox"] = copy.deepcopy(LOSS["algorithms"]["fedavg"])
    both["algorithms"]["fedprox"]["runs"]["rounds"] = [5, 6, 4, 5, 5]
    verdict = judged(claim(worse=["fedavg", "fedprox"]), both)
    assert verdict.text == "does not hold (behind at least one of them in 1 of 1 conditions)"
    effects = verdict.conditions[0].effects
    assert effects["fedavg"].low > 0 > effects["fedprox"].high
    assert [verdicts.comparison(verdict.claim, effect) for effect in effects.values()] == ["ahead", "behind"]
    assert " times (against fedprox) to 2.06 [" in verdict.effect and verdict.effect.endswith("times (against fedavg)")
    # on the page the verdict stands in the condition's first row alone, and each row says what it says by itself
    rows = [line for line in pages._verdict(verdict) if line.startswith("|")][2:]
    assert re.fullmatch(r"\| A \| does not hold \| fedavg \| 2.06 .* \| 5 \| ahead \|", rows[0])
    assert re.fullmatch(r"\|  \|  \| fedprox \| 0.4.* \| 5 \| behind \|", rows[1])


def test_rounds_that_most_never_reach_are_marked():
    verdict = judged(claim(), made_up([None, None, 90], [None, None, None]))
    assert verdict.conditions[0].note == "most runs never arrive"


@pytest.mark.parametrize(
    "held, said",
    [
        (["a, x, s", "b, x, s"], "s"),
        (["a, x, s"], "a, s"),
        (["a, x, s", "b, x, r"], "a, s; b, r"),
    ],
)
def test_conditions_are_named_by_what_they_alone_have(held, said):
    assert verdicts.common(held, ["a, x, s", "b, x, s", "a, x, r", "b, x, r"]) == said


def test_one_arm_of_several_is_a_named_condition():
    verdict = judged(claim(), LOSS, WIN, TIE)
    assert verdict.word == "holds only under a condition"
    assert verdict.text == "holds only under: A (1 of 3 conditions)"
    assert verdict.effect.startswith("from 0.48") and " to 2.06" in verdict.effect


def test_a_run_that_never_arrives_counts_as_one_round_more():
    never = made_up([50, 50, 50], [None, None, None], rounds=99)
    effect = judged(claim(), never).conditions[0].effects["fedavg"]
    assert math.exp(effect.value) == pytest.approx(2) and effect.runs == 3
    nobody = judged(claim(), made_up([None] * 3, [None] * 3))
    assert nobody.text == "does not hold: no run of any algorithm arrives" and len(nobody.unreached) == 1


def test_no_verdict_from_fewer_than_three_runs_nor_without_results():
    assert judged(claim(), made_up([1, 1], [9, 9])).word == "not tested here"
    verdict = verdicts.judge(claim(), [Arm("made_up", "a", "A", False)], {"a": None})
    assert (verdict.word, verdict.untested, verdict.effect) == ("not tested here", ["A"], "")


@pytest.mark.parametrize(
    "metric, ours, theirs",
    [
        ("final", [0.9, 0.8, 0.85], [0.7, 0.7, 0.7]),
        ("loss", [0.1, 0.2, 0.3], [1e3, None, 1e20]),  # diverged: as 1000
        ("drops", [0, 1, 0], [5, 6, 7]),
        ("bytes_up", [1, 1, 1], [2, 2, 2]),
    ],
)
def test_every_metric_has_its_direction(metric, ours, theirs):
    better, worse = made_up(ours, theirs, metric=metric), made_up(theirs, ours, metric=metric)
    assert judged(claim(metric=metric), better).word == "holds"
    assert judged(claim(metric=metric), worse).word == "does not hold"


def test_sameness_has_a_margin():
    alike = made_up([0.80, 0.81, 0.79], [0.79, 0.80, 0.79], metric="mean")
    assert judged(claim(metric="mean", same=0.03), alike).word == "holds"
    assert judged(claim(metric="mean", same=0.005), alike).word == "does not hold"
    twice = made_up([2, 2, 2], [1, 1, 1], metric="bytes_up")
    verdict = judged(claim(metric="bytes_up", better="fedavg", worse=["folb"], same=0.05), twice)
    assert (verdict.word, verdict.effect) == ("does not hold", "2 [2, 2] times")


def test_thresholds():
    assert judged(claim(at_least=1.5), WIN).word == "holds"
    assert judged(claim(at_least=3.0), WIN).word == "does not hold"


def test_an_effect_larger_than_another():
    small = made_up([10, 12, 9, 11, 10], [11, 13, 10, 12, 11], arm="b")
    larger = claim(than={"arm": "b"})
    everything = {"a": WIN, "b": small}
    assert verdicts.judge(larger, [Arm("made_up", "a", "A", False)], everything).word == "holds"
    smaller = claim(than={"arm": "a"})
    assert verdicts.judge(smaller, [Arm("made_up", "b", "B", False)], everything).word == "does not hold"


def test_every_one_of_the_others_is_to_be_beaten():
    document = made_up([10] * 4, [20] * 4)
    beaten = made_up([10] * 4, [5] * 4)["algorithms"]["fedavg"]
    document["algorithms"]["fedprox"] = beaten
    verdict = judged(claim(worse=["fedavg", "fedprox"]), document)
    assert verdict.word == "does not hold"
    assert set(verdict.conditions[0].effects) == {"fedavg", "fedprox"}


def test_variants_are_conditions():
    document = made_up([10] * 4, [20] * 4)
    simple, samples = document["algorithms"].pop("fedavg"), made_up([10] * 4, [5] * 4)["algorithms"]["fedavg"]
    document["algorithms"] |= {"fedavg rule.weights=equal": simple, "fedavg rule.weights=samples": samples}
    document["experiment"]["set"]["fedavg"] = {"rule.weights": ["equal", "samples"]}
    verdict = judged(claim(under=["rule.weights=equal", "rule.weights=samples"]), document)
    assert verdict.text == "holds only under: rule.weights=equal (1 of 2 conditions)"
    with pytest.raises(InputError, match=r"fedavg rule\.weights=samples"):
        judged(claim(), document)


def test_printed_numbers_and_the_nearest_reading():
    printed = {"folb": 10, "fedavg": 20}
    near = made_up([10, 11, 9], [20, 22, 19], printed=printed, varied={"local.unit": "epoch"})
    far = made_up([40, 44, 36], [20, 22, 19], printed=printed, varied={"local.unit": "step"}, arm="b")
    assert judged(claim(metric="printed", at_most=1.5), near).word == "holds"
    assert judged(claim(metric="printed", at_most=1.5), far).word == "does not hold"
    first, second = verdicts.nearest([far, near], [""])
    assert (first.combination, first.rows, first.ordered, first.pairs) == ("local.unit=epoch, ", 1, 1, 1)
    assert first.factor == pytest.approx(1) and second.factor == pytest.approx(2) and second.ordered == 0


NEAR = made_up([0.80, 0.81, 0.83, 0.82], [0.5] * 4, metric="final")


def published(number, **given):
    return claim(**({"metric": "final", "worse": [], "published": number, "same": 0.03} | given))


def test_a_published_number_that_one_of_our_runs_could_have_given():
    verdict = judged(published(0.819, source="They"), NEAR)
    (condition,) = verdict.conditions
    (against,) = condition.effects
    assert verdict.text == "holds" and against == "They: 81.9 %" and condition.ours == "81.50 ± 1.29 % (80.0 to 83.0)"
    effect = condition.effects[against]
    assert effect.value == pytest.approx(-0.004) and effect.runs == 4
    # Student's interval of the difference between the mean of four and one more run
    half = 3.1824 * 0.01291 * math.sqrt(1 / 4 + 1)
    assert (effect.high - effect.low) / 2 == pytest.approx(half, rel=1e-3)
    assert "-0.4 [" in verdict.effect and verdict.effect.endswith("points")


def test_a_published_number_out_of_our_reach_or_too_far():
    assert judged(published(0.90), NEAR).text == "does not hold"  # none of ours comes near
    assert judged(published(0.84), NEAR).word == "holds"
    assert judged(published(0.84, same=0.02), NEAR).word == "does not hold"  # could be, but it is too far
    assert judged(published(0.83, spread=0.0), NEAR).word == "holds"
    alike = made_up([0.815, 0.816, 0.815], [0.5] * 3, metric="final")
    assert judged(published(0.82, spread=0.002), alike).word == "holds"
    assert judged(published(0.82, spread=0.0001), alike).word == "does not hold"


def test_published_rounds_and_runs_that_never_arrive():
    made = published(87, metric="rounds", same=0.5, source="They")
    (condition,) = judged(made, made_up([60, 87, 126], [1] * 3)).conditions
    assert (
        condition.holds and condition.ours == "87 (60 to 126) rounds" and list(condition.effects) == ["They: 87 rounds"]
    )
    assert math.exp(condition.effects["They: 87 rounds"].value) == pytest.approx(1, rel=0.01)
    twice = judged(made, made_up([40, 43, 44], [1] * 3)).conditions[0]
    assert not twice.holds and math.exp(twice.effects["They: 87 rounds"].value) == pytest.approx(2.06, rel=0.01)
    some = judged(made, made_up([60, None, None], [1] * 3)).conditions[0]
    assert some.ours == "> 100 (60 to > 100) rounds" and some.note == "most runs never arrive"
    assert judged(made, made_up([None] * 3, [1] * 3)).text == "does not hold: no run of any algorithm arrives"
    assert judged(made, made_up([87, 87], [1, 1])).word == "not tested here"


def test_a_published_number_is_compared_over_draws():
    """Runs of one draw are not independent evidence."""
    values = [0.80, 0.80, 0.84, 0.84, 0.82, 0.82]
    one = judged(published(0.82), made_up(values, [0.5] * 6, metric="final")).conditions[0]
    three = judged(published(0.82), made_up(values, [0.5] * 6, metric="final", draws=[0, 0, 1, 1, 2, 2])).conditions[0]
    (a,), (b,) = one.effects.values(), three.effects.values()
    assert a.value == b.value and b.high - b.low > 1.5 * (a.high - a.low)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"metric": "loss"}, "metric = 'loss'"),
        ({"published": 81.9}, "published = 81.9: should be an accuracy of at most 1"),
        ({"metric": "rounds", "published": 0}, "published = 0: should be more than 0"),
        ({"worse": ["fedavg"]}, "nothing to compare it with"),
        ({"better": ""}, "should name one algorithm"),
        ({"same": None}, "same = None: should say how close"),
        ({"spread": -0.1}, "spread = -0.1"),
    ],
)
def test_a_claim_about_a_published_number_is_checked(given, message):
    with pytest.raises(InputError, match=message):
        verdicts.check(
            published(**({"number": 0.8} | {"number" if k == "published" else k: v for k, v in given.items()})),
            [Arm("made_up", "a", "A", False)],
        )
    with pytest.raises(InputError, match=r"spread = 0.1: should come with `published`"):
        verdicts.check(claim(spread=0.1), [Arm("made_up", "a", "A", False)])


def test_the_interval_is_clustered_by_draw_and_repeats():
    """Ten runs of each of three draws that differ: the runs of one draw are not independent evidence."""
    values = np.repeat([0.0, 1.0, 2.0], 10) + np.random.default_rng(0).normal(0, 0.01, 30)
    by_draw, by_run = verdicts.interval(values, np.repeat([0, 1, 2], 10)), verdicts.interval(values, np.zeros(30))
    assert by_draw == verdicts.interval(values, np.repeat([0, 1, 2], 10))
    assert by_draw.value == by_run.value == pytest.approx(values.mean())
    assert by_draw.high - by_draw.low > 2 * (by_run.high - by_run.low)
    assert by_draw.low < by_draw.value < by_draw.high


def test_the_interval_covers_and_narrows():
    rng = np.random.default_rng(1)
    few, many = rng.normal(0, 1, (200, 10)), rng.normal(0, 1, (50, 160))
    found = [verdicts.interval(values, np.zeros(10)) for values in few]
    assert 0.92 < np.mean([effect.low < 0 < effect.high for effect in found]) < 0.98
    width = np.mean([effect.high - effect.low for effect in found])
    narrow = np.mean([effect.high - effect.low for effect in (verdicts.interval(v, np.zeros(160)) for v in many)])
    assert 3 < width / narrow < 5


# the experiment files


def test_there_is_a_file_for_every_figure_and_table():
    assert figure_files.names() == ["table1", *(f"fig{n}" for n in range(2, 12)), "theory"]
    home = ROOT / "studies/src/folb_studies/paper/experiments"
    assert sorted(path.name for path in home.glob("*.toml")) == sorted(
        [f"{name}.toml" for name in (*figure_files.names(), figure_files.FRONT)]
    )


def test_the_files_beyond_the_paper_are_a_group_of_their_own():
    names = ["averages", "codecs", "fedlab", "fedml", "mcmahan", "niid_bench", "servers", "sketch", "waiting"]
    assert figure_files.outside() == names
    assert figure_files.chosen(["outside", "fig2"]) == [*figure_files.outside(), "fig2"]
    assert figure_files.chosen(["all"]) == figure_files.names()
    for name in figure_files.outside():
        figure = figure_files.read(name)
        everything = [*figure.arms, *figure_files.used(figure)]
        about = {arm.slug for made in figure.claims for arm in figure.matching(made.arms, everything)}
        assert about == {arm.slug for arm in everything} and figure.source != "The paper"
        for made in figure.claims:
            verdicts.check(made, figure.matching(made.arms, everything))
        others = [made for made in figure.claims if made.published is not None]
        own = name in ("averages", "codecs", "servers", "sketch", "waiting")  # claims of our own
        assert len(others) == (0 if own else len(figure.claims))
        for made in others:
            assert made.source
            assert re.search(rf"{100 * made.published:.2f}|{made.published:g}|{100 * made.published:g}", made.says)


@pytest.mark.parametrize("name", [*figure_files.names(), *figure_files.outside()])
def test_experiment_files_are_sound(name):
    """Every arm is an experiment, searched on what is not reported; every claim is about some arm, and compares."""
    for quick in (False, True):
        figure = figure_files.read(name, quick)
        everything = [*figure.arms, *figure_files.used(figure, quick)]
        for arm in figure.arms:
            if arm.check:
                continue
            experiment = Experiment(**arm.given)
            seeds = len(experiment.seeds) * max(arm.draws, 1)
            assert seeds >= 3
            if not quick and name not in figure_files.outside():
                few = {"shakespeare": 3, "sent140": 3}.get(experiment.dataset, 5 if experiment.model == "cnn" else 10)
                assert seeds >= few
                assert arm.draws >= 10 or not experiment.dataset.startswith("synthetic")
                assert arm.draws >= 5 or experiment.dataset != "mnist"  # one partition says nothing of others
            for search in arm.searches:
                assert not set(search.draws) & set(range(arm.draws))
                assert search.draws or not set(search.seeds) & set(experiment.seeds)
        for made in figure.claims:
            chosen = figure.matching(made.arms, everything)
            assert quick or len(chosen) >= len(made.arms)
            assert made.metric in verdicts.METRICS
            unknown = verdicts.judge(made, chosen, dict.fromkeys(arm.id for arm in everything))
            assert unknown.word == "not tested here"


def test_the_synthetic_arms_plan():
    """All that can go wrong before a run: names, settings, searches."""
    made = set()
    for name in ("table1", "fig11"):
        for arm in figure_files.read(name).arms:
            if arm.given["dataset"].startswith("synthetic"):
                planned = draws.plan_of(next(iter(draws.draws_of(arm.given, range(1))))[1])
                assert planned.federation.N == 30
                made.add(planned.model)
    assert len(made) == 1  # so all draws share a compiled program


def test_an_unknown_name_is_told_the_known(capsys):
    assert main(["reproduce", "fig99"]) == 2
    error = capsys.readouterr().err
    assert "reproduce = 'fig99'" in error and "table1" in error and "fig11" in error


@pytest.mark.parametrize(
    "text, message",
    [
        ("title = ", "cannot be read"),
        ('title = "x"\npaper = "y"\ncolour = "red"', "colour"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\nround = 3', "rounds"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "A b"', "id of an arm"),
        ('title = "x"\npaper = "y"\n[[claim]]\nid = "a"', "claim"),
        ('title = 3\npaper = "y"', "title of figure = 3: should be a text"),
        ('title = "x"\npaper = "y"\narm = 3', r"should be tables: \[\[arm\]\]"),
        ('title = "x"\npaper = "y"\nname = "z"', "should not be given"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\ndraws = "2"', "draws of arm = '2': should be a whole number"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\nset = 3', "set of arm = 3: should be a table"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\nvary = { unit = "step" }', "vary of arm"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\nprinted = { folb = 0 }', "whole numbers from 1 on"),
        ('title = "x"\npaper = "y"\n[[arm]]\nid = "a"\nsearch = [3]', "search of arm"),
        (
            'title = "x"\npaper = "y"\n[[claim]]\nid = "a"\nsays = "s"\narms = "a"',
            "arms of claim = 'a': should be a list",
        ),
    ],
)
def test_a_file_of_ones_own_is_checked(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        figure_files.read(str(path))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"metric": "speed"}, "metric = 'speed'"),
        ({"better": ""}, "should both name algorithms"),
        ({"at_least": -1.0}, "should be more than 0"),
        ({"at_most": 2.0}, "with the metric 'printed'"),
        ({"metric": "printed"}, "with the metric 'printed'"),
        ({"metric": "value"}, "should be a metric of checks for checks"),
        ({"than": {"amr": "a"}}, "key of than"),
        ({"keeping": {"rounds": 1.0}}, "key of keeping"),
        ({"under": ["simple"]}, "setting=value"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused_before_anything_runs(given, message):
    with pytest.raises(InputError, match=message):
        verdicts.check(claim(**given), [Arm("made_up", "a", "A", False)])


def test_a_claim_about_no_arm_and_one_about_no_setting_are_refused():
    with pytest.raises(InputError, match="should fit an arm"):
        verdicts.check(claim(), [])
    with pytest.raises(InputError, match="should name a setting"):
        judged(claim(under=["untt=epoch"]), WIN)


@pytest.mark.parametrize(
    "draws, given, search",
    [
        (3, {}, {"draws": [2, 3], "seeds": [9]}),
        (3, {}, {"seeds": [9]}),
        (0, {}, {"seeds": [2, 9]}),
        (0, {}, {"draws": [0], "seeds": [1]}),
        (0, {"set": {"draw": 7}}, {"draws": [7], "seeds": [0]}),
    ],
)
def test_nothing_is_searched_on_what_is_reported(draws, given, search):
    made = figure_files.Search("folb", {"local.mu": [0.1]}, **search)
    arm = Arm("f", "a", "A", False, {"dataset": "synthetic_1_1", "seeds": 3} | given, draws, [made])
    with pytest.raises(InputError, match="that are reported"):
        arms.execute_plan(arm, lambda planned, about: pytest.fail("it was run"))


def test_two_files_of_one_name_and_a_name_of_ours_are_refused(tmp_path):
    for name in ("a/x.toml", "b/x.toml", "table1.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for wanted in (["a/x.toml", "b/x.toml"], ["table1.toml"]):
        with pytest.raises(InputError, match="that no other figure has"):
            figure_files.chosen([str(tmp_path / name) for name in wanted])
    with pytest.raises(InputError, match="nosuch"):
        figure_files.chosen(["all", "nosuch"])


# pages


def an_arm(**given):
    return Arm("made_up", "a", "A", False, {"dataset": "synthetic_1_1", "seeds": 5} | given)


@pytest.fixture
def results(tmp_path):
    """A store without results."""
    return Results(tmp_path / FILE)


def stored(results, document, **given):
    keep(results, document)
    return arms.stored(results, an_arm(**given))


def keep(results, document):
    results.keep(f"{document['figure']}-{document['arm']}", document)


def test_results_are_used_only_by_the_experiment_they_are_of(results):
    """Those of an earlier experiment file stay where they are, and the arm counts as not run."""
    assert stored(results, WIN)["identity"] == WIN["identity"]
    assert stored(results, WIN, set={"select.K": 10, "folb": {"local.unit": "step"}})["identity"] == WIN["identity"]
    for given, why in [
        ({"target": 0.9}, "another target than 0.9"),
        ({"rounds": 50}, "another rounds than 50"),
        ({"seeds": 4}, "other draws or seeds"),
        ({"dataset": "synthetic_iid"}, "another dataset than synthetic_iid"),
        ({"algorithms": ["folb"]}, "another algorithms than ('folb',)"),
        ({"set": {"local.unit": "epoch"}}, "another local.unit than epoch"),
        ({"set": {"folb": {"local.lr": 99.0}}}, "another folb than {'local.lr': 99.0}"),
    ]:
        assert stored(results, WIN, **given) is None
        assert arms.earlier(results, an_arm(**given)) == why
    search = figure_files.Search("folb", {"local.mu": [0.1]}, [100])
    searched = Arm("made_up", "a", "A", False, {"dataset": "synthetic_1_1", "seeds": 5}, searches=[search])
    assert arms.earlier(results, searched) == "another line search"
    assert arms.earlier(results, an_arm()) == "" and list(results.cells()) == ["made_up-a"]
    with pytest.raises(InputError, match="is of another arm"):
        stored(results, WIN | {"quick": True})


@pytest.mark.parametrize("cell", [{}, {"figure": "made_up"}, WIN | {"algorithms": None}, WIN | {"experiment": 3}])
def test_damaged_results_are_named(results, cell):
    results.keep("made_up-a", cell)
    with pytest.raises(InputError, match=r"made_up-a': is damaged in .*`--drop made_up-a` forgets it"):
        arms.stored(results, an_arm())


def test_results_with_a_run_missing_are_named(results):
    short = copy.deepcopy(WIN)
    short["algorithms"]["folb"]["runs"]["drops"].pop()
    with pytest.raises(InputError, match="has incomplete runs of folb"):
        stored(results, short)


def test_a_quick_try_does_not_replace_the_full_results(results):
    keep(results, WIN)
    with pytest.raises(InputError, match="holds results of the full setting"):
        arms.check(results, quick=True)
    arms.check(results, quick=False)
    keep(results, WIN | {"quick": True})
    with pytest.raises(InputError, match="holds results of a quick try"):
        arms.check(results, quick=False)


def test_pages_are_rebuilt_from_results_alone(tmp_path, capsys):
    """What a user changes in a stored result shows on the page; nothing is run."""
    mine = tmp_path / "made_up.toml"
    mine.write_text(
        'title = "Fig. 99: made up"\npaper = "It wins."\ncaveats = ["Not real."]\n'
        '[[arm]]\nid = "a"\nname = "A"\ndataset = "synthetic_1_1"\nseeds = 5\n'
        '[[claim]]\nid = "c"\nsays = "It needs fewer rounds."\narms = ["a"]\nbetter = "folb"\nworse = ["fedavg"]\n'
        '[[claim]]\nid = "d"\nsays = "Another."\narms = ["b"]\nbetter = "folb"\nworse = ["fedavg"]\n'
    )
    home = tmp_path / "out"
    rebuild = ["reproduce", str(mine), "--pages-only", "--out", str(home)]
    assert main(rebuild) == 2 and "has no results to make pages from" in capsys.readouterr().err
    keep(Results(home / FILE), WIN)
    assert main([*rebuild, "--only", "x"]) == 2 and "only = ['x']: chooses what to run" in capsys.readouterr().err
    assert main(rebuild) == 0
    out, error = capsys.readouterr()
    assert "It needs fewer rounds." in out and "not tested here" in out and not error
    text, front = (home / "made_up.md").read_text(), (home / "README.md").read_text()
    assert (home / "made_up.png").read_bytes().startswith(b"\x89PNG")
    assert len((home / "made_up.png").read_bytes()) < 100_000
    for expected in ("# Fig. 99: made up", "It wins.", "— holds", "2.06 [", "Not real.", "reproduce made_up", "cpu"):
        assert expected in text
    assert "| [Fig. 99](made_up.md) | It needs fewer rounds. | holds | 2.06 [" in front
    assert "2 claims: holds: 1, not tested here: 1." in front
    keep(Results(home / FILE), LOSS | {"arm": "a", "identity": "fedcba9876543210"})
    assert len(Results(home / FILE).cells()) == 1  # in place of the other
    assert main(["reproduce", str(mine), "--pages-only", "--out", str(home), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in document["claims"]] == ["does not hold", "not tested here"]
    assert "— does not hold" in (home / "made_up.md").read_text()
    mine.write_text(mine.read_text().replace("seeds = 5", "draws = 2\nseeds = 5"))  # the arm is to be run again
    assert main(rebuild) == 0
    text = (home / "made_up.md").read_text()
    assert "— not tested here" in text and "Not run here: A (there are results, with other draws or seeds)." in text
    assert len(Results(home / FILE).cells()) == 1


def test_a_picture_keeps_its_lines_apart(monkeypatch):
    """Fig. 2 in fewer colours: every pixel of its six lines still has its own colour."""
    from matplotlib import colors
    from PIL import Image

    def pixels():
        picture = pictures.draw(documents, ["accuracy", "loss"], "Fig. 2")
        return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), int)

    documents = [arms.stored(Results(KNOWN), arm) for arm in figure_files.read("fig2").arms]
    few = pixels()
    monkeypatch.setattr(figures, "small", lambda picture: picture)
    every = pixels()
    for label, look in looks(documents[0]["algorithms"]).items():
        line = (every == [round(255 * part) for part in colors.to_rgb(look.ink)]).all(axis=-1)
        assert line.any() and np.abs(few - every)[line].max() < 8, label


def test_the_committed_pages_are_those_of_the_committed_results(tmp_path, monkeypatch):
    committed, home = ROOT / "docs" / "reproduction", tmp_path / "reproduction"
    drawn = []
    # drawing them takes nearly all of the time; other tests look at a picture
    monkeypatch.setattr(pictures, "draw", lambda *about: drawn.append(about) or b"a picture")
    outside = [name for name in figure_files.outside() if (committed / f"{name}.md").is_file()]
    made = pages.write([*figure_files.names(), *outside], Results(KNOWN), home, quick=False)
    for path in sorted(committed.glob("*.md")):
        assert (home / path.name).read_text() == path.read_text(), f"make pages: {path.name}"
    assert {path.name for path in home.iterdir()} == {path.name for path in committed.iterdir()}
    assert len(drawn) == len(list(home.glob("*.png")))
    assert all(path.stat().st_size < 200_000 for path in committed.glob("*.png"))
    for page in made:
        for verdict in page.verdicts:
            waits = verdict.claim.figure == "servers"
            assert waits or verdict.word != "not tested here", verdict.claim.id
    # the README's sentence on FOLB is the first of the front page's advice
    said, judged = pages.advised(made), [one for page in made for one in page.verdicts]
    assert len(outside) >= 1
    readme = (ROOT / "README.md").read_text()
    assert said in (committed / "README.md").read_text()
    assert " ".join(said.split()).partition(":")[0] in " ".join(readme.replace("\n> ", "\n").split())
    paper = [one for one in judged if one.claim.figure in figure_files.names()]
    assert f"{len(paper)} claims" in readme
    # and the sentence of docs/theory.md is that of the verdicts
    sentence = "of the theory, Theorem 1 and the bound of its selection hold; Lemma 1, Theorem 2 and the bounds (14)"
    assert sentence in " ".join((ROOT / "docs/theory.md").read_text().split())
    theory = {one.claim.id: one.word for one in judged if one.claim.figure == "theory"}
    failing = ("lemma_1-squares", "lemma_1-sum", "theorem_2", "one_set", "hetero_selection")
    assert theory["theorem_1"] == "holds" and {theory[name] for name in failing} == {"does not hold"}


def test_a_check_has_as_many_cases_as_its_page_says():
    """Theorem 1 had 500, of which its page listed 300."""
    for arm in figure_files.read("theory").arms:
        if cases := arm.settings.get("cases"):
            values = arms.stored(Results(KNOWN), arm)["values"]
            one_made = {"1/K < mu <= 1"}  # the page says so
            assert {len(found) - (name in one_made) for name, found in values.items()} == {cases}, arm.id
            if arm.id == "theorem_1":
                assert f"0 violations in {cases} quadratics" in (ROOT / "docs/theory.md").read_text()


def test_a_page_has_our_number_beside_theirs(tmp_path, monkeypatch, capsys):
    """With a name of ours in the folder for others' numbers, on the front page in a table of its own."""
    text = (
        'title = "Theirs: made up"\nsource = "A page"\npaper = "It says 81.9 %."\n'
        '[[arm]]\nid = "a"\nname = "A"\ndataset = "synthetic_1_1"\nseeds = 4\n'
        '[[claim]]\nid = "c"\nsays = "Their 81.9 % comes out."\narms = ["a"]\nmetric = "final"\nbetter = "folb"\n'
        'published = 0.819\nspread = 0.01\nsame = 0.03\nsource = "They"\n'
    )
    (tmp_path / "made_up.toml").write_text(text)
    home = tmp_path / "out"
    keep(Results(home / FILE), NEAR)
    assert main(["reproduce", str(tmp_path / "made_up.toml"), "--pages-only", "--json", "--out", str(home)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["claims"]
    assert found["published"] == 0.819 and found["conditions"][0]["ours"] == "81.50 ± 1.29 % (80.0 to 83.0)"
    page = (home / "made_up.md").read_text()
    assert "**A page:** It says 81.9 %." in page
    assert "| A | folb | the final accuracy | They: 81.9 ± 1 % | 81.50 ± 1.29 % (80.0 to 83.0) | -0.4 [" in page
    monkeypatch.setattr(figure_files, "outside", lambda: ["made_up"])
    monkeypatch.setattr(figure_files, "_home", lambda: tmp_path / "none")
    made = pages.page(str(tmp_path / "made_up.toml"), Results(home / FILE), quick=False)
    monkeypatch.setattr(figure_files, "names", list)
    monkeypatch.setattr(figure_files, "content", lambda name: {"title": "t", "introduction": "i", "reading": "r",
                                                               "outside": "o", "advice": "a"})  # fmt: skip
    front = "\n".join(pages._front([made], quick=True))
    assert "0 claims" in front and "## Beyond the paper\n\no" in front
    assert front.index("Their 81.9 % comes out.") > front.index("Beyond the paper")


# the advice


WORDS = Sentence(
    "made_up:c",
    holds="In all {total}{left}.",
    partly="In {count}: {held}. Not shown: {rest}.",
    fails="In none of {total}, worse in {behind}.",
    unclear="No difference in {total} with {runs} runs.",
    unreached="Nobody arrives.",
)


@pytest.mark.parametrize(
    "documents, said",
    [
        ([WIN], "In all 1."),
        ([LOSS], "In none of 1, worse in 1."),
        ([TIE], "No difference in 1 with 5 runs."),
        ([TIE, LOSS], "In none of 2, worse in 1."),
        ([WIN, made_up([None] * 3, [None] * 3, arm="n")], "In all 1 (1 more in which no run arrives)."),
        ([made_up([None] * 3, [None] * 3)], "Nobody arrives."),
        ([made_up([1, 1], [9, 9])], ""),
    ],
    ids=["win", "loss", "tie", "tie and loss", "win and never", "never", "too few"],
)
def test_a_sentence_has_the_wording_of_its_verdict(documents, said):
    assert advice.say(WORDS, judged(claim(), *documents)) == said


def test_a_sentence_names_where_it_holds_and_shows_the_rest():
    said = advice.say(WORDS, judged(claim(), WIN, TIE))
    assert re.fullmatch(r"In 1 of 2: A\. Not shown: C \(1 \[0\.\S+, \S+\] times\)\.", said)


def test_the_advice_follows_its_results_and_names_what_was_not_run():
    """The same page from three results: its sentences change with them, and none is left that they do not carry."""
    front = Front(
        *("t", "i", "r", "o", "**Heading.** {one} {two}\n\n{table}\n\n**Another.** {two}"),
        columns={"ours": "folb", "theirs": "fedavg"},
        rows={"Row A": "made_up:a", "Row B": "made_up:b"},
        sentences={"one": WORDS, "two": Sentence("nosuch:claim", "h", "p", "f")},
    )
    for document, said in [(WIN, "In all 1."), (LOSS | {"arm": "a"}, "In none of 1, worse in 1.")]:
        text = advice.text(front, [judged(claim(), document)], [], {"made_up:a": document})
        assert text.startswith(f"**Heading.** {said}\n\n| | ours | theirs | runs |")
        assert "| Row B | not run | not run | not run |" in text and "Another" not in text
        assert text.endswith('Not run here, and so not decided: "nosuch:claim"')
    assert "| Row A | 21 | 10 | 5 |" in text


def test_every_sentence_of_the_front_page_follows_from_a_claim():
    """Each names a claim that there is, has only fields that there are, and stands in the layout once."""
    front = figure_files.front()
    claims = {
        f"{made.figure}:{made.id}": made
        for name in (*figure_files.names(), *figure_files.outside())
        for made in figure_files.read(name).claims
    }
    fields = advice._fields(judged(claim(), WIN, TIE))
    for name, sentence in front.sentences.items():
        assert sentence.claim in claims
        for wording in vars(sentence).values():
            assert "{" not in wording.format_map(fields), name
    places = re.findall(r"{(\w+)}", front.advice)
    assert sorted(places) == sorted([*front.sentences, "table", "readings"])
    # beside the sentences, the layout says nothing that results could contradict
    assert " ".join(re.sub(r"{\w+}", "", front.advice).split()) == (
        "Rounds to the target with epochs, medians over the runs (draws of the data × seeds): FOLB's mu comes from the "
        "paper's line search; FedProx's mu is its authors' (1). **Where it helps.** **What to do.**"
    )
    # nor does a wording have a number of its own that looks like a result: only settings, thresholds and the sketch
    known = r"`[\w.]+=[\w.]+`|psi (= |to )10?|Table I|Fig\. 3|\b5 %|2 points|260 bytes|Sent140|{\w+}"
    for name, sentence in front.sentences.items():
        for outcome in ("holds", "partly", "fails", "unclear", "unreached"):
            assert not re.search(r"\d", re.sub(known, "", getattr(sentence, outcome))), (name, outcome)


def test_no_sentence_contradicts_the_intervals_of_the_stored_results():
    """Read again from the effects alone: whoever is said to be ahead has an interval beyond no effect, and so on."""
    made = [pages.page(name, Results(KNOWN), False) for name in figure_files.names()]
    made += [pages.page(name, Results(KNOWN), False) for name in figure_files.outside()]
    known = {f"{one.claim.figure}:{one.claim.id}": one for page in made for one in page.verdicts}
    said = pages.advised(made).replace("\n", " ")
    compared = 0
    for sentence in figure_files.front().sentences.values():
        verdict = known[sentence.claim]
        outcome, text = advice.outcome(verdict), advice.say(sentence, verdict)
        assert text in said
        if not verdict.claim.compares or outcome in ("untested", "unreached"):
            continue
        compared += 1
        ahead = [all(effect.low > 0 for effect in one.effects.values()) for one in verdict.conditions]
        behind = [any(effect.high < 0 for effect in one.effects.values()) for one in verdict.conditions]
        if verdict.claim.keeping:  # fewer drops may have a price
            ahead = [one.holds and good for one, good in zip(verdict.conditions, ahead, strict=True)]
        expected = "holds" if all(ahead) else "partly" if any(ahead) else "fails" if any(behind) else "unclear"
        assert outcome == expected, sentence.claim
        wording = getattr(sentence, outcome) or sentence.fails
        for field, number in (("{count}", f"{sum(ahead)} of {len(ahead)}"), ("{behind}", f"{sum(behind)}")):
            assert field not in wording or number in text
    assert compared >= 5


# the command, from end to end

TINY = """
title = "Fig. 98: tiny"
paper = "FOLB is better."
quantities = ["accuracy", "loss"]

[[arm]]
id = "tiny"
name = "Tiny"
dataset = "synthetic_1_1"
algorithms = ["folb", "fedavg"]
rounds = 6
target = 0.2
draws = 3
seeds = 2
set = { sizes = [20, 30, 40], "select.K" = 2, "rule.weights" = ["equal", "samples"] }
printed = { folb = 2, fedavg = 3 }
vary = { "local.unit" = ["step"] }
search = { algorithm = "folb", grid = { "local.mu" = [0.01, 1.0] }, draws = [7, 8], seeds = [5, 6, 7, 8, 9, 10] }

[[arm]]
id = "elsewhere"
dataset = "mnist"
seeds = 3

[[claim]]
id = "rounds"
says = "It needs fewer rounds."
arms = ["tiny-*"]
better = "folb"
worse = ["fedavg"]
under = ["rule.weights=equal", "rule.weights=samples"]

[[claim]]
id = "mnist"
says = "It does on MNIST."
arms = ["elsewhere"]
better = "folb"
worse = ["fedavg"]
"""


# one algorithm, and so one program to compile
PLAIN = TINY[: TINY.index("search")].replace('"folb", "fedavg"', '"fedavg"').replace('["equal", "samples"]', '"equal"')
PLAIN = PLAIN.replace("printed = { folb = 2, fedavg = 3 }", "")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "nothing"))
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def test_a_file_from_end_to_end(tiny, capsys):
    assert main(["reproduce", str(tiny)]) == 0
    out, error = capsys.readouterr()
    assert "tiny-elsewhere is left out (2 of 2)" in error and "folb data fetch mnist" in error
    home = tiny.parent / "reproduction"
    ((name, found),) = Results(home / FILE).cells().items()
    assert name == "tiny-tiny-step"
    assert list(found["algorithms"]) == ["folb", "fedavg rule.weights=equal", "fedavg rule.weights=samples"]
    runs = found["algorithms"]["folb"]["runs"]
    assert list(zip(runs["draw"], runs["seed"], strict=True)) == [(d, s) for d in range(3) for s in range(2)]
    assert runs["bytes_up"] == [2 * n for n in runs["bytes_down"]]
    assert len(found["algorithms"]["folb"]["accuracy"]["50"]) == 6
    (search,) = found["chosen"]
    assert (
        search["values"]["local.mu"] in (0.01, 1.0)
        and found["experiment"]["set"]["folb"]["local.mu"] == search["values"]["local.mu"]
    )
    assert len(search["points"]) == 2
    assert "It does on MNIST." in out and "not tested here" in out
    assert "Line search for folb on draws 7, 8 and seeds 5" in (home / "tiny.md").read_text()
    stored = sorted(entry.name for entry in directory.home().iterdir())
    assert len(stored) == 3 + 2
    # again: nothing is run, and everything is as it was
    before = {entry: entry.stat().st_mtime_ns for entry in directory.home().rglob("rounds.jsonl")}
    assert main(["reproduce", str(tiny), "--json"]) == 0
    assert {entry: entry.stat().st_mtime_ns for entry in directory.home().rglob("rounds.jsonl")} == before
    assert Results(home / FILE).get(name) == found
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["claims"]] == ["rounds", "mnist"]


def test_an_interrupted_arm_goes_on(tiny, monkeypatch, capsys):
    """The runs of the first draw are kept, and the results are those of an arm left alone."""
    tiny.write_text(PLAIN)

    ready, count = execute.ready, 0

    def interrupted(*arguments, **keywords):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return ready(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "ready", interrupted)
        patch.setattr(sys, "argv", ["folb", "reproduce", str(tiny)])
        assert main() == 130
    assert f"resume with: folb reproduce {tiny}" in capsys.readouterr().err
    assert len([path for path in directory.home().iterdir() if (path / "results.json").is_file()]) == 1
    assert main(["reproduce", str(tiny)]) == 0
    path = tiny.parent / "reproduction" / FILE
    whole = path.read_bytes()
    shutil.rmtree(directory.home())
    path.unlink()
    assert main(["reproduce", str(tiny)]) == 0
    assert path.read_bytes() == whole


def test_a_quick_try_says_so_and_goes_elsewhere(tiny, capsys):
    tiny.write_text(PLAIN + "quick = { rounds = 3, name = 'Tinier' }\n")
    (tiny.parent / "docs" / "reproduction").mkdir(parents=True)
    assert main(["reproduce", str(tiny), "--quick"]) == 0
    out, _ = capsys.readouterr()
    assert "A quick try" in out
    home = tiny.parent / "reproduction-quick"
    for page in ("README.md", "tiny.md"):
        assert "A quick try, not the reproduction" in (home / page).read_text()
    (found,) = Results(home / FILE).cells().values()
    assert found["quick"] and found["experiment"]["rounds"] == 3 and found["name"] == "Tinier, steps"
    assert not list((tiny.parent / "docs" / "reproduction").iterdir())


def test_arms_can_be_run_alone(tiny, capsys):
    """For machines that share the work."""
    assert main(["reproduce", str(tiny), "--only", "tiny-else*"]) == 2  # none of it can be run here
    assert "tiny-elsewhere is left out (1 of 1)" in capsys.readouterr().err
    assert main(["reproduce", str(tiny), "--only", "fig2-*"]) == 2
    assert "should fit one of tiny-tiny-step, tiny-elsewhere" in capsys.readouterr().err


def wheel(home, source):
    """The names in a wheel of the distribution in `source`, built as `make` installs it."""
    usual = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(source / "src", home / "src", ignore=usual)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (source / name).is_file():
            shutil.copy(source / name, home)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", ".", "."]
    subprocess.run(build, cwd=home, check=True, capture_output=True)
    (made,) = home.glob("*.whl")
    return set(zipfile.ZipFile(made).namelist())


@pytest.mark.slow
def test_the_wheels_have_their_files(tmp_path):
    """That of the studies has the files of the experiments, of the arena and of the defence; the product's has none."""
    studies, product = wheel(tmp_path / "studies", ROOT / "studies"), wheel(tmp_path / "product", ROOT)
    home = "folb_studies/paper/experiments"
    wanted = {f"{home}/{name}.toml" for name in (*figure_files.names(), figure_files.FRONT)}
    wanted |= {f"{home}/outside/{name}.toml" for name in figure_files.outside()}
    wanted |= {f"folb_studies/{name}.toml" for name in ("arena/datasets", "arena/contenders")}
    wanted |= {f"folb_studies/{name}.toml" for name in ("defence/datasets", "defence/rules")}
    assert wanted <= studies and {name.partition("/")[0] for name in studies if "dist-info" not in name} == {
        "folb_studies"
    }
    assert {name.partition("/")[0] for name in product if "dist-info" not in name} == {"folb"}
    assert not [
        name for name in product if name.endswith(".toml") and "starters" not in name and "demo_app" not in name
    ]
    assert "folb/cli/main.py" in product and not any("results.jsonl" in name for name in studies | product)
