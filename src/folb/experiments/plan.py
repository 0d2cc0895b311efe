"""An experiment's plan: every name and setting resolved, the data loaded, the parts built."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args

from jax.tree_util import Partial

from folb import data
from folb.core.algorithm import SLOTS, Algorithm, flattened, raise_unknown
from folb.core.algorithms import ALGORITHMS
from folb.core.part import described, name_of
from folb.core.system import SYSTEMS as FORMULAS
from folb.core.system import System
from folb.core.trace import Trace
from folb.data.device_trace import trace
from folb.data.federation import Federation
from folb.errors import InputError, check, choose
from folb.experiments import box as boxes
from folb.experiments import settings
from folb.experiments.experiment import Experiment, differs, to_toml
from folb.experiments.settings import Chosen, chosen_by_name, naming_own_files, read
from folb.measures import ACCURACY, FAIRNESS, measure
from folb.models import MODELS, Model
from folb.models.model import params_like
from folb.simulation.settled import Evaluate, Settled, evaluated_on, settled, usual
from folb.store.environment import about_runs
from folb.store.run_arrays import digest, leaves

# the system models by name: those that are formulas, and `trace`, which is read from a file
SYSTEMS: dict[str, Callable[..., System]] = FORMULAS | {"trace": trace}


@dataclass(frozen=True)
class Plan(Settled):
    """An experiment's live objects, and the experiment with every setting spelt out."""

    experiment: Experiment
    system: Any
    identity: str  # a digest of what the results depend on: the experiment, the data, the user's own files
    differs: str = ""  # the choices that are not the defaults
    own: Mapping[str, Any] = field(default_factory=dict)  # the classes of users' own parts, as they were given

    @cached_property
    def runs(self) -> list[dict[str, Any]]:
        """What each run is, as environment.json has it."""
        return about_runs(self.algorithms, self.experiment.seeds, self.model.judged_by, self.metrics)

    @property
    def sampling(self) -> str:
        """What is evaluated, and how exactly, if it is a sample; otherwise ""."""
        return evaluated_on(self.federation, self.evaluated, self.model.judged_by, FAIRNESS in self.experiment.metrics)

    @property
    def note(self) -> str:
        """What every output repeats: a warning about the data, and what is evaluated if it is a sample."""
        return "; ".join(filter(None, (self.federation.note, self.sampling)))

    @property
    def unnamed_matrices(self) -> int:
        """The matrices of a model that names none as hidden, if an algorithm would whiten them: 0 or more."""
        matrices = sum(len(leaf.shape) > 1 for leaf in leaves(params_like(self.model)).values())
        return matrices if matrices > 1 and not self.model.hidden and "accord" in self.experiment.algorithms else 0

    @property
    def about_models(self) -> dict[str, Any]:
        """What model.npz says about the models."""
        name, federation = self.experiment.model, self.federation
        leaves(params_like(self.model))  # before a round: raises if names collide
        own = {"sha256": digest(Path(name.rpartition(":")[0]))} if ".py:" in name else {}
        names = {} if federation.class_names is None else {"class_names": list(federation.class_names)}
        return {
            "model": name,
            "settings": dict(self.experiment.set.get(name.rpartition(":")[2] if own else name, {})),
            "shape": list(federation.shape),
            "classes": federation.classes,
            "runs": [{key: run[key] for key in ("algorithm", "name", "seed")} for run in self.runs],
            **names,
            **own,
        }


@settings.read_once()
def plan(experiment: Experiment, stream: bool | None = None) -> Plan:
    """Resolve every name and setting, load the data and build the parts. Any mistake raises an `InputError`.

    `stream` is explained at `simulate`.
    """
    with_own = {field: _anywhere(getattr(experiment, field)) for field in (*OWN, "set")}
    experiment = replace(experiment, dataset=data.located(experiment.dataset), **with_own)
    dataset = Chosen(experiment.dataset, make := data.constructor(experiment.dataset), settings.settings(make))
    model = chosen_by_name("model", experiment.model, MODELS)
    system = chosen_by_name("system", experiment.system, SYSTEMS)
    algorithms = [chosen_by_name("algorithms", name, ALGORITHMS) for name in experiment.algorithms]
    parts = [dataset, model, system, *algorithms]
    own = _own_parts(parts, experiment.set)
    _distribute(parts, "set", experiment.set)
    _distribute(algorithms, "box", experiment.box)

    with naming_own_files([*experiment.algorithms, *own]):
        variants = [one for part in algorithms for one in _variants(part, experiment, own)]

    if system.constructor is trace and system.given.get("file"):  # an absolute path is found from any directory
        system.given["file"] = os.path.abspath(system.given["file"])
    built_system = system.make(Callable, **system.given)
    if inspect.isfunction(built_system):  # a user's own: jax then sees a tree without arrays
        built_system = Partial(built_system)
    federation = dataset.constructor(**dataset.given)
    if experiment.device_samples is not None:
        federation = federation.smaller(experiment.device_samples)
    built_model = model.make(Model, federation.shape, federation.classes, **model.given)
    with naming_own_files([experiment.model, *experiment.metrics, *own]):
        whole = settled(
            federation,
            built_model,
            variants,
            rounds=experiment.rounds,
            seeds=experiment.seeds,
            evaluate_every=experiment.evaluate_every,
            evaluate=experiment.evaluate,
            metrics=[settings.metric_from_file(name) if ".py:" in name else name for name in experiment.metrics],
            stream=stream,
        )
        by_default = whole.evaluated if experiment.evaluate is None else usual(federation, built_model)
    if measure(built_model.judged_by).is_share and experiment.target > 1:
        raise InputError("target", experiment.target, "should be more than 0 and at most 1, such as 0.7 for 70 %")
    anyway = (ACCURACY, built_model.judged_by)  # these are measured without being named
    asked = replace(
        experiment,
        metrics=tuple(name for name in experiment.metrics if name not in anyway),
        evaluate=None if whole.evaluated == by_default else experiment.evaluate,
    )
    experiment = _spelt_out(asked, whole.evaluated or "all", parts)
    identity = _identity(experiment, federation, built_system, own)
    apart = differs(asked, (_usual_and_given(part, asked.dataset) for part in parts))
    return Plan(**vars(whole), experiment=experiment, system=built_system, identity=identity, differs=apart, own=own)


def _variants(part: Chosen, experiment: Experiment, own: Mapping[str, Any]) -> list[Algorithm]:
    """The algorithms of a sweep or of a box's points, or one."""
    # always in the order of the slots, so that a repeated experiment has the same run directory
    box = {name: part.box[name] for name in part.settings if name in part.box}
    values = _by_dataset(part, experiment.dataset) | part.given
    swept = {name: values[name] for name in part.settings if name in values and name not in box}
    points = boxes.draw(box, experiment.points or 0, experiment.box_seed or 0) if box else [{}]
    made: list[Algorithm] = []
    for combination, point in itertools.product(itertools.product(*swept.values()), points):
        known = {**dict(zip(swept, combination, strict=True)), **point}
        classes = {name: own.get(str(value), value) if name in SLOTS else value for name, value in known.items()}
        made.append(part.make(Algorithm, **classes))
    part.given.update(swept)
    return made


def _spelt_out(experiment: Experiment, evaluate: Evaluate, parts: list[Chosen]) -> Experiment:
    """The experiment with a value for every setting that a file can hold, under the part that it belongs to."""
    tables: dict[str, dict[str, Any]] = {}
    for part in parts:
        defaults = _defaults(part)
        single = {name: v[0] if part.swept and len(v) == 1 else v for name, v in part.given.items()}
        whole = {name: _spelt(value) for name, value in (defaults | single).items() if _plain(value)}
        # a setting that is none, as by default, says nothing
        unset = {*part.box, *(name for name, value in whole.items() if value == "none" and defaults.get(name) is None)}
        tables.setdefault(part.name, {}).update({name: v for name, v in whole.items() if name not in unset})
    return replace(
        experiment,
        evaluate=evaluate,
        set={name: table for name, table in tables.items() if table},
        box={part.name: _spelt_box(part) for part in parts if part.box},
    )


def _defaults(part: Chosen) -> dict[str, Any]:
    """The defaults of a part's settings; None for a user's own part, and for the fields of a slot that is given."""
    defaults = {name: setting.default for name, setting in part.settings.items()}
    named = {name: slot.parts for name, slot in SLOTS.items() if part.swept and name in defaults}
    defaults |= {name: None for name, parts in named.items() if defaults[name] not in parts}
    given = {name: slot for name, slot in SLOTS.items() if name in part.box or name in part.given} if part.swept else {}
    for name, slot in given.items():
        if name in part.box or part.given[name] != [defaults[name]]:
            own = (path for path in defaults if path.startswith(f"{name}.") and path not in slot.fields_of(()))
            defaults |= dict.fromkeys(own)
    return defaults


def _usual_and_given(part: Chosen, dataset: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A part's name, its usual settings, those of the dataset included, and those that it was given."""
    usual = {name: [default] if part.swept else default for name, default in _defaults(part).items()}
    by_dataset = _by_dataset(part, dataset) if part.swept else {}
    return part.name, usual | by_dataset, part.given | _spelt_box(part)


def _spelt_box(part: Chosen) -> dict[str, Any]:
    return {name: _spelt(part.box[name]) for name in part.settings if name in part.box}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _spelt(value: Any) -> Any:
    """The value as a file can hold it: a file has no None."""
    if isinstance(value, boxes.Range):
        return str(value)
    if isinstance(value, list | tuple):
        return [_spelt(item) for item in value]
    return "none" if value is None else value


OWN = ("model", "system", "algorithms", "metrics")  # the fields that may name a user's own files


def _anywhere(value: Any) -> Any:
    """A value with absolute paths for the user's own files: an experiment can be repeated from any directory."""
    if isinstance(value, Mapping):
        return {name: _anywhere(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_anywhere(one) for one in value]
    path, _, function = value.rpartition(":") if isinstance(value, str) and ".py:" in value else ("", "", "")
    return f"{os.path.abspath(path)}:{function}" if os.path.isfile(path) else value


def _identity(experiment: Experiment, federation: Federation, system: Any, own: Iterable[str]) -> str:
    digest = hashlib.sha256(to_toml(experiment).encode())
    for name in (*experiment.named, *own):
        if ".py:" in name:
            digest.update(Path(name.rpartition(":")[0]).read_bytes())
    if isinstance(system, Trace):
        digest.update(system.digest.encode())
    digest.update(federation.digest.encode())
    return digest.hexdigest()


def _by_dataset(part: Chosen, dataset: str) -> dict[str, list[float]]:
    """The dataset's usual lr, unless the algorithm has its own default; and the dataset's mu for FedProx."""
    known = data.defaults(dataset)
    usual = {"local.lr": [known.lr]} if part.settings.get("local.lr") == settings.common_settings()["local.lr"] else {}
    return usual | ({"local.mu": [known.mu]} if part.constructor is ALGORITHMS["fedprox"] else {})


def _own_parts(parts: list[Chosen], given: Mapping[str, Any]) -> dict[str, Any]:
    """The classes of parts that a user's own files have, as they are given: each algorithm has their fields, too."""
    own: dict[str, Any] = {}
    algorithms = [part for part in parts if part.swept]
    for _, name, value in _spread(parts, "set", given):
        for spec in value if isinstance(value, list | tuple) else [value]:
            if name not in SLOTS or not (isinstance(spec, str) and ".py:" in spec):
                continue
            kind = settings.from_file(name, spec)
            if not (isinstance(kind, type) and issubclass(kind, SLOTS[name].base)):
                raise InputError(name, spec, f"should be a class of the base folb.{SLOTS[name].base.__name__}")
            if other := next((s for s, one in own.items() if name_of(one) == name_of(kind) and one is not kind), None):
                raise InputError(name, spec, f"should have another name: {other} is called {name_of(kind)}, too")
            own[spec] = kind
            for inner, hint in described(kind).items():
                path, (of, meaning) = SLOTS[name].spelt(inner), get_args(hint)
                for part in algorithms:
                    part.settings.setdefault(path, settings.setting(path, Annotated[of | None, meaning], None))
    return own


def _spread(parts: list[Chosen], where: str, given: Mapping[str, Any]) -> list[tuple[str | None, str, Any]]:
    """For each value: the one part that it is for, or None; its path; and itself."""
    names = [part.name for part in parts]
    flat: list[tuple[str | None, str, Any]] = []
    for key, value in given.items():
        only = next((name for name in names if key == name or key.startswith(f"{name}.")), None)
        if isinstance(value, Mapping) and only == key:
            flat += [(only, name, one) for name, one in flattened(value).items()]
        elif isinstance(value, Mapping):
            choose(where, key, [*names, *SLOTS])
            flat += [(None, name, one) for name, one in flattened({key: value}).items()]
        else:
            flat.append((only, key.removeprefix(f"{only}."), value) if only not in (None, key) else (None, key, value))
    for i, (only, name, value) in enumerate(flat):
        check(name, value, (only, name) not in [one[:2] for one in flat[:i]], "is given already; give it once")
    return sorted(flat, key=lambda one: one[0] is not None)  # those for one part come last, so they win


def _distribute(parts: list[Chosen], field: str, given: Mapping[str, Any]) -> None:
    """Let each part take what `given` has for its settings: values, or what points are drawn from."""
    for only, name, value in _spread(parts, field, given):
        takers = [part for part in parts if name in part.settings and only in (None, part.name)]
        if not takers:
            _refuse(parts, name, value, only, field)
        for part in takers:
            kind = part.settings[name].type
            if field == "set":
                part.given[name] = _swept(name, kind, value) if part.swept else read(name, kind, value)
            elif name in part.given:
                raise InputError(name, value, "is in the box and also set; give it once")
            else:
                part.box[name] = boxes.choice(name, kind, value)


def _swept(name: str, kind: Any, value: Any) -> list[Any]:
    options = value if isinstance(value, list | tuple) else [value]
    check(name, value, bool(options), "should be at least one value")
    values = [option if name in SLOTS and ".py:" in str(option) else read(name, kind, option) for option in options]
    check(name, value, len(set(map(repr, values))) == len(values), "should be different values")
    return values


def _refuse(parts: list[Chosen], name: str, value: Any, only: str | None, field: str) -> None:
    """Raise an error that names the parts with this setting, or else suggests a similar setting."""
    everyone = [(other, settings.algorithm_settings(make)) for other, make in ALGORITHMS.items()]
    others = (SYSTEMS, data.DATASETS, MODELS)
    everyone += [(other, settings.settings(make)) for kind in others for other, make in kind.items()]
    owners = [other for other, known in everyone if name in known]
    if owners:
        chosen = only or ", ".join(part.name for part in parts)
        raise InputError(name, value, f"is a setting of {', '.join(owners)}, and not of {chosen}")
    if name in {one.name for one in fields(Experiment)}:
        raise InputError(field, name, f"is an option of the command, and not a setting: --{name.replace('_', '-')}")
    if only is None and (first := name.partition(".")[0]) in dict(everyone):
        choose(field, first, [part.name for part in parts])
    known = {key for part in parts if only in (None, part.name) for key in part.settings}
    known |= {key for _, keys in everyone for key in keys if key.endswith(f".{name}")}
    raise_unknown(field, name, sorted(known))
