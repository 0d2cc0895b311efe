"""The computed shuffle: one-to-one for every size, fresh for every key and pass, and near enough to uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from folb import algorithms, data, models, simulate
from folb.core import shuffle
from folb.core.shuffle import shuffled
from folb.simulation import solve


def words(seed, *number):
    return jax.random.bits(jax.random.key(seed), (*number, 2), jnp.uint32)


@jax.jit
def _orders(many_words, epochs, size):
    return jax.vmap(lambda w, epoch: shuffled(w, epoch, jnp.arange(64), size))(many_words, epochs)


def orders(many_words, epochs, size):
    """Many passes over at most 64 elements; one compilation serves every size."""
    return np.asarray(_orders(many_words, epochs, size))[:, :size]


@jax.jit
def _whole(key, epoch, size):
    return shuffled(key, epoch, jnp.arange(4097), size)


def whole(key, epoch, size):
    return np.asarray(_whole(key, epoch, size))[:size]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10, 127, 128, 129, 1000, 4097])
def test_each_pass_is_a_permutation(size):
    for seed in range(3):
        for epoch in (0, 1, 1000):
            assert sorted(whole(words(seed), epoch, size)) == list(range(size))


def test_a_million_positions_are_a_permutation():
    order = np.asarray(jax.jit(shuffled)(words(0), 3, jnp.arange(10**6), 10**6))
    assert np.array_equal(np.sort(order), np.arange(10**6))
    # no trace of the order it came from: the expected |r| is 0.001
    assert abs(np.corrcoef(order, np.arange(10**6))[0, 1]) < 0.005


def test_small_sizes_reach_every_order():
    """All 6 orders of 3 and all 24 of 4 turn up, each near its share."""
    keys = words(1, 4800)
    for size, number in ((3, 6), (4, 24)):
        _, counts = np.unique(orders(keys, jnp.zeros(4800, int), size), axis=0, return_counts=True)
        assert len(counts) == number
        assert np.sum((counts - 4800 / number) ** 2 / (4800 / number)) < chi2.ppf(1 - 1e-4, number - 1)


def test_keys_and_passes_differ():
    key = words(0)
    passes = [whole(words(seed), 0, 100) for seed in range(20)] + [whole(key, e, 100) for e in range(1, 20)]
    assert len({tuple(order) for order in passes}) == len(passes)
    # two unrelated orders of 100 agree in one place on average; 10 or more has a chance of 1e-7
    agreements = [np.sum(a == b) for i, a in enumerate(passes) for b in passes[:i]]
    assert max(agreements) < 10
    assert 0.7 < np.mean(agreements) < 1.3


@pytest.mark.parametrize("size", [2, 3, 7, 10, 33])
@pytest.mark.parametrize("over", ["keys", "epochs"])
def test_marginals_are_near_uniform(size, over):
    """Where element i lands, over 4,800 shuffles: chi-square of the size x size table under its 1 - 1e-4 quantile."""
    keys, epochs = words(2, 4800), jnp.zeros(4800, int)
    if over == "epochs":
        keys, epochs = jnp.broadcast_to(keys[0], keys.shape), jnp.arange(4800)
    drawn = orders(keys, epochs, size)
    table = np.stack([np.bincount(drawn[:, j], minlength=size) for j in range(size)])
    expected = 4800 / size
    assert np.sum((table - expected) ** 2 / expected) < chi2.ppf(1 - 1e-4, (size - 1) ** 2)


def test_a_batch_is_a_slice_of_the_pass():
    """Any positions can be asked for, in any shape, from several passes at once."""
    key = words(5)
    positions, epochs = jnp.array([[3, 11], [0, 3]]), jnp.array([[0, 0], [1, 1]])
    asked = np.asarray(jax.jit(shuffled)(key, epochs, positions, 12))
    first, second = whole(key, 0, 12), whole(key, 1, 12)
    assert asked.tolist() == [[first[3], first[11]], [second[0], second[3]]]


def test_how_many_turns_are_compiled_as_one_changes_no_bit(usual_loops, monkeypatch):
    """The tests have shorter loops than a user: conftest.py."""
    federation = data.load("synthetic_1_1", sizes=[20, 35, 50])

    def played():
        model = models.logistic(federation.shape, federation.classes)  # of its own: it is traced again
        [run] = simulate(federation, model, [algorithms.folb(select={"K": 2})], rounds=3)
        return run

    assert solve.UNROLL > 2 and shuffle.UNROLL > 1
    usual = played()
    monkeypatch.setattr(solve, "UNROLL", 2)
    monkeypatch.setattr(shuffle, "UNROLL", 1)
    short = played()
    assert all(np.array_equal(usual.params[name], value) for name, value in short.params.items())
    assert np.array_equal(usual.train_loss, short.train_loss) and np.ptp(short.train_loss) > 0
