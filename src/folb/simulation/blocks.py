"""All samples of a side, block by block, in blocks that suit the model."""

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

EVALUATION_BLOCK = 4096  # samples evaluated at once, if the model is light
HEAVY_BLOCK = 256  # if it is heavy: its activations are many times the size of a sample

Add = Callable[[Any, Any, Array], Any]


def add(total: Any, part: Any, begin: Array) -> Any:
    """The sum of the blocks."""
    return jax.tree.map(jnp.add, total, part)


def add_rows(total: Any, part: Any, begin: Array) -> Any:
    """The rows of all blocks, in their order; a block has zeros for rows that are not its own."""

    def placed(whole: Array, rows: Array) -> Array:
        there = jax.lax.dynamic_slice_in_dim(whole, begin, len(rows))
        return jax.lax.dynamic_update_slice_in_dim(whole, there + rows, begin, axis=0)

    return jax.tree.map(placed, total, part)


def sum_over_blocks(
    problem: Problem, block: Callable[..., Any], given: Any, samples: Samples, zero: Any, join: Add = add
) -> Any:
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
            return join(total, part, begin)

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
