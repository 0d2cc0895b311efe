"""What does not go together, and why: a row for each combination of parts that no algorithm may have.

A row reads the finished algorithm, and what its parts say of themselves. `compose` raises the first that holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from folb.core import samplings
from folb.core.clipping import BOUNDED
from folb.core.upload import GAMMA, GRAD
from folb.errors import InputError

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm


def _name(part: Any) -> str | None:
    return None if part is None else getattr(part, "name", "set")


def _source(a: Any) -> str | None:
    return "proxy" if a.gradient is not None and a.gradient.upload is None else _name(a.gradient and a.gradient.upload)


def _unbounded(a: Any) -> str:
    """The uploads that privacy does not bound."""
    known = set(BOUNDED) if a.gradient is None else {*BOUNDED, a.second_upload.name, GAMMA.name}
    return ", ".join(one.name for one in a.uploads if one.name not in known)


def _together(a: Any) -> bool:
    """Whether the sampling draws the devices of a round together."""
    how = a.selection.sampling
    several = how.candidates is not None or how.first is not None or how.expected is not None
    return how.survey is not None or how.memory or several


# what an algorithm has for a setting; None: nothing
VALUES: dict[str, Callable[[Any], Any]] = {
    "attack": lambda a: _name(a.attack),
    "clip_gradient": lambda a: None if a.privacy is None else a.privacy.clip_gradient,
    "compress_down": lambda a: _name(a.compression.down),
    "compress_up": lambda a: _name(a.compression.up),
    "concurrency": lambda a: None if a.asynchrony is None else a.asynchrony.concurrency,
    "epsilon": lambda a: None if a.privacy is None else a.privacy.epsilon,
    "gradient": _source,
    "local_step": lambda a: a.solver.step.name,
    "memory": lambda a: _name(a.memory),
    "over_selection": lambda a: None if a.selection.factor == 1 else a.selection.factor,
    "privacy": lambda a: _name(a.privacy),
    "replacement": lambda a: a.selection.replacement,
    "robust": lambda a: _name(a.robust),
    "sampling": lambda a: samplings.called(a.selection.sampling),
    "uploads": lambda a: ", ".join([*(["second"] if a.selection.second else []), *(one.name for one in a.uploads)]),
}


class Conflict(NamedTuple):
    """A setting that does not go with the others: what it should be, and when that is so; by default if it is set.

    `value` is what is wrong, if it is not all that the algorithm has. The text may have values of the algorithm `a`, in
    braces.
    """

    field: str
    expected: str
    when: Callable[[Any], Any] | None = None
    value: Callable[[Any], Any] | None = None


def check(algorithm: Algorithm) -> None:
    """Raise an `InputError` for the first row that holds."""
    for part, rows in CONFLICTS.items():
        for one in rows if not part or getattr(algorithm, part) is not None else ():
            value = (one.value or VALUES[one.field])(algorithm)
            if value is not None if one.when is None else one.when(algorithm):
                raise InputError(one.field, value, one.expected.format(a=algorithm))


CODEC = "should be none with privacy={a.privacy.name}: a codec would change the noise"
CONFLICTS: dict[str, tuple[Conflict, ...]] = {  # by the part that an algorithm must have for them; "": none
    "": (
        Conflict(
            "uploads",
            "should have 'grad' with 'second': a device in both sets sends its gradient once",
            lambda a: a.selection.second and a.gradient is None and not a.sends(GRAD.name),
        ),
        Conflict(
            "memory",
            "should be a DeviceMemory: the sampling needs one",
            lambda a: a.selection.sampling.memory and a.memory is None,
        ),
        Conflict(
            "sampling",
            "should be uniform: S_2 would be the devices of S_1 again",
            lambda a: a.selection.second and a.selection.sampling.candidates is not None,
        ),
    ),
    "memory": (
        Conflict(
            "local_step",
            "should be sgd or momentum: memory={a.memory.name} divides by the size of a step",
            lambda a: a.memory.one_size and not a.solver.step.one_size,
        ),
    ),
    "gradient": (
        Conflict(
            "gradient",
            "should be exact: this memory, or an upload, asks for the whole gradient anyway",
            lambda a: a.gradient.upload != GRAD and a.sends(GRAD.name),
        ),
        Conflict(
            "gradient",
            "should be exact or sketch: the steps of {a.solver.step.name} differ in size",
            lambda a: a.second_works and not a.solver.step.one_size,
        ),
        Conflict(
            "gradient",
            "should be exact or sketch: S_2 works without the shift of this memory",
            lambda a: a.selection.second and a.second_works and a.memory is not None and a.memory.shifts,
        ),
        Conflict(
            "gradient",
            "should be exact or sketch with compress_up: S_2 has no error feedback",
            lambda a: a.selection.second and a.second_works and a.compression.up is not None,
        ),
    ),
    "asynchrony": (
        Conflict("over_selection", "should be None with concurrency: a round does not wait"),
        Conflict(
            "concurrency",
            "should be None with a second set: both sets need the same model",
            lambda a: a.selection.second,
        ),
        Conflict(
            "sampling",
            "should be uniform, samples or chances of your own with concurrency: devices are drawn one by one",
            _together,
        ),
        Conflict("memory", "should be None with concurrency: a memory of devices changes round by round"),
    ),
    "privacy": (
        Conflict(
            "epsilon",
            "should be the budget, such as 8; or set noise, such as noise=1",
            lambda a: a.privacy.epsilon is None and a.privacy.noise is None,
        ),
        Conflict(
            "sampling",
            "should be poisson, or uniform without replacement, with privacy: others depend on the devices' data",
            lambda a: not a.privacy.scheme,
        ),
        Conflict("memory", "should be none with privacy: what the server keeps of a device has no noise"),
        Conflict("robust", "should be none with privacy: one device can move a robust centre far"),
        Conflict("attack", "should be none with privacy: the liars of the simulator know the others' updates"),
        Conflict(
            "concurrency", "should be none with privacy: devices that do not wait are not drawn again in each round"
        ),
        Conflict("over_selection", "should be none with privacy: fast devices would be in more rounds than by chance"),
        Conflict("compress_up", CODEC, lambda a: a.privacy.by_devices and a.compression.up is not None),
        Conflict("compress_down", CODEC, lambda a: a.privacy.by_devices and a.compression.down is not None),
        Conflict(
            "privacy",
            "should be central: FOLB weighs a device by its gradient, which the server has to see",
            lambda a: a.privacy.by_devices and a.gradient is not None,
        ),
        Conflict("uploads", "should be none with privacy: nothing bounds it", _unbounded, _unbounded),
        Conflict(
            "clip_gradient",
            "is for FOLB, whose devices send gradients",
            lambda a: a.gradient is None and a.privacy.clip_gradient is not None,
        ),
        Conflict(
            "replacement",
            "is not private, since a device may count twice in a round: set sampling=poisson, or replacement=false",
            lambda a: a.selection.replacement and a.privacy.scheme == "fixed",
        ),
    ),
}
