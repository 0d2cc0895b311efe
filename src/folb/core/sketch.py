"""A sketch of a vector: a few numbers that keep its inner products with others, nearly.

The coordinates are shuffled, each gets a random sign, and equal parts of them are added up: s = R g, with one +1 or -1
in each column of R. So <R a, R b> is <a, b> on average, with a standard deviation of about
sqrt((||a||^2 ||b||^2 + <a, b>^2) / m) for m numbers. R is a function of two random words that the server and all
devices of a round share. It takes one pass over the vector, and the same function runs in jax and in NumPy.

With fewer than 32 bits a number is rounded to 2^bits levels; with one bit only its sign is kept. `scale` is then the
largest number, or the size that keeps the norm.
"""

from __future__ import annotations

import sys
from typing import Any

from folb.core.shuffle import mixed, shuffled
from folb.core.vector import namespace
from folb.typing import Params

BITS = (1, 2, 4, 8, 32)
MOST = 2**16  # numbers of a sketch


def flat(a: Params) -> Any:
    """All numbers of a tree, in one row; arrays by name in the order of their names."""
    jax = sys.modules.get("jax")
    parts = jax.tree.leaves(a) if jax is not None else [a[name] for name in sorted(a)]
    return namespace(parts[0]).concat([part.reshape(-1) for part in parts])


def sketched(a: Params, key: Any, m: int) -> Any:
    """R a: m numbers. `key` are the two random words of R."""
    row = flat(a)
    xp, d = namespace(row), row.shape[0]
    position = xp.arange(-(-d // m) * m)
    place = shuffled(key, 0, xp.minimum(position, d - 1), d)
    sign = xp.where((mixed(place.astype(xp.uint32) ^ key[1]) >> 31) == 1, xp.float32(1), xp.float32(-1))
    return xp.sum(xp.where(position < d, sign * row[place], xp.float32(0)).reshape(-1, m), axis=0)


def packed(s: Any, bits: int) -> Any:
    """A sketch as it is sent: m numbers or, with fewer than 32 bits, their levels in bytes and one scale."""
    if bits == 32:
        return s
    xp, each, top = namespace(s), 8 // bits, 2**bits - 1
    if bits == 1:
        scale, level = xp.sqrt(xp.sum(s * s) / s.shape[0]), (s > 0).astype(xp.uint32)
    else:
        scale = xp.max(xp.abs(s))
        unit = s / xp.where(scale > 0, scale, xp.float32(1))
        level = xp.round((unit + 1) * xp.float32(top / 2)).astype(xp.uint32)
    padded = xp.concat([level, xp.zeros(-s.shape[0] % each, dtype=xp.uint32)]).reshape(-1, each)
    shift = xp.arange(each, dtype=xp.uint32) * xp.uint32(bits)
    return {"codes": xp.sum(padded << shift, axis=1).astype(xp.uint8), "scale": scale.reshape(1)}


def unpacked(sent: Any, m: int, bits: int) -> Any:
    """The m numbers again, as far as their bits go."""
    if bits == 32:
        return sent
    codes, scale = sent["codes"], sent["scale"][0]
    xp, each, top = namespace(codes), 8 // bits, 2**bits - 1
    shift = xp.arange(each, dtype=xp.uint32) * xp.uint32(bits)
    level = ((codes.astype(xp.uint32)[:, None] >> shift) & xp.uint32(top)).reshape(-1)[:m]
    return scale * (level.astype(xp.float32) * xp.float32(2 / top) - 1)
