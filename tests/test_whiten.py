"""Whitened updates and orthogonal steps, against literal loops, in both carriers."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from folb import Hidden, InputError, algorithms, models, read, simulate, system
from folb.cli.main import main
from folb.core.liars import ATTACKS
from folb.core.local_step import Orthogonal as OrthogonalStep
from folb.core.vector import norm
from folb.core.whiten import Orthogonal, hidden_matrices
from folb.data.synthetic import synthetic

SIZES = [20, 31, 45, 12, 60, 26]
FEDERATION = synthetic(0.5, 0.5, devices=len(SIZES), sizes=SIZES)
MODEL = models.mlp(FEDERATION.shape, FEDERATION.classes, first=8, second=5)
RUN = {"select.K": 3, "local.batch": 5}


def factor(matrix):
    """Five Newton-Schulz steps as Muon writes them, of the same length as the matrix."""
    length = np.linalg.norm(matrix)
    if length == 0:
        return matrix
    x = np.float64(matrix) / length
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if turned else x
    return length * x / np.linalg.norm(x)


def by_parts(f, leaf, parts=1, outputs=-1):
    """f of each matrix of an array."""
    rows = np.moveaxis(np.float64(leaf), outputs, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    done = np.concatenate([f(one) for one in np.split(flat, parts, axis=1)], axis=1)
    return np.moveaxis(done.reshape(rows.shape), -1, outputs)


def tree(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"conv": (3, 3, 4, 6), "gates": (7, 20), "turned": (6, 3, 2, 2), "wide": (5, 9), "out": (9, 4)}
    shapes["bias"] = (9,)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


MATRICES = (Hidden("conv"), Hidden("gates", parts=4), Hidden("turned", outputs=0), Hidden("wide"))


@pytest.mark.parametrize("library", [np, jnp])
def test_hidden_matrices_become_their_orthogonal_factors_at_their_length(library):
    delta = tree()
    made = Orthogonal(matrices=MATRICES).whitened({name: library.asarray(leaf) for name, leaf in delta.items()})
    for one in MATRICES:
        wanted = by_parts(factor, delta[one.path], one.parts, one.outputs)
        np.testing.assert_allclose(made[one.path], wanted, atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(made[one.path]), np.linalg.norm(delta[one.path]), rtol=1e-5)
    for name in ("out", "bias"):
        np.testing.assert_array_equal(made[name], delta[name])
    directions = np.linalg.svd(np.asarray(made["wide"]), compute_uv=False)
    assert directions.max() / directions.min() < 2 < np.divide(*np.linalg.svd(delta["wide"])[1][[0, -1]])


def test_nothing_stays_nothing_and_what_is_not_finite_changes_nothing_else():
    delta = tree() | {"wide": np.zeros((5, 9), np.float32), "gates": np.full((7, 20), np.nan, np.float32)}
    made = Orthogonal(matrices=MATRICES).whitened(jax.tree.map(jnp.asarray, delta))
    assert not np.asarray(made["wide"]).any() and np.isnan(made["gates"]).all() and np.isfinite(made["conv"]).all()
    for scale in (1e-25, 1e25):  # their squares would vanish, or overflow
        far = Orthogonal(matrices=MATRICES).whitened({name: scale * jnp.asarray(leaf) for name, leaf in tree().items()})
        near = Orthogonal(matrices=MATRICES).whitened(jax.tree.map(jnp.asarray, tree()))
        np.testing.assert_allclose(far["wide"] / scale, near["wide"], rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("conv", "hidden = 'conv': should be a list of matrices"),
        (["cnov"], "hidden = 'cnov': should be one of bias, conv"),
        (["bias"], "hidden: bias = (9,): should have at least two axes"),
        ([Hidden("gates", parts=3)], "hidden: parts of gates = 3: should divide 20"),
        ([Hidden("turned", outputs=1)], "hidden: outputs of turned = 1: should be 0 or -1"),
        ([7], "hidden = 7: should be an array's path, or a folb.Hidden"),
    ],
)
def test_a_wrong_matrix_is_named(given, message):
    with pytest.raises(InputError) as error:
        hidden_matrices("hidden", given, tree())
    assert str(error.value).startswith(message)


def test_a_model_names_its_hidden_matrices_and_never_its_outputs():
    image, words = (8, 8), (5,)
    assert [one.path for one in models.cnn(image, 3).hidden] == ["first.weight", "second.weight", "hidden.weight"]
    assert {one.parts for one in models.char_lstm(words, 9).hidden} == {4}
    assert len(models.resnet(image, 3).hidden) == 9 and models.logistic(image, 3).hidden == ()
    for model in (models.cnn(image, 3), models.lenet((16, 16), 3), models.char_lstm(words, 9), models.resnet(image, 3)):
        like = jax.eval_shape(model.init, jax.random.key(0))
        assert hidden_matrices("hidden", model.hidden, like) == model.hidden
        assert not any("score" in one.path or "embedding" in one.path for one in model.hidden)


def test_the_record_says_what_followed_from_the_model():
    logistic = models.logistic(FEDERATION.shape, FEDERATION.classes)
    network, convex = (simulate(FEDERATION, one, algorithms.accord(**RUN), rounds=1)[0] for one in (MODEL, logistic))
    assert (network.parameters["whiten"], network.parameters["step_size"]) == ("orthogonal", "relative")
    assert (convex.parameters["whiten"], convex.parameters["step_size"]) == (None, "consensus")
    before = algorithms.accord(step_size="consensus", whiten=None, **RUN)
    assert convex.test_accuracy == simulate(FEDERATION, logistic, before, rounds=1)[0].test_accuracy


def literal_run(algorithm, rounds, run):
    """accord on a network, from the devices that a run drew: one epoch of full batches is one step."""
    params = jax.tree.map(np.float64, MODEL.init(jax.random.key(0)))
    m = jax.tree.map(np.zeros_like, params)
    gradient = jax.jit(jax.grad(lambda w, x, y: jnp.mean(MODEL.loss(w, x, y))))
    mean, total, log, train = m, 0.0, 0.0, FEDERATION.train
    for t in range(rounds):
        start = jax.tree.map(lambda w, m: w + 0.85 * m, params, m)
        deltas, lr = [], np.float32(0.04 * np.exp(log))
        for k in run.devices[t]:
            rows = slice(train.start[k], train.start[k] + train.size[k])
            w = jax.tree.map(np.float32, start)
            for _ in range(2):
                g = gradient(w, train.x[rows], train.y[rows])
                w = jax.tree.map(lambda w, g, lr=lr: w - lr * g, w, g)
            deltas.append(jax.tree.map(lambda a, b: np.float64(a) - b, w, start))
        delta = jax.tree.map(lambda *d: sum(d) / len(d), *deltas)
        square = np.mean([float(norm(d)) ** 2 for d in deltas])
        s = np.clip(square / float(norm(delta)) ** 2, 1, len(deltas))
        for name in ("first", "second"):
            delta[name]["weight"] = factor(delta[name]["weight"])
        ratio = np.sqrt(square) / float(norm(params))
        m = jax.tree.map(lambda m, d, s=s: 0.85 * m + np.sqrt(s) * d, m, delta)
        params = jax.tree.map(np.add, params, m)
        log += np.clip(0.5 * np.log(0.035 / (1 + t / 20) / ratio), -1, 1)
        mean, total = jax.tree.map(lambda a, w: 0.6 * a + w, mean, params), 0.6 * total + 1
    return jax.tree.map(lambda a: a / total, mean)


def test_accord_on_a_network_is_its_literal_loop():
    algorithm = algorithms.accord(**{"select.K": 3, "local.unit": "gradient"})
    (run,) = simulate(FEDERATION, MODEL, algorithm, rounds=6, system=system.uniform(low=2, high=2))
    wanted = literal_run(algorithm, 6, run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), run.params, wanted)


def test_an_orthogonal_step_is_muon_s_and_the_same_without_jax():
    g, lr = tree(1), np.float32(0.1)
    step = OrthogonalStep(beta=0.5, share=0.75).of(MATRICES)
    state = step.init(g)
    for _ in range(2):
        move, state = step.apply(g, state, lr)
    v = {name: 1.5 * np.float64(leaf) for name, leaf in g.items()}  # 0.5 g + g

    def muon(matrix):
        scaled = factor(matrix) / np.linalg.norm(matrix)  # of length 1
        raw = np.float64(matrix) / np.linalg.norm(matrix)
        raw = raw.T if (turned := raw.shape[0] > raw.shape[1]) else raw
        for _ in range(5):
            a = raw @ raw.T
            raw = 3.4445 * raw + (-4.7750 * a + 2.0315 * a @ a) @ raw
        assert np.isclose(np.linalg.norm(scaled), 1)
        return -0.075 * np.sqrt(matrix.shape[1] / matrix.shape[0]) * (raw.T if turned else raw)

    for one in MATRICES:
        np.testing.assert_allclose(move[one.path], by_parts(muon, v[one.path], one.parts, one.outputs), atol=1e-5)
    np.testing.assert_allclose(move["out"], -0.1 * g["out"], rtol=1e-6)
    np.testing.assert_allclose(move["bias"], -0.0375 * v["bias"] / np.sqrt(np.mean(v["bias"] ** 2)), rtol=1e-5)
    again, _ = jax.jit(step.apply)(g, step.init(g), lr)
    np.testing.assert_allclose(again["wide"], step.apply(g, step.init(g), lr)[0]["wide"], atol=1e-5)


def test_a_device_without_jax_takes_orthogonal_steps():
    code = """
import numpy as np, sys
from folb.core.local_step import LOCAL_STEPS
step = LOCAL_STEPS["orthogonal"](matrices=(("a", 1, -1),), beta=np.float32(0.5), share=np.float32(0.75))
g = {"a": np.eye(4, 3, dtype=np.float32), "b": np.ones(3, np.float32)}
move, _ = step.apply(g, step.init(g), np.float32(0.1))
assert "jax" not in sys.modules
print(move["a"].dtype, move["b"].dtype, round(float(move["b"][0]), 5))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float32", "float32", "-0.0375"]


@pytest.mark.parametrize("given", [{}, {"local": {"name": "orthogonal", "lr": 0.03}, "whiten": None}], ids=str)
def test_flower_is_the_simulator_on_a_network(given):
    pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")
    from inprocess import InProcessGrid

    from folb.flower import Device, FederatedStrategy, arrays, client_app, from_jax

    algorithm, train = algorithms.accord(**RUN, **given), FEDERATION.train
    (run,) = simulate(FEDERATION, MODEL, algorithm, rounds=4, seeds=[3])
    gradient, apps = from_jax(MODEL.loss), []
    for k in range(FEDERATION.N):
        rows = slice(train.start[k], train.start[k] + train.size[k])
        apps.append(client_app(lambda context, rows=rows: Device(train.x[rows], train.y[rows], gradient)))
    strategy = FederatedStrategy(algorithm, seed=3, hidden=MODEL.hidden, min_available_nodes=FEDERATION.N)
    first = arrays(jax.tree.map(np.asarray, MODEL.init(jax.random.key(3))))
    result = strategy.start(InProcessGrid(apps), initial_arrays=first, num_rounds=4)
    for name, value in result.arrays.items():
        layer, leaf = name.split(".")
        # small directions are rounded, and then lengthened
        np.testing.assert_allclose(value.numpy(), run.params[layer][leaf], atol=5e-5)
    with pytest.raises(InputError, match=r"^hidden = 'none\.weight': should be one of"):
        FederatedStrategy(algorithm, seed=3, hidden=["none.weight"]).start(InProcessGrid(apps), initial_arrays=first)


def test_the_guard_refuses_what_makes_a_single_voice_louder():
    with pytest.raises(InputError, match=r"^whiten = 'orthogonal': should be none if guarded"):
        algorithms.folb(guard="on", whiten="orthogonal")


def test_a_private_network_is_whitened_after_its_noise():
    draw, noise = {"name": "poisson", "K": 3}, {"name": "central", "noise": 0.5}
    private = algorithms.accord(select=draw, privacy=noise, **{"local.batch": 5})
    (run,) = simulate(FEDERATION, MODEL, private, rounds=3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params)) and run.epsilon > 0


USUAL_ATTACKS = ("adaptive", "flipped_x1000")  # the others are for the night


@pytest.mark.parametrize(
    "attack",
    [one if one in USUAL_ATTACKS else pytest.param(one, marks=pytest.mark.slow) for one in sorted(ATTACKS.parts)],
)
def test_behind_the_norm_bound_no_attack_makes_a_whitened_step_longer_than_the_median(attack):
    """Whatever liars send: each matrix keeps the length that the bounded mean has, whatever its direction."""
    given = {**RUN, "robust": "norm_bound", "local.lr": 0.05, "attack": attack}
    whitened, plain = (
        simulate(FEDERATION, MODEL, algorithms.fedavg(**{**given, "whiten": one}), rounds=1)[0]
        for one in ("orthogonal", None)
    )
    first = MODEL.init(jax.random.key(0))
    for one in MODEL.hidden:
        layer, leaf = one.path.split(".")
        steps = [np.linalg.norm(run.params[layer][leaf] - first[layer][leaf]) for run in (whitened, plain)]
        np.testing.assert_allclose(*steps, rtol=1e-3)


NETWORK = """
import jax
from folb import Model
from folb.models import cross_entropy

def net(shape, classes):
    def scores(w, x):
        return jax.nn.relu(x @ w["a"]) @ w["b"]

    def init(key):
        return {"a": jax.random.normal(key, (shape[0], 4)) / 8, "b": jax.random.normal(key, (4, classes)) / 2}

    return Model(init, lambda w, x, y: cross_entropy(scores(w, x), y), lambda w, x: scores(w, x).argmax(axis=1)HIDDEN)
"""


@pytest.mark.parametrize("says", ["", ", hidden=['a']"])
def test_a_user_s_network_says_what_is_hidden_or_is_asked_to(says, tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(NETWORK.replace("HIDDEN", says))
    command = ["compare", "synthetic_1_1", "--model", f"{file}:net", "--algorithms", "accord", "--rounds", "1"]
    assert main([*command, "--seeds", "1", "--out", str(tmp_path / "run")]) == 0
    asked = "names none of its 2 matrices as hidden" in capsys.readouterr().err
    (run,) = read(tmp_path / "run").runs()
    assert asked == (not says) and run.parameters["whiten"] == ("orthogonal" if says else None)


def test_a_wrong_name_in_a_user_s_network_is_one_line(tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(NETWORK.replace("HIDDEN", ", hidden=['c']"))
    assert main(["compare", "synthetic_1_1", "--model", f"{file}:net", "--algorithms", "accord", "--rounds", "1"]) == 2
    assert capsys.readouterr().err.startswith("folb: error: model: hidden = 'c': should be one of a, b")
