"""An algorithm as the parts that it is made of, and the paths to their settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as of_record
from typing import Any, Literal

import jax

from folb.core import conflicts, selection
from folb.core.average import AVERAGES, Average
from folb.core.codec import DOWN, UP, Compression
from folb.core.drift import MEMORIES
from folb.core.gradient import GRADIENTS, Exact, GradientSource
from folb.core.guard import GUARDS, Guard
from folb.core.liars import ATTACKS, Lies
from folb.core.memory import DeviceMemory, device_memory
from folb.core.part import FLAG, Part, Range, Slot, described, setting, whole, with_values
from folb.core.privacy import PRIVACIES, Privacy, finished
from folb.core.robust import ROBUST, Robust, check_enough
from folb.core.rules import RULES, Mean, Rule
from folb.core.samplings import SAMPLINGS, Uniform
from folb.core.selection import Selection
from folb.core.server_step import SERVERS, Plain, ServerStep
from folb.core.solver import LOCAL, Solver
from folb.core.staleness import STALENESS, Asynchrony, Polynomial
from folb.core.step_size import STEP_SIZES, StepSize
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA, Upload, upload
from folb.core.whiten import WHITEN, Hidden, Whitening
from folb.errors import InputError, choose

SLOTS: dict[str, Slot[Any]] = {
    slot.name: slot
    for slot in (
        *(RULES, GRADIENTS, GUARDS, SAMPLINGS, LOCAL, SERVERS, MEMORIES, STEP_SIZES, AVERAGES, STALENESS),
        *(UP, DOWN, ROBUST, ATTACKS, PRIVACIES, WHITEN),
    )
}
AT_WORK = Range(
    lambda M: M == "K" or whole(1, 10**5).holds(M), "should be a whole number from 1 to 100000, or K", number=False
)


class Others(Part):
    """The settings of an algorithm that are of none of its parts."""

    concurrency: int | Literal["K"] | None = setting(
        "M: devices that work at any time, and a round takes the next K replies; by default rounds wait",
        AT_WORK,
        default=None,
    )
    mixing: bool = setting(
        "with concurrency: true mixes a device's model in, as FedAsync does; false adds its update", FLAG, default=False
    )
    error_feedback: bool | None = setting(
        "add what a codec left out to the next message; by default with top_k, random_k and sign", FLAG, default=None
    )
    clamp_gamma: bool = setting("keep gamma_k within [0, 1]", FLAG, default=True)


@dataclass(frozen=True)
class Origin:
    """What an algorithm was made of, before anything followed from it, and its name: for the record, and to change it.

    It is in the static part of a pytree, where unequal values would mean separate programs. So all are equal: FedAvg,
    and FedProx with any mu, share one program.
    """

    name: str = of_record(compare=False)
    parts: Mapping[str, Any] = of_record(compare=False)  # by the name of their slot
    others: Others = of_record(compare=False)
    uploads: Sequence[str | Upload] = of_record(default=(), compare=False)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its path, as a record can hold it."""
        known = {path: value for name, slot in SLOTS.items() for path, value in slot.values(self.parts[name]).items()}
        numbers = {path: _number(value) for path, value in {**known, **self.others.settings}.items()}
        return {path: value for path, value in numbers.items() if not hasattr(value, "dtype")}

    def changed(self, given: Mapping[str, Any]) -> Origin:
        """With other settings, by their paths; checked."""
        given = flattened(given)
        uploads = given.pop("uploads", self.uploads)
        if isinstance(uploads, str) or not isinstance(uploads, Sequence):
            raise InputError("uploads", uploads, "should be a list of uploads")
        of: dict[str, dict[str, Any]] = {}
        for path, value in given.items():
            slot, _, name = path.partition(".")
            if slot not in SLOTS and path not in self.others.settings:
                raise_unknown("setting", path, [*hints(), "uploads"])
            of.setdefault(slot if slot in SLOTS else "", {})[name if slot in SLOTS else path] = value
        others = with_values(self.others, of.pop("", {}))
        others.check()
        if others.concurrency is not None and self.parts["staleness"] is None and of.get("staleness"):
            of["staleness"].setdefault("", Polynomial())  # the default, of which these are settings
        return Origin(
            self.name,
            {name: SLOTS[name].changed(part, of.get(name, {})) for name, part in self.parts.items()},
            others,
            tuple(uploads),
        )


def _number(value: Any) -> Any:
    """A single number of NumPy or jax as Python's; what is traced, or has a shape, as it is."""
    single = hasattr(value, "dtype") and getattr(value, "shape", None) == () and not isinstance(value, jax.core.Tracer)
    return value.item() if single else value


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths. A mapping has some of one slot: its "name", if it is another part, and its fields."""
    paths: dict[str, Any] = {}
    for name, value in settings.items():
        table = value if name in SLOTS and isinstance(value, Mapping) else {"name": value}
        for key, one in table.items():
            path = name if key == "name" else f"{name}.{key}"
            if not key or path.endswith("."):
                raise InputError("setting", path, "should be the path of a setting, such as server.lr")
            if path in paths:
                raise InputError(path, one, f"is given already, as {paths[path]}; give it once")
            paths[path] = one
    return paths


OTHERS_SAY = {  # what papers and other libraries call a setting
    "learning_rate": "local.lr",
    "batch_size": "local.batch",
    "epochs": "local.epochs",
    "momentum": "local=momentum (on devices) or server=momentum",
    "sampling": "select",
    "averaging": "rule.weights",
}


def raise_unknown(field: str, path: str, known: Iterable[str]) -> None:
    """Raise for a path that is none of the known ones: with what it may mean, or with those of its slot."""
    slot, _, last = path.rpartition(".")
    if last in OTHERS_SAY:
        raise InputError(field, path, f"folb calls this {OTHERS_SAY[last]}")
    known = list(known)
    meant = [one for one in known if one.endswith(f".{last}") or one == path.replace("_", ".", 1)]
    if meant:
        raise InputError(field, path, f"should be {' or '.join(meant)}")
    choose(field, path, [one for one in known if slot and one.startswith(f"{slot}.")] or known)


@functools.cache
def hints() -> dict[str, Any]:
    """Every setting by its path, as a type with a line of help."""
    known = {path: hint for name, slot in SLOTS.items() for path, hint in {name: slot.choice(), **slot.fields}.items()}
    return known | described(Others)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False)
class Algorithm:
    """One federated algorithm: `Algorithm(server="adam", local={"lr": 0.1})`.

    Each keyword is a slot of `folb list parts`, and its value the name of a part, a part of your own, or a mapping with
    the part's settings; or it is the path of one setting, as in `**{"local.lr": 0.1}`. What is not given is as usual.
    """

    selection: Selection
    solver: Solver
    rule: Rule
    server: ServerStep
    uploads: tuple[Upload, ...]  # what its devices send besides their update
    memory: DeviceMemory | None  # what the server remembers about devices
    gradient: GradientSource  # where a rule gets its gradients from
    step_size: StepSize | None  # how the server changes the devices' step size; None: it does not
    asynchrony: Asynchrony | None  # how rounds do not wait; None: they do
    average: Average  # the model that is evaluated and kept
    compression: Compression = of_record(metadata={"static": True})  # of what is sent
    guard: Guard | None = of_record()  # how a rule's weights are bounded
    robust: Robust | None = of_record()  # what is in place of the rule's mean
    attack: Lies | None = of_record()  # what some devices report in place of the truth: only in the simulator
    privacy: Privacy | None = of_record()  # how it is differentially private; None: it is not
    whiten: Whitening | None = of_record()  # what takes the place of a network's hidden matrices in the update
    clamp_gamma: bool = of_record(metadata={"static": True})
    origin: Origin = of_record(metadata={"static": True})

    def __init__(self, **settings: Any) -> None:
        # jax makes one of all its fields, as it would of any dataclass
        complete = settings.keys() == self.__dataclass_fields__.keys()
        vars(self).update(settings if complete else vars(_made(USUAL.changed(settings))))

    def __repr__(self) -> str:
        given = {key: value for key, value in self.settings.items() if value is not None}
        return f"Algorithm({', '.join([self.name, *(f'{key}={value}' for key, value in given.items())])})"

    @property
    def name(self) -> str:
        return self.origin.name

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its path, as it was made."""
        return self.origin.settings

    def replace(self, **settings: Any) -> Algorithm:
        """The algorithm with other parts or settings, given as to `Algorithm`."""
        return _made(self.origin.changed(settings))

    def of(self, hidden: Sequence[Hidden]) -> Algorithm:
        """The algorithm on a model with these hidden matrices: what follows from them is in its record."""
        parts = {name: None if part is None else part.of(tuple(hidden)) for name, part in self.origin.parts.items()}
        return self if parts == self.origin.parts else _made(replace(self.origin, parts=parts))

    def but(self, **fields: Any) -> Algorithm:
        """The same with other values in its record; nothing is checked, and nothing else follows from it."""
        return Algorithm(**{**vars(self), **fields})

    @property
    def sees_gradients(self) -> bool:
        """Whether the server has its devices' gradients, or what stands for them."""
        return self.gradient.upload != GRAD or GRAD in self.uploads

    @property
    def own_samples(self) -> int:
        """How many samples of its own the server needs."""
        return 0 if self.robust is None else self.robust.own_samples


AS_GIVEN = ("rule", "server", "gradient", "step_size", "guard", "robust", "privacy", "whiten")


def _made(origin: Origin) -> Algorithm:
    """The algorithm of these parts, with all that follows from them."""
    parts, others, rule = origin.parts, origin.others, origin.parts["rule"]
    select = selection.settled(parts["select"], rule.second)
    memory = device_memory(parts["memory"], select.sampling.keeps)
    solver = parts["local"]
    if solver.epochs is not None and solver.unit == "step":
        solver = replace(solver, unit="epoch")
    if memory is not None:
        solver = replace(solver, lr=solver.lr * memory.pace, mu=solver.mu + memory.prox)
    up, given = parts["compress_up"], others.error_feedback
    usual = up is not None and up.feedback
    asynchrony, K = None, select.mean or select.enough
    if others.concurrency is not None:
        M = K if others.concurrency == "K" else int(others.concurrency)
        asynchrony = Asynchrony(M, parts["staleness"] or Polynomial(), others.mixing)
    made = finished(
        Algorithm(
            **{name: parts[name] for name in AS_GIVEN},
            selection=select,
            solver=solver,
            uploads=tuple(_uploads(origin, select)),
            memory=memory,
            asynchrony=asynchrony,
            average=parts["average"] or AVERAGES.parts[parts["server"].average](),
            compression=Compression(up, parts["compress_down"], usual if given is None else given),
            attack=None if parts["attack"] is None else parts["attack"].record,
            clamp_gamma=others.clamp_gamma,
            origin=origin,
        )
    )
    conflicts.check(made)
    if made.robust is not None:
        check_enough(made.robust, K)
    return made


def _uploads(origin: Origin, select: Selection) -> Iterator[Upload]:
    """What devices are asked for: by the rule, by the user, and by the memories; each once."""
    rule, source, clamped = origin.parts["rule"], origin.parts["gradient"], origin.others.clamp_gamma
    wanted = [] if rule.surveyed and select.survey == GRAD else rule.uploads
    own = [source.upload if one == "grad" else one for one in wanted]
    asked = [*(one for one in own if one is not None), *origin.uploads]
    names = {one if isinstance(one, str) else one.name for one in asked if isinstance(one, str | Upload)}
    remembered: list[str] = []
    for memory in filter(None, (origin.parts["memory"], select.sampling.keeps)):
        if isinstance(memory.uploads, str) or not isinstance(memory.uploads, Sequence):
            raise InputError("memory: uploads", memory.uploads, "should be a list of uploads")
        remembered += memory.uploads
    seen: set[str] = set()
    for one in (*asked, *(one for one in dict.fromkeys(remembered) if one not in names)):
        known = upload(one)
        if known.name in seen:
            raise InputError("uploads", known.name, "is listed twice")
        seen.add(known.name)
        if "mean" in known.needs:
            raise InputError("uploads", known.name, "needs 'mean', which only a run of two phases sends")
        yield UNCLAMPED_GAMMA if known is GAMMA and not clamped else known


USUAL = Origin(
    "unnamed",
    dict.fromkeys(SLOTS)
    | {"select": Selection(Uniform()), "local": Solver(), "rule": Mean(), "gradient": Exact(), "server": Plain()},
    Others(),
)
