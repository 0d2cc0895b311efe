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


class Conflict(NamedTuple):
    """A setting that does not go with the others: when that is so, its value, and what it should be.

    `expected` may have values of the algorithm `a`, in braces.
    """

    field: str
    when: Callable[[Any], Any]
    value: Callable[[Any], Any]
    expected: str


def check(algorithm: Algorithm) -> None:
    """Raise an `InputError` for the first row that holds."""
    for one in CONFLICTS:
        if one.when(algorithm):
            raise InputError(one.field, one.value(algorithm), one.expected.format(a=algorithm))


def _with(part: str, *rows: Conflict) -> tuple[Conflict, ...]:
    """Rows for algorithms that have this part."""

    def only(row: Conflict) -> Conflict:
        return row._replace(when=lambda a: getattr(a, part) is not None and row.when(a))

    return tuple(map(only, rows))


def _sampling(a: Any) -> str:
    return samplings.called(a.selection.sampling)


def _source(a: Any) -> str:
    return "proxy" if a.gradient.upload is None else str(a.gradient.upload.name)


def _concurrency(a: Any) -> int:
    return int(a.asynchrony.concurrency)


def _together(a: Any) -> bool:
    """Whether the sampling draws the devices of a round together."""
    how = a.selection.sampling
    several = how.candidates is not None or how.first is not None or how.expected is not None
    return how.survey is not None or how.memory or several


def _unbounded(a: Any) -> list[str]:
    """The uploads that privacy does not bound."""
    known = set(BOUNDED) if a.gradient is None else {*BOUNDED, a.second_upload.name, GAMMA.name}
    return [one.name for one in a.uploads if one.name not in known]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "uploads",
        lambda a: a.selection.second and a.gradient is None and not a.sends(GRAD.name),
        lambda a: ["second", *(one.name for one in a.uploads)],
        "should have 'grad' with 'second': a device in both sets sends its gradient once",
    ),
    Conflict(
        "memory",
        lambda a: a.selection.sampling.memory and a.memory is None,
        lambda a: None,
        "should be a DeviceMemory: the sampling needs one",
    ),
    Conflict(
        "local_step",
        lambda a: a.memory is not None and a.memory.one_size and not a.solver.step.one_size,
        lambda a: a.solver.step.name,
        "should be sgd or momentum: memory={a.memory.name} divides by the size of a step",
    ),
    Conflict(
        "sampling",
        lambda a: a.selection.second and a.selection.sampling.candidates is not None,
        _sampling,
        "should be uniform: S_2 would be the devices of S_1 again",
    ),
    *_with(
        "gradient",
        Conflict(
            "gradient",
            lambda a: a.gradient.upload != GRAD and a.sends(GRAD.name),
            _source,
            "should be exact: this memory, or an upload, asks for the whole gradient anyway",
        ),
        Conflict(
            "gradient",
            lambda a: a.second_works and not a.solver.step.one_size,
            _source,
            "should be exact or sketch: the steps of {a.solver.step.name} differ in size",
        ),
        Conflict(
            "gradient",
            lambda a: a.selection.second and a.second_works and a.memory is not None and a.memory.shifts,
            _source,
            "should be exact or sketch: S_2 works without the shift of this memory",
        ),
        Conflict(
            "gradient",
            lambda a: a.selection.second and a.second_works and a.compression.up is not None,
            _source,
            "should be exact or sketch with compress_up: S_2 has no error feedback",
        ),
    ),
    *_with(
        "asynchrony",
        Conflict(
            "over_selection",
            lambda a: a.selection.factor != 1,
            lambda a: a.selection.factor,
            "should be None with concurrency: a round does not wait",
        ),
        Conflict(
            "concurrency",
            lambda a: a.selection.second,
            _concurrency,
            "should be None with a second set: both sets need the same model",
        ),
        Conflict(
            "sampling",
            _together,
            _sampling,
            "should be uniform, samples or chances of your own with concurrency: devices are drawn one by one",
        ),
        Conflict(
            "memory",
            lambda a: a.memory is not None,
            lambda a: a.memory.name,
            "should be None with concurrency: a memory of devices changes round by round",
        ),
    ),
    *_with(
        "privacy",
        Conflict(
            "epsilon",
            lambda a: a.privacy.epsilon is None and a.privacy.noise is None,
            lambda a: None,
            "should be the budget, such as 8; or set noise, such as noise=1",
        ),
        Conflict(
            "sampling",
            lambda a: not a.privacy.scheme,
            _sampling,
            "should be poisson, or uniform without replacement, with privacy: others depend on the devices' data",
        ),
        Conflict(
            "memory",
            lambda a: a.memory is not None,
            lambda a: a.memory.name,
            "should be none with privacy: what the server keeps of a device has no noise",
        ),
        Conflict(
            "robust",
            lambda a: a.robust is not None,
            lambda a: a.robust.name,
            "should be none with privacy: one device can move a robust centre far",
        ),
        Conflict(
            "attack",
            lambda a: a.attack is not None,
            lambda a: getattr(a.attack, "name", "set"),
            "should be none with privacy: the liars of the simulator know the others' updates",
        ),
        Conflict(
            "concurrency",
            lambda a: a.asynchrony is not None,
            _concurrency,
            "should be none with privacy: devices that do not wait are not drawn again in each round",
        ),
        Conflict(
            "over_selection",
            lambda a: a.selection.factor != 1,
            lambda a: a.selection.factor,
            "should be none with privacy: fast devices would be in more rounds than by chance",
        ),
        Conflict(
            "compress_up",
            lambda a: a.privacy.by_devices and a.compression.up is not None,
            lambda a: a.compression.up.name,
            "should be none with privacy={a.privacy.name}: a codec would change the noise",
        ),
        Conflict(
            "compress_down",
            lambda a: a.privacy.by_devices and a.compression.down is not None,
            lambda a: a.compression.down.name,
            "should be none with privacy={a.privacy.name}: a codec would change the noise",
        ),
        Conflict(
            "privacy",
            lambda a: a.privacy.by_devices and a.gradient is not None,
            lambda a: a.privacy.name,
            "should be central: FOLB weighs a device by its gradient, which the server has to see",
        ),
        Conflict(
            "uploads",
            _unbounded,
            lambda a: ", ".join(_unbounded(a)),
            "should be none with privacy: nothing bounds it",
        ),
        Conflict(
            "clip_gradient",
            lambda a: a.privacy.clip_gradient is not None and a.gradient is None,
            lambda a: a.privacy.clip_gradient,
            "is for FOLB, whose devices send gradients",
        ),
        Conflict(
            "replacement",
            lambda a: a.selection.replacement and a.privacy.scheme == "fixed",
            lambda a: True,
            "is not private, since a device may count twice in a round: set sampling=poisson, or replacement=false",
        ),
    ),
)
