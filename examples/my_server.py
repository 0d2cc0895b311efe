"""Your own server step: no step is longer than a multiple of the mean of the earlier steps.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_server.py:steady --set server.most=1,2
"""

import jax.numpy as jnp
from jax import Array

import folb
from folb import tree


class Steady(folb.ServerStep):
    """w + Delta, shortened to `most` times the mean length of the steps so far; the first step is not shortened."""

    most: float = folb.setting("times the mean length of a step", default=1.5)
    gain = 1.0  # it makes no update longer: the guard takes it

    def init(self, params: object) -> tuple[Array, Array]:
        """The sum of the lengths of the steps so far, and their number."""
        return jnp.float32(0), jnp.float32(0)

    def apply(self, memory: tuple[Array, Array], round: folb.Round, update: folb.Update) -> tuple[object, object]:
        """The shortened step, and the memory with it."""
        total, count = memory
        length = tree.norm(update.delta)
        allowed = jnp.where(count > 0, self.most * total / jnp.maximum(count, 1), length)
        taken = jnp.minimum(length, allowed)
        scale = folb.rules.fraction(taken, length)
        return tree.add(round.params, update.delta, scale), (total + taken, count + 1)


steady = folb.Algorithm(server=Steady())
