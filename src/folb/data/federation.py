"""The devices' data: flat arrays in device order, with an offset and a size for each device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from folb.errors import InputError, check, check_whole
from folb.typing import NDArray

BLOCK = 1 << 26  # bytes read at once from an array that may be mapped from a file

HoldoutSeed = Annotated[
    int | None, "which random tenth of each device's samples to test on, if the data does not say; 0 if not set"
]
Regression = Annotated[bool | None, "the label is a number to predict, and not a class; no if not set"]
Expand = Callable[[Any, Any], Any]
"""A function (table, x) -> inputs that works on NumPy's arrays and on jax's alike."""


@dataclass(frozen=True, eq=False)
class Split:
    """One side, train or test: device k owns rows start[k] : start[k] + size[k] of x and y.

    Test rows after those of all devices are on no device: the server has them.
    """

    x: NDArray
    y: NDArray
    start: NDArray
    size: NDArray

    def __repr__(self) -> str:
        return f"Split({len(self.y)} samples of {len(self.size)} devices)"

    def sample(self, n: int) -> Split:
        """n of its samples at random, in their order, always the same ones; all of them if it has no more."""
        if n >= len(self.y):
            return self
        rows = np.sort(np.random.default_rng(0).choice(len(self.y), n, replace=False))
        start, end = (np.searchsorted(rows, at).astype(np.int32) for at in (self.start, self.start + self.size))
        return Split(self.x[rows], self.y[rows], start, end - start)

    def at_most(self, n: int) -> Split:
        """At most n random samples of each device, in their order, always the same ones; and all of the server's."""
        device = np.repeat(np.arange(len(self.size)), self.size)
        shuffled = np.lexsort((np.random.default_rng(0).random(len(device)), device))
        rank = np.arange(len(device)) - np.repeat(starts(self.size), self.size)
        rows = np.concatenate([np.sort(shuffled[rank < n]), np.arange(len(device), len(self.y))])
        size = np.minimum(self.size, n)
        return Split(self.x[rows], self.y[rows], starts(size), size)


@dataclass(frozen=True, eq=False)
class Federation:
    """N devices with their training and test samples.

    The samples of all devices lie end to end; padding each device to the size of the largest would take tens of times
    the memory on typical power-law splits.

    If samples share their content (windows of one text, words of one vocabulary), `x` holds references into `table`,
    and `expand(table, x)` turns them into a batch of model inputs. `note` is a warning that every output repeats.
    `device_names` and `class_names` are those of the user's own data, if it has names.
    If the labels are numbers to predict (`regression`), `classes` is 1: a model has one output.
    """

    name: str
    train: Split
    test: Split
    classes: int
    table: NDArray | None = None
    expand: Expand | None = None
    note: str = ""
    device_names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    held_out: bool = False  # the data does not say what to test on: it is a random tenth of each device's samples

    def __repr__(self) -> str:
        samples = f"{len(self.train.y)} training and {len(self.test.y)} test samples of shape {self.shape}"
        kind = "numbers to predict" if self.regression else f"{self.classes} classes"
        return f"Federation({self.name}: {self.N} devices, {samples}, {kind})"

    @property
    def regression(self) -> bool:
        """Whether the labels are numbers to predict, and not classes."""
        return self.train.y.dtype.kind == "f"

    @property
    def N(self) -> int:
        """The number of devices."""
        return len(self.train.size)

    def inputs(self, x: NDArray) -> NDArray:
        """Some rows of `train.x` or `test.x` as the model sees them."""
        return x if self.expand is None else np.asarray(self.expand(self.table, x))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, as the model sees it."""
        return self.inputs(self.train.x[:1]).shape[1:]

    @property
    def kind(self) -> np.dtype[Any]:
        """The type of a model's inputs."""
        return self.inputs(self.train.x[:1]).dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all samples."""
        return sum(array.nbytes for side in (self.train, self.test) for array in (side.x, side.y))

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of all samples, which tells them from others."""
        digest = hashlib.sha256()
        sides = [array for side in (self.train, self.test) for array in (side.x, side.y, side.start, side.size)]
        for array in (*sides, *([] if self.table is None else [self.table])):
            digest.update(f"{array.dtype} {array.shape}".encode())
            for _, block in blocks(array):
                digest.update(np.ascontiguousarray(block).data)
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the samples into a new directory, which `data.load` maps and does not read as a whole."""
        from folb.data import mapped

        mapped.save(self, path)

    def labels(self) -> NDArray:
        """How many samples of each label each device has, in all: [N, classes]. Numbers to predict are one label."""
        if self.regression:
            return (self.train.size + self.test.size).astype(np.int64)[:, None]
        cells = self.N * self.classes
        counts = np.zeros(cells, dtype=np.int64)
        for side in (self.train, self.test):
            first = np.repeat(np.arange(0, cells, self.classes), side.size)
            counts += np.bincount(first + side.y[: len(first)], minlength=cells)
        return counts.reshape(self.N, self.classes)

    def smaller(self, n: int) -> Federation:
        """The same devices, each with at most n training samples."""
        if n >= self.train.size.max():
            return self
        left_out = f"at most {n:,} training samples of each device"
        return replace(self, train=self.train.at_most(n), note="; ".join(filter(None, (self.note, left_out))))

    def tested_on(self, x: NDArray, y: NDArray) -> Federation:
        """The same devices, tested on samples that none of them has."""
        nowhere = np.zeros(self.N, np.int32)
        y = numbers(self.name, y) if self.regression else labels(self.name, y, self.classes)
        return replace(self, test=Split(features(self.name, x), y, nowhere, nowhere))

    @staticmethod
    def from_arrays(
        name: str,
        x: NDArray,
        y: NDArray,
        device: NDArray,
        split: NDArray | None = None,
        *,
        classes: int | None = None,
        holdout_seed: HoldoutSeed = None,
        regression: Regression = None,
    ) -> Federation:
        """Gather samples by device, and check them.

        `device` names each sample's device, by strings or numbers; the devices are numbered in sorted order. `split`
        says which samples are for testing: 1, True or "test"; the others have 0, False or "train". Without it, a random
        tenth of every device's samples is held out; at least one sample is kept for training. With `regression`, `y`
        has any finite numbers, and a model predicts them.
        """
        x = features(name, _array(f"{name}: x", x))
        y, device = _array(f"{name}: y", y), _array(f"{name}: device", device)
        for field, values in (("y", y), ("device", device)):
            check_one_per_sample(name, field, values, x)
        check(f"{name}: len(x)", 0, len(x), "should be at least 1 sample")
        check(f"{name}: classes", classes, classes is None or classes >= 2, "should be at least 2")
        check(f"{name}: classes", classes, classes is None or not regression, "should not be given with regression")
        if regression:
            y, classes = numbers(name, y), 1
        else:
            y = labels(name, y, most_classes(len(y)) if classes is None else classes)
        ids, k = _number(name, device)
        if split is None:
            seed = 0 if holdout_seed is None else holdout_seed
            check_whole("holdout_seed", seed, 0)
            test = _hold_out(k, int(seed))
        else:
            check("holdout_seed", holdout_seed, holdout_seed is None, f"should not be set: {name} says what to test on")
            split = _array(f"{name}: split", split)
            check_one_per_sample(name, "split", split, x)
            test = _is_test(name, split)
        N = len(ids)
        empty = np.flatnonzero(np.bincount(k[~test], minlength=N) == 0)
        if len(empty):
            who = ids.tolist()[empty[0]]
            raise InputError(f"{name}: training samples of device {who!r}", 0, "should be at least 1")
        classes = max(int(y.max()) + 1, 2) if classes is None else classes
        sides = _split(x, y, k, ~test, N), _split(x, y, k, test, N)
        names = tuple(ids.tolist()) if ids.dtype.kind == "U" else None
        return Federation(name, *sides, classes, device_names=names, held_out=split is None)


def blocks(array: NDArray) -> Iterator[tuple[int, NDArray]]:
    """The array in parts of at most `BLOCK` bytes (or one row), each with the number of its first row."""
    rows = max(1, BLOCK * len(array) // max(1, array.nbytes))
    for first in range(0, len(array), rows):
        yield first, array[first : first + rows]


def features(name: str, x: NDArray, first: int = 0) -> NDArray:
    """x as models take it: float32, int32 or bytes, finite, no sample empty. `first` is the number of its first one."""
    check(f"{name}: x", str(x.dtype), x.dtype.kind in "biuf", "should be numbers")
    good = x.ndim and 0 not in x.shape[1:]
    check(f"{name}: shape of x", x.shape, good, "should have samples first, and numbers in every sample")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind in "iu":
        whole = x.astype(np.int32, copy=False)
        _check_each(name, "x", x, whole == x, "should fit into 32 bits", first)
        return whole
    return _single(name, "x", x, "should be a finite number (no NaN, no infinity), in 32 bits", first)


def labels(name: str, y: NDArray, classes: int) -> NDArray:
    """y as int32; floats are accepted if they are whole."""
    expected = f"should be a whole number from 0 to {classes - 1}"
    check(f"{name}: y", str(y.dtype), y.dtype.kind in "biuf", expected)
    with np.errstate(invalid="ignore"):  # NaN compares false, and fails the check
        good = (y >= 0) & (y < classes) & (np.floor(y) == y)
    if not good.all() and np.isfinite(y).all():
        expected += " (or, if it is a number to predict, set regression=true)"
    _check_each(name, "y", y, good, expected)
    return y.astype(np.int32)


def numbers(name: str, y: NDArray) -> NDArray:
    """y as float32: numbers to predict."""
    expected = "should be a finite number, in 32 bits"
    check(f"{name}: y", str(y.dtype), y.dtype.kind in "biuf", expected)
    return _single(name, "y", y, expected)


def _single(name: str, field: str, values: NDArray, expected: str, first: int = 0) -> NDArray:
    with np.errstate(over="ignore"):  # a value too large for 32 bits becomes infinite, which fails the check
        single = values.astype(np.float32, copy=False)
    _check_each(name, field, values, np.isfinite(single), expected, first)
    return single


def starts(size: NDArray) -> NDArray:
    """Where each device's rows begin; the devices' samples lie end to end."""
    return (np.cumsum(size) - size).astype(np.int32)


def most_classes(samples: int) -> int:
    """The most classes that are accepted. More than the samples (and than 100) are a mistake: ids, not labels."""
    return max(samples, 100)


def _array(field: str, values: Any) -> NDArray:
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(field, values, "should be an array with rows of equal length") from None


def check_one_per_sample(name: str, field: str, values: NDArray, x: NDArray) -> None:
    """Raise unless there is a value for each sample of x."""
    expected = "should be one-dimensional, a value per sample"
    check(f"{name}: shape of {field}", values.shape, values.ndim == 1, expected)
    check(f"{name}: len({field})", len(values), len(values) == len(x), f"should be len(x) = {len(x)}")


def _check_each(name: str, field: str, values: NDArray, good: NDArray, expected: str, first: int = 0) -> None:
    if not good.all():
        where = np.unravel_index(int(np.argmin(good)), good.shape)
        index = ", ".join(str(i) for i in (first + where[0], *where[1:]))
        raise InputError(f"{name}: {field}[{index}]", values[where].item(), expected)


def _number(name: str, device: NDArray) -> tuple[NDArray, NDArray]:
    """The distinct devices, sorted, and each sample's index among them."""
    if device.dtype.kind == "f":
        _check_each(name, "device", device, np.isfinite(device), "should be a device's name or number")
    try:
        return np.unique(device, return_inverse=True)
    except TypeError:  # objects that cannot be compared
        raise InputError(f"{name}: device", str(device.dtype), "should be strings or numbers") from None


def _is_test(name: str, split: NDArray) -> NDArray:
    train, test = ("train", "test") if split.dtype.kind == "U" else (0, 1)
    good = (split == train) | (split == test) if split.dtype.kind in "biufU" else np.zeros(split.shape, bool)
    _check_each(name, "split", split, good, "should be 0 or 1, a boolean, or one of the words train and test")
    return split == test


def _hold_out(k: NDArray, seed: int) -> NDArray:
    """A tenth of each device's samples at random: n - int(0.9 n) of them, never all."""
    test = np.zeros(len(k), dtype=bool)
    order = np.argsort(k, kind="stable")
    for device, rows in enumerate(np.split(order, np.flatnonzero(np.diff(k[order])) + 1)):
        shuffled = np.random.default_rng([seed, device]).permutation(rows)
        test[shuffled[max(int(0.9 * len(rows)), 1) :]] = True
    return test


def _split(x: NDArray, y: NDArray, k: NDArray, keep: NDArray, N: int) -> Split:
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(k[rows], kind="stable")]
    size = np.bincount(k[rows], minlength=N).astype(np.int32)
    return Split(np.ascontiguousarray(x[rows]), y[rows], starts(size), size)
