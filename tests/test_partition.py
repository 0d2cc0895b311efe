"""Partitioners: who gets what, and that it depends on the labels and the seed alone."""

import numpy as np
import pytest

from folb.data import partition
from folb.errors import InputError

LABELS = np.random.default_rng(0).integers(0, 10, 6000)

PARTITIONERS = {
    "classes_per_device": lambda y, seed: partition.classes_per_device(y, seed, devices=50),
    "power_law": lambda y, seed: partition.power_law(y, seed, devices=50),
    "lognormal": lambda y, seed: partition.lognormal(y, seed, devices=50),
    "dirichlet": lambda y, seed: partition.dirichlet(y, seed, devices=50, alpha=0.3),
    "dirichlet, capped": lambda y, seed: partition.dirichlet(y, seed, devices=50, alpha=0.3, capped=True),
    "iid": lambda y, seed: partition.iid(y, seed, devices=50),
    "shards": lambda y, seed: partition.shards(y, seed, devices=50),
    "random_classes": lambda y, seed: partition.random_classes(y, seed, devices=50),
}


def histogram(device, labels=LABELS):
    """Samples of each class on each device."""
    kept = device >= 0
    counts = np.zeros((device.max() + 1, labels.max() + 1), int)
    np.add.at(counts, (device[kept], labels[kept]), 1)
    return counts


@pytest.mark.parametrize("name", PARTITIONERS)
def test_every_device_has_samples_and_the_draw_is_the_seeds(name):
    make = PARTITIONERS[name]
    first = make(LABELS, 1)
    assert first.shape == LABELS.shape
    assert set(np.unique(first[first >= 0])) == set(range(50))
    assert np.array_equal(first, make(LABELS.copy(), 1))
    assert not np.array_equal(first, make(LABELS, 2))


@pytest.mark.parametrize("name", PARTITIONERS)
def test_bad_arguments(name):
    make = PARTITIONERS[name]
    with pytest.raises(InputError, match="seed"):
        make(LABELS, -1)
    with pytest.raises(InputError, match="labels"):
        make(LABELS.reshape(2, -1), 0)
    with pytest.raises(InputError, match="labels"):
        make(LABELS[:0], 0)
    with pytest.raises(InputError, match="devices"):
        make(np.arange(10), 0)  # 50 devices cannot share one sample of each class


def test_natural_numbers_the_ids_in_order_and_keeps_the_largest():
    ids = np.array(["b", "a", "c", "b", "c", "c", "d"])
    assert partition.natural(ids).tolist() == [1, 0, 2, 1, 2, 2, 3]
    assert partition.natural(ids, least=2).tolist() == [0, -1, 1, 0, 1, 1, -1]
    assert partition.natural(ids, devices=2).tolist() == [0, -1, 1, 0, 1, 1, -1]
    # of two as large, the first by id
    assert partition.natural(ids, devices=3).tolist() == [1, 0, 2, 1, 2, 2, -1]
    with pytest.raises(InputError, match=r"devices = 5: should be a whole number from 1 to 4"):
        partition.natural(ids, devices=5)
    with pytest.raises(InputError, match=r"least = 4: should be at most 3"):
        partition.natural(ids, least=4)


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
@pytest.mark.parametrize("shares", [partition.classes_per_device, partition.power_law])
def test_device_k_has_the_classes_from_k_on(shares, classes):
    counts = histogram(shares(LABELS, 3, devices=40, classes=classes))
    expected = np.zeros((40, 10), bool)
    for j in range(classes):
        expected[np.arange(40), (np.arange(40) + j) % 10] = True
    assert np.array_equal(counts > 0, expected)


def test_classes_are_shared_evenly_and_wholly():
    counts = histogram(partition.classes_per_device(LABELS, 0, devices=30, classes=2))
    assert np.array_equal(counts.sum(axis=0), np.bincount(LABELS))
    held = [column[column > 0] for column in counts.T]
    assert all(np.ptp(column) <= 1 for column in held)


def test_the_power_law_leaves_out_less_than_a_sample_per_device_and_class():
    counts = histogram(partition.power_law(LABELS, 0, devices=40, classes=2, least=5))
    assert counts[counts > 0].min() >= 5
    unused = np.bincount(LABELS) - counts.sum(axis=0)
    assert (unused >= 0).all() and (unused <= 8).all()  # 8 devices have each class
    flat = partition.power_law(LABELS, 0, devices=40, classes=2, sigma=0)
    assert counts.sum(axis=1).std() > 10 * histogram(flat).sum(axis=1).std()


def test_the_power_law_has_the_sizes_of_fedprox_s_recipe():
    """Its script, sizes alone: 1,000 devices, MNIST's class counts."""
    available = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])

    def script(seed):
        share = np.random.default_rng(seed).lognormal(0, 2.0, (10, 100, 2))
        share = (available - 1000)[:, None, None] * share / share.sum((1, 2), keepdims=True)
        return np.array([10 + sum(int(share[(k + j) % 10, k // 10, j]) for j in range(2)) for k in range(1000)])

    labels = np.repeat(np.arange(10), available)
    ours = [histogram(partition.power_law(labels, s, devices=1000), labels).sum(axis=1) for s in range(8)]
    theirs = [script(s) for s in range(8)]
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.001)
    # sizes are heavy-tailed: compare quantiles, not moments
    q = [0.1, 0.25, 0.5, 0.75, 0.9]
    assert np.quantile(ours, q) == pytest.approx(np.quantile(theirs, q), rel=0.12)


def test_lognormal_sizes_are_as_wanted_where_the_classes_suffice():
    labels = np.repeat(np.arange(10), 4000)
    counts = histogram(partition.lognormal(labels, 0, devices=200), labels)
    assert ((counts > 0).sum(axis=1) == 3).all()
    per_class = counts.max(axis=1)
    assert np.array_equal(counts.sum(axis=1), 3 * per_class)  # as many of each of its classes
    assert per_class.min() >= 2
    assert np.median(counts.sum(axis=1)) == pytest.approx(np.exp(4) + 5, rel=0.15)


def test_lognormal_shrinks_all_devices_of_a_class_that_is_too_small():
    labels = np.concatenate([np.repeat(np.arange(9), 4000), np.full(150, 9)])
    counts = histogram(partition.lognormal(labels, 0, devices=200), labels)
    assert counts[:, 9].sum() <= 150
    assert counts[counts > 0].min() >= 2
    assert ((counts > 0).sum(axis=1) == 3).all()


def test_dirichlet_deals_every_sample_and_alpha_sets_the_skew():
    largest = []
    for alpha in (0.05, 1.0, 100.0):
        counts = histogram(partition.dirichlet(LABELS, 0, devices=30, alpha=alpha))
        assert counts.sum() == len(LABELS)
        assert counts.sum(axis=1).min() >= 5
        largest.append((counts.max(axis=1) / counts.sum(axis=1)).mean())
    assert largest[0] > 0.6 > largest[1] > largest[2]
    assert largest[2] < 0.2


def test_dirichlet_fills_devices_that_drew_nothing_and_no_further():
    device = partition.dirichlet(LABELS, 0, devices=300, alpha=0.001, least=7)
    sizes = np.bincount(device, minlength=300)
    assert sizes.min() == 7
    assert (sizes == 7).sum() > 100
    assert sizes.sum() == len(LABELS)


def test_dirichlet_needs_enough_samples():
    with pytest.raises(InputError, match=r"devices = 1300: should be at most 1200"):
        partition.dirichlet(LABELS, 0, devices=1300, alpha=1.0)
    with pytest.raises(InputError, match="alpha"):
        partition.dirichlet(LABELS, 0, devices=3, alpha=0.0)


def test_a_capped_dirichlet_closes_a_device_that_has_its_even_share():
    labels = np.repeat(np.arange(10), 600)
    for seed in range(5):
        counts = histogram(partition.dirichlet(labels, seed, devices=10, alpha=0.5, capped=True), labels)
        assert counts.sum() == 6000
        before = np.cumsum(counts, axis=1) - counts
        filled = np.where(before >= 600, counts, 0).sum()
        assert filled < 10  # but for those moved to a device that had too few
    loose = histogram(partition.dirichlet(labels, 0, devices=10, alpha=0.5), labels)
    assert counts.sum(axis=1).std() < loose.sum(axis=1).std()
    closed = partition.dirichlet(labels, 0, devices=10, alpha=1e-5, capped=True)  # shares that all vanish
    assert (np.bincount(closed) >= 5).all()


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_are_runs_of_the_sorted_samples_dealt_whole(shards):
    device = partition.shards(LABELS, 3, devices=50, shards=shards)
    in_order = device[np.argsort(LABELS, kind="stable")].reshape(50 * shards, -1)
    assert (in_order == in_order[:, :1]).all()
    assert (np.bincount(in_order[:, 0]) == shards).all()
    classes = (histogram(device) > 0).sum(axis=1)
    assert classes.max() <= 2 * shards
    if shards == 2:
        assert 1.5 < classes.mean() < 2.5  # McMahan et al.: most have two


def test_shards_of_samples_that_do_not_divide_evenly():
    sizes = np.bincount(partition.shards(LABELS[:5990], 0, devices=7, shards=3))
    assert sizes.sum() == 5990 and np.ptp(sizes) <= 3
    with pytest.raises(InputError, match=r"shards = 0: should be a whole number from 1 to 857"):
        partition.shards(LABELS, 0, devices=7, shards=0)
    with pytest.raises(InputError, match="shards = 900"):
        partition.shards(LABELS, 0, devices=7, shards=900)


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_random_classes_have_each_device_s_own_and_others_at_random(classes):
    counts = histogram(partition.random_classes(LABELS, 0, devices=20, classes=classes))
    assert (counts[np.arange(20), np.arange(20) % 10] > 0).all()
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert np.array_equal(counts.sum(axis=0), np.bincount(LABELS))
    assert all(np.ptp(column[column > 0]) <= 1 for column in counts.T)


def test_the_other_class_is_any_of_the_others():
    second = np.zeros(10, int)
    for seed in range(60):
        counts = histogram(partition.random_classes(LABELS, seed, devices=10))
        second[np.flatnonzero(counts[0])[-1]] += 1
    assert second[0] == 0 and (second[1:] > 0).all()


def test_random_classes_leave_out_what_nobody_drew():
    device = partition.random_classes(LABELS, 0, devices=3, classes=1)
    assert set(LABELS[device >= 0]) == {0, 1, 2} and (device[LABELS > 2] == -1).all()
    with pytest.raises(InputError, match="classes = 11"):
        partition.random_classes(LABELS, 0, devices=3, classes=11)


def test_iid_sizes_are_even_and_labels_independent_of_devices():
    chi_squares = []
    for seed in range(40):
        counts = histogram(partition.iid(LABELS, seed, devices=7))
        assert np.ptp(counts.sum(axis=1)) <= 1
        expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / len(LABELS)
        chi_squares.append(((counts - expected) ** 2 / expected).sum())
    # 54 degrees of freedom: the mean of 40 has an sd of 1.6
    assert np.mean(chi_squares) == pytest.approx(54, abs=6)


def test_more_classes_than_there_are():
    with pytest.raises(InputError, match=r"classes = 11: should be between 1 and the 10"):
        partition.power_law(LABELS, 0, devices=3, classes=11)


def test_labels_need_not_be_numbers():
    names = np.array(["ant", "bee", "cat"])[np.arange(90) % 3]
    device = partition.power_law(names, 0, devices=6, classes=1)
    assert all(set(names[device == k]) == {("ant", "bee", "cat")[k % 3]} for k in range(6))
