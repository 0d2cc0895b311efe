"""Random quadratics, on which the paper's statements can be checked exactly.

F_k(w) = <g_k, w> + w^T A_k w / 2 has known B, L and sigma, and local solutions with known gamma_k. With N = 3 and
K = 2, an expectation is a sum over all N^K multisets. The library's own rules aggregate the rounds.
For each statement, a check returns an array that says in which cases the statement is false.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from folb.core import rules, samplings
from folb.core.rules import Gradients, Round, Rule
from folb.typing import NDArray
from folb_studies.theory import bounds
from folb_studies.theory.constants import Constants, Point

N, K, DIM = 3, 2, 3
MULTISETS = np.array(list(itertools.product(range(N), repeat=K)))
FIRST, SECOND = np.repeat(MULTISETS, len(MULTISETS), axis=0), np.tile(MULTISETS, (len(MULTISETS), 1))  # all pairs
UNIFORM = np.full(N, 1 / N)
TOLERANCE = 1e-9


class Quadratics(NamedTuple):
    """The devices' losses seen from w^t = 0, so that f(w^t) = 0; f has weights `share`."""

    g: NDArray
    A: NDArray
    share: NDArray

    @property
    def constants(self) -> Constants:
        """B, L and sigma."""
        eigenvalues = np.linalg.eigvalsh(self.A)
        B = np.linalg.norm(self.g, axis=1).max() / np.linalg.norm(self.share @ self.g)
        return Constants(B, np.abs(eigenvalues).max(), -eigenvalues.min())

    @property
    def point(self) -> Point:
        """What the bounds use of w^t."""
        g = self.share @ self.g
        return Point(0.0, self.g @ g, g @ g)

    def loss(self, w: NDArray) -> NDArray:
        """f at each row of w."""
        A = np.tensordot(self.share, self.A, 1)
        return w @ (self.share @ self.g) + np.einsum("...i,ij,...j->...", w, A, w) / 2

    def solve(self, mu: float, residual: NDArray) -> NDArray:
        """Each device's w_k, with grad h_k(w_k) = residual_k; 0 is the exact solution."""
        H = self.A + mu * np.eye(self.g.shape[1])
        return np.linalg.solve(H, (residual - self.g)[..., None])[..., 0]


class Case(NamedTuple):
    """A problem, mu, P, and solutions whose inexactness is gamma_k exactly."""

    problem: Quadratics
    mu: float
    P: NDArray
    gamma: NDArray
    delta: NDArray


def random_quadratics(
    rng: np.random.Generator, *, scale: float, spread: float, share: NDArray = UNIFORM, lowest: float = -0.5
) -> Quadratics:
    """A problem whose gradients differ by `spread` and whose curvature goes up to `scale`."""
    count = len(share)
    Q = np.linalg.qr(rng.normal(size=(count, DIM, DIM)))[0]
    A = np.einsum("kij,kj,klj->kil", Q, scale * rng.uniform(lowest, 1, (count, DIM)), Q)
    return Quadratics(rng.normal(size=DIM) + spread * rng.normal(size=(count, DIM)), A, share)


def random_case(
    rng: np.random.Generator,
    *,
    mu: float | None = None,
    scale: float | None = None,
    spread: float | None = None,
    exact: bool = False,
    against: bool = False,
) -> Case:
    """With `against` the residuals point along grad f, where inexactness does most harm."""
    scale = 10 ** rng.uniform(-3, 0.3) if scale is None else scale
    spread = 10 ** rng.uniform(-1.5, 0.7) if spread is None else spread
    problem = random_quadratics(rng, scale=scale, spread=spread)
    mu = 10 ** rng.uniform(-1, 1) if mu is None else mu
    mu = max(mu, 1.2 * problem.constants.sigma)
    gamma = np.zeros(N) if exact else rng.uniform(0, 1, N) * rng.choice([0.05, 1])
    residual = np.tile(problem.share @ problem.g, (N, 1)) if against else rng.normal(size=(N, DIM))
    residual *= (gamma * np.linalg.norm(problem.g, axis=1) / np.linalg.norm(residual, axis=1))[:, None]
    return Case(problem, mu, rng.dirichlet(np.ones(N)), gamma, problem.solve(mu, residual))


def cases(seed: int, count: int, **settings: Any) -> list[Case]:
    """Random cases."""
    rng = np.random.default_rng(seed)
    return [random_case(rng, **settings) for _ in range(count)]


@cache
def _compiled(rule: Rule) -> Callable[..., Any]:
    """The library's rule for many multisets at once: (delta, grad, gamma, inner, second's grad) -> Update."""

    def one(delta: Any, grad: Any, gamma: Any, inner: Any, second: Any) -> Any:
        ones = jnp.ones(len(delta))
        return rule.update(
            Round(jnp.zeros(delta.shape[1]), ones, ones, ones, delta, grad, gamma, inner, Gradients(second, ones, ones))
        )

    return jax.jit(jax.vmap(one))


def losses(rule: Rule, case: Case, S: NDArray = MULTISETS, second: NDArray | None = None) -> tuple[NDArray, NDArray]:
    """f(w^{t+1}) after each multiset of S, and the weight each device got in it [multisets, N]."""
    g, second = case.problem.g, S if second is None else second
    update = _compiled(rule)(case.delta[S], g[S], case.gamma[S], case.problem.point.inner[S], g[second])
    weights = np.zeros((len(S), N))
    np.add.at(weights, (np.arange(len(S))[:, None], S), np.asarray(update.weights))
    return case.problem.loss(np.asarray(update.delta)), weights


def chances(P: NDArray) -> NDArray:
    """The probability of each multiset."""
    return P[MULTISETS].prod(axis=1)


def exceeds(left: Any, right: Any) -> bool:
    """Whether left > right, beyond rounding."""
    return bool(left > right + TOLERANCE * (1 + abs(right)))


def theorem_1(tried: Sequence[Case]) -> dict[str, NDArray]:
    """Where (4), (6) and (8) are false."""
    false: dict[str, list[bool]] = {"(4)": [], "(6)": [], "(8)": []}
    for case in tried:
        at, c, mu, gamma = case.problem.point, case.problem.constants, case.mu, case.gamma.max()
        mean, signed = losses(rules.Mean(), case)[0], losses(rules.Signed(), case)[0]
        P_lb = np.asarray(samplings.lb_near_optimal(at.inner))
        false["(4)"].append(exceeds(chances(case.P) @ mean, bounds.mean_bound(at, c, mu, gamma, case.P)))
        false["(6)"].append(exceeds(chances(case.P) @ signed, bounds.signed_bound(at, c, mu, gamma, case.P)))
        false["(8)"].append(exceeds(chances(P_lb) @ signed, bounds.lb_near_optimal_bound(at, c, mu, gamma)))
    return {name: np.array(values) for name, values in false.items()}


def theorem_2(tried: Sequence[Case]) -> NDArray:
    """Where (9), with exact local solutions, does not attain (8)."""

    def false(case: Case) -> bool:
        bound = bounds.lb_near_optimal_bound(case.problem.point, case.problem.constants, case.mu, 0.0)
        return exceeds(losses(rules.FolbTwoSet(), case, FIRST, SECOND)[0].mean(), bound)

    return np.array([false(case) for case in tried])


def one_set(tried: Sequence[Case]) -> dict[str, NDArray]:
    """Where (14), with exact local solutions, is false: as printed, and with 1 in place of its factor K."""
    false: dict[str, list[bool]] = {"as printed": [], "with 1 for K": []}
    for case in tried:
        at, c = case.problem.point, case.problem.constants
        expected = losses(rules.Folb(), case)[0].mean()
        false["as printed"].append(exceeds(expected, bounds.folb_bound(at, c, case.mu, 0.0, K)))
        false["with 1 for K"].append(exceeds(expected, bounds.folb_bound(at, c, case.mu, 0.0, 1)))
    return {name: np.array(values) for name, values in false.items()}


RANGES = {"mu <= 1/K": (0.05, 1 / K), "1/K < mu <= 1": (1 / K, 1.0), "mu > 1": (1.0, 30.0)}


def theorem_3(seed: int, count: int) -> dict[str, dict[str, NDArray]]:
    """Where (15) is false, with the printed psi and with the corrected one, by the range of mu."""
    rng = np.random.default_rng(seed)
    counts = {}
    for name, (low, high) in RANGES.items():
        mus = np.exp(rng.uniform(np.log(low), np.log(high), 2 * count))
        made = [random_case(rng, mu=mu, against=i % 2 == 0) for i, mu in enumerate(mus)]
        printed, corrected = [], []
        for case in [case for case in made if case.mu <= high][:count]:  # in some cases sigma raises mu
            at, c = case.problem.point, case.problem.constants
            expected = chances(case.P) @ losses(rules.Mean(), case)[0]
            bound = partial(bounds.hetero_bound, at, c, case.mu, case.gamma, case.P)
            printed.append(exceeds(expected, bound(bounds.psi(c, case.mu, K))))
            corrected.append(exceeds(expected, bound(bounds.corrected_psi(c, case.mu))))
        counts[name] = {"printed": np.array(printed), "corrected": np.array(corrected)}
    return counts


def large_K() -> tuple[float, float, float]:
    """A case with mu < 1 that breaks (15): f(w^{t+1}), and the bound with the printed and the corrected psi.

    Ten devices, the first drawn ten times, mu = 0.75: the printed psi divides its last term by K.
    """
    mu, K = 0.75, 10
    g, A = np.full((10, 1), -2 / 9), np.full((10, 1, 1), 0.75)
    g[0], A[0] = 1, -0.5
    problem = Quadratics(g, A, np.full(10, 0.1))
    c = problem.constants
    after = problem.loss(problem.solve(mu, -g)[0])  # gamma_1 = 1: the residual -g_1 doubles the step
    bound = partial(bounds.hetero_bound, problem.point, c, mu, np.ones(10), np.eye(10)[0])
    return float(after), float(bound(bounds.psi(c, mu, K))), float(bound(bounds.corrected_psi(c, mu)))


def near_optimal(seed: int, count: int) -> NDArray:
    """How far (7) goes on the way from uniform selection to the best selection, a single device."""
    rng = np.random.default_rng(seed)
    gains = []
    for _ in range(count):
        magnitude = np.abs(random_quadratics(rng, scale=1, spread=10 ** rng.uniform(-1, 1)).point.inner)
        P = np.asarray(samplings.lb_near_optimal(magnitude))
        for Q in (P, UNIFORM):
            assert np.isclose(chances(Q) @ magnitude[MULTISETS].sum(axis=1), K * Q @ magnitude)  # linear in P
        gains.append((P @ magnitude - magnitude.mean()) / (magnitude.max() - magnitude.mean()))
    return np.array(gains)


class Selected(NamedTuple):
    """Of (17): in which cases it is false, and in which it is weaker than (15) at uniform P."""

    printed: NDArray
    corrected: NDArray
    weaker: NDArray


def hetero_selection(tried: Sequence[Case]) -> Selected:
    """Where (17), the bound at the selection (16), is false: with the printed psi, and with the corrected one."""
    printed: list[bool] = []
    corrected: list[bool] = []
    weaker: list[bool] = []
    for case in tried:
        at, c, mu, gamma = case.problem.point, case.problem.constants, case.mu, case.gamma
        loss = losses(rules.Mean(), case)[0]
        right = bounds.corrected_psi(c, mu)
        for psi, false in ((bounds.psi(c, mu, K), printed), (right, corrected)):
            P = np.asarray(samplings.lb_near_optimal_hetero(at.inner, jnp.asarray(gamma), psi, at.square))
            false.append(exceeds(chances(P) @ loss, bounds.lb_near_optimal_hetero_bound(at, c, mu, gamma, psi)))
        bound = bounds.lb_near_optimal_hetero_bound(at, c, mu, gamma, right)
        weaker.append(exceeds(bound, bounds.hetero_bound(at, c, mu, gamma, UNIFORM, right)))
    return Selected(np.array(printed), np.array(corrected), np.array(weaker))


class Compared(NamedTuple):
    """Of (8) and FedProx's bound: where the chain of Sec. III-C breaks, and where (8) is larger, for each K."""

    broken: NDArray
    larger: dict[int, NDArray]


def against_fedprox(seed: int, count: int) -> dict[str, Compared]:
    """The comparison of Sec. III-C, with the uniform objective and with weights p_k."""
    rng = np.random.default_rng(seed)
    compared = {}
    for name in ("uniform", "p_k"):
        broken: list[bool] = []
        larger: dict[int, list[bool]] = {10: [], 10_000: []}
        for _ in range(count):
            share = UNIFORM if name == "uniform" else rng.dirichlet(np.ones(N))
            scale, spread = 10 ** rng.uniform(-5, 0), 10 ** rng.uniform(-1, 0.5)
            problem = random_quadratics(rng, scale=scale, spread=spread, share=share)
            at, c = problem.point, problem.constants
            mu, gamma = max(10 ** rng.uniform(-1, 1), 1.2 * c.sigma), rng.uniform(0, 0.2)
            ours = bounds.lb_near_optimal_bound(at, c, mu, gamma)
            broken.append(bool(np.abs(at.inner).mean() < at.square * (1 - TOLERANCE)))
            for k, false in larger.items():
                false.append(exceeds(ours, bounds.fedprox_bound(at, c, mu, gamma, k)))
        compared[name] = Compared(np.array(broken), {k: np.array(false) for k, false in larger.items()})
    return compared
