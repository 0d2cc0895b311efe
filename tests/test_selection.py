"""Drawing devices, and the surveys of all N devices against N gradients taken one by one."""

from functools import partial
from itertools import combinations, permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import folb
from folb import algorithms, data, simulate, system
from folb.core import randomness, round, samplings, selection
from folb.core.randomness import uniform
from folb.core.rules import Rule, Update
from folb.core.upload import NORM
from folb.data.federation import Federation
from folb.errors import InputError
from folb.models import Model, cross_entropy, logistic
from folb.simulation import play as rounds
from folb.simulation import problem as problems
from folb.simulation import survey

P_SKEWED = np.array([0.05, 0.4, 0.0, 0.25, 0.3])


@partial(jax.jit, static_argnames=("K", "replacement"))
def _draws(u, P, K, replacement):
    return jax.vmap(lambda u: randomness.draw(u, P, K, replacement))(u)


def draws(P, K, replacement, number=1, seed=0):
    """`number` independent draws: devices and times, each [number, K]."""
    u = np.random.default_rng(seed).uniform(size=(number, K if replacement else len(P)))
    drawn = _draws(jnp.asarray(u, jnp.float32), jnp.asarray(P, jnp.float32), K, replacement)
    return np.asarray(drawn.device), np.asarray(drawn.times)


@pytest.mark.parametrize(("K", "replacement"), [(1, True), (4, True), (12, True), (1, False), (4, False)])
def test_multiplicities_add_up_to_K(K, replacement):
    device, times = draws(P_SKEWED, K, replacement, 500)
    assert np.all(times.sum(axis=1) == K)
    for chosen, m in zip(device, times, strict=True):
        distinct = chosen[m > 0]
        assert np.all(np.diff(distinct) > 0)  # ascending, so distinct
        assert np.all(np.diff(chosen) >= 0)
        assert dict(zip(distinct, m[m > 0], strict=True)) == dict(
            zip(*np.unique(chosen, return_counts=True), strict=True)
        )
        assert replacement or np.all(m == 1)


def test_all_devices_are_drawn_when_K_is_N():
    device, times = draws(np.full(5, 0.2), 5, False, 50)
    assert np.all(device == np.arange(5))
    assert np.all(times == 1)


@pytest.mark.parametrize("P", [P_SKEWED, np.full(7, 1 / 7)], ids=["skewed", "uniform"])
def test_frequencies_with_replacement_match_P(P):
    """9,000 independent draws: chi-square under its 1 - 1e-4 quantile, and never a device with P = 0."""
    device, times = draws(P, 3, True, 3000)
    counts = np.bincount(device.ravel(), times.ravel(), minlength=len(P))
    assert counts.sum() == 9000
    assert not counts[P == 0].any()
    expected = 9000 * P[P > 0]
    assert np.sum((counts[P > 0] - expected) ** 2 / expected) < chi2.ppf(1 - 1e-4, np.count_nonzero(P) - 1)


def test_draws_with_replacement_are_independent():
    """The chance to draw one device twice is the sum of P_k^2."""
    _, times = draws(P_SKEWED, 2, True, 4000)
    chance = np.sum(P_SKEWED**2)
    assert abs(np.mean(times.max(axis=1) == 2) - chance) < 4 * np.sqrt(chance * (1 - chance) / 4000)


@pytest.mark.parametrize("replacement", [True, False])
def test_uniform_draws_that_write_no_distribution_down(replacement):
    """Every device, and every pair, as often as it should be: chi-square under its 1 - 1e-4 quantile."""
    N, K, number = 6, 3, 4000
    words = np.random.default_rng(1).integers(0, 2**32, (number, K if replacement else 2), np.uint32)
    drawn = jax.jit(jax.vmap(lambda w: randomness.draw_uniform(w, N, K, replacement)))(words)
    times = np.zeros((number, N))
    np.add.at(times, (np.arange(number)[:, None], drawn.device), drawn.times)
    assert np.all(times.sum(axis=1) == K) and (replacement or times.max() == 1)
    pairs = list(combinations(range(N), 2))
    counts = np.array([np.sum((times[:, a] > 0) & (times[:, b] > 0)) for a, b in pairs])
    inside = 1 - 2 * (5 / 6) ** K + (4 / 6) ** K if replacement else K * (K - 1) / (N * (N - 1))
    assert np.sum((counts - number * inside) ** 2 / (number * inside)) < chi2.ppf(1 - 1e-4, len(pairs))


def test_draws_by_samples_that_write_no_distribution_down():
    size = np.array([3, 1, 0, 8, 4])
    start = np.concatenate([[0], np.cumsum(size)[:-1]])
    words = np.random.default_rng(2).integers(0, 2**32, (4000, 2), np.uint32)
    drawn = jax.jit(jax.vmap(lambda w: randomness.draw_by_samples(w, jnp.asarray(start), size.sum())))(words)
    counts = np.bincount(np.ravel(drawn.device), np.ravel(drawn.times), minlength=5)
    expected = 8000 * size / size.sum()
    assert counts[2] == 0 and counts.sum() == 8000
    there = size > 0
    assert np.sum((counts - expected)[there] ** 2 / expected[there]) < chi2.ppf(1 - 1e-4, 3)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_frequencies_without_replacement_are_those_of_one_draw_after_another(K):
    """P(set) is summed over the orders in which the set may be drawn, for all sets of K of 4."""
    P = np.array([0.05, 0.15, 0.3, 0.5])
    device, _ = draws(P, K, False, 4000)
    sets = list(combinations(range(4), K))
    counts = np.array([np.sum(np.all(device == chosen, axis=1)) for chosen in sets])
    assert counts.sum() == 4000

    def chance(order):
        return np.prod([P[k] / (1 - P[list(order[:i])].sum()) for i, k in enumerate(order)])

    expected = 4000 * np.array([sum(chance(order) for order in permutations(chosen)) for chosen in sets])
    assert np.sum((counts - expected) ** 2 / expected) < chi2.ppf(1 - 1e-4, len(sets) - 1)


def test_the_ends_of_the_unit_interval():
    """The least and the greatest random number draw the first and the last device that can be drawn."""
    P = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    ends = uniform(jnp.array([0, 2**32 - 1], jnp.uint32))
    assert randomness.draw(ends, jnp.asarray(P, jnp.float32), 2, True).device.tolist() == [1, 3]


# Surveys


SIZES = [1, 40, 7, 128, 129, 300, 2]


def federation(sizes, features=6, classes=3):
    rng = np.random.default_rng(0)
    n = sum(sizes)
    x, y = rng.normal(size=(n, features)), rng.integers(0, classes, n)
    device = np.repeat(np.arange(len(sizes)), sizes)
    return Federation.from_arrays("random", x, y, device, np.zeros(n, bool), classes=classes)


def two_layers(features, hidden, classes):
    def init(key):
        first, second = jax.random.split(key)
        return {
            "hidden": [jax.random.normal(first, (features, hidden)), jnp.zeros(hidden)],
            "out": {"weight": jax.random.normal(second, (hidden, classes))},
        }

    def scores(params, x):
        weight, bias = params["hidden"]
        return jnp.tanh(x @ weight + bias) @ params["out"]["weight"]

    return Model(
        init,
        lambda params, x, y: cross_entropy(scores(params, x), y),
        lambda params, x: scores(params, x).argmax(axis=1),
    )


def one_by_one(problem, params):
    """grad F_k for k = 1 .. N, each on its own, as flat rows."""
    train = problem.train

    @jax.jit
    def gradient(own):
        return jax.grad(lambda w: jnp.sum(own * problem.model.loss(w, train.x, train.y)) / jnp.sum(own))(params)

    owner = np.repeat(np.arange(len(train.size)), np.asarray(train.size))
    rows = [jax.tree.leaves(gradient(jnp.asarray(owner == k))) for k in range(len(train.size))]
    return np.stack([np.concatenate([np.ravel(leaf) for leaf in row]) for row in rows]).astype(float)


def shares(objective):
    n = np.array(SIZES)
    return n / n.sum() if objective == "samples" else np.full(len(n), 1 / len(n))


@pytest.mark.parametrize("block", [4096, 100], ids=["one block", "several blocks"])
@pytest.mark.parametrize("objective", ["uniform", "samples"])
def test_direct_survey_is_that_of_N_gradients(objective, block, monkeypatch):
    monkeypatch.setattr("folb.simulation.evaluate.EVALUATION_BLOCK", block)
    problem = problems.problem(federation(SIZES), two_layers(6, 4, 3), objective=objective)
    params = problem.model.init(jax.random.key(1))
    gradients = one_by_one(problem, params)
    share = shares(objective)
    inner = jax.jit(survey.survey_inner_products)(problem, params)
    np.testing.assert_allclose(inner, gradients @ (share @ gradients), rtol=1e-4, atol=1e-5)


def survey_norms(problem, params, group):
    return survey.survey_arrays(problem, NORM, params, 0.0, group, np.zeros(2, np.uint32))


@pytest.mark.parametrize("group", [1, 3, 7, 10])
def test_norm_survey_is_that_of_N_gradients(group):
    """In groups that divide N or not, or exceed it."""
    problem = problems.problem(federation(SIZES), two_layers(6, 4, 3))
    params = problem.model.init(jax.random.key(1))
    norms = jax.jit(survey_norms, static_argnums=2)(problem, params, group)
    np.testing.assert_allclose(norms, np.linalg.norm(one_by_one(problem, params), axis=1), rtol=1e-4)


@pytest.mark.parametrize(
    "survey",
    [survey.survey_inner_products, lambda problem, params: survey_norms(problem, params, 4)],
    ids=["direct", "norm"],
)
def test_a_survey_does_not_hold_N_gradients(survey):
    """From 10 to 160 devices with the same data, memory grows by less than one gradient, not by 150."""
    features, samples = 2000, 320
    model = logistic((features,), 10)
    gradient = (features + 1) * 10 * 4
    used = []
    for N in (10, 160):
        problem = problems.problem(federation([samples // N] * N, features, 10), model)
        params = model.init(jax.random.key(0))
        used.append(jax.jit(survey).lower(problem, params).compile().memory_analysis().temp_size_in_bytes)
    assert used[1] - used[0] < gradient


@pytest.mark.parametrize("sampling", ["uniform", "samples", "direct", "norm"])
def test_a_round_corrects_for_its_selection(sampling):
    """What the rule gets is p_k / P_k, for both objectives and every distribution."""

    class Tell(Rule):
        def update(self, round):
            return Update(jax.tree.map(jnp.zeros_like, round.params), round.correction)

    algorithm = folb.Algorithm(rule=Tell(), select={"name": sampling, "K": 5})
    play, model = jax.jit(rounds.play), logistic((6,), 3)
    for objective in ("uniform", "samples"):
        problem = problems.problem(federation(SIZES), model, objective=objective, record=["weights"])
        state = round.State({"weight": jnp.eye(6, 3), "bias": jnp.zeros(3)}, ())
        gradients = one_by_one(problem, state.params)
        share = shares(objective)
        importance = {
            "uniform": np.ones(len(SIZES)),
            "samples": np.array(SIZES),
            "direct": np.abs(gradients @ (share @ gradients)),
            "norm": np.linalg.norm(gradients, axis=1),
        }[sampling]
        _, info = play(problem, algorithm, state, 0, 1)
        expected = share / (importance / importance.sum())
        np.testing.assert_allclose(info.weights, expected[np.asarray(info.device)], rtol=1e-4)


def oort(memory, size, exploration=0.1):
    """The chances of select=oort."""
    N = len(size)
    share, memory = np.full(N, 1 / N, np.float32), np.asarray(memory, np.float32)
    return np.asarray(oort_chances(np.float32(size), share, memory, exploration))


@jax.jit
def oort_chances(size, share, memory, exploration):
    known = selection.Known(1, 2, False, None, size, share, memory=memory)
    return samplings.Oort(exploration).weigh(known)


def test_oort_prefers_devices_that_are_fast_and_have_a_large_loss():
    memory = [[1.0, 1.0], [1.0, 2.0], [1.0, 8.0], [0.5, 1.0], [np.inf, np.inf]]
    # the median of 1, 2, 8 and 1 seconds is 1, the lower one; the first, 10, counts no more than the second
    use = np.array([5, 10 / 4, 10 / 64, 5, 0])
    expected = 0.9 * use / use.sum() + 0.1 * np.array([0, 0, 0, 0, 1])
    np.testing.assert_allclose(oort(memory, [10.0] * 5), expected, rtol=1e-5)
    for everyone_or_nobody in (1.0, np.inf):
        np.testing.assert_allclose(oort(np.full((5, 2), everyone_or_nobody), [10.0] * 5), 0.2, rtol=1e-5)


@pytest.mark.parametrize("lie", [1e6, 1e15, 3e38])
@pytest.mark.parametrize("N", [3, 19, 40])
def test_a_huge_loss_buys_a_liar_no_more_than_another_device_has(N, lie):
    memory = np.ones((N, 2))
    memory[:, 0] = np.linspace(1, 2, N)
    memory[0] = [lie, 1e-9]
    chances = oort(memory, [10.0] * N)
    assert np.isfinite(chances).all() and chances[0] <= 1.01 * np.sort(chances)[-2] < 2 / N
    memory[1] = memory[0]  # two liars are more than every twentieth
    chances = oort(memory, [10.0] * N)
    assert np.isfinite(chances).all() and chances.sum() == pytest.approx(1, rel=1e-5) and (chances > 0).all()


def test_oort_needs_fewer_seconds_than_uniform_draws_where_speeds_differ():
    federation = data.load("synthetic_1_1", devices=12, sizes=40)
    runs = simulate(
        federation,
        logistic(federation.shape, federation.classes),
        [algorithms.fedavg(select={"name": how, "K": 3, "replacement": False}) for how in ("uniform", "oort")],
        rounds=30,
        system=system.network(speed_spread=2.0),
    )
    assert runs[1].seconds[10:].sum() < 0.7 * runs[0].seconds[10:].sum()
    assert len(np.unique(runs[1].devices)) == 12  # and nobody is left out for good


@pytest.mark.parametrize("exploration", [0, -1, 1.5, float("nan")])
def test_the_share_of_exploration_is_checked(exploration):
    with pytest.raises(InputError, match=r"exploration = .*: should be more than 0 and at most 1"):
        algorithms.fedavg(select={"name": "oort", "exploration": exploration})
    with pytest.raises(InputError, match=r"exploration = 0.2: is for select=oort"):
        algorithms.fedavg(select={"exploration": 0.2})
