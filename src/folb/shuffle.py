"""Random permutations that are computed, not stored.

Sorting random keys is the costliest thing a compiled round can do on a CPU, and the order of a device's
samples would have to be kept for its largest possible size. Here the sample at position j of a shuffled pass
is a keyed bijection of j, so any batch of any pass is a few integer operations away.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

ROUNDS = 16


def shuffled(key: Array, epoch: Array | int, position: Array, size: Array | int) -> Array:
    """The element of 0 .. size-1 at `position` of pass `epoch`: over positions 0 .. size-1, a permutation.

    The swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): each round pairs x with c - x (mod size) and swaps
    the two or not by one random bit of the pair, so each round, and all of them together, is one-to-one.
    """
    size = jnp.asarray(size, jnp.uint32)
    x, epoch = jnp.broadcast_arrays(jnp.asarray(position, jnp.uint32), jnp.asarray(epoch, jnp.uint32))
    words = jax.random.bits(key, (2,), jnp.uint32)
    per_round = jnp.arange(1, ROUNDS + 1, dtype=jnp.uint32).reshape(-1, *(1,) * x.ndim)
    salt = _mix((words[0] + epoch * jnp.uint32(0x9E3779B9)) ^ (per_round * jnp.uint32(0x85EBCA6B)))
    c = salt % size
    salt = salt * jnp.uint32(0xC2B2AE35) + words[1]
    for r in range(ROUNDS):
        partner = jnp.where(x <= c[r], c[r] - x, c[r] + size - x)
        bit = _mix(jnp.maximum(x, partner) ^ salt[r]) & 1
        x = jnp.where(bit == 1, partner, x)
    return x.astype(jnp.int32)


def _mix(h: Array) -> Array:
    """Scatter the bits of 32-bit integers (multiply and xor-shift, twice)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
