"""What a real device computes in a round, in NumPy: the proximal solve, its full gradient and loss, its terms of sums.

`folb.simulation.solve` compiles the same work for many devices at once. Here one device has a gradient function from
any library, and needs neither jax nor the simulator. Both use the same function for the local step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np

from folb.core.local_step import LocalStep, step_words
from folb.core.rule import as_printed, never_flipped
from folb.core.shuffle import shuffled
from folb.core.upload import GAMMA, Upload
from folb.core.vector import dot, namespace, scaled
from folb.flower.protocol import Arrays, Task
from folb.typing import NDArray, Params

BLOCK = 256  # samples that a full gradient handles at once

Gradient = Callable[[Arrays, Any, Any, NDArray | None], Arrays]
"""gradient(params, x, y, key): the gradient of the mean loss of a batch; without a key, nothing in it is random."""


def batches(task: Task, size: int) -> Iterator[NDArray]:
    """The rows of each mini-batch, as the simulator draws them."""
    words, offset = np.array(task.words, np.uint32), np.arange(task.batch)
    per_epoch = -(-size // task.batch)
    for s in range(task.work * (per_epoch if task.unit == "epoch" else 1)):
        if task.unit == "epoch":  # the last batch of a pass is smaller if `batch` does not divide the samples
            position = s % per_epoch * task.batch + offset
            yield shuffled(words, s // per_epoch, position[position < size], size)
        else:  # a batch may continue from one pass into the next
            yield shuffled(words, *np.divmod(s * task.batch + offset, size), size)


def solve(
    gradient: Gradient,
    x: Any,
    y: Any,
    task: Task,
    step: LocalStep,
    params: Arrays,
    shift: Arrays | None = None,
    begin: tuple[Arrays, ...] | None = None,
) -> tuple[Arrays, Any]:
    """The update Delta w_k = w_k - w^t after `work` units on h_k of (3), from w^t = `params`, and the step's state.

    `shift` adds <shift, w> to h_k. The local step starts from `begin`, if the server sends that.
    """
    lr, mu = np.float32(task.lr), np.float32(task.mu)
    state = step.init(params) if begin is None else step.begin(begin)

    def moved(at: Arrays, g: Arrays, from_start: Arrays) -> Arrays:
        """`at` after a step along the gradient of h_k; `from_start` is `at` - w^t."""
        nonlocal state
        g = plus(g, {name: mu * value for name, value in from_start.items()})
        g = g if shift is None else plus(g, shift)
        move, state = step.apply(g, state, lr)
        return {name: (v + move[name]).astype(np.float32, copy=False) for name, v in at.items()}

    if task.unit == "gradient":
        delta = {name: np.zeros_like(value) for name, value in params.items()}
        for _ in range(task.work):
            delta = moved(delta, full_gradient(gradient, x, y, plus(params, delta)), delta)
        return delta, state
    w, words = params, np.array(task.words, np.uint32)
    for s, rows in enumerate(batches(task, len(y))):
        g = gradient(w, x[rows], y[rows], step_words(words, s))
        w = moved(w, g, {name: v - params[name] for name, v in w.items()})
    return {name: v - params[name] for name, v in w.items()}, state


def full_gradient(gradient: Gradient, x: Any, y: Any, params: Arrays) -> Arrays:
    """grad F_k: the mean over all samples of the device."""
    n = len(y)
    total = {name: np.zeros_like(value) for name, value in params.items()}
    for first in range(0, n, BLOCK):
        part = gradient(params, x[first : first + BLOCK], y[first : first + BLOCK], None)
        share = np.float32(min(BLOCK, n - first) / n)
        total = {name: value + share * part[name] for name, value in total.items()}
    return total


def full_loss(loss: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    """F_k: the mean over all samples of the device; loss(x, y) is the mean of a batch."""
    n = len(y)
    blocks = ((slice(first, first + BLOCK), min(BLOCK, n - first)) for first in range(0, n, BLOCK))
    return sum(float(loss(x[rows], y[rows])) * count / n for rows, count in blocks)


def plus(a: Arrays, b: Arrays) -> Arrays:
    return {name: value + b[name] for name, value in a.items()}


# -- if the server learns only sums, a device computes its own weight, as the server would have ------------------------


def scaled_grad(grad: Params, *, scale: Any) -> Params:
    """The gradient, as a term of the sum (10)."""
    return scaled(grad, scale)


def _weight(grad: Params, mean: Params, discount: Any = 0.0, flip: Any = 1.0, *, times: Any) -> Any:
    """I_k of (18) / ||mean||^2, to keep its range small: the server divides by the sum of all |I_k| anyway."""
    square = dot(mean, mean)
    xp = namespace(square)
    inner = xp.where(square > 0, dot(grad, mean) / xp.where(square > 0, square, 1.0), 0.0)
    importance = xp.where(flip > 0, as_printed(inner, discount), never_flipped(inner, discount))
    return times * xp.where(square > 0, importance, 0.0)


def weighted(delta: Params, grad: Params, mean: Params, *, times: Any) -> Params:
    """I_k Delta w_k of (13)."""
    return scaled(delta, _weight(grad, mean, times=times))


def importance(grad: Params, mean: Params, *, times: Any) -> Any:
    """|I_k| of (13)."""
    return abs(_weight(grad, mean, times=times))


def _hetero_weight(
    delta: Params, grad: Params, after: Params, mu: Any, mean: Params, *, times: Any, psi: Any, flip: Any, most: Any
) -> Any:
    gamma = GAMMA.compute(delta, grad, after, mu, most=most)  # `most` bounds gamma_k
    return _weight(grad, mean, psi * gamma, flip, times=times)


@wraps(_hetero_weight)  # an upload needs what its function's arguments name
def hetero_weighted(delta: Params, *known: Any, **numbers: Any) -> Params:
    """I_k Delta w_k of (18)."""
    return scaled(delta, _hetero_weight(delta, *known, **numbers))


@wraps(_hetero_weight)
def hetero_importance(*known: Any, **numbers: Any) -> Any:
    """|I_k| of (18)."""
    return abs(_hetero_weight(*known, **numbers))


# a task has its own numbers: `times` in the multiset, and those of the rule
SCALED_GRAD = Upload("scaled_grad", scaled_grad, {"scale": 1.0})
WEIGHTED = Upload("weighted", weighted, {"times": 1.0})
IMPORTANCE = Upload("importance", importance, {"times": 1.0}, least=0.0)
HETERO = {"times": 1.0, "psi": 0.0, "flip": 1.0, "most": 1.0}
HETERO_WEIGHTED = Upload("hetero_weighted", hetero_weighted, HETERO)
HETERO_IMPORTANCE = Upload("hetero_importance", hetero_importance, HETERO, least=0.0)
SUMS = {one.name: one for one in (SCALED_GRAD, WEIGHTED, IMPORTANCE, HETERO_WEIGHTED, HETERO_IMPORTANCE)}
