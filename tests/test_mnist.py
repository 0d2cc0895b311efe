"""MNIST from idx files: small generated ones in the real format, damaged ones, and the real ones where they are."""

import gzip
import os
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest

from folb import algorithms, models, simulate
from folb.data import load, source_files
from folb.data.mnist import mnist, standardised
from folb.errors import InputError
from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan

REAL = os.environ.get("FOLB_DATA")
SMALL = dict(devices=10, classes=2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty data directory's mnist folder; the cache is beside it."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    return folder


def idx(array, magic):
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write(folder, *, packed=True):
    """600 training and 100 test images; pixel (0, 0) is always 7."""
    rng = np.random.default_rng(0)
    images, labels = [], []
    for part, n in (("train", 600), ("t10k", 100)):
        x = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        x[:, 0, 0] = 7
        y = (np.arange(n) % 10).astype(np.uint8)
        for kind, content in (("images-idx3", idx(x, 2051)), ("labels-idx1", idx(y, 2049))):
            name = f"{part}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        images.append(x)
        labels.append(y)
    return np.concatenate(images), np.concatenate(labels)


def inputs(federation):
    """All inputs as the model sees them, train before test."""
    x = np.concatenate([federation.train.x, federation.test.x])
    return federation.expand(federation.table, x)


@pytest.mark.parametrize("packed", [True, False])
def test_images_keep_their_labels_and_are_standardised(folder, packed):
    x, y = write(folder, packed=packed)
    federation = mnist(partition="iid", devices=10)
    assert (federation.N, federation.classes, federation.shape) == (10, 10, (28, 28))
    assert federation.train.x.dtype == np.uint8
    assert (federation.train.size == 63).all() and (federation.test.size == 7).all()

    label = {image.tobytes(): digit for image, digit in zip(x, y, strict=True)}
    for split in (federation.train, federation.test):
        assert [label[image.tobytes()] for image in split.x] == split.y.tolist()

    seen = inputs(federation)
    assert seen.dtype == np.float32
    assert (seen[:, 0, 0] == 0).all()
    varying = seen.reshape(700, -1)[:, 1:]
    assert np.abs(varying.mean(axis=0)).max() < 1e-5
    assert np.abs(varying.std(axis=0) - 1).max() < 1e-5


def test_numpy_and_jax_see_the_same_inputs(folder):
    write(folder)
    federation = mnist(**SMALL)
    x = federation.train.x[:20]
    by_jax = standardised(jnp.asarray(federation.table), jnp.asarray(x))
    assert by_jax.dtype == jnp.float32
    assert np.allclose(by_jax, standardised(federation.table, x), atol=1e-6)


def test_two_digits_per_device_by_default(folder):
    write(folder)
    federation = mnist(devices=10)
    for k in range(10):
        digits = set()
        for split in (federation.train, federation.test):
            digits |= set(split.y[split.start[k] : split.start[k] + split.size[k]].tolist())
        assert digits == {k, (k + 1) % 10}


@pytest.mark.parametrize(
    "options",
    [
        dict(partition="classes", classes=5, devices=12),
        dict(partition="dirichlet", alpha=0.1, devices=12),
        dict(partition="iid", devices=12),
        dict(partition="power_law", classes=10, devices=12),
        dict(partition="random_classes", classes=2, devices=12),
        dict(partition="shards", devices=12),
        dict(partition="shards", shards=5, devices=12),
        dict(partition="dirichlet", capped=True, devices=12),
    ],
)
def test_partitions(folder, options):
    write(folder)
    federation = mnist(**options)
    assert federation.N == 12
    assert federation.train.size.min() >= 1
    sizes = federation.train.size + federation.test.size
    assert np.array_equal(federation.train.size, np.maximum((0.9 * sizes).astype(int), 1))
    assert 580 <= sizes.sum() <= 700


def test_the_draw_decides_the_partition_and_nothing_else_does(folder):
    write(folder)
    first, again, other = mnist(**SMALL), mnist(**SMALL), mnist(**SMALL, draw=1)
    assert np.array_equal(first.train.x, again.train.x) and np.array_equal(first.test.y, again.test.y)
    assert not np.array_equal(first.train.size, other.train.size)


@pytest.mark.parametrize("partition", ["power_law", "classes", "dirichlet", "iid", "shards", "random_classes"])
def test_the_server_tests_on_mnist_s_own_test_images(folder, partition, tmp_path):
    x, y = write(folder)
    federation = mnist(partition=partition, devices=10, test="server")
    assert np.array_equal(federation.test.x, x[600:]) and np.array_equal(federation.test.y, y[600:])
    assert 580 <= len(federation.train.y) <= 600 and federation.train.size.sum() == len(federation.train.y)
    owned = {image.tobytes() for image in federation.train.x}
    assert owned <= {image.tobytes() for image in x[:600]} and len(owned) == len(federation.train.x)
    # the test images are on no device
    assert federation.labels().sum() == len(federation.train.y)
    if partition in ("random_classes", "classes"):
        assert ((federation.labels() > 0).sum(axis=1) == 2).all()
    federation.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert np.array_equal(again.test.y, federation.test.y) and np.array_equal(again.train.size, federation.train.size)


def test_a_run_is_tested_on_the_server_s_images(folder):
    x, y = write(folder)
    federation = mnist(partition="iid", devices=10, test="server", pixels="unit")
    model = models.logistic(federation.shape, federation.classes)
    (run,) = simulate(federation, model, algorithms.fedavg(select={"K": 2}, local={"lr": 0.1}), rounds=2, seeds=[0])
    inputs = x[600:].astype(np.float32) / 255
    assert run.final == pytest.approx(np.mean(np.asarray(model.predict(run.params, inputs)) == y[600:]))


def test_pixels_from_0_to_1(folder):
    write(folder)
    federation = mnist(**SMALL, pixels="unit")
    for asarray in (np.asarray, jnp.asarray):
        seen = federation.expand(federation.table, asarray(federation.train.x[:20]))
        assert seen.dtype == np.float32
        np.testing.assert_allclose(seen, federation.train.x[:20] / 255, rtol=1e-6)
    assert federation.digest != mnist(**SMALL).digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(shards=2), "shards = 2: is only for partition=shards; partition is power_law"),
        (dict(partition="iid", capped=True), "capped = True: is only for partition=dirichlet; partition is iid"),
        (dict(partition="shards", shards=0), "shards = 0: should be a whole number from 1"),
        (dict(partition="shards", shards=1.5), "shards = 1.5"),
        (dict(partition="random_classes", classes=11), "classes = 11: should be between 1 and the 10"),
        (dict(test="sever"), "did you mean 'server'"),
        (dict(pixels="units"), "did you mean 'unit'"),
        (dict(partition="iid", devices=601, test="server"), "devices = 601: should be a whole number from 1 to 600"),
    ],
)
def test_settings_that_do_not_go_together(folder, given, message):
    write(folder)
    with pytest.raises(InputError, match=message):
        mnist(**({"devices": 10} | given))


def test_older_experiments_keep_their_names(folder):
    """Settings that came later are written down only if they are set."""
    write(folder)
    older = plan(Experiment("mnist", model="mlp", set={"devices": 10})).experiment.set
    assert set(older["mnist"]) == {"partition", "devices", "classes", "alpha", "draw"}
    assert set(older["mlp"]) == {"first", "second"}
    given = {"devices": 10, "partition": "shards", "shards": 3, "test": "server", "pixels": "unit", "init": "torch"}
    newer = plan(Experiment("mnist", model="mlp", set=given)).experiment.set
    assert newer["mnist"]["shards"] == 3 and newer["mnist"]["test"] == "server" and newer["mlp"]["init"] == "torch"


def test_bad_options(folder):
    write(folder)
    with pytest.raises(InputError, match="did you mean 'dirichlet'"):
        mnist(partition="dirichlett")
    with pytest.raises(InputError, match=r"devices = 1000: should be a whole number from 1 to 700"):
        mnist()


def test_a_missing_file_is_named_with_its_place(folder):
    write(folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError) as error:
        mnist()
    assert "t10k-labels-idx1-ubyte.gz" in str(error.value)
    assert str(folder) in str(error.value)
    assert "folb data fetch mnist" in str(error.value)


IMAGES = np.zeros((600, 28, 28), np.uint8)
LABELS = np.zeros(600, np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES, 2051))[:-400], "should be an undamaged gzip file"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES, 2051))[:6], "should be an undamaged gzip file"),
        ("train-images-idx3-ubyte.gz", b"\x1f\x8b\x08\x00" + bytes(60), "should be an undamaged gzip file"),
        ("train-images-idx3-ubyte.gz", b"", "magic number: should be 2051"),
        ("train-images-idx3-ubyte.gz", idx(IMAGES, 2049), "2049: magic number: should be 2051"),
        ("train-images-idx3-ubyte.gz", idx(IMAGES, 2051)[:-1], "470399 bytes': should be 470400"),
        ("train-images-idx3-ubyte.gz", idx(IMAGES, 2051) + b"\0", "more bytes': should be 470400"),
        ("train-images-idx3-ubyte.gz", idx(IMAGES.reshape(600, 14, 56), 2051), r"\(600, 14, 56\): sizes"),
        ("train-images-idx3-ubyte.gz", struct.pack(">4I", 2051, 2**32 - 1, 28, 28), "sizes: should be"),
        ("train-images-idx3-ubyte.gz", struct.pack(">2I", 2051, 600), "sizes: should be"),
        ("train-images-idx3-ubyte.gz", idx(IMAGES[:599], 2051), "600: labels: should be as many as the 599"),
        ("train-labels-idx1-ubyte.gz", idx(LABELS + 10, 2049), "10: label: should be a digit"),
        ("train-labels-idx1-ubyte.gz", idx(LABELS[:0], 2049), "sizes: should be"),
    ],
)
def test_damaged_files(folder, name, content, message):
    write(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        mnist(**SMALL)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not REAL, reason="FOLB_DATA is not set")
def test_the_real_files(monkeypatch):
    monkeypatch.setenv("FOLB_DATA", REAL)
    if not (source_files.directory() / "mnist").is_dir():
        pytest.skip("no MNIST in FOLB_DATA")
    mnist(partition="iid")
    begun = time.perf_counter()
    federation = mnist()
    assert time.perf_counter() - begun < 5  # from the cache
    sizes = federation.train.size + federation.test.size
    assert federation.N == 1000
    assert 69_000 < sizes.sum() < 69_100
    assert 110 < sizes.std() < 260
    assert np.bincount(federation.train.y).min() > 5000
    assert federation.train.x.nbytes + federation.test.x.nbytes < 55e6
