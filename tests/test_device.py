"""What a device computes, against plain NumPy: the proximal solve, the full gradient, the inexactness."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from folb.core import solver
from folb.core.shuffle import shuffled
from folb.core.solver import Solver
from folb.core.upload import GAMMA, UNCLAMPED_GAMMA
from folb.core.upload import inexactness as inexactness_of_one
from folb.data.federation import Federation
from folb.models import logistic
from folb.simulation import solve as local
from folb.simulation.problem import problem
from folb.simulation.solve import BLOCK, Slots

FEATURES, CLASSES, BATCH = 5, 3, 10
MODEL = logistic((FEATURES,), CLASSES)
SIZES = [1, 7, 10, 25, 40, 300]  # fewer than a batch, one batch, a smaller last one, an exact multiple, several blocks
shuffle = jax.jit(shuffled)


def federation(sizes):
    rng = np.random.default_rng(0)
    n = sum(sizes)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    device = np.repeat(np.arange(len(sizes)), sizes)
    y = rng.integers(0, CLASSES, n)
    return Federation.from_arrays("random", x, y, device, np.zeros(n, bool), classes=CLASSES)


def ready(federation):
    """The problem, with its devices side by side and one after another."""
    return {together: problem(federation, MODEL, side_by_side=together) for together in (True, False)}


def random_params(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {"weight": scale * rng.normal(size=(FEATURES, CLASSES)), "bias": scale * rng.normal(size=CLASSES)}


def on_device(params):
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), params)


# The same in NumPy, float64


def gradient(params, x, y):
    """The mean gradient of softmax regression over a batch."""
    scores = x @ params["weight"] + params["bias"]
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return {"weight": x.T @ p / len(y), "bias": p.mean(axis=0)}


def proximal_step(w, w0, g, lr, mu):
    return {name: w[name] - lr * (g[name] + mu * (w[name] - w0[name])) for name in w}


def rows_of(federation, k):
    return slice(federation.train.start[k], federation.train.start[k] + federation.train.size[k])


def batches(unit, words, size, work):
    """The sample numbers of every mini-batch, in order, from the same shuffle as the solver's."""

    def order(epoch):
        return np.asarray(shuffle(words, epoch, jnp.arange(max(SIZES)), size))[:size]

    if unit == "epoch":
        return [order(e)[i : i + BATCH] for e in range(work) for i in range(0, size, BATCH)]
    if unit == "step":
        stream = np.concatenate([order(e) for e in range(work * BATCH // size + 1)])
        return [stream[s * BATCH : (s + 1) * BATCH] for s in range(work)]
    return [np.arange(size)] * work


def numpy_solve(federation, unit, params, k, work, words, lr, mu):
    x = federation.train.x[rows_of(federation, k)].astype(float)
    y = federation.train.y[rows_of(federation, k)]
    w = params
    for batch in batches(unit, words, len(y), work):
        w = proximal_step(w, params, gradient(w, x[batch], y[batch]), lr, mu)
    return {name: w[name] - params[name] for name in w}


WORK = [3, 2, 0, 5, 1, 4]
DATA = federation(SIZES)
PROBLEM = ready(DATA)
WORDS = jax.jit(lambda: jax.random.bits(jax.random.key(7), (len(SIZES), 2), jnp.uint32))()


@partial(jax.jit, static_argnames="side_by_side")
def solve(solver, params, slots, side_by_side=True):
    return local.solve(PROBLEM[side_by_side], solver, for_each(slots, params), slots).delta


def for_each(slots, params):
    """A start for each slot."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(slots.device), *leaf.shape)), params)


def slots(work=WORK, device=(0, 1, 2, 3, 4, 5), words=WORDS):
    return Slots(jnp.array(device), jnp.array(work), words)


def taken(stack, k):
    return {name: np.asarray(leaf[k]) for name, leaf in stack.items()}


@pytest.mark.parametrize("unit", ["step", "epoch", "gradient"])
@pytest.mark.parametrize(("lr", "mu"), [(0.1, 0.0), (0.3, 1.0)])
def test_solver_is_proximal_sgd(unit, lr, mu):
    params = random_params(1)
    delta = solve(Solver(lr=lr, mu=mu, batch=BATCH, unit=unit), on_device(params), slots())
    for k, work in enumerate(WORK):
        expected = numpy_solve(DATA, unit, params, k, work, WORDS[k], lr, mu)
        for name in params:
            np.testing.assert_allclose(delta[name][k], expected[name], rtol=1e-4, atol=5e-6, err_msg=f"device {k}")


@pytest.mark.parametrize("unit", ["step", "epoch", "gradient"])
def test_no_work_is_no_update(unit):
    delta = solve(Solver(lr=0.3, mu=1.0, batch=BATCH, unit=unit), on_device(random_params(1)), slots())
    idle = WORK.index(0)
    assert all(not np.any(leaf) for leaf in taken(delta, idle).values())
    assert all(np.any(leaf) for k in range(len(WORK)) if k != idle for leaf in taken(delta, k).values())


def test_a_unit_of_work_costs_its_mini_batch_steps():
    size = jnp.array([1, 10, 11, 300])
    cost = {unit: solver.unit_cost(Solver(0.1, 0.0, BATCH, unit), size).tolist() for unit in ("step", "epoch")}
    assert cost == {"step": [1, 1, 1, 1], "epoch": [1, 1, 2, 30]}


def test_mu_pulls_towards_the_global_model():
    """The larger mu, the nearer the proximal term keeps each device to w^t; for very large mu it stays at w^t."""
    params = on_device(random_params(1))
    moved = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        delta = solve(Solver(lr=0.1, mu=mu, batch=BATCH, unit="epoch"), params, slots(work=[10] * len(SIZES)))
        moved.append(np.sqrt(sum(np.sum(np.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in delta.values())))
    assert np.all(np.diff(moved, axis=0) < 0)


@pytest.mark.parametrize("unit", ["step", "epoch", "gradient"])
def test_a_slot_does_not_depend_on_its_neighbours(unit):
    """The same device, work and words give the same bits in any place of the round, beside any work."""
    solver = Solver(lr=0.3, mu=0.1, batch=BATCH, unit=unit)
    params = on_device(random_params(1))
    here = solve(solver, params, slots())
    order = np.array([3, 5, 0, 1, 4, 2])
    there = solve(solver, params, slots(np.array(WORK)[order], order, WORDS[order]))
    for place, k in enumerate(order):
        for name in params:
            np.testing.assert_array_equal(there[name][place], here[name][k])
    beside_others = solve(solver, params, slots(work=[9, 0, 6, WORK[3], 7, 1]))
    for name in params:
        np.testing.assert_array_equal(beside_others[name][3], here[name][3])


@pytest.mark.parametrize("unit", ["step", "gradient"])
def test_slots_one_after_another_give_what_they_give_side_by_side(unit):
    solver = Solver(lr=0.3, mu=0.1, batch=BATCH, unit=unit)
    params = on_device(random_params(1))
    together, apart = solve(solver, params, slots()), solve(solver, params, slots(), side_by_side=False)
    for name in params:
        np.testing.assert_allclose(apart[name], together[name], rtol=1e-5, atol=1e-6)


# Full gradients

UNEVEN = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 5000]
BIG = federation(UNEVEN)
BIG_PROBLEM = ready(BIG)


@partial(jax.jit, static_argnames="side_by_side")
def gradients(stack, device, wanted, side_by_side):
    return local.gradients(BIG_PROBLEM[side_by_side], stack, device, wanted)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_gradients_are_means_over_each_device(side_by_side):
    """Sizes from 1 to 5,000, around the block's boundary; each slot at parameters of its own; two not wanted."""
    params = [random_params(k) for k in range(len(UNEVEN))]
    stack = on_device(jax.tree.map(lambda *leaves: np.stack(leaves), *params))
    order = np.array([7, 4, 0, 3, 6, 1, 2, 5])
    wanted = np.array([True, True, True, False, True, True, True, False])
    g = gradients(stack, jnp.asarray(order), jnp.asarray(wanted), side_by_side)
    for slot, k in enumerate(order):
        expected = gradient(params[slot], BIG.train.x[rows_of(BIG, k)].astype(float), BIG.train.y[rows_of(BIG, k)])
        for name in expected:
            np.testing.assert_allclose(g[name][slot], expected[name] * wanted[slot], rtol=1e-4, atol=2e-6)


def test_no_gradient_wanted_is_no_gradient():
    stack = on_device(jax.tree.map(lambda *leaves: np.stack(leaves), *[random_params(0)] * len(UNEVEN)))
    g = gradients(stack, jnp.arange(len(UNEVEN)), jnp.zeros(len(UNEVEN), bool), True)
    assert all(not np.any(leaf) for leaf in g.values())


# Inexactness


def stacked(*vectors):
    """Vectors of 3 as a stack of trees."""
    v = np.asarray(vectors, np.float32)
    return {"a": v[:, :1], "b": v[:, 1:]}


def inexactness(mu, delta, grad, grad_after, clamp=True):
    compute = functools.partial((GAMMA if clamp else UNCLAMPED_GAMMA).compute, mu=mu, most=1.0 if clamp else np.inf)
    return np.asarray(jax.jit(jax.vmap(compute))(delta, grad, grad_after))


def test_gamma_is_its_definition():
    """||grad F_k(w_k) + mu (w_k - w^t)|| / ||grad F_k(w^t)||, the proximal term vanishing at w^t."""
    rng = np.random.default_rng(0)
    delta, grad, after = rng.normal(size=(3, 4, 3))
    expected = [np.linalg.norm(a + 0.7 * d) / np.linalg.norm(g) for d, g, a in zip(delta, grad, after, strict=True)]
    args = stacked(*delta), stacked(*grad), stacked(*after)
    np.testing.assert_allclose(inexactness(0.7, *args, clamp=False), expected, rtol=1e-5)
    assert max(expected) > 1 > min(expected)  # so that the clamp has an effect, but not on everything
    np.testing.assert_allclose(inexactness(0.7, *args), np.minimum(expected, 1), rtol=1e-5)


def test_gamma_at_a_stationary_point_is_0():
    zero, one = [0.0, 0, 0], [1.0, 2, 2]
    for clamp in (True, False):
        gamma = inexactness(1.0, stacked(zero, one), stacked(zero, zero), stacked(zero, one), clamp)
        assert gamma.tolist() == [0, 0]


def test_gamma_of_an_exact_solve_is_0_and_of_no_work_is_1():
    one, two = [1.0, 2, 2], [-1.0, -2, -2]
    gamma = inexactness(1.0, stacked([0, 0, 0], one), stacked(one, one), stacked(one, two))
    np.testing.assert_allclose(gamma, [1, 0], atol=1e-7)


def test_gamma_falls_as_a_device_works():
    """On its own convex loss, each further full-gradient step leaves less of the gradient."""
    params = on_device(random_params(1))
    solver = Solver(lr=0.3, mu=0.1, batch=BATCH, unit="gradient")
    k = 4

    @jax.jit
    def gamma(work):
        chosen = Slots(jnp.full(6, k), work, WORDS)
        here = for_each(chosen, params)
        delta = local.solve(PROBLEM[True], solver, here, chosen).delta
        wanted = jnp.ones(6, bool)
        grad = local.gradients(PROBLEM[True], here, chosen.device, wanted)
        after = local.gradients(PROBLEM[True], jax.tree.map(jnp.add, here, delta), chosen.device, wanted)
        return jax.vmap(functools.partial(inexactness_of_one, mu=solver.mu))(delta, grad, after)

    left = np.asarray(gamma(jnp.array([0, 1, 3, 10, 30, 100])))
    assert left[0] == pytest.approx(1, abs=1e-6)
    assert np.all(np.diff(left) < 0)
    assert left[-1] < 0.05
