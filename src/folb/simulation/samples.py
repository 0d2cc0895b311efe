"""A federation's samples on the accelerator."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from folb.data.federation import Expand, Federation, Split
from folb.simulation import parallel


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

    def first(self, device: Array) -> Array:
        """The first row of each device."""
        if self.present is None or self.placed is None:
            return self.start[device]
        return self.placed[jnp.searchsorted(self.present, device)]

    def take(self, rows: Array) -> tuple[Array, Array]:
        """Inputs and labels of some rows."""
        return self._inputs(self.x[rows]), self.y[rows]

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
