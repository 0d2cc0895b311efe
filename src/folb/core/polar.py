"""Stacks of vectors as norms and directions, at any scale that 32 bits can hold."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.rules import fraction
from folb.core.tree import over
from folb.core.tree import scaled as scaled
from folb.core.vector import over_largest
from folb.typing import Params

SMALLEST = 1e-30  # a vector without a larger entry counts as 0


class Polar(NamedTuple):
    """The entries of a stack as norms and directions."""

    norm: Array  # not finite if a value of the entry is not, or if the norm overflows
    direction: Params  # 0 for an entry that has none


def polar(stack: Params, wanted: Array) -> Polar:
    """Each entry is divided by its largest value before it is squared: the square of 1e20 overflows 32 bits."""
    finite = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim))), stack)
    fine = wanted & jax.tree.reduce(jnp.logical_and, finite)
    used = jax.tree.map(lambda leaf: jnp.where(over(fine, leaf), leaf, 0), stack)
    parts = jax.tree.map(lambda leaf: jnp.max(jnp.abs(leaf), axis=tuple(range(1, leaf.ndim)), initial=0.0), used)
    largest = jax.tree.reduce(jnp.maximum, parts)
    some = largest > SMALLEST
    small = jax.tree.map(lambda leaf: jnp.where(over(some, leaf), over_largest(leaf, over(largest, leaf)), 0), used)
    norms = tree.norms(small)
    direction = scaled(small, fraction(jnp.ones_like(norms), norms))
    return Polar(jnp.where(wanted & ~fine, jnp.inf, largest * norms), direction)


def clipped(stack: Params, norm: Array, counted: Array, most: Array | float) -> Params:
    """Each entry shortened to the norm `most`; an entry that does not count is 0."""
    return scaled(stack, jnp.where(counted, jnp.minimum(1.0, fraction(jnp.asarray(most), norm)), 0.0))


def median(values: Array, counted: Array) -> Array:
    """The median of the counted values, each device once. Of two, the smaller: a liar could raise their mean."""
    ordered = jnp.sort(jnp.where(counted, values, jnp.inf))
    n = jnp.sum(counted)
    return jnp.where(n > 0, ordered[jnp.maximum(n - 1, 0) // 2], 0.0)
