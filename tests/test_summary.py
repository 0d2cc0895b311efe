"""What is derived from a run's curves, and the table: when the target is reached, and from when on it is held."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from folb.cli import tables
from folb.results import summary
from folb.results.run import Run

TINY = ["synthetic_1_1", "--set", "sizes=20,30,40", "--set", "select.K=2", "--seeds", "1", "--algorithms", "fedavg"]


def run(accuracy, every=1, parameters=None):
    """A run of which only the accuracy matters, evaluated every so many rounds."""
    n = len(accuracy)
    zeros = [np.zeros(n * every) for _ in range(3)]
    devices = [np.zeros((n * every, 2)) for _ in range(3)]
    rounds = every * np.arange(1, n + 1)
    curves = np.array(accuracy, np.float32), np.ones(n, np.float32)
    return Run("folb", parameters or {}, 0, rounds, *curves, *zeros, *devices, np.ones(n * every, bool))


def literally(one, target):
    """The definition, as a loop."""
    for i in range(len(one.test_accuracy) - 4):
        if sum(map(float, one.test_accuracy[i : i + 5])) / 5 >= target:
            return int(one.evaluated_rounds[i])
    return None


def test_a_target_that_is_only_touched_is_not_held():
    one = run([0.1, 0.9, 0.2, 0.3, 0.6, 0.7, 0.8, 0.8, 0.9, 0.9])
    assert one.rounds_to(0.7) == 2 and one.held_from(0.7) == 5  # 0.6, 0.7, 0.8, 0.8, 0.9


def test_it_is_the_first_round_of_the_first_five_evaluations_that_hold():
    assert run([0.2, 0.2, 0.8, 0.8, 0.8, 0.8, 0.8, 0.1, 0.1, 0.1]).held_from(0.75) == 3  # whatever comes later
    assert run([0.2, 0.2, 0.8, 0.8, 0.8, 0.8, 0.8], every=10).held_from(0.75) == 30
    assert run([0.6, 0.8, 0.8, 0.8, 0.8]).held_from(0.7) == 1  # the mean holds before a round reaches it


@pytest.mark.parametrize("target", [0.1, 0.3, 0.7, 0.9, 1.0])
def test_five_evaluations_of_the_target_hold_it(target):
    assert run([0, *5 * [target]]).held_from(target) == 2
    assert run([0, *4 * [target]]).held_from(target) is None


def test_a_run_of_fewer_than_five_evaluations_holds_nothing():
    assert [run(n * [1.0]).held_from(0.5) for n in range(7)] == [None] * 5 + [1, 1]


def test_an_accuracy_that_is_not_a_number_holds_nothing():
    assert run([1.0, 1.0, np.nan, 1.0, 1.0, 1.0, 1.0, 1.0]).held_from(0.5) == 4


def test_it_agrees_with_the_definition_on_any_curve():
    rng = np.random.default_rng(0)
    for _ in range(200):
        one = run(rng.random(rng.integers(0, 30)), every=int(rng.integers(1, 4)))
        target = rng.random()
        assert one.held_from(target) == literally(one, target)


def test_the_table_has_the_medians_of_both():
    runs = [run([0.1, 0.9, *5 * [0.1]]), run([0.1, 0.1, *5 * [0.9]]), run(7 * [0.9])]
    headings, (row,) = summary.table(runs, 0.8)
    shown = dict(zip(headings, row, strict=True))
    assert (shown["rounds to 80 %"], shown["held from"]) == ("2 (1 to 3)", "3 (1 to never)")


def test_a_median_stands_with_its_range():
    assert summary.ranged([13]) == "13" and summary.ranged([None]) == "never"
    assert summary.ranged([42, 7, 35]) == "35 (7 to 42)"
    assert summary.ranged([None, 7, 35]) == "35 (7 to never)"
    assert summary.ranged([None, 7, None]) == "never (7 to never)"
    assert summary.ranged([None, None]) == "never"


def test_a_line_says_who_is_told_from_the_first_by_the_seeds():
    def arriving(name, *rounds):
        curves = [[0.9 if t >= reached else 0.1 for t in range(1, 101)] for reached in rounds]
        return [replace(run(curve), algorithm=name, seed=seed) for seed, curve in enumerate(curves)]

    first, near, far = arriving("a", 10, 12, 11), arriving("b", 14, 9, 15), arriving("c", 50, 61, 54)
    assert summary.told_apart([*first, *near, *far], 0.7) == (
        "Fewest rounds to 70 %: a. With 3 seeds, the difference from b is not clear."
    )
    assert summary.told_apart([*first, *far], 0.7).endswith("With 3 seeds, the difference from all others is clear.")
    assert "With one seed this says little" in summary.told_apart([first[0], far[0]], 0.7)
    assert summary.told_apart(first, 0.7) == ""
    assert summary.told_apart([*first, *far], 0.95) == (
        "No algorithm reaches 95 % with most of its seeds. The best accuracy is 90.0 %: "
        "a lower target (--target) says more."
    )
    also = arriving("f", 11, 11, 12)  # its median is the first's
    assert summary.told_apart([*first, *also, *far], 0.7) == (
        "Fewest rounds to 70 %: a, f (the same median). With 3 seeds, the difference from all others is clear."
    )
    assert summary.told_apart([*first, *also], 0.7) == "Fewest rounds to 70 %: a, f (the same median)."
    never, once = arriving("d", 101, 101, 101), arriving("e", 10, 101, 101)
    assert summary.told_apart([*never, *once], 0.7).startswith("No algorithm reaches 70 % with most of its seeds.")
    at_once = arriving("g", 1, 1, 1)
    assert summary.told_apart(at_once, 0.7) == (
        "All reach 70 % in the first round that is evaluated. The best accuracy of each run is at least 90.0 %: "
        "a higher target (--target) says more."
    )
    assert summary.told_apart([*at_once, *first], 0.7).startswith("Fewest rounds to 70 %: g.")


def test_a_first_model_that_is_not_finite_has_more_reasons_than_the_step_size():
    later = replace(run([0.1, 0.1, 0.1]), train_loss=np.array([2.0, 9.0, np.nan]))
    at_once = replace(later, train_loss=np.full(3, np.nan), seed=1)
    for runs in ([later], [later, at_once], [replace(at_once, evaluated_rounds=np.array([5, 10, 15]))]):
        assert summary.told_apart(runs, 0.7).endswith(
            "All runs diverged: a smaller step size (--set local.lr=...) may help."
        )
    said = summary.told_apart([at_once], 0.7)
    assert (
        "After the first round no model is finite. Look for a far too large step size (--set local.lr=...), a value"
        in said
    )
    assert "psilon" not in said
    private = replace(at_once, records={"epsilon": np.array([1.0, 2.0, 3.0])})
    assert summary.told_apart([private], 0.7) == f"{said} Epsilon was spent for nothing."


def test_columns_that_are_zero_everywhere_are_left_out():
    steady, unsteady = run(7 * [0.9]), replace(run([0.9, 0.1, 0.9]), seed=1)
    assert not {"drops > 5 points", "idle rounds"} & set(summary.table([steady], 0.7)[0])
    assert "drops > 5 points" in summary.table([steady, unsteady], 0.7)[0]
    idle = replace(steady, updated=np.zeros(7, bool))
    assert summary.table([idle], 0.7)[0][-1] == "idle rounds"


def test_seconds_and_bytes_to_the_target_are_those_until_the_end_of_its_round():
    one = replace(run([0.1, 0.9, 0.9]), seconds=np.array([2.0, 3.0, 4.0]))
    one = replace(one, bytes_up=np.array([10, 20, 40]), bytes_down=np.array([1, 2, 4]))
    assert (one.seconds_to(0.8), one.bytes_to(0.8)) == (5.0, 33)
    assert (one.seconds_to(0.95), one.bytes_to(0.95)) == (None, None)


@pytest.fixture
def wide():
    runs = [run(7 * [0.9], parameters={"rule.weights": average}) for average in ("equal", "samples")]
    return tables.results(runs, 0.7)


HEADINGS = (
    *("rounds to 70 %", "held from", "MB to 70 %", "s to 70 %", "final accuracy", "best"),
    *("MB up", "MB down", "simulated s"),
)


@pytest.mark.parametrize("room", [60, 80, 100, 120])
def test_a_narrow_terminal_gets_the_whole_table_in_parts(wide, room):
    parts = list(tables.in_parts(wide, room))
    lines = [line for part in parts for line in printed(part, room)]
    assert max(map(len, lines)) <= room and not any("…" in line for line in lines)
    headings = [str(column.header).replace("\n", " ").replace("\xa0", " ") for part in parts for column in part.columns]
    assert [heading for heading in headings if heading != "algorithm"] == list(HEADINGS)
    assert sum(line.startswith("folb rule.weights=samples ") for line in lines) == len(parts)


def test_a_wide_terminal_gets_the_table_as_it_is(wide):
    assert list(tables.in_parts(wide, 160)) == [wide]


def printed(table, room):
    console = tables.Console(width=room)
    with console.capture() as capture:
        console.print(table, highlight=False)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_student_s_quantiles_are_those_of_scipy():
    assert [summary.student(n) for n in range(1, 40)] == [float(stdtrit(n, 0.975)) for n in range(1, 40)]
