"""A dataset's contest: the target, the search of each contender, and the runs of its winner.

The target follows from a rule: the reference (FedAvg) is tuned for its final accuracy, and the target is 97 % of what
it ends with. Draws of the data differ in what can be reached, so each draw has its own. Then everyone, the reference
too, is tuned for the round from which the targets are held, by the measure that is reported (`cells.logarithms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from statistics import mean
from typing import Any

import numpy as np

from folb.core.algorithm import Algorithm
from folb.errors import InputError
from folb.experiments import tune
from folb.experiments.plan import Plan
from folb.experiments.tune import by_algorithm
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import RunDirectory
from folb_studies.arena import cells, entries
from folb_studies.arena.entries import Contender, Dataset, Trials
from folb_studies.draws import Complete, machines, plan_of
from folb_studies.results import Cell, Results

SHARE = 0.97  # of the accuracy that the tuned reference ends with
REFERENCE = "fedavg"
BOX_SEED = 0
Target = dict[str, dict[str, float]]  # for "tuning" and "reported", the target of each draw


def reference(contenders: Sequence[Contender]) -> Contender:
    """The contender that gives the target."""
    for one in (*contenders, *entries.contenders()):
        if one.name == REFERENCE:
            return one
    raise InputError("contenders", [one.name for one in contenders], f"should have {REFERENCE}, which gives the target")


class Contest:
    """One dataset: its target, and the results of contenders."""

    def __init__(
        self, dataset: Dataset, reference: Contender, results: Results, complete: Complete, points: int
    ) -> None:
        self.dataset, self.reference, self.results = dataset, reference, results
        self.complete, self.points = complete, points

    @cached_property
    def target(self) -> Target:
        """The targets, from stored results of the reference or from its runs."""
        cell = cells.read(self.results, self.dataset, self.reference)
        if cell is not None and cells.fits(cell, self.dataset, self.reference, self.points, None):
            return dict(cell["target"])
        algorithms, groups, draws = self._searched(self.reference)
        best = settled_best(tune.placed(algorithms, groups, 0.0, "sustained"))
        runs = groups[[algorithm is best.algorithm for algorithm in algorithms].index(True)]
        reported = self._reported(self.reference, _values(best, self.reference))
        return {"tuning": targets(draws, runs), "reported": targets(*zip(*reported[2], strict=True))}

    def stored(self, contender: Contender) -> Cell | None:
        """The results of the contender, if they exist and fit. If they exist, the check may run the search of the
        reference."""
        cell = cells.read(self.results, self.dataset, contender)
        if cell is None or not cells.fits(cell, self.dataset, contender, self.points, cell["target"]):
            return None
        if cells.passed_over(cell):  # tuned by another measure than the reported one
            return None
        return cell if cell["target"] == self.target else None

    def search(self, contender: Contender) -> list[tune.Point]:
        """The points of the contender's box, from the best to the worst at the targets.

        Points that are equal keep the order that `folb tune --by sustained` gives them.
        """
        algorithms, groups, draws = self._searched(contender)
        goals = self.target["tuning"]
        points = tune.placed(algorithms, groups, [goals[str(draw)] for draw in draws], "sustained")
        rounds = len(groups[0][0].seconds)
        return sorted(points, key=lambda point: cells.merit(point.held, point.diverged, rounds))

    def _searched(self, contender: Contender) -> tuple[Sequence[Algorithm], list[list[Run]], list[int]]:
        """The points of the contender's box, the runs of each, and the draws of these runs."""
        plans, draws = [], []
        searched: list[Sequence[Run]] = []
        for draw, planned, where in self._planned(contender, self.dataset.trials, {}, **self._budget(contender)):
            plans.append(planned)
            searched.append(self.complete(planned, f"{where}, search").runs())
            draws += [draw] * len(planned.experiment.seeds)
        return plans[0].algorithms, by_algorithm(plans[0], searched), draws

    def check(self, contender: Contender) -> None:
        """Plan the contender without running it: a mistake is an error before any contender is run."""
        next(self._planned(contender, self.dataset.trials, {}, **self._budget(contender) if contender.tuned else {}))

    def check_budget(self, contender: Contender) -> None:
        """Raise rather than replace results of another budget."""
        cell = cells.read(self.results, self.dataset, contender)
        if cell is None or not contender.tuned or cells.fits(cell, self.dataset, contender, self.points, None):
            return
        if cells.fits(cell, self.dataset, contender, cell["points"], None):
            expected = f"{self.dataset.name}, {contender.name} is stored with {cell['points']}: give another --out or "
            raise InputError("points", self.points, f"{expected}--results, or --points {cell['points']}")

    def _budget(self, contender: Contender) -> dict[str, Any]:
        return {"box": {contender.part: contender.box}, "points": self.points, "box_seed": BOX_SEED}

    def cell_of(self, contender: Contender) -> dict[str, Any]:
        """Tune the contender, run its winner, and return the results as a JSON-ready document."""
        points = self.search(contender) if contender.tuned else []
        chosen = _values(points[0], contender) if points else {}
        plans, directories, runs = self._reported(contender, chosen)
        return {
            "dataset": self.dataset.name,
            "contender": contender.name,
            "about": asdict(contender),
            "identity": entries.digest(self.dataset, contender, self.points, self.target),
            "target": self.target,
            "points": len(points),
            "devices": plans[0].federation.N,
            "rounds": plans[0].experiment.rounds,
            "evaluate_every": self.dataset.evaluate_every,
            "note": plans[0].note,
            "ran_on": machines(directories),
            "tried": [
                {
                    "values": _values(point, contender),
                    "held": list(point.held),
                    "final": summary.short(point.settled, 4),
                    "diverged": point.diverged,
                }
                for point in points
            ],
            "chosen": chosen,
            "runs": measures(runs, self.target["reported"]),
            "accuracy": _median([run for _, run in runs]),
        }

    def _reported(
        self, contender: Contender, chosen: Mapping[str, Any]
    ) -> tuple[list[Plan], list[RunDirectory], list[tuple[int, Run]]]:
        """The runs with the chosen values on what is reported, each with its draw."""
        plans: list[Plan] = []
        directories: list[RunDirectory] = []
        runs: list[tuple[int, Run]] = []
        for draw, planned, where in self._planned(contender, self.dataset.report, chosen):
            plans.append(planned)
            directories.append(self.complete(planned, where))
            runs += [(draw, run) for run in directories[-1].runs()]
        return plans, directories, runs

    def _planned(
        self, contender: Contender, trials: Trials, chosen: Mapping[str, Any], **given: Any
    ) -> Iterator[tuple[int, Plan, str]]:
        """Each draw, its plan, and a description in words."""
        fixed = {**contender.set, **chosen}
        if contender.every_device:
            fixed["select.K"], given["rounds"] = self.devices, self.dataset.every_device_rounds or self.dataset.rounds
        settings = {"set": {contender.part: fixed}} if fixed else {}
        experiments = self.dataset.experiments(trials, algorithms=[contender.algorithm], **settings, **given)
        for draw, experiment in experiments:
            drawn = f", draw {draw}" if trials.draws else ""
            planned = plan_of(experiment)
            tested = len(planned.federation.test.y)
            if planned.evaluated is not None and planned.evaluated < tested:
                expected = f"should be at least {tested}, the number of test samples: accuracies are of all of them"
                raise InputError(f"{self.dataset.name}: loss_samples", self.dataset.loss_samples, expected)
            yield draw, planned, f"{self.dataset.name}, {contender.name}{drawn}"

    @cached_property
    def devices(self) -> int:
        """How many devices the dataset has; a draw may not change that."""
        _, experiment = next(self.dataset.experiments(self.dataset.trials, algorithms=[self.reference.algorithm]))
        return plan_of(experiment).federation.N


def settled_best(points: Sequence[tune.Point]) -> tune.Point:
    """The point that ends with the highest accuracy, of those that did not diverge."""
    sound = [point for point in points if not point.diverged]
    if not sound:
        raise InputError("reference", REFERENCE, "diverged at every point of its box: there is no target")
    return max(sound, key=lambda point: point.settled)


def targets(draws: Sequence[int], runs: Sequence[Run]) -> dict[str, float]:
    """The target of each draw by the rule, to four digits, from runs of the tuned reference."""
    ends: dict[int, list[float]] = {}
    for draw, run in zip(draws, runs, strict=True):
        ends.setdefault(draw, []).append(run.settled)
    return {str(draw): float(f"{SHARE * mean(accuracies):.4f}") for draw, accuracies in ends.items()}


def _values(point: tune.Point, contender: Contender) -> dict[str, Any]:
    """The values that a point has for the settings of the box, as a file can hold them."""
    settings = point.algorithm.settings
    return {key: "none" if settings[key] is None else settings[key] for key in contender.box}


def measures(runs: Sequence[tuple[int, Run]], target: Mapping[str, float]) -> dict[str, list[Any]]:
    """What is measured of each run; each draw has its target.

    `held` is the round from which the target is held; None for a run that diverged. Bytes and seconds are those until
    that round, or of the whole run if there is no such round.
    """
    held = [None if run.diverged else run.held_from(target[str(draw)]) for draw, run in runs]
    until = [len(run.seconds) if at is None else at for (_, run), at in zip(runs, held, strict=True)]

    def total(name: str) -> list[float]:
        return [float(getattr(run, name)[:n].sum(dtype=float)) for (_, run), n in zip(runs, until, strict=True)]

    return {
        "draw": [draw for draw, _ in runs],
        "seed": [run.seed for _, run in runs],
        "held": held,
        "first": [run.rounds_to(target[str(draw)]) for draw, run in runs],
        "final": [summary.short(run.settled, 5) for _, run in runs],
        "diverged": [bool(run.diverged) for _, run in runs],
        "bytes_up": list(map(int, total("bytes_up"))),
        "bytes_down": list(map(int, total("bytes_down"))),
        "seconds": [summary.short(value, 6) for value in total("seconds")],
    }


def _median(runs: Sequence[Run]) -> list[float | None]:
    """The median over the runs of the accuracy in each evaluated round."""
    middle = np.median(np.stack([run.test_accuracy for run in runs]).astype(float), axis=0)
    return [summary.short(value, 4) for value in middle.tolist()]
