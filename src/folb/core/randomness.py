"""All randomness of a run: a pure function of (seed, round, device).

One call of a block cipher, Threefry with the key (seed, round), serves any number of devices at once; chains of derived
keys would take several times as long to compile. Anyone who knows the seed can replay any round of any device, in the
simulator or on the device itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

SERVER = 0xFFFFFFFF  # in place of a device's number: the server's own draws
CANDIDATES = 0xFFFFFFFE  # the server's draw of candidates
ROUND = 0xFFFFFFFD  # words that all devices of a round share
NOISE = 0xFFFFFFFC  # the noise that the server adds, if the run is private
HOME = 0  # in place of a round: for what a device keeps in all rounds; rounds begin with 1


def words(seed: Array | int, t: Array | int, who: Array | int, n: int) -> Array:
    """n random 32-bit words for each entry of `who`: [*who.shape, n]."""
    key = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.asarray(t, jnp.uint32)])
    pairs = -(-n // 2)
    left = jnp.broadcast_to(jnp.asarray(who, jnp.uint32)[..., None], (*jnp.shape(who), pairs))
    right = jnp.broadcast_to(jnp.arange(pairs, dtype=jnp.uint32), left.shape)
    both = threefry_2x32(key, jnp.stack([left, right]))
    return jnp.moveaxis(both, 0, -1).reshape(*jnp.shape(who), 2 * pairs)[..., :n]


def below(n: Array | int, words: Array) -> Array:
    """Random words as whole numbers from 0 to n - 1, n < 2^31: floor(word n / 2^32), in halves of 16 bits.

    All bits of a word count: a number between 0 and 1 has 23 bits, too few to reach each of ten million rows.
    """
    n = jnp.asarray(n, jnp.uint32)
    low, high = words & 0xFFFF, words >> 16
    inner = high * (n & 0xFFFF) + (low * (n & 0xFFFF) >> 16)
    outer = low * (n >> 16) + (inner & 0xFFFF)
    return (high * (n >> 16) + (inner >> 16) + (outer >> 16)).astype(jnp.int32)


def uniform(words: Array) -> Array:
    """Random words as numbers strictly between 0 and 1."""
    return ((words >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
