"""What does not go together, and why: a row for each combination of parts that no algorithm may have.

A row reads the finished algorithm, and what its parts say of themselves. The first that holds is raised whenever an
algorithm is made. What a guard does not bound is said beside its bound (`guard.check_around`). Flower's
strategies have tables of their own, for what they cannot carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from folb.core.clipping import BOUNDED
from folb.core.codec import UP
from folb.core.guard import check_around
from folb.core.server_step import SERVERS
from folb.core.upload import GAMMA, GRAD
from folb.errors import InputError

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm


def _unbounded(a: Any) -> str:
    """The uploads that privacy does not bound."""
    weighed = () if a.rule.alone is None else (a.second_upload.name, GAMMA.name)
    return ", ".join(one.name for one in a.uploads if one.name not in (*BOUNDED, *weighed))


def _asks_for_gradients(a: Any) -> bool:
    """Whether the rule needs gradients that no survey gives."""
    return "grad" in a.rule.uploads and not (a.rule.surveyed and a.selection.survey == GRAD)


def _single(a: Any) -> list[str]:
    """The uploads of which the server would need each device's own."""
    return [one.name for one in a.uploads if one.name not in (GRAD.name, GAMMA.name)]


class Conflict(NamedTuple):
    """A setting that does not go with the others: what it should be, and when that is so; by default if it is set.

    `value` is what is wrong, if it is not the setting's own. The text may have values of the algorithm `a`, in braces.
    """

    field: str
    expected: str
    when: Callable[[Any], Any] | None = None
    value: Callable[[Any], Any] | None = None


def check(algorithm: Algorithm, table: Mapping[str, Sequence[Conflict]] | None = None) -> None:
    """Raise an `InputError` for the first row of a table that holds; by default of what no algorithm may have."""
    settings = algorithm.settings
    for part, rows in (CONFLICTS if table is None else table).items():
        for one in rows if not part or getattr(algorithm, part) is not None else ():
            value = settings.get(one.field) if one.value is None else one.value(algorithm)
            if value is not None if one.when is None else one.when(algorithm):
                raise InputError(one.field, value, one.expected.format(a=algorithm))
    if algorithm.guard is not None:
        check_around(algorithm)


CODEC = "should be none with privacy={a.privacy.name}: a codec would change the noise"
CONFLICTS: dict[str, tuple[Conflict, ...]] = {  # by the part that an algorithm must have for them; "": none
    "": (
        Conflict(
            "memory",
            "should be a DeviceMemory: the sampling needs one",
            lambda a: a.selection.sampling.remembers and a.memory is None,
        ),
        Conflict(
            "select",
            "should be uniform: S_2 would be the devices of S_1 again",
            lambda a: a.selection.second and a.selection.candidates is not None,
        ),
        Conflict(
            "local",
            "should be sgd or momentum: {a.rule.name} needs steps of one size",
            lambda a: a.rule.one_size and not a.solver.step.one_size,
        ),
        Conflict(
            "local.epochs",
            "should be none with local.unit=gradient, whose units are steps along the whole gradient",
            lambda a: a.solver.epochs is not None and a.solver.unit == "gradient",
        ),
        Conflict(
            "gradient",
            "should be exact: this rule asks for no gradients",
            lambda a: a.gradient.upload != GRAD and not _asks_for_gradients(a),
        ),
        Conflict(
            "gradient",
            "should be exact: this memory, or an upload, asks for the whole gradient anyway",
            lambda a: a.gradient.upload != GRAD and GRAD in a.uploads,
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
        Conflict(
            "compress_down",
            "should be int8 or int4: devices keep no model, so each round sends all of its numbers",
            lambda a: a.compression.down is not None and not a.compression.down.whole,
        ),
        Conflict(
            "error_feedback",
            "needs a codec: set compress_up or compress_down",
            lambda a: a.settings["error_feedback"] is not None and not (a.compression.up or a.compression.down),
        ),
        Conflict(
            "staleness",
            "is for rounds that do not wait: set concurrency, too",
            lambda a: a.settings["staleness"] is not None and a.asynchrony is None,
        ),
        Conflict(
            "mixing",
            "is for rounds that do not wait: set concurrency, too",
            lambda a: a.settings["mixing"] and a.asynchrony is None,
        ),
    ),
    "memory": (
        Conflict(
            "local",
            "should be sgd or momentum: memory={a.memory.name} divides by the size of a step",
            lambda a: a.memory.one_size and not a.solver.step.one_size,
        ),
    ),
    "guard": (
        Conflict("privacy", "should be none with guard=on: it bounds every device by itself"),
        Conflict(
            "guard",
            "should be none: this rule weighs by no gradients, so that a false one has no effect",
            lambda a: not a.sees_gradients,
        ),
    ),
    "asynchrony": (
        Conflict(
            "select.over_selection",
            "should be None with concurrency: a round does not wait",
            lambda a: a.selection.factor != 1,
        ),
        Conflict(
            "concurrency",
            "should be None with a second set: both sets need the same model",
            lambda a: a.selection.second,
        ),
        Conflict(
            "select",
            "should be uniform, samples or chances of your own with concurrency: devices are drawn one by one",
            lambda a: not a.selection.sampling.one_by_one,
        ),
        Conflict("memory", "should be None with concurrency: a memory of devices changes round by round"),
    ),
    "privacy": (
        Conflict(
            "privacy.epsilon",
            "should be the budget, such as 8; or set privacy.noise, such as privacy.noise=1",
            lambda a: a.privacy.epsilon is None and a.privacy.noise is None,
        ),
        Conflict(
            "rule.weights",
            "should be equal with privacy: nothing bounds a device's number of samples",
            lambda a: a.rule.by_samples,
        ),
        Conflict(
            "rule",
            "cannot be private: it divides by what devices sent, or is not shown to be private",
            lambda a: not a.rule.even and a.rule.alone is None,
        ),
        Conflict(
            "select",
            "should be poisson, or uniform without replacement, with privacy: others depend on the devices' data",
            lambda a: not a.privacy.scheme,
        ),
        Conflict("memory", "should be none with privacy: what the server keeps of a device has no noise"),
        Conflict("robust", "should be none with privacy: one device can move a robust centre far"),
        Conflict("attack", "should be none with privacy: the liars of the simulator know the others' updates"),
        Conflict(
            "concurrency", "should be none with privacy: devices that do not wait are not drawn again in each round"
        ),
        Conflict(
            "select.over_selection",
            "should be none with privacy: fast devices would be in more rounds than by chance",
            lambda a: a.selection.factor != 1,
        ),
        Conflict("compress_up", CODEC, lambda a: a.privacy.by_devices and a.compression.up is not None),
        Conflict("compress_down", CODEC, lambda a: a.privacy.by_devices and a.compression.down is not None),
        Conflict(
            "privacy",
            "should be central: FOLB weighs a device by its gradient, which the server has to see",
            lambda a: a.privacy.by_devices and a.rule.alone is not None,
        ),
        Conflict("uploads", "should be none with privacy: nothing bounds it", _unbounded, _unbounded),
        Conflict(
            "privacy.clip_gradient",
            "is for FOLB, whose devices send gradients",
            lambda a: a.rule.alone is None and a.settings["privacy.clip_gradient"] is not None,
        ),
        Conflict(
            "select.replacement",
            "is not private, since a device may count twice in a round: set select=poisson, or "
            "select.replacement=false",
            lambda a: a.selection.replacement and a.privacy.scheme == "fixed",
        ),
    ),
}

OF_FOLB = "should be one of folb's: devices do not have your own"
FLOWER: dict[str, tuple[Conflict, ...]] = {  # what real devices cannot do
    "asynchrony": (
        Conflict(
            "concurrency",
            "should be None on Flower, where a round waits for its devices; the simulator has such rounds",
        ),
    ),
    "attack": (Conflict("attack", "should be none on real devices: attacks are for the simulator"),),
    "": (
        Conflict(
            "robust", "should be another rule: a Flower server has no samples of its own", lambda a: a.own_samples
        ),
        Conflict("compress_up", OF_FOLB, lambda a: type(a.compression.up) not in (type(None), *UP.known)),
        Conflict("compress_down", OF_FOLB, lambda a: type(a.compression.down) not in (type(None), *UP.known)),
    ),
}

SUMS = ", ".join(name for name, step in SERVERS.parts.items() if step.sum_alone)
TWO_PHASES: dict[str, tuple[Conflict, ...]] = {  # what a server cannot do that sees only sums
    "guard": (Conflict("guard", "is not possible with sums only: the guard looks at each gradient"),),
    "robust": (Conflict("robust", "is not possible with sums only: it looks at each update"),),
    "privacy": (
        Conflict(
            "privacy", "should be None with sums only: a device would have to know the noisy mean before it clips"
        ),
    ),
    "memory": (
        Conflict(
            "select",
            "should remember no devices: the server never sees their replies",
            lambda a: a.settings["memory"] is None,
        ),
        Conflict(
            "memory",
            "should be None: the server cannot remember devices whose replies it never sees",
            value=lambda a: a.memory.name,
        ),
    ),
    "step_size": (
        Conflict(
            "step_size",
            "should be None: it may look at single updates, which the server never sees",
            lambda a: not a.step_size.scheduled,
        ),
    ),
    "": (
        Conflict(
            "select",
            "should not ask a device for its own {a.selection.survey.name}, but does",
            lambda a: a.selection.survey is not None,
        ),
        *(
            Conflict(name, "should be none: a sum adds up numbers, and a codec's bytes do not add up")
            for name in ("compress_up", "compress_down")
        ),
        Conflict(
            "gradient",
            "should be exact: a device computes its own weight from its gradient",
            lambda a: a.gradient.upload != GRAD,
        ),
        Conflict(
            "select",
            "should not ask a device for its own sketch, but does",
            lambda a: a.selection.first is not None,
        ),
        Conflict(
            "rule",
            "should be one of folb, folb_hetero, folb_never_flip: all others need more than sums",
            lambda a: a.rule.alone is None,
        ),
        Conflict(
            "server",
            f"should be one of {SUMS}: others may need each device's update",
            lambda a: not a.server.sum_alone,
        ),
        Conflict(
            "server",
            "should not need the length of each device's update, as stretch does",
            lambda a: a.server.by_lengths,
        ),
        Conflict("uploads", "should be grad and gamma only: the server never sees a reply by itself", _single, _single),
    ),
}
