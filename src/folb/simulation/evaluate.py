"""The evaluation of a model on all samples, or on a sample of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from folb.simulation.blocks import one_each, sum_over_blocks
from folb.simulation.judge import judged, said
from folb.simulation.problem import Problem
from folb.simulation.samples import Samples
from folb.typing import Params


class Evaluation(NamedTuple):
    """Training loss and test accuracy; the metrics and the devices' own figures only if they were asked for."""

    train_loss: Array
    test_accuracy: Array
    metrics: dict[str, Array] | None = None
    own: Array | None = None


def evaluate(problem: Problem, params: Params, device: Array | None = None) -> Evaluation:
    """Each sample counts once, whatever its device. The own figures are those of `device`."""
    train, test = problem.train if problem.measured is None else problem.measured, problem.test
    loss = total_loss(problem, train, params) / len(train.y)
    if not problem.judges:
        return Evaluation(loss, total_hits(problem, test, params) / len(test.y))
    return Evaluation(loss, *judged(problem, test.y, said(problem, test, params), device))


def total_loss(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """The sum of the samples' losses, without the first `seen` of them."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(jnp.where(real & (rows >= seen), one_each("loss", model.loss(params, x, y), y), 0.0))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.float32(0))


def total_hits(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """How many samples the model gets right, without the first `seen` of them."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(real & (rows >= seen) & (one_each("predict", model.predict(params, x), y) == y))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.int32(0))
