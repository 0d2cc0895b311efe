"""A step size that the server sets: on quadratics with known constants, and one of a user's own, in both carriers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from test_slots import FEDERATION, MODEL, SYSTEM, furthest, on_flower, simulated

import folb
from folb import InputError, algorithms, simulate
from folb.core import step_size as step_sizes
from folb.core.round import begin, close, model_sent, over_rounds, with_step_size
from folb.core.rules import Round, Update
from folb.flower import TwoPhaseStrategy
from folb.simulation import program

N, K, DIM, STEPS, CONDITION = 30, 10, 12, 3, 100.0
closed = jax.jit(close)


class Quadratics:
    """F_k(w) = (w - c_k)^T A_k (w - c_k) / 2: curvatures from 1 / CONDITION to 1 (with `spread`, times 0.5 to 1.5)."""

    def __init__(self, seed, spread):
        rng = np.random.default_rng(seed)
        curvature = np.geomspace(1 / CONDITION, 1, DIM)
        self.A = curvature * (rng.uniform(0.5, 1.5, (N, DIM)) if spread else np.ones((N, DIM)))
        self.c = spread * rng.normal(size=(N, DIM))
        self.optimum = (self.A * self.c).sum(0) / self.A.sum(0)

    def excess(self, w):
        return float(
            0.5 * np.mean((self.A * (w - self.c) ** 2).sum(1) - (self.A * (self.optimum - self.c) ** 2).sum(1))
        )

    def updates(self, who, start, lr):
        w = np.tile(start, (len(who), 1))
        for _ in range(STEPS):
            w = w - lr * self.A[who] * (w - self.c[who])
        return w - start


def descend(problem, algorithm, rounds=200, seed=0, K=K):
    """The excess loss of the model that is kept over that of the start, and the last step size."""
    rng = np.random.default_rng(seed)
    start = np.full(DIM, 3.0, np.float32)
    state, _ = begin(algorithm, {"w": jnp.asarray(start)})
    ones = np.ones(K, np.float32)
    for t in range(1, rounds + 1):
        now = with_step_size(algorithm, state, t)
        sent, lr = np.asarray(model_sent(now, state)["w"], float), float(now.solver.lr)
        delta = problem.updates(rng.choice(N, K, replace=False), sent, lr).astype(np.float32)
        state = closed(now, state, Round(state.params, ones, ones, ones, {"w": delta})).state
    kept = algorithm.average.model(state.average, state.params)["w"]
    return problem.excess(np.asarray(kept, float)) / problem.excess(start), lr


@pytest.mark.parametrize("first", [0.001, 0.04, 1.0, 3.0, 5.0])
@pytest.mark.parametrize(("spread", "K"), [(0.0, 10), (1.0, 10), (1.0, 30)])
@pytest.mark.parametrize(("rule", "most"), [("consensus", 0.005), ("agreement", 0.02)])
def test_accord_converges_on_quadratics_from_any_first_step(first, spread, K, rule, most):
    """Steps of 2 / L = 2 and more are unstable, and with steps of 0.001 FedAvg hardly moves."""
    left, lr = descend(
        Quadratics(1, spread), algorithms.accord(local={"lr": first}, select={"K": K}, step_size=rule), K=K
    )
    assert left < most
    assert lr != pytest.approx(first)


def factor(rule, updates, **numbers):
    """The factor after rounds with these updates of the devices."""
    size, memory = step_sizes.STEP_SIZES.parts[rule](**numbers), None
    for delta in np.asarray(updates, np.float32):
        mean = {"w": jnp.mean(delta, axis=0)}
        memory = size.init(mean) if memory is None else memory
        ones = jnp.ones(len(delta))
        round = Round(mean, ones, ones, ones, {"w": jnp.asarray(delta)})
        memory = size.update(memory, round._replace(update=Update(mean, ones / len(delta))))
    return float(size.factor(memory, 1))


ALIKE, APART = [[1, 0], [1, 0]], [[1, 1], [1, -1]]  # both have the mean (1, 0)


def test_rounds_that_undo_each_other_shorten_steps_only_if_they_grow():
    """With momentum they do so along steep directions, whatever the step. `agreement` does not know it."""
    back, larger = np.negative(ALIKE), -1.5 * np.array(ALIKE)
    assert factor("consensus", [ALIKE, back, ALIKE, back]) == 1.0
    assert factor("consensus", [ALIKE, larger], gain=1.2) == pytest.approx(np.exp(-1.2 / 1.2 * 0.5))
    assert factor("consensus", [ALIKE, -3 * np.array(ALIKE)], gain=1.2) == pytest.approx(np.exp(-1.0))
    assert factor("agreement", [ALIKE, back]) == pytest.approx(np.exp(-1.25 * 1.2))


def test_devices_that_disagree_shorten_steps_and_rounds_that_agree_lengthen_them():
    across = [[0, 1], [0, 1]]
    assert factor("consensus", [ALIKE, ALIKE], gain=1.2) == pytest.approx(np.exp(1.0))
    assert factor("consensus", [ALIKE, APART], gain=1.2) == pytest.approx(np.exp(1.0 - 0.2))
    assert factor("consensus", [across, APART], gain=1.2, goal=0.3) == pytest.approx(np.exp(-0.3))
    assert factor("consensus", [across, ALIKE], gain=1.2) == 1.0
    assert factor("consensus", [ALIKE, [[1, 0], [-1, 0]]], gain=1.2) == pytest.approx(np.exp(-0.2))  # they cancel
    assert factor("consensus", [[[0, 1]], [[1, 0]]], gain=1.2) == pytest.approx(np.exp(-0.2))  # one device says nothing


def test_no_update_makes_the_factor_anything_but_a_number_within_its_bounds():
    for length in (0.0, 1e-38, 1e30, 3e38, np.inf, np.nan):
        for rule in ("consensus", "agreement"):
            factors = [
                factor(rule, [ALIKE, np.where(np.array(ALIKE), length, 0.0), sign * np.array(ALIKE)])
                for sign in (-1, 1)
            ]
            assert all(0.01 <= one <= 100 for one in factors), (rule, length, factors)


def test_with_one_step_size_these_quadratics_need_tuning():
    problem = Quadratics(1, 1.0)
    assert descend(problem, algorithms.fedavg(local={"lr": 0.001}, select={"K": K}))[0] > 0.2
    assert descend(problem, algorithms.fedavg(local={"lr": 5.0}, select={"K": K}), rounds=8)[0] > 1e3


def test_agreement_with_a_larger_gain_does_not_converge_on_most_of_them():
    given = {"step_size": "agreement", "step_size.gain": 2.0, "step_size.goal": 0.1}
    cases = [(first, spread) for first in (0.001, 0.04, 1.0, 5.0) for spread in (0.0, 1.0)]
    with np.errstate(over="ignore", invalid="ignore"):
        left = [
            descend(Quadratics(1, spread), algorithms.accord(local={"lr": first}, select={"K": K}, **given), rounds=60)
            for first, spread in cases
        ]
    assert sum(not one < 1 for one, _ in left) > len(cases) / 2


class Halved(folb.StepSize):
    def init(self, params):
        return jnp.float32(1)

    def factor(self, memory, t):
        return memory

    def update(self, memory, round):
        return memory / 2


def test_a_step_size_of_one_s_own_in_both_carriers():
    usual = {"select.K": 6, "local.lr": 0.05, "local.batch": 5}
    algorithm = algorithms.fedavg(step_size=Halved(), **usual)
    run = simulated(algorithm, rounds=4, record=("lr", "weights"))
    before = np.cumsum(np.append(0, run.updated[:-1]))  # a round without replies halves nothing
    np.testing.assert_allclose(run.records["lr"], 0.05 * 0.5**before, rtol=1e-6)
    deployed, _ = on_flower(algorithm, rounds=4)
    assert furthest(deployed, run.params) <= 1e-5
    assert furthest(simulated(algorithms.fedavg(**usual), rounds=4).params, run.params) > 1e-4


# schedules ------------------------------------------------------------------------------------------------------------


def literal(name, t, T, warmup=0.0, end=0.0, lowered=0.1):
    s = max(t - 1 - warmup, 0.0)
    falls = {
        "constant": 1.0,
        "cosine": end + (1 - end) * (1 + math.cos(math.pi * min(s / T, 1))) / 2,
        "step": lowered ** (s // T),
        "inverse": 1 / (1 + s / T),
    }
    return min(t / (warmup + 1), 1) * falls[name]


@pytest.mark.parametrize(
    ("name", "usual", "numbers"),
    [
        ("constant", 1.0, {"warmup": 3}),
        ("cosine", 1.0, {"end": 0.01}),
        ("cosine", 1.0, {"warmup": 4, "end": 0.2}),
        ("step", 1 / 3, {"warmup": 2, "lowered": 0.5}),
        ("inverse", 1 / 10, {}),
    ],
)
@pytest.mark.parametrize("T", [None, 7])
def test_a_schedule_is_its_formula(name, usual, numbers, T):
    """T is what was set, or the usual share of the rounds after the warmup; after T rounds a cosine stays."""
    given = {"name": name, **numbers} | ({"rounds": T} if name != "constant" else {})
    algorithm = over_rounds(algorithms.fedavg(step_size=given, local={"lr": 0.5}), 30)
    state, _ = begin(algorithm, {"w": jnp.zeros(2)})
    rates = jax.jit(jax.vmap(lambda t: with_step_size(algorithm, state, t).solver.lr))(jnp.arange(1, 41))
    length = T or usual * (30 - numbers.get("warmup", 0))
    np.testing.assert_allclose(rates, [0.5 * literal(name, t, length, **numbers) for t in range(1, 41)], atol=1e-6)
    assert rates[29] > 0


def test_a_schedule_in_both_carriers_and_swept_in_one_program():
    usual = {"select.K": 6, "local.lr": 0.05, "local.batch": 5, "step_size": "inverse", "step_size.warmup": 2}
    swept = [algorithms.fedavg(**usual, **{"step_size.rounds": T}) for T in (2.0, 3.0)] + [algorithms.fedavg(**usual)]
    before = program.advance._cache_size()
    runs = simulate(FEDERATION, MODEL._replace(heavy=True), swept, rounds=6, seeds=[3], system=SYSTEM, record=("lr",))
    assert program.advance._cache_size() <= before + 1
    for run, T in zip(runs, (2, 3, 1), strict=True):  # a tenth of four rounds is less than one
        np.testing.assert_allclose(run.records["lr"], [0.05 * literal("inverse", t, T, 2) for t in range(1, 7)], 1e-6)
    deployed, strategy = on_flower(swept[0], rounds=6)
    assert furthest(deployed, runs[0].params) <= 1e-5
    assert strategy.opened.algorithm.solver.lr == pytest.approx(runs[0].records["lr"][-1])


def test_a_run_on_flower_goes_on_if_its_schedule_does_not_depend_on_the_rounds(tmp_path):
    def go(last, path, **settings):
        algorithm = algorithms.fedavg(select={"K": 6}, step_size={"name": "cosine", **settings})
        on_flower(algorithm, rounds=last, directory=tmp_path / path)

    go(1, "free")
    with pytest.raises(InputError, match="holds another run"):
        go(2, "free")
    go(1, "set", rounds=5)
    go(2, "set", rounds=5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step_size": "cosin"}, "did you mean 'cosine'"),
        (
            {"step_size.warmup": 3},
            "step_size.warmup = 3: is for step_size=cosine, step, inverse, constant; step_size is not set",
        ),
        (
            {"step_size": "agreement", "step_size.rounds": 9},
            "is for step_size=relative, cosine, step, inverse; step_size is agreement",
        ),
        (
            {"step_size": "cosine", "step_size.goal": 0.1},
            "is for step_size=consensus, relative, agreement; step_size is cosine",
        ),
        ({"step_size": "cosine", "step_size.end": 2.0}, "step_size.end = 2.0: should be from 0 to 1"),
        ({"step_size": "step", "step_size.lowered": 0.0}, "step_size.lowered = 0.0: should be more than 0"),
        ({"step_size": "step", "step_size.rounds": 0}, "step_size.rounds = 0: should be at least 1"),
        ({"step_size": "constant", "step_size.warmup": -1}, "step_size.warmup = -1: should be at least 0"),
        ({"step_size": 3}, "step_size = 3: should be one of consensus, relative, by_model, agreement"),
    ],
)
def test_bad_schedules_are_one_line(given, message):
    with pytest.raises(InputError, match=message):
        algorithms.fedavg(**given)


def test_a_step_size_never_falls_to_0():
    algorithm = algorithms.fedavg(step_size={"name": "cosine", "rounds": 7, "warmup": 2})
    assert over_rounds(algorithm, 9) is not None
    with pytest.raises(InputError, match=r"step_size\.rounds = 7: should be at least 8, the rounds after the warmup"):
        over_rounds(algorithm, 10)
    state, _ = begin(algorithm, {"w": jnp.zeros(2)})
    assert with_step_size(over_rounds(algorithms.fedavg(step_size="cosine"), 50), state, 50).solver.lr > 0


def test_a_schedule_over_all_rounds_needs_their_number():
    algorithm = algorithms.fedavg(step_size="cosine")
    state, _ = begin(algorithm, {"w": jnp.zeros(2)})
    with pytest.raises(InputError, match=r"step_size\.rounds = None: should be a number here"):
        with_step_size(algorithm, state, 1)


def test_sums_alone_are_enough_for_a_schedule():
    TwoPhaseStrategy(algorithms.folb(select={"K": 6}, step_size="cosine"))


def test_a_step_size_of_the_wrong_shape_is_named():
    class Wrong(folb.StepSize):
        def factor(self, memory, t):
            return jnp.ones(2)

    with pytest.raises(InputError, match="step_size: what factor"):
        simulated(algorithms.fedavg(step_size=Wrong(), select={"K": 6}), rounds=1)


@pytest.mark.parametrize(("setting", "value"), [("step_size", "agreement"), ("stretch", 0.5)])
def test_sums_alone_do_not_set_a_step_size(setting, value):
    with pytest.raises(InputError, match=setting):
        TwoPhaseStrategy(algorithms.folb(select={"K": 6}, server="lookahead", **{setting: value}))


def test_the_guard_refuses_a_stretched_step():
    with pytest.raises(InputError, match="lookahead without stretch, if guarded"):
        algorithms.folb(guard="on", server={"name": "lookahead", "stretch": 0.5})


def test_a_liar_stretches_a_step_to_the_bound_and_no_further():
    """However long its update is, the step is at most sqrt(K) times as long as the mean."""
    algorithm = algorithms.accord(select={"K": K})
    state, _ = begin(algorithm, {"w": jnp.zeros(DIM)})
    delta = np.random.default_rng(0).normal(size=(K, DIM)).astype(np.float32)
    ones = np.ones(K, np.float32)
    for length in (1e-6, 1.0, 1e6):
        delta[0] *= length
        after = closed(algorithm, state, Round(state.params, ones, ones, ones, {"w": delta})).state
        step, mean = np.linalg.norm(after.params["w"]), np.linalg.norm(delta.mean(axis=0))
        assert mean * 0.999 <= step <= np.sqrt(K) * mean * 1.001
        delta[0] /= length


@pytest.mark.parametrize(
    ("rule", "times", "ratio", "end"),
    [
        ("consensus", 1, np.exp(1.25 * 0.8), 100.0),
        ("consensus", -1, np.exp(-1.25 * 0.2), 0.01),
        ("consensus", -2, np.exp(-1.25 * 1.2), 0.01),
        ("agreement", 1, np.exp(1.25 * 0.8), 100.0),
        ("agreement", -1, np.exp(-1.25 * 1.2), 0.01),
    ],
)
def test_a_liar_moves_the_step_size_no_faster_and_no_further_than_said(rule, times, ratio, end):
    """One update that drowns all others, repeated, or turned round in every round; the third one also doubles."""
    algorithm = algorithms.accord(select={"K": K}, local={"lr": 1.0}, step_size=rule)
    state, _ = begin(algorithm, {"w": jnp.zeros(DIM)})
    ones, sizes = np.ones(K, np.float32), []
    delta = np.zeros((K, DIM), np.float32)
    delta[0] = 1e3
    for t in range(1, 44):
        state = closed(algorithm, state, Round(state.params, ones, ones, ones, {"w": delta})).state
        sizes.append(float(with_step_size(algorithm, state, t + 1).solver.lr))
        delta = times * delta
    assert sizes[0] == 1 and sizes[1] == pytest.approx(ratio, rel=1e-4) and sizes[-1] == pytest.approx(end, rel=0.01)


@pytest.mark.parametrize("silent", [0.0, 0.2, 0.5])
def test_silent_liars_lengthen_a_relative_step_by_no_more_than_their_share_allows(silent):
    """Honest updates are as long as lr says; liars send nothing, which makes the mean square shorter."""
    rule, K, scale = step_sizes.Relative(goal=0.1, rounds=1e9), 10, 7.0
    liars = int(silent * K)
    memory, params = rule.init({"w": jnp.ones(4)}), {"w": jnp.ones(4)}
    for _ in range(60):
        length = scale * float(rule.factor(memory, 1))
        delta = {"w": jnp.zeros((K, 4)).at[liars:, 0].set(length)}
        update = Update({"w": jnp.mean(delta["w"], axis=0)}, jnp.full(K, 1 / K))
        ones = jnp.ones(K)
        round = Round(params, ones, ones, ones, delta)._replace(update=update)
        memory = rule.update(memory, round)
    honest = scale * float(rule.factor(memory, 1)) / 2  # over the model's length
    np.testing.assert_allclose(honest, 0.1 / np.sqrt(1 - silent), rtol=1e-3)
    huge = round._replace(delta={"w": delta["w"].at[0, 0].set(1e6)})
    assert float(rule.factor(rule.update(memory, huge), 1)) >= float(rule.factor(memory, 1)) / np.e * 0.999
