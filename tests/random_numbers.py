"""A run's random numbers, for tests that draw by hand: one program, where every operation would be one by itself."""

import functools

import jax
import numpy as np

from folb.core import randomness


@functools.partial(jax.jit, static_argnames="n")
def _words(seed, t, who, n):
    drawn = randomness.words(seed, t, who, n)
    return drawn, randomness.uniform(drawn)


def _of(seed, t, who, n):
    return jax.tree.map(np.asarray, _words(*(np.asarray(value, np.uint32) for value in (seed, t, who)), n))


def words(seed, t, who, n):
    """`randomness.words`, as numpy's array."""
    return _of(seed, t, who, n)[0]


def uniform(seed, t, who, n):
    """The same as numbers between 0 and 1."""
    return _of(seed, t, who, n)[1]
