"""All randomness of a run: a pure function of (seed, round, device).

One call of a block cipher, Threefry with the key (seed, round), serves any number of devices at once; chains of derived
keys would take several times as long to compile. Anyone who knows the seed can replay any round of any device, in the
simulator or on the device itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from folb.core.shuffle import shuffled

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


def key_of(words: Any) -> Any:
    """Two random words as a key of `jax.random`."""
    return jax.random.wrap_key_data(words, impl="threefry2x32")


class Multiset(NamedTuple):
    """K slots: distinct devices in ascending order, each with its multiplicity; repeats have times 0."""

    device: Array
    times: Array


def proportional(importance: Array) -> Array:
    """Chances in proportion to an importance of at least 0; equal ones if all are 0."""
    total = jnp.sum(importance)
    return jnp.where(total > 0, importance / jnp.where(total > 0, total, 1.0), 1.0 / importance.size)


def draw(u: Array, P: Array, K: int, replacement: bool) -> Multiset:
    """K devices from the distribution P [N], by K numbers `u` between 0 and 1, or N of them without replacement."""
    return multiset(chosen(u, P, K, replacement))


def chosen(u: Array, P: Array, K: int, replacement: bool) -> Array:
    """The K devices that `draw` draws, in the order of their draws."""
    if replacement:
        total = jnp.cumsum(P)
        return jnp.minimum(jnp.searchsorted(total, u * total[-1], side="right"), len(P) - 1)
    # the K largest of log P + Gumbel noise are a draw without replacement from P
    return jax.lax.top_k(jnp.log(P) - jnp.log(-jnp.log(u)), K)[1]


def draw_uniform(words: Array, N: int, K: int, replacement: bool) -> Multiset:
    """K of N devices with equal chances, by K words or, without replacement, two: the key of a permutation."""
    if replacement:
        return multiset(below(N, words))
    return multiset(shuffled(words, 0, jnp.arange(K), N))


def draw_by_samples(words: Array, start: Array, samples: Array | int) -> Multiset:
    """Devices in proportion to their samples, with replacement: owners of random rows. Device k's begin at start[k]."""
    return multiset(jnp.searchsorted(start, below(samples, words), side="right") - 1)


def another_uniform(word: Array, others: Array, N: int) -> Array:
    """One of N devices with equal chances, not among the distinct `others`, of which N or more stands for none."""
    place = below(N - jnp.sum(others < N), word)  # among the devices that are left
    before = jnp.sort(others) - jnp.arange(len(others))  # how many of these precede each of the others
    return (place + jnp.sum(before <= place)).astype(jnp.int32)


def another_by_samples(word: Array, others: Array, start: Array, size: Array) -> Array:
    """One device in proportion to its samples, not among `others`: the owner of a random row of the rest."""
    N = len(size)
    others = jnp.sort(others)
    theirs = jnp.where(others < N, size[jnp.minimum(others, N - 1)], 0)
    first = start[jnp.minimum(others, N - 1)]
    place = below(start[-1] + size[-1] - jnp.sum(theirs), word)  # among the rows that are left
    before = first - (jnp.cumsum(theirs) - theirs)  # how many of these precede each of the others' rows
    row = place + jnp.sum(jnp.where(before <= place, theirs, 0))
    return (jnp.searchsorted(start, row, side="right") - 1).astype(jnp.int32)


def multiset(devices: Array) -> Multiset:
    device = jnp.sort(devices.astype(jnp.int32))
    fresh = jnp.concatenate([jnp.array([True]), device[1:] != device[:-1]])
    times = jnp.where(fresh, jnp.sum(device[:, None] == device[None, :], axis=1), 0)
    return Multiset(device, times.astype(jnp.float32))
