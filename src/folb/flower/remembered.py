"""What the server remembers from round to round, besides the model: of its devices, and about their replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from folb.core.upload import DELTA
from folb.flower.open_round import OpenRound
from folb.flower.replies import length

FEW = 3  # updates: with fewer, a liar's own update could be the median

log = logging.getLogger("flwr")


class Remembered:
    """The memory of devices, by identity. `first` is the memory of a device that the server has not met."""

    def __init__(self, first: Any) -> None:
        self.first = jax.tree.map(np.asarray, first)
        self.met: dict[int, Any] = {}

    def stacked(self, identities: Sequence[int]) -> Any:
        """The memory of some devices."""
        return jax.tree.map(lambda *rows: np.stack(rows), *(self.met.get(k, self.first) for k in identities))

    def update(self, identities: Sequence[int], changed: Sequence[bool], values: Any) -> None:
        """Remember the entries of a stack that changed."""
        for i, (k, new) in enumerate(zip(identities, changed, strict=True)):
            if new:
                self.met[k] = jax.tree.map(lambda rows, i=i: np.array(rows[i]), values)

    def packed(self) -> Any:
        """The memory as arrays, for a checkpoint; nothing if there is nothing to remember."""
        if not jax.tree.leaves(self.first):
            return ()
        who = sorted(self.met)
        rows = [jax.tree.map(lambda *rows: np.stack(rows), *(self.met[k] for k in who))] if who else []
        none = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), self.first)
        return {"who": np.array(who, np.int64), "rows": rows[0] if rows else none}

    def unpack(self, packed: Any) -> None:
        """Take the memory from a checkpoint."""
        if jax.tree.leaves(self.first):
            values = jax.tree.map(np.asarray, packed["rows"])
            self.met = {}
            who = [int(k) for k in packed["who"]]
            self.update(who, [True] * len(who), values)


class Admission:
    """What earlier rounds decide about the replies of this one.

    With over-selection, devices take turns: the fastest would otherwise be used in every round.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lengths: list[float] = []  # of a usual update, in each round
        self.used: set[int] = set()  # devices whose reply was used the last time they were asked
        self.since: tuple[int, float] = 0, 0.0  # the round that has as many replies as it wants, and since when
        for line in lines:
            self.add(dict(zip(line["devices"], line["times"], strict=True)), line.get("length", 0.0))

    def add(self, drawn: Mapping[int, float], length: float) -> None:
        """Remember a round: how often it used each device that was drawn, and the length of a usual update."""
        self.used = (self.used - set(drawn)) | {k for k, times in drawn.items() if times}
        self.lengths += [length] if length else []

    def enough(self, opened: OpenRound, fewest: int) -> bool:
        """Whether K devices have answered, if more than K were asked.

        If some of them were used the last time they were asked, the others get as much time again.
        """
        there = opened.answers.usable
        if opened.algorithm.selection.factor == 1 or not _suffice(opened, there, fewest):
            return False
        if _suffice(opened, set(there) - self.used, fewest):
            return True
        now = time.monotonic()
        self.since = self.since if self.since[0] == opened.t else (opened.t, now)
        return now - self.since[1] >= self.since[1] - opened.began

    def take_turns(self, opened: OpenRound, fewest: int) -> None:
        """Set aside replies of devices that were used the last time, if the others suffice and some did not answer."""
        there = opened.answers.usable
        if opened.algorithm.selection.factor == 1 or not set(opened.drawn) & opened.silent:
            return
        if _suffice(opened, set(there) - self.used, fewest):
            opened.answers.aside = [k for k in opened.drawn if k in there and k in self.used]
            opened.answers.usable = {k: reply for k, reply in there.items() if k not in opened.answers.aside}

    def shorten(self, opened: OpenRound, most: float) -> None:
        """Shorten updates to `most` times the usual length."""
        drawn, usable = opened.drawn, opened.answers.usable
        lengths = {k: length(reply.arrays[DELTA.name]) for k, reply in usable.items() if k in drawn}
        opened.notes.length = usual_length(lengths.values(), self.lengths)
        bound = most * opened.notes.length
        for k, value in sorted(lengths.items()):
            if value > bound > 0:
                own = usable[k].arrays
                own[DELTA.name] = {
                    n: (part * (bound / value)).astype(part.dtype) for n, part in own[DELTA.name].items()
                }
                words = f"its update of norm {value:.3g} to {bound:.3g}, {most:g} times the median"
                opened.notes.shortened.append((k, words))
                log.warning("round %d: shortened: device %d: %s", opened.t, k, words)


def _suffice(opened: OpenRound, there: Container[int], fewest: int) -> bool:
    """Whether these devices are as many as the round wants."""
    times = [times for identity, times in opened.drawn.items() if identity in there]
    return sum(times) >= opened.algorithm.selection.enough and len(times) >= fewest


def usual_length(lengths: Iterable[float], before: Sequence[float]) -> float:
    """The median of the lengths that are not 0: half of the devices would have to lie to move it far.

    Of an even number it is the lower of the two in the middle, which one of two devices cannot raise. With fewer than
    `FEW` updates, the usual lengths of the last rounds count too.
    """
    positive = [value for value in lengths if value > 0]
    if not positive:
        return 0.0
    positive = sorted(positive + list(before[-FEW:] if len(positive) < FEW else ()))
    return positive[(len(positive) - 1) // 2]
