"""Random permutations that are computed, not stored.

Sorting random keys is the most expensive step of a compiled round on a CPU, and each device would need room for the
order of the largest device's samples. Here the sample at position j of a shuffled pass is a keyed bijection of j, so
any batch of any pass takes a few integer operations, on jax arrays or, on a real device, NumPy's.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

ROUNDS = 16
UNROLL = 16  # rounds compiled as one turn of their loop: it is fastest with all of them


def shuffled(words: Any, epoch: Any, position: Any, size: Any) -> Any:
    """The element of 0 .. size-1 at `position` of pass `epoch`: a permutation of the positions 0 .. size-1.

    A random rotation, then the swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): each round pairs x with c - x (mod
    size), and one random bit of the pair says whether to swap the two. So each round is one-to-one, and so are all
    rounds together. `words` are two random 32-bit integers, the key; `size` is below 2^24.
    """
    xp: Any = words.__array_namespace__()
    size = xp.asarray(size, dtype=xp.uint32)
    x, epoch = xp.broadcast_arrays(xp.asarray(position, dtype=xp.uint32), xp.asarray(epoch, dtype=xp.uint32))
    per_round = xp.arange(1, ROUNDS + 2, dtype=xp.uint32).reshape(-1, *(1,) * x.ndim)
    salt = mixed((words[0] + epoch * xp.uint32(0x9E3779B9)) ^ (per_round * xp.uint32(0x85EBCA6B)))
    # a random number below `size`, by a float product: many times faster here than the remainder
    fraction = (salt >> 8).astype(xp.float32) * xp.float32(2**-24)
    c = xp.minimum((fraction * size.astype(xp.float32)).astype(xp.uint32), size - 1)
    salt = salt * xp.uint32(0xC2B2AE35) + words[1]
    x = x + c[ROUNDS]
    x = xp.where(x >= size, x - size, x)

    def swap_or_not(x: Any, drawn: tuple[Any, Any]) -> Any:
        c, salt = drawn
        partner = xp.where(x <= c, c - x, c + size - x)
        bit = mixed(xp.maximum(x, partner) ^ salt) >> 31
        return xp.where(bit == 1, partner, x)

    drawn = c[:ROUNDS], salt[:ROUNDS]
    if isinstance(x, np.ndarray):
        return functools.reduce(swap_or_not, zip(*drawn, strict=True), x).astype(xp.int32)
    import jax  # whose loop compiles fast

    return jax.lax.scan(lambda x, pair: (swap_or_not(x, pair), None), x, drawn, unroll=UNROLL)[0].astype(xp.int32)


def mixed_words(words: Any, n: int) -> Any:
    """n random 32-bit integers from two random words."""
    xp = words.__array_namespace__()
    return mixed(mixed(xp.arange(n, dtype=xp.uint32) ^ words[0]) ^ words[1])


def mixed(h: Any) -> Any:
    """Scatter the bits of 32-bit integers upwards (multiply, xor-shift, multiply)."""
    xp = h.__array_namespace__()
    h = h * xp.uint32(0x7FEB352D)
    return (h ^ (h >> 15)) * xp.uint32(0x846CA68B)
