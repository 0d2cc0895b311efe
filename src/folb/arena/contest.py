"""A dataset's contest: the target, the search of each contender, and the runs of its winner.

The target follows from a rule: the reference (FedAvg) is tuned for its final accuracy, and the target is 97 % of the
best. Then everyone, the reference too, is tuned for the round from which that target is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from folb.arena import cells, entries
from folb.arena.cells import Cell
from folb.arena.entries import Contender, Dataset, Trials
from folb.errors import InputError
from folb.experiments import tune
from folb.experiments.draws import Complete, Planner, by_algorithm, machines
from folb.experiments.plan import Plan
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import RunDirectory

SHARE = 0.97  # of the best accuracy that the tuned reference ends with
REFERENCE = "fedavg"
BOX_SEED = 0
PLANNER = Planner()  # one for the process: draws and contenders with the same shapes share compiled programs


def reference(contenders: Sequence[Contender]) -> Contender:
    """The contender that gives the target."""
    for one in (*contenders, *entries.contenders()):
        if one.name == REFERENCE:
            return one
    raise InputError("contenders", [one.name for one in contenders], f"should have {REFERENCE}, which gives the target")


class Contest:
    """One dataset: its target, and the results of contenders."""

    def __init__(self, dataset: Dataset, reference: Contender, home: Path, complete: Complete, points: int) -> None:
        self.dataset, self.reference, self.home = dataset, reference, home
        self.complete, self.points = complete, points

    @cached_property
    def target(self) -> float:
        """The target, from stored results of the reference or from its search."""
        cell = cells.read(self.home, self.dataset, self.reference)
        if cell is not None and cells.fits(cell, self.dataset, self.reference, self.points, None):
            return float(cell["target"])
        return target([point for point in self.search(self.reference, 0.0) if not point.diverged])

    def stored(self, contender: Contender) -> Cell | None:
        """The results of the contender, if they are there and fit. To know that may need the search of the reference,
        but not if there is nothing."""
        cell = cells.read(self.home, self.dataset, contender)
        if cell is None or not cells.fits(cell, self.dataset, contender, self.points, cell["target"]):
            return None
        return cell if cell["target"] == self.target else None

    def search(self, contender: Contender, target: float) -> list[tune.Point]:
        """The points of the contender's box, from the best to the worst at this target."""
        plans = []
        found: list[Sequence[Run]] = []
        box = {contender.part: contender.box}
        given = {"box": box, "points": self.points, "box_seed": BOX_SEED}
        for _, planned, where in self._planned(contender, self.dataset.trials, {}, **given):
            plans.append(planned)
            found.append(self.complete(planned, f"{where}, search").runs())
        return tune.placed(plans[0].algorithms, by_algorithm(plans[0], found), target, "sustained")

    def found(self, contender: Contender) -> dict[str, Any]:
        """Tune the contender, run its winner, and return the results as a JSON-ready document."""
        points = self.search(contender, self.target) if contender.tuned else []
        chosen = _values(points[0], contender) if points else {}
        plans: list[Plan] = []
        directories: list[RunDirectory] = []
        runs: list[tuple[int, Run]] = []
        for draw, planned, where in self._planned(contender, self.dataset.report, chosen):
            plans.append(planned)
            directories.append(self.complete(planned, where))
            runs += [(draw, run) for run in directories[-1].runs()]
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
            "note": plans[0].federation.note,
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
            "runs": measures(runs, self.target),
            "accuracy": _median([run for _, run in runs]),
        }

    def _planned(
        self, contender: Contender, trials: Trials, chosen: Mapping[str, Any], **given: Any
    ) -> Iterator[tuple[int, Plan, str]]:
        """Each draw, its plan, and what it is in words."""
        fixed = {**contender.set, **chosen}
        if contender.every_device:
            fixed["K"], given["rounds"] = self.devices, self.dataset.every_device_rounds or self.dataset.rounds
        settings = {"set": {contender.part: fixed}} if fixed else {}
        experiments = self.dataset.experiments(trials, algorithms=[contender.algorithm], **settings, **given)
        for draw, experiment in experiments:
            drawn = f", draw {draw}" if trials.draws else ""
            yield draw, PLANNER.plan(experiment), f"{self.dataset.name}, {contender.name}{drawn}"

    @cached_property
    def devices(self) -> int:
        """How many devices the dataset has; a draw may not change that."""
        _, experiment = next(self.dataset.experiments(self.dataset.trials, algorithms=[self.reference.algorithm]))
        return PLANNER.plan(experiment).federation.N


def target(points: Sequence[tune.Point]) -> float:
    """The target by the rule, to four digits, from the points of the reference that did not diverge."""
    if not points:
        raise InputError("reference", REFERENCE, "diverged at every point of its box: there is no target")
    return float(f"{SHARE * max(point.settled for point in points):.4f}")


def _values(point: tune.Point, contender: Contender) -> dict[str, Any]:
    """The values that a point has for the settings of the box, as a file can hold them."""
    settings = point.algorithm.origin.settings
    return {key: "none" if settings[key] is None else settings[key] for key in contender.box}


def measures(runs: Sequence[tuple[int, Run]], target: float) -> dict[str, list[Any]]:
    """What is measured of each run.

    `held` is the round from which the target is held; None for a run that diverged. Bytes and seconds are those until
    that round, or of the whole run if there is no such round.
    """
    held = [None if run.diverged else run.held_from(target) for _, run in runs]
    until = [len(run.seconds) if at is None else at for (_, run), at in zip(runs, held, strict=True)]

    def total(name: str) -> list[float]:
        return [float(getattr(run, name)[:n].sum(dtype=float)) for (_, run), n in zip(runs, until, strict=True)]

    return {
        "draw": [draw for draw, _ in runs],
        "seed": [run.seed for _, run in runs],
        "held": held,
        "first": [run.rounds_to(target) for _, run in runs],
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
