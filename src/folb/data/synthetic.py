"""Synthetic_iid and Synthetic(alpha, beta), as published with FedProx (Li et al.; Shamir et al.)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Annotated

import numpy as np

from folb.data.federation import Federation, Split, starts
from folb.errors import InputError, check, check_whole
from folb.typing import NDArray

FEATURES, CLASSES = 60, 10
DEVIATION = np.arange(1, FEATURES + 1) ** -0.6  # of x: its covariance is diag(j^-1.2)
MANY = 300_000  # from so many devices on, a warning says how long it takes

log = logging.getLogger(__name__)

# the test samples of each device in the two draws published with FedProx; a tenth is for testing
_TESTED = {
    "1_1": [8, 18, 9, 17, 16, 50, 14, 9, 6, 19, 17, 6, 9, 6, 7, 662, 6, 13, 7, 12, 8, 5, 6, 44, 6, 14, 31, 45, 8, 6],
    "iid": [6, 9, 9, 6, 8, 6, 71, 44, 6, 50, 6, 22, 360, 7, 10, 6, 10, 9, 7, 9, 6, 21, 6, 22, 16, 15, 17, 18, 8, 15],
}
PUBLISHED = {f"synthetic_{name}": [10 * n for n in tested] for name, tested in _TESTED.items()}

Devices = Annotated[int | None, "number of devices; by default as many as there are sizes, or 30"]
Sizes = Annotated[
    str | int | Sequence[int],
    "samples per device: 'lognormal', 'published', a number for all, or a list such as 50,80,200",
]
Draw = Annotated[int, "which random draw of the data"]


def synthetic(
    alpha: Annotated[float, "how much the devices' models differ: sd of u_k"] = 1.0,
    beta: Annotated[float, "how much the devices' inputs differ: sd of B_k"] = 1.0,
    *,
    devices: Devices = None,
    sizes: Sizes = "lognormal",
    draw: Draw = 0,
) -> Federation:
    """Synthetic(alpha, beta).

    y = argmax(W_k x + b_k), x ~ N(v_k, diag(j^-1.2)), W_k and b_k ~ N(u_k, 1), u_k ~ N(0, alpha),
    v_k ~ N(B_k, 1), B_k ~ N(0, beta).

    u_k adds the same number to the scores of all classes, so in this recipe alpha changes no label. The devices' models
    differ for every alpha, because of the 1 in N(u_k, 1).
    """
    for field, value in (("alpha", alpha), ("beta", beta)):
        # far beyond the limit N(u_k, 1) rounds to u_k, and nothing is left to learn
        check(field, value, isinstance(value, Real) and 0 <= value <= 1e6, "should be a number from 0 to 1000000")
    check_whole("draw", draw, 0)

    def model(rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
        u, B = rng.normal(0, alpha), rng.normal(0, beta)
        return rng.normal(B, 1, FEATURES), rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)

    return _gather(f"synthetic_{alpha:g}_{beta:g}", model, "synthetic_1_1", devices, sizes, draw)


def synthetic_iid(*, devices: Devices = None, sizes: Sizes = "lognormal", draw: Draw = 0) -> Federation:
    """Synthetic_iid: one model for all devices, W and b ~ N(0, 1), and x ~ N(0, diag(j^-1.2))."""
    check_whole("draw", draw, 0)
    rng = np.random.default_rng([draw])
    shared = np.zeros(FEATURES), rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    return _gather("synthetic_iid", lambda rng: shared, "synthetic_iid", devices, sizes, draw)


def fixed(alpha: float, beta: float) -> Callable[..., Federation]:
    """The constructor of Synthetic(alpha, beta) for one alpha and beta."""

    def constructor(*, devices: Devices = None, sizes: Sizes = "lognormal", draw: Draw = 0) -> Federation:
        return synthetic(alpha, beta, devices=devices, sizes=sizes, draw=draw)

    constructor.__name__ = f"synthetic_{alpha:g}_{beta:g}"
    constructor.__doc__ = f"Synthetic({alpha:g}, {beta:g}): each device has a model and a distribution of its own."
    return constructor


def _gather(
    name: str,
    model: Callable[[np.random.Generator], tuple[NDArray, NDArray, NDArray]],
    published: str,
    devices: int | None,
    sizes: str | int | Sequence[int],
    draw: int,
) -> Federation:
    """Samples of a `model` (v, W and b) for each device, written to their places as soon as they are drawn."""
    counts = _sizes(sizes, published, devices, draw)
    total = sum(counts)
    check("sizes", total, total < 2**31, "should sum to less than 2^31: samples are numbered in 32 bits")
    if len(counts) >= MANY:
        log.warning("%s: drawing %d devices takes about %.0f seconds", name, len(counts), len(counts) * 1e-4)
    # The samples of a device are exchangeable, so the last tenth is as random a test set as any.
    kept = np.array([int(0.9 * n) for n in counts], np.int32)
    train, test = _empty(kept), _empty(np.array(counts, np.int32) - kept)
    places = zip(counts, kept.tolist(), train.start.tolist(), test.start.tolist(), strict=True)
    for k, (n, m, i, j) in enumerate(places):
        rng = np.random.default_rng([draw, k, 1])
        v, W, b = model(rng)
        x = v + DEVIATION * rng.normal(size=(n, FEATURES))
        y = np.argmax(x @ W + b, axis=1)
        train.x[i : i + m], train.y[i : i + m] = x[:m], y[:m]
        test.x[j : j + n - m], test.y[j : j + n - m] = x[m:], y[m:]
    return Federation(name, train, test, CLASSES)


def _empty(size: NDArray) -> Split:
    total = int(size.sum(dtype=np.int64))
    return Split(np.empty((total, FEATURES), np.float32), np.empty(total, np.int32), starts(size), size)


def _sizes(sizes: str | int | Sequence[int], published: str, devices: int | None, draw: int) -> list[int]:
    if devices is not None:
        check_whole("devices", devices, 1, 10**7)
    if isinstance(sizes, str) and sizes == "lognormal":
        rng = np.random.default_rng([draw, 2])
        return [int(n) + 50 for n in rng.lognormal(4, 2, devices or 30)]
    try:
        if isinstance(sizes, int | np.integer):
            counts = [int(sizes)]
        elif isinstance(sizes, str):
            counts = PUBLISHED[published] if sizes == "published" else [int(n) for n in sizes.split(",")]
        else:
            counts = [int(n) if isinstance(n, str) else n for n in sizes]
    except (TypeError, ValueError):
        expected = "should be 'lognormal', 'published', a number or a list such as 50,80,200"
        raise InputError("sizes", sizes, expected) from None
    check("sizes", sizes, counts, "should be at least one")
    for n in counts:
        good = isinstance(n, Integral) and n >= 2
        check("sizes", n, good, "should each be a whole number of at least 2, to train on and to test on")
    if devices is not None and len(counts) == 1:
        counts = counts * devices  # one number for all
    expected = f"gives {len(counts)} sizes; should be as many as devices = {devices}"
    check("sizes", sizes, devices in (None, len(counts)), expected)
    return counts
