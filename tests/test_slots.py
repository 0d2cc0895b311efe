"""Every part of an algorithm from a user's own file, in both carriers, and SCAFFOLD against a literal loop."""

import functools
import json
import linecache
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from inprocess import InProcessGrid
from own import sampling
from random_numbers import uniform, words
from test_flower import softmax_gradient as gradient

import folb
from folb import InputError, algorithms, data, models, simulate, system
from folb.cli.main import main
from folb.core import memory as memories
from folb.core.average import LastTwo
from folb.core.gradient import Sketch
from folb.core.local_step import Adam, Momentum
from folb.core.user_code import user_code
from folb.experiments.plan import plan
from folb.experiments.settings import from_file
from folb.flower import Device, FederatedStrategy, arrays, client_app
from folb.flower.local_work import batches
from folb.flower.protocol import Task
from folb.store import run_arrays

pytestmark = pytest.mark.usefixtures("undrawn")

EXAMPLES = Path(__file__).parent.parent / "examples"
FEDERATION = data.load("synthetic", alpha=1, beta=1, devices=5, sizes=[20, 31, 45, 12, 60])
MODEL = models.logistic(FEDERATION.shape, FEDERATION.classes, init="glorot")
SYSTEM = system.uniform(high=4, dropout=0.3)
K, ROUNDS, SEED, LR, BATCH = 6, 8, 3, 0.05, 5  # more draws than devices, so that some repeat


class Ruled(folb.Rule):
    """A function of the round as a rule."""

    function: object = folb.setting("of the round", default=None, static=True)

    def update(self, round):
        return self.function(round)


PARTS = {  # what a device needs for an example
    "my_step.py": lambda file: [file.HeavyBall],
    "my_upload.py": lambda file: [file.DESCENT],
}


def parts_for(name):
    return PARTS[name](sys.modules[f"folb_own_{Path(name).stem}"]) if name in PARTS else ()


@functools.cache
def own(name, function):
    """From a file that is read once: what two tests have in common is one program."""
    made = from_file("algorithms", f"{EXAMPLES / name}:{function}")
    return folb.Algorithm(local=made) if function == "HeavyBall" else made


def loss(params, x, y):
    z = x @ params["weight"] + params["bias"]
    z = z - z.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]))


def samples(k):
    train = FEDERATION.train
    rows = slice(train.start[k], train.start[k] + train.size[k])
    return train.x[rows], train.y[rows]


def grid(parts=(), tamper=None):
    def app(k):
        return client_app(lambda context: Device(*samples(k), gradient, loss=loss, parts=parts))

    return InProcessGrid([app(k) for k in range(FEDERATION.N)], tamper=tamper, seed=5)


def begin(seed=SEED):
    return jax.tree.map(np.asarray, MODEL.init(jax.random.key(seed)))


def on_flower(algorithm, parts=(), rounds=ROUNDS, tamper=None, evaluate_fn=None, **settings):
    settings = {
        "system": SYSTEM,
        "wait": 0.0,
        "deadline": 0.05,
        "seed": SEED,
        "guard": "none",
        "min_replies": 1,
    } | settings
    strategy = FederatedStrategy(algorithm, **settings)
    result = strategy.start(grid(parts, tamper), arrays(begin()), num_rounds=rounds, evaluate_fn=evaluate_fn)
    return {name: array.numpy() for name, array in result.arrays.items()}, strategy


def simulated(algorithm, rounds=ROUNDS, **settings):
    settings = {"system": SYSTEM, "seeds": [SEED], "record": ("weights", "work")} | settings
    return simulate(FEDERATION, MODEL._replace(heavy=True), algorithm, rounds=rounds, **settings)[0]


def kill_and_resume(algorithm, after, path, monkeypatch, **settings):
    """The same run, killed once so many rounds are done, and resumed from its checkpoints."""

    class KilledError(Exception):
        pass

    def kill(i, first, part):
        if first + len(part.seconds) > after:
            raise KilledError

    monkeypatch.setattr(run_arrays, "SECONDS", -1.0)
    with pytest.raises(KilledError):
        simulated(algorithm, checkpoints=path, observe=kill, **settings)
    assert any(path.iterdir())
    return simulated(algorithm, checkpoints=path, **settings)


def furthest(a, b):
    return max(float(np.abs(a[name] - np.asarray(b[name])).max()) for name in ("weight", "bias"))


# SCAFFOLD ------------------------------------------------------------------------------------------------------------


def literal_scaffold(option, run, rounds=ROUNDS):
    """Device by device, step by step, in 64 bits; the draws and the work are the record's."""
    w = {name: value.astype(float) for name, value in begin().items()}
    zero = {name: np.zeros_like(value) for name, value in w.items()}
    c, c_k = zero, dict.fromkeys(range(FEDERATION.N), zero)
    for t in range(rounds):
        step, change = zero, zero
        total = run.times[t].sum()
        for k, times, work in zip(run.devices[t], run.times[t], run.records["work"][t], strict=True):
            if times == 0:
                continue
            k, (x, y) = int(k), samples(k)
            keys = tuple(int(word) for word in words(SEED, t + 1, k, 2))
            at, steps = w, 0
            for rows in batches(Task(t, (), int(work), keys, batch=BATCH, unit="step"), len(y)):
                g = gradient(at, x[rows], y[rows])
                at = {name: v - LR * (g[name] - c_k[k][name] + c[name]) for name, v in at.items()}
                steps += 1
            delta = {name: at[name] - w[name] for name in w}
            if option == "1":
                new = gradient(w, x, y)
            else:
                new = {name: c_k[k][name] - c[name] - delta[name] / (steps * LR) for name in w}
            step = {name: step[name] + times / total * delta[name] for name in w}
            change = {name: change[name] + (new[name] - c_k[k][name]) / FEDERATION.N for name in w}
            c_k[k] = new
        w = {name: w[name] + step[name] for name in w}
        c = {name: c[name] + change[name] for name in w}
    return w


@pytest.mark.slow
def test_the_bytes_of_a_shift_are_counted_in_both_carriers(tmp_path):
    """Each device that is sent the model is also sent a shift, which is as large, or what its step starts from."""
    settings = {"select.K": 2, "local.lr": LR, "local.batch": BATCH, "select.replacement": False}
    down, up = {}, {}
    for name, models_down, models_up in (("fedavg", 1, 1), ("scaffold", 2, 1), ("fedmuon", 3, 2), ("fedpac", 3, 2)):
        algorithm = algorithms.ALGORITHMS[name](**settings)
        on_flower(algorithm, directory=tmp_path / name, rounds=3)
        lines = [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        run = simulated(algorithm, rounds=3)
        down[name] = [line["bytes_down"] for line in lines], run.bytes_down
        up[name] = [line["bytes_up"] for line in lines], run.bytes_up
        for sent, times in ((down, models_down), (up, models_up)):
            for plain, more in zip(sent["fedavg"], sent[name], strict=True):
                assert list(more) == [times * value for value in plain]
                assert sum(plain) > 0


@pytest.mark.parametrize("option", ["1", "2"])
def test_scaffold_is_a_literal_loop_in_both_carriers(option):
    """With devices that drop out, devices that are drawn more than once, and a round without any usable reply."""
    algorithm = own("scaffold.py", "scaffold").replace(
        memory={"option": option}, select={"K": K}, local={"lr": LR, "batch": BATCH}
    )
    run = simulated(algorithm)
    assert run.lost.any() and (run.times > 1).any() and not run.updated.all()
    expected = literal_scaffold(option, run)
    assert furthest(expected, begin()) > 0.05
    assert furthest(expected, run.params) <= 1e-5
    deployed, strategy = on_flower(algorithm)
    assert furthest(deployed, expected) <= 1e-5
    model = sum(value.nbytes for value in begin().values())
    sent = run.times > 0
    assert run.bytes_up.tolist() == (sent.sum(axis=1) * model * (2 if option == "1" else 1)).tolist()
    assert run.bytes_down.tolist() == ((sent | run.lost).sum(axis=1) * 2 * model).tolist()  # w, and c - c_k
    assert set(strategy.remembered.met) == set(run.devices[sent])


def test_a_memory_makes_a_difference():
    plain = simulated(algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}))
    controlled = simulated(own("scaffold.py", "scaffold").replace(select={"K": K}, local={"lr": LR, "batch": BATCH}))
    assert furthest(plain.params, controlled.params) > 1e-3


def test_only_devices_that_were_met_take_memory():
    """Rows only for the devices that a run can meet; and the same result as with a row for every device."""
    algorithm = own("scaffold.py", "scaffold").replace(select={"K": 2}, local={"lr": LR, "batch": BATCH})
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    scattered = jax.jit(memories.scattered)
    rows = memories.empty(first, N=1_000_000, most=8)
    assert rows.rows.shape == (8, 2, 3)
    device, changed = np.array([7, 999_999, 999_999, 3]), np.array([True, True, False, False])
    rows = scattered(rows, device, changed, np.stack([first + i for i in range(1, 5)]))
    assert int(rows.met) == 2
    rows = scattered(rows, np.array([999_999, 12]), np.array([True, True]), np.stack([first - 1, first - 2]))
    assert int(rows.met) == 3
    gathered = jax.jit(memories.gathered)(rows, np.array([3, 7, 12, 999_999]))
    np.testing.assert_array_equal(gathered, np.stack([first, first + 1, first - 2, first - 1]))
    few = simulated(algorithm, rounds=2)  # at most 4 of 5 devices are met: an index to rows
    many = simulated(algorithm, rounds=6)  # a row for each
    assert few.train_loss.tolist() == pytest.approx(many.train_loss[:2].tolist(), rel=1e-6)


def test_clusters_know_all_devices_and_the_algorithm_those_that_it_met():
    """A label for each of the N devices, and a control variate, as large as a model, for those that were drawn."""
    from folb.simulation import play, problem

    algorithm = algorithms.fedavg(
        select={"name": "clusters", "K": 2, "replacement": False}, memory="scaffold", local={"lr": LR, "batch": BATCH}
    )
    run = simulated(algorithm, rounds=2)
    deployed, _ = on_flower(algorithm, rounds=2, min_replies=None)
    assert furthest(deployed, run.params) <= 1e-5
    state = play.start(problem.problem(FEDERATION, MODEL, system=SYSTEM), algorithm, SEED, rounds=2)
    control, label = state.devices
    assert control.rows["weight"].shape[0] == 4 and label.rows.shape == (FEDERATION.N,)


def test_a_lost_or_refused_device_keeps_its_memory():
    algorithm = own("scaffold.py", "scaffold").replace(select={"K": K}, local={"lr": LR, "batch": BATCH})
    before = {}

    def tamper(partition, message, reply):
        task = message.content.config_records.get("task")
        if partition == 2 and task is not None and task["round"] == 2:
            reply.content["delta"]["bias"] = arrays({"bias": np.full(10, np.nan, np.float32)})["bias"]
        return reply

    class Watched(FederatedStrategy):
        def aggregate_train(self, server_round, replies):
            before[server_round] = dict(self.remembered.met)
            return super().aggregate_train(server_round, replies)

    strategy = Watched(algorithm, system=system.fixed(work=2), wait=0.0, deadline=0.05, seed=SEED)
    strategy.start(grid(tamper=tamper), arrays(begin()), num_rounds=3)
    assert 2 in before[2] and before[3][2] is before[2][2]  # rejected in round 2
    assert any(before[3][k] is not value for k, value in before[2].items())


def test_a_guarded_rule_keeps_the_memory_of_whom_it_refuses():
    """A device whose update climbs on its own gradient is left out by the guard, and its memory stays."""
    import jax.numpy as jnp

    from folb.core.guard import guard
    from folb.core.round import begin as begin_state
    from folb.core.round import close
    from folb.core.rules import Round

    algorithm = guard(own("scaffold.py", "scaffold").replace(memory={"option": "1"}, select={"K": 3}))
    params = {"w": jnp.zeros(2)}
    state, zero = begin_state(algorithm, params)
    grad = {"w": jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.5]])}
    delta = {"w": jnp.array([[-1.0, 0.0], [1.0, 1.0], [-1.0, -0.5]])}  # the second one climbs
    ones = jnp.ones(3)
    own_rows = jax.tree.map(lambda leaf: jnp.stack([leaf + 7] * 3), zero)
    state = state._replace(shared=jax.tree.map(lambda leaf: leaf + 7, state.shared))  # c - c_k is 0: it bends nothing
    closed = jax.jit(close)(algorithm, state, Round(params, ones, ones, ones, delta, grad, N=3, own=own_rows))
    kept = np.asarray(closed.own["w"])
    np.testing.assert_array_equal(kept[1], [7.0, 7.0])
    # in their own unit, clipped to the median norm: of two the smaller, which is 1
    np.testing.assert_allclose(kept[[0, 2]], [[1.0, 0.0], np.array([1.0, 0.5]) / np.sqrt(1.25)], rtol=1e-6)


OWN = [
    ("scaffold.py", "scaffold", {"average": "ema"}),
    ("scaffold.py", "scaffold", {"average": "last_two", "memory.option": "1"}),
    ("my_selection.py", "by_last_update", {}),
    ("my_step.py", "HeavyBall", {}),
    ("my_upload.py", "by_descent", {}),
    ("my_rule.py", "softmax", {}),
    ("my_server.py", "steady", {}),
]


@pytest.mark.parametrize(("name", "function", "settings"), OWN)
def test_a_killed_run_with_parts_of_one_s_own_ends_with_the_same_bits(name, function, settings, tmp_path, monkeypatch):
    algorithm = own(name, function).replace(select={"K": K}, local={"lr": LR, "batch": BATCH}, **settings)
    whole = simulated(algorithm, rounds=12)
    resumed = kill_and_resume(algorithm, 5, tmp_path, monkeypatch, rounds=12)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(resumed.params[name], whole.params[name])


def killed_on_flower(algorithm, directory, parts=(), after=3):
    """A run of 5 rounds that ends in the middle."""

    def killed(t, record):
        if t == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_flower(algorithm, parts, directory=directory, rounds=5, evaluate_fn=killed)


@pytest.mark.parametrize(("name", "function", "settings"), OWN)
def test_a_killed_run_with_parts_of_one_s_own_on_flower_ends_with_the_same_bits(name, function, settings, tmp_path):
    algorithm = own(name, function).replace(select={"K": K}, local={"lr": LR, "batch": BATCH}, **settings)
    parts = parts_for(name)
    whole, _ = on_flower(algorithm, parts, directory=tmp_path / "whole", rounds=5)
    killed_on_flower(algorithm, tmp_path / "killed", parts)
    resumed, _ = on_flower(algorithm, parts, directory=tmp_path / "killed", rounds=5)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(resumed[name], whole[name])
    assert len((tmp_path / "killed" / "rounds.jsonl").read_text().splitlines()) == 5


MINE = """
import folb, jax.numpy as jnp

LENGTH = 1.0

class Times(folb.Rule):
    factor: float = folb.setting("factor", default=1.0)

    def update(self, round):
        return folb.weighted(round, LENGTH * self.factor * part(round))

def part(round):
    return round.times / round.times.sum()

mine = folb.Algorithm(rule=Times())
"""


def test_an_edited_rule_of_one_s_own_does_not_resume_the_earlier_run_on_flower(tmp_path):
    file = tmp_path / "mine.py"

    def written(source, **settings):
        file.write_text(source)
        linecache.checkcache()
        mine = from_file("algorithms", f"{file}:mine")
        return mine.replace(select={"K": K}, local={"lr": LR, "batch": BATCH}, **settings)

    killed_on_flower(written(MINE), tmp_path / "run")
    for edited, settings in (
        (MINE.replace("LENGTH * self", "2 * LENGTH * self"), {}),
        (MINE.replace("return round.times", "return 2 * round.times"), {}),  # in a function that the rule calls
        (MINE.replace("LENGTH = 1.0", "LENGTH = 2.0"), {}),
        (MINE, {"rule.factor": 0.5}),  # a number of the rule
    ):
        with pytest.raises(InputError, match=r"holds another run: .*other code in a part of your own"):
            on_flower(written(edited, **settings), directory=tmp_path / "run", rounds=5)
    commented = MINE.replace("    def update", "    # as the paper has it\n    def update").replace(
        "        return", "\n        return"
    )
    on_flower(written(commented), directory=tmp_path / "run", rounds=5)
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 5


DECORATED = """
import functools

def adding(f):
    @functools.wraps(f)
    def g():
        return f() + {}
    return g

@adding
def X():
    return 0
"""
CHANGES = {  # code that a rule uses, and other code
    "a set": ("X = {1, 2}", "X = {1, 3}"),
    "a type": ("import jax.numpy as jnp\nX = jnp.float16", "import jax.numpy as jnp\nX = jnp.bfloat16"),
    "a function of a library": ("import jax.numpy as jnp\nX = jnp.tanh", "import jax.numpy as jnp\nX = jnp.sin"),
    "a module": ("import math as X", "import cmath as X"),
    "a key": ("import jax\nX = jax.random.key(0)", "import jax\nX = jax.random.key(1)"),
    "an array": ("import numpy as np\nX = np.arange(3)", "import numpy as np\nX = np.arange(1, 4)"),
    "a method": (
        "class Y:\n    @staticmethod\n    def f(): return helper()\ndef helper(): return 1\nX = Y()",
        "class Y:\n    @staticmethod\n    def f(): return helper()\ndef helper(): return 2\nX = Y()",
    ),
    "what a decorator does": (
        DECORATED.format(1),
        DECORATED.format(2),
    ),
    "a function that calls itself": ("def X(n): return X(n - 1)", "def X(n): return X(n - 2)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_a_part_of_one_s_own_uses_tells_it_from_an_edited_one(change, tmp_path):
    def code(source):
        rule = "import folb\nclass Rule(folb.Rule):\n    def update(self, round): return X\n"
        (tmp_path / "mine.py").write_text(f"{source}\n{rule}\nmine = folb.Algorithm(rule=Rule())\n")
        linecache.checkcache()
        return user_code(from_file("algorithms", f"{tmp_path / 'mine.py'}:mine"))

    one, other = CHANGES[change]
    assert code(one) == code(f"# a comment\n\n{one}") != code(other)


@pytest.mark.parametrize("of", ["", "@jax.jit\n    ", "@property\n    ", "@staticmethod\n    "])
def test_an_edited_function_that_a_method_uses_is_another_code(of, tmp_path):
    def code(times):
        (tmp_path / "mine.py").write_text(
            f"import folb, jax\n\ndef helper():\n    return {times}\n\nclass Base(folb.Rule):\n    abstract = True\n"
            f"    {of}def helped(self=None):\n        return helper()\n\n"
            "class Mine(Base):\n    def update(self, round):\n        return self.helped\n\n"
            "mine = folb.Algorithm(rule=Mine())\n"
        )
        linecache.checkcache()
        return user_code(from_file("algorithms", f"{tmp_path / 'mine.py'}:mine"))

    assert code(1.0) == code(1.0) != code(2.0)


def test_an_edited_upload_that_a_class_asks_for_is_another_code(tmp_path):
    def code(times):
        (tmp_path / "mine.py").write_text(
            f"import folb\n\ndef asked(loss):\n    return loss * {times}\n\n"
            "class Mine(folb.Sampling):\n    survey = folb.Upload('asked', asked)\n\n"
            "    def weigh(self, known):\n        return known.survey\n"
        )
        linecache.checkcache()
        return user_code(from_file("algorithms", f"{tmp_path / 'mine.py'}:Mine")())

    assert code(1.0) == code(1.0) != code(2.0)


# the other parts -----------------------------------------------------------------------------------------------------

SLOTS = {
    "selection": ("my_selection.py", "by_last_update", {"select.explore": 0.6}),
    "local step": ("my_step.py", "HeavyBall", {"local.decay": 0.8}),
    "upload": ("my_upload.py", "by_descent", {"rule.power": 2.0}),
    "server step": ("my_server.py", "steady", {"server.most": 0.7}),
    "rule": ("my_rule.py", "softmax", {"rule.temperature": 0.2}),
    "memory": ("scaffold.py", "scaffold", {}),
}


@pytest.mark.parametrize("slot", SLOTS)
def test_a_part_of_one_s_own_runs_in_both_carriers(slot):
    name, function, settings = SLOTS[slot]
    assert len((EXAMPLES / name).read_text().splitlines()) <= 40
    algorithm = own(name, function).replace(select={"K": K}, local={"lr": LR, "batch": BATCH}, **settings)
    run = simulated(algorithm)
    deployed, _ = on_flower(algorithm, parts_for(name))
    assert furthest(deployed, run.params) <= 1e-5
    assert furthest(deployed, begin()) > 1e-2
    other = simulated(algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}))
    assert furthest(other.params, run.params) > 1e-4  # it does something of its own


@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot != "memory"])
def test_its_numbers_are_swept_as_one_program(slot, tmp_path, capsys):
    name, function, settings = SLOTS[slot]
    (key, value), *_ = settings.items()
    small = ["--set", "sizes=20,31,45,12,60,33,27,18", "--set", f"select.K={K}", "--rounds", "8", "--seeds", "2"]
    spec = f"{EXAMPLES / name}:{function}"
    chosen = ["fedavg", "--set", f"local={spec}"] if slot == "local step" else [spec]  # a device needs no algorithm
    command = ["compare", "synthetic_1_1", "--algorithms", *chosen, *small]
    with folb_programs() as programs:
        assert main([*command, "--set", f"{key}={value},{value / 2}", "--out", str(tmp_path / "run"), "--json"]) == 0
    assert len(programs) == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["parameters"][key] for run in runs] == [value, value, value / 2, value / 2]
    assert len({run["model_sha256"] for run in runs}) == 4


def test_rules_of_models_and_not_of_updates():
    """Those that others had, as literal loops."""
    rng = np.random.default_rng(0)
    w, delta = rng.normal(size=40).astype("float32"), rng.normal(size=(3, 40)).astype("float32")
    size, steps = np.array([10.0, 20.0, 70.0]), np.array([1.0, 2.0, 7.0])
    common = {"correction": np.ones(3), "times": np.array([1.0, 1.0, 0.0]), "size": size, "steps": steps}
    round = folb.Round(params={"w": w}, delta={"w": delta}, **common)
    nova = jax.jit(own("fednova_of_models.py", "SumOfModels")().update)(round).delta["w"]
    p = np.array([1 / 3, 2 / 3])
    expected = (p @ steps[:2]) * sum(p[k] / steps[k] * (w + delta[k]) for k in range(2))
    np.testing.assert_allclose(w + nova, expected, rtol=1e-5)
    mean = jax.jit(own("largest_of_models.py", "MeanOfModels")().update)(round).delta["w"]
    kept = [np.where(np.abs(w + d) >= np.sort(np.abs(w + d))[-4], w + d, 0) for d in delta[:2]]
    np.testing.assert_allclose(w + mean, np.mean(kept, axis=0), rtol=1e-5, atol=1e-6)


class folb_programs:  # noqa: N801  it reads as a function
    """Counts the programs of stacked runs that a simulation makes."""

    def __enter__(self):
        from folb.simulation import simulate as simulator

        self.module, self.real, self.made = simulator, simulator.run_stacked, []
        simulator.run_stacked = lambda *args: self.made.append(args) or self.real(*args)
        return self.made

    def __exit__(self, *error):
        self.module.run_stacked = self.real


def test_a_device_that_does_not_know_a_part_says_so():
    with pytest.raises(InputError, match=r"local = 'step': this device knows sgd, .*parts"):
        Device(*samples(0), gradient).answer(Task(1, ("delta",), 1, step="step"), begin())
    with pytest.raises(InputError, match=r"uploads = 'descent': this device knows .*grad"):
        Device(*samples(0), gradient).answer(Task(1, ("descent",)), begin())
    with pytest.raises(InputError, match="loss = None: should be a function"):
        Device(*samples(0), gradient).answer(Task(1, ("loss",)), begin())


def test_an_upload_out_of_its_bounds_is_refused():
    algorithm = own("my_upload.py", "by_descent").replace(select={"K": 20})
    part = sys.modules["folb_own_my_upload"].DESCENT

    def tamper(partition, message, reply):
        if partition == 1 and "task" in message.content.config_records:
            reply.content["metrics"]["descent"] = 50.0
        return reply

    _, strategy = on_flower(algorithm, [part], 1, tamper, system=system.fixed(work=2), seed=1)
    refused = strategy.opened.answers.refused
    assert refused[1] == "descent is 50.0, and should be a number from -1.001 to 1.001"
    assert list(refused) == [1]


def test_the_loss_of_a_device_is_an_upload_in_both_carriers():
    """Weights in proportion to the loss; the devices on Flower compute theirs in NumPy."""

    class ByLoss(folb.Rule):
        uploads = ("loss",)

        def update(self, round):
            weights = round.times * round.sent["loss"]
            return folb.weighted(round, weights / weights.sum())

    algorithm = folb.Algorithm(rule=ByLoss(), select={"K": K}, local={"lr": LR, "batch": BATCH})
    run = simulated(algorithm)
    deployed, _ = on_flower(algorithm)
    assert furthest(deployed, run.params) <= 1e-5
    model = sum(value.nbytes for value in begin().values())
    assert run.bytes_up.tolist() == ((run.times > 0).sum(axis=1) * (model + 4)).tolist()


def test_a_survey_of_one_s_own_in_both_carriers():
    """Devices drawn by their loss, which all of them are asked for."""

    def by_loss(known):
        return known.survey

    algorithm = folb.Algorithm(
        select={"name": sampling(by_loss, survey="loss"), "K": K}, local={"lr": LR, "batch": BATCH}
    )
    run = simulated(algorithm, rounds=3)
    deployed, _ = on_flower(algorithm, rounds=3)
    assert furthest(deployed, run.params) <= 1e-5
    model = sum(value.nbytes for value in begin().values())
    assert run.bytes_up.tolist() == ((run.times > 0).sum(axis=1) * model + 4 * FEDERATION.N).tolist()


def widest(grad):
    return {"low": grad["bias"].min(), "high": grad["bias"].max()}


WIDEST = folb.Upload("widest", widest)


@pytest.mark.parametrize(
    ("asked", "remember"),
    [
        ("loss", lambda answers, K: answers),
        (WIDEST, lambda answers, K: answers["high"] - answers["low"]),
    ],
)
def test_what_all_devices_are_asked_once_may_be_one_s_own(asked, remember):
    """Devices are drawn by what they said before the first round."""

    class ByAnswer(folb.Sampling):
        first, keeps = asked, KEEPS

        def remember(self, answers, K):
            return remember(answers, K)

        def weigh(self, known):
            return known.memory**3

    algorithm = folb.Algorithm(select={"name": ByAnswer(), "K": 2}, local={"lr": LR, "batch": BATCH})
    run = simulated(algorithm, rounds=4)
    deployed, _ = on_flower(algorithm, [WIDEST], rounds=4)
    assert furthest(deployed, run.params) <= 1e-5
    uniform_draws = simulated(folb.Algorithm(select={"K": 2}, local={"lr": LR, "batch": BATCH}), rounds=4)
    assert run.devices.tolist() != uniform_draws.devices.tolist()


class Quarter(folb.LocalStep):
    def apply(self, g, state, lr):
        return folb.vector.scaled(g, -lr / 4), state


def test_a_step_of_one_s_own_is_never_taken_for_one_of_folb():
    """A device finds a step by its name."""

    class Sgd(folb.LocalStep):
        def apply(self, g, state, lr):
            return folb.vector.scaled(g, -lr / 4), state

    with pytest.raises(InputError, match="local = 'sgd': should have another name"):
        folb.Algorithm(local=Sgd())
    for name, parts in {
        "sgd": [Sgd],
        "quarter": [Quarter] * 2,
        "loss": [folb.Upload("loss", lambda grad: 0.0)],
    }.items():
        with pytest.raises(InputError, match=f"parts = '{name}': should be a name that no other part has"):
            Device(*samples(0), gradient, parts=parts)
    with pytest.raises(InputError, match=r"parts = .*: should be classes of folb.LocalStep, and folb.Uploads"):
        Device(*samples(0), gradient, parts=[Quarter()])
    Device(*samples(0), gradient, parts=[Adam, Quarter, Momentum])


class Mixed(folb.LocalStep):
    """A step with settings of every kind."""

    size: float = folb.setting("times lr", default=0.5)
    least: float | None = folb.setting("a smallest move", default=None)
    signs: tuple[int, ...] = folb.setting("of the directions, in turn", default=(1,), static=True)
    word: str = folb.setting("a word", default="a", static=True)

    def apply(self, g, state, lr):
        sign = sum(self.signs) / len(self.signs)
        return folb.vector.scaled(g, -lr * self.size * sign * (1.0 if self.word == "a" else 0.5)), state


def test_a_device_gets_all_settings_of_a_step_from_the_server():
    step = Mixed(size=0.7, signs=(1, 1, -1), word="b")
    algorithm = folb.Algorithm(local={"name": step, "lr": LR, "batch": BATCH}, select={"K": K})
    deployed, _ = on_flower(algorithm, [Mixed], rounds=2)
    assert furthest(deployed, simulated(algorithm, rounds=2).params) <= 1e-5
    with pytest.raises(InputError, match=r"local.word = .*: should be a number, a word"):
        on_flower(folb.Algorithm(local=Mixed(word=len), select={"K": K}), [Mixed], rounds=1)


def test_steps_of_different_sizes_say_so():
    """What divides by the size of the steps rejects them, as it rejects folb's own such steps."""

    class Uneven(Quarter.__base__):
        one_size = False
        apply = Quarter.apply

    for make, settings in (
        (algorithms.fednova, {}),
        (algorithms.fedavg, {"memory": "scaffold"}),
        (algorithms.folb, {"gradient": "proxy"}),
    ):
        with pytest.raises(InputError, match=r"(local = 'uneven'|gradient = 'proxy'): should be"):
            make(local=Uneven(), **settings)
        make(local=Quarter(), **settings)
    with pytest.raises(InputError, match="local = 'adam': should be sgd or momentum"):
        algorithms.fedavg(memory="scaffold", local=Adam(beta=0.5))


# the model that is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "rate"), [("ema", 0.6), ("last_two", None)])
def test_the_model_that_is_evaluated_and_kept(average, rate):
    rounds = 4
    plain = [
        simulated(algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}), rounds=t).params
        for t in range(1, rounds + 1)
    ]
    run = simulated(
        algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}, average={"name": average, "rate": rate}),
        rounds=rounds,
    )
    weights = np.array([rate ** (rounds - s) for s in range(1, rounds + 1)] if rate else [0, 0, 0.5, 0.5])
    expected = {
        name: sum(w * params[name] for w, params in zip(weights / weights.sum(), plain, strict=True))
        for name in plain[0]
    }
    assert furthest(expected, run.params) <= 1e-6
    x, y = FEDERATION.test.x, FEDERATION.test.y
    hits = np.mean((x @ expected["weight"] + expected["bias"]).argmax(axis=1) == y)
    assert run.test_accuracy[-1] == pytest.approx(hits)
    deployed, _ = on_flower(
        algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}, average={"name": average, "rate": rate}),
        rounds=rounds,
    )
    assert furthest(deployed, expected) <= 1e-5


def test_an_average_of_one_s_own():
    """The mean of all models."""

    class Mean(folb.Average):
        def init(self, params):
            return jax.tree.map(jnp.zeros_like, params), jnp.float32(0)

        def update(self, memory, params):
            return folb.tree.add(memory[0], params), memory[1] + 1

        def model(self, memory, params):
            return jax.tree.map(lambda total: total / jnp.maximum(memory[1], 1), memory[0])

    mean = Mean()
    plain = [
        simulated(algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}), rounds=t).params
        for t in (1, 2, 3)
    ]
    run = simulated(algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}, average=mean), rounds=3)
    expected = {name: sum(params[name] for params in plain) / 3 for name in plain[0]}
    assert furthest(expected, run.params) <= 1e-6
    deployed, _ = on_flower(
        algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH}, average=mean), rounds=3
    )
    assert furthest(deployed, expected) <= 1e-5


class TowardsStart(folb.LocalStep):
    """A step whose state is the model that the round started from."""

    def init(self, params):
        return params

    def apply(self, g, state, lr):
        return jax.tree.map(lambda d, w: -lr * (d + 0.1 * w), g, state), state


@pytest.mark.parametrize("unit", ["step", "gradient"])
def test_a_step_s_state_starts_from_the_model(unit):
    algorithm = folb.Algorithm(local={"name": TowardsStart(), "lr": LR, "batch": BATCH, "unit": unit}, select={"K": K})
    run = simulated(algorithm, rounds=3)
    deployed, _ = on_flower(algorithm, [TowardsStart], rounds=3)
    assert furthest(deployed, run.params) <= 1e-5
    assert (
        furthest(
            simulated(
                algorithms.fedavg(select={"K": K}, local={"lr": LR, "batch": BATCH, "unit": unit}), rounds=3
            ).params,
            run.params,
        )
        > 1e-4
    )


def test_a_round_has_the_same_types_in_both_carriers():
    seen = []

    def mean(round):
        seen.append({name: str(getattr(round, name).dtype) for name in ("t", "N", "steps", "times", "size", "lr")})
        return folb.rules.Mean().update(round)

    algorithm = folb.Algorithm(rule=Ruled(mean), select={"K": K}, local={"lr": np.float32(LR)})
    simulated(algorithm, rounds=1)
    on_flower(algorithm, rounds=1)
    assert len({tuple(kinds.items()) for kinds in seen}) == 1
    assert seen[0]["t"] == seen[0]["N"] == seen[0]["steps"] == "int32"


# mistakes ------------------------------------------------------------------------------------------------------------


def stepping(move):
    """A local step of one's own, by what it returns."""
    return type("Stepping", (folb.LocalStep,), {"apply": lambda self, g, state, lr: move(g, state, lr)})()


def remembering(first, later, shifted=None):
    """A memory that starts as `first`, and is later(round) after a round."""
    methods = {"init": lambda self, params: first(params), "update": lambda self, round: later(round)}
    if shifted is not None:
        methods["shift"] = lambda self, shared, own, sent: shifted
    return type("Mine", (folb.DeviceMemory,), methods)()


KEEPS = remembering(lambda w: ((), np.float32(0)), lambda r: ((), r.own))
AS_IT_IS = lambda self, answers, K: answers  # noqa: E731


class Sudden(folb.DeviceMemory):
    def init(self, params):
        return (), ()


class Mistaken(folb.DeviceMemory):
    of: str = folb.setting("what is mistaken", default="pace", static=True)

    @property
    def pace(self):
        return "a" if self.of == "pace" else 1.0

    @property
    def uploads(self):
        return "grad" if self.of == "uploads" else ()

    def init(self, params):
        return (), ()

    def update(self, round):
        return (), ()


class Idle(folb.ServerStep):
    pass


class Nothing(folb.ServerStep):
    def apply(self, memory, round, update):
        return None


class Bias(folb.ServerStep):
    def apply(self, memory, round, update):
        return update.delta["bias"], memory


MISTAKES = {
    "a number of another step": (
        {"server": "plain", "server.beta": 0.5},
        r"server.beta = 0.5: is for server=momentum, nesterov, lookahead, adam, yogi;",
    ),
    "beta of 1": (
        {"server": "momentum", "server.beta": 1.0},
        "server.beta = 1.0: should be at least 0 and less than 1",
    ),
    "a correction of a step without one": (
        {"server": "momentum", "server.bias_correction": False},
        "server.bias_correction = False: is for server=adam, yogi; server is momentum",
    ),
    "a correction that is a number": (
        {"server": "adam", "server.bias_correction": 0},
        "server.bias_correction = 0: should be True or False",
    ),
    "eps of 0": ({"server": "adam", "server.eps": 0.0}, "server.eps = 0.0: should be more than 0"),
    "a rate without its average": ({"average.rate": 0.5}, "average.rate = 0.5: is for average=ema"),
    "a rate of 1": ({"average": "ema", "average.rate": 1.0}, "average.rate = 1.0: should be at least 0"),
    "another average": ({"average": "median"}, "average = 'median': choose one of ema, last_two"),
    "an upload twice": ({"uploads": ("grad", "grad")}, "uploads = 'grad': is listed twice"),
    "an upload by a taken name": ({"uploads": (folb.Upload("delta", lambda grad: grad),)}, "uploads = 'delta'"),
    "an upload with its bounds the wrong way": (
        {"uploads": (folb.Upload("a", lambda grad: grad, least=3, most=1),)},
        "upload a: least, most",
    ),
    "an upload named as a record is": ({"uploads": (folb.Upload("round", lambda grad: grad),)}, "uploads = 'round'"),
    "a rate with an average of one's own": (
        {"average": LastTwo(), "average.rate": 0.5},
        "average.rate = 0.5: is for average=ema; average is last_two",
    ),
    "a sampling without the memory it looks at": (
        {"select": sampling(lambda known: known.size, memory=True)},
        "memory = None: should be a DeviceMemory",
    ),
    "an upload of what no device has": ({"uploads": (folb.Upload("a", lambda hessian: 0),)}, "needs = 'hessian'"),
    "a survey after the work": (
        {"select": sampling(lambda known: known.size, survey=folb.Upload("a", lambda delta: 0))},
        "select: survey = 'a': should need none of delta",
    ),
    "what is asked once, and not remembered": (
        {"select": sampling(lambda known: known.size, keeps=KEEPS, first="loss")},
        "select = 'mine': should have a method remember",
    ),
    "what is asked once, of another type": (
        {"select": sampling(lambda known: known.size, keeps=KEEPS, first=("loss", len))},
        r"uploads = \('loss', .*: choose one of",
    ),
    "what is asked once, after the work": (
        {
            "select": sampling(
                lambda known: known.size, keeps=KEEPS, remember=AS_IT_IS, first=folb.Upload("a", lambda delta: 0)
            )
        },
        "select: first = 'a': should need none of delta",
    ),
    "what is asked once, and kept nowhere": (
        {"select": sampling(lambda known: known.size, first="loss", remember=AS_IT_IS)},
        "select: keeps = None: should be a DeviceMemory",
    ),
    "a local step that is none": ({"local": 3}, r"local = 3: should be one of sgd, .*, or a folb.LocalStep"),
    "a local step without apply": ({"local": folb.LocalStep()}, "local = .*should have a method apply"),
    "a local step of infinite momentum": ({"local": Momentum(beta=1.0)}, "local.beta = 1.0: should be at least 0"),
    "what is asked once, and in each round": (
        {"select": sampling(lambda known: known.size, first="loss", survey="norm", keeps=KEEPS, remember=AS_IT_IS)},
        "select: first = 'loss': should be None with a survey",
    ),
    "what it keeps is none": (
        {"select": sampling(lambda known: known.size, keeps=3)},
        "memory = 3: should be a folb.DeviceMemory",
    ),
    "a sampling that weighs nothing": ({"select": folb.Sampling()}, "select = .*should have a method weigh"),
    "a function as a sampling": ({"select": len}, "select = .*: should be one of uniform, .*or a folb.Sampling"),
    "a memory without an update": ({"memory": Sudden()}, "memory = 'sudden': should have a method update"),
    "a pace that is a text": (
        {"memory": Mistaken(of="pace")},
        "memory: pace = 'a': should be at least",
    ),
    "uploads of a memory that are a text": (
        {"memory": Mistaken(of="uploads")},
        "memory: uploads = 'grad': should be a list",
    ),
    "uploads that are a number": ({"uploads": 3}, "uploads = 3: should be a list of uploads"),
    "a server step without apply": ({"server": Idle()}, "server = 'idle': should have a method apply"),
    "a function as a server step": ({"server": len}, "server = .*should be one of plain, .*or a folb.ServerStep"),
    "a step size without a factor": ({"step_size": folb.StepSize()}, "step_size = .*should have a method factor"),
    "an average without methods": ({"average": folb.Average()}, "average = .*should have a method init"),
    "a memory that is none": ({"memory": 3}, "memory = 3: should be one of scaffold, .*or a folb.DeviceMemory"),
    "a sampling that is none": ({"select": 3}, "select = 3: should be one of uniform"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_parts_are_named(mistake):
    settings, said = MISTAKES[mistake]
    with pytest.raises(InputError, match=said):
        folb.Algorithm(**settings)


class Careless(folb.Rule):
    uploads = "grad"

    def update(self, round):
        return folb.rules.Mean().update(round)


class Alone(folb.Rule):
    second = True

    def update(self, round):
        return folb.rules.Mean().update(round)


RULES = {
    "a number": (3, "rule = 3: should be one of mean, .*, or a folb.Rule"),
    "a function": (len, "rule = .*should be one of mean, .*, or a folb.Rule"),
    "a class of another slot": (folb.StepSize, "rule = .*should be one of mean, .*, or a folb.Rule"),
    "no update": (folb.Rule(), "rule = 'rule': should have a method update"),
    "a text as uploads": (Careless(), "rule: uploads = 'grad': should be a list of uploads"),
    "a second set alone": (Alone(), r"rule: uploads = \(\): should have 'grad' with `second`"),
    "a discount below 0": (folb.rules.FolbHetero(-1.0), "rule.psi = -1.0: should be at least 0"),
    "shares by nothing": (folb.rules.Mean("all"), "rule.weights = 'all': should be one of equal, samples"),
}


@pytest.mark.parametrize("mistake", RULES)
def test_mistakes_in_rules_are_named(mistake):
    rule, said = RULES[mistake]
    with pytest.raises(InputError, match=said):
        folb.Algorithm(rule=rule)


def test_a_source_of_gradients_needs_a_rule_that_asks_for_them():
    with pytest.raises(InputError, match="gradient = 'sketch': should be exact: this rule asks for no gradients"):
        folb.Algorithm(gradient="sketch")
    made = algorithms.folb(gradient=Sketch(m=64))
    assert [made.settings[name] for name in ("gradient", "gradient.m", "gradient.bits")] == ["sketch", 64, 8]


SHAPES = {
    "an update": ({"rule": Ruled(lambda round: round.params)}, r"rule = 'dict': should return a folb.Update"),
    "a move": ({"local": stepping(lambda g, state, lr: (g["weight"], state))}, "local: the move"),
    "a state": ({"local": stepping(lambda g, state, lr: (g, (g,)))}, "local: the state after a step"),
    "no pair from a step": ({"local": stepping(lambda g, state, lr: g)}, "local: what it returns = 'dict'"),
    "no pair from init": (
        {"memory": remembering(lambda w: w, lambda r: ((), r.own))},
        "memory: what init.*'dict': should be a pair",
    ),
    "no pair from update": (
        {"memory": remembering(lambda w: ((), 0.0), lambda r: None)},
        "memory: what update.*'NoneType': should be a pair",
    ),
    "no pair from apply": (
        {"server": Nothing()},
        "server: what apply returns = 'NoneType'",
    ),
    "a whole number": ({"uploads": (folb.Upload("a", lambda grad: 1),)}, "upload a = 'int32': should be float32"),
    "a nested upload": (
        {"uploads": (folb.Upload("a", lambda grad: {"b": {"c": grad["bias"]}}),)},
        "upload a = 'dict': should be a number, an array, or a dict of arrays",
    ),
    "weights": (
        {"rule": Ruled(lambda round: folb.weighted(round, round.times[:1]))},
        r"weights: shape = \(1,\): should be \(6,\)",
    ),
    "complex chances": ({"select": sampling(lambda known: 1j * known.share)}, "select: what it returns"),
    "chances": ({"select": sampling(lambda known: known.size[:2])}, r"select: shape = \(2,\): should be \(5,\)"),
    "a shift": (
        {"memory": remembering(lambda w: ((), ()), lambda r: ((), ()), 0.0)},
        "memory: what shift",
    ),
    "a memory": (
        {"memory": remembering(lambda w: ((), 0.0), lambda r: ((), r.delta))},
        "memory: what update",
    ),
    "a server's model": (
        {"server": Bias()},
        "server: the model and the memory",
    ),
    "what is remembered of all devices": (
        {
            "select": sampling(
                lambda known: known.size, keeps=KEEPS, first="loss", remember=lambda self, answers, K: answers[:2]
            ),
            "select.K": 2,
        },
        "select: first: what `remember` returns",
    ),
    "a type": (
        {"memory": remembering(lambda w: ((), 0), lambda r: ((), r.times))},
        "memory: what update.*should be .*int32",
    ),
}


@pytest.mark.parametrize("part", SHAPES)
def test_parts_of_wrong_shapes_are_named_before_anything_runs(part):
    settings, said = SHAPES[part]
    with pytest.raises(InputError, match=said):
        simulated(folb.Algorithm(**{"rule": folb.rules.Mean(), "select.K": K} | settings), rounds=2)


def test_chances_that_are_no_numbers_are_none():
    """NaN, infinity and negative chances: such devices are not drawn; if no device is left, all have equal chances."""
    import jax.numpy as jnp

    def odd(known):
        return jnp.array([jnp.nan, -1.0, jnp.inf, 2e38, 2e38])

    drawn = set(np.unique(simulated(folb.Algorithm(select={"name": sampling(odd), "K": K}), rounds=4).devices))
    assert drawn == {3, 4}
    none = simulated(folb.Algorithm(select={"name": sampling(lambda known: 0.0 * known.size), "K": K}), rounds=4)
    assert len(np.unique(none.devices)) == 5


def test_a_memory_of_devices_is_refused_where_draws_are_ahead_or_replies_unseen():
    algorithm = own("my_selection.py", "by_last_update").replace(select={"K": 2})
    with pytest.raises(InputError, match="neither a survey nor a memory"):
        simulate(FEDERATION, MODEL, algorithm, rounds=2, stream=True)
    with pytest.raises(InputError, match="memory = 'mine': should be None"):
        memory = remembering(lambda w: ((), 0.0), lambda r: ((), r.own))
        folb.flower.TwoPhaseStrategy(folb.Algorithm(rule=folb.rules.Folb(), memory=memory, select={"K": 5}))


def test_a_memory_with_streamed_samples_is_that_without():
    algorithm = own("scaffold.py", "scaffold").replace(select={"K": 2}, local={"lr": LR, "batch": BATCH})
    here, there = (simulated(algorithm, rounds=4, stream=stream) for stream in (False, True))
    np.testing.assert_array_equal(here.params["weight"], there.params["weight"])


def test_the_draws_are_what_the_literal_loop_takes_it_for():
    """The work that the record has is the system's, of (seed, round, device)."""
    run = simulated(algorithms.fedavg(select={"K": K}, local={"batch": BATCH}))
    draws = uniform(SEED, 1, run.devices[0], 4)[:, 2:]
    work = np.where(run.times[0] > 0, 1 + np.floor(draws[:, 0] * 4), 0)
    np.testing.assert_array_equal(run.records["work"][0], work)


def test_an_error_in_a_file_of_one_s_own_names_the_file_and_the_line(tmp_path, capsys):
    """Before the first round, in one line, without a traceback."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import folb\n\nclass Rule(folb.Rule):\n    def update(self, round):\n        return round.deltas\n\n"
        "mine = folb.Algorithm(rule=Rule())\n"
    )
    command = [
        "compare",
        "synthetic_1_1",
        "--algorithms",
        f"fedavg,{file}:mine",
        "--set",
        "sizes=20,31",
        "--set",
        "select.K=2",
    ]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{file} = 'line 5': fails: AttributeError: 'Round' object has no attribute 'deltas'" in error
    assert "Traceback" not in error and not (tmp_path / "run").exists()


def test_a_file_of_one_s_own_may_import_its_neighbour(tmp_path, capsys):
    (tmp_path / "beside_mine.py").write_text("import folb\nrule = folb.rules.Mean()\n")
    (tmp_path / "mine.py").write_text("import folb\nfrom beside_mine import rule\nmine = folb.Algorithm(rule=rule)\n")
    small = ["--set", "sizes=20,31", "--set", "select.K=2", "--rounds", "2", "--seeds", "1", "--json"]
    assert main(["compare", "synthetic_1_1", "--algorithms", f"{tmp_path / 'mine.py'}:mine", *small]) == 0
    assert str(tmp_path) not in sys.path


def test_neighbours_of_one_name_are_those_of_each_file(tmp_path):
    for name, scale in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helpers.py").write_text(f"SCALE = {scale}\n")
        (tmp_path / name / f"of_{name}.py").write_text("from helpers import SCALE\nmine = SCALE\n")
    made = [from_file("algorithms", f"{tmp_path}/{name}/of_{name}.py:mine") for name in "aba"]
    assert made == [1, 2, 1]
    assert "helpers" not in sys.modules or sys.modules["helpers"].SCALE == 1


OF_OWN_DEFAULTS = """
import folb

three = folb.Algorithm(server="momentum", select={"K": 3}, local={"lr": 0.02})
"""


def test_what_an_algorithm_of_one_s_own_has_by_default_is_recorded_and_can_be_set(tmp_path, capsys):
    """Its experiment file has all of it: so it can be repeated, and resumed."""
    (tmp_path / "mine.py").write_text(OF_OWN_DEFAULTS)
    command = ["compare", "synthetic_1_1", "--algorithms", f"{tmp_path / 'mine.py'}:three", "--set", "sizes=20,31,9"]
    command += ["--rounds", "3", "--seeds", "1", "--json"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    (first,) = json.loads(capsys.readouterr().out)["runs"]
    paths = ("select.K", "server", "local.lr", "server.beta")
    assert [first["parameters"][path] for path in paths] == [3, "momentum", 0.02, 0.9]
    (tmp_path / "run" / "results.json").unlink()
    assert main(["resume", str(tmp_path / "run"), "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["runs"]
    assert again["model_sha256"] == first["model_sha256"]
    assert main(["run", str(tmp_path / "run" / "experiment.toml"), "--out", str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [again]
    own = {"algorithms": [command[3]], "rounds": 3, "seeds": 1}
    asked = {"sizes": [20, 31, 9], "server": "adam", "local.batch": 4, "three.select.K": 2}
    (changed,) = plan(folb.Experiment("synthetic_1_1", **own, set=asked)).algorithms
    paths = ("server", "local.batch", "select.K", "local.lr")
    assert [changed.settings[path] for path in paths] == ["adam", 4, 2, 0.02]


CALLED_BACK = """
import folb, jax
calls = []

def host(times):
    calls.append(1)
    if len(calls) > 3:
        raise ValueError("no more")
    return times / 10

class Rule(folb.Rule):
    def update(self, round):
        like = jax.ShapeDtypeStruct(round.times.shape, round.times.dtype)
        return folb.weighted(round, jax.pure_callback(host, like, round.times, vmap_method="sequential"))

mine = folb.Algorithm(rule=Rule())
"""
OWN_MISTAKES = {
    "a path that is none": (
        "import folb\nmine = folb.Algorithm(lr=0.1)\n",
        "fails to load: InputError: setting = 'lr': should be local.lr or server.lr",
    ),
    "a name without a value": ("import folb\nmine = None\n", "has no 'mine'"),
    "a function": (
        "import folb\ndef mine(**c): return folb.Algorithm(**c)\n",
        "should be an algorithm, as mine = folb.Algorithm(server='adam')",
    ),
    "an unknown annotation": (
        "import folb\nclass Rule(folb.Rule):\n    k: 'Foo' = folb.setting('k', default=1)\n"
        "    def update(self, round): return folb.rules.Mean().update(round)\nmine = folb.Algorithm(rule=Rule())\n",
        "NameError: name 'Foo' is not defined",
    ),
    "an exit": ("import sys\nsys.exit(4)\n", "fails to load: SystemExit: 4"),
    "an error while rounds are played": (CALLED_BACK, "fails: ValueError: no more"),
}


@pytest.mark.parametrize("mistake", OWN_MISTAKES)
def test_a_mistake_in_a_file_of_one_s_own_is_one_line(mistake, tmp_path, capsys):
    source, said = OWN_MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(source)
    small = ["--set", "sizes=20,31,9", "--set", "select.K=2", "--rounds", "30", "--seeds", "1"]
    command = ["compare", "synthetic_1_1", "--algorithms", f"{tmp_path / 'mine.py'}:mine", *small]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("folb: error: ") and said in error


def test_numbers_that_are_another_in_32_bits_are_refused():
    with pytest.raises(InputError, match=r"local\.lr = 1e-50: should be more than 0, in 32 bits"):
        algorithms.fedavg(local={"lr": 1e-50})


class Half(folb.ServerStep):
    def init(self, params):
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.bfloat16), params)

    def apply(self, memory, round, update):
        memory = jax.tree.map(lambda m, d: (0.9 * m + d).astype(jnp.bfloat16), memory, update.delta)
        return folb.tree.add(round.params, memory), memory


def test_a_memory_in_16_bits_is_resumed_in_both_carriers(tmp_path, monkeypatch):
    """NumPy's format does not know bfloat16."""
    algorithm = folb.Algorithm(server=Half(), select={"K": K}, local={"lr": LR, "batch": BATCH})
    whole = simulated(algorithm, rounds=12)
    resumed = kill_and_resume(algorithm, 5, tmp_path / "simulated", monkeypatch, rounds=12)
    np.testing.assert_array_equal(resumed.params["weight"], whole.params["weight"])
    whole, _ = on_flower(algorithm, directory=tmp_path / "whole", rounds=5)
    killed_on_flower(algorithm, tmp_path / "killed")
    resumed, _ = on_flower(algorithm, directory=tmp_path / "killed", rounds=5)
    np.testing.assert_array_equal(resumed["weight"], whole["weight"])


def test_a_step_size_that_counts_is_the_same_in_both_carriers():
    """A memory of a whole number: NumPy would make 64 bits of it."""

    class Counting(folb.StepSize):
        def init(self, params):
            return jnp.int32(0)

        def factor(self, memory, t):
            return 1 / (1 + memory)

        def update(self, memory, round):
            return memory + 1

    algorithm = folb.Algorithm(step_size=Counting(), select={"K": K}, local={"lr": LR, "batch": BATCH})
    deployed, _ = on_flower(algorithm, rounds=4)
    assert furthest(deployed, simulated(algorithm, rounds=4).params) <= 1e-5


def test_a_bad_part_does_not_cost_the_results_there_are(tmp_path, capsys):
    """--again with an upload that cannot be sent: it is refused before anything is cleared."""
    file, run = tmp_path / "mine.py", tmp_path / "run"
    source = "import folb, jax.numpy as jnp\nmine = folb.Algorithm({})\n"
    command = ["compare", "synthetic_1_1", "--algorithms", f"{file}:mine", "--set", "sizes=20,31", "--rounds", "2"]
    file.write_text(source.format(""))
    assert main([*command, "--out", str(run)]) == 0
    before = (run / "results.json").read_bytes()
    for bad in ("jnp.int32(1)", "'text'"):
        file.write_text(source.format(f"uploads=[folb.Upload('q', lambda grad: {bad})]"))
        assert main([*command, "--out", str(run), "--again"]) == 2
        assert "Traceback" not in capsys.readouterr().err
        assert (run / "results.json").read_bytes() == before
