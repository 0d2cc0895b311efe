"""A round on real devices: what is asked, the replies, and the `Round` that the algorithm's rule sees."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from folb.core import gaussian, privacy, vector
from folb.core import round as core_round
from folb.core.algorithm import Algorithm
from folb.core.local_step import LocalStep
from folb.core.privacy import Noise
from folb.core.randomness import Multiset
from folb.core.round import Closed, State
from folb.core.rules import Gradients, Round
from folb.core.upload import DELTA, ENCODED, GAMMA, GRAD, Upload
from folb.errors import InputError
from folb.flower import protocol, replies
from folb.flower.protocol import Arrays, Task
from folb.flower.replies import Encoded, Expected, Form, Refused, Reply, Shape, last_words
from folb.flower.roster import Mailbox, Member, log, message

close = jax.jit(core_round.close)
told = jax.jit(core_round.told)
_with_noise = jax.jit(privacy.with_noise)


def noisy(algorithm: Algorithm, round: Round, seed: int | None) -> Round:
    """The round with the noise that the server adds, if the run is private; without a seed, the operating system's."""
    if algorithm.privacy is None:
        return round
    if seed is not None:
        return _with_noise(algorithm, round, np.uint32(seed))
    return round._replace(noise=Noise(gaussian.like(privacy.shapes(algorithm, round))))


@dataclass
class Notes:
    """What is only recorded of a round: nothing in it decides how the round ends."""

    rejected: list[tuple[int | None, str]] = field(default_factory=list)  # all rejections, with their devices
    failed: dict[int, str] = field(default_factory=dict)  # lost devices, with the reason
    shortened: list[tuple[int, str]] = field(default_factory=list)  # devices whose update was too long
    length: float = 0.0  # of a usual update in this round
    epsilon: float | None = None  # of a private run, after this round
    up: int = 0
    down: int = 0


@dataclass
class Answers:
    """What came back for some messages: each reply is used or rejected, once."""

    t: int
    notes: Notes
    began: float  # the round
    asked: Mapping[int, tuple[Message, Expected]] = field(default_factory=dict)  # by identity
    usable: dict[int, Reply] = field(default_factory=dict)
    # the seconds of the round until a usable reply came; over-selected devices may have to wait for a later round
    took: dict[int, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    looked_at: list[Message] = field(default_factory=list)

    def refuse(self, identity: int | None, reason: str) -> None:
        self.notes.rejected.append((identity, reason))
        log.warning("round %d: rejected: %s%s", self.t, "" if identity is None else f"device {identity}: ", reason)

    def take(self, received: Iterable[Message]) -> None:
        owners = {message.metadata.message_id: k for k, (message, _) in self.asked.items()}
        known = set(map(id, self.looked_at))
        for reply in (reply for reply in received if id(reply) not in known):
            self.looked_at.append(reply)
            identity = owners.get(reply.metadata.reply_to_message_id)
            if identity is None:
                self.refuse(None, f"node {reply.metadata.src_node_id}: a reply that answers no message of this round")
            elif identity in self.usable or identity in self.refused:
                self.refuse(identity, "a repeated reply")
            elif reply.has_error():
                self.notes.failed[identity] = last_words(reply.error.reason)
                log.warning("round %d: lost: device %d: %s", self.t, identity, self.notes.failed[identity])
            else:
                try:
                    self.usable[identity] = replies.checked(reply, self.asked[identity][1])
                    self.took[identity] = time.monotonic() - self.began
                    self.notes.failed.pop(identity, None)  # an error came first
                    self.notes.up += protocol.nbytes(reply.content)
                except Refused as reason:
                    self.refused[identity] = str(reason)
                    self.refuse(identity, str(reason))


class Slots(NamedTuple):
    """The places of a draw: who is in each, and the work that it is asked for."""

    chosen: Multiset
    words: Any  # [K, 2]
    work: Any  # [K]
    lost: Any  # [K] by the system model
    steps: Any  # [K] local steps
    correction: Any  # [K]


@dataclass
class OpenRound:
    """A round under way: what is needed to close it."""

    t: int
    algorithm: Algorithm  # in this round: with its K and its step size
    state: State
    members: list[Member]
    uploads: tuple[Upload, ...]  # what the server sees of each device of S_1
    N: int  # all devices met so far: the memory has each of them
    notes: Notes
    model: ArrayRecord  # as it is sent
    start: Arrays | None  # as devices decode it, if it has a codec
    key: tuple[int, int]  # random words that all devices of the round share
    forms: Mapping[str, Form]  # what each upload must be
    seconds: float  # of the round
    replay: bool
    began: float = field(default_factory=time.monotonic)
    first: Slots | None = None  # S_1, once it is drawn
    second: Slots | None = None  # S_2 of Algorithm 2
    inner: Any = None  # <grad f, grad F_k> of each slot of S_1, if a survey gave it
    own: Any = ()  # the memory of the devices of S_1, stacked
    before: dict[int, str] = field(default_factory=dict)  # rejected before the round's own messages
    abandoned: str = ""
    weights: Any = None  # of each draw, once it is closed, if the model changed

    def __post_init__(self) -> None:
        self.answers = self._messages({}, {})

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def drawn(self) -> dict[int, int]:
        """The devices of S_1, and how many times each was drawn."""
        if self.first is None:
            return {}
        slots = zip(self.who(self.first), self.first.chosen.times, strict=True)
        return {k: int(times) for k, times in slots if times > 0}

    @property
    def lost(self) -> list[int]:
        """The devices of S_1 that sent nothing, usable or not."""
        return sorted(set(self.drawn) - {*self.answers.took, *self.answers.refused, *self.before})

    @property
    def silent(self) -> set[int]:
        """Devices that were asked, and did not answer."""
        return set(self.answers.asked) - {*self.answers.took, *self.answers.refused}

    def who(self, slots: Slots) -> list[int]:
        """The identities of the devices of some slots."""
        return [self.members[k].identity for k in slots.chosen.device]

    def at_work(self, slots: Slots) -> dict[int, int]:
        """The devices that are drawn and not lost, by identity, each with its slot."""
        there = (slots.chosen.times > 0) & ~np.asarray(slots.lost)
        return {identity: i for i, identity in enumerate(self.who(slots)) if there[i]}

    def plain(self, *uploads: Upload) -> Task:
        """A task without local work."""
        names, codec = tuple(upload.name for upload in uploads), self.algorithm.compression.down
        pairs = ((one.name, key, value) for one in uploads for key, value in (*one.numbers.items(), *one.sizes))
        numbers = {f"{upload}.{key}": float(value) for upload, key, value in pairs}
        task = Task(self.t, names, key=self.key, mu=float(self.algorithm.solver.mu), numbers=numbers)
        return task if codec is None else replace(task, down=codec.name, shapes=protocol.shapes(self.state.params))

    def task(self, slots: Slots, i: int, *uploads: Upload, works: bool = True) -> Task:
        """The task of a slot: its random words, the codec of what is sent, and the local work that it has drawn."""
        solver, codecs = self.algorithm.solver, self.algorithm.compression
        task = replace(self.plain(*uploads), words=(int(slots.words[i][0]), int(slots.words[i][1])))
        if codecs.up is not None:
            given = {**codecs.up.settings, "feedback": float(codecs.feedback)}
            numbers = {**task.numbers, **{f"codec.{name}": value for name, value in given.items()}}
            task = replace(task, codec=codecs.up.name, numbers=numbers)
        if not works:
            return task
        numbers, fixed = _settings(solver.step)
        numbers = {**task.numbers, **numbers, **self._private()}
        task = replace(task, work=int(slots.work[i]), lr=float(solver.lr), batch=solver.batch, unit=solver.unit)
        return replace(task, step=solver.step.name, fixed=fixed, numbers=numbers)

    def _private(self) -> dict[str, float]:
        """What a device of a private run gets: the clip and, if it adds noise, its standard deviations."""
        privacy, slots = self.algorithm.privacy, self.algorithm.selection.K
        if privacy is None:
            return {}
        sent = {"clip": float(privacy.clip)}
        if privacy.by_devices:
            sent |= {part: float(privacy.deviation(part, privacy.clip)) / math.sqrt(slots) for part in privacy.parts}
            sent["replay"] = float(self.replay)
        return {f"privacy.{name}": value for name, value in sent.items()}

    def _form(self, task: Task, upload: str) -> Form:
        """The form of an upload of a task, which may go through a codec."""
        codecs, known = self.algorithm.compression, self.forms[upload]
        if not task.codec or codecs.up is None or upload not in {one.name for one in ENCODED}:
            return known
        shapes = {name: Shape(*sent) for name, sent in codecs.up.shapes(vector.size(self.state.params)).items()}
        words, whole = np.array(task.words, np.uint32), codecs.feedback and upload == DELTA.name
        return known._replace(shapes=shapes, encoded=Encoded(codecs.up, words, self.state.params, whole))

    def _messages(self, tasks: Mapping[int, Task], more: Mapping[int, Mapping[str, ArrayRecord]]) -> Answers:
        """Tasks as messages to devices, some with `more` records, and what is expected of their replies."""
        members, asked = {member.identity: member for member in self.members}, {}
        for k, task in tasks.items():
            content = RecordDict({protocol.MODEL: self.model, protocol.TASK: task.record(), **more.get(k, {})})
            self.notes.down += protocol.nbytes(content)
            forms, (_, size, node) = {name: self._form(task, name) for name in task.uploads}, members[k]
            expected = Expected(self.t, forms, size, node)
            asked[k] = message("train", node, self.t, content, self.seconds), expected
        return Answers(self.t, self.notes, self.began, asked)

    def ask(self, tasks: Mapping[int, Task], more: Mapping[int, Mapping[str, ArrayRecord]]) -> list[Message]:
        """The round's own messages: a task for each device, and `more` records for some."""
        self.answers = self._messages(tasks, more)
        return [message for message, _ in self.answers.asked.values()]

    def exchange(self, mailbox: Mailbox, tasks: Mapping[int, Task]) -> dict[int, Reply]:
        """The usable replies to tasks before the round's own, in at most half of its time."""
        answers = self._messages(tasks, {})
        answers.take(mailbox.exchange([message for message, _ in answers.asked.values()], self.left / 2))
        self.before |= answers.refused
        return answers.usable

    def stacked(self) -> Round:
        """All replies of the round in ascending order of identity. A reply that did not come counts 0 times."""
        first, second, usable = self.first, None, self.answers.usable
        assert first is not None

        def stack(slots: Slots, upload: Upload) -> Any:
            return stacked_upload(upload, self.forms[upload.name], [usable.get(k) for k in self.who(slots)])

        def counted(slots: Slots) -> Any:
            return np.where([k in usable for k in self.who(slots)], slots.chosen.times, np.float32(0))

        if self.second is not None:
            steps = self.second.steps if self.algorithm.gradient.works else None
            alone = stack(self.second, self.algorithm.gradient.second)
            second = Gradients(alone, counted(self.second), self.second.correction, steps=steps)
        times, sent = counted(first), {upload.name: stack(first, upload) for upload in self.uploads}
        array: Any = np.array  # the fields of a `Round` have the type of jax's arrays
        return Round(
            params=self.state.params,
            times=times,
            size=array([self.members[k].size for k in first.chosen.device], np.float32),
            correction=first.correction,
            delta=sent.pop(DELTA.name),
            grad=sent.pop(GRAD.name, None),
            gamma=sent.pop(GAMMA.name, None),
            inner=self.inner,
            second=second,
            sent=sent,
            t=array(self.t, np.int32),
            N=array(self.N, np.int32),
            steps=np.where(times > 0, first.steps, np.zeros_like(first.steps)),
            lr=array(self.algorithm.solver.lr, np.float32),
            own=self.own,
            key=array(self.key, np.uint32),
            start=self.start,
            seconds=array([self.answers.took.get(k, 0.0) for k in self.who(first)], np.float32),
        )

    def close(self, closed: Closed) -> State:
        """The state after the round's step. If that is not finite, the round is abandoned."""
        after = closed.state
        step = jax.tree.leaves((after.params, after.memory, after.average, after.step_size))
        remembered = jax.tree.leaves((after.shared, closed.own))  # here infinity may mark a device that was not met
        if not all(np.isfinite(leaf).all() for leaf in step) or any(np.isnan(leaf).any() for leaf in remembered):
            self.abandoned = "the step is not finite"
            return self.state
        self.weights = closed.weights if closed.updated else None
        # keep the order of the arrays: jax sorts names
        return after._replace(params={name: after.params[name] for name in self.state.params})

    def metrics(self) -> MetricRecord:
        notes, answers = self.notes, self.answers
        lr = None if self.algorithm.step_size is None else float(self.algorithm.solver.lr)
        numbers = {name: value for name, value in (("lr", lr), ("epsilon", notes.epsilon)) if value is not None}
        counts = {"asked": len(answers.asked), "replied": len(answers.usable), "refused": len(notes.rejected)}
        return MetricRecord({**numbers, **counts, "lost": len(self.lost), "abandoned": int(bool(self.abandoned))})


def stacked_upload(upload: Upload, form: Form, replies: Sequence[Reply | None]) -> Any:
    """An upload of some devices: an array with a row for each, or a dict of them. Who sent nothing has zeros."""
    if form.shapes is None:
        return np.array([0.0 if reply is None else reply.numbers[upload.name] for reply in replies], np.float32)
    rows = {name: np.zeros((len(replies), *shape), dtype) for name, (shape, dtype) in form.shapes.items()}
    for i, reply in enumerate(replies):
        if reply is not None and upload.name in reply.arrays:
            for name, value in reply.arrays[upload.name].items():
                rows[name][i] = value
    return rows[protocol.VALUE] if set(rows) == {protocol.VALUE} else rows


def forms(algorithm: Algorithm, uploads: Sequence[Upload], params: Arrays) -> dict[str, Form]:
    """The form that `uploads`, and what the selection asks for, must have for a model like `params`."""
    how, survey = algorithm.selection, algorithm.selection.survey
    asked = (survey, how.first, algorithm.gradient.second if how.second else None, *uploads)
    known = {upload.name: _form(upload, params) for upload in asked if upload is not None}
    if survey is not None and survey != GRAD and known[survey.name].shapes is not None:
        raise InputError(f"survey: {survey.name}", known[survey.name].shapes, "should be a number")
    return known


def _form(upload: Upload, params: Arrays) -> Form:
    shape = core_round.upload_shape(upload, params)
    parts = shape if isinstance(shape, Mapping) else {protocol.VALUE: shape} if shape.shape else None
    shapes = None if parts is None else {name: Shape(one.shape, one.dtype.name) for name, one in parts.items()}
    return Form(shapes, upload.least, upload.most)


def sent_model(
    algorithm: Algorithm, state: State, t: int, arrays: ArrayRecord, seed: Any
) -> tuple[ArrayRecord, Arrays | None, tuple[int, int]]:
    """What devices are sent of the model `arrays`: the record, as they decode it, and the words that they all share."""
    params, codec, key = state.params, algorithm.compression.down, np.asarray(core_round.shared_words(seed, t))
    start = None
    if codec is not None or algorithm.server.has("send"):  # another model than the server's may be sent
        ahead = core_round.model_encoded(algorithm, state, key)
        ahead = {name: np.asarray(ahead[name]) for name in (params if codec is None else ahead)}
        start = None if codec is None else codec.decoded(ahead, key, params)
        arrays = protocol.packed(ahead)
    return arrays, start, (int(key[0]), int(key[1]))


def _settings(step: LocalStep) -> tuple[dict[str, float], str]:
    """The settings of a local step, as a task has them: its numbers, and what is static or None."""
    numbers, others = {}, {}
    for one in fields(step):
        name, value = one.name, getattr(step, one.name)
        if name == "kind_":  # the device finds the class by its name
            continue
        try:
            if value is None or one.metadata.get("static"):
                json.dumps(value)  # or a TypeError
                others[name] = value
            else:
                numbers[f"step.{name}"] = float(value)
        except TypeError:
            expected = "should be a number, a word, a flag or a tuple of them: devices are sent it"
            raise InputError(f"local.{name}", value, expected) from None
    return numbers, json.dumps(others)
