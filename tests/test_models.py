"""The models: against NumPy written out, against the library's convolution, and through one round each."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from folb import InputError, algorithms, models, simulate, system
from folb.core import tree
from folb.data.federation import Federation
from folb.models import convolution, dense, recurrent, residual
from folb.simulation import problem as problems
from folb.simulation import program

# each model, tiny: the shape of a sample, the classes, the settings
TINY = {
    "logistic": ((6,), 3, {}),
    "mlp": ((2, 3), 3, {"first": 5, "second": 4}),
    "cnn": ((8, 4), 3, {"first": 2, "second": 3, "hidden": 5}),
    "lenet": ((16, 20), 3, {"first": 2, "second": 3, "hidden": 5, "last": 4}),
    "resnet": ((8, 4), 3, {"width": 4}),
    "char_lstm": ((6,), 7, {"embedding": 2, "units": 3}),
    "sentiment_lstm": ((4, 3), 2, {"units": 3, "hidden": 4}),
}


@functools.cache
def tiny(name):
    """A model whose functions are compiled: one program each, where every operation would be one by itself."""
    shape, classes, options = TINY[name]
    model = models.MODELS[name](shape, classes, **options)
    return model._replace(init=jax.jit(model.init), loss=jax.jit(model.loss), predict=jax.jit(model.predict))


def samples(name, n, seed=0):
    shape, classes, _ = TINY[name]
    rng = np.random.default_rng(seed)
    x = rng.integers(0, classes, (n, *shape)) if name == "char_lstm" else rng.normal(size=(n, *shape))
    return x.astype(np.int32 if name == "char_lstm" else np.float32), rng.integers(0, classes, n).astype(np.int32)


@pytest.fixture(scope="module", params=TINY)
def name(request):
    return request.param


def test_a_loss_for_each_sample_labels_in_range_and_finite_gradients(name):
    model, (x, y) = tiny(name), samples(name, 5)
    params = model.init(jax.random.key(0))
    loss = np.asarray(model.loss(params, x, y))
    assert loss.shape == (5,) and np.all(loss > 0)
    labels = np.asarray(model.predict(params, x))
    assert labels.shape == (5,) and np.issubdtype(labels.dtype, np.integer)
    assert labels.min() >= 0 and labels.max() < TINY[name][1]
    gradient = jax.jit(jax.grad(lambda w: model.loss(w, x, y).mean()))(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    for leaf in map(np.asarray, jax.tree.leaves(gradient)):
        assert np.all(np.isfinite(leaf)) and np.any(leaf != 0)


def test_a_sample_does_not_depend_on_its_batch(name):
    model, (x, y) = tiny(name), samples(name, 5)
    params = model.init(jax.random.key(0))
    together = model.loss(params, x, y)
    alone = [float(model.loss(params, x[i : i + 1], y[i : i + 1])[0]) for i in range(5)]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_one_round_of_each(name):
    _, classes, _ = TINY[name]
    x, y = samples(name, 24)
    federation = Federation.from_arrays("tiny", x, y, np.arange(24) % 3, classes=classes)
    algorithm = algorithms.fedavg(select={"K": 2, "replacement": False}, local={"batch": 4, "lr": 0.1})
    (run,) = simulate(federation, tiny(name), algorithm, rounds=1, system=system.fixed(work=3))
    assert np.isfinite(run.train_loss).all() and 0 <= run.test_accuracy[0] <= 1
    assert run.updated.all()
    assert run.bytes_down[0] == 2 * 4 * tree.size(run.params)


def test_the_gradient_of_a_network_on_bytes_is_that_on_floats():
    x, y = samples("cnn", 12)
    x = np.asarray(x * 10 % 256, np.uint8)
    model = tiny("cnn")
    params = model.init(jax.random.key(0))
    gradients = [jax.grad(lambda w, x=x: model.loss(w, x, y).mean())(params) for x in (x, x.astype(np.float32))]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_the_derivative_of_a_product_is_the_plain_one():
    """In the form for many rows: gradient, direction, and both of the gradient."""
    rng = np.random.default_rng(0)
    x, weight, dx, dweight = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 9), (9, 3), (40, 9), (9, 3)))

    def loss(product, x, weight):
        return (product(x, weight) ** 3).sum()

    @partial(jax.jit, static_argnums=0)
    def derivatives(of, x, weight, dx, dweight):
        own = partial(loss, of)
        return [
            jax.grad(own, argnums=(0, 1))(x, weight),
            jax.jvp(own, (x, weight), (dx, dweight)),
            jax.jvp(jax.grad(own, argnums=1), (x, weight), (dx, dweight)),
            jax.vmap(jax.grad(own, argnums=1), in_axes=(0, None))(jnp.stack([x, dx]), weight),
        ]

    first, second = (derivatives(of, x, weight, dx, dweight) for of in (dense.multiply, jnp.matmul))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_heavy_models_learn_the_same_side_by_side_and_in_turn():
    """Also of two runs at once, which are stacked or take turns."""
    name = "char_lstm"
    x, y = samples(name, 40)
    federation = Federation.from_arrays("tiny", x, y, np.arange(40) % 4, classes=TINY[name][1])
    algorithm = algorithms.folb(select={"K": 3}, local={"batch": 4, "lr": 0.1})
    both = [
        simulate(
            federation,
            tiny(name)._replace(heavy=heavy),  # light models are side by side
            algorithm,
            rounds=2,
            seeds=(0, 1),
            system=system.fixed(work=3),
        )
        for heavy in (False, True)
    ]
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one.devices, other.devices)
        np.testing.assert_allclose(one.train_loss, other.train_loss, rtol=1e-4)
        for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_heavy_models_run_in_turn_on_a_cpu_and_light_ones_do_not():
    x, y = samples("cnn", 12)
    federation = Federation.from_arrays("tiny", x, y, np.arange(12) % 3, classes=3)
    cpu = jax.default_backend() == "cpu"
    assert problems.problem(federation, tiny("cnn")).side_by_side is not cpu
    assert problems.problem(federation, models.logistic((8, 4), 3)).side_by_side is True
    assert problems.problem(federation, tiny("cnn"), side_by_side=True).side_by_side is True


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("logistic", (28, 28), 10, 784 * 10 + 10),
        ("mlp", (28, 28), 10, 784 * 200 + 200 + 200 * 100 + 100 + 100 * 10 + 10),
        ("cnn", (28, 28), 62, 9 * 32 + 32 + 9 * 32 * 64 + 64 + 7 * 7 * 64 * 128 + 128 + 128 * 62 + 62),
        ("lenet", (28, 28), 10, 25 * 6 + 6 + 25 * 6 * 16 + 16 + 256 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10),
        # convolutions 3-16, 16-16 twice, 16-32, 32-32, 32-64, 64-64, two of 1x1; a scale and a shift for each channel
        (
            *("resnet", (32, 32, 3), 10),
            9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
            + (16 * 32 + 32 * 64)
            + 2 * 3 * (16 + 32 + 64)
            + (64 * 10 + 10),
        ),
        ("char_lstm", (80,), 80, 80 * 8 + (8 + 256 + 1) * 1024 + (256 + 256 + 1) * 1024 + 256 * 80 + 80),
        ("sentiment_lstm", (25, 300), 2, (300 + 100 + 1) * 400 + (100 + 100 + 1) * 400 + 100 * 30 + 30 + 30 + 1),
    ],
)
def test_number_of_parameters_of_the_usual_sizes(name, shape, classes, count):
    params = jax.eval_shape(models.MODELS[name](shape, classes).init, jax.random.key(0))
    assert tree.size(params) == count


def test_perceptron_against_numpy():
    model, (x, y) = tiny("mlp"), samples("mlp", 5)
    params = model.init(jax.random.key(1))
    w = jax.tree.map(np.asarray, params)
    h = np.maximum(x.reshape(5, 6) @ w["first"]["weight"] + w["first"]["bias"], 0)
    h = np.maximum(h @ w["second"]["weight"] + w["second"]["bias"], 0)
    z = h @ w["scores"]["weight"] + w["scores"]["bias"]
    expected = np.log(np.exp(z).sum(axis=1)) - z[np.arange(5), y]
    np.testing.assert_allclose(model.loss(params, x, y), expected, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(params, x), z.argmax(axis=1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("side", "padding"), [(3, "SAME"), (5, "SAME"), (5, "VALID")])
def test_convolution_is_the_librarys(channels, side, padding):
    def by_product(x, weight):
        return convolution.convolved(weight, x, padded=padding == "SAME")

    def by_library(x, weight):
        return jax.lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 7, channels)).astype(np.float32)
    weight = rng.normal(size=(side, side, channels, 4)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)  # one program, where every operation would be one by itself
    def with_gradients(f, x, weight):
        return f(x, weight), jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1))(x, weight)

    (ours, our_gradients), (theirs, their_gradients) = (with_gradients(f, x, weight) for f in (by_product, by_library))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_lenet_against_numpy():
    model, (x, y) = tiny("lenet"), samples("lenet", 3)
    params = model.init(jax.random.key(1))
    w = jax.tree.map(np.asarray, params)

    def convolved(h, layer):
        n, height, width, _ = h.shape
        out = np.zeros((n, height - 4, width - 4, len(layer["bias"])))
        for i in range(height - 4):
            for j in range(width - 4):
                out[:, i, j] = np.tensordot(h[:, i : i + 5, j : j + 5], layer["weight"], 3) + layer["bias"]
        out = np.maximum(out, 0)
        return np.max([out[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], axis=0)

    h = convolved(convolved(x[..., None], w["first"]), w["second"])
    assert h.shape == (3, 1, 2, 3)
    h = h.reshape(3, -1)
    for name in ("hidden", "last"):
        h = np.maximum(h @ w[name]["weight"] + w[name]["bias"], 0)
    z = h @ w["scores"]["weight"] + w["scores"]["bias"]
    np.testing.assert_allclose(model.loss(params, x, y), np.log(np.exp(z).sum(axis=1)) - z[np.arange(3), y], rtol=1e-4)


def test_resnet_against_numpy():
    """Pixel by pixel and group by group, in 64 bits. Scales and shifts are not those of the start."""
    model, (x, y) = tiny("resnet"), samples("resnet", 2)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), model.init(jax.random.key(1))
    )

    def convolved(h, layer, stride):
        weight = np.asarray(layer["weight"], float)
        side = len(weight)
        h = np.pad(h, ((0, 0), (side // 2,) * 2, (side // 2,) * 2, (0, 0)))
        rows, columns = ((n - side) // stride + 1 for n in h.shape[1:3])
        out = np.zeros((len(h), rows, columns, weight.shape[-1]))
        for i in range(rows):
            for j in range(columns):
                at = slice(i * stride, i * stride + side), slice(j * stride, j * stride + side)
                out[:, i, j] = np.tensordot(h[:, at[0], at[1]], weight, 3)
        for image in out:
            for channels in np.split(np.arange(out.shape[-1]), 2):  # two groups
                part = image[..., channels]
                image[..., channels] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
        return out * np.asarray(layer["scale"]) + np.asarray(layer["shift"])

    h = np.maximum(convolved(x[..., None], params["first"], 1), 0)
    for name, stride in (("block1", 1), ("block2", 2), ("block3", 2)):
        block, before = params[name], h
        h = convolved(np.maximum(convolved(h, block["one"], stride), 0), block["two"], 1)
        h = np.maximum(h + (convolved(before, block["across"], stride) if "across" in block else before), 0)
    assert h.shape == (2, 2, 1, 16) and "across" not in params["block1"]
    z = h.mean(axis=(1, 2)) @ np.asarray(params["scores"]["weight"]) + np.asarray(params["scores"]["bias"])
    np.testing.assert_allclose(model.loss(params, x, y), np.log(np.exp(z).sum(axis=1)) - z[np.arange(2), y], rtol=1e-4)


def test_a_stride_takes_every_second_pixel():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 6, 8, 3), (3, 3, 3, 4)))
    dense_one = jax.jit(convolution.convolved)(weight, x)
    strided = jax.jit(partial(convolution.convolved, stride=2))(weight, x)
    np.testing.assert_allclose(strided, dense_one[:, ::2, ::2], rtol=1e-5, atol=1e-5)


def test_resnet_is_heavy_starts_as_he_et_al_s_and_grows_by_its_settings():
    made = models.resnet((32, 32, 3), 10)
    assert made.heavy and made.block is not None
    weight = np.asarray(residual.layer(jax.random.key(0), 3, 64, 64)["weight"])
    assert weight.std() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    deeper = jax.eval_shape(models.resnet((32, 32, 3), 100, depth=20, width=8, groups=8).init, jax.random.key(0))
    assert sum(name.startswith("block") for name in deeper) == 9
    assert deeper["block9"]["two"]["weight"].shape == (3, 3, 32, 32) and deeper["scores"]["bias"].shape == (100,)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "lenet"])
def test_weights_drawn_as_pytorch_draws_them(name):
    """Weights and biases are uniform within 1/sqrt(inputs of an output); the default has zero biases."""

    def drawn(**settings):
        return jax.jit(models.MODELS[name]((28, 28), 10, **settings).init)(jax.random.key(0))

    params = drawn(init="torch")
    layers = [params] if name == "logistic" else list(params.values())
    for layer in layers:
        bound = np.prod(layer["weight"].shape[:-1]) ** -0.5
        for values in (np.asarray(layer["weight"]).ravel(), np.asarray(layer["bias"])):
            assert np.abs(values).max() <= bound and np.abs(values).max() > 0.5 * bound
        assert np.asarray(layer["weight"]).std() == pytest.approx(bound / 3**0.5, rel=0.1)
    usual = jax.tree.leaves(drawn())
    assert all(not np.any(leaf) for leaf in usual if leaf.ndim == 1)
    for a, b in zip(usual, jax.tree.leaves(drawn(init="glorot")), strict=True):
        assert name == "logistic" or np.array_equal(a, b)


def test_a_squashed_score_lies_between_0_and_1():
    x, y = samples("logistic", 5)
    plain, squashed = models.logistic((6,), 3), models.logistic((6,), 3, squash=True)
    params = plain.init(jax.random.key(0)) | {"weight": jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)) * 9)}
    z = 1 / (1 + np.exp(-(x @ np.asarray(params["weight"]))))
    expected = np.log(np.exp(z).sum(axis=1)) - z[np.arange(5), y]
    np.testing.assert_allclose(squashed.loss(params, x, y), expected, rtol=1e-5)
    assert (squashed.loss(params, x, y) < np.log(1 + 2 * np.e) + 1e-6).all()
    assert not np.allclose(plain.loss(params, x, y), expected)


def test_halve_takes_the_maximum_of_four_pixels():
    x = jnp.array([[1.0, 2, 5, 0], [4, 3, 0, 6]]).reshape(1, 2, 4, 1)
    np.testing.assert_array_equal(convolution.halve(x)[0, :, :, 0], [[4, 6]])


def lstm_in_numpy(params, x):
    """One cell after another: x is [time, batch, inputs]."""

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    units = len(params["recurrent"])
    h = c = np.zeros((x.shape[1], units))
    out = []
    for x_t in x:
        z = x_t @ params["input"] + h @ params["recurrent"] + params["bias"]
        i, f, g, o = (z[:, k * units : (k + 1) * units] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.array(out)


def test_lstm_layer_against_numpy():
    params = recurrent.layer(jax.random.key(0), 3, 4)
    np.testing.assert_array_equal(params["bias"], [0] * 4 + [1] * 4 + [0] * 8)
    x = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    expected = lstm_in_numpy(jax.tree.map(np.asarray, params), x)
    np.testing.assert_allclose(recurrent.apply(params, x), expected, rtol=1e-4, atol=1e-6)


def test_lstm_derivatives_are_those_of_the_plain_loop():
    """The derivative is given by hand: in both directions it is that of the loop it replaces."""
    rng = np.random.default_rng(0)
    primals, tangents = (
        tuple(rng.normal(size=s).astype(np.float32) for s in ((6, 2, 5), (5, 12), (3, 12), (12,))) for _ in range(2)
    )
    weight = rng.normal(size=(6, 2, 3)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def derivatives(unfold, primals, tangents):
        def total(*arguments):
            return jnp.sum(weight * unfold(*arguments))

        return jax.jvp(total, primals, tangents), jax.grad(total, (0, 1, 2, 3))(*primals)

    fast, plain = (derivatives(unfold, primals, tangents) for unfold in (recurrent.unfold, recurrent.unfold.fun))
    np.testing.assert_allclose(fast[0], plain[0], rtol=1e-4)
    for a, b in zip(fast[1], plain[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_sentiment_against_numpy():
    model, (x, y) = tiny("sentiment_lstm"), samples("sentiment_lstm", 5)
    params = model.init(jax.random.key(2))
    w = jax.tree.map(np.asarray, params)
    h = lstm_in_numpy(w["second"], lstm_in_numpy(w["first"], x.swapaxes(0, 1)))[-1]
    h = np.maximum(h @ w["hidden"]["weight"] + w["hidden"]["bias"], 0)
    p = 1 / (1 + np.exp(-(h @ w["score"]["weight"] + w["score"]["bias"])[:, 0]))
    np.testing.assert_allclose(model.loss(params, x, y), -np.log(np.where(y == 1, p, 1 - p)), rtol=1e-4)
    np.testing.assert_array_equal(model.predict(params, x), p > 0.5)


def test_characters_against_numpy():
    model, (x, y) = tiny("char_lstm"), samples("char_lstm", 5)
    params = model.init(jax.random.key(3))
    w = jax.tree.map(np.asarray, params)
    h = lstm_in_numpy(w["second"], lstm_in_numpy(w["first"], w["embedding"][x.T]))[-1]
    z = h @ w["scores"]["weight"] + w["scores"]["bias"]
    expected = np.log(np.exp(z).sum(axis=1)) - z[np.arange(5), y]
    np.testing.assert_allclose(model.loss(params, x, y), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("logistic", (6,), 3, {"init": "zero"}, "did you mean 'zeros'"),
        ("mlp", (6,), 3, {"first": 0}, "first = 0: should be a whole number from 1"),
        ("cnn", (8, 8), 3, {"hidden": -1}, "hidden = -1: should be a whole number from 1"),
        ("cnn", (784,), 10, {}, "should be an image"),
        ("cnn", (28, 30), 10, {}, "multiples of 4"),
        ("resnet", (30, 32), 3, {}, "multiples of 4"),
        ("resnet", (8, 8), 3, {"depth": 10}, "depth = 10: should be 2 more than a multiple of 6"),
        ("resnet", (8, 8), 3, {"depth": 2}, "depth = 2: should be a whole number from 8"),
        ("resnet", (8, 8), 3, {"groups": 3}, "groups = 3: should divide the width, 16"),
        ("cnn", (8, 8), 3, {"init": "torhc"}, "did you mean 'torch'"),
        ("mlp", (6,), 3, {"init": "zeros"}, "init = 'zeros'"),
        ("logistic", (6,), 3, {"squash": "yes"}, "squash = 'yes': should be True or False"),
        ("lenet", (12, 28), 10, {}, "multiples of 4, from 16 on"),
        ("lenet", (784,), 10, {}, "should be an image"),
        ("lenet", (28, 28), 10, {"last": 0}, "last = 0"),
        ("char_lstm", (80, 2), 80, {}, "should be a row of characters"),
        ("char_lstm", (80,), 80, {"units": 0}, "units = 0"),
        ("sentiment_lstm", (25,), 2, {}, "should be a row of words"),
        ("sentiment_lstm", (25, 300), 3, {}, "classes = 3: should be 2"),
    ],
)
def test_mistakes_are_named(name, shape, classes, options, message):
    with pytest.raises(InputError, match=message):
        models.MODELS[name](shape, classes, **options)


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_model_made_again_from_the_same_values_is_the_same(name):
    shape, classes, settings = TINY[name]
    make = models.MODELS[name]
    made = make(shape, classes, **settings)
    again = make(classes=classes, shape=list(shape), **settings)
    assert made == again and hash(made) == hash(again) and repr(made) == f"Model({name})"
    assert made != made._replace(loss=lambda params, x, y: made.loss(params, x, y))
    assert made != made._replace(block=5) and made != make(shape, classes, **settings)._replace(judged_by="f1")


def test_models_made_from_other_values_differ():
    made = [
        models.logistic((6,), 3),
        models.logistic((2, 3), 3),
        models.logistic((6,), 4),
        models.logistic((6,), 3, init="glorot"),
        models.logistic((6,), 3, squash=True),
        models.linear((6,), 3),
        models.mlp((6,), 3),
        models.mlp((6,), 3, first=100, second=200),
        models.classifier(lambda key: None, lambda params, x: x),
        models.classifier(lambda key: None, lambda params, x: x),
    ]
    assert len(set(made)) == len(made)


def test_equal_models_share_a_program_and_others_do_not():
    """The squashed model has the same parameters, inputs and outputs as the plain one."""
    x, y = samples("logistic", 24)
    federation = Federation.from_arrays("tiny", x, y, np.arange(24) % 3, classes=3)
    algorithm = algorithms.fedavg(select={"K": 2}, local={"lr": 0.5})

    def loss(**settings):
        model = models.logistic(federation.shape, federation.classes, **settings)
        (run,) = simulate(federation, model, algorithm, rounds=2)
        return run.train_loss[-1]

    before = program.advance._cache_size()
    plain, squashed = loss(), loss(squash=True)
    assert plain != squashed and program.advance._cache_size() == before + 2
    assert (loss(), loss(squash=True)) == (plain, squashed)
    assert program.advance._cache_size() == before + 2
