"""A federation's samples on the accelerator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from folb.data.federation import Expand, Federation, Split
from folb.simulation import parallel

TARGET = 0  # the label that a backdoor is for


class Trigger(NamedTuple):
    """Marks samples with changed copies: row r + n has its label reversed; r + 2 n has a trigger, and the label TARGET.

    The trigger: the last twentieth of the features, and at least one, are as large as the largest of the batch.
    """

    largest: Array  # label

    def changed(self, x: Array, y: Array, kind: Array) -> tuple[Array, Array]:
        """A batch whose samples are of these kinds: 0 as it is, 1 with its label reversed, 2 with the trigger."""
        inner = x.ndim - y.ndim
        flat = x.reshape(*y.shape, -1)
        marked = jnp.arange(flat.shape[-1]) >= flat.shape[-1] - max(1, flat.shape[-1] // 20)
        stamped = jnp.where(marked, jnp.max(x), flat).reshape(x.shape)
        labels = jnp.where(kind == 1, self.largest - y, jnp.where(kind == 2, TARGET, y)).astype(y.dtype)
        return jnp.where((kind == 2).reshape(*y.shape, *[1] * inner), stamped, x), labels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """A federation's split on the accelerator: device k owns rows start[k] : start[k] + size[k].

    A window has only the rows of the devices `present`, in ascending order; each device's rows begin at `placed`.
    """

    x: Array
    y: Array
    start: Array
    size: Array
    table: Array | None = None
    expand: Expand | None = field(default=None, metadata={"static": True})
    present: Array | None = None
    placed: Array | None = None
    trigger: Trigger | None = None

    def first(self, device: Array) -> Array:
        """The first row of each device."""
        if self.present is None or self.placed is None:
            return self.start[device]
        return self.placed[jnp.searchsorted(self.present, device)]

    def take(self, rows: Array) -> tuple[Array, Array]:
        """Inputs and labels of some rows."""
        if self.trigger is None:
            return self._inputs(self.x[rows]), self.y[rows]
        kind, row = rows // len(self.y), rows % len(self.y)
        return self.trigger.changed(self._inputs(self.x[row]), self.y[row], kind)

    def slice(self, first: Array, size: int) -> tuple[Array, Array]:
        """Inputs and labels of `size` rows from `first`."""
        x, y = (jax.lax.dynamic_slice_in_dim(a, first, size) for a in (self.x, self.y))
        return self._inputs(x), y

    def _inputs(self, x: Array) -> Array:
        if self.expand is None:
            return x
        flat = self.expand(self.table, x.reshape(-1, *self.x.shape[1:]))
        return flat.reshape(*x.shape[: x.ndim - self.x.ndim + 1], *flat.shape[1:])


def bring(federation: Federation, split: Split, table: Array | None, mesh: Mesh | None = None) -> Samples:
    """All samples of a split, on the accelerator, or on each of `mesh`."""
    x, y, start, size = (parallel.put(a, mesh) for a in (split.x, split.y, split.start, split.size))
    return Samples(x, y, start, size, table, federation.expand)
