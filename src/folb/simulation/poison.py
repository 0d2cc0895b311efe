"""Samples that lying devices learn from, what liars gain, and the server's own update, for rules that trust it.

Row r + n of n samples is row r with its label reversed, and row r + 2 n is row r with a trigger, labelled TARGET.
Nothing is copied: rows are changed as they are taken.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, tree
from folb.core.algorithm import Algorithm
from folb.core.liars import count
from folb.core.polar import median
from folb.core.rules import fraction
from folb.simulation.problem import Problem
from folb.simulation.samples import TARGET, Trigger
from folb.typing import Params

PROBED = 500  # test samples that get the trigger, at most


def poisoned(problem: Problem, algorithm: Algorithm, device: Array) -> tuple[Problem, Array]:
    """The problem with three times the devices, and the numbers in it of `device`: liars take their changed samples."""
    train, attack = problem.train, algorithm.attack
    if attack is None:
        return problem, device
    N, n = len(train.size), len(train.y)
    start = jnp.concatenate([train.start, train.start + n, train.start + 2 * n])
    changed = replace(train, start=start, size=jnp.tile(train.size, 3), trigger=Trigger(jnp.max(train.y)))
    kind = jnp.where(device < count(attack, N), jnp.int32(attack.poison), 0)
    return replace(problem, train=changed), device + N * kind


def gained(problem: Problem, algorithm: Algorithm, device: Array, weights: Array, params: Params) -> Array:
    """What liars gain in a round: their part of all absolute weight, the largest of one, and the backdoor's rate."""
    liars = device < (0 if algorithm.attack is None else count(algorithm.attack, len(problem.train.size)))
    size = jnp.abs(weights)
    theirs = jnp.where(liars, size, 0.0)
    return jnp.stack([fraction(jnp.sum(theirs), jnp.sum(size)), jnp.max(theirs), _rate(problem, params)])


def _rate(problem: Problem, params: Params) -> Array:
    """Of the test samples with another label, how many the model takes for TARGET once they have the trigger."""
    test = problem.test
    rows = jnp.linspace(0, len(test.y) - 1, min(PROBED, len(test.y))).astype(jnp.int32)
    others = test.y[rows] != TARGET
    shown = replace(test, trigger=Trigger(jnp.max(problem.train.y)))
    x, target = shown.take(rows + 2 * len(test.y))
    hits = problem.model.predict(params, x) == target
    return jnp.sum(hits & others) / jnp.maximum(jnp.sum(others), 1)


def trusted_update(
    problem: Problem, algorithm: Algorithm, params: Params, seed: Array | int, steps: Array
) -> Params | None:
    """The server's own update: full-gradient steps on its `own_samples`, as many as the median of `steps`.

    None without such samples. These are drawn from the training samples of all devices, with replacement, once a run.
    """
    if not algorithm.own_samples:
        return None
    words = randomness.words(seed, randomness.HOME, randomness.SERVER, algorithm.own_samples)
    x, y = problem.train.take(randomness.below(len(problem.train.y), words))
    solver = algorithm.solver

    def step(_: Array, w: Params) -> Params:
        g = jax.grad(lambda w: jnp.mean(problem.model.loss(w, x, y)))(w)
        return jax.tree.map(lambda v, v0, g: v - solver.lr * (g + solver.mu * (v - v0)), w, params, g)

    return tree.sub(jax.lax.fori_loop(0, median(steps, steps > 0).astype(jnp.int32), step, params), params)
