"""The files of the defence: its datasets, its rules, and the attacks that each rule meets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from folb.core.liars import ATTACKS
from folb.errors import InputError, choose
from folb.experiments.experiment import Experiment
from folb_studies.arena.entries import UNUSED_TARGET, check_name, read_tables

HONEST = "honest"
EVERYWHERE = (
    *("flipped", "flipped_x1000", "not_finite", "noise", "reversed", "alie", "ipm", "min_max", "min_sum"),
    *("labels", "backdoor", "adaptive"),
)
PACE = 0  # the share of the runs without liars that are evaluated in every round


@dataclass(frozen=True)
class Dataset:
    """A dataset with its model and its rounds, and the shares of liars in percent."""

    name: str
    title: str
    dataset: str
    rounds: int
    seeds: Sequence[int]
    shares: Sequence[int]
    evaluate_every: int = 1  # in runs under attack
    model: str = "by dataset"
    attacks: Sequence[str] = EVERYWHERE
    set: Mapping[str, Any] = field(default_factory=dict)  # a table is for the algorithm of that name
    goal: bool = False  # the goal is about this dataset

    def __post_init__(self) -> None:
        """Check what `Experiment` does not check."""
        check_name("dataset", self.name, "[a-z0-9_.-]+")
        if len(frozenset(self.shares)) < len(self.shares) or not all(0 < share < 50 for share in self.shares):
            raise InputError(f"{self.name}: shares", list(self.shares), "should be different percents from 1 to 49")
        for name in self.attacks:
            choose(f"{self.name}: attacks", name, ATTACKS.parts)


@dataclass(frozen=True)
class Rule:
    """An algorithm with settings that should withstand liars."""

    name: str
    algorithm: str
    title: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    informed: bool = False  # its `robust.liars` is the true share
    own_samples: bool = False  # the server needs samples of its own
    attacks: Sequence[str] = ()  # besides those of the dataset

    def __post_init__(self) -> None:
        """Check the name, which is part of a file's name, and the attacks."""
        check_name("rule", self.name, "[A-Za-z0-9_.+]+")  # no "-": it ends a dataset's name in a file's name
        for name in self.attacks:
            choose(f"{self.name}: attacks", name, ATTACKS.parts)


@dataclass(frozen=True)
class Battle:
    """A rule on a dataset with a share of liars: all attacks, and no attack."""

    dataset: Dataset
    rule: Rule
    share: int  # in percent

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.dataset.name}-{self.rule.name}-{self.share}"

    @property
    def attacks(self) -> list[str]:
        """No attack first, then the attacks."""
        return [HONEST] if self.share == PACE else [HONEST, *self.dataset.attacks, *self.rule.attacks]

    @property
    def experiment(self) -> Experiment:
        """All attacks with all seeds, as one program."""
        part = self.rule.algorithm.rpartition(":")[2]
        for_all = {key: value for key, value in self.dataset.set.items() if not isinstance(value, Mapping)}
        attack = {"attack": self.attacks, "attack.share": self.share / 100}
        informed = {"robust.liars": self.share / 100} if self.rule.informed and self.share != PACE else {}
        own = {**self.dataset.set.get(part, {}), **self.rule.set, **informed, **attack}
        return Experiment(
            dataset=self.dataset.dataset,
            model=self.dataset.model,
            algorithms=[self.rule.algorithm],
            rounds=self.dataset.rounds,
            seeds=self.dataset.seeds,
            target=UNUSED_TARGET,
            evaluate_every=1 if self.share == PACE else self.dataset.evaluate_every,
            evaluate="all",  # even if the model is costly: the page says nothing about samples
            set={**for_all, part: own},
        )

    @property
    def identity(self) -> str:
        """A digest of what its results depend on."""
        about = {key: value for key, value in asdict(self.dataset).items() if key not in ("title", "shares", "goal")}
        rule = {key: value for key, value in asdict(self.rule).items() if key not in ("title", "own_samples")}
        content = [about, rule, self.share]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def datasets(path: Path | None = None) -> list[Dataset]:
    """The datasets of our file, or of the user's own."""
    return read_tables(path or resources.files("folb_studies.defence") / "datasets.toml", "dataset", Dataset)


def rules(path: Path | None = None) -> list[Rule]:
    """The rules of our file, or of the user's own."""
    return read_tables(path or resources.files("folb_studies.defence") / "rules.toml", "rule", Rule)


def battles(datasets: Sequence[Dataset], rules: Sequence[Rule], shares: Sequence[int] | None = None) -> list[Battle]:
    """Every rule on every dataset: without liars, and with each share of them, or only with these `shares`."""
    return [
        Battle(dataset, rule, share)
        for dataset in datasets
        for rule in rules
        for share in (PACE, *dataset.shares)
        if shares is None or share in shares
    ]
