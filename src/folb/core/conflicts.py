"""What does not go together, and why: a row for each combination of parts that no algorithm may have.

A row of the finished algorithm `a` is the setting that does not go with the others, and what it should be. The first
that holds is raised whenever an algorithm is made. What a guard does not bound is said beside it (`check_around`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from folb.core.codec import UP
from folb.core.guard import check_around
from folb.core.server_step import SERVERS
from folb.core.upload import BOUNDED, GAMMA, GRAD
from folb.errors import InputError

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

Rows = Iterator[tuple[Any, ...]]  # a setting, what it should be, and what is wrong if that is not the setting's value


def _should_be_none(a: Any, **expected: str) -> Rows:
    """A row for each of these settings that is set."""
    yield from ((field, why) for field, why in expected.items() if a.settings[field] is not None)


def of_all(a: Any) -> Rows:
    """What no algorithm may have."""
    select, solver, rule, memory = a.selection, a.solver, a.rule, a.memory
    if select.sampling.remembers and memory is None:
        yield "memory", "should be a DeviceMemory: the sampling needs one"
    if select.second and select.candidates is not None:
        yield "select", "should be uniform: S_2 would be the devices of S_1 again"
    if rule.one_size and not solver.step.one_size:
        yield "local", f"should be sgd or momentum: {rule.name} needs steps of one size"
    if solver.epochs is not None and solver.unit == "gradient":
        yield "local.epochs", "should be none with local.unit=gradient, whose units are steps along the whole gradient"
    yield from _of_gradients(a)
    if a.compression.down is not None and not a.compression.down.whole:
        yield "compress_down", "should be int8 or int4: devices keep no model, so each round sends all of its numbers"
    if a.settings["error_feedback"] is not None and not (a.compression.up or a.compression.down):
        yield "error_feedback", "needs a codec: set compress_up or compress_down"
    for name in ("staleness", "mixing"):
        if a.settings[name] and a.asynchrony is None:
            yield name, "is for rounds that do not wait: set concurrency, too"
    if memory is not None and memory.one_size and not solver.step.one_size:
        yield "local", f"should be sgd or momentum: memory={memory.name} divides by the size of a step"
    yield from _of_momenta(a)
    if a.guard is not None:
        yield from _should_be_none(a, privacy="should be none with guard=on: it bounds every device by itself")
        if not a.sees_gradients:
            yield "guard", "should be none: this rule weighs by no gradients, so that a false one has no effect"
    if a.asynchrony is not None:
        yield from _without_waiting(a)
    if a.privacy is not None:
        yield from _private(a)


def _of_momenta(a: Any) -> Rows:
    """Momentum that devices send, or are sent."""
    memory, step = a.memory, a.solver.step
    starts = memory is not None and memory.has("begin")
    if starts and not step.has("begin"):
        yield "local", f"should be orthogonal or aligned: memory={memory.name} sends what a step starts from"
    if any("momentum" in one.needs for one in a.uploads) and not step.has("momentum"):
        yield "local", "should be orthogonal or aligned: others have no momentum to send"
    if (memory is not None and memory.name == "fedpac") != (step.name == "aligned"):
        yield "local", "should be aligned with memory=fedpac, and only then: it needs the direction of the last round"
    if starts:
        why = f"should be none with memory={memory.name}: nothing bounds the momentum that a liar sends"
        yield from _should_be_none(a, guard=why, robust=why, attack=why)


def _of_gradients(a: Any) -> Rows:
    second = a.selection.second and a.gradient.works
    if a.gradient.upload != GRAD:
        if "grad" not in a.rule.uploads or (a.rule.surveyed and a.selection.survey == GRAD):
            yield "gradient", "should be exact: this rule asks for no gradients"
        if GRAD in a.uploads:
            yield "gradient", "should be exact: this memory, or an upload, asks for the whole gradient anyway"
    if a.gradient.works and not a.solver.step.one_size:
        yield "gradient", f"should be exact or sketch: the steps of {a.solver.step.name} differ in size"
    if second and a.memory is not None and a.memory.has("shift"):
        yield "gradient", "should be exact or sketch: S_2 works without the shift of this memory"
    if second and a.compression.up is not None:
        yield "gradient", "should be exact or sketch with compress_up: S_2 has no error feedback"


def _without_waiting(a: Any) -> Rows:
    if a.selection.factor != 1:
        yield "select.over_selection", "should be None with concurrency: a round does not wait"
    if a.selection.second:
        yield "concurrency", "should be None with a second set: both sets need the same model"
    if not a.selection.sampling.one_by_one:
        expected = "should be uniform, samples or chances of your own with concurrency: devices are drawn one by one"
        yield "select", expected
    yield from _should_be_none(a, memory="should be None with concurrency: a memory of devices changes round by round")


def _private(a: Any) -> Rows:
    privacy, rule = a.privacy, a.rule
    if privacy.epsilon is None and privacy.noise is None:
        yield "privacy.epsilon", "should be the budget, such as 8; or set privacy.noise, such as privacy.noise=1"
    if rule.by_samples:
        yield "rule.weights", "should be equal with privacy: nothing bounds a device's number of samples"
    if not rule.even and rule.alone is None:
        yield "rule", "cannot be private: it divides by what devices sent, or is not shown to be private"
    if not privacy.scheme:
        expected = "should be poisson, or uniform without replacement, with privacy: others depend on the devices' data"
        yield "select", expected
    yield from _should_be_none(
        a,
        memory="should be none with privacy: what the server keeps of a device has no noise",
        robust="should be none with privacy: one device can move a robust centre far",
        attack="should be none with privacy: the liars of the simulator know the others' updates",
        concurrency="should be none with privacy: devices that do not wait are not drawn again in each round",
    )
    if a.selection.factor != 1:
        expected = "should be none with privacy: fast devices would be in more rounds than by chance"
        yield "select.over_selection", expected
    if privacy.by_devices:
        codec = f"should be none with privacy={privacy.name}: a codec would change the noise"
        yield from _should_be_none(a, compress_up=codec, compress_down=codec)
        if rule.alone is not None:
            yield "privacy", "should be central: FOLB weighs a device by its gradient, which the server has to see"
    bounded = (*BOUNDED, *(() if rule.alone is None else (a.gradient.second.name, GAMMA.name)))
    if unbounded := [one.name for one in a.uploads if one.name not in bounded]:
        yield "uploads", "should be none with privacy: nothing bounds it", ", ".join(unbounded)
    if rule.alone is None and a.settings["privacy.clip_gradient"] is not None:
        yield "privacy.clip_gradient", "is for FOLB, whose devices send gradients"
    if a.selection.replacement and privacy.scheme == "fixed":
        expected = "is not private, since a device may count twice in a round: set select=poisson, or "
        yield "select.replacement", f"{expected}select.replacement=false"


def on_flower(a: Any) -> Rows:
    """What real devices cannot do."""
    yield from _should_be_none(
        a,
        concurrency="should be None on Flower, where a round waits for its devices; the simulator has such rounds",
        attack="should be none on real devices: attacks are for the simulator",
    )
    if a.own_samples:
        yield "robust", "should be another rule: a Flower server has no samples of its own"
    for name, codec in (("compress_up", a.compression.up), ("compress_down", a.compression.down)):
        if type(codec) not in (type(None), *UP.known):
            yield name, "should be one of folb's: devices do not have your own"


def of_two_phases(a: Any) -> Rows:
    """What a server cannot do that sees only sums."""
    yield from _should_be_none(
        a,
        guard="is not possible with sums only: the guard looks at each gradient",
        robust="is not possible with sums only: it looks at each update",
        privacy="should be None with sums only: a device would have to know the noisy mean before it clips",
        memory="should be None: the server cannot remember devices whose replies it never sees",
    )
    if a.memory is not None:
        yield "select", "should remember no devices: the server never sees their replies"
    if a.step_size is not None and not a.step_size.scheduled:
        yield "step_size", "should be None: it may look at single updates, which the server never sees"
    if a.selection.survey is not None:
        yield "select", f"should not ask a device for its own {a.selection.survey.name}, but does"
    codec = "should be none: a sum adds up numbers, and a codec's bytes do not add up"
    yield from _should_be_none(a, compress_up=codec, compress_down=codec)
    if a.gradient.upload != GRAD:
        yield "gradient", "should be exact: a device computes its own weight from its gradient"
    if a.selection.first is not None:
        yield "select", "should not ask a device for its own sketch, but does"
    if a.rule.alone is None:
        yield "rule", "should be one of folb, folb_hetero, folb_never_flip: all others need more than sums"
    if not a.server.sum_alone:
        sums = ", ".join(name for name, step in SERVERS.parts.items() if step.sum_alone)
        yield "server", f"should be one of {sums}: others may need each device's update"
    if a.server.by_lengths:
        yield "server", "should not need the length of each device's update, as stretch does"
    if single := [one.name for one in a.uploads if one.name not in (GRAD.name, GAMMA.name)]:
        yield "uploads", "should be grad and gamma only: the server never sees a reply by itself", single


def check(algorithm: Algorithm, rows: Callable[[Any], Rows] = of_all) -> None:
    """Raise an `InputError` for the first row that holds; by default of what no algorithm may have."""
    for field, expected, *value in rows(algorithm):
        raise InputError(field, value[0] if value else algorithm.settings.get(field), expected)
    if algorithm.guard is not None:
        check_around(algorithm)
