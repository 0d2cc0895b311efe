"""Partitioners: which device each sample goes to, as a pure function of the labels and a seed.

All return an array of device numbers 0 .. devices-1, one per sample; -1 marks a sample that no device has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from folb.errors import check, check_whole
from folb.typing import NDArray

Name = Literal["power_law", "classes", "dirichlet", "iid", "shards", "random_classes"]


def natural(ids: NDArray, *, devices: int | None = None, least: int = 1) -> NDArray:
    """A device for each id (a writer, a role, a user) with at least `least` samples, in the order of the ids.

    `devices` keeps only that many, those with the most samples.
    """
    ids = _one_dimensional("ids", ids)
    check("least", least, least >= 1, "should be at least 1")
    _, owner, size = np.unique(ids, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(size >= least)
    if devices is not None:
        check_whole("devices", devices, 1, len(kept))
        kept = np.sort(kept[np.argsort(-size[kept], kind="stable")[:devices]])
    check("least", least, len(kept), f"should be at most {size.max(initial=0)}, the most samples of any id")
    number = np.full(len(size), -1)
    number[kept] = np.arange(len(kept))
    return number[owner]


def classes_per_device(labels: NDArray, seed: int, *, devices: int, classes: int = 2) -> NDArray:
    """Device k has the classes k, k+1, …, k+`classes`-1 (mod C); a class is shared out evenly."""
    return _deal(labels, seed, devices, classes, 1, _even)


def random_classes(labels: NDArray, seed: int, *, devices: int, classes: int = 2) -> NDArray:
    """Device k has the class k (mod C) and `classes` - 1 others at random; a class is shared out evenly.

    The label skew of NIID-Bench (Li et al., 2022). A class that no device drew is left out.
    """

    def steps(rng: np.random.Generator, C: int) -> NDArray:
        others = np.argsort(rng.random((devices, C - 1)), axis=1)[:, : classes - 1] + 1
        return np.pad(others, ((0, 0), (1, 0)))

    return _deal(labels, seed, devices, classes, 1, _even, steps)


def shards(labels: NDArray, seed: int, *, devices: int, shards: int = 2) -> NDArray:
    """All samples, sorted by class and cut into shards of equal size, `shards` at random for each device.

    McMahan et al.'s recipe for MNIST: with two shards most devices have samples of two classes.
    """
    labels = _labels(labels, seed, devices)
    check_whole("shards", shards, 1, len(labels) // devices)
    owner = np.random.default_rng([seed, 6]).permutation(np.repeat(np.arange(devices), shards))
    size = np.bincount(np.arange(len(labels)) * len(owner) // len(labels), minlength=len(owner))
    device = np.full(len(labels), -1)
    device[np.argsort(labels, kind="stable")] = np.repeat(owner, size)
    return device


def power_law(
    labels: NDArray, seed: int, *, devices: int, classes: int = 2, least: int = 5, sigma: float = 2.0
) -> NDArray:
    """FedProx's recipe for MNIST: classes as in `classes_per_device`, `least` samples of each to begin with.

    The rest of a class goes to its devices in proportion to lognormal(0, `sigma`) draws, rounded down.
    """
    check("sigma", sigma, 0 <= sigma < np.inf, "should be a finite number of at least 0")

    def proportional(rng: np.random.Generator, owners: NDArray, n: int) -> NDArray:
        share = rng.lognormal(0, sigma, len(owners))
        return least + np.floor((n - least * len(owners)) * (share / share.sum())).astype(int)

    return _deal(labels, seed, devices, classes, least, proportional)


def lognormal(
    labels: NDArray, seed: int, *, devices: int, classes: int = 3, mean: float = 4.0, sigma: float = 1.0, more: int = 5
) -> NDArray:
    """FedProx's recipe for FEMNIST: classes as in `classes_per_device`, lognormal(`mean`, `sigma`) + `more` samples.

    A device has the same number of samples of each of its classes, at least 2. In FedProx's script an inverted test
    starts every device at the first image of a class. Here no two devices share a sample; if a class is too small for
    its devices, all of them get less in proportion.
    """
    check("mean", mean, np.isfinite(mean), "should be a finite number")
    check("sigma", sigma, 0 <= sigma < np.inf, "should be a finite number of at least 0")
    check("more", more, more >= 0, "should be at least 0")
    labels = _labels(labels, seed, devices)
    size = np.random.default_rng([seed, 5]).lognormal(mean, sigma, devices) + more
    wanted = np.maximum(size / max(classes, 1), 2).astype(int)

    def up_to_wanted(rng: np.random.Generator, owners: NDArray, n: int) -> NDArray:
        beyond, spare = wanted[owners] - 2, n - 2 * len(owners)
        return 2 + (beyond if beyond.sum() <= spare else np.floor(beyond * (spare / beyond.sum())).astype(int))

    return _deal(labels, seed, devices, classes, 2, up_to_wanted)


def dirichlet(
    labels: NDArray, seed: int, *, devices: int, alpha: float, least: int = 5, capped: bool = False
) -> NDArray:
    """Each class is shared out by a draw from Dirichlet(alpha) over the devices (Yurochkin et al., 2019).

    A device left with fewer than `least` samples is filled up from the largest, so that none is empty. If `capped`, a
    device that has its even share of all samples gets none of the classes that follow, as in NIID-Bench.
    """
    labels = _labels(labels, seed, devices)
    check("alpha", alpha, 0 < alpha < np.inf, "should be a finite number of more than 0")
    check("least", least, least >= 1, "should be at least 1")
    most = len(labels) // least
    check("devices", devices, devices <= most, f"should be at most {most}: each has {least} samples")
    rng = np.random.default_rng([seed, 3])
    device = np.full(len(labels), -1)
    for c in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == c))
        share = rng.dirichlet(np.full(devices, alpha))
        if capped:
            room = np.bincount(device[device >= 0], minlength=devices) < len(labels) / devices
            share = np.where(room, share, 0) if share[room].sum() > 0 else room.astype(float)
            share = share / share.sum()
        share = np.cumsum(share)
        device[rows] = np.minimum(np.searchsorted(share, (np.arange(len(rows)) + 0.5) / len(rows)), devices - 1)
    return _fill(device, devices, least, rng)


def iid(labels: NDArray, seed: int, *, devices: int) -> NDArray:
    """All samples, shared out at random in sizes as equal as possible."""
    labels = _labels(labels, seed, devices)
    return np.random.default_rng([seed, 4]).permutation(len(labels)) % devices


def by_name(
    name: Name,
    labels: NDArray,
    seed: int,
    *,
    devices: int,
    classes: int,
    alpha: float,
    each: int | None,
    capped: bool | None,
) -> NDArray:
    """The partition of that name, with the numbers that it takes; `each` is the number of shards per device."""
    for setting, value, owner in (("shards", each, "shards"), ("capped", capped, "dirichlet")):
        check(setting, value, value is None or name == owner, f"is only for partition={owner}; partition is {name}")
    if name == "shards":
        return shards(labels, seed, devices=devices, shards=2 if each is None else each)
    if name == "dirichlet":
        return dirichlet(labels, seed, devices=devices, alpha=alpha, capped=bool(capped))
    if name == "iid":
        return iid(labels, seed, devices=devices)
    of_classes = {"power_law": power_law, "classes": classes_per_device, "random_classes": random_classes}[name]
    return of_classes(labels, seed, devices=devices, classes=classes)


def _deal(
    labels: NDArray,
    seed: int,
    devices: int,
    classes: int,
    least: int,
    counts: Callable[[np.random.Generator, NDArray, int], NDArray],
    steps: Callable[[np.random.Generator, int], NDArray] | None = None,
) -> NDArray:
    """Device k has the classes k, k+1, …, or k + steps(rng, C)[k] (mod C); counts(rng, devices, n) shares out n."""
    labels = _labels(labels, seed, devices)
    check("least", least, least >= 1, "should be at least 1")
    present = np.unique(labels)
    check("classes", classes, 1 <= classes <= len(present), f"should be between 1 and the {len(present)} in the data")
    rng = np.random.default_rng([seed, 2])
    device = np.full(len(labels), -1)
    beyond = np.arange(classes) if steps is None else steps(np.random.default_rng([seed, 7]), len(present))
    held = (np.arange(devices)[:, None] + beyond) % len(present)
    for c, label in enumerate(present):
        owners = np.flatnonzero((held == c).any(axis=1))
        rows = rng.permutation(np.flatnonzero(labels == label))
        short = f"{len(rows)} samples of class {label} are too few for {len(owners)} devices with {least} each"
        check("devices", devices, len(rows) >= least * len(owners), f"should be fewer: {short}")
        if len(owners):
            n = counts(rng, owners, len(rows))
            device[rows[: n.sum()]] = np.repeat(owners, n)
    return device


def _even(rng: np.random.Generator, owners: NDArray, n: int) -> NDArray:
    return n // len(owners) + (np.arange(len(owners)) < n % len(owners))


def _fill(device: NDArray, devices: int, least: int, rng: np.random.Generator) -> NDArray:
    """Move samples from the largest devices to those with fewer than `least`."""
    size = np.bincount(device, minlength=devices)
    need = np.maximum(least - size, 0)
    order = rng.permutation(len(device))
    order = order[np.argsort(device[order], kind="stable")]
    height = np.arange(len(device)) - np.repeat(np.cumsum(size) - size, size)  # of a sample in its device's pile
    tallest = np.argsort(-height, kind="stable")[: need.sum()]
    filled = device.copy()
    filled[order[tallest]] = np.repeat(np.arange(devices), need)
    return filled


def _labels(labels: NDArray, seed: int, devices: int) -> NDArray:
    labels = _one_dimensional("labels", labels)
    check_whole("seed", seed, 0)
    check_whole("devices", devices, 1, len(labels))
    return labels


def _one_dimensional(field: str, values: NDArray) -> NDArray:
    values = np.asarray(values)
    expected = "should be one-dimensional, a value per sample, and at least one"
    check(field, values.shape, values.ndim == 1 and len(values), expected)
    return values
