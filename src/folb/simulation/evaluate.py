"""The evaluation of a model on all samples, or on a sample of them, block by block: its loss, accuracy and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb import metric_functions
from folb.core.algorithm import Algorithm
from folb.core.liars import count
from folb.core.rules import fraction
from folb.errors import InputError
from folb.measures import is_regression
from folb.models import Model
from folb.simulation import parallel
from folb.simulation.problem import TARGET, Problem, Samples
from folb.typing import Params

PROBED = 500  # test samples that get the trigger of a backdoor, at most
EVALUATION_BLOCK = 4096  # samples evaluated at once, if the model is light
HEAVY_BLOCK = 256  # if it is heavy: its activations are many times the size of a sample


class Evaluation(NamedTuple):
    """What a model is worth; the metrics and the devices' own figures only if they were asked for."""

    train_loss: Array
    test_accuracy: Array  # NaN if the model predicts numbers
    metrics: dict[str, Array] | None = None
    own: Array | None = None  # [K]


def evaluate(problem: Problem, params: Params, device: Array | None = None) -> Evaluation:
    """Each sample counts once, whatever its device. The own figures are those of `device`."""
    test = problem.test
    loss = total_loss(problem, params) / len(problem.looked_at.y)
    if not problem.judges:
        return Evaluation(loss, total_hits(problem, params) / len(test.y))
    return Evaluation(loss, *judged(problem, (predictions(problem, params), device), test.y))


def total_loss(problem: Problem, params: Params, seen: Array | int = 0) -> Array:
    """The sum of the training samples' losses, without the first `seen` of them."""

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        losses = one_each("loss", problem.model.losses(params, x, y), y)
        return jnp.sum(jnp.where(real & (rows >= seen), losses, 0.0))

    return sum_over_blocks(problem, block, (params, seen), problem.looked_at, jnp.float32(0))


def total_hits(problem: Problem, params: Params, seen: Array | int = 0) -> Array:
    """How many test samples the model gets right, without the first `seen` of them."""

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(real & (rows >= seen) & (one_each("predict", problem.model.predict(params, x), y) == y))

    return sum_over_blocks(problem, block, (params, seen), problem.test, jnp.int32(0))


def predictions(problem: Problem, params: Params) -> dict[str, Array]:
    """What the model predicts for every test sample, in their order; scores only if a metric needs them."""
    model, test, scored = problem.model, problem.test, any("scores" in one.needs for one in problem.metrics)

    def of(params: Params, x: Array, y: Array) -> dict[str, Array]:
        scores = {"scores": model.scores(params, x)} if scored and model.scores is not None else {}
        return {"predicted": one_each("predict", model.predict(params, x), y), **scores}

    def block(params: Params, x: Array, y: Array, rows: Array, real: Array) -> dict[str, Array]:
        return jax.tree.map(lambda v: jnp.where(real.reshape(-1, *[1] * (v.ndim - 1)), v, 0), of(params, x, y))

    like = jax.eval_shape(lambda: of(params, *test.take(jnp.arange(len(test.y)))))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return sum_over_blocks(problem, block, params, test, zero, add_rows)


def judged(
    problem: Problem, run: tuple[dict[str, Array], Array | None], y: Array
) -> tuple[Array, dict[str, Array], Array | None]:
    """An `Evaluation` without its loss, from a run's predictions for all test samples, and its devices of interest."""
    (made, device), predicted = run, run[0]["predicted"]
    numbers = is_regression(problem.model.judged_by)
    figure = (predicted - y) ** 2 if numbers else predicted == y
    own = None
    if device is not None or any("own" in one.needs for one in problem.metrics):
        own = metric_functions.by_device(figure, problem.test.start, problem.test.size)
    given = {"scores": None, **made, "y": y, "classes": problem.classes, "own": own, "lower": numbers}
    values = {name: _number(name, value) for one in problem.metrics for name, value in one(given).items()}
    accuracy = jnp.float32(jnp.nan) if numbers else metric_functions.accuracy(y, predicted)
    return accuracy, values, None if own is None or device is None else own[device]


def _number(name: str, value: Any) -> Array:
    """The value as records have it. A user's own metric may have returned anything."""
    if not isinstance(value, jax.Array | int | float) or jnp.shape(value) or jnp.iscomplexobj(value):
        what = f"shape {jnp.shape(value)}" if isinstance(value, jax.Array) else type(value).__name__
        raise InputError(f"metrics: {name}", what, "should return one real number, computed with jax.numpy")
    return jnp.asarray(value).astype(jnp.float32)


def add_rows(total: Any, part: Any, begin: Array) -> Any:
    """The rows of all blocks, in their order; a block has zeros for rows that are not its own."""

    def placed(whole: Array, rows: Array) -> Array:
        there = jax.lax.dynamic_slice_in_dim(whole, begin, len(rows))
        return jax.lax.dynamic_update_slice_in_dim(whole, there + rows, begin, axis=0)

    return jax.tree.map(placed, total, part)


def sum_over_blocks(
    problem: Problem, block: Callable[..., Any], given: Any, samples: Samples, zero: Any, join: Any = None
) -> Any:
    """The sum of block(given, x, y, rows, real) over all rows, in slices: they are much cheaper than gathers."""
    n, parts = len(samples.y), 1 if problem.mesh is None else problem.mesh.size
    blocks = -(-n // (evaluation_block(problem.model) * parts)) * parts
    size = -(-n // blocks)  # as equal as possible, so that few rows are seen twice

    def span(first: Any, last: Any, samples: Samples, given: Any) -> Any:
        def turn(i: Array, total: Any) -> Any:
            begin = jnp.minimum(i * size, n - size)  # the last block reaches back over rows seen, which are not real
            rows = begin + jnp.arange(size)
            part = block(given, *samples.slice(begin, size), rows, rows >= i * size)
            return jax.tree.map(jnp.add, total, part) if join is None else join(total, part, begin)

        return jax.lax.fori_loop(first, last, turn, zero)

    return parallel.sum_of_spans(span, blocks, (samples, given), problem.mesh)


def evaluation_block(model: Model) -> int:
    """How many samples are evaluated at once."""
    return model.at_once(HEAVY_BLOCK if model.heavy else EVALUATION_BLOCK)


def one_each(name: str, values: Array, y: Array) -> Array:
    """Check that a model returns a value for each sample: other shapes would be broadcast without an error."""
    if jnp.shape(values) != y.shape:
        expected = f"should be {y.shape}, a value for each"
        raise InputError(f"model: shape of {name}(...) for {len(y)} samples", jnp.shape(values), expected)
    return values


def gained(problem: Problem, algorithm: Algorithm, device: Array, weights: Array, params: Params) -> Array:
    """What liars gain in a round: their part of all absolute weight, the largest of one, and the backdoor's rate."""
    liars = device < (0 if algorithm.attack is None else count(algorithm.attack, len(problem.train.size)))
    size = jnp.abs(weights)
    theirs = jnp.where(liars, size, 0.0)
    # the rate: of test samples with another label, how many the model takes for TARGET once they have the trigger
    test = problem.test
    rows = jnp.linspace(0, len(test.y) - 1, min(PROBED, len(test.y))).astype(jnp.int32)
    others = test.y[rows] != TARGET
    shown = replace(test, largest=jnp.max(problem.train.y))
    x, target = shown.take(rows + 2 * len(test.y))
    hits = problem.model.predict(params, x) == target
    rate = jnp.sum(hits & others) / jnp.maximum(jnp.sum(others), 1)
    return jnp.stack([fraction(jnp.sum(theirs), jnp.sum(size)), jnp.max(theirs), rate])
