"""The model that is evaluated and kept: the server's own, or an average of its models.

An average sends no extra bytes, and smooths a model that swings from round to round.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from folb.core import tree
from folb.core.part import Part, Slot, below, setting
from folb.typing import Params


class Average(Part):
    """Which model is evaluated and kept. One of your own is a class of this base with `init`, `update` and `model`."""

    needed = ("init", "update", "model")

    def init(self, params: Params) -> Any:
        """The memory before the first round."""

    def update(self, memory: Any, params: Params) -> Any:
        """The memory after a round."""

    def model(self, memory: Any, params: Params) -> Params:
        raise NotImplementedError


class ServerModel(Average):
    """The server's model itself."""

    called = "none"

    def init(self, params: Params) -> tuple[()]:
        return ()

    def update(self, memory: tuple[()], params: Params) -> tuple[()]:
        return ()

    def model(self, memory: tuple[()], params: Params) -> Params:
        return params


class Ema(Average):
    """The exponential mean sum_s rate^(t-s) w^s / sum_s rate^(t-s) over the models s = 1 .. t that rounds led to; a
    round that changes nothing does not count."""

    rate: float = setting("the weight of earlier models", below(1), default=0.7)

    def init(self, params: Params) -> tuple[Params, Any]:
        return jax.tree.map(jnp.zeros_like, params), jnp.float32(0)

    def update(self, memory: tuple[Params, Any], params: Params) -> tuple[Params, Any]:
        total, count = memory
        return tree.add(params, total, self.rate), self.rate * count + 1

    def model(self, memory: tuple[Params, Any], params: Params) -> Params:
        total, count = memory
        return jax.tree.map(lambda s, w: jnp.where(count > 0, s / jnp.where(count > 0, count, 1.0), w), total, params)


class LastTwo(Average):
    """The mean of the last two models, as FedExP's authors evaluate theirs."""

    called = "last_two"

    def init(self, params: Params) -> tuple[Params, Params]:
        return params, params

    def update(self, memory: tuple[Params, Params], params: Params) -> tuple[Params, Params]:
        return memory[1], params

    def model(self, memory: tuple[Params, Params], params: Params) -> Params:
        return jax.tree.map(lambda a, b: (a + b) / 2, *memory)


AVERAGES = Slot(
    "average",
    Average,
    (ServerModel, Ema, LastTwo),
    "evaluate and keep an average of the server's models; by default last_two for fedexp, none for others",
)
