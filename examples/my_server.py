"""Your own server step: no step is longer than a multiple of the mean of the earlier steps.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_server.py:steady --set steady.most=1,2
"""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

import folb
from folb import tree


def start(params: object) -> tuple[Array, Array]:
    """The sum of the lengths of the steps so far, and their number."""
    return jnp.float32(0), jnp.float32(0)


def step(memory: tuple[Array, Array], round: folb.Round, update: folb.Update, most: Array) -> tuple[object, object]:
    """w + Delta, shortened to `most` times the mean length; the first step is not shortened."""
    total, count = memory
    length = tree.norm(update.delta)
    allowed = jnp.where(count > 0, most * total / jnp.maximum(count, 1), length)
    taken = jnp.minimum(length, allowed)
    scale = folb.rules.fraction(taken, length)
    return tree.add(round.params, update.delta, scale), (total + taken, count + 1)


@folb.named
def steady(*, most: Annotated[float, "times the mean length of a step"] = 1.5, **common: object) -> folb.Algorithm:
    """FedAvg with steps of bounded length."""
    server = folb.ServerStep(start, Partial(step, most=most), gain=1.0)  # it makes no update longer
    return folb.compose(folb.rules.mean, server=server, **common)
