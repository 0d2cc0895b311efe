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
from functools import reduce
from typing import Any

import jax
import numpy as np
from flwr.app import Message

from folb.core import conflicts
from folb.core.algorithm import Algorithm
from folb.core.round import State
from folb.core.rules import Mean, Round
from folb.core.upload import Upload
from folb.errors import InputError, check_whole
from folb.flower import protocol
from folb.flower.local_work import HETERO_IMPORTANCE, HETERO_WEIGHTED, IMPORTANCE, SCALED_GRAD, WEIGHTED
from folb.flower.open_round import OpenRound, close
from folb.flower.protocol import Arrays
from folb.flower.strategy import FederatedStrategy

Sum = Callable[[Sequence[Arrays]], Arrays]


def in_the_clear(parts: Sequence[Arrays]) -> Arrays:
    """The sum of arrays by name, in 64 bits and in the given order: that of the devices' identities."""
    total = {name: reduce(np.add, (part[name].astype(np.float64) for part in parts)) for name in parts[0]}
    return {name: value.astype(np.float32) for name, value in total.items()}


class TwoPhaseStrategy(FederatedStrategy):
    """FOLB (13), or (18), in which the server learns two sums a round and no device's own update or gradient.

    A round in which fewer than `min_devices` distinct devices answer is abandoned: the sum of a few says much about
    each. `add` sums what the devices send. All else is as in `FederatedStrategy`, except that nothing can be guarded,
    and no update shortened: the server would have to look at each.
    """

    further = (SCALED_GRAD,)

    def __init__(self, algorithm: Algorithm, *, min_devices: int = 3, add: Sum = in_the_clear, **settings: Any) -> None:
        if "max_norm" in settings:
            raise InputError("max_norm", settings["max_norm"], "is not possible with sums only: it bounds each update")
        super().__init__(algorithm, **{"guard": None} | settings)
        conflicts.check(self.algorithm, conflicts.of_two_phases)
        check_whole("min_devices", min_devices, 2)
        if self.settings.fraction_train is None and min_devices > algorithm.selection.enough:
            raise InputError("min_devices", min_devices, f"should be at most K = {algorithm.selection.enough}")
        self.min_devices, self.add = min_devices, add

    def uploads(self, algorithm: Algorithm) -> tuple[Upload, Upload]:
        """What a device sends in phase 2: its terms of the two sums."""
        if not (numbers := algorithm.rule.alone):
            return WEIGHTED, IMPORTANCE
        numbers = {**numbers, "most": 1.0 if algorithm.clamp_gamma else math.inf}
        return _with(HETERO_WEIGHTED, **numbers), _with(HETERO_IMPORTANCE, **numbers)

    def _ask(self, opened: OpenRound) -> list[Message]:
        """All of phase 1, and the messages of phase 2 to the devices that answered it."""
        drawn = opened.first
        assert drawn is not None and self.mailbox is not None
        slots = opened.at_work(drawn)
        times, scale = drawn.chosen.times, drawn.chosen.times * drawn.correction
        tasks = {identity: opened.plain(_with(SCALED_GRAD, scale=scale[i])) for identity, i in slots.items()}
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
            tasks[identity] = opened.task(drawn, slots[identity], *uploads)
        return opened.ask(tasks, dict.fromkeys(there, mean))

    @property
    def fewest(self) -> int:
        return max(self.settings.min_replies or 1, self.min_devices)

    def _closed(self, opened: OpenRound) -> State:
        """One sum divided by the other, as the step of a round with one reply."""
        replies = [reply for _, reply in sorted(opened.answers.usable.items())]
        weighted, importance = opened.uploads
        step = self.add([reply.arrays[weighted.name] for reply in replies])
        total = float(self.add([{"": np.array(reply.numbers[importance.name])} for reply in replies])[""])
        one: Any = np.ones(1, np.float32)
        round = Round(
            params=opened.state.params,
            times=one if total > 0 else 0 * one,
            size=one,
            correction=one,
            delta={name: value[None] / np.float32(total or 1.0) for name, value in step.items()},
        )
        how = replace(opened.algorithm.selection, K=1)
        alone = opened.algorithm.but(selection=how, rule=Mean())
        return opened.close(jax.tree.map(np.asarray, close(alone, opened.state, round)))


def _with(upload: Upload, **numbers: Any) -> Upload:
    return replace(upload, numbers={**upload.numbers, **{name: float(value) for name, value in numbers.items()}})
