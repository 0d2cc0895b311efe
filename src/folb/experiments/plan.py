"""An experiment's plan: every name and setting resolved, the data loaded, the parts built."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jax.tree_util import Partial

from folb import data
from folb.core.algorithm import Algorithm, common_hints, compose, named
from folb.core.algorithms import ALGORITHMS
from folb.core.trace import Trace
from folb.data.device_trace import trace
from folb.data.federation import Federation
from folb.errors import InputError, choose
from folb.experiments import box as boxes
from folb.experiments.differs import Chosen, differs
from folb.experiments.experiment import Experiment, to_toml
from folb.experiments.settings import (
    FAILURES,
    Part,
    Setting,
    chosen_part,
    from_file,
    given_twice,
    naming_own_files,
    read,
    setting,
    settings,
)
from folb.experiments.systems import SYSTEMS
from folb.measures import ACCURACY, FAIRNESS, measure
from folb.models import MODELS, Model
from folb.simulation.sample import Evaluate, usual, words
from folb.simulation.settled import Settled, settled
from folb.store.environment import about_runs


def algorithm_settings(constructor: Callable[..., Any]) -> dict[str, Setting]:
    """An algorithm's own settings, then the settings that all algorithms have."""
    return settings(constructor, common_settings)


@cache  # to read it from the signatures takes a while
def common_settings() -> dict[str, Setting]:
    """The settings that every algorithm has."""
    described = settings(compose)
    return {
        name: setting(name, hint, described[name].default if name in described else None)
        for name, hint in common_hints().items()
    }


def _part(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Part:
    found = chosen_part(field, name, registry)
    if field != "algorithms":
        return found
    make = found.constructor
    constructor = named(make) if found.own and not hasattr(make, "named_by_folb") else make
    known = algorithm_settings(constructor)
    if found.own:
        fixed = _fixed(constructor, {name: known[name].default for name in known if name not in found.settings})
        known = {name: setting for name, setting in known.items() if name not in fixed}
    return Part(found.name, constructor, known, swept=True, own=found.own)


def _fixed(make: Callable[..., Any], common: dict[str, Any]) -> set[str]:
    """Those of the settings that all algorithms have which the code of a user's own one fixes: they cannot be set."""
    fixed: set[str] = set()
    while True:
        try:
            make(**{name: value for name, value in common.items() if name not in fixed})
        except FAILURES as error:
            if (name := given_twice(error)) not in common.keys() - fixed:
                return fixed  # another error comes again when the algorithm is made, and is then shown
            fixed.add(name)
        else:
            return fixed


@dataclass(frozen=True)
class Plan(Settled):
    """An experiment's live objects, and the experiment with every setting spelt out."""

    experiment: Experiment
    system: Any
    identity: str  # a digest of what the results depend on: the experiment, the data, the user's own files
    differs: str = ""  # the choices that are not the defaults

    @cached_property
    def runs(self) -> list[dict[str, Any]]:
        """What each run is, as environment.json has it."""
        return about_runs(self.algorithms, self.experiment.seeds, self.model.judged_by, self.metrics)

    @property
    def sampling(self) -> str:
        """What is evaluated, and how exactly, if it is a sample; otherwise ""."""
        return words(self.federation, self.evaluated, self.model.judged_by, FAIRNESS in self.experiment.metrics)

    @property
    def note(self) -> str:
        """What every output repeats: a warning about the data, and what is evaluated if it is a sample."""
        return "; ".join(filter(None, (self.federation.note, self.sampling)))


def plan(experiment: Experiment, stream: bool | None = None) -> Plan:
    """Resolve every name and setting, load the data and build the parts. Any mistake raises an `InputError`.

    `stream` is explained at `simulate`.
    """
    experiment = _anywhere(experiment)
    dataset = Part(experiment.dataset, make := data.constructor(experiment.dataset), settings(make))
    model = _part("model", experiment.model, MODELS)
    system = _part("system", experiment.system, SYSTEMS)
    algorithms = [_part("algorithms", name, ALGORITHMS) for name in experiment.algorithms]
    given = _distribute([dataset, model, system, *algorithms], experiment.set)
    drawn = _boxes(algorithms, experiment.box, given[3:])

    variants: list[Algorithm] = []
    for part, values, box in zip(algorithms, given[3:], drawn, strict=True):
        found = _by_dataset(part, experiment.dataset) | values
        # always in the order of the signature, so that a repeated experiment has the same run directory
        swept = {name: found[name] for name in part.settings if name in found and name not in box}
        points = boxes.draw(box, experiment.points or 0, experiment.box_seed or 0) if box else [{}]
        for combination, point in itertools.product(itertools.product(*swept.values()), points):
            variants.append(part.make(Algorithm, **dict(zip(swept, combination, strict=True)), **point))
        values |= swept

    if system.constructor is trace and given[2].get("file"):  # an absolute path is found from any directory
        given[2]["file"] = os.path.abspath(given[2]["file"])
    built_system = system.make(Callable, **given[2])
    if inspect.isfunction(built_system):  # a user's own: jax then sees a tree without arrays
        built_system = Partial(built_system)
    federation = dataset.constructor(**given[0])
    if experiment.device_samples is not None:
        federation = federation.smaller(experiment.device_samples)
    built_model = model.make(Model, federation.shape, federation.classes, **given[1])
    with naming_own_files([experiment.model, *experiment.metrics]):
        whole = settled(
            federation,
            built_model,
            variants,
            rounds=experiment.rounds,
            seeds=experiment.seeds,
            evaluate_every=experiment.evaluate_every,
            evaluate=experiment.evaluate,
            metrics=[from_file("metrics", name) if ".py:" in name else name for name in experiment.metrics],
            stream=stream,
        )
        known = whole.evaluated if experiment.evaluate is None else usual(federation, built_model)
    asked = _judged(experiment, built_model, None if whole.evaluated == known else experiment.evaluate)
    parts = [dataset, model, system, *algorithms]
    experiment = _spelt_out(asked, whole.evaluated or "all", parts, given, [{}, {}, {}, *drawn])
    identity = _identity(experiment, federation, built_system)
    apart = differs(asked, _chosen(asked.dataset, parts, given, drawn))
    return Plan(**vars(whole), experiment=experiment, system=built_system, identity=identity, differs=apart)


def _judged(experiment: Experiment, model: Model, evaluate: Evaluate) -> Experiment:
    """The experiment without the metrics that are measured anyway. Raises unless the target fits the model."""
    if measure(model.judged_by).is_share and experiment.target > 1:
        raise InputError("target", experiment.target, "should be more than 0 and at most 1, such as 0.7 for 70 %")
    anyway = (ACCURACY, model.judged_by)
    metrics = tuple(name for name in experiment.metrics if name not in anyway)
    return replace(experiment, metrics=metrics, evaluate=evaluate)


def _spelt_out(
    experiment: Experiment,
    evaluate: Evaluate,
    parts: list[Part],
    given: list[dict[str, Any]],
    drawn: list[dict[str, boxes.Choice]],
) -> Experiment:
    """The experiment with a value for every setting that a file can hold, under the part that it belongs to."""
    tables: dict[str, dict[str, Any]] = {}
    for part, values, box in zip(parts, given, drawn, strict=True):
        defaults = {name: setting.default for name, setting in part.settings.items()}
        single = {name: v[0] if part.swept and len(v) == 1 else v for name, v in values.items()}
        whole = {name: _spelt(value) for name, value in (defaults | single).items() if _plain(value)}
        # a setting that is none, as by default, says nothing
        unset = {*box, *(name for name, value in whole.items() if value == "none" and defaults.get(name) is None)}
        tables.setdefault(part.name, {}).update({name: v for name, v in whole.items() if name not in unset})
    return replace(
        experiment,
        evaluate=evaluate,
        set={name: table for name, table in tables.items() if table},
        box={part.name: _spelt_box(box) for part, box in zip(parts, drawn, strict=True) if box},
    )


def _chosen(
    dataset: str, parts: list[Part], given: list[dict[str, Any]], drawn: list[dict[str, boxes.Choice]]
) -> Iterator[Chosen]:
    """Each part with its usual settings, those of the dataset included, and with those it was given."""
    for part, values, box in zip(parts, given, [{}, {}, {}, *drawn], strict=True):
        usual = {name: [setting.default] if part.swept else setting.default for name, setting in part.settings.items()}
        by_dataset = _by_dataset(part, dataset) if part.swept else {}
        yield Chosen(part.name, usual | by_dataset, values | _spelt_box(box))


def _spelt_box(box: Mapping[str, boxes.Choice]) -> dict[str, Any]:
    return {name: str(found) if isinstance(found, boxes.Range) else _spelt(found) for name, found in box.items()}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _spelt(value: Any) -> Any:
    """The value as a file can hold it: a file has no None."""
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
        system=absolute(experiment.system),
        algorithms=tuple(map(absolute, experiment.algorithms)),
        metrics=tuple(map(absolute, experiment.metrics)),
    )


def _identity(experiment: Experiment, federation: Federation, system: Any) -> str:
    digest = hashlib.sha256(to_toml(experiment).encode())
    for name in (experiment.model, experiment.system, *experiment.algorithms, *experiment.metrics):
        if ".py:" in name:
            digest.update(Path(name.rpartition(":")[0]).read_bytes())
    if isinstance(system, Trace):
        digest.update(system.digest.encode())
    digest.update(federation.digest.encode())
    return digest.hexdigest()


def _by_dataset(part: Part, dataset: str) -> dict[str, list[float]]:
    """The dataset's usual lr, unless the algorithm has its own default; and the dataset's mu for FedProx."""
    known = data.defaults(dataset)
    found = {"lr": [known.lr]} if part.settings.get("lr") == common_settings()["lr"] else {}
    return found | ({"mu": [known.mu]} if part.name == "fedprox" else {})


def _distribute(parts: list[Part], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each part, the values that `given` has for its settings: lists of values if the part is swept."""
    found: list[dict[str, Any]] = [{} for _ in parts]
    # values for one named part come last, so they win
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


def _boxes(parts: list[Part], given: Mapping[str, Any], values: list[dict[str, Any]]) -> list[dict[str, boxes.Choice]]:
    """For each algorithm, the ranges and values of its settings that points are drawn from."""
    found: list[dict[str, boxes.Choice]] = [{} for _ in parts]
    flat = {name: choice for name, choice in given.items() if not isinstance(choice, Mapping)}
    tables = [(None, flat), *((name, table) for name, table in given.items() if isinstance(table, Mapping))]
    for only, table in tables:  # those for one algorithm come last, so they win
        if only is not None:
            choose("box", only, [part.name for part in parts])
        for name, choice in table.items():
            takers = [i for i, part in enumerate(parts) if name in part.settings and only in (None, part.name)]
            if not takers:
                _refuse(parts, name, choice, only, "box")
            for i in takers:
                if name in values[i]:
                    raise InputError(name, choice, "is in the box and also set; give it once")
                found[i][name] = boxes.choice(name, parts[i].settings[name].type, choice)
    # in the order of the signature, as values are
    return [{name: box[name] for name in part.settings if name in box} for part, box in zip(parts, found, strict=True)]


ELSEWHERE = {  # what other libraries call a setting
    "learning_rate": "lr",
    "batch_size": "batch",
    "epochs": "unit=epoch, with --system fixed --set work=EPOCHS",
    "momentum": "local_step=momentum (on devices) or server=momentum",
}


def _refuse(parts: list[Part], name: str, value: Any, only: str | None, field: str = "set") -> None:
    """Raise an error that names the parts with this setting, or else suggests a similar setting."""
    everyone = [(other, algorithm_settings(make)) for other, make in ALGORITHMS.items()]
    everyone += [(other, settings(make)) for kind in (SYSTEMS, data.DATASETS, MODELS) for other, make in kind.items()]
    owners = [other for other, known in everyone if name in known]
    if owners:
        chosen = only or ", ".join(part.name for part in parts)
        raise InputError(name, value, f"is a setting of {', '.join(owners)}, and not of {chosen}")
    if name in ELSEWHERE:
        raise InputError(field, name, f"folb calls this {ELSEWHERE[name]}")
    choose(field, name, sorted({key for part in parts if only in (None, part.name) for key in part.settings}))
