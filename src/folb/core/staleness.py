"""Rounds that do not wait: how many devices work at any time, and how much an old reply counts.

With a `concurrency` of M, M devices are at work at any time, each from the model that was the server's when it
started. As soon as one is done, another one starts. Every K replies the server takes a step. The staleness tau of a
reply is the number of steps that the server took since its device started. Its update counts s(tau) times.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import Part, Slot, at_least, setting
from folb.core.rules import Round


class Staleness(Part):
    """s(tau): how much an update counts after tau steps of the server. One of your own has `weigh`."""

    needed = ("weigh",)

    def weigh(self, tau: Any) -> Any:
        """s(tau) of each reply."""


class Constant(Staleness):
    """s(tau) = 1: an old reply counts like a new one."""

    def weigh(self, tau: Array) -> Array:
        return jnp.ones_like(tau)


class Polynomial(Staleness):
    """s(tau) = (1 + tau)^-power. FedBuff (Nguyen et al., 2022) has a power of 1/2."""

    power: float = setting("a of (1 + tau)^-a", at_least(0), default=0.5)

    def weigh(self, tau: Array) -> Array:
        return (1 + tau) ** -self.power


class Hinge(Staleness):
    """s(tau) = 1 up to the bound, and 1 / (1 + slope (tau - bound)) beyond."""

    slope: float = setting("a of 1 / (1 + a (tau - b))", at_least(0), default=10.0)
    bound: float = setting("b: s(tau) is 1 up to it", at_least(0), default=4.0)

    def weigh(self, tau: Array) -> Array:
        return 1 / (1 + self.slope * jnp.maximum(tau - self.bound, 0.0))


STALENESS = Slot(
    "staleness",
    Staleness,
    (Constant, Polynomial, Hinge),
    "with concurrency: s(tau), how much an update counts after tau steps of the server; by default polynomial",
)


class Asynchrony(Part):
    """M devices at work; s(tau); and whether a device's model is mixed in, as FedAsync does, or its update added."""

    concurrency: int = field(metadata={"static": True})
    staleness: Staleness
    mixing: bool = field(default=False, metadata={"static": True})

    def weights(self, staleness: Array) -> Array:
        """s(tau) of each reply."""
        tau = staleness.astype(jnp.float32)
        counts = self.staleness.weigh(tau)
        tree.check_like("staleness: what it returns", counts, tau)
        return counts

    def seen(self, round: Round, most: float = math.inf) -> Round:
        """The round as the rule and the server step see it: with s(tau_k) Delta_k in place of Delta_k.

        s is from 0 to `most`, if there is one. With `mixing`, Delta_k is first replaced by the device's model less the
        server's present one: so a step of size alpha ends at (1 - alpha s) w + alpha s w_k.
        """
        delta = round.delta
        if self.mixing:
            delta = jax.tree.map(lambda d, start, w: d + (start - w), delta, round.starts, round.params)
        s = self.weights(round.staleness)
        s = s if math.isinf(most) else jnp.clip(s, 0.0, most)
        return round._replace(delta=jax.vmap(lambda d, s: jax.tree.map(lambda v: s * v, d))(delta, s))
