"""What devices are asked for before a draw: inner products (7), or an upload such as a norm, a loss or a sketch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.upload import Upload
from folb.simulation.evaluate import sum_over_blocks
from folb.simulation.problem import Problem
from folb.simulation.solve import Sources, computed
from folb.typing import Params


def survey_inner_products(problem: Problem, params: Params) -> Array:
    """<grad f, grad F_k> for all N devices, without N gradients: one gradient, one jvp, one segment sum."""
    train, loss = problem.train, problem.model.losses
    owner, weight = owners(problem)

    def gradient_block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Params:
        params, weight = given
        return jax.grad(lambda w: jnp.sum(jnp.where(real, weight[rows], 0.0) * loss(w, x, y)))(params)

    g = sum_over_blocks(problem, gradient_block, (params, weight), train, jax.tree.map(jnp.zeros_like, params))

    def slope_block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, g, owner = given
        slope = jax.jvp(lambda w: loss(w, x, y), (params,), (g,))[1]
        return jax.ops.segment_sum(jnp.where(real, slope, 0.0), owner[rows], len(train.size))

    slopes = sum_over_blocks(problem, slope_block, (params, g, owner), train, jnp.zeros(len(train.size)))
    return slopes / train.size


def owners(problem: Problem) -> tuple[Array, Array]:
    """The device of each training sample, and the sample's weight p_k / n_k in the objective (1)."""
    size = problem.train.size
    owner = jnp.repeat(jnp.arange(len(size)), size, total_repeat_length=len(problem.train.y))
    return owner, (problem.share / size)[owner]


def survey_arrays(
    problem: Problem, upload: Upload, params: Params, mu: Any, group: int, key: Array, who: Array | None = None
) -> Any:
    """An upload of all N devices, or of the devices `who`, stacked, with `group` gradients in memory at a time."""
    N = len(problem.train.size)
    count = N if who is None else len(who)
    stack = jax.tree.map(lambda v: jnp.broadcast_to(v, (group, *v.shape)), params)

    def some(first: Array) -> Array:
        place = first + jnp.arange(group)
        device = jnp.minimum(place, count - 1)
        sources = Sources(problem, stack, device if who is None else who[device], place < count, mu=mu, key=key)
        return computed((upload,), sources)[upload.name]

    answers = jax.lax.map(some, jnp.arange(0, count, group))
    return jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:])[:count], answers)
