"""What follows from the stored results: what each rule loses, its pace without liars, and how near it is to the goal.

A loss is the accuracy of the same rule without an attack less that under the attack, each the mean of the last five
evaluations, in pairs of runs with the same seed. A pace is the ratio of a rule's rounds to those of the mean, until the
target is held: 97 % of what the mean ends with. Intervals are Student's, 95 %, over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from folb.errors import InputError
from folb.results.run import HELD, held_from
from folb.results.summary import Effect, interval
from folb_studies.arena.cells import NEVER
from folb_studies.arena.contest import SHARE
from folb_studies.arena.standings import at_most
from folb_studies.defence import battles
from folb_studies.defence.opponents import HONEST, PACE, Dataset, Rule
from folb_studies.defence.opponents import battles as all_battles
from folb_studies.results import Cell, Results

REFERENCE = "mean"
LIARS, MOST, SLOWER = 20, 0.03, 1.1  # the goal: percent, accuracy, times the rounds


class Standing(NamedTuple):
    """How near a rule is to the goal on a dataset."""

    rule: Rule
    attack: str  # under which it loses most
    loss: Effect
    pace: Effect | None  # a logarithm; None without runs of the reference

    @property
    def met(self) -> bool | None:
        """Whether it meets the goal; None if its pace is not known."""
        return None if self.pace is None else self.loss.value <= MOST and at_most(self.pace, SLOWER)

    @property
    def miss(self) -> float:
        """The larger of its loss and its pace, each as a multiple of what the goal allows."""
        return max(self.loss.value / MOST, math.inf if self.pace is None else math.exp(self.pace.value) / SLOWER)


class Losses:
    """The results that are there, of rules on datasets."""

    def __init__(
        self, datasets: Sequence[Dataset], rules: Sequence[Rule], results: Results, file: Path | None = None
    ) -> None:
        self.datasets, self.rules = list(datasets), list(rules)
        self.file = file  # of the user's own datasets
        self.cells: dict[tuple[str, str, int], Cell] = {}
        self.absent: list[tuple[str, str, int]] = []  # not run, or of other settings than the files have
        self.battles = all_battles(self.datasets, self.rules)
        for battle in self.battles:
            cell, key = battles.stored(results, battle), (battle.dataset.name, battle.rule.name, battle.share)
            if cell is None:
                self.absent.append(key)
            else:
                self.cells[key] = cell
        if not any(rule.name == REFERENCE for rule in self.rules):
            known = [rule.name for rule in self.rules]
            raise InputError("rules", known, f"should have {REFERENCE}, which gives the target")

    def outdated(self, name: str) -> str:
        """Why stored results of that name do not count, or ""."""
        known = {battle.name: (battle.dataset.name, battle.rule.name, battle.share) for battle in self.battles}
        if name not in known:
            return "of no battle of the files; if it is of your own data, give --datasets FILE"
        return "of other settings" if known[name] in self.absent else ""

    def accuracy(self, dataset: Dataset, rule: Rule, share: int, attack: str) -> list[float] | None:
        """What each run under an attack ended with; None if it was not run. What is not a number counts as 0."""
        cell = self.cells.get((dataset.name, rule.name, share))
        if cell is None or attack not in cell["attacks"]:
            return None
        return [value or 0.0 for value in cell["attacks"][attack]["settled"]]

    def attacks(self, dataset: Dataset, share: int) -> list[str]:
        """The attacks that a rule met on a dataset with this share of liars, no attack first."""
        here = [cell for (where, _, n), cell in self.cells.items() if (where, n) == (dataset.name, share)]
        return list(dict.fromkeys(name for cell in here for name in cell["attacks"]))

    def loss(self, dataset: Dataset, rule: Rule, share: int, attack: str) -> Effect | None:
        """What a rule loses to an attack."""
        honest, attacked = (self.accuracy(dataset, rule, share, name) for name in (HONEST, attack))
        if honest is None or attacked is None:
            return None
        return interval(np.array(honest) - np.array(attacked), np.zeros(len(honest)))

    def largest(self, dataset: Dataset, rule: Rule, share: int) -> tuple[str, Effect] | None:
        """The attack to which a rule loses most, and how much."""
        attacks = [name for name in self.attacks(dataset, share) if name != HONEST]
        known = {name: loss for name in attacks if (loss := self.loss(dataset, rule, share, name)) is not None}
        if not known:
            return None
        worst = max(known, key=lambda name: known[name].value)
        return worst, known[worst]

    def target(self, dataset: Dataset) -> float | None:
        """The target of a dataset; None without runs of the reference."""
        cell = self.cells.get((dataset.name, REFERENCE, PACE))
        return None if cell is None else SHARE * mean(mean(curve[-HELD:]) for curve in curves(cell))

    def held(self, dataset: Dataset, rule: Rule) -> list[int | None] | None:
        """For each seed, the round from which a rule holds the target without liars; None if it was not run."""
        cell, target = self.cells.get((dataset.name, rule.name, PACE)), self.target(dataset)
        if cell is None or target is None:
            return None
        return [held_from(np.arange(1, len(curve) + 1), np.array(curve), target) for curve in curves(cell)]

    def pace(self, dataset: Dataset, rule: Rule) -> Effect | None:
        """The rounds of a rule relative to those of the reference, as a logarithm."""
        reference = next(one for one in self.rules if one.name == REFERENCE)
        ours, theirs = self.held(dataset, rule), self.held(dataset, reference)
        if ours is None or theirs is None:
            return None
        logs = [np.log([at or NEVER * dataset.rounds for at in rounds]) for rounds in (ours, theirs)]
        return interval(logs[0] - logs[1], np.zeros(len(ours)))

    def standing(self, dataset: Dataset, rule: Rule) -> Standing | None:
        """How near a rule is to the goal on a dataset; None without runs under attack."""
        worst = self.largest(dataset, rule, LIARS)
        return None if worst is None else Standing(rule, *worst, self.pace(dataset, rule))

    def standings(self, dataset: Dataset) -> list[Standing]:
        """The rules from the nearest to the goal on a dataset to the farthest from it."""
        known = [standing for rule in self.rules if (standing := self.standing(dataset, rule)) is not None]
        return sorted(known, key=lambda standing: standing.miss)


def curves(cell: Cell) -> list[list[float]]:
    """The accuracy in each round, for each seed."""
    return [[value or 0.0 for value in curve] for curve in cell["accuracy"]]


def document(losses: Losses) -> dict[str, Any]:
    """The losses and paces as one JSON-ready document. Paces are logarithms."""
    return {
        "absent": [list(key) for key in losses.absent],
        "targets": {dataset.name: losses.target(dataset) for dataset in losses.datasets},
        "losses": [
            {"dataset": dataset.name, "rule": rule.name, "share": share, "attack": attack, **loss._asdict()}
            for dataset in losses.datasets
            for rule in losses.rules
            for share in dataset.shares
            for attack in losses.attacks(dataset, share)
            if (loss := losses.loss(dataset, rule, share, attack)) is not None
        ],
        "goal": [
            {
                "dataset": dataset.name,
                "rule": standing.rule.name,
                "attack": standing.attack,
                "loss": standing.loss._asdict(),
                "pace": None if standing.pace is None else standing.pace._asdict(),
                "met": standing.met,
            }
            for dataset in losses.datasets
            for standing in losses.standings(dataset)
        ],
    }
