"""The paper's bounds on one round's loss.

A bound is a function of the `Point` w^t, the `Constants` of Assumptions 1 to 3, mu, the inexactness gamma of
Assumption 4 and the selection P. It returns the right-hand side as printed, for mu > 0 and mu' > 0. A bound that
depends on P is linear in P. So the same function takes the share of each device in a multiset in place of P, and
returns the right-hand side for that multiset; its mean over the multisets is the paper's.

Not all printed statements are true: docs/theory.md says which hold, under which condition, and which do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from folb.core import samplings
from folb_studies.theory.constants import Constants, Point


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
    return signed_bound(point, constants, mu, gamma, samplings.lb_near_optimal(point.inner))


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
    P = samplings.lb_near_optimal_hetero(point.inner, gamma, psi, point.square)
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
    """B (L / mu' + 1 + 3 L B mu / (2 mu'^2)): not the paper's psi, but the one that follows from the proof of (15).

    The printed psi keeps a factor 1/mu that (15) has already taken out of the sum, and it has one factor 1/K too many.
    """
    B, L, strong = constants.B, constants.L, constants.mu_prime(mu)
    return B * (L / strong + 1 + 3 * L * B * mu / (2 * strong**2))


def weights_bound(point: Point, constants: Constants, mu: Any, gamma: Any, weights: Any) -> Any:
    """Not the paper's: what its proof of (4) gives for any weights a_k [N] of the updates, and gamma_k [N].

    f - 1/mu sum_k a_k <grad f, grad F_k> + B/mu sum_k |a_k| (L (1 + gamma_k) / mu' + gamma_k) ||grad f||^2
    + L B^2 / (2 mu'^2) (sum_k |a_k| (1 + gamma_k))^2 ||grad f||^2, for every multiset and not only in expectation.
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
    """The two sides of a statement: the left one exact, the right one as printed."""

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
