"""One table through which every algorithm goes.

Each entry is simulated once, as one program over three settings of its numbers and two seeds, on conditions that
are rough on purpose: more draws than devices, so that some repeat; half of the devices lost; a model whose
parameters are nested. Every check then reads what that program recorded, or runs it again.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from random_numbers import uniform

from folb import system
from folb.core import randomness
from folb.core.algorithms import ALGORITHMS
from folb.data.federation import Federation
from folb.data.synthetic import synthetic
from folb.experiments.settings import chosen_by_name
from folb.models import Model, cross_entropy, logistic
from folb.simulation import play as rounds
from folb.simulation import problem as problems
from folb.simulation import program
from folb.simulation import simulate as simulator

FEDERATION = synthetic(devices=6, sizes=[20, 31, 45, 150, 12, 60])
N, K, ROUNDS, SEEDS = FEDERATION.N, 8, 4, (3, 4)
SYSTEM = system.uniform(high=4, dropout=0.5)
RECORDS = [name for name in problems.RECORDS if name != "own"]  # of the rounds; that one is of their evaluation


@jax.jit  # one program, where every operation would be one by itself
def _init(key):
    keys = jax.random.split(key)
    return {
        "hidden": [{"weight": 0.3 * jax.random.normal(keys[0], (60, 4))}, jnp.zeros(4)],
        "out": {"weight": 0.3 * jax.random.normal(keys[1], (4, 10)), "bias": jnp.zeros(10)},
    }


def _scores(params, x):
    layer, bias = params["hidden"]
    return jnp.tanh(x @ layer["weight"] + bias) @ params["out"]["weight"] + params["out"]["bias"]


NESTED = Model(
    init=_init,
    loss=lambda params, x, y: cross_entropy(_scores(params, x), y),
    predict=lambda params, x: _scores(params, x).argmax(axis=1),
)
LOSS, PREDICT = jax.jit(NESTED.loss), jax.jit(NESTED.predict)
MODEL_BYTES = 4 * (60 * 4 + 4 + 4 * 10 + 10)
ENCODED_BYTES = {"int8": 294 + 2 * 4, "int4": 147 + 2 * 4, "top_k": 30 * 8}  # of 294 parameters, in two blocks


# an algorithm from a user's own file is held to the same: SCAFFOLD, with a memory of devices
SCAFFOLD = chosen_by_name(
    "algorithms", f"{Path(__file__).parent.parent / 'examples' / 'scaffold.py'}:scaffold", ALGORITHMS
).constructor
MAKERS = ALGORITHMS | {"own scaffold": SCAFFOLD}


class Case(NamedTuple):
    algorithm: str
    settings: dict[str, Any]
    sweep: list[dict[str, float]]

    def algorithms(self):
        usual = {"select.K": K, "local.batch": 5}
        return [MAKERS[self.algorithm](**usual | self.settings | numbers) for numbers in self.sweep]


LR = [{"local.lr": 0.1}, {"local.lr": 0.2}, {"local.lr": 0.05}]
MU = [{"local.mu": 0.0, "local.lr": 0.1}, {"local.mu": 1.0, "local.lr": 0.1}, {"local.mu": 0.1, "local.lr": 0.2}]
PSI = [
    {"rule.psi": 0.0, "local.mu": 0.0, "local.lr": 0.1},
    {"rule.psi": 0.5, "local.mu": 0.0, "local.lr": 0.1},
    {"rule.psi": 2.0, "local.mu": 0.1, "local.lr": 0.2},
]
STEP = [{"server.lr": 0.5, "local.lr": 0.1}, {"server.lr": 0.1, "local.lr": 0.1}, {"server.lr": 0.1, "local.lr": 0.2}]
BETA = [
    {"server.beta": 0.5, "local.lr": 0.1},
    {"server.beta": 0.8, "local.lr": 0.1},
    {"server.beta": 0.8, "local.lr": 0.2},
]
AVERAGED = [
    {"average.rate": 0.5, "server.beta": 0.9, "server.beta2": 0.99, "server.eps": 0.01, "local.lr": 0.1},
    {"average.rate": 0.8, "server.beta": 0.7, "server.beta2": 0.9, "server.eps": 0.01, "local.lr": 0.1},
    {"average.rate": 0.8, "server.beta": 0.7, "server.beta2": 0.9, "server.eps": 0.1, "local.lr": 0.1},
]
AGREED = [
    {"step_size.gain": 1.0, "server.stretch": 0.5, "local.lr": 0.1},
    {"step_size.gain": 3.0, "server.stretch": 0.2, "local.lr": 0.1},
    {"step_size.gain": 1.0, "server.stretch": 0.5, "local.lr": 0.05},
]
STALE = [
    {"staleness.power": 0.5, "local.lr": 0.1},
    {"staleness.power": 0.9, "local.lr": 0.1},
    {"staleness.power": 0.9, "local.lr": 0.2},
]
ALPHA = [
    {"memory.alpha": 0.1, "local.lr": 0.1},
    {"memory.alpha": 0.5, "local.lr": 0.1},
    {"memory.alpha": 0.5, "local.lr": 0.05},
]
MOMENTUM = [
    {"memory.beta": 0.5, "local.lr": 0.1},
    {"memory.beta": 0.8, "local.lr": 0.1},
    {"memory.beta": 0.8, "local.lr": 0.2},
]
LOCAL = [
    {"local.beta": 0.5, "local.lr": 0.1},
    {"local.beta": 0.8, "local.lr": 0.1},
    {"local.beta": 0.8, "local.lr": 0.05},
]
LIARS = [
    {"robust.liars": 0.0, "local.lr": 0.1},
    {"robust.liars": 0.2, "local.lr": 0.1},
    {"robust.liars": 0.2, "local.lr": 0.05},
]
ATTACKERS = [
    {"attack.share": 0.2, "local.lr": 0.1},
    {"attack.share": 0.5, "local.lr": 0.1},
    {"attack.share": 0.5, "local.lr": 0.05},
]
CAP = [{"guard.cap": 1.5, "local.lr": 0.1}, {"guard.cap": 3.0, "local.lr": 0.1}, {"guard.cap": 2.0, "local.lr": 0.2}]

TABLE = {
    "fedavg": Case("fedavg", {}, LR),
    "fedavg, samples, momentum": Case("fedavg", {"rule.weights": "samples", "server": "momentum"}, STEP),
    "fedprox": Case("fedprox", {}, MU),
    "fednu_direct": Case("fednu_direct", {}, MU),
    "fednu_direct, signed, adam": Case("fednu_direct", {"rule": "signed", "server": "adam"}, STEP),
    "fednu_norm": Case("fednu_norm", {}, MU),
    "fednu_norm, signed": Case("fednu_norm", {"rule": "signed"}, MU),
    "folb": Case("folb", {}, MU),
    "folb, fedexp": Case("folb", {"server": "fedexp"}, STEP),
    "folb_two_set": Case("folb_two_set", {}, MU),
    "folb_two_set, yogi": Case("folb_two_set", {"server": "yogi"}, STEP),
    "folb_hetero": Case("folb_hetero", {}, PSI),
    "folb_never_flip": Case("folb_never_flip", {}, PSI),
    "folb, guarded, nesterov": Case("folb", {"guard": "on", "server": "nesterov", "server.lr": 0.5}, CAP),
    "folb_two_set, guarded": Case("folb_two_set", {"guard": "on"}, MU),
    "own scaffold": Case("own scaffold", {}, LR),
    "scaffold": Case("scaffold", {}, LR),
    "scaffold, option 1, yogi, ema": Case(
        "scaffold", {"memory.option": "1", "server": "yogi", "average": "ema"}, AVERAGED
    ),
    "feddyn": Case("feddyn", {}, ALPHA),
    "fedvarp": Case("fedvarp", {}, LR),
    "fedcm": Case("fedcm", {}, ALPHA),
    "mimelite": Case("mimelite", {}, MOMENTUM),
    "ghbm": Case("ghbm", {"memory.tau": 2}, MOMENTUM),
    "adabest": Case("adabest", {}, MOMENTUM),
    "fednova": Case("fednova", {"rule.weights": "samples", "local": "momentum"}, LOCAL),
    "fedacg": Case("fedacg", {}, BETA),
    "accord": Case(
        "accord", {"select.replacement": True, "select": "uniform", "step_size": "consensus", "whiten": None}, AGREED
    ),
    "fedexprox": Case("fedexprox", {}, MU),
    "fedmuon": Case("fedmuon", {"local.whole": True}, LOCAL),
    "fedpac": Case("fedpac", {"local.whole": True}, LOCAL),
    "fedbuff": Case("fedbuff", {"select.K": 3, "concurrency": 3}, STALE),
    "fedasync": Case("fedasync", {"select.K": 1, "concurrency": 4}, STALE),
    "fedavg, delta_sgd, adagrad": Case("fedavg", {"local": "delta_sgd", "server": "adagrad"}, STEP),
    "fedavg, power of choice": Case("fedavg", {"select": "power_of_choice", "select.K": 3}, LR),
    "fedavg, remembered loss, nesterov": Case(
        "fedavg", {"select": "remembered_loss", "server": "nesterov", "select.K": 3}, BETA
    ),
    "fedavg, clusters": Case("fedavg", {"select": "clusters", "select.K": 3}, LR),
    "folb, sketch, guarded": Case(
        "folb", {"gradient": "sketch", "gradient.m": 64, "gradient.bits": 32, "guard": "on"}, CAP
    ),
    "folb_two_set, sketch of 8 bits": Case(
        "folb_two_set", {"gradient": "sketch", "gradient.m": 64, "gradient.bits": 8}, MU
    ),
    "folb_two_set, proxy": Case("folb_two_set", {"gradient": "proxy"}, MU),
    "folb_hetero, proxy, scaffold, lookahead": Case(
        "folb_hetero", {"gradient": "proxy", "memory": "scaffold", "server": "lookahead"}, BETA
    ),
    "fedavg, top_k, int8 down": Case("fedavg", {"compress_up": "top_k", "compress_down": "int8"}, LR),
    "folb, int4": Case("folb", {"compress_up": "int4", "error_feedback": True}, MU),
    "fedavg, median, buckets": Case("fedavg", {"robust": "median", "robust.bucket": 2, "robust.liars": 0.0}, LR),
    "fedavg, trimmed mean": Case("fedavg", {"robust": "trimmed_mean"}, LIARS),
    "fedprox, krum, nesterov": Case("fedprox", {"robust": "krum", "robust.liars": 0.0, "server": "nesterov"}, BETA),
    "scaffold, multi-krum": Case("scaffold", {"robust": "multi_krum", "robust.liars": 0.0}, LR),
    "accord, geometric median": Case(
        "accord",
        {
            "robust": "geometric_median",
            "select.replacement": True,
            "select": "uniform",
            "step_size": "agreement",
            "whiten": None,
        },
        AGREED,
    ),
    "folb, guarded, norm bound": Case("folb", {"guard": "on", "robust": "norm_bound"}, CAP),
    "feddyn, norm bound, ema": Case("feddyn", {"robust": "norm_bound", "average": "ema"}, ALPHA),
    "fedavg, fltrust, attacked": Case("fedavg", {"robust": "fltrust", "robust.root": 20, "attack": "alie"}, ATTACKERS),
    "fedavg, momentum, last two": Case("fedavg", {"server": "momentum", "average": "last_two"}, BETA),
}


def test_the_table_is_complete():
    assert {case.algorithm for case in TABLE.values()} == set(MAKERS)


def simulate(algorithms, seeds=SEEDS, chosen=SYSTEM, **options):
    return simulator.simulate(
        FEDERATION, NESTED, algorithms, rounds=ROUNDS, seeds=seeds, system=chosen, record=RECORDS, **options
    )


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def curves(run):
    """All that a run recorded round by round, and its last parameters."""
    fields = "bytes_up", "bytes_down", "seconds", "devices", "times", "updated", "test_accuracy", "train_loss"
    return {name: getattr(run, name) for name in fields} | run.records | {"params": run.params}


def check_draws(case, runs):
    """Which devices are drawn, which are lost and how much the others do, by hand: the algorithm does not matter.

    Only a survey changes which devices are drawn. Some devices are drawn more than once, and some are lost.
    """
    repeats = lost = 0
    for run in runs:
        for t in range(1, ROUNDS + 1):
            devices, times, work = run.devices[t - 1], run.times[t - 1], run.records["work"][t - 1]
            if not case.algorithm.startswith("fednu") and "select" not in case.settings:
                np.testing.assert_array_equal(devices, np.sort(uniform_draws(run.seed, t)[:K]))
            draws = uniform(run.seed, t, devices, 4)[:, 2:]
            first = np.diff(devices, prepend=-1) > 0
            usable = first & (draws[:, 1] >= 0.5)
            multiplicity = np.sum(devices[:, None] == devices, axis=1)
            np.testing.assert_array_equal(times, np.where(usable, multiplicity, 0))
            np.testing.assert_array_equal(work, np.where(usable, 1 + np.floor(draws[:, 0] * 4), 0))
            repeats += np.sum(times > 1)
            lost += np.sum(first & ~usable)
        assert not np.any(run.records["weights"][run.times == 0])
        assert np.all((run.records["gamma"] >= 0) & (run.records["gamma"] <= 1))
        np.testing.assert_array_equal(run.updated, np.any(run.records["weights"] != 0, axis=1))
    assert repeats > 10 or "select" in case.settings  # those draw each device once
    assert lost > 10


def uniform_draws(seed, t):
    """The devices of S_1, then those of S_2."""
    u = uniform(seed, t, randomness.SERVER, 2 * K)
    return np.minimum(np.floor(u * N).astype(int), N - 1)


def check_the_model_learns(runs):
    """The parameters keep their nested shape and change, and every number in the sweep has an effect."""
    finals = []
    for run in runs:
        first = _init(jax.random.key(run.seed))
        assert jax.tree.structure(run.params) == jax.tree.structure(first)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
        assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (run.params, first)), strict=True))
        finals.append(run.params["out"]["weight"].tobytes())
    assert len(set(finals)) == len(runs)


def check_evaluation(runs):
    """Training loss and test accuracy of the last parameters, a mean over all samples of all devices."""
    train, test = FEDERATION.train, FEDERATION.test
    for run in runs[::2]:
        loss = np.asarray(LOSS(run.params, train.x, train.y)).mean()
        accuracy = np.mean(np.asarray(PREDICT(run.params, test.x)) == test.y)
        assert run.train_loss[-1] == pytest.approx(loss, rel=1e-5)
        assert run.test_accuracy[-1] == pytest.approx(accuracy, abs=1e-6)
        assert run.evaluated_rounds.tolist() == [1, 2, 3, 4]


def check_weights(case, runs):
    """The weight of every slot in every round, from the recorded inner products and gammas."""
    for run in runs:
        for t in range(ROUNDS):
            times, inner, gamma = run.times[t], run.records["inner"][t], run.records["gamma"][t]
            weights, size = run.records["weights"][t], FEDERATION.train.size[run.devices[t]]
            if not run.updated[t]:
                assert not weights.any()
                continue
            if {"gradient", "error_feedback"} & set(case.settings) and not run.parameters.get("guard"):
                continue  # tests/test_family.py and test_compression.py have these weights
            if run.parameters.get("robust"):  # tests/test_robust.py has the centres
                assert np.all(weights >= -1e-6)
                continue
            if run.parameters.get("guard"):  # tests/test_guard.py has the weights themselves
                most = run.parameters["guard.cap"] / len(times)
                assert np.all((weights >= 0) & (weights <= most * (1 + 1e-6)))
                continue
            psi = run.parameters.get("rule.psi", 0.0)
            discount = psi * gamma * np.sum(times * inner) / times.sum()  # ||grad_1 f||^2, S_1 being uniform
            shrunk = np.sign(inner) * np.maximum(np.abs(inner) - discount, 0)
            expected = {
                "mean": times / times.sum(),
                "fednova": nova(times * size, steps_weigh(run.records["work"][t], run.parameters.get("local.beta"))),
                "samples": times * size / np.sum(times * size),
                "signed": times / times.sum() * np.sign(inner),
                "folb": times * inner / np.sum(np.abs(times * inner)),
                "folb_two_set": times * inner,
                "folb_hetero": times * (inner - discount) / np.sum(np.abs(times * (inner - discount))),
                "folb_never_flip": times * shrunk / max(np.sum(np.abs(times * shrunk)), 1e-30),
            }[case.settings.get("rule") or rule_of(case)]
            if case.algorithm == "folb_two_set":  # (9) divides by what S_2 sent, the same for every slot
                weights, expected = weights / np.sum(np.abs(weights)), expected / np.sum(np.abs(expected))
            if case.algorithm == "fednu_direct":  # its signs are the survey's, not the estimate's
                weights, expected = np.abs(weights), np.abs(expected)
            expected = expected * gain(run.parameters)
            np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-5)


def gain(settings):
    """How many times an update is in the server's step; 1 for steps that are no multiple of it."""
    lr = settings.get("server.lr") or 1.0
    by_step = {"plain": lr, "momentum": lr, "nesterov": lr * (1 + (settings.get("server.beta") or 0.9))}
    return by_step.get(settings["server"], 1.0)


def steps_weigh(J, beta):
    """sum_j (1 - beta^j) / (1 - beta) over J steps with momentum beta."""
    return np.array([sum((1 - beta**j) / (1 - beta) for j in range(1, n + 1)) for n in J]) if beta else J


def nova(p, a):
    p = p / p.sum()
    return np.sum(p * a) * np.divide(p, a, out=np.zeros_like(p), where=p > 0)


def rule_of(case):
    if case.algorithm.startswith("folb") or case.algorithm == "fednova":
        return case.algorithm
    return "samples" if case.settings.get("rule.weights") == "samples" else "mean"


def second_set(run, t):
    """S_2 of a round, drawn again by hand: the distinct devices, and those of them that are lost."""
    draws = uniform(run.seed, t, np.arange(N), 4)[:, 3]
    return set(uniform_draws(run.seed, t)[K:].tolist()), set(np.flatnonzero(draws < 0.5).tolist())


def check_bytes(case, runs):
    """What crossed the wire, counted device by device."""
    if "select" in case.settings:
        return  # tests/test_family.py counts these
    survey_up = {"fednu_direct": N * MODEL_BYTES, "fednu_norm": N * 4}.get(case.algorithm, 0)
    uploads_gradient = case.algorithm.startswith("folb") or (
        (case.algorithm == "fednu_norm" and case.settings.get("rule") == "signed")
        or "memory.option" in case.settings
        or case.algorithm in ("mimelite", "fedmuon", "fedpac")  # the last two a momentum, which is as large
    )
    sketch = {32: 64 * 4, 8: 64 + 4}.get(case.settings.get("gradient.bits"), 0)
    update = ENCODED_BYTES.get(case.settings.get("compress_up"), MODEL_BYTES)
    whole = ENCODED_BYTES.get(case.settings.get("compress_down"), MODEL_BYTES)
    gradient = {"sketch": sketch, "proxy": 0}.get(case.settings.get("gradient"), update)
    alone = MODEL_BYTES if case.settings.get("gradient") == "proxy" else gradient  # what S_2 sends
    uploads_gamma = case.algorithm in ("folb_hetero", "folb_never_flip")
    for run in runs[:2]:
        for t in range(ROUNDS):
            asked = set(run.devices[t].tolist())
            up = survey_up
            for _ in set(run.devices[t][run.times[t] > 0].tolist()):
                up += update
                up += gradient if uploads_gradient else 0
                up += 4 if uploads_gamma else 0
            if case.algorithm == "folb_two_set":
                others, lost = second_set(run, t + 1)
                up += alone * len(others - asked - lost)
                asked |= others
            if survey_up:
                asked = set(range(N))
            assert run.bytes_up[t] == up
            memory = case.algorithms()[0].memory
            more = {"fedvarp": 0, "fedmuon": 2, "fedpac": 2}.get(case.algorithm, 0 if memory is None else 1)
            assert run.bytes_down[t] == (whole + more * MODEL_BYTES) * len(asked)


def check_other_numbers_are_the_same_program(case, runs):
    """Other seeds, settings, system and objective: the caller sees that nothing is compiled for them."""
    other = [{name: 0.7 * value + 0.01 for name, value in numbers.items()} for numbers in case.sweep]
    again = simulate(
        case._replace(sweep=other).algorithms(),
        seeds=(11, 12),
        chosen=system.uniform(low=2, high=3, dropout=0.1),
        objective="samples",
    )
    assert [run.seed for run in again] == [11, 12] * 3
    assert not np.array_equal(again[0].train_loss, runs[0].train_loss)


def check_same_seed_same_bits(case, runs):
    for run, again in zip(runs, simulate(case.algorithms()), strict=True):
        assert_same_bits(curves(again), curves(run))


def check_runs_do_not_depend_on_their_companions(case, runs):
    """The runs in another order: each is what it was."""
    other = simulate(case.algorithms()[::-1], seeds=SEEDS[::-1])
    for run, again in zip(runs, other[::-1], strict=True):
        assert (again.seed, again.parameters) == (run.seed, run.parameters)
        assert_same_bits(curves(again), curves(run))


def stacked(case):
    pairs = [(algorithm, seed) for algorithm in case.algorithms() for seed in SEEDS]
    algorithms = jax.tree.map(lambda *leaves: np.stack(leaves), *(algorithm for algorithm, _ in pairs))
    return algorithms, np.array([seed for _, seed in pairs], np.uint32)


def check_a_round_can_be_replayed_alone(case, runs):
    """Rounds 1 and 2, then round 3 alone: the same bits as in the run, whose rounds came in other chunks."""
    problem = problems.problem(FEDERATION, NESTED, system=SYSTEM, record=RECORDS)
    algorithms, seeds = stacked(case)

    def advance(states, first, last):
        span = (np.int32(first), np.int32(last + 1), np.int32(1))
        return program.advance(problem, algorithms, states, seeds, *span)

    first = case.algorithms()[0]
    room = problems.ENDLESS if first.memory is None and not first.compression.remembers else ROUNDS
    before, _ = advance(program.begin(problem, algorithms, seeds, rounds=room), 1, 2)
    after, record = advance(before, 3, 3)
    final = program.models_kept(algorithms, advance(after, 4, ROUNDS)[0])
    record, final = jax.tree.map(np.asarray, (record, final))
    for r, run in enumerate(runs):
        assert record.evaluation.train_loss[0, r] == run.train_loss[2]
        assert_same_bits({name: getattr(record.info, name)[0, r] for name in run.records}, _at(run.records, 2))
        assert_same_bits(jax.tree.map(lambda leaf, r=r: leaf[r], final), run.params)


def _at(records, t):
    return {name: values[t] for name, values in records.items()}


# A run on its own, unstacked, as a second program


def play_alone(model, algorithm, seed):
    """All rounds of one run through `play`, compiled for itself: what each recorded, and the last parameters."""
    problem = problems.problem(FEDERATION, model, system=SYSTEM, record=RECORDS)
    play = jax.jit(rounds.play)
    state, infos = jax.jit(rounds.start)(problem, algorithm, seed), []
    for t in range(1, ROUNDS + 1):
        state, info = play(problem, algorithm, state, seed, t)
        infos.append(info)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *infos), state.params


def check_one_program_over_a_sweep_is_many_runs_alone(case, runs):
    for i, algorithm in enumerate(case.algorithms()):
        check_same_run(play_alone(NESTED, algorithm, SEEDS[1]), runs[2 * i + 1])


def check_a_flat_model_gives_the_same_run(case, runs):
    """The same model with its parameters in one vector: nothing depends on the structure of the tree."""
    _, unravel = ravel_pytree(_init(jax.random.key(0)))
    flat = Model(
        init=lambda key: ravel_pytree(_init(key))[0],
        loss=lambda params, x, y: NESTED.loss(unravel(params), x, y),
        predict=lambda params, x: NESTED.predict(unravel(params), x),
    )
    info, params = play_alone(flat, case.algorithms()[1], SEEDS[0])
    check_same_run((info, unravel(params)), runs[2])


def check_the_first_is(special):
    """The first entry of each sweep has mu = 0, and psi = 0: it is another algorithm."""

    def check(case, runs):
        check_same_run(
            play_alone(NESTED, special(**{"select.K": K, "local.batch": 5, "local.lr": 0.1}), SEEDS[0]), runs[0]
        )

    return check


def check_same_run(alone, run):
    info, params = alone
    np.testing.assert_array_equal(info.device, run.devices)
    np.testing.assert_array_equal(info.times, run.times)
    for record, values in run.records.items():
        np.testing.assert_allclose(getattr(info, record), values, rtol=1e-3, atol=1e-5, err_msg=record)
    # Adam divides by what may be small
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-5), params, run.params)


FURTHER = {  # each of these checks compiles a program of its own
    "fedprox": [check_one_program_over_a_sweep_is_many_runs_alone, check_the_first_is(ALGORITHMS["fedavg"])],
    "fednu_direct, signed, adam": [check_one_program_over_a_sweep_is_many_runs_alone],
    "folb_two_set": [check_one_program_over_a_sweep_is_many_runs_alone],
    "folb_two_set, guarded": [check_a_flat_model_gives_the_same_run],
    "folb_hetero": [
        check_one_program_over_a_sweep_is_many_runs_alone,
        check_a_flat_model_gives_the_same_run,
        check_the_first_is(functools.partial(ALGORITHMS["folb"], **{"local.mu": 0.0})),
    ],
    "folb_never_flip": [check_the_first_is(functools.partial(ALGORITHMS["folb"], **{"local.mu": 0.0}))],
}


NIGHTLY = {  # combinations whose parts are all in others
    *("scaffold, option 1, yogi, ema", "fedavg, clusters", "fedavg, remembered loss, nesterov", "folb_two_set, proxy"),
    *("folb_two_set, sketch of 8 bits", "folb, int4", "fedavg, trimmed mean", "accord, geometric median"),
    *("feddyn, norm bound, ema", "fedavg, momentum, last two", "scaffold, multi-krum", "fedprox, krum, nesterov"),
}
assert TABLE.keys() >= NIGHTLY


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in NIGHTLY else name for name in TABLE]
)
def test_conforms(name):
    """All checks on one simulation, in one test, so that it is compiled once however the tests are distributed."""
    case, programs = TABLE[name], program.advance._cache_size()
    runs = simulate(case.algorithms())
    assert program.advance._cache_size() <= programs + 1  # FedProx is the program of FedAvg
    check_the_model_learns(runs)
    check_evaluation(runs)
    if case.algorithm not in ("fedbuff", "fedasync"):  # tests/test_asynchronous.py has these, event by event
        check_draws(case, runs)
        check_weights(case, runs)
        check_bytes(case, runs)

    programs = program.advance._cache_size(), program.begin._cache_size()
    check_other_numbers_are_the_same_program(case, runs)
    check_same_seed_same_bits(case, runs)
    check_runs_do_not_depend_on_their_companions(case, runs)
    check_a_round_can_be_replayed_alone(case, runs)
    assert (program.advance._cache_size(), program.begin._cache_size()) == programs

    for check in FURTHER.get(name, []):
        check(case, runs)


# Memory


@pytest.mark.parametrize("name", ["fednu_direct", "fednu_norm", "folb_hetero"])
def test_memory_does_not_grow_with_the_devices_times_the_parameters(name):
    """From 10 to 160 devices with the same data, a round needs less than one more gradient, not 150.

    The other algorithms need as much memory as these, or less.
    """
    features, samples = 500, 320
    model = logistic((features,), 10)
    gradient = 4 * (features + 1) * 10
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, features)), rng.integers(0, 10, samples)
    used = []
    for devices in (10, 160):
        federation = Federation.from_arrays("random", x, y, np.arange(samples) % devices, np.zeros(samples, bool))
        problem = problems.problem(federation, model, system=SYSTEM)
        algorithm = ALGORITHMS[name](select={"K": 4})
        state = rounds.start(problem, algorithm, 0)
        compiled = jax.jit(rounds.play).lower(problem, algorithm, state, 0, 1).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    assert used[1] - used[0] < gradient
