"""What follows from the stored results: measures, ratios in pairs of runs, the best of each group, and the goals.

A ratio is of one contender to another on one dataset: the geometric mean over the pairs of runs with the same draw and
seed, with Student's 95 % interval over the means of the draws (over all pairs where there are fewer than five draws).
Below 1 is better. A run that never holds the target counts with twice the rounds, bytes and seconds that it had.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folb.experiments.box import POINTS
from folb.results import summary
from folb.results.run import HELD, held_from
from folb.results.summary import Effect, interval
from folb.typing import NDArray
from folb_studies.arena import cells, contest
from folb_studies.arena.entries import YOURS, Contender, Dataset
from folb_studies.results import Cell, Results

FEW = 5  # draws: an interval over the means of fewer says nothing
ROUNDS, FINAL = "rounds", "final"
MEASURES = {
    ROUNDS: "rounds to the target",
    "bytes_up": "bytes up to the target",
    "bytes_down": "bytes down to the target",
    "bytes": "bytes up and down to the target",
    "seconds": "simulated seconds to the target",
    FINAL: "final accuracy",
}
NOT_RUN = "not run"
NAMELESS = "of no dataset and contender of the files; if it is of your own data, give --datasets FILE"
OURS, ABLATION, LIMIT = "ours", "ablation", "limit"
RIVALS = {  # the groups that ours are compared with, by name
    "classic": ("classic",),
    "averaged": ("averaged",),
    "all published": ("classic", "averaged", "published"),
    "drawn by samples": ("drawn",),
}


NOTHING = "Not run."


class Ratio(NamedTuple):
    """A contender against the best of some rivals on a dataset. The effect is a logarithm, except for accuracy."""

    dataset: str
    rival: str
    effect: Effect
    whole: bool  # all rivals were run


class Overall(NamedTuple):
    """The geometric mean over datasets of a contender's ratios to some rivals, and its interval."""

    ratios: Sequence[Ratio]
    effect: Effect

    @property
    def elsewhere(self) -> Effect:
        """The same for datasets that are as different as these, whose ratios are a sample: Student's interval."""
        return interval(np.array([ratio.effect.value for ratio in self.ratios]), np.zeros(len(self.ratios)))

    @property
    def likely(self) -> Effect:
        """What to expect elsewhere, if there are several datasets to judge by."""
        return self.elsewhere if len(self.ratios) > 1 else self.effect

    @property
    def single(self) -> Effect:
        """The same for one more dataset."""
        wide, n = self.elsewhere, len(self.ratios)
        half = (wide.high - wide.value) * math.sqrt(n + 1)
        return wide._replace(low=wide.value - half, high=wide.value + half)


class Goal(NamedTuple):
    """A goal, what was reached, and whether it is met; None if it cannot be said yet."""

    says: str
    reached: str
    met: bool | None


class Standings:
    """The results that are there, of contenders on datasets."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        contenders: Sequence[Contender],
        results: Results,
        points: int = POINTS,
        file: Path | None = None,
    ) -> None:
        self.everything, self.points = list(datasets), points
        self.file = file  # of the user's own datasets
        self.contenders = [*contenders, *cells.own(results, [one.name for one in contenders])]
        self.cells: dict[tuple[str, str], Cell] = {}
        self.stale: list[tuple[str, str]] = []  # stored, but of other settings than the files have
        reference = contest.reference(contenders)
        for dataset in self.datasets:
            target: Any = None
            for one in sorted(self.contenders, key=lambda one: one.name != reference.name):
                cell = cells.read(results, dataset, one)
                if cell is None or one.name in dataset.without:
                    continue
                if not cells.fits(cell, dataset, one, points, target):
                    self.stale.append((dataset.name, one.name))
                    continue
                self.cells[dataset.name, one.name] = cell
                if one.name == reference.name:
                    target = cell["target"]

    @property
    def wanted(self) -> int:
        """How many combinations of a contender and a dataset there are."""
        return sum(one.name not in dataset.without for dataset in self.datasets for one in self.contenders)

    @property
    def datasets(self) -> list[Dataset]:
        """The datasets that are not left out."""
        return [dataset for dataset in self.everything if not dataset.left_out]

    @cached_property
    def present(self) -> list[Dataset]:
        """The datasets with results."""
        return [dataset for dataset in self.datasets if any(name == dataset.name for name, _ in self.cells)]

    @cached_property
    def passed_over(self) -> set[tuple[str, str]]:
        """The results whose winner is not the best of the tried points: `folb arena` runs these again."""
        return {where for where, cell in self.cells.items() if cell["tried"] and cells.passed_over(cell)}

    def outdated(self, name: str) -> str:
        """Why stored results of that name would be run again, or ""."""
        passed_over, current, stale = (
            {cells.name(*key) for key in keys} for keys in (self.passed_over, self.cells, self.stale)
        )
        if name in passed_over:
            return "another tried point is better than the winner"
        if name in current:
            return ""
        return "of other settings" if name in stale else NAMELESS

    def held(self, dataset: Dataset, contender: Contender) -> str:
        """When a contender holds the target on a dataset, as text: the median over runs, and how many never do."""
        cell = self.cells.get((dataset.name, contender.name))
        if cell is None:
            return "left out" if contender.name in dataset.without else NOT_RUN
        return summary.arrival(cell["runs"]["held"])

    def members(self, groups: Sequence[str]) -> list[Contender]:
        """The contenders of some groups."""
        return [one for one in self.contenders if set(groups) & set(one.groups)]

    def best(self, dataset: str, groups: Sequence[str], measure: str = ROUNDS) -> tuple[str | None, bool]:
        """The best of some groups on a dataset, by its mean over the reported runs, and whether all of them were run.

        This favours the groups: their best is chosen by the results that it is then compared with.
        """
        names = [one.name for one in self.members(groups)]
        means = {
            name: float(np.mean(list(measured(self.cells[dataset, name], measure).values())))
            for name in names
            if (dataset, name) in self.cells
        }
        without = next(one.without for one in self.everything if one.name == dataset)
        whole = set(means) == set(names) - set(without)
        better = max if measure == FINAL else min
        return (better(means, key=lambda name: means[name]) if means else None), whole

    def ratio(self, dataset: str, contender: str, rival: str, measure: str = ROUNDS) -> Effect | None:
        """A contender against a rival on a dataset, if both have runs in common."""
        if (dataset, contender) not in self.cells or (dataset, rival) not in self.cells:
            return None
        ours, theirs = (measured(self.cells[dataset, name], measure) for name in (contender, rival))
        pairs = {key: ours[key] - theirs[key] for key in ours if key in theirs}
        if not pairs:
            return None
        draws = np.array([draw for draw, _ in pairs])
        if len(np.unique(draws)) < FEW:
            draws = np.zeros_like(draws)
        return interval(np.array(list(pairs.values())), draws)

    def ratios(self, contender: str, groups: Sequence[str], measure: str = ROUNDS) -> list[Ratio]:
        """A contender against the best of some groups, on each dataset that has both."""
        ratios = []
        for dataset in self.present:
            rival, whole = self.best(dataset.name, groups, measure)
            effect = rival and self.ratio(dataset.name, contender, rival, measure)
            if rival and effect:
                ratios.append(Ratio(dataset.name, rival, effect, whole))
        return ratios

    def overall(self, contender: str, groups: Sequence[str], measure: str = ROUNDS) -> Overall | None:
        """The same over all datasets."""
        ratios = self.ratios(contender, groups, measure)
        return Overall(ratios, mean([one.effect for one in ratios])) if ratios else None

    def higher(self, contender: str, groups: Sequence[str], share: float) -> Overall | None:
        """The same for another target: this share of what the best of the groups ends with.

        Only medians over the runs are stored for each round, so they stand for the runs. Nobody was tuned for this.
        """
        ratios = []
        for dataset in self.present:
            names = [one.name for one in self.members(groups) if (dataset.name, one.name) in self.cells]
            if not names or (dataset.name, contender) not in self.cells:
                continue
            curves = {name: _curve(self.cells[dataset.name, name]) for name in (*names, contender)}
            target = share * max(float(curves[name][-HELD:].mean()) for name in names)
            logs = {name: _until(curve, target, dataset) for name, curve in curves.items()}
            rival = min(names, key=lambda name: logs[name])
            value = logs[contender] - logs[rival]
            _, whole = self.best(dataset.name, groups)
            ratios.append(Ratio(dataset.name, rival, Effect(value, value, value, 1), whole))
        return Overall(ratios, mean([one.effect for one in ratios])) if ratios else None

    def goals(self) -> list[Goal]:
        """The goals of the contenders in the group ours, which are about our datasets."""
        if self.file is not None:
            return []
        ours = self.members([OURS])
        tuned = [one for one in ours if one.tuned]
        goals = [goal for one in tuned for goal in (self._first(one), self._second(one))]
        return goals + [self._third(one, tuned[0] if tuned else None) for one in ours if not one.tuned]

    def _first(self, one: Contender) -> Goal:
        says = (
            f"{one.title}, tuned: rounds to the target at most 0.5 of the best of the tuned classic ones, as the "
            "geometric mean over datasets, and above 1.0 of it on none"
        )
        return self._goal(says, one, "classic", 0.5, 1.0)

    def _second(self, one: Contender) -> Goal:
        says = (
            f"{one.title}, tuned: rounds to the target at most 0.8 of the best of all published ones, averaged ones "
            "too, as the geometric mean over datasets, with no more bytes to the target than that best one"
        )
        goal = self._goal(says, one, "all published", 0.8)
        if goal.met is None and goal.reached == NOTHING:
            return goal
        fastest = self.ratios(one.name, RIVALS["all published"])
        sent = [self.ratio(ratio.dataset, one.name, ratio.rival, "bytes") for ratio in fastest]
        total = mean([effect for effect in sent if effect])
        met = None if goal.met is None else goal.met and at_most(total, 1.0)
        return goal._replace(reached=f"{goal.reached} Bytes, up and down together: {text(total)}.", met=met)

    def _third(self, one: Contender, tuned: Contender | None) -> Goal:
        says = (
            f"{one.title}, with its defaults: rounds to the target at most 0.7 of the best of the tuned classic ones, "
            "as the geometric mean over datasets, above 1.1 of it on none, and at most 1.25 of ours tuned"
        )
        goal = self._goal(says, one, "classic", 0.7, 1.1)
        beside = [
            effect for dataset in self.present if tuned and (effect := self.ratio(dataset.name, one.name, tuned.name))
        ]
        if not beside:
            return goal._replace(met=None)
        total = mean(beside)
        met = None if goal.met is None else goal.met and at_most(total, 1.25)
        return goal._replace(reached=f"{goal.reached} Beside ours tuned: {text(total)}.", met=met)

    def _goal(self, says: str, one: Contender, rivals: str, most: float, worst: float = math.inf) -> Goal:
        overall = self.overall(one.name, RIVALS[rivals])
        if overall is None:
            return Goal(says, NOTHING, None)
        last = max(overall.ratios, key=lambda ratio: ratio.effect.value)
        whole = len(overall.ratios) == len(self.datasets) and all(ratio.whole for ratio in overall.ratios)
        met = at_most(overall.effect, most) and at_most(last.effect, worst)
        title = next(dataset.title for dataset in self.datasets if dataset.name == last.dataset)
        datasets = f"{len(overall.ratios)} of {len(self.datasets)} datasets"
        reached = f"{text(overall.effect)} over {datasets}; the largest is {text(last.effect)}, on {title}."
        return Goal(says, reached, met if whole else None)


def mean(effects: Sequence[Effect]) -> Effect:
    """The mean of effects on different datasets. Its interval takes their errors as independent."""
    n = len(effects)
    value = sum(effect.value for effect in effects) / n
    half = math.sqrt(sum((effect.high - effect.value) ** 2 for effect in effects)) / n
    return Effect(value, value - half, value + half, sum(effect.runs for effect in effects))


def _curve(cell: Cell) -> NDArray:
    """The median accuracy in each evaluated round; 0 where it is not a number."""
    return np.array([0.0 if value is None else value for value in cell["accuracy"]])


def _until(curve: NDArray, target: float, dataset: Dataset) -> float:
    """The logarithm of the rounds until a curve holds a target."""
    rounds = dataset.evaluate_every * np.arange(1, len(curve) + 1)
    held = held_from(rounds, curve, target)
    return cells.log_rounds([held], float(rounds[-1]))[0]


def at_most(effect: Effect, ratio: float) -> bool:
    """Whether an effect is at most a ratio; a rounding error of logarithms does not decide."""
    return effect.value <= math.log(ratio) + 1e-9


def measured(cell: Cell, measure: str) -> dict[tuple[int, int], float]:
    """A measure of each run, by draw and seed: its logarithm, or for accuracy the number itself."""
    runs = dict(cell["runs"])
    if measure == "bytes":
        runs[measure] = [up + down for up, down in zip(runs["bytes_up"], runs["bytes_down"], strict=True)]
    if measure == ROUNDS:
        values = cells.log_rounds(runs["held"], cell["rounds"])
    elif measure == FINAL:
        values = [0.0 if value is None else value for value in runs[FINAL]]
    else:
        values = cells.logarithms(runs["held"], runs[measure])
    return dict(zip(zip(runs["draw"], runs["seed"], strict=True), values, strict=True))


def text(effect: Effect, measure: str = ROUNDS) -> str:
    """An effect and its interval, as people read them: a ratio, or points of accuracy."""
    if measure == FINAL:
        return f"{100 * effect.value:+.1f} [{100 * effect.low:+.1f}, {100 * effect.high:+.1f}]"
    value, low, high = (f"{math.exp(x) if x < 99 else math.inf:.2f}" for x in effect[:3])
    return f"{value} [{low}, {high}]"


def shown(standings: Standings) -> list[Contender]:
    """The contenders whose ratios a page shows: ours, and the reader's own."""
    return standings.members([OURS, YOURS])


def document(standings: Standings) -> dict[str, Any]:
    """The standings as one JSON-ready document. The effects of ratios are logarithms."""
    return {
        "points": standings.points,
        "left_out": {one.name: one.left_out for one in standings.everything if one.left_out},
        "stale": [list(pair) for pair in standings.stale],
        "cells": [
            {"dataset": dataset, "contender": name, **{key: cell[key] for key in ("target", "chosen", "runs")}}
            for (dataset, name), cell in standings.cells.items()
        ],
        "ratios": [
            {"contender": one.name, "against": rivals, "measure": measure} | _plain(ratio)
            for one in shown(standings)
            for rivals, groups in RIVALS.items()
            for measure in MEASURES
            for ratio in standings.ratios(one.name, groups, measure)
        ],
        "goals": [goal._asdict() for goal in standings.goals()],
    }


def _plain(ratio: Ratio) -> dict[str, Any]:
    finite = {key: value if math.isfinite(value) else None for key, value in ratio.effect._asdict().items()}
    return {"dataset": ratio.dataset, "best": ratio.rival, "all_rivals_run": ratio.whole, **finite}


def unfinished(standings: Standings) -> Iterator[tuple[Dataset, list[str]]]:
    """The datasets on which some contenders have no results, and their names."""
    for dataset in standings.datasets:
        names = [
            one.name
            for one in standings.contenders
            if one.name not in dataset.without and (dataset.name, one.name) not in standings.cells
        ]
        if names:
            yield dataset, names
