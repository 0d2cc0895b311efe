"""What the devices of a round are asked: tasks, and the form that each answer must have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from folb.core import round as core_round
from folb.core import vector
from folb.core.algorithm import Algorithm
from folb.core.multiset import Multiset
from folb.core.round import State
from folb.core.upload import DELTA, ENCODED, GRAD, Upload
from folb.errors import InputError
from folb.flower import protocol
from folb.flower.mailbox import message
from folb.flower.protocol import Arrays, Task
from folb.flower.replies import Encoded, Expected, Form, Shape
from folb.flower.roster import Member


class Slots(NamedTuple):
    """The places of a draw: who is in each, and the work that it is asked for."""

    chosen: Multiset
    words: Any  # [K, 2]
    work: Any  # [K]
    lost: Any  # [K] by the system model
    steps: Any  # [K] local steps
    correction: Any  # [K]


@dataclass(frozen=True)
class Questions:
    """What the server may ask in round t."""

    t: int
    algorithm: Algorithm  # in this round: with its K and its step size
    params: Arrays  # the server's model
    model: ArrayRecord  # as it is sent
    start: Arrays | None  # as devices decode it, if it has a codec
    key: tuple[int, int]  # random words that all devices of the round share
    forms: Mapping[str, Form]  # what each upload must be
    seconds: float  # of the round
    replay: bool

    def plain(self, *uploads: Upload) -> Task:
        """A task without local work."""
        names = tuple(upload.name for upload in uploads)
        task = Task(self.t, names, key=self.key, mu=float(self.algorithm.solver.mu), numbers=_numbers(uploads))
        codec = self.algorithm.compression.down
        return task if codec is None else replace(task, down=codec.name, shapes=protocol.shapes(self.params))

    def through(self, slots: Slots, i: int, *uploads: Upload) -> Task:
        """The task of a slot without local work: with its random words, and the codec of what is sent."""
        task = replace(self.plain(*uploads), words=(int(slots.words[i][0]), int(slots.words[i][1])))
        codecs = self.algorithm.compression
        if codecs.up is None:
            return task
        numbers = {"codec.keep": codecs.up.keep, "codec.feedback": float(codecs.feedback)}
        return replace(task, codec=codecs.up.name, numbers={**task.numbers, **numbers})

    def work(self, slots: Slots, i: int, *uploads: Upload) -> Task:
        """The task of a slot: the local work that it has drawn, and its uploads."""
        solver, task = self.algorithm.solver, self.through(slots, i, *uploads)
        steps = {f"step.{name}": float(value) for name, value in solver.step.numbers.items()}
        return replace(
            task,
            work=int(slots.work[i]),
            lr=float(solver.lr),
            batch=solver.batch,
            unit=solver.unit,
            step=solver.step.name,
            numbers={**task.numbers, **steps, **self._private()},
        )

    def _private(self) -> dict[str, float]:
        """What a device of a private run gets: the clip and, if it adds noise, its standard deviations."""
        found, slots = self.algorithm.privacy, self.algorithm.selection.K
        if found is None:
            return {}
        numbers = {"clip": float(found.clip)}
        if found.place == "distributed":
            numbers |= {part: float(found.deviation(part, found.clip)) / math.sqrt(slots) for part in found.parts}
            numbers["replay"] = float(self.replay)
        return {f"privacy.{name}": value for name, value in numbers.items()}

    def asked(self, member: Member, task: Task, more: Mapping[str, ArrayRecord]) -> tuple[Message, Expected]:
        """A task as a message to a device, with `more` records, and what is expected of its reply."""
        content = RecordDict({protocol.MODEL: self.model, protocol.TASK: task.record(), **more})
        forms = {name: self._form(task, name) for name in task.uploads}
        asked = message("train", member.node, self.t, content, self.seconds)
        return asked, Expected(self.t, forms, member.size, member.node)

    def _form(self, task: Task, upload: str) -> Form:
        """The form of an upload of a task, which may go through a codec."""
        codecs, known = self.algorithm.compression, self.forms[upload]
        if not task.codec or codecs.up is None or upload not in {one.name for one in ENCODED}:
            return known
        shapes = {name: Shape(*sent) for name, sent in codecs.up.shapes(vector.size(self.params)).items()}
        words, whole = np.array(task.words, np.uint32), codecs.feedback and upload == DELTA.name
        return known._replace(shapes=shapes, encoded=Encoded(codecs.up, words, self.params, whole))


def forms(algorithm: Algorithm, uploads: Sequence[Upload], params: Arrays) -> dict[str, Form]:
    """The form that `uploads`, and what the selection asks for, must have for a model like `params`."""
    how = algorithm.selection
    survey, first = how.sampling.survey, how.sampling.first
    asked = [] if survey is None else [survey]
    asked += [] if first is None else [first.upload]
    asked += [algorithm.second_upload] if how.second else []
    found = {upload.name: _form(upload, params) for upload in (*asked, *uploads)}
    if survey is not None and survey != GRAD and found[survey.name].shapes is not None:
        raise InputError(f"survey: {survey.name}", found[survey.name].shapes, "should be a number")
    return found


def _form(upload: Upload, params: Arrays) -> Form:
    shape = core_round.upload_shape(upload, params)
    if isinstance(shape, Mapping) and all(hasattr(part, "shape") for part in shape.values()):
        shapes = {name: Shape(part.shape, part.dtype.name) for name, part in shape.items()}
        return Form(shapes, upload.least, upload.most)
    if not hasattr(shape, "shape"):
        raise InputError(f"upload {upload.name}", shape, "should be a number, an array, or a dict of arrays")
    one = {protocol.VALUE: Shape(shape.shape, shape.dtype.name)}
    return Form(one if shape.shape else None, upload.least, upload.most)


def questions(
    algorithm: Algorithm, state: State, t: int, arrays: ArrayRecord, forms: Mapping[str, Form], seed: Any, **more: Any
) -> Questions:
    """The questions of round t. `arrays` is the server's model: a server step or a codec may send another one."""
    params, codec, key = state.params, algorithm.compression.down, np.asarray(core_round.shared_words(seed, t))
    start = None
    if codec is not None or algorithm.server.starts_ahead:
        ahead = core_round.model_encoded(algorithm, state, key)
        ahead = {name: np.asarray(ahead[name]) for name in (params if codec is None else ahead)}
        start = None if codec is None else codec.decoded(ahead, key, params)
        arrays = protocol.packed(ahead)
    return Questions(t, algorithm, params, arrays, start, (int(key[0]), int(key[1])), forms, **more)


def _numbers(uploads: Sequence[Upload]) -> dict[str, float]:
    named = {upload.name: (*upload.numbers.items(), *upload.sizes) for upload in uploads}
    return {f"{upload}.{name}": float(value) for upload, pairs in named.items() for name, value in pairs}
