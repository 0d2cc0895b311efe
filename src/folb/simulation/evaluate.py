"""The evaluation of a model: sums over all samples, or over a sample of them, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import InputError
from folb.models import Model
from folb.simulation import parallel
from folb.simulation.problem import Problem
from folb.simulation.samples import Samples
from folb.typing import Params

EVALUATION_BLOCK = 4096  # samples evaluated at once, if the model is light
HEAVY_BLOCK = 256  # if it is heavy: its activations are many times the size of a sample


def evaluate(problem: Problem, params: Params) -> tuple[Array, Array]:
    """Training loss and test accuracy. Each sample counts once, whatever its device."""
    train, test = problem.train if problem.measured is None else problem.measured, problem.test
    return total_loss(problem, train, params) / len(train.y), total_hits(problem, test, params) / len(test.y)


def total_loss(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """The sum of the samples' losses, without the first `seen` of them."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(jnp.where(real & (rows >= seen), _one_each("loss", model.loss(params, x, y), y), 0.0))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.float32(0))


def total_hits(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """How many samples the model gets right, without the first `seen` of them."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(real & (rows >= seen) & (_one_each("predict", model.predict(params, x), y) == y))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.int32(0))


def _one_each(name: str, values: Array, y: Array) -> Array:
    """Check that a model returns a value for each sample: other shapes would be broadcast without an error."""
    if jnp.shape(values) != y.shape:
        expected = f"should be {y.shape}, a value for each"
        raise InputError(f"model: shape of {name}(...) for {len(y)} samples", jnp.shape(values), expected)
    return values


def sum_over_blocks(problem: Problem, block: Callable[..., Any], given: Any, samples: Samples, zero: Any) -> Any:
    """The sum of block(given, x, y, rows, real) over all rows, in blocks that suit the model.

    Blocks are slices, which are much cheaper than gathers. The last block reaches back over rows already seen; `real`
    leaves these out.
    """
    n, parts = len(samples.y), 1 if problem.mesh is None else problem.mesh.size
    blocks = -(-n // (evaluation_block(problem.model) * parts)) * parts
    size = -(-n // blocks)  # as equal as possible, so that few rows are seen twice

    def span(first: Any, last: Any, samples: Samples, given: Any) -> Any:
        def turn(i: Array, total: Any) -> Any:
            begin = jnp.minimum(i * size, n - size)
            rows = begin + jnp.arange(size)
            part = block(given, *samples.slice(begin, size), rows, rows >= i * size)
            return jax.tree.map(jnp.add, total, part)

        return jax.lax.fori_loop(first, last, turn, zero)

    return parallel.sum_of_spans(span, blocks, (samples, given), problem.mesh)


def evaluation_block(model: Model) -> int:
    return model.at_once(HEAVY_BLOCK if model.heavy else EVALUATION_BLOCK)
