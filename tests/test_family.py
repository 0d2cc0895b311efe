"""The methods that people compare with: each against a literal loop, and in both carriers."""

import functools
import json
from typing import NamedTuple

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from own import sampling
from random_numbers import words
from test_flower import softmax_gradient as gradient
from test_slots import FEDERATION, MODEL, SEED, SYSTEM, begin, furthest, loss, on_flower, samples, simulated

import folb
from folb import InputError, algorithms, rules
from folb.core import drift, randomness, samplings, selection, sketch
from folb.core import round as core_round
from folb.core.algorithms import ALGORITHMS
from folb.core.randomness import CANDIDATES, ROUND
from folb.core.vector import scaled
from folb.flower import TwoPhaseStrategy
from folb.flower.local_work import batches
from folb.flower.protocol import Task
from folb.simulation import problem as problems
from folb.simulation import program

N, K, ROUNDS, LR, BATCH = FEDERATION.N, 6, 8, 0.05, 5
USUAL = {"select.K": K, "local.lr": LR, "local.batch": BATCH}


# A literal loop: device by device, step by step, in 64 bits. The draws and the work are the record's. ---------------


class Vector(dict):
    """A model in 64 bits, with the few operations that the formulas need."""

    def __add__(self, other):
        return Vector({name: value + other[name] for name, value in self.items()})

    def __mul__(self, factor):
        return Vector({name: value * factor for name, value in self.items()})

    __rmul__ = __mul__

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + -other

    def __truediv__(self, number):
        return self * (1 / number)

    def dot(self, other):
        return sum(float(np.sum(value * other[name])) for name, value in self.items())

    @property
    def norm(self):
        return self.dot(self) ** 0.5


def model():
    return Vector({name: value.astype(float) for name, value in begin().items()})


def full_gradient(w, k):
    return Vector(gradient(w, *samples(k)))


def mean(values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    total = functools.reduce(Vector.__add__, [value * weight for value, weight in zip(values, weights, strict=True)])
    return total / sum(weights)


class Reply:
    """A device's part in a round."""

    def __init__(self, k, times, w, delta, steps):
        self.k, self.times, self.delta, self.steps = k, times, delta, steps
        self.size, self.grad = len(samples(k)[1]), lambda: full_gradient(w, k)


def sgd(w, k, work, t, direction, mu=0.0, lr=LR):
    """Local steps -lr * direction(g), and how many there were."""
    keys = tuple(int(word) for word in words(SEED, t, k, 2))
    x, y = samples(k)
    at, steps = w, 0
    for rows in batches(Task(t, (), int(work), keys, batch=BATCH, unit="step"), len(y)):
        g = Vector(gradient(at, x[rows], y[rows])) + (at - w) * mu
        at, steps = at - direction(g) * lr, steps + 1
    return at - w, steps


def replies(run, t, w, direction=lambda k: lambda g: g, mu=0.0, lr=LR, solve=sgd):
    """What came back in round t, from devices that started at w."""
    answers = []
    for k, times, work in zip(run.devices[t - 1], run.times[t - 1], run.records["work"][t - 1], strict=True):
        if times > 0:
            answers.append(Reply(int(k), float(times), w, *solve(w, int(k), work, t, direction(int(k)), mu, lr)))
    return answers


def rounds(run):
    """The rounds with replies: others change nothing."""
    return [t for t in range(1, ROUNDS + 1) if run.times[t - 1].any()]


def average(answers):
    return mean([reply.delta for reply in answers], [reply.times for reply in answers])


def fedavg(run):
    w = model()
    for t in rounds(run):
        w = w + average(replies(run, t, w))
    return w


def feddyn(run, alpha=0.1):
    w, h, h_k = model(), model() * 0, {k: model() * 0 for k in range(N)}
    for t in rounds(run):
        answers = replies(run, t, w, lambda k: lambda g: g - h_k[k], mu=alpha)
        for reply in answers:
            h_k[reply.k] = h_k[reply.k] - reply.delta * alpha
            h = h - reply.delta * (alpha / N)
        w = w + average(answers) - h / alpha
    return w


def fedvarp(run):
    w, ybar, y = model(), model() * 0, {k: model() * 0 for k in range(N)}
    for t in rounds(run):
        answers = replies(run, t, w)
        v = ybar + mean([r.delta - y[r.k] for r in answers], [r.times for r in answers])
        for reply in answers:
            ybar = ybar + (reply.delta - y[reply.k]) / N
            y[reply.k] = reply.delta
        w = w + v
    return w


def fednova(run, momentum=0.0, by_samples=False):
    w = model()
    for t in rounds(run):
        solve = sgd if momentum == 0 else functools.partial(heavy_ball, beta=momentum)
        answers = replies(run, t, w, solve=solve)
        p = np.array([r.times * (r.size if by_samples else 1) for r in answers])
        p = p / p.sum()
        a = [sum(sum(momentum**i for i in range(j + 1)) for j in range(r.steps)) for r in answers]
        step = functools.reduce(Vector.__add__, [r.delta * (q / b) for r, q, b in zip(answers, p, a, strict=True)])
        w = w + step * float(np.dot(p, a))
    return w


def heavy_ball(w, k, work, t, direction, mu, lr, beta=0.9):
    v = None

    def with_momentum(g):
        nonlocal v
        v = g if v is None else v * beta + g
        return v

    return sgd(w, k, work, t, with_momentum, mu, lr)


def local_momentum(run):
    w = model()
    for t in rounds(run):
        w = w + average(replies(run, t, w, solve=heavy_ball))
    return w


def fedacg(run, beta=0.8, mu=0.1):
    w, m = model(), model() * 0
    for t in rounds(run):
        v = w + m * beta
        m = m * beta + average(replies(run, t, v, mu=mu))
        w = w + m
    return w


def by_agreement(said, gain=1.25, goal=0.2):
    """What lr is multiplied by after a round, from what each round said; none for the first."""
    return np.exp(gain * (said[-1].cosine - goal))


def by_consensus(said, gain=1.5, goal=0.2):
    now, earlier = said[-1], said[-3:-1]
    growth = min(max(now.length / max(one.length for one in earlier) - 1, 0.0), 1.0)
    change = max(now.cosine, 0.0) - goal * now.disagreement**2 - max(-now.cosine, 0.0) * growth
    return np.exp(gain / (1 + len(said) / 10) * change)


class Measured(NamedTuple):
    cosine: float
    disagreement: float
    length: float


def accord(run, lr=LR, beta=0.8, stretch=0.5, rate=0.6, by=by_consensus):
    w, m, before, factor = model(), model() * 0, None, 1.0
    total, count, said = model() * 0, 0.0, []
    for t in rounds(run):
        answers = replies(run, t, w + m * beta, lr=lr * factor)
        delta = average(answers)
        a = np.array([reply.times for reply in answers]) / sum(reply.times for reply in answers)
        squares = [reply.delta.dot(reply.delta) for reply in answers]
        most = 1 / float(a @ a)
        shortening = min(max(float(a @ squares) / delta.dot(delta), 1.0), most)
        m = m * beta + delta * shortening**stretch
        w = w + m
        cosine = 0.0 if before is None else delta.dot(before) / (delta.norm * before.norm)
        said.append(Measured(cosine, (shortening - 1) / (most - 1) if most > 1 else 1.0, delta.norm))
        if before is not None:
            factor = min(max(factor * by(said), 0.01), 100.0)
        before = delta
        total, count = total * rate + w, count * rate + 1
    return total / count


def nesterov(run, beta=0.8):
    w, m = model(), model() * 0
    for t in rounds(run):
        delta = average(replies(run, t, w))
        m = m * beta + delta
        w = w + delta + m * beta
    return w


def adagrad(run, lr=0.1, eps=0.01):
    w = model()
    v = Vector({name: np.full_like(value, eps**2) for name, value in w.items()})
    for t in rounds(run):
        delta = average(replies(run, t, w))
        v = v + Vector({name: value**2 for name, value in delta.items()})
        w = w + Vector({name: lr * value / (np.sqrt(v[name]) + eps) for name, value in delta.items()})
    return w


def fedexp(run, eps=0.01, decay=0.9):
    w = last = model()
    for t in rounds(run):
        answers = replies(run, t, w)
        delta = average(answers)
        squares = sum(r.times * r.delta.dot(r.delta) for r in answers) / sum(r.times for r in answers)
        last, w = w, w + delta * max(1.0, squares / (2 * (delta.dot(delta) + eps * decay ** (t - 1))))
    return (w + last) / 2


def fedexprox(run, mu=0.3):
    w = model()
    for t in rounds(run):
        answers = replies(run, t, w, mu=mu)
        delta, count = average(answers), sum(r.times for r in answers)
        w = w + delta * (sum(r.times * r.delta.dot(r.delta) for r in answers) / count / delta.dot(delta))
    return w


def orthogonal(v, share=0.75):
    """The move along -v in units of lr: five Newton-Schulz steps for the matrix, and a vector's own direction."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = v["weight"] / max(np.linalg.norm(v["weight"]), 1e-300)
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    bias = v["bias"] / max(np.sqrt(np.mean(v["bias"] ** 2)), 1e-300)
    inputs, outputs = x.shape
    return Vector(weight=share * np.sqrt(outputs / inputs) * x, bias=share / 2 * bias)


def fedmuon(run, beta=0.8):
    """As it is published: a device keeps its momentum M, which is its c_k from then on."""
    w, c, c_k = model(), model() * 0, {k: model() * 0 for k in range(N)}
    for t in rounds(run):
        last = {}

        def solve(w, k, work, t, direction, mu, lr, c=c, last=last):
            last[k] = c_k[k]

            def step(g):
                last[k] = last[k] * beta + g * (1 - beta)
                return orthogonal(last[k] - c_k[k] + c)

            return sgd(w, k, work, t, step, mu, lr)

        answers = replies(run, t, w, solve=solve)
        for r in answers:
            c, c_k[r.k] = c + (last[r.k] - c_k[r.k]) / N, last[r.k]
        w = w + average(answers)
    return w


def fedpac(run, beta=0.8, alpha=0.3):
    w, m, d = model(), model() * 0, model() * 0
    for t in rounds(run):
        last = {}

        def solve(w, k, work, t, direction, mu, lr, m=m, d=d, last=last):
            last[k] = m

            def step(g):
                last[k] = last[k] * beta + g
                return orthogonal(last[k]) * (1 - alpha) + d * alpha

            return sgd(w, k, work, t, step, mu, lr)

        answers = replies(run, t, w, solve=solve)
        m = mean([last[r.k] for r in answers])
        d = -mean([r.delta / (LR * r.steps) for r in answers])
        w = w + average(answers)
    return w


def fedcm(run, alpha=0.3):
    w, m = model(), model() * 0
    for t in rounds(run):
        answers = replies(run, t, w, lambda k, m=m: lambda g: g * alpha + m * (1 - alpha))
        m = -mean([r.delta / (LR * r.steps) for r in answers])
        w = w + average(answers)
    return w


def mimelite(run, beta=0.8):
    w, m = model(), model() * 0
    for t in rounds(run):
        answers = replies(run, t, w, lambda k, m=m: lambda g: g * (1 - beta) + m * beta)
        m = m * beta + mean([r.grad() for r in answers]) * (1 - beta)
        w = w + average(answers)
    return w


def ghbm(run, tau=2, beta=0.8):
    w, past = model(), []
    for t in rounds(run):
        m = (past[-tau] - w) / tau if len(past) >= tau else w * 0

        def solve(w, k, work, t, direction, mu, lr, m=m):
            return sgd(w, k, work, t, lambda g: g + m * (beta / (lr * work)), mu, lr)

        past.append(w)
        w = w + average(replies(run, t, w, solve=solve))
    return w


def adabest(run, beta=0.5, mu=0.5):
    w = wbar = model()
    h_k, last = {k: model() * 0 for k in range(N)}, dict.fromkeys(range(N), 0)
    for t in rounds(run):
        answers = replies(run, t, w, lambda k: lambda g: g - h_k[k])
        for reply in answers:
            h_k[reply.k] = h_k[reply.k] / (t - last[reply.k]) - reply.delta * mu
            last[reply.k] = t
        before, wbar = wbar, w + average(answers)
        w = wbar - (before - wbar) * beta
    return w


def delta_sgd(run, gamma=2.0, delta=0.1):
    def solve(w, k, work, t, direction, mu, lr):
        state = {}

        def step(g):
            if not state:
                eta, theta = lr, 1.0
            else:
                smooth = gamma * state["length"] / (2 * (g - state["g"]).norm)
                eta = min(smooth, (1 + delta * state["theta"]) ** 0.5 * state["eta"])
                theta = eta / state["eta"]
            state.update(g=g, eta=eta, theta=theta, length=eta * g.norm)
            return g * (eta / lr)

        return sgd(w, k, work, t, step, mu, lr)

    w = model()
    for t in rounds(run):
        w = w + average(replies(run, t, w, solve=solve))
    return w


def local_adam(run, beta=0.8, beta2=0.9, eps=1e-3, end=0.1):
    """Both means begin anew in every round, and the step size falls along half a cosine over all rounds."""

    def solve(w, k, work, t, direction, mu, lr):
        m = v = w * 0
        j = 0

        def step(g):
            nonlocal m, v, j
            m, j = m * beta + g * (1 - beta), j + 1
            v = v * beta2 + Vector({name: value**2 for name, value in g.items()}) * (1 - beta2)
            root = {name: np.sqrt(value / (1 - beta2**j)) + eps for name, value in v.items()}
            return Vector({name: value / (1 - beta**j) / root[name] for name, value in m.items()})

        return sgd(w, k, work, t, step, mu, lr)

    w = model()
    for t in rounds(run):
        lr = LR * (end + (1 - end) * (1 + np.cos(np.pi * (t - 1) / ROUNDS)) / 2)
        w = w + average(replies(run, t, w, solve=solve, lr=lr))
    return w


def folb_by(gradients):
    """(13), with what stands for the gradients."""

    def loop(run):
        w = model()
        for t in rounds(run):
            answers = replies(run, t, w)
            g = gradients(answers, t)
            times = np.array([r.times for r in answers])
            inner = g @ (times @ g / times.sum())
            weights = times * inner / np.abs(times * inner).sum()
            w = w + functools.reduce(Vector.__add__, [r.delta * a for r, a in zip(answers, weights, strict=True)])
        return w

    return loop


def key_of(t):
    return words(SEED, t, ROUND, 2)


@functools.partial(jax.jit, static_argnums=2)
def columns(rows, key, m):
    return jax.vmap(lambda row: sketch.sketched({"a": row}, key, m))(rows)


def by_sketch(answers, t, m=32):
    """R, as a matrix: one sign in each column."""
    flat = np.stack([np.concatenate([np.ravel(r.grad()[name]) for name in ("bias", "weight")]) for r in answers])
    d = flat.shape[1]
    R = np.asarray(columns(np.eye(d, dtype=np.float32), key_of(t), m)).T
    assert (np.abs(R).sum(axis=0) == 1).all()
    return flat @ R.T


def by_proxy(answers, t):
    return np.stack(
        [np.concatenate([np.ravel(-r.delta[n] / (LR * r.steps)) for n in ("bias", "weight")]) for r in answers]
    )


def scaffold_with_momentum(run, beta=0.5):
    """Option II: the update of J steps with momentum is that of more steps without."""
    w, c, c_k = model(), model() * 0, {k: model() * 0 for k in range(N)}
    for t in rounds(run):

        def solve(w, k, work, t, direction, mu, lr, c=c):
            v = None

            def step(g):
                nonlocal v
                g = g - c_k[k] + c
                v = g if v is None else v * beta + g
                return v

            return sgd(w, k, work, t, step, mu, lr)

        answers, before = replies(run, t, w, solve=solve), c
        for r in answers:
            a = sum(sum(beta**i for i in range(j + 1)) for j in range(r.steps))
            new = c_k[r.k] - before - r.delta / (a * LR)
            c, c_k[r.k] = c + (new - c_k[r.k]) / N, new
        w = w + average(answers)
    return w


LITERAL = {
    "scaffold, local momentum": (
        algorithms.scaffold(local={"name": "momentum", "beta": 0.5}, **USUAL),
        scaffold_with_momentum,
    ),
    "fednova": (algorithms.fednova(**USUAL), fednova),
    "fednova, samples, momentum": (
        algorithms.fednova(rule={"weights": "samples"}, local={"name": "momentum", "beta": 0.5}, **USUAL),
        functools.partial(fednova, momentum=0.5, by_samples=True),
    ),
    "feddyn": (algorithms.feddyn(memory={"alpha": 0.1}, **USUAL), feddyn),
    "fedvarp": (algorithms.fedvarp(**USUAL), fedvarp),
    "fedacg": (algorithms.fedacg(server={"beta": 0.8}, local={"mu": 0.1}, **USUAL), fedacg),
    "accord": (algorithms.accord(server={"beta": 0.8}, select={"replacement": True}, **USUAL), accord),
    "accord by agreement": (
        algorithms.accord(server={"beta": 0.8}, select={"replacement": True}, step_size="agreement", **USUAL),
        functools.partial(accord, by=by_agreement),
    ),
    "fedcm": (algorithms.fedcm(memory={"alpha": 0.3}, **USUAL), fedcm),
    "mimelite": (algorithms.mimelite(memory={"beta": 0.8}, **USUAL), mimelite),
    "ghbm": (algorithms.ghbm(memory={"tau": 2, "beta": 0.8}, **USUAL), ghbm),
    "adabest": (algorithms.adabest(memory={"beta": 0.5, "mu": 0.5}, **USUAL), adabest),
    "nesterov": (algorithms.fedavg(server={"name": "nesterov", "beta": 0.8}, **USUAL), nesterov),
    "adagrad": (algorithms.fedavg(server={"name": "adagrad", "lr": 0.1, "eps": 0.01}, **USUAL), adagrad),
    "fedexp": (algorithms.fedavg(server={"name": "fedexp", "eps": 0.01, "eps_decay": 0.9}, **USUAL), fedexp),
    "fedexprox": (algorithms.fedexprox(local={"mu": 0.3}, **USUAL), fedexprox),
    "fedmuon": (algorithms.fedmuon(local={"beta": 0.8, "whole": True}, **USUAL), fedmuon),
    "fedpac": (algorithms.fedpac(local={"beta": 0.8, "alpha": 0.3, "whole": True}, **USUAL), fedpac),
    "local momentum": (algorithms.fedavg(local="momentum", **USUAL), local_momentum),
    "delta_sgd": (algorithms.fedavg(local="delta_sgd", **USUAL), delta_sgd),
    "local adam, cosine": (
        algorithms.fedavg(
            local={"name": "adam", "beta": 0.8, "beta2": 0.9, "eps": 1e-3},
            step_size={"name": "cosine", "end": 0.1},
            **USUAL,
        ),
        local_adam,
    ),
    "folb, sketch": (
        algorithms.folb(gradient={"name": "sketch", "m": 32, "bits": 32}, local={"mu": 0.0}, **USUAL),
        folb_by(by_sketch),
    ),
    "folb, proxy": (algorithms.folb(gradient="proxy", local={"mu": 0.0}, **USUAL), folb_by(by_proxy)),
    "power_of_choice": (algorithms.fedavg(select="power_of_choice", **USUAL | {"select.K": 3}), fedavg),
    "remembered_loss": (algorithms.fedavg(select="remembered_loss", **USUAL | {"select.K": 3}), fedavg),
    "clusters": (algorithms.fedavg(select="clusters", **USUAL | {"select.K": 3}), fedavg),
}


@functools.cache
def both(name):
    """The run in the simulator, and the model of the same run on Flower."""
    made = LITERAL[name][0]
    return simulated(made), on_flower(made)[0]


@pytest.mark.parametrize("name", LITERAL)
def test_a_method_is_a_literal_loop_in_both_carriers(name):
    run, deployed = both(name)
    expected = LITERAL[name][1](run)
    assert run.lost.any()  # rough on purpose
    scale = max(1.0, max(float(np.abs(value).max()) for value in expected.values()))
    assert furthest(expected, run.params) < 1e-5 * scale
    assert furthest(deployed, run.params) < 1e-5 * scale


HIDDEN = (folb.Hidden("weight"),)


@pytest.mark.parametrize("name", ["fedmuon", "fedpac"])
@pytest.mark.parametrize(
    "settings", [{}, {"local.unit": "gradient"}, {"compress_up": "int8"}, {"step_size": "cosine"}], ids=str
)
def test_momentum_is_sent_in_both_carriers(name, settings):
    """Of a model that names its hidden matrix; with whole gradients, codecs and step sizes that change."""
    made = ALGORITHMS[name](local={"beta": 0.8}, **settings, **USUAL)
    network = MODEL._replace(heavy=True, hidden=HIDDEN)
    run = folb.simulate(FEDERATION, network, made, rounds=4, seeds=[SEED], system=SYSTEM, record=("work",))[0]
    deployed, strategy = on_flower(made, rounds=4, hidden=HIDDEN)
    assert furthest(deployed, run.params) < (5e-3 if settings.get("compress_up") else 2e-5)  # rounding to another level
    assert furthest(simulated(made, rounds=4).params, run.params) > 1e-3  # without hidden matrices its steps are plain
    assert not strategy.opened.answers.refused


def test_what_a_step_starts_from_has_the_shape_of_the_model():
    class Half(folb.DeviceMemory):
        def init(self, params):
            return (), ()

        def update(self, round):
            return (), ()

        def begin(self, shared, own, sent):
            return ({"weight": sent.params["weight"]},)

    with pytest.raises(InputError, match=r"what begin.*returns"):
        simulated(folb.Algorithm(memory=Half(), local="orthogonal", **USUAL), rounds=1)


def test_a_model_whose_matrices_are_all_hidden_needs_no_whole_steps():
    made = algorithms.fedmuon(local={"beta": 0.8}, **USUAL)
    network = MODEL._replace(heavy=True, hidden=HIDDEN)
    run = folb.simulate(FEDERATION, network, made, rounds=4, seeds=[SEED], system=SYSTEM)[0]
    assert furthest(simulated(made.replace(local={"whole": True}), rounds=4).params, run.params) == 0


# What is drawn --------------------------------------------------------------------------------------------------------


def candidates_of(t, d):
    from folb.core.shuffle import shuffled

    key = words(SEED, t, CANDIDATES, 2)
    return sorted(np.asarray(jax.jit(shuffled)(key, 0, np.arange(d), N)).tolist())


def models_before(algorithm):
    """The model before each round. They are played one by one by the program of the whole run."""
    problem = problems.problem(FEDERATION, MODEL._replace(heavy=True), system=SYSTEM, record=("weights", "work"))
    stacked, seeds = jax.tree.map(lambda leaf: np.stack([leaf]), algorithm), np.array([SEED], np.uint32)
    states = program.begin(problem, stacked, seeds, rounds=problems.ENDLESS if algorithm.memory is None else ROUNDS)
    for t in range(1, ROUNDS + 1):
        yield jax.tree.map(lambda leaf: np.asarray(leaf[0]), states.params)
        states, _ = program.advance(problem, stacked, states, seeds, np.int32(t), np.int32(t + 1), np.int32(1))


def test_power_of_choice_takes_the_largest_losses_of_its_candidates():
    algorithm = algorithms.fedavg(select={"name": "power_of_choice", "candidates": 4}, **USUAL | {"select.K": 2})
    run = simulated(algorithm)
    for t, w in enumerate(models_before(algorithm), start=1):
        some = candidates_of(t, 4)
        losses = {k: loss(w, *samples(k)) for k in some}
        assert sorted(run.devices[t - 1]) == sorted(sorted(some, key=losses.get)[-2:])
    d = sum(value.size for value in begin().values())
    replied = (run.times > 0).sum(axis=1)
    np.testing.assert_array_equal(run.bytes_up, 4 * d * replied + 4 * 4)
    np.testing.assert_array_equal(run.bytes_down, np.full(ROUNDS, 4 * d * 4))  # the candidates


def test_remembered_losses_are_the_last_that_a_device_sent():
    algorithm = algorithms.fedavg(select={"name": "remembered_loss", "candidates": 4}, **USUAL | {"select.K": 2})
    run, known = simulated(algorithm), dict.fromkeys(range(N), np.inf)
    for t, w in enumerate(models_before(algorithm), start=1):
        some = candidates_of(t, 4)
        met = sorted(known[k] for k in some if np.isfinite(known[k]))
        middle = met[(len(met) - 1) // 2] if met else 0.0  # for devices that were not met
        losses = {k: known[k] if np.isfinite(known[k]) else middle for k in some}
        assert sorted(run.devices[t - 1]) == sorted(sorted(some, key=lambda k: (-losses[k], k))[:2])
        for k, times in zip(run.devices[t - 1], run.times[t - 1], strict=True):
            if times > 0:
                known[int(k)] = loss(w, *samples(k))


def test_one_device_of_each_cluster():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 16))
    label = np.array([0, 0, 0, 1, 1, 2])
    rows = (centres[label] + 0.1 * rng.normal(size=(6, 16))).astype(np.float32)
    clustered = jax.jit(samplings.clustered, static_argnums=1)
    parts = np.asarray(clustered(rows, 3))
    assert len({(a, b) for a, b in zip(parts, label, strict=True)}) == 3  # the same parts
    known = selection.Known(1, 3, True, None, np.ones(6), None)

    @jax.jit
    def drawn(clusters, seed):
        draw = samplings.Clusters().weigh(known._replace(memory=clusters))
        return draw.devices(randomness.words(seed, 1, 0, draw.words)).device

    seen = set()
    for seed in range(40):
        device = np.asarray(drawn(parts, seed))
        assert sorted(label[device]) == [0, 1, 2]
        seen |= set(device.tolist())
    assert seen == set(range(6))
    # nobody has a cluster of its own: an outlier belongs to any
    alone = np.concatenate([np.repeat(np.eye(3, 16), 10, axis=0), np.eye(1, 16, 5)]).astype(np.float32)
    labels = np.asarray(clustered(alone, 4))
    assert labels[-1] == -1 and (labels[:-1] >= 0).all()
    # a cluster without devices: a second one of another
    assert len(set(np.asarray(drawn(np.array([0, 0, 0, 1, 1, 1]), 0)).tolist())) == 3


def test_all_devices_are_asked_for_a_sketch_once():
    run = both("clusters")[0]
    d = sum(value.size for value in begin().values())
    replied = (run.times > 0).sum(axis=1)
    expected = 4 * d * replied
    expected[0] += 4 * 64 * N
    np.testing.assert_array_equal(run.bytes_up, expected)
    assert run.bytes_down[0] == 4 * d * N and (run.bytes_down[1:] < 4 * d * N).all()


# FOLB for the price of FedAvg -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [None, "on"])
@pytest.mark.parametrize("rule", ["folb", "folb_two_set", "folb_hetero"])
@pytest.mark.parametrize(
    "settings",
    [{"gradient": "sketch", "gradient.m": 32, "gradient.bits": 8}, {"gradient": "proxy"}],
    ids=lambda s: s["gradient"],
)
def test_cheap_gradients_are_the_same_in_both_carriers(rule, settings, guard):
    made = ALGORITHMS[rule](guard=guard, **settings, **USUAL)
    run = simulated(made, rounds=3)
    deployed, strategy = on_flower(made, rounds=3)
    # bits may round to another level, if the sums differ in the last digit
    assert furthest(deployed, run.params) < (1e-5 if settings["gradient"] == "proxy" else 1e-3)
    assert not strategy.opened.answers.refused


@pytest.mark.parametrize("bits", sketch.BITS)
def test_bytes_are_counted_as_they_are_sent(bits, tmp_path):
    made = algorithms.folb(
        gradient={"name": "sketch", "m": 32, "bits": bits}, **USUAL
    )  # some of these programs are there already
    on_flower(made, rounds=1, directory=tmp_path / "run", system=None)
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    run = simulated(made, rounds=1, system=None)
    d, replies = sum(value.size for value in begin().values()), int((run.times > 0).sum())
    sent = 32 * 4 if bits == 32 else 32 * bits // 8 + 4
    assert run.bytes_up[0] == replies * (4 * d + sent)
    arrays_sent = 3 if bits == 32 else 4
    assert 0 <= line["bytes_up"] - run.bytes_up[0] <= replies * arrays_sent * 128  # NumPy's header of each array


@pytest.mark.parametrize(("parameters", "most"), [(7850, 1.01), (610, 1.11)])
def test_a_sketch_costs_little_beside_an_update(parameters, most):
    """With the 7,850 parameters of MNIST at most 1.05 times FedAvg's upload; with 610, Synthetic_1_1, a tenth more."""
    sent = algorithms.folb(gradient="sketch").uploads[0]
    shape = core_round.upload_shape(sent, {"w": np.zeros(parameters, np.float32)})
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape))
    assert nbytes == 260 and 1 + nbytes / (4 * parameters) < most


def test_a_sketch_keeps_inner_products():
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=3000).astype(np.float32) for _ in range(2))
    b = a + b
    for bits, most in ((32, 0.15), (8, 0.15), (4, 0.2)):
        products = []
        for _ in range(300):
            key = rng.integers(0, 2**32, 2, dtype=np.uint32)
            x, y = (
                sketch.unpacked(sketch.packed(sketch.sketched({"w": v}, key, 128), bits), 128, bits) for v in (a, b)
            )
            products.append(float(x @ y))
        expected, deviation = float(a @ b), np.sqrt(((a @ a) * (b @ b) + (a @ b) ** 2) / 128)
        assert abs(np.mean(products) - expected) < 4 * deviation / np.sqrt(300)  # right on average
        assert abs(np.std(products) / deviation - 1) < most  # and as far off as the formula says


def test_settings_of_a_sketch_share_a_program_only_if_shapes_agree():
    def structure(**settings):
        return jax.tree.structure(algorithms.folb(gradient="sketch", **settings))

    assert structure(**{"gradient.m": 64}) == structure(**{"gradient.m": 64, "local.mu": 0.5})
    assert structure(**{"gradient.m": 64}) != structure(**{"gradient.m": 128})


def test_three_words_make_a_combination():
    made = algorithms.folb(memory="scaffold", server="lookahead", select="remembered_loss", **USUAL | {"select.K": 3})
    run, (deployed, _) = simulated(made), on_flower(made)
    assert furthest(deployed, run.params) < 1e-5
    assert furthest(simulated(algorithms.folb(**USUAL | {"select.K": 3})).params, run.params) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient": "sketch", "gradient.bits": 32}, {"gradient": "proxy"}],
    ids=str,
)
def test_the_guard_rejects_no_honest_device_that_a_memory_bends(settings):
    """SCAFFOLD's devices descend along g - c_k + c, and not along their own gradients."""
    made = algorithms.folb(memory="scaffold", guard="on", **settings, **USUAL | {"select.K": 3})
    run = simulated(made, rounds=30)
    late = run.times[10:] > 0
    assert np.mean(run.records["weights"][10:][late] == 0) < 0.35


def test_lost_devices_are_not_asked_for_ever():
    """A device that was not met has an ordinary loss."""

    @jax.jit
    def drawn(losses):
        known = selection.Known(1, 2, True, None, np.ones(5), None, memory=losses, candidates=jax.numpy.arange(5))
        return samplings.RememberedLoss().weigh(known).devices(None).device

    device = drawn(np.array([np.inf, 3.0, 2.0, 1.0, np.inf], np.float32))
    assert device.tolist() == [0, 1]  # the largest, and the first of those in the middle


def test_candidates_grow_with_the_devices_of_a_round():
    made = algorithms.fedavg(select={"name": "power_of_choice", "candidates": 2}, **USUAL | {"select.K": 2})
    _, strategy = on_flower(made, rounds=1, fraction_train=0.8, system=None)
    assert len(strategy.opened.drawn) == 4


def test_candidates_of_a_sampling_of_one_s_own():
    """Chances for the candidates alone."""
    own = sampling(lambda known: known.survey, survey="loss", pool=lambda self, K: 4)
    run = simulated(folb.Algorithm(select=own, **USUAL | {"select.K": 3}))
    for t in range(1, ROUNDS + 1):
        assert set(run.devices[t - 1].tolist()) <= set(candidates_of(t, 4))


def test_the_mean_of_what_is_remembered_follows_the_number_of_devices():
    """FedVARP with 4 devices, of which two are known, and then with 2."""
    memory, one = drift.FedVARP(), {"w": np.ones((2, 1), np.float32)}
    step = rules.Update({"w": np.zeros(1)}, np.zeros(2))

    @jax.jit
    def corrected(N):
        round = rules.Round(
            None, jax.numpy.ones(2), None, None, one, N=4, shared={"w": jax.numpy.zeros(1)}, own=scaled(one, 0)
        )
        shared, _ = memory.update(round)
        return memory.correct(round._replace(shared=shared, N=N, update=step))

    for N, ybar in ((4, 0.5), (2, 1.0)):
        assert float(corrected(N)["w"][0]) == ybar


def test_what_an_algorithm_fixes_is_recorded():
    assert algorithms.fedacg().settings["server"] == "lookahead"
    assert algorithms.scaffold().settings["memory"] == "scaffold"


# Mistakes -------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "lambda of 1": (
        lambda: algorithms.fedacg(server={"beta": 1.0}),
        "server.beta = 1.0: should be at least 0 and less than 1",
    ),
    "tau of 0": (lambda: algorithms.ghbm(memory={"tau": 0}), "memory.tau = 0: should be a whole number from 1"),
    "no numbers": (
        lambda: algorithms.folb(gradient={"name": "sketch", "m": 0}),
        "gradient.m = 0: should be a whole number",
    ),
    "odd bits": (
        lambda: algorithms.folb(gradient={"name": "sketch", "bits": 3}),
        "gradient.bits = 3: should be one of 1, 2, 4, 8, 32",
    ),
    "a sketch of nothing": (lambda: algorithms.folb(gradient={"m": 64}), "is for gradient=sketch; gradient is exact"),
    "alpha of 0": (lambda: algorithms.feddyn(memory={"alpha": 0.0}), "memory.alpha = 0.0: should be more than 0"),
    "alpha above 1": (
        lambda: algorithms.fedcm(memory={"alpha": 1.5}),
        "memory.alpha = 1.5: should be more than 0 and at most 1",
    ),
    "alpha of nobody": (
        lambda: algorithms.fedavg(memory={"alpha": 0.1}),
        "memory.alpha = 0.1: is for memory=feddyn, fedcm; memory is not set",
    ),
    "option 3": (lambda: algorithms.scaffold(memory={"option": "3"}), "memory.option = '3'"),
    "two memories": (lambda: algorithms.scaffold(memory="fedvarp"), "memory = 'fedvarp': is fixed"),
    "another server": (lambda: algorithms.fedacg(server="adam"), "server = 'adam': is fixed"),
    "another server of accord": (lambda: algorithms.accord(server="adam"), "server = 'adam': is fixed"),
    "a stretch of 2": (
        lambda: algorithms.accord(server={"stretch": 2.0}),
        "server.stretch = 2.0: should be from 0 to 1",
    ),
    "a stretch of another server": (
        lambda: algorithms.fedavg(server={"name": "momentum", "stretch": 0.5}),
        "server.stretch = 0.5: is for server=lookahead",
    ),
    "a gain below 0": (
        lambda: algorithms.fedavg(step_size={"name": "agreement", "gain": -1.0}),
        "step_size.gain = -1.0: should be from 0 to 100",
    ),
    "a goal that no cosine reaches": (
        lambda: algorithms.fedavg(step_size={"name": "agreement", "goal": 3.0}),
        "step_size.goal = 3.0: should be from -1 to 1",
    ),
    "a gain without its step size": (
        lambda: algorithms.fedavg(step_size={"gain": 1.0}),
        "step_size.gain = 1.0: is for step_size=consensus, relative, agreement",
    ),
    "a step size that is none": (lambda: algorithms.fedavg(step_size=3), "step_size = 3: should be one of consensus"),
    "another step size": (lambda: algorithms.fedavg(step_size="line"), "step_size = 'line': choose one of agreement"),
    "no memory": (lambda: algorithms.fedavg(memory="scafold"), "memory = 'scafold': did you mean 'scaffold'?"),
    "few candidates": (
        lambda: algorithms.fedavg(select={"name": "power_of_choice", "K": 5, "candidates": 4}),
        "select.candidates = 4",
    ),
    "candidates of nobody": (
        lambda: algorithms.fedavg(select={"candidates": 4}),
        "is for select=power_of_choice, remembered_loss",
    ),
    "1 in 32 bits": (
        lambda: algorithms.fedavg(local={"name": "adam", "beta2": 1 - 1e-9}),
        "local.beta2 = 0.999999999: should be at least 0 and less than 1, in 32 bits",
    ),
    "0 in 32 bits": (
        lambda: algorithms.fedavg(local={"name": "adam", "eps": 1e-46}),
        "should be more than 0, in 32 bits",
    ),
    "beta of sgd": (lambda: algorithms.fedavg(local={"beta": 0.9}), "local.beta = 0.9: is for local=momentum"),
    "sketch and gradient": (
        lambda: algorithms.folb(gradient="sketch", memory={"name": "scaffold", "option": "1"}),
        "gradient = 'sketch': should be exact",
    ),
    "no one size": (lambda: algorithms.folb(gradient="proxy", local="delta_sgd"), "gradient = 'proxy'"),
    "a memory without a size": (
        lambda: algorithms.fedcm(local="delta_sgd"),
        "local = 'delta_sgd': should be sgd or momentum: memory=fedcm",
    ),
    "S_2 without its shift": (
        lambda: algorithms.folb_two_set(gradient="proxy", memory="scaffold"),
        "gradient = 'proxy': should be exact or sketch: S_2",
    ),
    "a large sketch": (
        lambda: algorithms.folb(gradient={"name": "sketch", "m": 10**6}),
        "gradient.m = 1000000: should be",
    ),
    "a momentum that nobody has": (
        lambda: folb.Algorithm(uploads=["last_momentum"]),
        "local = 'sgd': should be orthogonal or aligned: others have no momentum",
    ),
    "a start that no step takes": (
        lambda: algorithms.fedavg(memory="fedmuon"),
        "local = 'sgd': should be orthogonal or aligned: memory=fedmuon sends what a step starts from",
    ),
    "no direction": (lambda: algorithms.fedavg(local="aligned"), "local = 'aligned': should be aligned with memory="),
    "another direction": (lambda: algorithms.fedavg(local="orthogonal", memory="fedpac"), "local = 'orthogonal'"),
    "a liar's momentum": (
        lambda: algorithms.fedpac(robust="median"),
        "robust = 'median': should be none with memory=fedpac: nothing bounds the momentum",
    ),
    "orthogonal steps with a size": (
        lambda: algorithms.scaffold(local="orthogonal"),
        "local = 'orthogonal': should be sgd or momentum: memory=scaffold divides",
    ),
    "fewer candidates than draws": (
        lambda: folb.Algorithm(select={"name": sampling(lambda known: known.size, pool=lambda self, K: 2), "K": 5}),
        "select.candidates = 2: should be a whole number from 5",
    ),
    "nova without a size": (lambda: algorithms.fednova(local="delta_sgd"), "local = 'delta_sgd'"),
    "eps that grows": (
        lambda: algorithms.fedavg(server={"name": "fedexp", "eps_decay": 1.1}),
        "server.eps_decay = 1.1",
    ),
    "more draws than devices": (
        lambda: simulated(algorithms.fedavg(select={"name": "power_of_choice", "K": N + 1})),
        f"select.K = {N + 1}: should be at most the {N} devices",
    ),
    "sums and a memory": (lambda: TwoPhaseStrategy(algorithms.folb(memory="scaffold")), "memory = 'scaffold'"),
    "sums and a sketch": (
        lambda: TwoPhaseStrategy(algorithms.folb(gradient="sketch")),
        "gradient = 'sketch': should be exact",
    ),
    "sums and a proxy": (lambda: TwoPhaseStrategy(algorithms.folb(gradient="proxy")), "gradient = 'proxy'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)
