"""An experiment: what `folb compare` and `folb run` take, checked, and turned into runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from folb import data
from folb.algorithms import ALGORITHMS, Algorithm, Common, compose, named
from folb.errors import InputError, choose
from folb.federation import Federation
from folb.models import MODELS, Model
from folb.runs import Run
from folb.settings import OWN, Setting, from_file, read, setting, settings
from folb.simulator import Observe, check, simulate, streams
from folb.system import SYSTEMS

BY_DATASET = "by dataset"


@dataclass(frozen=True)
class Experiment:
    """The choices of a comparison. The fields are the keys of an experiment file and the command's options.

    `set` maps a setting to a value or, for an algorithm's, to a list of values to sweep. A setting goes to
    every part that has it: dataset, model, system, algorithms. `{"folb": {"mu": 0.1}}` is for `folb` alone.
    The model "by dataset" is the one that goes with it, and takes its name here.
    """

    dataset: str
    model: str = BY_DATASET
    system: str = "uniform"
    objective: str = "uniform"
    algorithms: Sequence[str] = ("folb", "fedprox", "fedavg")
    rounds: int = 100
    seeds: Sequence[int] = (0, 1, 2)  # a number n is taken as the seeds 0 .. n-1
    target: float = 0.7
    evaluate_every: int = 1
    records: bool = False  # keep every device's weight and gamma in every round
    set: Mapping[str, Any] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check everything that can be checked before any data is loaded."""
        object.__setattr__(self, "set", dict(self.set or {}))
        for field in ("dataset", "model", "system", "objective"):
            if not isinstance(getattr(self, field), str):
                raise InputError(field, getattr(self, field), "should be a name")
            try:
                getattr(self, field).encode()
            except UnicodeEncodeError:
                raise InputError(field, getattr(self, field), "should be in UTF-8") from None
        if self.model == BY_DATASET:
            object.__setattr__(self, "model", data.defaults(self.dataset).model)
        if not isinstance(self.algorithms, list | tuple) or not self.algorithms:
            raise InputError("algorithms", self.algorithms, "should be a list of at least one name")
        if not all(isinstance(name, str) for name in self.algorithms):
            raise InputError("algorithms", list(self.algorithms), "should be names")
        # a function of one's own goes by its own name, without that of its file
        if len({name.rpartition(":")[2] for name in self.algorithms}) < len(self.algorithms):
            raise InputError("algorithms", list(self.algorithms), "should be different names")
        for field in ("rounds", "evaluate_every"):
            number = read(field, int, getattr(self, field))
            if number < 1:
                raise InputError(field, number, "should be at least 1")
            object.__setattr__(self, field, number)
        if self.evaluate_every > self.rounds:
            raise InputError("evaluate_every", self.evaluate_every, f"should be at most rounds = {self.rounds}")
        object.__setattr__(self, "target", read("target", float, self.target))
        if not 0 < self.target <= 1:
            raise InputError("target", self.target, "should be more than 0 and at most 1")
        choose("objective", self.objective, ("uniform", "samples"))
        object.__setattr__(self, "algorithms", tuple(self.algorithms))
        object.__setattr__(self, "seeds", _seeds(self.seeds))
        object.__setattr__(self, "records", read("records", bool, self.records))


def _seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= 10**6:
            raise InputError("seeds", seeds, "should be from 1 to 1000000, or a list of seeds")
        return tuple(range(seeds))
    if not isinstance(seeds, list | tuple):
        raise InputError("seeds", seeds, "should be a number of seeds, or a list of them")
    numbers = tuple(read("seeds", int, seed) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise InputError("seeds", list(seeds), "should be different whole numbers of at least 0")
    return numbers


def from_toml(path: Path) -> Experiment:
    """An experiment from a file whose keys are the fields of `Experiment`."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("experiment", str(path), f"cannot be read: {error}") from error
    known = [field.name for field in fields(Experiment)]
    for key in content:
        choose(f"{path}: key", key, known)
    if "dataset" not in content:
        raise InputError(f"{path}: dataset", None, "should name a dataset or a path")
    if not isinstance(content.get("set", {}), dict):
        raise InputError(f"{path}: set", content["set"], "should be a table, [set]")
    return Experiment(**content)


@dataclass(frozen=True)
class Part:
    """A chosen dataset, model, system or algorithm: its constructor and the settings it has."""

    name: str
    constructor: Callable[..., Any]
    settings: dict[str, Setting]
    swept: bool = False  # a list of values means a run for each

    def make(self, kind: type, *arguments: Any, **values: Any) -> Any:
        """What the constructor makes: a user's own may fail in any way, and is then named as the cause."""
        try:
            made = self.constructor(*arguments, **values)
        except InputError:
            raise
        except Exception as error:
            if self.constructor.__module__.startswith(OWN):
                raise InputError(self.name, values, f"fails: {type(error).__name__}: {error}") from error
            raise
        if not isinstance(made, kind):
            raise InputError(self.name, made, f"should make a folb.{kind.__name__}")
        return made


def algorithm_settings(constructor: Callable[..., Any]) -> dict[str, Setting]:
    """An algorithm's own settings, then those that all have."""
    return settings(constructor, common_settings)


def common_settings() -> dict[str, Setting]:
    """The settings that every algorithm has."""
    described = settings(compose)
    return {
        name: setting(name, hint, described[name].default)
        for name, hint in get_type_hints(Common, include_extras=True).items()
    }


def _part(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Part:
    if ".py:" in name:
        constructor = from_file(field, name)
        if field == "algorithms" and not hasattr(constructor, "__wrapped__"):
            constructor = named(constructor)
        name = name.rpartition(":")[2]
    else:
        constructor = registry[choose(field, name, registry)]
    if field == "algorithms":
        return Part(name, constructor, algorithm_settings(constructor), swept=True)
    return Part(name, constructor, settings(constructor))


@dataclass(frozen=True)
class Plan:
    """An experiment's live objects, and the experiment with every setting spelt out."""

    experiment: Experiment
    federation: Federation
    model: Any
    system: Any
    algorithms: list[Algorithm]
    identity: str  # of all that the results depend on: the experiment, the data, the user's own files
    stream: bool = False  # whether the samples stay on the host


def plan(experiment: Experiment, stream: bool | None = None) -> Plan:
    """Resolve every name and setting, load the data and build the parts; any mistake is an `InputError`.

    `stream` is explained at `simulate`.
    """
    experiment = _anywhere(experiment)
    dataset = Part(experiment.dataset, make := data.constructor(experiment.dataset), settings(make))
    model = _part("model", experiment.model, MODELS)
    system = _part("system", experiment.system, SYSTEMS)
    algorithms = [_part("algorithms", name, ALGORITHMS) for name in experiment.algorithms]
    given = _distribute([dataset, model, system, *algorithms], experiment.set)

    variants: list[Algorithm] = []
    for part, values in zip(algorithms, given[3:], strict=True):
        found = _by_dataset(part, experiment.dataset) | values
        # in the order of the signature, whatever order they came in: runs keep their places when repeated
        swept = {name: found[name] for name in part.settings if name in found}
        for combination in itertools.product(*swept.values()):
            variants.append(part.make(Algorithm, **dict(zip(swept, combination, strict=True))))
        values |= swept

    built_system = system.constructor(**given[2])
    federation = dataset.constructor(**given[0])
    built_model = model.make(Model, federation.shape, federation.classes, **given[1])
    streamed = streams(federation, stream)
    check(federation, built_model, variants, experiment.rounds, experiment.seeds, experiment.evaluate_every, streamed)
    whole = _spelt_out(experiment, [dataset, model, system, *algorithms], given)
    return Plan(whole, federation, built_model, built_system, variants, _identity(whole, federation), streamed)


def _spelt_out(experiment: Experiment, parts: list[Part], given: list[dict[str, Any]]) -> Experiment:
    """The experiment with a value for every setting that a file can hold, under the part it is for."""
    tables: dict[str, dict[str, Any]] = {}
    for part, values in zip(parts, given, strict=True):
        defaults = {name: setting.default for name, setting in part.settings.items()}
        single = {name: v[0] if part.swept and len(v) == 1 else v for name, v in values.items()}
        tables.setdefault(part.name, {}).update(
            {name: _spelt(value) for name, value in (defaults | single).items() if _plain(value)}
        )
    return replace(experiment, set={name: table for name, table in tables.items() if table})


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _spelt(value: Any) -> Any:
    """The value as a file can hold it, which has no None."""
    if isinstance(value, list | tuple):
        return [_spelt(item) for item in value]
    return "none" if value is None else value


def _anywhere(experiment: Experiment) -> Experiment:
    """The experiment with absolute paths for the user's own files: it can be repeated from any directory."""

    def absolute(name: str) -> str:
        path, _, function = name.rpartition(":")
        return f"{os.path.abspath(path)}:{function}" if os.path.isfile(path) else name

    return replace(
        experiment,
        dataset=data.located(experiment.dataset),
        model=absolute(experiment.model),
        algorithms=tuple(map(absolute, experiment.algorithms)),
    )


def _identity(experiment: Experiment, federation: Federation) -> str:
    digest = hashlib.sha256(to_toml(experiment).encode())
    for name in (experiment.model, *experiment.algorithms):
        if ".py:" in name:
            digest.update(Path(name.rpartition(":")[0]).read_bytes())
    digest.update(federation.digest.encode())
    return digest.hexdigest()


REPEAT = "folb run this file to repeat the comparison"


def to_toml(experiment: Experiment, note: str = "", about: str = REPEAT) -> str:
    """The experiment as a file that `folb run` takes."""
    lines = [f"# {about}", *([f"# the data: {note}"] if note else [])]
    for field in fields(experiment):
        if field.name != "set":
            lines.append(f"{field.name} = {_toml(getattr(experiment, field.name))}")
    nested = {key: value for key, value in experiment.set.items() if isinstance(value, Mapping)}
    for heading, content in [("set", {k: v for k, v in experiment.set.items() if k not in nested})] + [
        (f"set.{_key(key)}", value) for key, value in nested.items()
    ]:
        if content:
            lines += ["", f"[{heading}]", *(f"{_key(key)} = {_toml(value)}" for key, value in content.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # strings, numbers and booleans are alike in TOML and JSON, but for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _by_dataset(part: Part, dataset: str) -> dict[str, list[float]]:
    """The lr that goes with a dataset, where it is not the algorithm's own business; and FedProx's mu."""
    known = data.defaults(dataset)
    found = {"lr": [known.lr]} if part.settings.get("lr") == common_settings()["lr"] else {}
    return found | ({"mu": [known.mu]} if part.name == "fedprox" else {})


def _distribute(parts: list[Part], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each part, the values that `given` has for its settings: a list of them where the part is swept."""
    found: list[dict[str, Any]] = [{} for _ in parts]
    # what is meant for one part by name comes last, and wins
    for key, value in sorted(given.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            choose("set", key, [part.name for part in parts])
            for name, inner in value.items():
                _assign(parts, found, name, inner, only=key)
        else:
            _assign(parts, found, key, value)
    return found


def _assign(parts: list[Part], found: list[dict[str, Any]], name: str, value: Any, only: str | None = None) -> None:
    takers = [i for i, part in enumerate(parts) if name in part.settings and only in (None, part.name)]
    if not takers:
        _refuse(parts, name, value, only)
    for i in takers:
        kind = parts[i].settings[name].type
        if not parts[i].swept:
            found[i][name] = read(name, kind, value)
            continue
        options = value if isinstance(value, list | tuple) else [value]
        if not options:
            raise InputError(name, value, "should be at least one value")
        found[i][name] = [read(name, kind, option) for option in options]
        if len(set(map(repr, found[i][name]))) < len(options):
            raise InputError(name, value, "should be different values")


def _refuse(parts: list[Part], name: str, value: Any, only: str | None) -> None:
    """Say who has the setting that nobody chosen has; or else, what it may have been meant to be."""
    everyone = [(other, algorithm_settings(make)) for other, make in ALGORITHMS.items()]
    everyone += [(other, settings(make)) for kind in (SYSTEMS, data.DATASETS, MODELS) for other, make in kind.items()]
    owners = [other for other, known in everyone if name in known]
    if owners:
        chosen = only or ", ".join(part.name for part in parts)
        raise InputError(name, value, f"is a setting of {', '.join(owners)}, and not of {chosen}")
    choose("set", name, sorted({key for part in parts if only in (None, part.name) for key in part.settings}))


def run(
    planned: Plan,
    observe: Observe | None = None,
    checkpoints: Path | None = None,
    accelerators: int | str = 1,
) -> list[Run]:
    """Run a planned experiment."""
    experiment = planned.experiment
    return simulate(
        planned.federation,
        planned.model,
        planned.algorithms,
        rounds=experiment.rounds,
        seeds=experiment.seeds,
        system=planned.system,
        objective=experiment.objective,
        evaluate_every=experiment.evaluate_every,
        record=("weights", "gamma") if experiment.records else (),
        accelerators=accelerators,
        observe=observe,
        checkpoints=checkpoints,
        stream=planned.stream,
    )
