"""Robust rules against literal NumPy, and their promises for any reply."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_numbers import uniform

import folb
from folb import algorithms, rules, simulate
from folb.core import guard, robust
from folb.core.robust import ROBUST, TrimmedMean
from folb.core.round import begin, close
from folb.core.rules import Round
from folb.data.synthetic import synthetic
from folb.errors import InputError
from folb.experiments.settings import chosen_by_name
from folb.models import logistic

K, P = 9, 6
every_centre = pytest.mark.parametrize("name", ROBUST.parts)


def nested(flat):
    return {"layers": [flat[..., :4].reshape(*flat.shape[:-1], 2, 2)], "bias": flat[..., 4:]}


def flat(params):
    w, bias = np.asarray(params["layers"][0], float), np.asarray(params["bias"], float)
    return np.concatenate([w.reshape(*bias.shape[:-1], -1), bias], axis=-1)


def a_round(seed, times=None):
    rng = np.random.default_rng(seed)
    delta = rng.normal(size=P) + rng.normal(size=(K, P)) * np.exp(rng.normal(size=(K, 1)))
    return Round(
        params=nested(jnp.zeros(P)),
        times=jnp.asarray(rng.integers(0, 3, K) if times is None else times, jnp.float32),
        size=jnp.ones(K),
        correction=jnp.ones(K),
        delta=nested(jnp.asarray(delta, jnp.float32)),
        trusted=nested(jnp.asarray(rng.normal(size=P), jnp.float32)),
        key=jnp.array([3, seed], jnp.uint32),
    )


@partial(jax.jit, static_argnums=0)
def ruled(name, round, liars=0.2, bucket=1):
    return robust.recentred(
        rules.Mean().update(robust.finite(round)), ROBUST.parts[name](liars=liars, bucket=bucket), round
    )


# The centres, literally


def clipped(a, most):
    return a * np.minimum(1, most / np.linalg.norm(a, axis=1, keepdims=True))


def lower_median(values):
    return np.sort(values)[(len(values) - 1) // 2]


def literal(name, a, f, trusted):
    """The centre of the rows of `a`, of which f may be false."""
    n = len(a)
    if name == "median":
        return np.median(a, axis=0)
    if name == "trimmed_mean":
        trim = min(f, (n - 1) // 2)
        return np.sort(a, axis=0)[trim : n - trim].mean(axis=0)
    if name in ("krum", "multi_krum"):
        scores = []
        for i in range(n):
            others = sorted(np.sum((a[i] - a[j]) ** 2) for j in range(n) if j != i)
            scores.append(sum(others[: max(n - f - 2, 1)]))
        return a[np.argsort(scores, kind="stable")[: 1 if name == "krum" else max(n - f, 1)]].mean(axis=0)
    bounded = clipped(a, lower_median(np.linalg.norm(a, axis=1))).mean(axis=0)
    if name == "norm_bound":
        return bounded
    if name == "geometric_median":
        v = bounded
        for _ in range(robust.TURNS):
            w = 1 / np.maximum(np.linalg.norm(a - v, axis=1), 1e-12)
            v = w @ a / w.sum()
        return v
    if name == "centred_clipping":
        v = np.zeros(P)
        for _ in range(robust.TURNS):
            v = v + clipped(a - v, lower_median(np.linalg.norm(a - v, axis=1))).mean(axis=0)
        return v
    length = np.linalg.norm(trusted)
    trust = np.maximum(a @ trusted / np.linalg.norm(a, axis=1) / length, 0)
    return (trust / max(trust.sum(), 1e-30)) @ (a / np.linalg.norm(a, axis=1, keepdims=True)) * length


@every_centre
def test_a_centre_is_its_formula(name):
    """Of the rule's parts n a_k Delta_k: (2) counts a device as often as it was drawn."""
    for seed in range(20):
        round = a_round(seed)
        times = np.asarray(round.times)
        there, n = times > 0, (times > 0).sum()
        parts = flat(round.delta)[there] * (n * times[there] / times.sum())[:, None]
        update = ruled(name, round)
        f = int(np.ceil(0.2 * n - 1e-4))
        expected = literal(name, parts, f, flat(round.trusted)) if n >= ROBUST.parts[name]().needs(f) else np.zeros(P)
        np.testing.assert_allclose(flat(update.delta), expected, rtol=2e-3, atol=2e-5)
        assert not np.any(np.asarray(update.weights)[~there])
        assert np.all(np.asarray(update.weights) >= -1e-6)


@every_centre
def test_buckets_are_means_of_replies_at_random(name):
    round = a_round(4, times=np.ones(K))
    chances = uniform(*round.key, np.arange(K), 1)[:, 0]
    order = np.argsort(chances)
    parts = np.stack([flat(round.delta)[order[i : i + 2]].mean(axis=0) for i in range(0, K, 2)])
    expected = literal(name, parts, 1, flat(round.trusted))
    np.testing.assert_allclose(flat(ruled(name, round, 0.1, 2).delta), expected, rtol=2e-3, atol=2e-5)


@every_centre
@pytest.mark.parametrize("lie", [1e3, 1e12, 1e30, np.nan, np.inf, -np.inf])
def test_two_liars_of_nine_do_not_decide(name, lie):
    """Whatever two of nine send, the centre stays within what the honest devices could have sent."""
    round = a_round(1, times=np.ones(K))
    sent = flat(round.delta)
    honest = np.linalg.norm(sent[2:], axis=1).max()
    sent[:2] = lie
    update = ruled(name, round._replace(delta=nested(jnp.asarray(sent, jnp.float32))))
    assert np.linalg.norm(flat(update.delta)) <= 2 * max(honest, np.linalg.norm(flat(round.trusted)))
    if not np.isfinite(lie):
        assert not np.any(np.asarray(update.weights)[:2])


CASES, LIARS = 1000, 2


@pytest.fixture(scope="module")
def hostile():
    """CASES rounds, stacked, in which two of nine devices send any numbers of 32 bits; and the honest norms."""
    rng = np.random.default_rng(8)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(a_round(seed, np.ones(K)) for seed in range(20)))
    round = jax.tree.map(lambda leaf: np.resize(leaf, (CASES, *leaf.shape[1:])), stacked)
    sent = flat(round.delta)
    norms = np.linalg.norm(sent[:, LIARS:], axis=2)
    ends = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38, 0.0, -0.0])
    for case in range(CASES):
        lie = rng.normal(size=(LIARS, P)) * 10.0 ** rng.uniform(-45, 38)
        kind = case % 6
        if kind == 1:  # some ends of 32 bits among usual numbers
            lie = np.where(rng.random(lie.shape) < 0.3, rng.choice(ends, lie.shape), rng.normal(size=lie.shape))
        elif kind == 2:  # the honest mean, of the other sign and any length
            lie = -np.sign(lie[:, :1]) * sent[case, LIARS:].mean(axis=0) * 10.0 ** rng.uniform(-40, 37)
        elif kind == 3:  # both send the same
            lie[:] = rng.choice(ends) if rng.random() < 0.5 else lie[0]
        elif kind == 4:  # an honest update, again
            lie[:] = sent[case, LIARS]
        elif kind == 5:  # one number of any size
            lie = np.where(np.arange(P) == rng.integers(P), lie, 0.0)
        sent[case, :LIARS] = lie
    with np.errstate(over="ignore"):
        return round._replace(delta=nested(sent.astype(np.float32))), norms


@every_centre
def test_a_thousand_hostile_rounds(name, hostile):
    """The step is finite and as long as honest ones at most, and what is not finite has no weight."""
    round, honest = hostile
    update = jax.jit(jax.vmap(lambda one: ruled(name, one)))(round)
    step, weights = flat(update.delta), np.asarray(update.weights)
    most = np.maximum(honest.max(axis=1), np.linalg.norm(flat(round.trusted), axis=1))
    assert np.all(np.linalg.norm(step, axis=1) <= 2 * most) and np.isfinite(weights).all()
    finite = np.isfinite(flat(round.delta)).all(axis=2)
    assert 0.6 < finite[:, 0].mean() < 0.95 and not np.any(weights[~finite])
    assert np.any(weights[:, :LIARS] > 0)  # liars are sometimes accepted
    if name != "krum":  # which may choose an update of 0
        liked = np.einsum("ckp,cp->ck", flat(round.delta)[:, LIARS:], flat(round.trusted)) > 0
        assert np.all(np.any(step, axis=1) | ~liked.any(axis=1))  # and never stop the round


def test_what_memories_see_of_a_thousand_hostile_rounds(hostile):
    round, honest = hostile
    seen = jax.jit(jax.vmap(robust.bounded))(round)
    norms = np.linalg.norm(flat(seen.delta), axis=2)
    assert np.all(norms <= honest.max(axis=1)[:, None] * (1 + 1e-5))
    finite = np.isfinite(flat(round.delta)).all(axis=2)
    assert not np.any(np.asarray(seen.times)[~finite]) and not np.any(norms[~finite])


@every_centre
def test_without_replies_there_is_no_step(name):
    update = ruled(name, a_round(2, times=np.zeros(K)))
    assert not np.any(flat(update.delta)) and not np.any(update.weights)


def test_nothing_trimmed_is_the_rule_itself():
    round = a_round(3)
    for rule in (rules.Mean(), rules.Mean("samples")):
        expected = rule.update(round)
        found = robust.recentred(expected, TrimmedMean(liars=0.0), round)
        np.testing.assert_allclose(flat(found.delta), flat(expected.delta), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5)


# As a setting


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"robust": "medain"}, "robust = 'medain': did you mean 'median'?"),
        ({"robust": "krum", "robust.liars": 0.5}, "robust.liars = 0.5: should be at least 0 and less than 0.5"),
        ({"robust": "krum", "robust.liars": float("nan")}, "robust.liars = nan: should be at least 0"),
        ({"robust.liars": 0.1}, "robust.liars = 0.1: is for any robust; robust is not set"),
        ({"robust.bucket": 2}, "robust.bucket = 2: is for any robust; robust is not set"),
        ({"robust": "median", "robust.bucket": 0}, "robust.bucket = 0: should be a whole number from 1"),
        ({"robust": "median", "robust.root": 10}, "robust.root = 10: is for robust=fltrust; robust is median"),
        ({"robust": "fltrust", "robust.root": 0}, "robust.root = 0: should be a whole number from 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError) as error:
        algorithms.fedavg(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "K", "smallest"),
    [
        ({"robust": "krum", "robust.liars": 0.4}, 5, 15),  # n >= 2f + 3
        ({"robust": "multi_krum", "robust.liars": 0.4}, 11, 15),
        ({"robust": "krum", "robust.liars": 0.2}, 4, 5),
        ({"robust": "trimmed_mean", "robust.liars": 0.4}, 4, 5),  # 2 of 4 may lie
        ({"robust": "median", "robust.liars": 0.4}, 2, 5),
        (
            {"robust": "krum", "robust.liars": 0.25, "robust.bucket": 2},
            10,
            None,
        ),  # each liar may be in a bucket of its own
        ({"robust": "median", "robust.liars": 0.2, "robust.bucket": 2}, 6, 9),
    ],
)
def test_too_few_replies_for_a_centre(settings, K, smallest):
    with pytest.raises(InputError) as error:
        algorithms.fedavg(select={"K": K}, **settings)
    expected = "no K is enough" if smallest is None else f"should be {smallest}, the next that is enough,"
    assert str(error.value).startswith(f"select.K = {K}: {expected} with robust={settings['robust']}")
    if smallest is not None:
        assert algorithms.fedavg(select={"K": smallest}, **settings).robust is not None


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_equal_liars_never_win_if_enough_others_reply(name):
    """As many as may lie send the same; fewer replies than the centre needs change nothing."""
    liars = 0.4
    for n in (3, 5, 9, 15):
        f = int(np.ceil(liars * n - 1e-4))
        for seed in range(12):
            rng = np.random.default_rng(seed)
            sent = rng.normal(size=(n, P)) + 1
            sent[:f] = 1e3 * rng.normal(size=P)
            ones = jnp.ones(n)
            round = a_round(seed, np.ones(K))._replace(
                times=ones, size=ones, correction=ones, delta=nested(jnp.asarray(sent, jnp.float32))
            )
            update = ruled(name, round, liars)
            if n < ROBUST.parts[name]().needs(f):
                assert not np.any(flat(update.delta)) and not np.any(update.weights)
            else:
                assert not np.any(update.weights[:f]) and 0 < np.linalg.norm(flat(update.delta)) < 20


def test_the_guide_says_that_the_median_is_the_lower_one():
    """Of two updates the longer one is clipped to the shorter one; the mean of both norms would let a liar raise it."""
    ones = jnp.ones(2)
    sent = nested(jnp.eye(2, P) * jnp.array([[1.0], [3.0]]))
    round = a_round(0)._replace(times=ones, size=ones, correction=ones, delta=sent)
    assert np.linalg.norm(flat(ruled("norm_bound", round, 0.2).delta)) == pytest.approx(np.sqrt(0.5), rel=1e-5)
    rows = (Path(__file__).parents[1] / "docs/attacks.md").read_text().splitlines()
    for name in ("centred_clipping", "norm_bound"):
        assert next(row for row in rows if row.startswith(f"| `{name}` |")).count("lower median") == 1


def test_the_guard_goes_inside_a_robust_rule():
    made = algorithms.folb(robust="norm_bound", guard="on")
    assert made.robust.name == "norm_bound" and made.guard.cap == 2.0
    assert guard.guard(made) is made


def test_a_memory_and_a_server_step_see_short_updates():
    """SCAFFOLD's c_k, and FedExP's step, would otherwise be as long as a liar wants."""
    made = algorithms.scaffold(select={"K": K}, robust="median", server="fedexp")
    sent = a_round(5, times=np.ones(K))
    long = sent._replace(delta=jax.tree.map(lambda leaf: leaf.at[0].mul(1e12), sent.delta))
    zeros = nested(jnp.zeros((K, P)))
    long = long._replace(steps=jnp.ones(K), lr=0.1, N=K, t=1, own=zeros)
    state, _ = begin(made, sent.params)
    closed = jax.jit(close)(made, state, long)
    usual = np.linalg.norm(flat(sent.delta), axis=1).max() / 0.1
    assert 0 < np.linalg.norm(flat(closed.own)[0]) <= usual
    assert np.linalg.norm(flat(closed.state.shared)) <= K * usual
    assert np.linalg.norm(flat(closed.state.params)) < 100 * np.linalg.norm(flat(sent.delta), axis=1).max()


def test_a_server_with_samples_of_its_own():
    """FLTrust in the simulator: the step is as long as the server's own, and the seed fixes its samples."""
    federation = synthetic(devices=6, sizes=40)
    model = logistic(federation.shape, federation.classes)
    made = [
        algorithms.fedavg(
            select={"K": 4}, robust={"name": "fltrust", "root": 20}, attack={"name": "flipped_x1000", "share": 0.4}
        )
    ]
    first, again = (simulate(federation, model, made, rounds=4, seeds=[2])[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert first.train_loss[-1] < first.train_loss[0]


def test_a_centre_of_one_s_own(tmp_path):
    """The one in docs/parts.md, from a file, and refused like any other."""
    page = (Path(__file__).parents[1] / "docs/parts.md").read_text()
    (code,) = re.findall(r"```python\n(import jax.*?)```", page, flags=re.S)
    (tmp_path / "mine.py").write_text(code)
    shortest = chosen_by_name("algorithms", f"{tmp_path / 'mine.py'}:shortest", {}).constructor
    made = shortest(**{"select.K": 5, "robust.bucket": None})
    assert (made.robust.name, made.robust.liars, made.robust.needs(2)) == ("shortest", 0.3, 5)
    round = a_round(6, times=np.ones(K))
    update = jax.jit(lambda how: robust.recentred(rules.Mean().update(round), how, round))(made.robust)
    first = np.argmin(np.linalg.norm(flat(round.delta), axis=1))
    np.testing.assert_allclose(flat(update.delta), flat(round.delta)[first], rtol=1e-5)
    np.testing.assert_allclose(update.weights, np.arange(K) == first, atol=1e-6)
    with pytest.raises(InputError, match=r"K = 4: should be 5, the next that is enough, with robust=shortest"):
        shortest(select={"K": 4})
    with pytest.raises(InputError, match=r"robust\.root = 2: is for robust=fltrust; robust is your own"):
        shortest(select={"K": 5}, robust={"root": 2})
    with pytest.raises(InputError, match=r"K = 5: no K is enough with robust=shortest, .*robust\.bucket=2"):
        shortest(select={"K": 5}, robust={"bucket": 2})

    class Short(folb.Robust):
        def centre(self, given):
            return folb.Update(given.stack, given.even)

    with pytest.raises(InputError, match="robust: the delta of centre"):
        robust.recentred(rules.Mean().update(round), Short(), round)


def test_draws_with_replacement_are_counted_as_different_devices():
    """15 of 30 with replacement are 11 devices, of which 40 % are 5: too few for Krum, though 15 are not."""
    given, federation = {"robust": "krum", "robust.liars": 0.4}, synthetic(devices=30, sizes=10)
    with pytest.raises(
        InputError, match=r"K = 15: should be drawn with select.replacement=False, or be \d+, the next"
    ) as error:
        simulate(federation, logistic((60,), 10), algorithms.fedavg(select={"K": 15}, **given), rounds=1)
    simulate(
        federation, logistic((60,), 10), algorithms.fedavg(select={"K": 15, "replacement": False}, **given), rounds=1
    )
    least = int(str(error.value).split("or be ")[1].split(",")[0])
    simulate(federation, logistic((60,), 10), algorithms.fedavg(select={"K": least}, **given), rounds=1)
