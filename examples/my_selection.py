"""Your own selection, with a memory: devices with large last updates are drawn more often.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_selection.py:by_last_update --set select.explore=0.1,0.5
"""

import jax.numpy as jnp
from jax import Array

import folb
from folb import tree


class LastNorm(folb.DeviceMemory):
    """Of each device, the norm of its last update; -1 before the first. A lost device keeps its old norm."""

    def init(self, params: object) -> tuple[tuple[()], Array]:
        return (), jnp.float32(-1)

    def update(self, round: folb.Round) -> tuple[tuple[()], Array]:
        return (), tree.norms(round.delta)


class LargeUpdates(folb.Sampling):
    """P_k in proportion to the norm (for a new device, the largest norm), plus an equal share for all."""

    explore: float = folb.setting("share drawn uniformly", within=(0, 1), default=0.2)
    keeps = LastNorm()

    def weigh(self, known: folb.Known) -> Array:
        norm = jnp.where(known.memory < 0, jnp.max(known.memory), known.memory)
        norm = jnp.where(jnp.max(known.memory) > 0, norm, 1.0)
        return (1 - self.explore) * norm / jnp.sum(norm) + self.explore / len(norm)


by_last_update = folb.Algorithm(select=LargeUpdates())
