"""The devices' data: flat arrays in device order, with an offset and a size for each device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from folb.errors import InputError

NDArray = np.ndarray[Any, np.dtype[Any]]
Expand = Callable[[Any, Any], Any]
"""A function (table, x) -> inputs that works on NumPy's arrays and on jax's alike."""


@dataclass(frozen=True, eq=False)
class Split:
    """One side, train or test: device k owns rows start[k] : start[k] + size[k] of x and y."""

    x: NDArray
    y: NDArray
    start: NDArray
    size: NDArray


@dataclass(frozen=True, eq=False)
class Federation:
    """N devices with their training and test samples.

    The samples of all devices lie end to end; padding each device to the size of the largest would cost
    tens of times the memory on the power-law splits of practice.

    Where samples share their content (windows of one text, words of one vocabulary), `x` holds references
    into `table`, and `expand(table, x)` makes a batch of model inputs of them. `note` is a caveat that every
    output repeats.
    """

    name: str
    train: Split
    test: Split
    classes: int
    table: NDArray | None = None
    expand: Expand | None = None
    note: str = ""

    @property
    def N(self) -> int:
        """The number of devices."""
        return len(self.train.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, as the model sees it."""
        if self.expand is None:
            return self.train.x.shape[1:]
        return self.expand(self.table, self.train.x[:1]).shape[1:]

    @staticmethod
    def from_arrays(
        name: str,
        x: NDArray,
        y: NDArray,
        device: NDArray,
        test: NDArray | None = None,
        *,
        classes: int | None = None,
        seed: int = 0,
    ) -> Federation:
        """Gather samples by device, and check them.

        `device` names each sample's device (any sortable values), `test` marks the test samples. Without it
        a tenth of every device's samples, drawn at random, is held out, and at least one is kept to train on.
        """
        x, y, device = np.asarray(x), np.asarray(y), np.asarray(device)
        for field, values in (("y", y), ("device", device)):
            if values.ndim != 1:
                raise InputError(f"{name}: {field}", values.shape, "should be one-dimensional, a value per sample")
            if len(values) != len(x):
                raise InputError(f"{name}: len({field})", len(values), f"should be len(x) = {len(x)}")
        if len(x) == 0:
            raise InputError(f"{name}: len(x)", 0, "should be at least 1 sample")
        if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
            raise InputError(f"{name}: x", str(x.dtype), "should be numbers")
        if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
            row = int(np.argwhere(~np.isfinite(x))[0][0])
            raise InputError(f"{name}: x[{row}]", x[row].tolist(), "should hold finite numbers (no NaN, no infinity)")
        if x.dtype != np.uint8:  # bytes, as images have them, stay bytes
            x = x.astype(np.float32 if not np.issubdtype(x.dtype, np.integer) else np.int32, copy=False)
        y, classes = _labels(name, y, classes)

        _, k = np.unique(device, return_inverse=True)
        if test is None:
            test = _hold_out(k, seed)
        else:
            test = np.asarray(test)
            if test.shape != y.shape:
                raise InputError(f"{name}: len(split)", len(test), f"should be len(x) = {len(x)}")
            test = test.astype(bool)
        N = int(k.max()) + 1
        empty = np.flatnonzero(np.bincount(k[~test], minlength=N) == 0)
        if len(empty):
            raise InputError(
                f"{name}: training samples of device {np.unique(device)[empty[0]]!s}", 0, "should be at least 1"
            )
        return Federation(name, _split(x, y, k, ~test, N), _split(x, y, k, test, N), classes)


def _labels(name: str, y: NDArray, classes: int | None) -> tuple[NDArray, int]:
    if not np.issubdtype(y.dtype, np.number):
        raise InputError(f"{name}: y", str(y.dtype), "should be whole numbers 0 .. classes - 1")
    whole = y.astype(np.int64, copy=False) if np.isfinite(y).all() else None
    top = len(y) if classes is None else classes  # more classes than samples is a mistake, not a task
    bad = (
        np.flatnonzero(~np.isfinite(y))
        if whole is None
        else np.flatnonzero((whole != y) | (whole < 0) | (whole >= max(top, 2)))
    )
    if whole is None or len(bad):
        row = int(bad[0])
        expected = f"should be a whole number in 0 .. {max(top, 2) - 1}"
        raise InputError(f"{name}: y[{row}]", y[row].item(), expected)
    return whole.astype(np.int32), max(int(whole.max()) + 1, 2) if classes is None else classes


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
    start = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    return Split(np.ascontiguousarray(x[rows]), y[rows], start, size)
