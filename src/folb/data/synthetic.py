"""Synthetic_iid and Synthetic(alpha, beta), as published with FedProx (Li et al.; Shamir et al.)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from folb.errors import InputError, check
from folb.federation import Federation, NDArray

FEATURES, CLASSES = 60, 10

# Ten times the test samples of each device in the two draws published with FedProx (a tenth is for testing).
PUBLISHED = {
    "synthetic_1_1": (
        [80, 180, 90, 170, 160, 500, 140, 90, 60, 190, 170, 60, 90, 60, 70]
        + [6620, 60, 130, 70, 120, 80, 50, 60, 440, 60, 140, 310, 450, 80, 60]
    ),
    "synthetic_iid": (
        [60, 90, 90, 60, 80, 60, 710, 440, 60, 500, 60, 220, 3600, 70, 100]
        + [60, 100, 90, 70, 90, 60, 210, 60, 220, 160, 150, 170, 180, 80, 150]
    ),
}

Devices = Annotated[int, "number of devices"]
Sizes = Annotated[str | Sequence[int], "samples per device: 'lognormal', 'published', or a list such as 50:80:200"]
Draw = Annotated[int, "which random draw of the data"]


def synthetic(
    alpha: Annotated[float, "how much the devices' models differ: sd of u_k"] = 1.0,
    beta: Annotated[float, "how much the devices' inputs differ: sd of B_k"] = 1.0,
    *,
    devices: Devices = 30,
    sizes: Sizes = "lognormal",
    draw: Draw = 0,
) -> Federation:
    """Synthetic(alpha, beta).

    y = argmax(W_k x + b_k), x ~ N(v_k, diag(j^-1.2)), W_k and b_k ~ N(u_k, 1), u_k ~ N(0, alpha),
    v_k ~ N(B_k, 1), B_k ~ N(0, beta).
    """
    check("alpha", alpha, 0 <= alpha < np.inf, "should be a finite number of at least 0")
    check("beta", beta, 0 <= beta < np.inf, "should be a finite number of at least 0")
    name = f"synthetic_{alpha:g}_{beta:g}"

    def sample(k: int, n: int) -> tuple[NDArray, NDArray]:
        rng = np.random.default_rng([draw, k, 1])
        u, B = rng.normal(0, alpha), rng.normal(0, beta)
        v = rng.normal(B, 1, FEATURES)
        W, b = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
        return _label(rng, v, W, b, n)

    return _gather(name, sample, "synthetic_1_1", devices, sizes, draw)


def synthetic_iid(*, devices: Devices = 30, sizes: Sizes = "lognormal", draw: Draw = 0) -> Federation:
    """Synthetic_iid: one model for all devices, W and b ~ N(0, 1), and x ~ N(0, diag(j^-1.2))."""
    shared = np.random.default_rng([max(draw, 0)])
    W, b = shared.normal(0, 1, (FEATURES, CLASSES)), shared.normal(0, 1, CLASSES)

    def sample(k: int, n: int) -> tuple[NDArray, NDArray]:
        return _label(np.random.default_rng([draw, k, 1]), np.zeros(FEATURES), W, b, n)

    return _gather("synthetic_iid", sample, "synthetic_iid", devices, sizes, draw)


def _label(rng: np.random.Generator, v: NDArray, W: NDArray, b: NDArray, n: int) -> tuple[NDArray, NDArray]:
    sd = np.arange(1, FEATURES + 1) ** -0.6  # the covariance is diag(j^-1.2)
    x = v + sd * rng.normal(size=(n, FEATURES))
    return x, np.argmax(x @ W + b, axis=1)


def _gather(
    name: str,
    sample: Callable[[int, int], tuple[NDArray, NDArray]],
    published: str,
    devices: int,
    sizes: str | Sequence[int],
    draw: int,
) -> Federation:
    check("draw", draw, draw >= 0, "should be at least 0")
    check("devices", devices, devices >= 1, "should be at least 1")
    counts = _sizes(sizes, published, devices, draw)
    xs, ys = zip(*(sample(k, n) for k, n in enumerate(counts)), strict=True)
    device = np.repeat(np.arange(len(counts)), counts)
    # The samples of a device are exchangeable, so the last tenth is as random a test set as any.
    test = np.concatenate([np.arange(n) >= int(0.9 * n) for n in counts])
    x = np.concatenate(xs).astype(np.float32)
    return Federation.from_arrays(name, x, np.concatenate(ys), device, test, classes=CLASSES)


def _sizes(sizes: str | Sequence[int], published: str, devices: int, draw: int) -> list[int]:
    if sizes == "lognormal":
        rng = np.random.default_rng([draw, 2])
        return [int(n) + 50 for n in rng.lognormal(4, 2, devices)]
    if sizes == "published":
        counts = PUBLISHED[published]
    elif isinstance(sizes, str):
        try:
            counts = [int(n) for n in sizes.split(":")]
        except ValueError:
            raise InputError("sizes", sizes, "should be 'lognormal', 'published' or a list such as 50:80:200") from None
    else:
        counts = [int(n) for n in sizes]
    if len(counts) != devices:
        raise InputError("sizes", sizes, f"gives {len(counts)} sizes; should be as many as devices = {devices}")
    if min(counts) < 2:
        raise InputError("sizes", min(counts), "should each be at least 2, one sample to train on and one to test")
    return counts
