"""A sketch of a vector: a few numbers that nearly keep its inner products with others.

The coordinates are shuffled, each gets a random sign, and equal parts of them are added up: s = R g, with one +1 or -1
in each column of R. So <R a, R b> is <a, b> on average, with a standard deviation of about
sqrt((||a||^2 ||b||^2 + <a, b>^2) / m) for m numbers. R is a function of two random words that the server and all
devices of a round share. With fewer than 32 bits a number is rounded to 2^bits levels, and `scale` is the largest; with
one bit only its sign is kept, and `scale` keeps the norm.
"""

from __future__ import annotations

from typing import Any

from folb.core.shuffle import mixed, shuffled
from folb.core.vector import flat, in_rows, namespace, over_largest
from folb.typing import Params

BITS = (1, 2, 4, 8, 32)
MOST = 2**16  # numbers of a sketch


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
    xp, top = namespace(s), 2**bits - 1
    if bits == 1:
        scale, level = xp.sqrt(xp.sum(s * s) / s.shape[0]), (s > 0).astype(xp.uint32)
    else:
        scale = xp.max(xp.abs(s))
        level = xp.round((over_largest(s, scale) + 1) * xp.float32(top / 2)).astype(xp.uint32)
    return {"codes": to_bytes(level, bits), "scale": scale.reshape(1)}


def to_bytes(level: Any, bits: int) -> Any:
    """Whole numbers of so many bits, in as few bytes as hold them."""
    xp, each = namespace(level), 8 // bits
    shift = xp.arange(each, dtype=xp.uint32) * xp.uint32(bits)
    return xp.sum(in_rows(level, each) << shift, axis=1).astype(xp.uint8)


def from_bytes(codes: Any, bits: int, m: int) -> Any:
    """The m whole numbers, from their bytes."""
    xp = namespace(codes)
    shift = xp.arange(8 // bits, dtype=xp.uint32) * xp.uint32(bits)
    return ((codes.astype(xp.uint32)[:, None] >> shift) & xp.uint32(2**bits - 1)).reshape(-1)[:m]


def unpacked(sent: Any, m: int, bits: int) -> Any:
    """The m numbers of a sketch, as exact as their bits allow."""
    if bits == 32:
        return sent
    codes, scale = sent["codes"], sent["scale"][0]
    xp, top = namespace(codes), 2**bits - 1
    return scale * (from_bytes(codes, bits, m).astype(xp.float32) * xp.float32(2 / top) - 1)
