"""A round compared with the bound that the paper claims for its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import rules
from folb.core.algorithm import Algorithm
from folb.core.round import State
from folb.core.rules import Round, Rule, Update
from folb.core.server_step import Plain
from folb.errors import InputError, check
from folb.simulation.play import play
from folb.simulation.problem import Problem
from folb.typing import NDArray, Params
from folb_studies.theory.bounds import (
    folb_bound,
    hetero_bound,
    lb_near_optimal_bound,
    mean_bound,
    psi,
    signed_bound,
    weights_bound,
)
from folb_studies.theory.constants import Constants, Point, estimate, objective, survey


class Played(NamedTuple):
    """One round, over all N devices: 0 for a device that took no part."""

    K: int
    share: Array  # of the multiset
    weights: Array  # of their updates
    gamma: Array


Claim = Callable[[Point, Constants, Any, Played], Any]


# What the paper claims for a rule. (6) needs exact signs, which only the selection (7) has. The paper prints no bound
# for (18), so it is compared with (15), from which it is derived.
CLAIMS: dict[type[Rule], tuple[str, Claim]] = {
    rules.Mean: ("(4)", lambda at, c, mu, r: mean_bound(at, c, mu, r.gamma.max(), r.share)),
    rules.Signed: ("(6)", lambda at, c, mu, r: signed_bound(at, c, mu, r.gamma.max(), r.share)),
    rules.FolbTwoSet: ("(8)", lambda at, c, mu, r: lb_near_optimal_bound(at, c, mu, r.gamma.max())),
    rules.Folb: ("(14)", lambda at, c, mu, r: folb_bound(at, c, mu, r.gamma.max(), r.K)),
    rules.FolbHetero: ("(15)", lambda at, c, mu, r: hetero_bound(at, c, mu, r.gamma, r.share, psi(c, mu, r.K))),
}


class Audit(NamedTuple):
    """One round from w^t, played once for each seed, and what the bounds promise for it.

    The bounds are on expectations over the selection, so they are about the means over seeds. A bound is infinite if it
    promises nothing: mu or mu' is not positive, or the rule has no bound.
    """

    equation: str | None  # the equation whose right-hand side is `bound`
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
    """Play round t from w^t = `params` with every seed, and compare it with the bound of the algorithm's rule.

    The step is the paper's, w^{t+1} = w^t + Delta, whatever the algorithm's server step is. If no `constants` are
    given, they are estimated at w^t; they may be too small if the Hessian changes along the way.
    """
    if algorithm.asynchrony is not None:
        expected = "should be None: the bounds are on rounds whose devices start from one model"
        raise InputError("concurrency", algorithm.asynchrony.concurrency, expected)
    check("seeds", list(seeds), len(seeds) > 0, "should be at least one")
    for seed in seeds:
        check("seeds", seed, 0 <= seed < 2**32, "should be between 0 and 2^32 - 1")
    constants = estimate(problem, params) if constants is None else constants
    algorithm = algorithm.but(server=Plain())
    before, after, bound, guaranteed, gamma = _audit(
        problem, algorithm, params, constants, jnp.asarray(seeds, jnp.uint32), jnp.int32(t)
    )
    equation, _ = _claim(algorithm)
    arrays = (np.asarray(a) for a in (after, bound, guaranteed, gamma))
    return Audit(equation, Constants(*map(float, constants)), float(before), *arrays)


@jax.jit
def _audit(
    problem: Problem, algorithm: Algorithm, params: Params, constants: Constants, seeds: Array, t: Array
) -> tuple[Array, ...]:
    problem = replace(problem, record=("weights", "gamma"))
    rule = Clamping(algorithm.rule) if algorithm.clamp_gamma else algorithm.rule
    measured = algorithm.but(rule=rule, clamp_gamma=False)
    mu, at = algorithm.solver.mu, survey(problem, params)
    _, claim = _claim(algorithm)
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


class Clamping(Rule):
    """A rule that sees gamma clamped, while the round's record keeps it unclamped."""

    rule: Rule

    def update(self, round: Round) -> Update:
        """The rule's own."""
        if round.gamma is not None:
            round = round._replace(gamma=jnp.clip(round.gamma, 0.0, 1.0))
        return self.rule.update(round)


def _claim(algorithm: Algorithm) -> tuple[str, Claim] | tuple[None, None]:
    """The equation for the rule, and its bound; None if something stands around it, for which nothing is claimed."""
    rule = algorithm.rule
    by_samples = isinstance(rule, rules.ByShare) and rule.by_samples  # (4) is for equal weights
    plain = algorithm.guard is None and algorithm.robust is None and not by_samples
    return CLAIMS.get(type(rule), (None, None)) if plain else (None, None)
