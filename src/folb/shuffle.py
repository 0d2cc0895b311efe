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


def shuffled(words: Array, epoch: Array | int, position: Array, size: Array | int) -> Array:
    """The element of 0 .. size-1 at `position` of pass `epoch`: over positions 0 .. size-1, a permutation.

    A random rotation, then the swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): each round pairs x with
    c - x (mod size) and swaps the two or not by one random bit of the pair, so each round, and all of them
    together, is one-to-one. `words` are two random 32-bit integers, the key; `size` is below 2^24.
    """
    size = jnp.asarray(size, jnp.uint32)
    x, epoch = jnp.broadcast_arrays(jnp.asarray(position, jnp.uint32), jnp.asarray(epoch, jnp.uint32))
    per_round = jnp.arange(1, ROUNDS + 2, dtype=jnp.uint32).reshape(-1, *(1,) * x.ndim)
    salt = _mix((words[0] + epoch * jnp.uint32(0x9E3779B9)) ^ (per_round * jnp.uint32(0x85EBCA6B)))
    # a random number below `size`, by a float product: many times faster here than the remainder
    fraction = (salt >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    c = jnp.minimum((fraction * size.astype(jnp.float32)).astype(jnp.uint32), size - 1)
    salt = salt * jnp.uint32(0xC2B2AE35) + words[1]
    x = x + c[ROUNDS]
    x = jnp.where(x >= size, x - size, x)

    def swap_or_not(x: Array, drawn: tuple[Array, Array]) -> tuple[Array, None]:
        c, salt = drawn
        partner = jnp.where(x <= c, c - x, c + size - x)
        bit = _mix(jnp.maximum(x, partner) ^ salt) >> 31
        return jnp.where(bit == 1, partner, x), None

    x, _ = jax.lax.scan(swap_or_not, x, (c[:ROUNDS], salt[:ROUNDS]), unroll=True)
    return x.astype(jnp.int32)


def _mix(h: Array) -> Array:
    """Scatter the bits of 32-bit integers upwards (multiply, xor-shift, multiply)."""
    h = h * jnp.uint32(0x7FEB352D)
    return (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
