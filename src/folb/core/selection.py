"""Which devices a round asks: a multiset of K drawn from P_k^t (Algorithm 1), or a set without replacement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.randomness import below
from folb.core.shuffle import shuffled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """How devices are drawn.

    `sampling` names the distribution P_k^t: "uniform", "samples" (n_k / n), "direct" (7) or "norm", the last
    two from a survey of all N devices at the start of the round.
    """

    K: int = field(metadata={"static": True})
    replacement: bool = field(metadata={"static": True})
    sampling: str = field(metadata={"static": True})

    @property
    def survey(self) -> bool:
        """Whether all N devices are asked before the draw."""
        return self.sampling in ("direct", "norm")


class Multiset(NamedTuple):
    """K slots: distinct devices in ascending order, each with its multiplicity; repeats have times 0."""

    device: Array
    times: Array


def lb_near_optimal(inner: Array) -> Array:
    """(7): P_k proportional to |<grad f, grad F_k>|, and uniform where all vanish."""
    return _proportional(jnp.abs(inner))


def norm_proxy(norms: Array) -> Array:
    """P_k proportional to ||grad F_k||, the Cauchy-Schwarz stand-in for (7) of Sec. III-D."""
    return _proportional(norms)


def lb_near_optimal_hetero(inner: Array, gamma: Array, psi: Array | float, squared_norm: Array) -> Array:
    """(16): P_k proportional to |I_k|, I_k = <grad f, grad F_k> - psi gamma_k ||grad f||^2."""
    return _proportional(jnp.abs(inner - psi * gamma * squared_norm))


def _proportional(importance: Array) -> Array:
    total = jnp.sum(importance)
    return jnp.where(total > 0, importance / jnp.where(total > 0, total, 1.0), 1.0 / importance.size)


def draw(u: Array, P: Array, K: int, replacement: bool) -> Multiset:
    """K devices from the distribution P [N]: independently, or one after another without replacement.

    `u` are random numbers between 0 and 1: K of them, or N without replacement.
    """
    if replacement:
        total = jnp.cumsum(P)
        chosen = jnp.minimum(jnp.searchsorted(total, u * total[-1], side="right"), len(P) - 1)
    else:
        # the K largest of log P + Gumbel noise are a draw without replacement from P
        _, chosen = jax.lax.top_k(jnp.log(P) - jnp.log(-jnp.log(u)), K)
    return _multiset(chosen)


def draw_uniform(words: Array, N: int, K: int, replacement: bool) -> Multiset:
    """K of N devices, all alike, at a cost that does not grow with N.

    `words` are random: K of them, or without replacement two, the key of a permutation whose first K are taken.
    """
    if replacement:
        return _multiset(below(N, words))
    return _multiset(shuffled(words, 0, jnp.arange(K), N))


def draw_by_samples(words: Array, start: Array, samples: Array | int) -> Multiset:
    """Devices in proportion to their samples, with replacement: the owners of random rows, device k's from start[k]."""
    return _multiset(jnp.searchsorted(start, below(samples, words), side="right") - 1)


def _multiset(chosen: Array) -> Multiset:
    device = jnp.sort(chosen.astype(jnp.int32))
    fresh = jnp.concatenate([jnp.array([True]), device[1:] != device[:-1]])
    times = jnp.where(fresh, jnp.sum(device[:, None] == device[None, :], axis=1), 0)
    return Multiset(device, times.astype(jnp.float32))
