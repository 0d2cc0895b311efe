"""The server's own update in the simulator, for rules that trust it: from training samples drawn by the seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, tree
from folb.core.algorithm import Algorithm
from folb.core.polar import median
from folb.simulation.problem import Problem
from folb.typing import Params


def update(problem: Problem, algorithm: Algorithm, params: Params, seed: Array | int, steps: Array) -> Params | None:
    """Full-gradient steps on `root` samples, as many as the median of `steps`; None without such samples.

    The samples are drawn from the training samples of all devices, with replacement, once for a run.
    """
    if algorithm.root is None:
        return None
    words = randomness.words(seed, randomness.HOME, randomness.SERVER, algorithm.root)
    x, y = problem.train.take(randomness.below(len(problem.train.y), words))
    solver = algorithm.solver

    def step(_: Array, w: Params) -> Params:
        g = jax.grad(lambda w: jnp.mean(problem.model.loss(w, x, y)))(w)
        return jax.tree.map(lambda v, v0, g: v - solver.lr * (g + solver.mu * (v - v0)), w, params, g)

    return tree.sub(jax.lax.fori_loop(0, median(steps, steps > 0).astype(jnp.int32), step, params), params)
