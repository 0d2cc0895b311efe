"""Each aggregation rule against a literal loop over the multiset, and the properties the paper claims or implies."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folb import algorithms, rules
from folb.core import samplings, server_step
from folb.core.part import name_of
from folb.core.rules import Gradients, Round, Update
from folb.errors import InputError

K, P = 6, 7  # slots, parameters
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


# Rounds as plain NumPy: flat [K, P] arrays, made into a nested tree only for the code under test.


def nested(flat):
    return {"layers": [{"w": flat[..., :4].reshape(*flat.shape[:-1], 2, 2)}, flat[..., 4:6]], "bias": flat[..., 6:]}


def flat(params):
    leaves = [params["layers"][0]["w"], params["layers"][1], params["bias"]]
    lead = np.shape(params["bias"])[:-1]
    return np.concatenate([np.reshape(leaf, (*lead, -1)) for leaf in leaves], axis=-1)


def random_round(seed, times=None, second_times=None):
    """Random replies; a slot that counts 0 times holds NaN, so that any use of it shows."""
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 3, K) if times is None else np.array(times)
    second_times = rng.integers(0, 3, K) if second_times is None else np.array(second_times)
    r = {
        "params": rng.normal(size=P),
        "times": times,
        "size": rng.integers(1, 500, K),
        "correction": rng.uniform(0.2, 3, K),
        "delta": rng.normal(size=(K, P)),
        "grad": rng.normal(size=(K, P)) + rng.normal(size=P),
        "gamma": rng.uniform(0, 1, K),
        "inner": rng.normal(size=K),
        "second_times": second_times,
        "second_grad": rng.normal(size=(K, P)) + rng.normal(size=P),
        "second_correction": rng.uniform(0.2, 3, K),
    }
    for name in ("delta", "grad"):
        r[name][times == 0] = np.nan
    r["gamma"][times == 0] = np.nan
    r["second_grad"][second_times == 0] = np.nan
    return r


def on_device(r, survey=False):
    def array(name):
        return np.asarray(r[name], np.float32)  # NumPy's, so that taking it apart compiles nothing

    return Round(
        params=nested(array("params")),
        times=array("times"),
        size=array("size"),
        correction=array("correction"),
        delta=nested(array("delta")),
        grad=nested(array("grad")),
        gamma=array("gamma"),
        inner=array("inner") if survey else None,
        second=Gradients(nested(array("second_grad")), array("second_times"), array("second_correction")),
    )


WITH_PSI = ("folb_hetero", "folb_never_flip")
WITH_GRADIENTS = ("signed", "folb", "folb_two_set", *WITH_PSI)
KINDS = {
    "mean": rules.Mean,
    "samples": partial(rules.Mean, "samples"),
    **{name_of(kind): kind for kind in (rules.Signed, rules.Folb, rules.FolbTwoSet)},
    **{name_of(kind): kind for kind in (rules.FolbHetero, rules.FolbNeverFlip)},
}


@partial(jax.jit, static_argnums=0)
def updated(name, round, *numbers):
    return KINDS[name](*numbers).update(round)


RULES = {name: partial(updated, name) for name in KINDS}


def apply(name, r, psi=0.5, survey=False):
    """The step, flat, and the weights."""
    update = RULES[name](on_device(r, survey), *([psi] if name in WITH_PSI else []))
    return flat(update.delta), np.asarray(update.weights)


# The paper's sums, literally: over the multiset S, in which a device drawn twice stands twice.


def multiset(times):
    return [k for k in range(len(times)) for _ in range(times[k])]


def estimate(grad, times, correction):
    S = multiset(times)
    return sum((correction[k] * grad[k] for k in S), np.zeros(P)) / max(len(S), 1)


def literal(name, r, psi=0.5, survey=False):
    S = multiset(r["times"])
    g1 = estimate(r["grad"], r["times"], r["correction"])
    inner = {k: r["grad"][k] @ g1 for k in S}
    importance = {k: inner[k] - psi * r["gamma"][k] * (g1 @ g1) for k in S}
    shrunk = {k: np.sign(inner[k]) * max(abs(inner[k]) - psi * r["gamma"][k] * (g1 @ g1), 0) for k in S}
    weight = {}
    for k in S:  # the weight of one occurrence of k
        if name == "mean":
            weight[k] = 1 / len(S)
        elif name == "samples":
            weight[k] = r["size"][k] / sum(r["size"][j] for j in S)
        elif name == "signed":
            weight[k] = np.sign(r["inner"][k] if survey else inner[k]) / len(S)
        elif name == "folb_two_set":
            S2 = multiset(r["second_times"])
            g2 = estimate(r["second_grad"], r["second_times"], r["second_correction"])
            total = sum(r["second_grad"][j] @ g2 for j in S2)
            weight[k] = inner[k] / total if total != 0 else 0.0
        else:
            I_k = {"folb": inner, "folb_hetero": importance, "folb_never_flip": shrunk}[name]
            total = sum(abs(I_k[j]) for j in S)
            weight[k] = I_k[k] / total if total != 0 else 0.0
    delta, weights = np.zeros(P), np.zeros(K)
    for k in S:
        delta += weight[k] * r["delta"][k]
        weights[k] += weight[k]
    return delta, weights


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_equation(name, seed):
    r = random_round(seed)
    for survey in (False, True) if name == "signed" else (False,):
        for actual, expected in zip(apply(name, r, survey=survey), literal(name, r, survey=survey), strict=True):
            # rules with inner products cancel; the error is that of float32 against the terms, not their sum
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


def test_every_rule_of_the_module_is_tested():
    final = [kind for kind in vars(rules).values() if isinstance(kind, type) and issubclass(kind, rules.Rule)]
    made = {name_of(kind) for kind in final if kind is not rules.Rule and not vars(kind).get("abstract")}
    assert made | {"samples"} == {*RULES, "fednova"}  # fednova: tests/test_family.py


@pytest.mark.parametrize("seed", range(4))
def test_distributions_are_their_equations(seed):
    rng = np.random.default_rng(seed)
    inner, norms, gamma, psi, square = rng.normal(size=9), rng.uniform(0, 2, 9), rng.uniform(0, 1, 9), 0.7, 1.3
    for actual, importance in (
        (samplings.lb_near_optimal(jnp.asarray(inner)), [abs(i) for i in inner]),
        (samplings.norm_proxy(jnp.asarray(norms)), list(norms)),
        (
            samplings.lb_near_optimal_hetero(jnp.asarray(inner), jnp.asarray(gamma), psi, jnp.asarray(square)),
            [abs(i - psi * g * square) for i, g in zip(inner, gamma, strict=True)],
        ),
    ):
        np.testing.assert_allclose(actual, [i / sum(importance) for i in importance], rtol=1e-5)


def test_distributions_are_uniform_where_all_vanish():
    zero = jnp.zeros(4)
    for P_k in (
        samplings.lb_near_optimal(zero),
        samplings.norm_proxy(zero),
        samplings.lb_near_optimal_hetero(zero, zero, 1.0, jnp.float32(0)),
    ):
        np.testing.assert_array_equal(P_k, np.full(4, 0.25, np.float32))


# Properties

counts = st.lists(st.integers(0, 4), min_size=K, max_size=K)
some = counts.filter(any)
seeds = st.integers(0, 2**16)


@PROPERTY
@given(seeds, counts)
def test_hetero_at_psi_0_is_folb(seed, times):
    r = random_round(seed, times)
    expected = apply("folb", r)
    for name in WITH_PSI:
        for actual, wanted in zip(apply(name, r, psi=0.0), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@PROPERTY
@given(seeds, some)
def test_identical_devices_make_folb_the_mean(seed, times):
    r = random_round(seed, times)
    r["grad"][:] = np.random.default_rng(seed).normal(size=P)
    r["correction"][:] = 1
    for actual, wanted in zip(apply("folb", r), apply("mean", r), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@PROPERTY
@given(seeds, some)
def test_folb_weights_sum_to_1_in_absolute_value(seed, times):
    r = random_round(seed, times)
    for name in ("folb", "folb_hetero"):
        assert np.sum(np.abs(apply(name, r)[1])) == pytest.approx(1, rel=1e-5)


@PROPERTY
@given(seeds, some, st.permutations(range(K)))
def test_two_set_weights_sum_to_the_ratio_of_squared_norms(seed, times, order):
    """With as many replies in S_2 as in S_1, and the selection matched to the objective."""
    r = random_round(seed, times, second_times=np.array(times)[order])
    r["correction"][:] = r["second_correction"][:] = 1
    g1 = estimate(r["grad"], r["times"], r["correction"])
    g2 = estimate(r["second_grad"], r["second_times"], r["second_correction"])
    assert np.sum(apply("folb_two_set", r)[1]) == pytest.approx((g1 @ g1) / (g2 @ g2), rel=1e-3)


@PROPERTY
@given(seeds, counts, st.permutations(range(K)))
def test_permuting_devices_permutes_weights(seed, times, order):
    r = random_round(seed, times)
    moved = r | {name: r[name][order] for name in ("times", "size", "correction", "delta", "grad", "gamma", "inner")}
    for name in RULES:
        delta, weights = apply(name, r)
        moved_delta, moved_weights = apply(name, moved)
        np.testing.assert_allclose(moved_weights, weights[order], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(moved_delta, delta, rtol=1e-3, atol=1e-4)


@PROPERTY
@given(seeds, counts, st.integers(-15, 15))
def test_scaling_all_gradients_changes_nothing(seed, times, exponent):
    r = random_round(seed, times)
    scaled = r | {name: r[name] * 2.0**exponent for name in ("grad", "second_grad")}  # exact in floating point
    for name in WITH_GRADIENTS:
        for actual, wanted in zip(apply(name, scaled), apply(name, r), strict=True):
            np.testing.assert_array_equal(actual, wanted)


@PROPERTY
@given(seeds, some, st.floats(0, 20, width=32))
def test_never_flip_never_changes_a_sign(seed, times, psi):
    r = random_round(seed, times)
    before, after = apply("folb", r)[1], apply("folb_never_flip", r, psi)[1]
    assert np.all((np.sign(after) == np.sign(before)) | (after == 0))


@PROPERTY
@given(seeds, some)
def test_never_flip_shrinks_to_no_update(seed, times):
    """A large psi takes the weight of every device with gamma > 0; one with gamma = 0 is never discounted."""
    r = random_round(seed, times)
    counted = np.flatnonzero(r["times"])
    r["gamma"][counted] = np.maximum(r["gamma"][counted], 0.01)
    delta, weights = apply("folb_never_flip", r, psi=1e9)
    assert not delta.any()
    assert not weights.any()
    exact = counted[0]
    r["gamma"][exact] = 0.0
    expected = np.zeros(K)
    expected[exact] = np.sign(apply("folb", r)[1][exact])
    np.testing.assert_allclose(apply("folb_never_flip", r, psi=1e9)[1], expected, rtol=1e-6)


def test_as_printed_a_large_psi_turns_every_update_round():
    """What (18) says, kept exact: with gamma = 1 and psi = 10 the server subtracts every update."""
    r = random_round(3, times=[1, 1, 2, 1, 0, 1])
    r["gamma"][r["times"] > 0] = 1.0
    _, weights = apply("folb_hetero", r, psi=10.0)
    assert np.all(weights[r["times"] > 0] < 0)
    assert np.sum(weights) == pytest.approx(-1, rel=1e-5)


# Denominators that vanish: no update, and no NaN


def assert_no_update(name, r):
    delta, weights = apply(name, r)
    assert not delta.any()
    assert not weights.any()


@pytest.mark.parametrize("name", RULES)
def test_no_usable_reply_gives_no_update(name):
    assert_no_update(name, random_round(0, times=[0] * K))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_zero_give_no_update(name):
    r = random_round(0, times=[1] * K)
    r["grad"][:] = 0
    assert_no_update(name, r)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_that_cancel_give_no_update(name):
    r = random_round(0, times=[1, 1, 0, 0, 0, 0])
    r["correction"][:] = 1
    r["grad"][1] = -r["grad"][0]
    assert_no_update(name, r)


def test_a_second_set_that_vanishes_gives_no_update():
    assert_no_update("folb_two_set", random_round(0, second_times=[0] * K))
    r = random_round(0, second_times=[1] * K)
    r["second_grad"][:] = 0
    assert_no_update("folb_two_set", r)


def test_a_rule_says_which_upload_it_misses():
    with pytest.raises(InputError, match=r"uploads.*'grad'"):
        rules.Folb().update(on_device(random_round(0))._replace(grad=None))


# (10) is unbiased: the mean over all N^K ways to draw the multiset, each with its probability


@pytest.mark.parametrize("objective", ["uniform", "samples"])
@pytest.mark.parametrize("sampling", ["uniform", "samples", "direct", "norm"])
def test_gradient_estimate_is_unbiased(objective, sampling):
    N, draws = 4, 3
    rng = np.random.default_rng(0)
    n = np.array([3, 50, 7, 1])
    grad = rng.normal(size=(N, P)) + 0.5
    share = np.full(N, 1 / N) if objective == "uniform" else n / n.sum()
    f = share @ grad
    P_k = {
        "uniform": np.full(N, 1 / N),
        "samples": n / n.sum(),
        "direct": np.asarray(samplings.lb_near_optimal(jnp.asarray(grad @ f)), float),
        "norm": np.asarray(samplings.norm_proxy(jnp.asarray(np.linalg.norm(grad, axis=1))), float),
    }[sampling]
    ways = np.array(list(product(range(N), repeat=draws)))
    chance = P_k[ways].prod(axis=1)
    assert len(ways) == N**draws
    assert chance.sum() == pytest.approx(1)
    times = (ways[:, :, None] == np.arange(N)).sum(axis=1)

    def one(times):
        correction = jnp.asarray(share / P_k, jnp.float32)
        return rules.gradient_estimate(nested(jnp.asarray(grad, jnp.float32)), times, correction)

    estimates = flat(jax.jit(jax.vmap(one))(jnp.asarray(times, jnp.float32)))
    np.testing.assert_allclose(chance @ estimates, f, rtol=1e-5, atol=1e-6)
    # and without the correction it is not, unless the selection matches the objective
    plain = (times / draws) @ grad
    assert np.allclose(chance @ plain, f, atol=1e-4) == (sampling == objective)


# Server steps, over three rounds


OPTAX = {
    "momentum": (server_step.Momentum(0.7, beta=0.8), optax.sgd(0.7, momentum=0.8)),
    "adam": (server_step.Adam(0.05), optax.adam(0.05, b1=0.9, b2=0.99, eps=1e-3)),
    "yogi": (server_step.Yogi(0.05), optax.yogi(0.05, b1=0.9, b2=0.99, eps=1e-3)),
}


def rounds_of(step, number=3):
    """(params before, the mean's update, params after) of successive rounds under a server step."""
    params = nested(jnp.asarray(np.random.default_rng(9).normal(size=P), jnp.float32))
    memory = step.init(params)

    @jax.jit
    def stepped(memory, round):
        update = rules.Mean().update(round)
        return update, *step.apply(memory, round, update)

    for seed in range(number):
        round = on_device(random_round(seed, times=[1, 2, 0, 1, 1, 1]))._replace(params=params)
        before = params
        update, params, memory = stepped(memory, round)
        yield before, round, update, params


@pytest.mark.parametrize("name", OPTAX)
def test_a_server_step_is_optax_on_the_negative_update(name):
    step, optimiser = OPTAX[name]
    memory = None
    for before, _, update, after in rounds_of(step):
        memory = optimiser.init(before) if memory is None else memory
        moves, memory = optimiser.update(jax.tree.map(lambda d: -d, update.delta), memory, before)
        np.testing.assert_allclose(flat(after), flat(optax.apply_updates(before, moves)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_without_bias_correction_it_is_algorithm_2_of_reddi_et_al(name):
    """By hand, from m = 0 and v = eps^2."""
    m, v, b, b2, eps, lr = np.zeros(P), np.full(P, 0.01**2), 0.8, 0.95, 0.01, 0.05
    make = getattr(server_step, name.capitalize())
    for before, _, update, after in rounds_of(make(lr, b, b2, eps, bias_correction=False)):
        d = flat(update.delta)
        m = b * m + (1 - b) * d
        v = b2 * v + (1 - b2) * d**2 if name == "adam" else v - (1 - b2) * d**2 * np.sign(v - d**2)
        np.testing.assert_allclose(flat(after), flat(before) + lr * m / (np.sqrt(v) + eps), rtol=1e-5, atol=1e-6)


def test_momentum_adds_up_past_updates():
    """Heavy ball by hand: m <- beta m + Delta, w <- w + lr m."""
    m = np.zeros(P)
    for before, _, update, after in rounds_of(server_step.Momentum(0.7, beta=0.8)):
        m = 0.8 * m + flat(update.delta)
        np.testing.assert_allclose(flat(after), flat(before) + 0.7 * m, rtol=1e-5, atol=1e-6)


def test_plain_adds_the_update():
    for lr in (1.0, 0.3):
        for before, _, update, after in rounds_of(server_step.Plain(lr)):
            np.testing.assert_allclose(flat(after), flat(before) + lr * flat(update.delta), rtol=1e-5, atol=1e-6)


def fedexp_by_hand(deltas, eps=1e-3):
    """max(1, sum_k ||Delta_k||^2 / (2 K (||mean Delta||^2 + eps))), as published."""
    mean = np.mean(deltas, axis=0)
    return max(1, sum(d @ d for d in deltas) / (2 * len(deltas) * (mean @ mean + eps)))


def test_fedexp_is_the_published_formula():
    steps = []
    for before, round, _, after in rounds_of(server_step.FedExP()):
        deltas = flat(round.delta)[multiset([1, 2, 0, 1, 1, 1])]
        steps.append(fedexp_by_hand(deltas))
        np.testing.assert_allclose(flat(after), flat(before) + steps[-1] * deltas.mean(axis=0), rtol=1e-4, atol=1e-5)
    assert max(steps) > 1.5  # the draws are such that the formula is at work


def test_fedexp_never_steps_back():
    """Identical updates would give a step of 1/2; it is 1."""
    round = on_device(random_round(0, times=[1] * K))
    same = jax.tree.map(lambda d: jnp.broadcast_to(d[0], d.shape), round.delta)
    update = rules.Mean().update(round._replace(delta=same))
    after, _ = server_step.FedExP().apply((), round._replace(delta=same), update)
    np.testing.assert_allclose(flat(after), flat(round.params) + flat(same)[0], rtol=1e-5, atol=1e-6)


def test_fedexp_ignores_what_a_lost_device_holds():
    round = on_device(random_round(0, times=[1, 1, 0, 1, 1, 1]))
    after, _ = server_step.FedExP().apply((), round, rules.Mean().update(round))
    assert np.isfinite(flat(after)).all()


def test_weighted_gives_no_part_to_a_slot_that_does_not_count():
    round = on_device(random_round(0, times=[0, 1, 0, 2, 1, 1]))
    update = rules.weighted(round, jnp.ones(K))
    assert isinstance(update, Update)
    assert update.weights.tolist() == [0, 1, 0, 1, 1, 1]
    np.testing.assert_allclose(flat(update.delta), np.nansum(flat(round.delta), axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"local.mu": "1"}, r"local\.mu = '1': should be at least 0"),
        ({"local.lr": "0.1"}, r"local\.lr = '0.1': should be more than 0"),
        ({"rule.psi": [1.0]}, r"rule\.psi = .*: should be at least 0"),
        ({"guard": "on", "guard.cap": "2"}, r"guard\.cap = '2': should be at least 1"),
        ({"server": 3}, "server = 3: should be one of plain"),
        ({"clamp_gamma": "no"}, "clamp_gamma = 'no': should be True or False"),
    ],
)
def test_settings_of_another_type_are_named(settings, said):
    with pytest.raises(InputError, match=said):
        algorithms.folb_hetero(**settings)


def test_none_is_the_usual_value_of_a_setting():
    made = algorithms.folb_hetero(**{"local.lr": None, "rule.psi": None})
    assert made.settings == algorithms.folb_hetero().settings
