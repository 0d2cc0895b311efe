"""The files of the arena: its datasets and its contenders.

A dataset is an experiment without an algorithm, with the draws and seeds to tune on and those to report. They share
none. A contender is an algorithm with fixed settings (`set`) and a box of settings to tune, as
`folb.experiments.box` spells it. An empty box means that nothing is tuned.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from folb.errors import InputError
from folb.experiments import box as boxes
from folb.experiments.experiment import Experiment
from folb_studies.typed_tables import by_path, made

LR = "local.lr"
DECADES = 3  # that the step sizes of a box span, at least
UNUSED_TARGET = 0.7  # only in the names of run directories: a rule gives the targets of the results
MADE = " (ours: make pages)"  # on pages of our datasets
YOURS = "yours"  # the group of a contender from the command line


@dataclass(frozen=True)
class Trials:
    """Draws of the data and seeds: every draw with every seed or, with `one_each`, the i-th with the i-th."""

    seeds: Sequence[int]
    draws: Sequence[int] = ()  # none: the dataset has no draws
    one_each: bool = False

    def seeds_of(self, draw: int | None) -> list[int]:
        """The seeds that a draw is run with."""
        return [self.seeds[self.draws.index(draw)]] if self.one_each and draw is not None else list(self.seeds)

    @property
    def pairs(self) -> int:
        """How many runs there are."""
        return len(self.seeds) if self.one_each else len(self.seeds) * max(len(self.draws), 1)

    def __str__(self) -> str:
        """In words."""
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {_span(self.seeds)}"
        if not self.draws:
            return seeds
        return f"draw{'s' if len(self.draws) > 1 else ''} {_span(self.draws)} with {seeds}" + (
            ", one each" if self.one_each else ""
        )


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


@dataclass(frozen=True)
class Dataset:
    """A dataset with its model, its system and its rounds, and what it is tuned and reported on."""

    name: str
    title: str
    dataset: str
    rounds: int
    tuning: Mapping[str, Any]
    reported: Mapping[str, Any]
    model: str = "by dataset"
    system: str = "uniform"
    objective: str = "uniform"
    evaluate_every: int = 1
    loss_samples: int | None = None  # training samples that the loss is measured on; None: all
    set: Mapping[str, Any] = field(default_factory=dict)
    every_device_rounds: int | None = None  # of a contender with every device in every round
    without: Mapping[str, str] = field(default_factory=dict)  # contenders that are not run here, and why
    left_out: str = ""  # why no contender is run here

    def __post_init__(self) -> None:
        """Check that nothing that is tuned on is reported."""
        check_name("dataset", self.name, "[a-z0-9_.-]+")
        if self.loss_samples is not None and self.loss_samples < 1:
            raise InputError(f"{self.name}: loss_samples", self.loss_samples, "should be at least 1; all, if left out")
        for name in ("draws", "seeds"):
            if shared := sorted(set(getattr(self.trials, name)) & set(getattr(self.report, name))):
                raise InputError(f"{self.name}: tuning", shared, f"should be none of the {name} that are reported")
        if bool(self.trials.draws) is not bool(self.report.draws):
            raise InputError(f"{self.name}: tuning", dict(self.tuning), "should have draws if `reported` has, or none")

    @property
    def trials(self) -> Trials:
        """What everyone is tuned on."""
        return _trials(f"{self.name}: tuning", self.tuning)

    @property
    def report(self) -> Trials:
        """What the winners are run on."""
        return _trials(f"{self.name}: reported", self.reported)

    def experiments(self, trials: Trials, **given: Any) -> Iterator[tuple[int, Experiment]]:
        """The experiment of each draw with the fields `given`; settings in `set` come on top of the dataset's."""
        known = {
            key: getattr(self, key) for key in ("dataset", "model", "system", "objective", "rounds", "evaluate_every")
        }
        settings = {**self.set, **given.pop("set", {})}
        known |= {"evaluate": "all" if self.loss_samples is None else self.loss_samples, "target": UNUSED_TARGET}
        for draw in trials.draws or (None,):
            drawn = settings if draw is None else {**settings, "draw": draw}
            yield draw or 0, Experiment(**{**known, "seeds": trials.seeds_of(draw), **given, "set": drawn})


def _trials(where: str, given: Mapping[str, Any]) -> Trials:
    trials: Trials = made(where, Trials, given)
    for name in ("seeds", "draws"):
        numbers = getattr(trials, name)
        if len(frozenset(numbers)) < len(numbers) or min(numbers, default=0) < 0:
            raise InputError(f"{where}: {name}", list(numbers), "should be different whole numbers of at least 0")
    if not trials.seeds:
        raise InputError(f"{where}: seeds", [], "should be at least one")
    if trials.one_each and len(trials.seeds) != len(trials.draws):
        raise InputError(f"{where}: seeds", list(trials.seeds), "should be as many as draws, because of one_each")
    return trials


@dataclass(frozen=True)
class Contender:
    """An algorithm with fixed settings, and a box of settings to tune."""

    name: str
    algorithm: str
    title: str = ""
    paper: str = ""  # where it was published
    groups: Sequence[str] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    box: Mapping[str, Any] = field(default_factory=dict)
    every_device: bool = False  # K = N
    note: str = ""  # what a reader should know of it before comparing

    def __post_init__(self) -> None:
        """Check the name, which is part of a file's name, and that the range of step sizes is wide enough."""
        check_name("contender", self.name, "[A-Za-z0-9_.+]+")  # no "-": it ends a dataset's name in a file's name
        ranges = boxes.spelt(self.box)
        steps = boxes.parse(LR, ranges[LR]) if LR in ranges else None
        if isinstance(steps, boxes.Range) and steps.high < 10**DECADES * steps.low * (1 - 1e-9):
            expected = f"should span at least {DECADES} decades, as log:0.001..1"
            raise InputError(f"{self.name}: {LR} of the box", str(steps), expected)

    @property
    def tuned(self) -> bool:
        """Whether there is anything to tune."""
        return not boxes.is_empty(self.box)

    @property
    def part(self) -> str:
        """The algorithm's name, without the file of a user's own."""
        return self.algorithm.rpartition(":")[2]

    def identity(self) -> dict[str, Any]:
        """What its results depend on, JSON-ready."""
        about = {key: value for key, value in asdict(self).items() if key not in ("title", "paper", "groups", "note")}
        path = Path(self.algorithm.rpartition(":")[0])
        if ".py:" in self.algorithm and path.is_file():
            about["file"] = hashlib.sha256(path.read_bytes()).hexdigest()
        return about


def check_name(what: str, name: str, pattern: str) -> None:
    """Raise unless a name, which is a part of a file's, has only the characters of a pattern."""
    if not re.fullmatch(pattern, name):
        raise InputError(f"name of a {what}", name, f"should have only these characters: {pattern}")


def datasets(path: Path | None = None) -> list[Dataset]:
    """The datasets of our file, or of the user's own."""
    return read_tables(path or resources.files("folb_studies.arena") / "datasets.toml", "dataset", Dataset)


def typed(study: str, file: Path | None) -> str:
    """The command of a study, with the user's file of datasets if there is one."""
    return f"folb {study}" if file is None else f"folb {study} --datasets {shlex.quote(str(file))}"


def contenders() -> list[Contender]:
    """The contenders of our file."""
    return read_tables(resources.files("folb_studies.arena") / "contenders.toml", "contender", Contender)


def read_tables(path: Any, key: str, kind: type) -> list[Any]:
    """The tables [[key]] of a file as objects of the dataclass `kind`, with different names."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{key}s", str(path), f"cannot be read: {error}") from error
    tables = document.pop(key, [])
    if document or not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path.name}: {key}s", sorted(document), f"should be tables, and nothing else: [[{key}]]")
    entries = [_entry(path.name, kind, table) for table in tables]
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise InputError(f"{path.name}: {key}", names, "should have different names")
    return entries


def _entry(file: str, kind: type, table: Mapping[str, Any]) -> Any:
    """An object from a table; every error begins with the file."""
    try:
        settings = {key: by_path(table[key]) for key in ("set", "box") if isinstance(table.get(key), dict)}
        return made(file, kind, {**table, **settings})
    except InputError as error:
        if error.field.startswith(f"{file}: "):
            raise
        raise InputError(f"{file}: {error.field}", error.value, error.expected) from error


def own(algorithm: str, box: Mapping[str, Any]) -> Contender:
    """A contender of the user's own: an algorithm of `folb list` or one in a file, with its box."""
    name = algorithm.rpartition(":")[2]
    return Contender(name, algorithm, title=name, groups=(YOURS,), box=by_path(box))


def with_own(known: Sequence[Contender], mine: Contender) -> list[Contender]:
    """The contenders and one more; it gets another name if there is one of that name."""
    name = mine.name
    while name in {one.name for one in known}:
        name = f"{YOURS}.{name}"
    return [*known, replace(mine, name=name)]


def chosen(known: Sequence[Any], patterns: Sequence[str], field: str) -> list[Any]:
    """The entries that a pattern fits, by name or by group."""
    chosen: dict[str, Any] = {}
    for pattern in patterns:
        fitting = [
            one for one in known if any(fnmatchcase(name, pattern) for name in (one.name, *getattr(one, "groups", ())))
        ]
        if not fitting:
            raise InputError(field, pattern, f"should fit one of {', '.join(one.name for one in known)}")
        chosen |= {one.name: one for one in fitting}
    return [one for one in known if one.name in chosen]


def digest(dataset: Dataset, contender: Contender, points: int, target: Any) -> str:
    """A digest of what the results of a contender on a dataset depend on."""
    # `loss_samples` changes no accuracy: the loss breaks ties in a search, and shows which runs diverged
    apart = ("title", "loss_samples", "without", "left_out")
    about = {key: value for key, value in asdict(dataset).items() if key not in apart}
    if not contender.every_device:
        del about["every_device_rounds"]
    content = [about, contender.identity(), points if contender.tuned else None, target]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
