"""A loss that draws random numbers: which key it gets, where it gets none, and dropout, crops and flips."""

import functools
import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inprocess import InProcessGrid

from folb import InputError, Model, algorithms, models, simulate, system
from folb.cli.main import main
from folb.core import randomness
from folb.core.local_step import step_words, takes_key
from folb.core.solver import Solver
from folb.data.federation import Federation
from folb.data.synthetic import synthetic
from folb.flower import Device, FederatedStrategy, arrays, client_app, from_jax, from_torch, protocol
from folb.models.in_training import dropped, varied
from folb.simulation import problem as problems
from folb.simulation import solve as local
from folb.simulation.evaluate import total_loss

FEDERATION = synthetic(devices=5, sizes=[20, 35, 12, 27, 64])
DROPOUT = models.mlp(FEDERATION.shape, FEDERATION.classes, first=8, second=6, drop=0.4)
PLAIN = models.mlp(FEDERATION.shape, FEDERATION.classes, first=8, second=6)
WORDS = np.array([[1, 2], [2**32 - 1, 2**32 - 1], [7, 0]], np.uint32)

# A model whose update says which keys it had: each step moves `drawn` by -lr u(key), and `calls` by -lr


def keyed_loss(params, x, y, key):
    u = 0.0 if key is None else jax.random.uniform(key)
    return jnp.ones(len(y)) * (u * params["drawn"] + params["calls"])


KEYED = Model(
    init=lambda key: {"drawn": jnp.zeros(()), "calls": jnp.zeros(())},
    loss=keyed_loss,
    predict=lambda params, x: jnp.zeros(len(x), jnp.int32),
)


def numbers(words, steps):
    """u(key) of each step, by the definition."""
    keys = [jax.random.wrap_key_data(step_words(jnp.asarray(words), s), impl="threefry2x32") for s in range(steps)]
    return [float(jax.random.uniform(key)) for key in keys]


@functools.partial(jax.jit, static_argnames=("unit", "side_by_side"))
def update(words, work, unit="step", side_by_side=True):
    problem = problems.problem(FEDERATION, KEYED, side_by_side=side_by_side)
    slots = local.Slots(jnp.arange(len(words)), work, words)
    here = {name: jnp.zeros(len(words)) for name in ("drawn", "calls")}
    return local.solve(problem, Solver(lr=1.0, mu=0.0, batch=10, unit=unit), here, slots).delta


def test_words_of_a_step_are_the_same_in_numpy_and_jax():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns if a number overflows
        here = [step_words(words, s) for words in WORDS for s in range(3)]
    there = [step_words(jnp.asarray(words), jnp.int32(s)) for words in WORDS for s in range(3)]
    assert np.array_equal(here, there) and here[0].dtype == np.uint32
    assert len({tuple(pair) for pair in np.asarray(here).tolist()}) == 9  # devices, and steps
    assert not np.isin(here, WORDS).any()


def test_who_takes_a_key():
    assert takes_key(keyed_loss) and takes_key(jax.jit(keyed_loss)) and takes_key(lambda params, x, y, *, key=None: 0)
    assert not takes_key(functools.partial(keyed_loss, key=jax.random.key(0)))  # it has its own
    assert not any(map(takes_key, (PLAIN.loss, max, lambda params, x, y: 0)))
    assert takes_key(DROPOUT.loss)


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_each_step_has_the_key_of_its_device_and_number(unit, side_by_side):
    """Also in a pass whose last batch is smaller."""
    work = jnp.array([1, 6, 2])
    delta = update(jnp.asarray(WORDS), work, unit, side_by_side)
    steps = np.asarray(work) * (1 if unit == "step" else -(-FEDERATION.train.size[:3] // 10))
    assert unit == "step" or (FEDERATION.train.size[:3] % 10).any()
    assert np.allclose(delta["calls"], np.negative(steps))
    assert np.allclose(delta["drawn"], [-sum(numbers(words, n)) for words, n in zip(WORDS, steps, strict=True)], 1e-5)


def test_full_gradient_steps_have_no_key():
    delta = update(jnp.asarray(WORDS), jnp.array([1, 2, 3]), "gradient")
    assert np.allclose(delta["calls"], [-1, -2, -3]) and not np.any(delta["drawn"])


def test_rounds_and_seeds_have_different_keys():
    def first(seed, t):
        return [numbers(words, 1)[0] for words in randomness.words(seed, t, jnp.arange(3), 2)]

    drawn = [u for seed in (0, 1) for t in (1, 2) for u in first(seed, t)]
    assert len({round(u, 5) for u in drawn}) == len(drawn)


def test_a_loss_of_three_arguments_has_no_key_in_its_program():
    def program(model):
        problem = problems.problem(FEDERATION, model)
        like = jax.eval_shape(model.init, jax.random.key(0))
        here = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), like)
        slots = local.Slots(jnp.arange(3), jnp.array([1, 2, 3]), jnp.asarray(WORDS))
        return str(jax.make_jaxpr(lambda: local.solve(problem, Solver(0.1, 0.0, 10, "step"), here, slots))())

    random = "random_wrap", "random_bits", "random_fold_in", "threefry"
    assert not any(word in program(PLAIN) for word in random)
    assert all(word in program(DROPOUT) for word in random[:3])
    # options that draw nothing are the same model
    assert models.mlp(FEDERATION.shape, FEDERATION.classes, first=8, second=6, drop=None) == PLAIN
    none = models.mlp(FEDERATION.shape, FEDERATION.classes, first=8, second=6, drop=0.0)
    assert program(none) == program(PLAIN)


# A run ----------------------------------------------------------------------------------------------------------------

SOME = {"select": {"K": 3}, "local": {"lr": 0.05}}


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_a_run_is_repeated_resumed_and_evaluated_without_dropout(tmp_path):
    def run(rounds, model=DROPOUT, **settings):
        return simulate(FEDERATION, model, algorithms.fedavg(**SOME), rounds=rounds, system=WORK, **settings)[0]

    whole, begun = run(6), run(3, checkpoints=tmp_path)
    resumed = run(6, checkpoints=tmp_path)
    assert same(run(6).params, whole.params) and same(resumed.params, whole.params)
    assert not same(begun.params, whole.params) and not same(run(6, PLAIN).params, whole.params)
    beside = simulate(FEDERATION, DROPOUT, algorithms.fedavg(**SOME), rounds=6, seeds=[5, 0], system=WORK)[1]
    for one, other in zip(jax.tree.leaves(beside.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    # the recorded loss is that of the same network without dropout
    plain = problems.problem(FEDERATION, PLAIN)
    mean = jax.jit(lambda params: total_loss(plain, params) / len(FEDERATION.train.y))(whole.params)
    assert whole.train_loss[-1] == pytest.approx(float(mean), rel=1e-6)


WORK = system.uniform(high=4)


@pytest.mark.parametrize("settings", [{"local.unit": "epoch", "local.batch": 8}, {"local.unit": "gradient"}])
def test_real_devices_drop_what_the_simulator_drops(settings):
    """Also with the full gradients of FOLB, which drop nothing, and with a smaller last batch."""
    algorithm, words = algorithms.folb(**{"select.K": 3, "local.lr": 0.05}, **settings), []
    gradient = from_jax(DROPOUT.loss)

    def watched(params, x, y, key):
        words.append(key)
        return gradient(params, x, y, key)

    def app(k):
        train = FEDERATION.train
        rows = slice(train.start[k], train.start[k] + train.size[k])
        return client_app(lambda context: Device(train.x[rows], train.y[rows], watched))

    run = simulate(FEDERATION, DROPOUT, algorithm, rounds=4, seeds=[3], system=WORK, evaluate_every=4)[0]
    start = jax.tree.map(np.asarray, jax.jit(DROPOUT.init)(jax.random.key(3)))
    strategy = FederatedStrategy(algorithm, seed=3, system=WORK, guard="none", wait=0.0, deadline=0.05)
    grid = InProcessGrid([app(k) for k in range(FEDERATION.N)], seed=5)
    ended = strategy.start(grid, arrays(start), num_rounds=4).arrays
    for name, value in protocol.flat(run.params).items():
        np.testing.assert_allclose(ended[name].numpy(), value, rtol=1e-4, atol=1e-5, err_msg=name)
    given = [tuple(pair) for pair in words if pair is not None]
    assert len(set(given)) == len(given) and any(pair is None for pair in words)
    assert bool(given) == ("gradient" not in settings.values())


def test_a_device_s_loss_is_computed_without_a_key():
    def loss(params, x, y, key):
        assert key is None
        return float(len(y))

    device = Device(np.zeros((3, 2)), np.zeros(3, int), lambda params, x, y: {"w": np.zeros(2)}, loss=loss)
    _, sent = device.answer(protocol.Task(1, ("loss",)), {"w": np.zeros(2, np.float32)})
    assert sent["loss"] == 3


# Mistakes -------------------------------------------------------------------------------------------------------------


def needs_a_key(params, x, y, key):
    return jax.random.uniform(key, (len(y),))


def with_rng(params, x, y, rng):
    return jnp.zeros(len(y))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": needs_a_key}, r"^model: key of the loss = None: should work, without randomness"),
        (
            {"loss": with_rng},
            r"^model: arguments of the loss = '\(params, x, y, rng\)': should be \(params, x, y\), or",
        ),
        (
            {"init": lambda key: {"params": {"w": jnp.zeros(2)}, "batch_stats": {"mean": jnp.zeros(2)}}},
            r"^model: parameters = 'batch_stats': are running statistics.*group or layer norm",
        ),
        (
            {"init": lambda key: ({"w": jnp.zeros(2)}, {"batch_norm/~/mean_ema": {"hidden": jnp.zeros(2)}})},
            r"^model: parameters = 'mean_ema': are running statistics",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(changed, message):
    with pytest.raises(InputError, match=message) as raised:
        simulate(FEDERATION, KEYED._replace(**changed), algorithms.fedavg(**SOME), rounds=1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mlp", (6,), {"drop": 1.0}, "drop = 1.0: should be at least 0 and less than 1"),
        ("cnn", (8, 8), {"drop_maps": -0.1}, "drop_maps = -0.1: should be at least 0"),
        ("lenet", (16, 16), {"drop_units": True}, "drop_units = True"),
        ("resnet", (8, 8), {"flip": 2}, "flip = 2: should be True or False"),
        ("resnet", (8, 8), {"crop": -1}, "crop = -1: should be a whole number from 0"),
        ("cnn", (4, 4), {"once": True}, "multiples of 4, from 8 on"),
    ],
)
def test_a_wrong_option_is_named(name, shape, options, message):
    with pytest.raises(InputError, match=message):
        models.MODELS[name](shape, 3, **options)


# Dropout, flips and crops ---------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_drops_its_share():
    key, x = jax.random.key(1), jnp.full((200, 50), 3.0)
    made = np.asarray(dropped(x, 0.25, key, 1))
    assert set(np.unique(made).tolist()) == {0.0, 4.0}
    assert np.mean(made == 0) == pytest.approx(0.25, abs=0.02)
    assert not np.array_equal(made, dropped(x, 0.25, key, 2))  # layers differ
    assert dropped(x, 0.25, None, 1) is x and dropped(x, None, key, 1) is x


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_an_image_is_mirrored_and_cut_out_of_itself_with_a_border(kind):
    x = np.random.default_rng(0).integers(1, 200, (64, 5, 6, 2)).astype(kind)
    made = np.asarray(jax.jit(lambda x: varied(x, True, 1, jax.random.key(2)))(x))
    assert made.dtype == kind and made.shape == x.shape
    found = []
    for before, after in zip(x, made, strict=True):
        possible = {}
        for mirrored, i, j in itertools.product((False, True), range(3), range(3)):
            bordered = np.pad(before[:, ::-1] if mirrored else before, ((1, 1), (1, 1), (0, 0)))
            possible[mirrored, i, j] = bordered[i : i + 5, j : j + 6]
        found += [how for how, image in possible.items() if np.array_equal(image, after)]
    assert len(found) == len(x) and len(set(found)) > 12  # of 18 ways
    assert np.array_equal(varied(x, True, 1, None), x)


OPTIONS = {
    "mlp": ((8, 8), {"first": 5, "second": 4}, {"drop": 0.5}),
    "cnn": ((8, 8), {"first": 2, "second": 3, "hidden": 5}, {"drop_maps": 0.5}),
    "lenet": ((16, 16, 3), {"first": 2, "second": 3, "hidden": 5, "last": 4}, {"drop_units": 0.5}),
    "resnet": ((8, 8), {"width": 4}, {"flip": True, "crop": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_with_options_differs_in_training_alone(name):
    shape, size, options = OPTIONS[name]
    plain, random = (models.MODELS[name](shape, 3, **size, **more) for more in ({}, options))
    assert not takes_key(plain.loss) and takes_key(random.loss) and random.hidden == plain.hidden

    @jax.jit
    def all_of_it(key):
        x, y = jax.random.normal(jax.random.key(1), (6, *shape)), jnp.arange(6) % 3
        params = random.init(jax.random.key(0))
        start = plain.init(jax.random.key(0))
        without = plain.loss(start, x, y), plain.predict(start, x), plain.scores(start, x)
        known = random.losses(params, x, y), random.predict(params, x), random.scores(params, x)
        return without, known, random.losses(params, x, y, key)

    without, known, first = all_of_it(jax.random.key(5))
    assert same(without, known)
    second = all_of_it(jax.random.key(6))[2]
    assert not np.allclose(first, without[0]) and not np.allclose(first, second)


def test_the_network_of_pfl_research():
    """Two 3x3 convolutions without padding, one maximum, then 128 units."""
    model = models.cnn((32, 32, 3), 10, once=True, drop_maps=0.25, drop_units=0.5)
    like = jax.eval_shape(model.init, jax.random.key(0))
    assert like["first"]["weight"].shape == (3, 3, 3, 32) and like["hidden"]["weight"].shape == (14 * 14 * 64, 128)
    small = models.cnn((8, 12), 3, first=2, second=3, hidden=5, once=True)

    @jax.jit
    def scores():
        params, x = small.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 8, 12))
        h = x[..., None]
        for name in ("first", "second"):
            numbers = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(h, params[name]["weight"], (1, 1), "VALID", dimension_numbers=numbers)
            h = jax.nn.relu(h + params[name]["bias"])
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(2, -1)
        h = jax.nn.relu(h @ params["hidden"]["weight"] + params["hidden"]["bias"])
        return small.scores(params, x), h @ params["scores"]["weight"] + params["scores"]["bias"]

    np.testing.assert_allclose(*scores(), rtol=1e-4, atol=1e-5)


def test_options_from_the_command_line(capsys, tmp_path):
    """The example, which has layer norm and dropout; and dropout as a setting of a model of folb."""
    tiny = ["synthetic_iid", "--set", "sizes=20,30", "--rounds", "2", "--seeds", "1", "--algorithms", "fedavg"]
    common = [*tiny, "--set", "select.K=2", "--json", "--out"]
    ends = []
    for i, model in enumerate(
        (["examples/my_dropout.py:net", "--set", "rate=0.5"], ["mlp", "--set", "drop=0.5"], ["mlp"])
    ):
        code = main(["compare", *common, str(tmp_path / str(i)), "--model", *model])
        out, err = capsys.readouterr()
        assert code in (None, 0), err
        ends.append(json.loads(out)["runs"][0]["train_loss"][-1])
    assert np.isfinite(ends).all() and ends[1] != ends[2]


def test_a_classifier_or_a_regressor_may_take_a_key():
    def value(params, x, key):
        return x[:, 0] * params + (0 if key is None else jax.random.uniform(key))

    model = models.regressor(lambda key: jnp.zeros(()), value)
    x, y = jnp.ones((4, 2)), jnp.ones(4)
    assert np.allclose(model.losses(jnp.float32(3), x, y), 4) and np.allclose(model.predict(jnp.float32(3), x), 3)
    assert not np.allclose(model.losses(jnp.float32(3), x, y, jax.random.key(0)), 4)
    rows = Federation.from_arrays("numbers", np.ones((8, 2)), np.ones(8), np.arange(8) % 2, regression=True)
    assert np.isfinite(simulate(rows, model, algorithms.fedavg(select={"K": 2}), rounds=1)[0].train_loss[-1])


# PyTorch --------------------------------------------------------------------------------------------------------------


def test_a_pytorch_module_draws_the_same_for_the_same_task_and_nothing_in_full_gradients():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    layers = nn.Linear(4, 30), nn.Dropout(0.5), nn.LayerNorm(30), nn.Dropout(0.5).eval(), nn.Linear(30, 3)
    module = nn.Sequential(*layers)
    gradient = from_torch(module, nn.functional.cross_entropy)
    x, y = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.arange(9) % 3
    params = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    before = torch.random.get_rng_state()
    keys = [np.array(key, np.uint32) for key in ((5, 2**32 - 1), (5, 2**32 - 1), (6, 1))]
    one, again, other = (gradient(params, x, y, key) for key in keys)
    full, modes = [gradient(params, x, y), gradient(params, x, y, None)], [part.training for part in module.modules()]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert modes == [True, True, True, True, False, True]
    assert same(one, again) and not same(one, other) and same(*full) and not same(one, full[0])
    module.eval()
    assert same(gradient(params, x, y, np.array([5, 1], np.uint32)), full[0])


def test_a_pytorch_module_with_running_statistics_is_refused():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    for norm in (nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)):
        with pytest.raises(InputError, match=r"^module = '1.running_mean': is a running statistic"):
            from_torch(nn.Sequential(nn.Linear(4, 3), norm), nn.functional.cross_entropy)
    own = nn.BatchNorm1d(3, track_running_stats=False)  # the statistics of each batch
    from_torch(nn.Sequential(nn.Linear(4, 3), own), nn.functional.cross_entropy)
