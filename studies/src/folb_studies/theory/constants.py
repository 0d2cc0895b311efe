"""The constants of the paper's assumptions, estimated or known, at a model w^t."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.upload import NORM
from folb.simulation import solve
from folb.simulation.evaluate import sum_over_blocks
from folb.simulation.problem import Problem
from folb.simulation.survey import owners, survey_arrays, survey_inner_products
from folb.typing import Params

GROUP = 10  # devices whose gradients or Hessians are computed at a time


class Constants(NamedTuple):
    """L, B and sigma of Assumptions 1 to 3; sigma < 0 if every F_k is strongly convex."""

    B: Any
    L: Any
    sigma: Any

    def mu_prime(self, mu: Any) -> Any:
        """mu' = mu - sigma: h_k of (3) is mu'-strongly convex."""
        return mu - self.sigma


class Point(NamedTuple):
    """What the bounds use of w^t."""

    loss: Any  # f(w^t)
    inner: Any  # [N] <grad f(w^t), grad F_k(w^t)>
    square: Any  # ||grad f(w^t)||^2


def objective(problem: Problem, params: Params) -> Array:
    """(1): f(w) = sum_k p_k F_k(w)."""
    _, weight = owners(problem)

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, weight = given
        return jnp.sum(jnp.where(real, weight[rows] * problem.model.losses(params, x, y), 0.0))

    return sum_over_blocks(problem, block, (params, weight), problem.train, jnp.float32(0))


@jax.jit
def survey(problem: Problem, params: Params) -> Point:
    """The point w^t = `params`, from all N devices."""
    inner = survey_inner_products(problem, params)
    return Point(objective(problem, params), inner, inner @ problem.share)


@jax.jit
def estimate(problem: Problem, params: Params, iterations: Array | int = 100) -> Constants:
    """B, L and sigma at w^t = `params`, over all N devices.

    The assumptions need constants that hold for every w. B is exact at w^t, the only place where the proofs use it. L
    and sigma come from the Hessians at w^t; power iteration approaches them from below.
    """
    square = survey_inner_products(problem, params) @ problem.share
    largest = jnp.max(survey_arrays(problem, NORM, params, 0.0, GROUP, jnp.zeros(2, jnp.uint32)))
    most, least = curvature(problem, params, iterations)
    return Constants(
        B=jnp.where(square > 0, largest / jnp.sqrt(jnp.where(square > 0, square, 1.0)), jnp.inf),
        L=jnp.max(most),
        sigma=-jnp.min(least),
    )


def curvature(problem: Problem, params: Params, iterations: Array | int) -> tuple[Array, Array]:
    """The largest |eigenvalue| and the smallest eigenvalue of each device's Hessian: [N], [N].

    Power iteration on Hessian-vector products: on H, and then on |H| I - H, whose largest eigenvalue belongs to the
    smallest of H. It takes a group of devices at a time, each with its own vector.
    """
    N = len(problem.train.size)
    group = min(N, GROUP)
    stack = jax.tree.map(lambda v: jnp.broadcast_to(v, (group, *v.shape)), params)
    start = _unit(_random_like(stack))

    def extremes(first: Array) -> tuple[Array, Array]:
        device = jnp.minimum(first + jnp.arange(group), N - 1)

        def gradients(w: Params) -> Params:
            return solve.gradients(problem, w, device, jnp.full(group, True))

        def iterate(shift: Array, sign: Array) -> tuple[Array, tuple[Array, Array]]:
            def turn(_: Array, carry: tuple[Params, Array, Array]) -> tuple[Params, Array, Array]:
                v, _, _ = carry
                _, Hv = jax.jvp(gradients, (stack,), (v,))
                return _unit(_axpy(shift, v, sign, Hv)), tree.norms(Hv), jax.vmap(tree.dot)(v, Hv)

            _, length, along = jax.lax.fori_loop(0, iterations, turn, (start, jnp.zeros(group), jnp.zeros(group)))
            return length, (length, along)

        # twice: on H, and shifted by the |H| that the first pass found
        _, (length, along) = jax.lax.scan(iterate, jnp.zeros(group), jnp.array([1.0, -1.0]))
        return length[0], along[1]

    most, least = jax.lax.map(extremes, jnp.arange(0, N, group))
    return most.reshape(-1)[:N], least.reshape(-1)[:N]


def _axpy(shift: Array, v: Params, sign: Array, u: Params) -> Params:
    """shift_k v_k + sign u_k, for each entry of two stacks."""
    return jax.vmap(lambda s, a, b: jax.tree.map(lambda x, y: s * x + sign * y, a, b))(shift, v, u)


def _unit(stack: Params) -> Params:
    """Each entry scaled to length 1; an entry that is 0 stays 0."""
    size = tree.norms(stack)
    scale = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    return jax.vmap(lambda s, v: jax.tree.map(lambda leaf: s * leaf, v))(scale, stack)


def _random_like(stack: Params) -> Params:
    # "rbg": the compiler would spend seconds on folding the default generator's draws into a constant
    leaves, structure = jax.tree.flatten(stack)
    draws = [jax.random.normal(jax.random.key(i, impl="rbg"), v.shape, v.dtype) for i, v in enumerate(leaves)]
    return jax.tree.unflatten(structure, draws)
