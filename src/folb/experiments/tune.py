"""The line search: a grid of settings, or points of a box, tried on some seeds, and the winner reported on others.

The grid is an experiment like any other, and numbers in it, such as `local.lr`, are swept by one compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from folb import atomic
from folb.core.algorithm import SLOTS, Algorithm
from folb.core.algorithms import ALGORITHMS
from folb.core.part import name_of
from folb.errors import InputError, check, check_whole, choose
from folb.experiments.execute import execute
from folb.experiments.experiment import Experiment, to_toml
from folb.experiments.plan import Plan, plan
from folb.experiments.settings import algorithm_settings
from folb.measures import ACCURACY
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import WINNER, RunDirectory

By = Literal["first", "sustained", "seconds", "bytes"]  # what points are ranked by; see `search`


@dataclass(frozen=True)
class Point:
    """A point of the grid or of the box, and its results on the seeds of the search."""

    label: str
    algorithm: Algorithm
    reached: Sequence[int | None]  # for each seed, the first round that reached the target
    held: Sequence[int | None]  # for each seed, the round from which the target was held
    loss: float  # the final training loss, as the mean over the seeds
    accuracy: float  # likewise
    diverged: bool  # some loss was not finite, with any seed
    rank: int = 0
    settled: float = math.nan  # the accuracy over the last five evaluations, as the mean over the seeds
    seconds: Sequence[float | None] = ()  # for each seed, until the end of the round that reached the target
    sent: Sequence[int | None] = ()  # likewise, the bytes up and down
    judged_by: str = ACCURACY  # what `accuracy` is, and the target is for

    def merit(self, by: By = "first") -> tuple[bool, float, int, float]:
        """The key that ranks points, smallest first: the median of `by`, how many seeds never arrive, the loss.

        Points that diverged come last. Losses that agree to four digits are equal: the other digits depend on the order
        in which a compiler adds.
        """
        if self.diverged:
            return True, math.inf, len(self.reached), math.inf
        arrived = {"first": self.reached, "sustained": self.held, "seconds": self.seconds, "bytes": self.sent}[by]
        return False, summary.median_round(arrived), list(arrived).count(None), float(f"{self.loss:.4g}")


class Search(NamedTuple):
    """A line search that is done."""

    planned: Plan  # the grid, or the points of the box
    points: Sequence[Point]  # from the best to the worst
    grid: RunDirectory
    winner: RunDirectory  # the best point, on other seeds


def search(
    experiment: Experiment,
    report_seeds: int | Sequence[int] | None = None,
    stream: bool | None = None,
    complete: Callable[..., RunDirectory] = execute,
    on_ranked: Callable[[Plan, Sequence[Point]], None] | None = None,
    by: By = "first",
) -> Search:
    """Run a grid and rank its points, then run the best on other seeds. Finished runs are not repeated.

    The experiment has one algorithm, with lists of values in its `set`, or a `box`, or both.
    `report_seeds` is explained at `other_seeds`. `complete` runs an experiment, of the grid with `keep_model=False`:
    only the models of the winner are kept. `on_ranked` gets the points before the
    best one is run. `by` is what points are ranked by: "first", the first round that reaches the target; "seconds" or
    "bytes", the simulated seconds, or the bytes up and down, until the end of that round; or "sustained", the round
    from which five evaluations in a row hold the target (`Run.held_from`).
    """
    choose("by", by, get_args(By))
    seeds = other_seeds(experiment.seeds, report_seeds)
    planned = plan(experiment, stream)
    names = list(planned.experiment.algorithms)
    check("algorithms", names, len(names) == 1, "should be one: the algorithm to tune")
    if len(planned.algorithms) < 2 and not planned.experiment.box:
        own = planned.experiment.set.get(_name(planned.experiment), {})
        swept = {name: value for name, value in own.items() if isinstance(value, list)}
        expected = "should be several values of a setting, such as --local.mu 0.01,0.1,1, or a --box"
        raise InputError("grid", swept, expected)
    grid = complete(planned, keep_model=False)
    points = ranked(planned, grid.runs(), by)
    if on_ranked is not None:
        on_ranked(planned, points)
    chosen = plan(winner(planned, points, seeds), stream)
    atomic.replace(grid.path / WINNER, to_toml(chosen.experiment, chosen.note).encode())
    return Search(planned, points, grid, complete(chosen))


def sweepable() -> list[str]:
    return list(dict.fromkeys(name for make in ALGORITHMS.values() for name in algorithm_settings(make)))


def other_seeds(seeds: Sequence[int], wanted: int | Sequence[int] | None) -> Sequence[int]:
    """The seeds to report on: the wanted list, or the wanted number (default: as many as `seeds`) after the largest."""
    if wanted is None or isinstance(wanted, int):
        count = len(seeds) if wanted is None else wanted
        check_whole("report_seeds", count, 1, 10**6)
        wanted = range(max(seeds) + 1, max(seeds) + 1 + count)
    for seed in wanted:
        check_whole("report_seeds", seed, 0)
    wanted, shared = list(wanted), sorted(set(seeds) & set(wanted))
    check("report_seeds", wanted, 0 < len(wanted) == len(set(wanted)), "should be different seeds, and at least one")
    check("report_seeds", wanted, not shared, f"should not have seeds of the search, but has {shared}")
    return wanted


def _name(experiment: Experiment) -> str:
    return experiment.algorithms[0].rpartition(":")[2]


def ranked(planned: Plan, runs: Sequence[Run], by: By = "first") -> list[Point]:
    """The points of the grid from the best to the worst; equals share a rank and keep the order of the grid."""
    return placed(planned.algorithms, by_algorithm(planned, [runs]), planned.experiment.target, by)


def placed(
    algorithms: Sequence[Algorithm], groups: Sequence[Sequence[Run]], target: float | Sequence[float], by: By = "first"
) -> list[Point]:
    """The same, from the runs of each algorithm and a target, or a target for each run of an algorithm."""
    labels = summary.labels([(algorithm.name, algorithm.settings) for algorithm in algorithms])
    points = []
    for label, algorithm, runs in zip(labels, algorithms, groups, strict=True):
        targets = [target] * len(runs) if isinstance(target, int | float) else target
        aimed = list(zip(runs, targets, strict=True))
        point = Point(
            label,
            algorithm,
            reached=[run.rounds_to(goal) for run, goal in aimed],
            held=[run.held_from(goal) for run, goal in aimed],
            seconds=[run.seconds_to(goal) for run, goal in aimed],
            sent=[run.bytes_to(goal) for run, goal in aimed],
            loss=mean(float(run.train_loss[-1]) for run in runs),
            accuracy=mean(run.final for run in runs),
            diverged=not all(np.isfinite(run.train_loss).all() for run in runs),
            settled=mean(run.settled for run in runs),
            judged_by=runs[0].judged_by,
        )
        points.append(point)
    merits = sorted(point.merit(by) for point in points)
    ranks = [replace(point, rank=1 + merits.index(point.merit(by))) for point in points]
    return sorted(ranks, key=lambda point: point.rank)


def winner(planned: Plan, points: Sequence[Point], seeds: Sequence[int]) -> Experiment:
    """The experiment that runs the best point of a search on other seeds."""
    best = points[0]
    check("grid", [point.label for point in points], not best.diverged, "diverged at every point: there is no winner")
    experiment = planned.experiment
    settings = {key: "none" if value is None else value for key, value in best.algorithm.settings.items()}
    settings |= {key: spec for spec, kind in planned.own.items() for key in SLOTS if settings[key] == name_of(kind)}
    name = _name(experiment)
    tuned = {**experiment.set.get(name, {}), **experiment.box.get(name, {})}
    single = {**experiment.set, name: {key: settings.get(key, value) for key, value in tuned.items()}}
    return replace(experiment, seeds=seeds, set=single, box={}, points=None, box_seed=None)


def drawn(experiment: Experiment) -> str:
    """The box and how many points were drawn from it, in a line; empty without a box."""
    if not experiment.box:
        return ""
    ranges = (
        f"{key}={choice if isinstance(choice, str) else ','.join(map(summary.spelt, choice))}"
        for key, choice in experiment.box[_name(experiment)].items()
    )
    return f"{experiment.points} points drawn from {' '.join(ranges)} by the seed {experiment.box_seed}"


def verdict(planned: Plan, points: Sequence[Point], seeds: Sequence[int], by: By = "first") -> str:
    """The chosen point, the seeds of the search, and the seeds of the report."""
    equals = sum(point.rank == 1 for point in points)
    tie = f", the first of {equals} that are equal" if equals > 1 else ""
    searched, reported = (", ".join(map(str, those)) for those in (planned.experiment.seeds, seeds))
    how = {"first": "", "sustained": " by the sustained target"}.get(by, f" by the {by} to the target")
    return f"{points[0].label}{tie}: chosen{how} on seeds {searched}; results on seeds {reported}:"


def document(
    planned: Plan, points: Sequence[Point], seeds: Sequence[int], reported: Any, by: By = "first"
) -> dict[str, Any]:
    """The search as one JSON-ready document; `reported` is the document of the winner's runs."""
    experiment = planned.experiment
    box = {"box": experiment.box, "budget": experiment.points, "box_seed": experiment.box_seed}
    return {
        "by": by,
        **(box if experiment.box else {}),
        "seeds": list(experiment.seeds),
        "report_seeds": list(seeds),
        "rounds": experiment.rounds,
        "target": experiment.target,
        "points": [
            {
                "rank": point.rank,
                "algorithm": point.label,
                "parameters": summary.plain(point.algorithm.settings),
                "rounds_to_target": list(point.reached),
                "median_rounds_to_target": summary.finite([summary.median_round(point.reached)])[0],
                "seconds_to_target": list(point.seconds),
                "bytes_to_target": list(point.sent),
                "held_from": list(point.held),
                "median_held_from": summary.finite([summary.median_round(point.held)])[0],
                "train_loss": summary.finite([point.loss])[0],
                "final": summary.finite([point.accuracy])[0],
                "diverged": point.diverged,
            }
            for point in points
        ],
        "winner": reported,
    }


def by_algorithm(planned: Plan, draws: Iterable[Sequence[Run]]) -> list[list[Run]]:
    """For each algorithm of a plan, its runs on all draws; each draw has the runs of one algorithm after another."""
    n = len(planned.algorithms)
    sizes = [(runs, len(runs) // n) for runs in draws]
    return [[run for runs, size in sizes for run in runs[i * size : (i + 1) * size]] for i in range(n)]
