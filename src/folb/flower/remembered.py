"""The memory of devices on Flower, by identity. Only devices that the server has met have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class Remembered:
    """What the server remembers of each device. `first` is the memory of a device that it has not met."""

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
