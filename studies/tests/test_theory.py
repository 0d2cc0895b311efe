"""The paper's claims on quadratics whose constants are known, with expectations over all multisets.

Where the paper is right the claim is asserted; where it is not, what is true instead, and a counter-example.
`pytest -rP studies/tests/test_theory.py` prints the numbers of docs/theory.md.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from folb import algorithms, rules, system
from folb.core import round
from folb.data.federation import Federation
from folb.data.synthetic import synthetic, synthetic_iid
from folb.errors import InputError
from folb.models import Model, logistic
from folb.simulation import play as rounds
from folb.simulation import problem as problems
from folb.simulation import solve as local
from folb_studies import theory
from folb_studies.paper import quadratics
from folb_studies.paper.checks import logistic_gradients
from folb_studies.paper.quadratics import (
    DIM,
    FIRST,
    SECOND,
    UNIFORM,
    Case,
    K,
    N,
    Quadratics,
    cases,
    exceeds,
    losses,
    random_quadratics,
)
from folb_studies.theory.bounds import Constants, Point


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def test_theorem_1_and_proposition_1_hold(double):
    """(4), (6) and (8): no violation; and none promises a decrease unless mu' > L (1 + gamma) / (1 - gamma)."""
    silent = {"(4)": 0, "(6)": 0}
    tried = cases(0, 300) + cases(1, 100, against=True) + cases(2, 100, exact=True)
    for name, false in quadratics.theorem_1(tried).items():
        assert false.shape == (500,) and not false.any(), name
    for case in tried:
        at, c, mu, gamma = case.problem.point, case.problem.constants, case.mu, case.gamma.max()
        bounds = {
            "(4)": theory.mean_bound(at, c, mu, gamma, case.P),
            "(6)": theory.signed_bound(at, c, mu, gamma, case.P),
        }
        for name, bound in bounds.items():
            silent[name] += int(bound >= at.loss)
            if bound < at.loss:
                assert c.mu_prime(mu) * (1 - gamma) > c.L * (1 + gamma)
    print(f"{len(tried)} random quadratics: (4), (6), (8) violated in 0; right side at least f in {silent}")
    assert 0 < silent["(6)"] <= silent["(4)"] < len(tried)


def test_the_bound_for_any_weights_holds_for_every_multiset(double):
    """`weights_bound`, which is not the paper's, covers (2), (5), (9), (13) and (18) without expectations."""
    hetero = rules.FolbHetero(0.5)
    checked = 0
    for case in cases(3, 100) + cases(4, 50, against=True):
        at, c = case.problem.point, case.problem.constants
        for rule in (rules.Mean(), rules.Signed(), rules.FolbTwoSet(), rules.Folb(), hetero):
            for loss, weights in zip(*losses(rule, case, FIRST, SECOND), strict=True):
                assert not exceeds(loss, theory.weights_bound(at, c, case.mu, case.gamma, weights))
                checked += 1
    print(f"weights_bound: 0 of {checked} rounds above it")


def test_bounds_for_weights_contain_theorem_1():
    """With equal gamma_k and weights P, `weights_bound` is (4)."""
    at, c = Point(2.0, np.array([1.0, 3.0, 0.5]), 1.5), Constants(1.7, 0.8, 0.3)
    P = np.array([0.2, 0.5, 0.3])
    assert theory.weights_bound(at, c, 2.0, np.full(3, 0.4), P) == pytest.approx(
        theory.mean_bound(at, c, 2.0, 0.4, P), rel=1e-12
    )


def test_mu_zero_promises_nothing():
    """Sec. II-B says that the results hold at mu = 0 for strongly convex F_k: (4) is then infinite."""
    rng = np.random.default_rng(5)
    for _ in range(100):
        problem = random_quadratics(rng, scale=1.0, spread=1.0, lowest=0.1)
        bounds = [theory.mean_bound(problem.point, problem.constants, mu, 0.0, UNIFORM) for mu in (1e-2, 1e-4, 1e-6)]
        assert problem.constants.sigma < 0 < bounds[0] < bounds[1] < bounds[2]
        assert bounds[2] > 100 * bounds[0]


def enumerated_lemma(g, K):
    """The left sides of (11) and (12), over all N^K multisets."""
    chosen = g[np.array(list(itertools.product(range(len(g)), repeat=K)))]
    inner = np.einsum("mkd,md->mk", chosen, chosen.mean(axis=1))
    return (inner**2).sum(axis=1).mean(), inner.sum(axis=1).mean()


def test_lemma_1_left_sides_are_exact():
    rng = np.random.default_rng(6)
    for n, k in itertools.product((2, 3, 4), (1, 2, 3, 4)):
        g = rng.normal(size=n)[:, None] + rng.normal(size=(n, DIM))
        squares, total = enumerated_lemma(g, k)
        assert theory.squares_lemma(g @ g.T, k).left == pytest.approx(squares, rel=1e-10)
        assert theory.sum_lemma(g @ g.T, k).left == pytest.approx(total, rel=1e-10)
        covariance = np.cov(g.T, bias=True)
        assert total == pytest.approx(k * np.sum(g.mean(axis=0) ** 2) + np.trace(covariance), rel=1e-10)


def test_squares_lemma_is_no_equality():
    """(11): opposite gradients make the right side 0 and the left one not; equal gradients make them equal."""
    opposite, equal = np.array([[1.0, -1.0], [-1.0, 1.0]]), np.ones((2, 2))
    assert theory.squares_lemma(opposite, 2) == (1.0, 0.0)
    assert theory.squares_lemma(equal, 2) == (2.0, 2.0)
    rng = np.random.default_rng(7)
    ratios = []
    for k in (2, 10, 1000):
        g = 1 + rng.normal(size=(100, 5, DIM))
        sides = [theory.squares_lemma(h @ h.T, k) for h in g]
        ratios.append(np.median([left / right for left, right in sides]))
    print(f"(11), left / right, median of 100 random sets of 5 gradients: K = 2, 10, 1000: {np.round(ratios, 3)}")
    assert ratios[0] > ratios[1] > ratios[2] > 1
    assert ratios[2] < 1.05


def test_sum_lemma_is_no_upper_bound():
    """(12): where every device agrees with grad f in sign, the left side is the larger by tr Cov."""
    g = np.array([[1.0], [3.0]])
    sides = theory.sum_lemma(g @ g.T, 2)
    assert sides == (2 * 4 + 1, 2 * 4)
    rng = np.random.default_rng(8)
    false = 0
    for _ in range(1000):
        g = rng.normal(size=DIM) + rng.normal(size=(5, DIM))
        left, right = theory.sum_lemma(g @ g.T, 10)
        false += left > right
    print(f"(12) false in {false} of 1000 random sets of 5 gradients, K = 10")
    assert false > 500


@pytest.mark.parametrize("make, least", [(synthetic_iid, 1.0), (synthetic, 2.0)], ids=["iid", "1_1"])
def test_lemma_1_on_the_synthetic_data(make, least):
    """Both sides of (11) and (12) along 50 steps of gradient descent, K = 10."""
    federation, w = make(sizes="published"), np.zeros(610)
    squares, sums = [], []
    for _ in range(51):
        g = logistic_gradients(federation, w)
        left, right = theory.squares_lemma(g @ g.T, 10)
        squares.append(left / right)
        left, right = theory.sum_lemma(g @ g.T, 10)
        sums.append(left / right)
        w = w - 0.5 * g.mean(axis=0)
    print(
        f"{federation.name}, K = 10, 50 gradient steps: left / right of (11) {min(squares):.2f} to {max(squares):.1f}, "
        f"of (12) {min(sums):.2f} to {max(sums):.1f}"
    )
    assert min(squares) > least
    assert min(sums) > 1


def test_theorem_2_fails(double):
    """(9) does not attain (8): exact enumeration over both sets, exact local solutions."""
    violated = quadratics.theorem_2(cases(9, 500, exact=True, scale=2.0, spread=3.0)).sum()
    print(f"Theorem 2: (9) above (8) in {violated} of 500 random quadratics, N = 3, K = 2")
    assert violated > 50


@pytest.mark.parametrize("near", [1e-1, 1e-2, 1e-3])
def test_theorem_2_fails_by_any_factor(double, near):
    """g = (1, -1 + e, 2): S_2 = {1, 2} makes the denominator of (9) about e^2, and f(w^{t+1}) about 1 / e^4."""
    g = np.zeros((N, DIM))
    g[:, 0] = 1, -1 + near, 2
    problem = Quadratics(g, np.tile(np.eye(DIM), (N, 1, 1)), UNIFORM)
    mu = 10.0
    case = Case(problem, mu, UNIFORM, np.zeros(N), problem.solve(mu, np.zeros((N, DIM))))
    expected = losses(rules.FolbTwoSet(), case, FIRST, SECOND)[0].mean()
    bound = float(theory.lb_near_optimal_bound(problem.point, problem.constants, mu, 0.0))
    print(f"e = {near}: expected f(w+) - f(w) = {expected:.3g}, (8) allows {bound:.3g}")
    assert bound < 0.2
    assert expected > 0.005 / near**4


def test_folb_bound_is_too_strong_by_a_factor_K(double):
    """(14): devices with one linear loss <g, w> decrease f by ||g||^2 / mu; K times that is claimed."""
    g, mu = np.array([1.0, 2.0, 2.0]), 2.0
    problem = Quadratics(np.tile(g, (N, 1)), np.zeros((N, DIM, DIM)), UNIFORM)
    case = Case(problem, mu, UNIFORM, np.zeros(N), problem.solve(mu, np.zeros((N, DIM))))
    at, c = problem.point, problem.constants
    assert c == (1.0, 0.0, 0.0)
    assert losses(rules.Folb(), case)[0] == pytest.approx(-(g @ g) / mu)
    assert theory.folb_bound(at, c, mu, 0.0, K) == pytest.approx(-K * (g @ g) / mu)
    assert theory.folb_bound(at, c, mu, 0.0, 1) == pytest.approx(-(g @ g) / mu)


def test_folb_bound_fails_without_the_factor_K_too(double):
    """(13) weighs by estimated inner products: not even 1/N sum_k |<grad f, grad F_k>| / mu is assured."""
    tried = cases(10, 300, exact=True)
    printed, without = (false.sum() for false in quadratics.one_set(tried).values())
    print(f"(14) violated in {printed} of {len(tried)}, with 1 for K in {without}; N = 3, K = 2, exact solutions")
    assert printed > 100
    assert 0 < without < printed


def test_theorem_3_fails_for_mu_above_1(double):
    """(15) with the printed psi; with `corrected_psi` it holds, and so it does as printed for mu <= 1/K."""
    found = quadratics.theorem_3(11, 300)
    for by_psi in found.values():
        assert len(by_psi["printed"]) == 300 and not by_psi["corrected"].any()
    printed = {name: int(by_psi["printed"].sum()) for name, by_psi in found.items()}
    print(f"(15) violated, of 300 each: {printed}; with corrected_psi 0")
    assert printed["mu <= 1/K"] == 0
    assert printed["mu > 1"] > 50


def test_theorem_3_on_a_linear_loss():
    """Residuals gamma g decrease <g, w> by (1 - gamma) ||g||^2 / mu; (15) claims 1 - gamma / mu of it."""
    g, mu, gamma = np.array([1.0, 2.0, 2.0]), 4.0, 0.5
    problem = Quadratics(np.tile(g, (N, 1)), np.zeros((N, DIM, DIM)), UNIFORM)
    after = problem.loss(problem.solve(mu, gamma * problem.g)[0])
    bound = partial(theory.hetero_bound, problem.point, problem.constants, mu, np.full(N, gamma), UNIFORM)
    assert after == pytest.approx(-(1 - gamma) * (g @ g) / mu)
    assert bound(theory.psi(problem.constants, mu, K)) == pytest.approx(-(1 - gamma / mu) * (g @ g) / mu)
    assert bound(theory.corrected_psi(problem.constants, mu)) == pytest.approx(after)


def test_theorem_3_fails_below_mu_1_for_large_K():
    """(15) divides the last term of psi by K: ten devices, the first drawn ten times, mu = 0.75."""
    after, printed, corrected = quadratics.large_K()
    print(f"mu = 0.75, K = 10: f(w+) - f(w) = {after:.2f}, (15) allows {printed:.2f}, corrected {corrected:.2f}")
    assert printed < after < corrected


def test_printed_psi_is_large_enough_up_to_mu_1_over_K_and_never_above_1():
    rng = np.random.default_rng(12)
    for _ in range(1000):
        c = Constants(1 + rng.exponential(), rng.exponential(), -rng.exponential())
        k = int(rng.integers(1, 20))
        mu = rng.uniform(0.01, 1) / k
        assert theory.psi(c, mu, k) >= theory.corrected_psi(c, mu)
        mu = 1 + rng.exponential()
        assert theory.psi(c, mu, k) < theory.corrected_psi(c, mu)


def test_hetero_selection_holds_when_corrected_and_may_lose_to_uniform(double):
    """(17) with `corrected_psi` holds; but (16) draws a device with I_k < 0 the more often the worse it is."""
    tried = cases(13, 300)
    found = quadratics.hetero_selection(tried)
    printed, worse = found.printed.sum(), found.weaker.sum()
    assert not found.corrected.any()
    print(f"(17) violated in {printed} of {len(tried)}, with corrected_psi in 0; weaker than uniform P in {worse}")
    assert printed > 0
    assert worse > 0


def test_near_optimal_selection_lies_between_uniform_and_the_single_best_device(double):
    """E sum_{k in S} |<grad f, grad F_k>| is K sum_k P_k |...|, linear in P: (7) is not its maximum."""
    gains = quadratics.near_optimal(14, 300)
    assert np.all((gains >= -1e-12) & (gains <= 1 + 1e-12))
    print(f"(7) gains a median {np.median(gains):.2f} of the way from uniform to the best single device (N = 3)")
    assert 0 < np.median(gains) < 1


def test_comparison_with_fedprox_needs_the_uniform_objective(double):
    """(8) is below FedProx's bound for f = 1/N sum_k F_k; with p_k the chain of Sec. III-C breaks."""
    found = quadratics.against_fedprox(15, 1000)
    assert not found["uniform"].broken.any()
    assert not any(false.any() for false in found["uniform"].larger.values())
    broken = found["p_k"].broken.sum()
    weaker = {k: int(false.sum()) for k, false in found["p_k"].larger.items()}
    print(f"p_k weights: the chain breaks in {broken} of 1000; (8) above FedProx's bound, by K: {weaker}")
    assert broken > 100
    assert weaker[10_000] > 100


def linear_model(loss) -> Model:
    """A model with two leaves, {"w": [3], "b": []}, whose loss is a function of <w, x> + b and y."""
    return Model(
        init=lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())},
        loss=lambda params, x, y: loss(x @ params["w"] + params["b"], y),
        predict=lambda params, x: jnp.zeros(len(x), jnp.int32),
    )


regression = linear_model(lambda z, y: (z - y) ** 2 / 2)  # curvature 1
waves = linear_model(lambda z, y: 4 - 4 * jnp.cos((z - y) / 2))  # curvature cos((z - y) / 2)
PARAMS = {"w": jnp.array([0.5, -1.0, 0.25]), "b": jnp.array(0.1)}


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Thirteen devices, one of them larger than a block of `device.gradients`."""
    rng = np.random.default_rng(16)
    sizes = [*rng.integers(8, 20, 12), local.BLOCK + 30]
    owner = np.repeat(np.arange(13), sizes)
    x = rng.normal(size=(len(owner), 3)) * rng.uniform(0.5, 2, 3) + rng.normal(size=(13, 3))[owner]
    y = rng.integers(0, 4, len(owner))
    return Federation.from_arrays("lines", x, y, owner, np.zeros(len(owner)), classes=4)


def exact(federation, share, slope, curvature) -> tuple[float, float, float]:
    """B, L and sigma in NumPy, from the first two derivatives of the loss."""
    gradients, hessians = [], []
    for start, size in zip(federation.train.start, federation.train.size, strict=True):
        rows = slice(start, start + size)
        x, y = np.column_stack([federation.train.x[rows], np.ones(size)]).astype(float), federation.train.y[rows]
        z = x @ [0.5, -1.0, 0.25, 0.1]
        gradients.append(slope(z - y) @ x / size)
        hessians.append(x.T * curvature(z - y) @ x / size)
    eigenvalues = np.linalg.eigvalsh(hessians)
    B = np.linalg.norm(gradients, axis=1).max() / np.linalg.norm(share @ np.array(gradients))
    return B, np.abs(eigenvalues).max(), -eigenvalues.min()


@pytest.mark.parametrize(
    "model, slope, curvature, convex",
    [
        (regression, lambda r: r, np.ones_like, True),
        (waves, lambda r: 2 * np.sin(r / 2), lambda r: np.cos(r / 2), False),
    ],
    ids=["regression", "waves"],
)
def test_estimates_are_the_exact_constants(federation, model, slope, curvature, convex):
    problem = problems.problem(federation, model, objective="samples")
    expected = exact(federation, np.asarray(problem.share, float), slope, curvature)
    found = theory.estimate(problem, PARAMS)
    print(f"exact B, L, sigma: {np.round(expected, 4)}; estimated: {np.round(found, 4)}")
    assert (expected[2] < 0) == convex
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert np.all(np.array(found[1:]) <= np.array(expected[1:]) + 1e-4)  # from below


def test_survey_gives_the_point(federation):
    problem = problems.problem(federation, regression)
    at = theory.survey(problem, PARAMS)
    x = np.column_stack([federation.train.x, np.ones(len(federation.train.y))]).astype(float)
    residual = x @ [0.5, -1.0, 0.25, 0.1] - federation.train.y
    weight = np.repeat(1 / (13 * federation.train.size), federation.train.size)
    gradient = (weight * residual) @ x
    assert at.loss == pytest.approx(weight @ residual**2 / 2, rel=1e-5)
    assert at.square == pytest.approx(gradient @ gradient, rel=1e-4)
    assert at.inner.mean() == pytest.approx(float(at.square), rel=1e-4)


def plain_linear(rows) -> problems.Problem:
    """Loss <x, w>: one sample x per device."""
    x = np.asarray(rows, float)
    federation = Federation.from_arrays("linear", x, np.zeros(len(x)), np.arange(len(x)), np.zeros(len(x)), classes=2)
    model = Model(lambda key: jnp.zeros(3), lambda w, x, y: x @ w, lambda w, x: jnp.zeros(len(x), jnp.int32))
    return problems.problem(federation, model, system=system.fixed(work=1))


def test_no_dissimilarity_at_a_stationary_point():
    """Two devices with opposite gradients: grad f = 0, and there is no B."""
    found = theory.estimate(plain_linear([[1, 0, 0], [-1, 0, 0]]), jnp.zeros(3))
    assert np.isinf(found.B)


FULL = {"local.unit": "gradient", "select.K": 4}
SEEDS = range(20)


@pytest.fixture(scope="module")
def lines(federation):
    return problems.problem(federation, regression, system=system.uniform(low=1, high=8))


@pytest.fixture(scope="module")
def constants(lines):
    return theory.estimate(lines, PARAMS)


@pytest.mark.parametrize(
    "algorithm, equation",
    [
        (algorithms.fedprox(local={"mu": 400.0, "lr": 0.0025}, **FULL), "(4)"),
        (algorithms.fednu_direct(local={"mu": 400.0, "lr": 0.0025}, rule="signed", **FULL), "(6)"),
        (algorithms.folb_hetero(local={"mu": 400.0, "lr": 0.0025}, rule={"psi": 0.1}, **FULL), "(15)"),
    ],
    ids=["mean", "signed", "hetero"],
)
def test_audit_of_a_regression(lines, constants, algorithm, equation):
    """The constants of a quadratic are global, so what is proven holds for every round that is played."""
    found = theory.audit(lines, algorithm, PARAMS, seeds=SEEDS, constants=constants)
    print(f"{equation}: decrease {found.decrease:.4f}, promised {found.promised:.4f}, assured {found.assured:.4f}")
    assert found.equation == equation
    assert found.after.shape == found.bound.shape == found.guaranteed.shape == (20,)
    assert np.all(found.after <= found.guaranteed)
    assert found.decrease > 0 and found.promised > 0
    assert np.all((found.gamma > 0) & (found.gamma < 1))
    if equation != "(15)":  # (15) is not proven for (18)
        assert np.all(found.after <= found.bound)
        # gamma of (4) and (6) is the round's largest, so `weights_bound` is never the weaker
        assert np.all(found.guaranteed <= found.bound * (1 + 1e-5))


def test_audit_replays_the_simulator(lines, constants):
    """`after` is f at the parameters that `rounds.play` reaches, with the plain server step."""
    algorithm = algorithms.fedprox(local={"mu": 400.0, "lr": 0.0025}, **FULL)
    found = theory.audit(lines, algorithm, PARAMS, seeds=SEEDS, t=3, constants=constants)
    state, _ = jax.jit(rounds.play)(lines, algorithm, round.State(PARAMS, ()), 7, 3)
    assert found.after[7] == pytest.approx(float(theory.objective(lines, state.params)), rel=1e-6)
    assert found.before == pytest.approx(float(theory.survey(lines, PARAMS).loss))
    momentum = algorithms.fedprox(local={"mu": 400.0, "lr": 0.0025}, server={"name": "momentum", "lr": 3.0}, **FULL)
    assert (
        theory.audit(lines, momentum, PARAMS, seeds=SEEDS, t=3, constants=constants).after.tolist()
        == found.after.tolist()
    )


def test_audit_shows_the_factor_K_of_folb():
    """(14) through the simulator: identical linear losses, solved exactly in one step of 1/mu."""
    problem = plain_linear(np.tile([1.0, 2.0, 2.0], (6, 1)))
    algorithm = algorithms.folb(local={"mu": 2.0, "lr": 0.5}, **FULL)
    found = theory.audit(problem, algorithm, jnp.zeros(3), seeds=range(5))
    print(f"(14): decrease {found.decrease:.4f}, promised {found.promised:.4f}, assured {found.assured:.4f}")
    assert found.equation == "(14)"
    assert found.constants == pytest.approx((1.0, 0.0, 0.0), abs=1e-6)
    assert found.gamma == pytest.approx(0.0, abs=1e-6)
    assert found.decrease == pytest.approx(9 / 2, rel=1e-5)
    assert found.promised == pytest.approx(4 * 9 / 2, rel=1e-5)
    assert found.assured == pytest.approx(9 / 2, rel=1e-5)


def test_audit_says_when_there_is_no_bound(lines, constants):
    """The bound is infinite if mu = 0, or if the paper has no bound for the rule."""
    by_samples = theory.audit(
        lines,
        algorithms.fedprox(local={"mu": 400.0, "lr": 0.0025}, rule={"weights": "samples"}, **FULL),
        PARAMS,
        seeds=SEEDS,
        constants=constants,
    )
    assert by_samples.equation is None
    assert np.all(np.isinf(by_samples.bound)) and np.all(np.isfinite(by_samples.guaranteed))
    avg = theory.audit(
        lines, algorithms.fedprox(local={"mu": 0.0, "lr": 0.02}, **FULL), PARAMS, seeds=SEEDS, constants=constants
    )
    assert np.all(np.isinf(avg.bound)) and np.all(np.isinf(avg.guaranteed))
    with pytest.raises(InputError, match=r"seeds = \[\]"):
        theory.audit(lines, algorithms.fedprox(**FULL), PARAMS, seeds=[])
    with pytest.raises(InputError, match="seeds = -1"):
        theory.audit(lines, algorithms.fedprox(**FULL), PARAMS, seeds=[-1])


def test_the_bounds_say_nothing_of_the_paper_s_own_settings():
    """Synthetic_1_1, logistic, the published sizes: mu = 1 is below L, so no bound promises a decrease."""
    published = synthetic(sizes="published")
    problem = problems.problem(published, logistic(published.shape, published.classes))
    start = problem.model.init(jax.random.key(0))
    found, at = theory.estimate(problem, start, 20), theory.survey(problem, start)
    P = np.full(published.N, 1 / published.N)
    bound = theory.mean_bound(at, found, 1.0, 0.0, P)
    print(
        f"{published.name} at w = 0: B = {found.B:.2f}, L = {found.L:.2f}, sigma = {found.sigma:.1g}; "
        f"f = {at.loss:.3f}, (4) at mu = 1, gamma = 0: {bound:.3f}"
    )
    assert found.L > 1
    assert bound > at.loss
