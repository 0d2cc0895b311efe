"""What a real device computes in a round, in NumPy: the proximal solve, the gradient, the inexactness.

The same steps as `folb.device`, which compiles them for many devices at once; here one device has a gradient function
of any library's making, and neither jax nor the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from folb.core.shuffle import shuffled
from folb.flower.protocol import Arrays, NDArray, Task

BLOCK = 256  # samples that a full gradient takes at once

Gradient = Callable[[Arrays, Any, Any], Arrays]
"""gradient(params, x, y): of the mean loss of a batch."""


def batches(task: Task, size: int) -> Iterator[NDArray]:
    """The rows of each mini-batch, as the simulator draws them.

    With unit "epoch" a pass ends with a smaller batch where `batch` does not divide the samples; with unit
    "step" batches run on from one pass into the next.
    """
    words, offset = np.array(task.words, np.uint32), np.arange(task.batch)
    per_epoch = -(-size // task.batch)
    for s in range(task.work * (per_epoch if task.unit == "epoch" else 1)):
        if task.unit == "epoch":
            position = s % per_epoch * task.batch + offset
            yield shuffled(words, s // per_epoch, position[position < size], size)
        else:
            yield shuffled(words, *np.divmod(s * task.batch + offset, size), size)


def solve(gradient: Gradient, x: Any, y: Any, task: Task, params: Arrays) -> Arrays:
    """The update Delta w_k = w_k - w^t after `work` units on h_k of (3), from w^t = `params`."""
    lr, mu = np.float32(task.lr), np.float32(task.mu)
    if task.unit == "gradient":
        delta = {name: np.zeros_like(value) for name, value in params.items()}
        for _ in range(task.work):
            g = full_gradient(gradient, x, y, _plus(params, delta))
            delta = {name: d - lr * (g[name] + mu * d) for name, d in delta.items()}
        return delta
    w = params
    for rows in batches(task, len(y)):
        g = gradient(w, x[rows], y[rows])
        w = {name: v - lr * (g[name] + mu * (v - params[name])) for name, v in w.items()}
    return {name: v - params[name] for name, v in w.items()}


def full_gradient(gradient: Gradient, x: Any, y: Any, params: Arrays) -> Arrays:
    """grad F_k: the mean over all samples of the device."""
    n = len(y)
    total = {name: np.zeros_like(value) for name, value in params.items()}
    for first in range(0, n, BLOCK):
        part = gradient(params, x[first : first + BLOCK], y[first : first + BLOCK])
        share = np.float32(min(BLOCK, n - first) / n)
        total = {name: value + share * part[name] for name, value in total.items()}
    return total


def inexactness(task: Task, delta: Arrays, grad: Arrays, after: Arrays) -> float:
    """gamma_k = ||grad h_k(w_k, w^t)|| / ||grad h_k(w^t, w^t)||, as `folb.device.inexactness` has it."""
    before = norm(grad)
    gamma = norm({name: g + np.float32(task.mu) * delta[name] for name, g in after.items()}) / before if before else 0.0
    return min(gamma, 1.0) if task.clamp_gamma else gamma


def importance(task: Task, grad: Arrays, gamma: float, mean: Arrays) -> float:
    """I_k of (18), its gradient estimate being `mean`, and over ||mean||^2 to keep the range small; psi = 0 is (13)."""
    square = dot(mean, mean)
    if square == 0:
        return 0.0
    inner, discount = dot(grad, mean) / square, task.psi * gamma
    return math.copysign(max(abs(inner) - discount, 0.0), inner) if task.never_flip else inner - discount


def dot(a: Arrays, b: Arrays) -> float:
    """<a, b> over all arrays."""
    return float(sum(np.vdot(a[name], b[name]) for name in sorted(a)))


def norm(a: Arrays) -> float:
    """||a|| over all arrays."""
    return math.sqrt(dot(a, a))


def _plus(a: Arrays, b: Arrays) -> Arrays:
    return {name: value + b[name] for name, value in a.items()}
