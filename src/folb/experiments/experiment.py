"""An experiment: the choices of a comparison, checked; their file; and those that distinguish it in a list."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from folb import data
from folb.errors import InputError, check, check_number, check_whole, choose
from folb.experiments import box as boxes
from folb.experiments.settings import read
from folb.measures import checked
from folb.results.summary import spelt
from folb.simulation.settled import Evaluate, check_evaluate
from folb.store import experiment_file

BY_DATASET = "by dataset"


@dataclass(frozen=True)
class Experiment:
    """The choices of a comparison. The fields are the keys of an experiment file and the command's options.

    `set` maps a setting to a value or, for an algorithm's, to a list of values to sweep. A setting goes to
    every part that has it: dataset, model, system, algorithms. `{"folb": {"mu": 0.1}}` is only for `folb`.
    `box` maps settings of algorithms to ranges or values, as `folb.experiments.box` spells them. `points` points are
    drawn from it, by the seed `box_seed`, and each is run with every combination of `set`. `{"folb": {...}}` is
    for one algorithm here, too.
    The model "by dataset" is the dataset's usual model; it is replaced by the name of that model. Without a `target`,
    it is the dataset's usual one.
    """

    dataset: str
    model: str = BY_DATASET
    system: str = "uniform"
    objective: str = "uniform"
    algorithms: Sequence[str] = ("folb", "fedprox", "fedavg")
    rounds: int = 100
    seeds: Sequence[int] = (0, 1, 2, 3, 4)  # a number n is taken as the seeds 0 .. n-1
    target: float = None  # type: ignore[assignment]
    evaluate_every: int = 1
    evaluate: Evaluate = None  # "all", or how many samples of each side; None: by the model's cost
    device_samples: int | None = None  # at most so many training samples of each device; None: all
    records: bool = False  # keep every device's weight and gamma in every round
    metrics: Sequence[str] = ()  # measured besides the accuracy, such as fairness, f1, auc or top5
    set: Mapping[str, Any] = None  # type: ignore[assignment]
    box: Mapping[str, Any] = None  # type: ignore[assignment]
    points: int | None = None  # with a box: 12
    box_seed: int | None = None  # with a box: 0

    def __post_init__(self) -> None:
        """Check everything that can be checked before any data is loaded."""
        put = partial(object.__setattr__, self)
        put("set", dict(self.set or {}))
        for field in ("dataset", "model", "system", "objective"):
            check(field, getattr(self, field), isinstance(getattr(self, field), str), "should be a name")
            try:
                getattr(self, field).encode()
            except UnicodeEncodeError:
                raise InputError(field, getattr(self, field), "should be in UTF-8") from None
        if self.model == BY_DATASET:
            put("model", data.defaults(self.dataset).model)
        if self.target is None:
            put("target", data.defaults(self.dataset).target)
        names = self.algorithms
        check("algorithms", names, isinstance(names, list | tuple) and names, "should be a list of at least one name")
        check("algorithms", list(names), all(isinstance(name, str) for name in names), "should be names")
        # a user's own function is called by its name, without the name of its file
        called = [name.rpartition(":")[2] for name in names]
        if twice := [name for name in called if called.count(name) > 1]:
            expected = f"should be different names: two are called {twice[0]}; rename a function of your own"
            raise InputError("algorithms", list(names), expected)
        hints = get_type_hints(Experiment)
        for field in ("rounds", "evaluate_every", "target", "evaluate", "device_samples", "records"):
            put(field, read(field, hints[field], getattr(self, field)))
        for field in ("rounds", "evaluate_every"):
            check(field, getattr(self, field), getattr(self, field) >= 1, "should be at least 1")
        if self.evaluate_every > self.rounds:
            raise InputError("evaluate_every", self.evaluate_every, f"should be at most rounds = {self.rounds}")
        check_number("target", self.target, lambda target: target > 0, "should be more than 0")
        choose("objective", self.objective, ("uniform", "samples"))
        put("algorithms", tuple(names))
        put("seeds", _seeds(self.seeds))
        check_evaluate(self.evaluate)
        if self.device_samples is not None:
            check_whole("device_samples", self.device_samples, 1, 2**31 - 1)
        put("metrics", checked(self.metrics))
        put("box", {} if self.box in (None, {}) else boxes.spelt(self.box))
        if self.box and not boxes.is_empty(self.box):
            for field, usual, bounds in (("points", boxes.POINTS, (1, 10**6)), ("box_seed", 0, (0,))):
                given = getattr(self, field)
                put(field, usual if given is None else read(field, int, given))
                check_whole(field, getattr(self, field), *bounds)
        elif self.box or (self.points, self.box_seed) != (None, None):
            raise InputError("box", self.box, f"should have a range or values for a setting, {boxes.EXAMPLE}")

    @property
    def named(self) -> list[str]:
        """The names that may be of users' own files."""
        return [self.model, self.system, *self.algorithms, *self.metrics]


def _seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        check("seeds", seeds, 1 <= seeds <= 10**6, "should be from 1 to 1000000, or a list of seeds")
        return tuple(range(seeds))
    check("seeds", seeds, isinstance(seeds, list | tuple), "should be a number of seeds, or a list of them")
    numbers = tuple(read("seeds", int, seed) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise InputError("seeds", list(seeds), "should be different whole numbers of at least 0")
    return numbers


def from_toml(path: Path) -> Experiment:
    """An experiment from a file whose keys are the fields of `Experiment`."""
    return from_fields(experiment_file.read(path, piped=True), f"{path}: ")


def from_fields(content: Mapping[str, Any], where: str = "") -> Experiment:
    """An experiment from a mapping whose keys are the fields of `Experiment`; `where` begins error messages."""
    known = [field.name for field in fields(Experiment)]
    for key in content:
        choose(f"{where}key", key, known)
    check(f"{where}dataset", None, "dataset" in content, "should name a dataset or a path")
    for key in ("set", "box"):
        table = content.get(key, {})
        check(f"{where}{key}", table, isinstance(table, Mapping), f"should be a table, [{key}]")
    return Experiment(**content)


def to_mapping(experiment: Experiment) -> dict[str, Any]:
    """The experiment as the keys and values of a file."""
    given = {field.name: getattr(experiment, field.name) for field in fields(experiment)}
    absent = () if experiment.box else ("box", "points", "box_seed")
    return {name: value for name, value in given.items() if value is not None and name not in absent}


def to_toml(experiment: Experiment, note: str = "") -> str:
    """The experiment as a file that `folb run` takes."""
    return experiment_file.to_text(to_mapping(experiment), note)


SHOWN = 6  # the most values of a setting; of more, the first and the last
ELSEWHERE = ("dataset", "set", "box")  # the title has the dataset, and parts have their settings


def differs(experiment: Experiment, parts: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The experiment's own choices, as `system=network rounds=200 folb.local.mu=0.1`; empty if it has none.

    `parts` are names, each with its usual settings and those that it was given.
    A setting with the same value in every part that has it stands without the part's name.
    """
    by_dataset = data.defaults(experiment.dataset)
    usual = {field.name: field.default for field in fields(Experiment)}
    usual |= {"model": by_dataset.model, "target": by_dataset.target, "points": boxes.POINTS, "box_seed": 0}
    words = []
    for name, default in usual.items():
        value = getattr(experiment, name)
        if name not in ELSEWHERE and value is not None and value != default:
            counted = name == "seeds" and value == tuple(range(len(value)))  # 0, 1, … are told by their number
            words.append(f"{name}={_text(len(value) if counted else value)}")
    own: dict[str, dict[str, str]] = {}  # for each setting, its values by part
    takers: dict[str, set[str]] = {}
    for part, usual_values, given in parts:
        for name, default in usual_values.items():
            takers.setdefault(name, set()).add(part)
            if name in given and given[name] != default:
                own.setdefault(name, {})[part] = _text(given[name])
    for name, values in own.items():
        if len(set(values.values())) == 1 and set(values) == takers[name]:
            words.append(f"{name}={next(iter(values.values()))}")
        else:
            words += [f"{part}.{name}={text}" for part, text in values.items()]
    return " ".join(words)


def _text(value: Any) -> str:
    """A value without spaces; a path without its directories."""
    if isinstance(value, list | tuple):
        texts = list(map(_text, value))
        return ",".join(texts if len(texts) <= SHOWN else [*texts[:2], "…", texts[-1]])
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "_".join(os.path.basename(spelt(value)).split())
