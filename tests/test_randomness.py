"""The words all randomness is made of: a pure function of (seed, round, device), and uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import random_numbers
from scipy.stats import chi2

from folb.core.randomness import HOME, SERVER, below, uniform, words


def test_a_device_s_words_do_not_depend_on_who_else_is_asked():
    """Nor on how many words are asked for, nor on compilation."""
    many = np.asarray(words(7, 3, jnp.arange(10), 6))
    assert many.shape == (10, 6)
    assert np.array_equal(words(7, 3, 4, 6), many[4])
    assert np.array_equal(words(7, 3, jnp.array([[4, 9], [4, 0]]), 3), many[np.array([[4, 9], [4, 0]]), :3])
    assert np.array_equal(jax.jit(words, static_argnums=3)(7, 3, jnp.arange(10), 6), many)


def test_seeds_rounds_and_devices_all_differ():
    """Of 39,600 words, two or three may agree by chance (0.18 pairs are to be expected), and no more."""
    who = np.array([*range(49), SERVER], np.uint32)
    drawn = [random_numbers.words(seed, t, who, 4) for seed in (0, 1, 2**32 - 1) for t in (HOME, *range(1, 66))]
    assert len(np.unique(drawn)) >= np.size(drawn) - 2


def test_uniform_numbers_lie_strictly_between_0_and_1():
    ends = np.asarray(uniform(jnp.array([0, 2**32 - 1], jnp.uint32)))
    assert 0 < ends[0] < 1e-7
    assert 1 - 1e-7 < ends[1] < 1


def test_uniform_numbers_are_uniform_and_unrelated():
    """Over devices, over rounds and over the words of one device; chi-square under its 1 - 1e-4 quantile."""
    devices = random_numbers.uniform(1, 1, np.arange(5000), 2)
    rounds = np.asarray(jax.jit(jax.vmap(lambda t: uniform(words(1, t, 0, 2))))(jnp.arange(1, 5001)))
    for u in (devices, rounds):
        for sample in (u[:, 0], u[:, 1]):
            counts = np.bincount((sample * 50).astype(int), minlength=50)
            assert np.sum((counts - 100) ** 2 / 100) < chi2.ppf(1 - 1e-4, 49)
        # a correlation of 5,000 unrelated pairs has a standard deviation of 0.014
        assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.06
        assert abs(np.corrcoef(u[1:, 0], u[:-1, 0])[0, 1]) < 0.06


def test_whole_numbers_below_n_use_all_bits_of_a_word():
    drawn = np.concatenate([random_numbers.words(3, 1, np.arange(2000), 2).ravel(), [0, 1, 2**31, 2**32 - 1]])
    for n in (1, 2, 30, 65535, 65536, 65537, 20_000_001, 2**31 - 1):
        exact = [int(word) * n >> 32 for word in drawn]
        assert np.asarray(jax.jit(below)(np.uint32(n), drawn.astype(np.uint32))).tolist() == exact
