"""FOLB in two phases, for a server that learns only sums.

Phase 1 sums the devices' gradients; their mean g goes back. In phase 2 each device computes its own importance I_k of
(13) or (18), and sends I_k Delta w_k and |I_k| into two sums; the server divides one by the other. The server never
looks at one device's values alone: it only adds them up.

A function forms the sums, by default `in_the_clear`, which does not hide what it adds. To mask the values, replace it
by a secure-aggregation protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flwr.app import Message

from folb.core.algorithm import Algorithm
from folb.core.codec import Compression
from folb.core.round import State
from folb.core.rules import Mean, Round
from folb.core.server_step import SERVERS
from folb.core.upload import GRAD, Upload
from folb.errors import InputError, check_whole
from folb.flower import protocol
from folb.flower.open_round import OpenRound, close
from folb.flower.protocol import Arrays
from folb.flower.strategy import FederatedStrategy
from folb.flower.sums import HETERO_IMPORTANCE, HETERO_WEIGHTED, IMPORTANCE, SCALED_GRAD, WEIGHTED

Sum = Callable[[Sequence[Arrays]], Arrays]


def in_the_clear(parts: Sequence[Arrays]) -> Arrays:
    """The sum of arrays by name, in 64 bits and in the given order: that of the devices' identities."""
    total = {name: value.astype(np.float64) for name, value in parts[0].items()}
    for part in parts[1:]:
        for name, value in part.items():
            total[name] += value
    return {name: value.astype(np.float32) for name, value in total.items()}


class TwoPhaseStrategy(FederatedStrategy):
    """FOLB (13), or (18), in which the server learns two sums a round and no device's own update or gradient.

    A round in which fewer than `min_devices` distinct devices answer is abandoned: the sum of a few says much about
    each. `add` sums what the devices send. All else is as in `FederatedStrategy`, except that nothing can be guarded,
    and no update shortened: the server would have to look at each.
    """

    further = (SCALED_GRAD,)

    def __init__(self, algorithm: Algorithm, *, min_devices: int = 3, add: Sum = in_the_clear, **settings: Any) -> None:
        if settings.pop("guarded", False) is not False or algorithm.guard is not None:
            raise InputError("guarded", True, "is not possible with sums only: the guard looks at each gradient")
        if algorithm.robust is not None:
            raise InputError("robust", algorithm.robust.name, "is not possible with sums only: it looks at each update")
        if "cap" in settings:
            raise InputError("cap", settings["cap"], "belongs to the guard, which is not possible with sums only")
        if "max_norm" in settings:
            raise InputError("max_norm", settings["max_norm"], "is not possible with sums only: it bounds each update")
        super().__init__(algorithm, guarded=False, **settings)
        check_whole("min_devices", min_devices, 2)
        if self.settings.fraction_train is None and min_devices > algorithm.selection.enough:
            raise InputError("min_devices", min_devices, f"should be at most K = {algorithm.selection.enough}")
        if algorithm.privacy is not None:
            expected = "should be None with sums only: a device would have to know the noisy mean before it clips"
            raise InputError("privacy", algorithm.privacy.name, expected)
        survey = algorithm.selection.survey
        if survey is not None:
            raise InputError("select", algorithm.name, f"should not ask a device for its own {survey.name}, but does")
        if algorithm.memory is not None:
            expected = "should be None: the server cannot remember devices whose replies it never sees"
            raise InputError("memory", algorithm.name, expected)
        if algorithm.step_size is not None and not algorithm.step_size.scheduled:
            expected = "should be None: it may look at single updates, which the server never sees"
            raise InputError("step_size", algorithm.name, expected)
        if algorithm.compression != Compression():
            expected = "should be none: a sum adds up numbers, and a codec's bytes do not add up"
            name = "compress_up" if algorithm.compression.up is not None else "compress_down"
            raise InputError(name, algorithm.settings.get(name), expected)
        if algorithm.gradient.upload != GRAD:
            expected = "should be exact: a device computes its own weight from its gradient"
            raise InputError("gradient", algorithm.gradient.name, expected)
        if algorithm.selection.first is not None:
            raise InputError("select", algorithm.name, "should not ask a device for its own sketch, but does")
        self.min_devices, self.add = min_devices, add
        if algorithm.rule.alone is None:
            expected = "should be one of folb, folb_hetero, folb_never_flip: all others need more than sums"
            raise InputError("algorithm", algorithm.name, expected)
        server = algorithm.server
        if not server.sum_alone:
            known = ", ".join(name for name, step in SERVERS.parts.items() if step.sum_alone)
            raise InputError("server", server.name, f"should be one of {known}: others may need each device's update")
        if server.by_lengths:
            expected = "should not need the length of each device's update, as stretch does"
            raise InputError("server", server.name, expected)
        if extra := [upload.name for upload in algorithm.uploads if upload.name not in ("grad", "gamma")]:
            raise InputError("uploads", extra, "should be grad and gamma only: the server never sees a reply by itself")

    def uploads(self, algorithm: Algorithm) -> tuple[Upload, Upload]:
        """What a device sends in phase 2: its terms of the two sums."""
        if not (numbers := algorithm.rule.alone):
            return WEIGHTED, IMPORTANCE
        numbers = {**numbers, "most": 1.0 if algorithm.clamp_gamma else math.inf}
        return _with(HETERO_WEIGHTED, **numbers), _with(HETERO_IMPORTANCE, **numbers)

    def _ask(self, opened: OpenRound) -> list[Message]:
        """All of phase 1, and the messages of phase 2 to the devices that answered it."""
        drawn, questions = opened.first, opened.questions
        assert drawn is not None and self.mailbox is not None
        slots = opened.at_work(drawn)
        times, scale = drawn.chosen.times, drawn.chosen.times * drawn.correction
        tasks = {identity: questions.plain(_with(SCALED_GRAD, scale=scale[i])) for identity, i in slots.items()}
        answers = opened.exchange(self.mailbox, tasks)
        if len(answers) < self.min_devices:
            opened.abandoned = f"{len(answers)} distinct devices answered, but a sum needs {self.min_devices}"
            return []
        there = sorted(answers)
        total = self.add([answers[identity].arrays[SCALED_GRAD.name] for identity in there])
        K = sum(float(times[slots[identity]]) for identity in there)
        mean = {protocol.MEAN: protocol.packed({name: value / np.float32(K) for name, value in total.items()})}
        tasks = {}
        for identity in there:
            uploads = [_with(upload, times=times[slots[identity]]) for upload in opened.uploads]
            tasks[identity] = questions.work(drawn, slots[identity], *uploads)
        return opened.ask(tasks, dict.fromkeys(there, mean))

    @property
    def fewest(self) -> int:
        """The fewest distinct devices for a round that counts."""
        return max(self.settings.min_replies or 1, self.min_devices)

    def _closed(self, opened: OpenRound) -> State:
        """One sum divided by the other, as the step of a round with one reply."""
        usable = opened.answers.usable
        weighted, importance = opened.uploads
        step = self.add([usable[identity].arrays[weighted.name] for identity in sorted(usable)])
        shares = [{"": np.array(usable[identity].numbers[importance.name])} for identity in sorted(usable)]
        total = float(self.add(shares)[""])
        one: Any = np.ones(1, np.float32)
        round = Round(
            params=opened.state.params,
            times=one if total > 0 else 0 * one,
            size=one,
            correction=one,
            delta={name: value[None] / np.float32(total or 1.0) for name, value in step.items()},
        )
        how = replace(opened.algorithm.selection, K=1)
        alone = replace(opened.algorithm, selection=how, rule=Mean())
        return opened.close(jax.tree.map(np.asarray, close(alone, opened.state, round)))


def _with(upload: Upload, **numbers: Any) -> Upload:
    """An upload with the numbers of one device."""
    return replace(upload, numbers={**upload.numbers, **{name: float(value) for name, value in numbers.items()}})
