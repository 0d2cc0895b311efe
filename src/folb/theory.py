"""The constants of the paper's assumptions, its bounds on one round's loss, and a round held against them.

A bound is a function of the `Point` w^t, the `Constants` of Assumptions 1 to 3, mu, the inexactness gamma of
Assumption 4 and the selection P, and gives the right-hand side as printed, for mu > 0 and mu' > 0. Where P
enters it enters linearly, so with the share of each device in a multiset in place of P the same function gives
the right-hand side for that multiset, and its mean over the multisets is the paper's.

Not all that is printed is true: docs/theory.md says what holds, under which condition, and what does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb import device as devices
from folb import rules, selection, tree
from folb.algorithms import Algorithm
from folb.errors import check
from folb.federation import NDArray
from folb.rounds import Problem, State, owners, play, sum_over_blocks, survey_inner_products, survey_norms
from folb.rules import Round, Update
from folb.server import plain
from folb.tree import Params

GROUP = 10  # devices whose gradients or Hessians are explored at a time


class Constants(NamedTuple):
    """L, B and sigma of Assumptions 1 to 3; sigma < 0 where every F_k is strongly convex."""

    B: Any
    L: Any
    sigma: Any

    def mu_prime(self, mu: Any) -> Any:
        """mu' = mu - sigma: h_k of (3) is mu'-strongly convex."""
        return mu - self.sigma


class Point(NamedTuple):
    """What the bounds know of w^t."""

    loss: Any  # f(w^t)
    inner: Any  # [N] <grad f(w^t), grad F_k(w^t)>
    square: Any  # ||grad f(w^t)||^2


def objective(problem: Problem, params: Params) -> Array:
    """(1): f(w) = sum_k p_k F_k(w)."""
    _, weight = owners(problem)

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, weight = given
        return jnp.sum(jnp.where(real, weight[rows] * problem.model.loss(params, x, y), 0.0))

    return sum_over_blocks(problem, block, (params, weight), problem.train, jnp.float32(0))


@jax.jit
def survey(problem: Problem, params: Params) -> Point:
    """The point w^t = `params`, from all N devices."""
    inner = survey_inner_products(problem, params)
    return Point(objective(problem, params), inner, inner @ problem.share)


@jax.jit
def estimate(problem: Problem, params: Params, iterations: Array | int = 100) -> Constants:
    """B, L and sigma at w^t = `params`, over all N devices.

    The assumptions ask for constants that serve every w. B is exact for w^t, the only place where the proofs
    use it. L and sigma are those of the Hessians at w^t, found from below by power iteration.
    """
    square = survey_inner_products(problem, params) @ problem.share
    largest = jnp.max(survey_norms(problem, params, GROUP))
    most, least = curvature(problem, params, iterations)
    return Constants(
        B=jnp.where(square > 0, largest / jnp.sqrt(jnp.where(square > 0, square, 1.0)), jnp.inf),
        L=jnp.max(most),
        sigma=-jnp.min(least),
    )


def curvature(problem: Problem, params: Params, iterations: Array | int) -> tuple[Array, Array]:
    """Of each device's Hessian, the largest |eigenvalue| and the smallest eigenvalue: [N], [N].

    Power iteration on Hessian-vector products: on H, and then on |H| I - H, whose largest eigenvalue is
    where the smallest of H is. A group of devices at a time, each with a vector of its own.
    """
    N = len(problem.train.size)
    group = min(N, GROUP)
    stack = jax.tree.map(lambda v: jnp.broadcast_to(v, (group, *v.shape)), params)
    start = _unit(_random_like(stack))

    def extremes(first: Array) -> tuple[Array, Array]:
        device = jnp.minimum(first + jnp.arange(group), N - 1)

        def gradients(w: Params) -> Params:
            everyone = jnp.full(group, True)
            return devices.gradients(problem.model, problem.train, w, device, everyone, problem.abreast, problem.mesh)

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
    """Each entry at length 1; one that vanished stays 0."""
    size = tree.norms(stack)
    scale = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    return jax.vmap(lambda s, v: jax.tree.map(lambda leaf: s * leaf, v))(scale, stack)


def _random_like(stack: Params) -> Params:
    # "rbg": the compiler would spend seconds on folding the default generator's draws into a constant
    leaves, structure = jax.tree.flatten(stack)
    draws = [jax.random.normal(jax.random.key(i, impl="rbg"), v.shape, v.dtype) for i, v in enumerate(leaves)]
    return jax.tree.unflatten(structure, draws)


def mean_bound(point: Point, constants: Constants, mu: Any, gamma: Any, P: Any) -> Any:
    """(4), Theorem 1, for the rule (2).

    f - 1/mu sum_k P_k <grad f, grad F_k> + B (L (gamma + 1) / (mu mu') + gamma / mu + B L (1 + gamma)^2 / (2 mu'^2))
    ||grad f||^2.
    """
    return point.loss - point.inner @ P / mu + _remainder(constants, mu, gamma) * point.square


def signed_bound(point: Point, constants: Constants, mu: Any, gamma: Any, P: Any) -> Any:
    """(6), Proposition 1, for the rule (5): (4) with |<grad f, grad F_k>|."""
    return mean_bound(point._replace(inner=abs(point.inner)), constants, mu, gamma, P)


def lb_near_optimal_bound(point: Point, constants: Constants, mu: Any, gamma: Any) -> Any:
    """(8): (6) at P = P_lb of (7). Theorem 2 claims it for the rule (9) too."""
    return signed_bound(point, constants, mu, gamma, selection.lb_near_optimal(point.inner))


def folb_bound(point: Point, constants: Constants, mu: Any, gamma: Any, K: Any) -> Any:
    """(14), for the rule (13): f - K / (mu N) sum_k |<grad f, grad F_k>| + the last term of (4)."""
    return point.loss - K / mu * abs(point.inner).mean() + _remainder(constants, mu, gamma) * point.square


def hetero_bound(point: Point, constants: Constants, mu: Any, gamma: Any, P: Any, psi: Any) -> Any:
    """(15), Theorem 3, for the rule (2) and each device's own gamma_k [N].

    f - 1/mu sum_k P_k (<grad f, grad F_k> - psi gamma_k ||grad f||^2) + (L B^2 / (2 mu'^2) + L B / (mu mu'))
    ||grad f||^2, where `psi` is the paper's or the corrected one.
    """
    discounted = point._replace(inner=point.inner - psi * gamma * point.square)
    return mean_bound(discounted, constants, mu, 0.0, P)


def lb_near_optimal_hetero_bound(point: Point, constants: Constants, mu: Any, gamma: Any, psi: Any) -> Any:
    """(17): (15) at P = P_lbh of (16)."""
    P = selection.lb_near_optimal_hetero(point.inner, gamma, psi, point.square)
    return hetero_bound(point, constants, mu, gamma, P, psi)


def _remainder(constants: Constants, mu: Any, gamma: Any) -> Any:
    """B (L (gamma + 1) / (mu mu') + gamma / mu + B L (1 + gamma)^2 / (2 mu'^2)), the last term of (4)."""
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    return B * (L * (gamma + 1) / (mu * strong) + gamma / mu + B * L * (1 + gamma) ** 2 / (2 * strong**2))


def psi(constants: Constants, mu: Any, K: Any) -> Any:
    """psi = B (L / (mu mu') + 1 / mu + 3 L B / (2 K mu'^2)) of (15) to (18), as printed in Sec. V."""
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    return B * (L / (mu * strong) + 1 / mu + 3 * L * B / (2 * K * strong**2))


def corrected_psi(constants: Constants, mu: Any) -> Any:
    """B (L / mu' + 1 + 3 L B mu / (2 mu'^2)): not the paper's psi, but the one the proof of (15) arrives at.

    The printed one keeps a factor 1/mu that (15) has already taken out of the sum, and a 1/K too many.
    """
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    return B * (L / strong + 1 + 3 * L * B * mu / (2 * strong**2))


def weights_bound(point: Point, constants: Constants, mu: Any, gamma: Any, weights: Any) -> Any:
    """Not the paper's: what its proof of (4) gives for any weights a_k [N] of the updates, and gamma_k [N].

    f - 1/mu sum_k a_k <grad f, grad F_k> + B/mu sum_k |a_k| (L (1 + gamma_k) / mu' + gamma_k) ||grad f||^2
    + L B^2 / (2 mu'^2) (sum_k |a_k| (1 + gamma_k))^2 ||grad f||^2, for every multiset and not in expectation alone.
    """
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    reach = abs(weights) @ (1 + gamma) / strong
    drift = L * reach + abs(weights) @ gamma
    return point.loss - point.inner @ weights / mu + B * (drift / mu + B * L * reach**2 / 2) * point.square


def fedprox_bound(point: Point, constants: Constants, mu: Any, gamma: Any, K: Any) -> Any:
    """f - rho ||grad f||^2 of FedProx (Li et al., Theorem 4), which Sec. III-C compares with (8)."""
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    sampling = B * (1 + gamma) * 2**0.5 / (strong * K**0.5)
    sampling += L * B**2 * (1 + gamma) ** 2 / (strong**2 * K) * (2 * (2 * K) ** 0.5 + 2)
    return point.loss - (1 / mu - sampling - _remainder(constants, mu, gamma)) * point.square


class Sides(NamedTuple):
    """The two sides of a statement: the left one as it is, the right one as printed."""

    left: Any
    right: Any


def squares_lemma(gram: Any, K: int) -> Sides:
    """(11), "=": E sum_{k in S_1} <grad F_k, grad_1 f>^2, and K/N sum_k <grad f, grad F_k>^2.

    `gram` holds <grad F_j, grad F_k>; S_1 is drawn uniformly with replacement. A device's own gradient is part
    of grad_1 f, so the left side is 1/(K N) sum_k ((||g_k||^2 + (K - 1) i_k)^2 + (K - 1) v_k), where i_k and v_k
    are the mean and the variance of <g_k, g_j> over j.
    """
    inner, own = gram.mean(axis=1), gram.diagonal()
    left = ((own + (K - 1) * inner) ** 2 + (K - 1) * gram.var(axis=1)).mean() / K
    return Sides(left, K * (inner**2).mean())


def sum_lemma(gram: Any, K: int) -> Sides:
    """(12), "<=": E sum_{k in S_2} <grad F_k, grad_2 f>, and K/N sum_k |<grad f, grad F_k>|.

    The left side is K ||grad f||^2 + tr Cov, Cov the covariance of the devices' gradients.
    """
    square, trace = gram.mean(), gram.diagonal().mean() - gram.mean()
    return Sides(K * square + trace, K * abs(gram.mean(axis=1)).mean())


class Played(NamedTuple):
    """One round, over all N devices: 0 for those that took no part."""

    K: int
    share: Array  # of the multiset
    weights: Array  # of their updates
    gamma: Array


Claim = Callable[[Point, Constants, Any, Played], Any]

# What the paper claims for a rule. (6) supposes exact signs, which only the selection (7) has; for (18) no bound
# is printed, so it is held against (15), from which it is derived.
CLAIMS: dict[Any, tuple[str, Claim]] = {
    rules.mean: ("(4)", lambda at, c, mu, r: mean_bound(at, c, mu, r.gamma.max(), r.share)),
    rules.signed: ("(6)", lambda at, c, mu, r: signed_bound(at, c, mu, r.gamma.max(), r.share)),
    rules.folb_two_set: ("(8)", lambda at, c, mu, r: lb_near_optimal_bound(at, c, mu, r.gamma.max())),
    rules.folb: ("(14)", lambda at, c, mu, r: folb_bound(at, c, mu, r.gamma.max(), r.K)),
    rules.folb_hetero: ("(15)", lambda at, c, mu, r: hetero_bound(at, c, mu, r.gamma, r.share, psi(c, mu, r.K))),
}


class Audit(NamedTuple):
    """One round from w^t, played once for each seed, beside what was promised of it.

    The bounds are on expectations over the selection, so it is the means over seeds that they speak of.
    A bound is infinite where it promises nothing: mu or mu' is not positive, or the rule has none.
    """

    equation: str | None  # whose right-hand side `bound` is
    constants: Constants  # as estimated at w^t
    before: float  # f(w^t)
    after: NDArray  # [seeds] f(w^{t+1})
    bound: NDArray  # [seeds] the paper's right-hand side, for the multiset that was drawn
    guaranteed: NDArray  # [seeds] `weights_bound`, for the weights that the rule gave
    gamma: NDArray  # [seeds] the largest gamma_k; above 1, Assumption 4 does not hold

    @property
    def decrease(self) -> float:
        """f(w^t) - f(w^{t+1}), the mean over seeds."""
        return self.before - float(np.mean(self.after))

    @property
    def promised(self) -> float:
        """The least decrease that the paper's bound promises, the mean over seeds."""
        return self.before - float(np.mean(self.bound))

    @property
    def assured(self) -> float:
        """The least decrease that `weights_bound` promises, the mean over seeds."""
        return self.before - float(np.mean(self.guaranteed))


def audit(
    problem: Problem,
    algorithm: Algorithm,
    params: Params,
    *,
    seeds: Sequence[int] = range(10),
    t: int = 1,
    constants: Constants | None = None,
) -> Audit:
    """Play round t from w^t = `params` with every seed, and hold it against the bound of the algorithm's rule.

    The step is the paper's, w^{t+1} = w^t + Delta, whatever the algorithm's server would make of Delta. Without
    `constants` they are estimated at w^t; where the Hessian changes along the way they may be too small.
    """
    check("seeds", list(seeds), len(seeds) > 0, "should be at least one")
    for seed in seeds:
        check("seeds", seed, 0 <= seed < 2**32, "should be between 0 and 2^32 - 1")
    constants = estimate(problem, params) if constants is None else constants
    algorithm = replace(algorithm, server=plain())
    before, after, bound, guaranteed, gamma = _audit(
        problem, algorithm, params, constants, jnp.asarray(seeds, jnp.uint32), jnp.int32(t)
    )
    equation, _ = CLAIMS.get(_function(algorithm), (None, None))
    arrays = (np.asarray(a) for a in (after, bound, guaranteed, gamma))
    return Audit(equation, Constants(*map(float, constants)), float(before), *arrays)


@jax.jit
def _audit(
    problem: Problem, algorithm: Algorithm, params: Params, constants: Constants, seeds: Array, t: Array
) -> tuple[Array, ...]:
    problem = replace(problem, record=("weights", "gamma"))
    measured = replace(algorithm, rule=_clamping(algorithm), clamp_gamma=False)
    mu, at = algorithm.solver.mu, survey(problem, params)
    _, claim = CLAIMS.get(_function(algorithm), (None, None))
    valid = (mu > 0) & (constants.mu_prime(mu) > 0)

    def one(seed: Array) -> tuple[Array, ...]:
        state, info = play(problem, measured, State(params, ()), seed, t)
        nobody = jnp.zeros_like(at.inner)
        played = Played(
            K=algorithm.selection.K,
            share=nobody.at[info.device].add(rules.fraction(info.times, jnp.sum(info.times))),
            weights=nobody.at[info.device].add(info.weights),
            gamma=nobody.at[info.device].max(info.gamma),
        )
        bound = jnp.inf if claim is None else claim(at, constants, mu, played)
        guaranteed = weights_bound(at, constants, mu, played.gamma, played.weights)
        return (
            objective(problem, state.params),
            jnp.where(valid, bound, jnp.inf),
            jnp.where(valid, guaranteed, jnp.inf),
            jnp.max(played.gamma),
        )

    return (at.loss, *jax.lax.map(one, seeds))


def _clamping(algorithm: Algorithm) -> Callable[[Round], Update]:
    """The algorithm's rule on gamma as it asks for it, so that the round's record can keep gamma unclamped."""

    def rule(round: Round) -> Update:
        if algorithm.clamp_gamma and round.gamma is not None:
            round = round._replace(gamma=jnp.clip(round.gamma, 0.0, 1.0))
        return algorithm.rule(round)

    return rule


def _function(algorithm: Algorithm) -> Any:
    """The rule without its numbers."""
    return getattr(algorithm.rule, "func", algorithm.rule)
