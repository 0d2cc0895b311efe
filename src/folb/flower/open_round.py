"""A round on real devices: its draw, its replies, and the `Round` that the algorithm's rule sees."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message

from folb.core import privacy, selection, vector
from folb.core import round as core_round
from folb.core.algorithm import Algorithm
from folb.core.codec import Compression
from folb.core.multiset import Multiset
from folb.core.round import State
from folb.core.rules import Gradients, Round
from folb.core.selection import Known, Selection, drawing
from folb.core.solver import steps_of
from folb.core.system import System
from folb.core.upload import DELTA, ENCODED, GAMMA, GRAD, Upload
from folb.errors import SINGLE, InputError
from folb.flower import protocol, replies
from folb.flower.protocol import Arrays, Task
from folb.flower.replies import Encoded, Expected, Form, Refused, Reply, Shape, last_words
from folb.flower.roster import Member
from folb.measures import is_measure
from folb.results.summary import short

FEW = 3  # updates: with fewer, a liar's own update could be the median

log = logging.getLogger("flwr")  # the log that users of Flower read


class Plan(NamedTuple):
    """The draw of a round: S_1 and the work of its devices, and S_2 of Algorithm 2."""

    first: Multiset
    words: Any  # [K, 2]
    work: Any  # [K]
    lost: Any  # [K] by the system model
    steps: Any  # [K] local steps
    key: Any  # [2] words that all devices of the round share
    correction: Any  # [K]
    inner: Any | None  # [K], if a survey gave it
    second: Multiset | None
    second_lost: Any  # these are None without S_2
    second_correction: Any
    second_words: Any
    second_work: Any
    second_steps: Any


@jax.jit
def plan(
    algorithm: Algorithm,
    system: System,
    who: Any,
    size: Any,
    share: Any,
    survey: Any,
    memory: Any,
    some: Any,
    luck: tuple[Any, Any],
    seed: Any,
    t: Any,
) -> Plan:
    """The draw of round t from the devices `who`, in ascending order of identity. It is the simulator's own draw.

    `some` are the candidates, if the sampling wants them; `survey` and `memory` are then theirs. `luck` are the two
    words that only the draw depends on, by default the seed and t: devices learn words that depend on `seed`.
    """
    how = algorithm.selection
    start = jnp.cumsum(size) - size  # as if their samples lay end to end
    known = Known(jnp.asarray(t, jnp.int32), how.K, how.replacement, start, size, share, survey, memory, some)
    draw = drawing(how, known)
    first, second = core_round.sets(draw, how, *luck)

    def managed(chosen: Multiset) -> Any:
        return core_round.managed(system, algorithm.solver, size[chosen.device], who[chosen.device], seed, t)

    words, effort = managed(first)
    other: Any
    other_words, other = (None, None) if second is None else managed(second)
    return Plan(
        first=first,
        words=words,
        work=effort.work,
        lost=effort.lost,
        steps=steps_of(algorithm.solver, effort.work, size[first.device]),
        key=core_round.shared_words(seed, t),
        correction=draw.correction(first.device),
        inner=None if draw.inner is None else draw.inner[first.device],
        second=second,
        second_lost=None if other is None else other.lost,
        second_correction=None if second is None else draw.correction(second.device),
        second_words=other_words,
        second_work=None if other is None else other.work,
        second_steps=None if second is None else steps_of(algorithm.solver, other.work, size[second.device]),
    )


_candidates = jax.jit(selection.candidates, static_argnums=1)
_shifts = jax.jit(core_round.shifts)


def candidates(how: Selection, N: int, seed: Any, t: Any) -> Any:
    """`selection.candidates`; where the sampling wants none, there is no program to compile."""
    return None if how.sampling.candidates is None else _candidates(how, N, seed, t)


def shifts(algorithm: Algorithm, state: State, own: Any, steps: Any, N: Any) -> Any:
    """`round.shifts`; where nothing is sent, there is no program to compile."""
    sent = algorithm.memory is not None and algorithm.memory.shifts
    return _shifts(algorithm, state, own, steps, N) if sent else None


close = jax.jit(core_round.close)
with_noise = jax.jit(privacy.with_noise)


def form(upload: Upload, params: Arrays) -> Form:
    """The form that an upload must have."""
    shape = core_round.upload_shape(upload, params)
    if isinstance(shape, Mapping) and all(hasattr(part, "shape") for part in shape.values()):
        shapes = {name: Shape(part.shape, part.dtype.name) for name, part in shape.items()}
        return Form(shapes, upload.least, upload.most)
    if not hasattr(shape, "shape"):
        raise InputError(f"upload {upload.name}", shape, "should be a number, an array, or a dict of arrays")
    one = {protocol.VALUE: Shape(shape.shape, shape.dtype.name)}
    return Form(one if shape.shape else None, upload.least, upload.most)


def through(task: Task, form: Form, upload: str, codecs: Compression, params: Arrays) -> Form:
    """The form of an upload that goes through the codec of a task."""
    if not task.codec or codecs.up is None or upload not in {one.name for one in ENCODED}:
        return form
    shapes = {name: Shape(*known) for name, known in codecs.up.shapes(vector.size(params)).items()}
    whole = codecs.feedback and upload == DELTA.name
    return form._replace(shapes=shapes, encoded=Encoded(codecs.up, np.array(task.words, np.uint32), params, whole))


@dataclass
class OpenRound:
    """A round under way."""

    t: int
    state: State
    algorithm: Algorithm
    members: list[Member]
    until: float
    uploads: tuple[Upload, ...] = ()  # what the server sees of each device of S_1
    N: int = 0  # all devices met so far: the memory has each of them
    plan: Plan | None = None
    own: Any = ()  # the memory of the devices of S_1, stacked
    start: Arrays | None = None  # the model that devices decode, if it has a codec
    forms: Mapping[str, Form] = field(default_factory=dict)  # what each upload must be
    asked: dict[int, tuple[Message, Expected]] = field(default_factory=dict)  # by identity
    usable: dict[int, Reply] = field(default_factory=dict)
    took: dict[int, float] = field(default_factory=dict)  # the seconds of the round until a usable reply came
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # lost devices, with the reason
    noted: list[tuple[int | None, str]] = field(default_factory=list)  # all rejections, with their devices
    before: dict[int, str] = field(default_factory=dict)  # rejected before the round's own messages
    looked_at: list[Message] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    enough: float = 0.0  # when the round had as many replies as it wants
    aside: list[int] = field(default_factory=list)  # over-selected devices that must wait for a later round
    shortened: list[tuple[int, str]] = field(default_factory=list)  # devices whose update was too long
    length: float = 0.0  # of a usual update in this round
    epsilon: float | None = None  # of a private run, after this round
    abandoned: str = ""
    weights: Any = None  # of each draw, once it is closed, if the model changed
    began: float = field(default_factory=time.monotonic)
    up: int = 0
    down: int = 0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until - time.monotonic())

    @property
    def drawn(self) -> dict[int, int]:
        """The devices of S_1, and how many times each was drawn."""
        if self.plan is None:
            return {}
        first = zip(*self.plan.first, strict=True)
        return {self.members[k].identity: int(times) for k, times in first if times > 0}

    @property
    def lost(self) -> list[int]:
        """The devices of S_1 that sent nothing, usable or not."""
        return sorted(set(self.drawn) - {*self.usable, *self.refused, *self.before, *self.aside})

    @property
    def silent(self) -> set[int]:
        """Devices that were asked, and did not answer."""
        return set(self.asked) - {*self.usable, *self.refused, *self.aside}

    def refuse(self, identity: int | None, reason: str) -> None:
        """Note a rejected reply, and log it."""
        self.noted.append((identity, reason))
        log.warning("round %d: rejected: %s%s", self.t, "" if identity is None else f"device {identity}: ", reason)

    def take(self, received: Iterable[Message]) -> None:
        """Check replies: each is used or rejected, once."""
        if len(self.owners) != len(self.asked):  # ids are known once messages are sent
            self.owners = {message.metadata.message_id: k for k, (message, _) in self.asked.items()}
        known = set(map(id, self.looked_at))
        for reply in received:
            if id(reply) not in known:
                self.looked_at.append(reply)
                self._take(reply)

    def _take(self, reply: Message) -> None:
        identity = self.owners.get(reply.metadata.reply_to_message_id)
        if identity is None:
            self.refuse(None, f"node {reply.metadata.src_node_id}: a reply that answers no message of this round")
        elif identity in self.usable or identity in self.refused:
            self.refuse(identity, "a repeated reply")
        elif reply.has_error():
            self.failed[identity] = last_words(reply.error.reason)
            log.warning("round %d: lost: device %d: %s", self.t, identity, self.failed[identity])
        else:
            try:
                self.usable[identity] = replies.checked(reply, self.asked[identity][1])
                self.took[identity] = time.monotonic() - self.began
                self.failed.pop(identity, None)  # an error came first
                self.up += protocol.nbytes(reply.content)
            except Refused as reason:
                self.refused[identity] = str(reason)
                self.refuse(identity, str(reason))

    def turn(self) -> dict[int, Reply]:
        """The usable replies of an exchange that comes before the round's own messages."""
        found = self.usable
        self.before |= self.refused
        self.asked, self.usable, self.refused, self.looked_at, self.owners = {}, {}, {}, [], {}
        return found

    def shorten(self, most: float, before: Sequence[float]) -> float:
        """Shorten updates to `most` usual lengths, and return the usual length; `before` has that of earlier rounds."""
        drawn = self.drawn
        found = {k: replies.length(reply.arrays[DELTA.name]) for k, reply in self.usable.items() if k in drawn}
        self.length = usual_length(found.values(), before)
        bound = most * self.length
        for k, value in sorted(found.items()):
            if value > bound > 0:
                own = self.usable[k].arrays
                own[DELTA.name] = {
                    n: (part * (bound / value)).astype(part.dtype) for n, part in own[DELTA.name].items()
                }
                words = f"its update of norm {value:.3g} to {bound:.3g}, {most:g} times the median"
                self.shortened.append((k, words))
                log.warning("round %d: shortened: device %d: %s", self.t, k, words)
        return self.length

    def stacked(self) -> Round:
        """All replies of the round in ascending order of identity. A reply that did not come counts 0 times."""
        drawn, state = self.plan, self.state
        assert drawn is not None
        identities = [self.members[k].identity for k in drawn.first.device]

        def stack(who: Sequence[int], upload: Upload) -> Any:
            return stacked_upload(upload, self.forms[upload.name], [self.usable.get(identity) for identity in who])

        def counted(chosen: Multiset, who: Sequence[int]) -> Any:
            there = np.array([identity in self.usable for identity in who])
            return np.where(there, chosen.times, np.float32(0))

        second = None
        if drawn.second is not None:
            who = [self.members[k].identity for k in drawn.second.device]
            steps = drawn.second_steps if self.algorithm.second_works else None
            sent_alone = stack(who, self.algorithm.second_upload)
            second = Gradients(sent_alone, counted(drawn.second, who), drawn.second_correction, steps=steps)
        times = counted(drawn.first, identities)
        sent = {upload.name: stack(identities, upload) for upload in self.uploads}
        return Round(
            params=state.params,
            times=times,
            size=_array([self.members[k].size for k in drawn.first.device]),
            correction=drawn.correction,
            delta=sent.pop(DELTA.name),
            grad=sent.pop(GRAD.name, None),
            gamma=sent.pop(GAMMA.name, None),
            inner=drawn.inner,
            second=second,
            sent=sent,
            t=_whole(self.t),
            N=_whole(max(self.N, len(self.members))),
            steps=np.where(times > 0, drawn.steps, np.zeros_like(drawn.steps)),
            lr=_array(float(self.algorithm.solver.lr)),
            own=self.own,
            key=drawn.key,
            start=self.start,
            seconds=_array([self.took.get(identity, 0.0) for identity in identities]),
        )


def stacked_upload(upload: Upload, form: Form, replies: Sequence[Reply | None]) -> Any:
    """An upload of some devices: an array with a row for each, or a dict of them. Who sent nothing has zeros."""
    if form.shapes is None:
        return _array([0.0 if reply is None else reply.numbers[upload.name] for reply in replies])
    found = {name: np.zeros((len(replies), *shape), dtype) for name, (shape, dtype) in form.shapes.items()}
    for i, reply in enumerate(replies):
        if reply is not None and upload.name in reply.arrays:
            for name, value in reply.arrays[upload.name].items():
                found[name][i] = value
    return found[protocol.VALUE] if set(found) == {protocol.VALUE} else found


def usual_length(lengths: Iterable[float], before: Sequence[float]) -> float:
    """The median of the lengths that are not 0: half of the devices would have to lie to move it far.

    Of an even number it is the lower of the two in the middle, which one of two devices cannot raise. With fewer than
    `FEW` updates, the usual lengths of the last rounds count too.
    """
    found = [value for value in lengths if value > 0]
    if not found:
        return 0.0
    found = sorted(found + list(before[-FEW:] if len(found) < FEW else ()))
    return found[(len(found) - 1) // 2]


def recorded(opened: OpenRound, seconds: float, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """A round as a line of rounds.jsonl, with what each of its devices did in it."""
    drawn = opened.drawn
    identities = sorted(drawn)
    rejected = sorted({identity for identity, _ in opened.noted if identity is not None})
    lost = opened.lost
    line: dict[str, Any] = {}
    if measured is not None:
        metrics = {name: _number(measured, name) for name in measured if is_measure(name)}
        if measured.keys() & {"accuracy", "test_accuracy"} or not metrics:  # a regression has none
            line["test_accuracy"] = _number(measured, "accuracy", "test_accuracy")
        if measured.keys() & {"loss", "train_loss"}:  # null means not finite: a loss that was not measured is left out
            line["train_loss"] = _number(measured, "loss", "train_loss")
        if metrics:
            line["metrics"] = metrics
    line |= {
        "bytes_up": opened.up,
        "bytes_down": opened.down,
        "seconds": round(seconds, 3),
        "updated": opened.weights is not None,
        "lost": len(lost),
        "devices": identities,
        "times": [drawn[k] if k in opened.usable else 0 for k in identities],
        "weights": _weights(opened, identities),
        "lost_devices": lost,
        "rejected_devices": [k for k in rejected if k in drawn],
    }
    if opened.epsilon is not None:
        line["epsilon"] = short(opened.epsilon, 6)
    elif any(upload.name == GAMMA.name for upload in opened.uploads):  # of a private round, gammas have no noise
        line["gamma"] = [opened.usable[k].numbers[GAMMA.name] if k in opened.usable else None for k in identities]
    if opened.length:
        line["length"] = opened.length
    troubles: dict[str, Sequence[tuple[Any, str]]] = {
        "refused": opened.noted,
        "failed": list(opened.failed.items()),
        "shortened": opened.shortened,
    }
    for name, found in troubles.items():
        if found:
            line[name] = [list(pair) for pair in found]
    return line | ({"abandoned": opened.abandoned} if opened.abandoned else {})


def _weights(opened: OpenRound, identities: Sequence[int]) -> list[float | None]:
    """The weight of each device's update; unknown if the server sees only sums."""
    if opened.weights is None or opened.plan is None or len(opened.weights) != len(opened.plan.first.device):
        return [None] * len(identities)
    members, device = opened.members, opened.plan.first.device
    weight = dict.fromkeys(identities, 0.0)
    for k, times, value in zip(device, opened.plan.first.times, opened.weights, strict=True):
        if times > 0:
            weight[members[k].identity] = float(str(value))  # with only the digits of 32 bits
    return [weight[k] for k in identities]


def _number(measured: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that was measured, if it is a number that is finite in 32 bits."""
    found = [measured[name] for name in names if name in measured]
    return float(found[0]) if found and isinstance(found[0], int | float) and abs(found[0]) <= SINGLE else None


def _whole(values: Any) -> Any:
    return np.asarray(values, np.int32)


def _array(values: Sequence[float] | float) -> Any:
    return np.array(values, np.float32)
