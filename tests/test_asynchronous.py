"""Rounds that do not wait: against a literal loop over events, and what cannot be combined with them."""

import functools
import heapq
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from own import sampling
from test_family import full_gradient, mean, model, sgd
from test_slots import BATCH, FEDERATION, LR, MODEL, SEED, furthest, samples, simulated

from folb import Algorithm, InputError, Staleness, algorithms, setting, simulate, system
from folb.core import randomness, selection
from folb.core.randomness import HOME, SERVER, uniform, words
from folb.core.system import Effort
from folb.flower import FederatedStrategy
from folb.simulation.events import PATIENCE
from folb.store import run_arrays
from folb_studies.theory import audit

N = FEDERATION.N
USUAL = {"local.lr": LR, "local.batch": BATCH}
ROUNDS = {3: 50, 2: 75, 1: 160}  # of K replies, so that there are 200 events, with those that are lost


def uneven(home, draws, cost):
    """Speeds differ by a factor of 100, a device does one to three steps, and a quarter drop out."""
    work = 1 + jnp.floor(3 * draws[0]).astype(jnp.int32)
    return Effort(work, work * cost * 10.0 ** (2 * home[0]), draws[1] < 0.25)


# A literal loop: event by event ---------------------------------------------------------------------------------------


@functools.cache
def efforts(chosen, count=400):
    """What each device would do in each start: (work, seconds, lost)[n - 1][k]; and the word of each start's draw."""

    @jax.jit
    def table():
        numbers, who = jnp.arange(1, count + 1), jnp.arange(N)
        home = uniform(words(SEED, HOME, who, 2))

        def start(n):
            draws = uniform(words(SEED, n, who, 4)[:, 2:])
            return jax.vmap(chosen)(home, draws, jnp.ones(N, jnp.int32)), words(SEED, n, SERVER, 1)[0]

        return jax.vmap(start)(numbers)

    return jax.tree.map(np.asarray, table())


def drawn(word, busy, chances):
    """One device that is not busy: the owner of a random ticket."""
    tickets = [k for k in range(N) if k not in busy for _ in range(chances[k])]
    return tickets[int(word) * len(tickets) // 2**32]


class Literal:
    """A queue of devices at work, and what the server does with their replies."""

    def __init__(self, chosen, M, K, s, aggregate, chances=None, mu=0.0):
        self.chosen, self.M, self.K, self.s, self.aggregate, self.mu = chosen, M, K, s, aggregate, mu
        self.chances = [1] * N if chances is None else chances
        self.w, self.clock, self.events, self.steps, self.started = model(), 0.0, 0, 0, 0
        self.queue, self.free = [], list(range(M))
        self.rounds = []

    def start(self, sent, buffered):
        work, words = efforts(self.chosen)
        n, self.started = self.started, self.started + 1
        k = drawn(words[n], {job[3] for job in self.queue} | set(buffered), self.chances)
        place = self.free.pop(0)
        heapq.heappush(self.queue, (self.clock + float(work.seconds[n][k]), place, n, k, sent, self.steps))

    def arrived(self, delta, n, k):
        """The update of device k, the n-th to start, as the server has it."""
        return delta

    def play(self, sent):
        """One step of the server; `sent` gives the model that devices start from."""
        buffer, lost, started, begun = [], [], self.started, self.clock
        while len(buffer) < self.K and len(lost) < PATIENCE * self.K:
            self.start(sent, [reply["k"] for reply in buffer])
            if self.free:
                continue
            self.clock, place, n, k, start, version = heapq.heappop(self.queue)
            self.free, self.events = [place], self.events + 1
            work = efforts(self.chosen)[0]
            if work.lost[n][k]:
                lost.append(k)
                continue
            delta, _ = sgd(start, k, work.work[n][k], n + 1, lambda g: g, self.mu)
            buffer.append({"k": k, "delta": self.arrived(delta, n + 1, k), "start": start, "tau": self.steps - version})
        for reply in buffer:
            reply["s"] = self.s(reply["tau"])
        if buffer:
            self.aggregate(self, buffer)
            self.steps += 1
        self.rounds.append((buffer, lost, self.started - started, self.clock - begun))


def fedbuff(loop, buffer):
    loop.w = loop.w + mean([reply["delta"] * reply["s"] for reply in buffer])


def fedasync(loop, buffer, alpha=0.6):
    [reply] = buffer
    a = alpha * reply["s"]
    loop.w = loop.w * (1 - a) + (reply["start"] + reply["delta"]) * a


def folb(loop, buffer):
    """(13), with each device's gradient at the model that it started from."""
    grads = [full_gradient(reply["start"], reply["k"]) for reply in buffer]
    reference = mean(grads)
    inner = [grad.dot(reference) for grad in grads]
    for reply, importance in zip(buffer, inner, strict=True):
        loop.w = loop.w + reply["delta"] * (reply["s"] * importance / sum(map(abs, inner)))


def by_samples_ahead(loop, buffer, beta=0.8):
    """FedACG's step on a mean weighed by samples."""
    size = [len(samples(reply["k"])[1]) for reply in buffer]
    update = mean([reply["delta"] * reply["s"] for reply in buffer], size)
    loop.m = getattr(loop, "m", model() * 0) * beta + update
    loop.w = loop.w + loop.m


def ahead(loop, beta=0.8):
    return loop.w + getattr(loop, "m", model() * 0) * beta


def polynomial(tau, power=0.5):
    return (1 + tau) ** -power


CASES = {
    "fedbuff": (algorithms.fedbuff, {"select.K": 3, "concurrency": 3}, fedbuff, polynomial),
    "fedasync": (
        algorithms.fedasync,
        {"concurrency": 5, "staleness.power": 0.7, "local.mu": 0.1},
        fedasync,
        polynomial,
    ),
    "folb": (
        algorithms.folb,
        {"select.K": 2, "concurrency": 4, "local.mu": 0.0, "staleness": "constant"},
        folb,
        lambda tau: 1.0,
    ),
    "ahead": (
        algorithms.fedacg,
        {
            **{
                "select.K": 3,
                "concurrency": 2,
                "local.mu": 0.0,
                "server.beta": 0.8,
                "rule.weights": "samples",
                "select": "samples",
            },
            **{"staleness": "hinge", "staleness.slope": 2.0, "staleness.bound": 1},
        },
        by_samples_ahead,
        lambda tau: 1 / (1 + 2.0 * max(tau - 1, 0)),
    ),
}


def algorithm(name):
    make, settings, _, _ = CASES[name]
    return make(**USUAL | settings)


def literal(name, chosen):
    """The same run, event by event."""
    _, settings, aggregate, s = CASES[name]
    if "staleness.power" in settings:
        s = functools.partial(s, power=settings["staleness.power"])
    K = settings.get("select.K", 1)
    chances = FEDERATION.train.size.tolist() if "select" in settings else None
    loop = Literal(chosen, settings["concurrency"], K, s, aggregate, chances, settings.get("local.mu", 0.0))
    for _ in range(ROUNDS[K]):
        loop.play(ahead(loop) if name == "ahead" else loop.w)
    return loop


UNEVEN = Partial(uneven)
SYSTEMS = {"uneven": UNEVEN, "ties": system.uniform(high=4, dropout=0.3)}


@pytest.mark.parametrize(("name", "kind"), [(name, "uneven") for name in CASES] + [("fedbuff", "ties")])
def test_a_run_is_a_literal_loop_over_events(name, kind):
    """The devices, their order, the seconds and the bytes of 200 events, and the model that they lead to."""
    loop = literal(name, SYSTEMS[kind])
    assert loop.events >= 200
    run = simulated(algorithm(name), rounds=len(loop.rounds), system=SYSTEMS[kind])
    size = sum(value.nbytes for value in MODEL.init(jax.random.key(0)).values())
    sent = 2 * size if name == "folb" else size  # and its gradient
    stale = 0
    for t, (buffer, lost, started, seconds) in enumerate(loop.rounds):
        assert run.devices[t][run.times[t] > 0].tolist() == [reply["k"] for reply in buffer]
        assert run.devices[t][run.lost[t]].tolist() == lost
        assert run.seconds[t] == pytest.approx(seconds, rel=1e-3, abs=1e-3)
        assert (run.bytes_up[t], run.bytes_down[t]) == (sent * len(buffer), size * started)
        assert bool(run.updated[t]) == bool(buffer)
        if name != "folb":
            p = [1.0] * len(buffer) if name != "ahead" else [len(samples(r["k"])[1]) for r in buffer]
            lr = run.parameters["server.lr"] or 1.0
            expected = [lr * reply["s"] * weight / sum(p) for reply, weight in zip(buffer, p, strict=True)]
            np.testing.assert_allclose(run.records["weights"][t][run.times[t] > 0], expected, rtol=1e-5)
        stale += sum(reply["tau"] > 0 for reply in buffer)
    assert stale > 20 and sum(len(lost) for _, lost, _, _ in loop.rounds) > 20
    assert furthest(loop.w, model()) > 0.05
    assert furthest(loop.w, run.params) < 1e-5


# The compiled program -------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes_with_the_same_bits(tmp_path, monkeypatch):
    """The devices at work, their models and the clock are part of what is kept."""
    whole = simulated(algorithm("fedbuff"), rounds=50, system=UNEVEN)

    def stop(i, first, part):
        if first > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated(algorithm("fedbuff"), rounds=50, system=UNEVEN, checkpoints=tmp_path, observe=stop)
    taken, load = [], run_arrays.load_checkpoint
    monkeypatch.setattr(run_arrays, "load_checkpoint", lambda *args: taken.append(load(*args)) or taken[-1])
    again = simulated(algorithm("fedbuff"), rounds=50, system=UNEVEN, checkpoints=tmp_path)
    assert 1 < taken[0][0] < 50
    for name in ("devices", "times", "lost", "seconds", "bytes_down", "test_accuracy", "train_loss"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_stacked_runs_are_those_alone():
    """Runs whose rounds have different numbers of events, stacked; and their devices side by side."""

    def runs(seeds):
        made = algorithm("fedbuff")
        return simulate(FEDERATION, MODEL, made, rounds=20, seeds=seeds, system=UNEVEN, record=("weights",))

    for run in runs([3, 4, 5]):
        [alone] = runs([run.seed])
        for name in ("devices", "times", "lost", "seconds", "bytes_down"):
            np.testing.assert_array_equal(getattr(run, name), getattr(alone, name))
        np.testing.assert_allclose(run.records["weights"], alone.records["weights"], rtol=1e-6)
        assert furthest(run.params, alone.params) < 1e-5


def test_a_step_size_of_its_own_and_a_guard_in_a_buffer():
    """Each device keeps the step size that it started with, and no reply weighs more than cap / K."""
    made = algorithms.folb(
        select={"K": 3},
        concurrency=3,
        gradient="proxy",
        guard={"name": "on", "cap": 1.5},
        step_size="agreement",
        **USUAL,
    )
    run = simulated(made, rounds=30, system=UNEVEN, record=("weights", "lr"))
    lr = run.records["lr"][:, :3]
    assert np.any(lr.min(axis=1) < lr.max(axis=1))
    assert np.all(run.records["weights"] >= 0) and np.all(run.records["weights"] <= 1.5 / 3 * (1 + 1e-6))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


def test_if_all_devices_are_lost_the_rounds_still_end():
    run = simulated(algorithm("fedbuff"), rounds=3, system=system.uniform(high=4, dropout=1.0))
    assert run.lost.sum(axis=1).tolist() == [PATIENCE * 3] * 3
    assert not run.updated.any() and not run.bytes_up.any() and np.all(run.seconds > 0)


@pytest.mark.parametrize("kind", ["uniform", "samples", "chances"])
def test_another_device_is_none_of_the_others(kind):
    size, others = np.array([3, 1, 5, 2, 7, 4], np.int32), np.array([4, 2**30, 0, 2**30], np.int32)
    size, start = jnp.asarray(size), jnp.asarray(np.cumsum(size) - size, jnp.int32)
    chances = {"uniform": np.ones(6), "samples": np.asarray(size), "chances": np.array([1.0, 0, 2, 3, 0, 1])}[kind]

    def one(word):
        if kind == "uniform":
            return randomness.another_uniform(word, others, N=6)
        if kind == "samples":
            return randomness.another_by_samples(word, others, start=start, size=size)
        share = jnp.full(6, 1 / 6)
        known = selection.Known(1, 2, True, start, size, share)
        return selection.drawing(selection.Selection(sampling(lambda known: chances), 2), known).another(word, others)

    count = 1200
    words = (np.arange(count, dtype=np.uint64) * 2**32 // count).astype(np.uint32)  # evenly over all words
    counts = np.bincount(np.asarray(jax.jit(jax.vmap(one))(words)), minlength=6)
    expected = np.where(np.isin(np.arange(6), others), 0, chances)
    np.testing.assert_allclose(counts, count * expected / expected.sum(), atol=2)


def test_if_only_others_have_a_chance_any_device_that_is_left_is_drawn():
    draw = selection.from_distribution(jnp.array([0.5, 0.5, 0, 0]), selection.Known(1, 1, True, *3 * [jnp.ones(4)]))
    assert {int(draw.another(jnp.uint32(word), jnp.array([0, 1]))) for word in (0, 2**31, 2**32 - 1)} == {2, 3}


# What cannot be ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        ("fedavg", {"concurrency": 0}, "concurrency = 0: .*whole number"),
        ("fedavg", {"concurrency": 2.5}, "concurrency = 2.5: .*whole number"),
        ("fedasync", {"concurrency": None}, "concurrency = None: should be a number"),
        ("fedavg", {"staleness": "hinge"}, "staleness = 'hinge': is for rounds that do not wait: set concurrency"),
        (
            "fedavg",
            {"staleness.power": 1.0},
            "staleness.power = 1.0: is for staleness=polynomial; staleness is not set",
        ),
        ("fedbuff", {"staleness": "old"}, "staleness = 'old': choose one of constant, hinge, polynomial"),
        ("fedbuff", {"staleness.power": -1.0}, "staleness.power = -1.0: should be at least 0"),
        ("fedbuff", {"staleness.slope": 1.0}, "staleness.slope = 1.0: is for staleness=hinge; staleness is polynomial"),
        ("folb_two_set", {"concurrency": 3}, "should be None with a second set"),
        ("scaffold", {"concurrency": 3}, "memory = 'scaffold': should be None with concurrency"),
        ("fedbuff", {"select": "power_of_choice"}, "select = 'power_of_choice': should be one of uniform, samples"),
        ("fedbuff", {"select": "clusters"}, "select = 'clusters': should be one of uniform, samples"),
        ("fednu_norm", {"concurrency": 3}, "select = 'norm': should be uniform, samples"),
    ],
)
def test_settings_that_cannot_be(make, settings, message):
    with pytest.raises(InputError, match=message):
        getattr(algorithms, make)(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 6, "select.K": 1}, "concurrency = 6: should be at most the 5 devices"),
        ({"concurrency": 4, "select.K": 3}, "concurrency = 4: should be at most N - K \\+ 1 = 3 with K = 3"),
        ({"select.K": 6, "concurrency": 1}, "K = 6: should be at most the 5 devices"),
    ],
)
def test_more_at_work_than_there_are(settings, message):
    with pytest.raises(InputError, match=message):
        simulated(algorithms.fedbuff(**settings), rounds=1)


def test_staleness_of_ones_own():
    """One that returns another shape is found before anything runs."""

    class Aged(Staleness):
        power: float = setting("of the age", default=1.0)

        def weigh(self, tau):
            return (1 + tau) ** -self.power

    class First(Staleness):
        def weigh(self, tau):
            return tau[:1]

    made = algorithm("fedbuff")
    own = Algorithm(select={"K": 3}, concurrency=3, staleness={"name": Aged, "power": 0.5}, **USUAL)
    found, expected = (simulated(one, rounds=6, system=UNEVEN).params for one in (own, made))
    assert furthest(found, expected) < 1e-6
    with pytest.raises(InputError, match="staleness: what it returns"):
        simulated(Algorithm(select={"K": 3}, concurrency=3, staleness=First), rounds=1)
    with pytest.raises(InputError, match="select: a Draw"):
        draw = selection.Draw(2, lambda words: None, lambda device: device)
        simulated(Algorithm(select={"name": sampling(lambda known: draw), "K": 3}, concurrency=3), rounds=1)


def test_what_waits_by_its_nature_refuses():
    made = algorithms.fedbuff(select={"K": 2}, concurrency=2)
    with pytest.raises(InputError, match="concurrency = 2: should be None with streaming"):
        simulated(made, rounds=1, stream=True)
    with pytest.raises(InputError, match="concurrency = 2: should be None on Flower"):
        FederatedStrategy(made)
    with pytest.raises(InputError, match="concurrency = 2: should be None: the bounds"):
        audit(None, made, None)


def test_a_server_with_samples_of_its_own_and_what_liars_gain():
    """FLTrust in a buffer whose devices have step sizes of different rounds; liars gain what their weights say."""
    made = algorithms.fedbuff(
        **USUAL,
        select={"K": 3},
        concurrency=3,
        robust={"name": "fltrust", "root": 20},
        step_size="agreement",
        attack={"name": "flipped", "share": 0.4},
    )
    run = simulated(made, rounds=12, system=UNEVEN, record=("weights", "attack"))
    assert np.isfinite(run.train_loss).all() and run.train_loss[-1] < run.train_loss[0]
    weights = np.abs(run.records["weights"])
    liars = np.where(run.devices < int(0.4 * N), weights, 0.0)
    total = weights.sum(axis=1)
    expected = np.divide(liars.sum(axis=1), total, out=np.zeros_like(total), where=total > 0)
    np.testing.assert_allclose(run.records["attack"][:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(run.records["attack"][:, 1], liars.max(axis=1), rtol=1e-5)


def test_the_page_has_the_figures_of_the_benchmark():
    """An asynchronous run costs at most twice the device work that it contains."""
    docs = Path(__file__).parent.parent / "docs"
    (rows,) = (
        value
        for value in json.loads((docs / "benchmarks/asynchronous.json").read_text()).values()
        if type(value) is list
    )
    ratios = [row[5] for row in rows]
    assert max(ratios) <= 2
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in (docs / "asynchronous.md").read_text()
