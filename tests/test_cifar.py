"""CIFAR-10 and CIFAR-100 from their binary files: small generated ones in the real format, and damaged ones."""

import gzip
import json
import tarfile

import numpy as np
import pytest

import folb
from folb.cli.main import main
from folb.data import defaults, fetch, load
from folb.data.cifar import cifar10, cifar100
from folb.errors import InputError

TEN = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty data directory; the cache is beside it."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("cifar10", "cifar100"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


def records(n, seed, labels):
    """n records, and the same as images [n, 32, 32, 3] with labels; the colours have different means and sds."""
    rng = np.random.default_rng(seed)
    mean, sd = np.array([120, 60, 200]), np.array([30, 10, 20])
    x = np.clip(rng.normal(mean, sd, (n, 32, 32, 3)), 0, 255).astype(np.uint8)
    y = np.stack([np.arange(n) % classes for classes in labels], axis=1).astype(np.uint8)
    # written out as the format is described: labels, then red, green and blue, each row by row
    return b"".join(
        bytes(label) + b"".join(image[:, :, colour].tobytes() for colour in range(3))
        for image, label in zip(x, y.tolist(), strict=True)
    ), (x, y)


def write_ten(folder, n=40):
    parts = []
    for seed, name in enumerate(TEN):
        content, part = records(n, seed, [10])
        (folder / name).write_bytes(content)
        parts.append(part)
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def write_hundred(folder, n=200):
    parts = []
    for seed, name in enumerate(("train.bin", "test.bin")):
        content, part = records(n, seed, [20, 100])
        (folder / name).write_bytes(content)
        parts.append(part)
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def test_images_keep_their_labels_and_channels_are_standardised(store):
    x, y = write_ten(store / "cifar10")
    federation = cifar10(devices=4, partition="iid")
    assert (federation.N, federation.classes, federation.shape) == (4, 10, (32, 32, 3))
    assert federation.train.x.dtype == np.uint8 and federation.train.size.tolist() == [50] * 4
    label = {image.tobytes(): digit for image, digit in zip(x, y[:, 0], strict=True)}
    assert [label[image.tobytes()] for image in federation.train.x] == federation.train.y.tolist()
    # the server has the published test images
    assert np.array_equal(federation.test.x, x[200:]) and np.array_equal(federation.test.y, y[200:, 0])
    seen = federation.expand(federation.table, federation.train.x)
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen.mean(axis=(0, 1, 2), dtype=float), 0, atol=1e-5)
    np.testing.assert_allclose(seen.std(axis=(0, 1, 2), dtype=float), 1, atol=1e-5)
    plain = x[:200].reshape(-1, 3).astype(float)
    expected = (federation.test.x - plain.mean(axis=0)) / plain.std(axis=0)
    np.testing.assert_allclose(federation.expand(federation.table, federation.test.x), expected, atol=1e-4)
    assert federation.class_names == tuple(NAMES)
    assert federation.note == "a sample of CIFAR-10: 240 of 60,000 images"


def test_fine_and_coarse_labels_of_cifar_100(store):
    x, y = write_hundred(store / "cifar100")
    fine, coarse = cifar100(devices=4, partition="iid"), cifar100(devices=4, partition="iid", labels="coarse")
    for federation, at, classes in ((fine, 1, 100), (coarse, 0, 20)):
        assert federation.classes == classes and federation.class_names is None
        assert np.array_equal(federation.test.y, y[200:, at])
        label = {image.tobytes(): digit for image, digit in zip(x, y[:, at], strict=True)}
        assert [label[image.tobytes()] for image in federation.train.x] == federation.train.y.tolist()
    assert np.array_equal(fine.train.x, coarse.train.x) and fine.digest != coarse.digest
    (store / "cifar100" / "coarse_label_names.txt").write_text("\n".join(map(str, range(20))))
    assert cifar100(devices=4, labels="coarse").class_names[19] == "19" and cifar100(devices=4).class_names is None


def test_partitions_and_their_draws(store):
    write_ten(store / "cifar10")
    two = cifar10(partition="classes", devices=10)
    assert ((two.labels() > 0).sum(axis=1) == 2).all()
    even, uneven = (cifar10(devices=5, alpha=alpha).labels() for alpha in (1000.0, 0.05))
    assert (even / even.sum(axis=1, keepdims=True)).max() < 0.2 < (uneven / uneven.sum(axis=1, keepdims=True)).max()
    assert not np.array_equal(cifar10(devices=5).train.size, cifar10(devices=5, draw=1).train.size)
    assert np.array_equal(cifar10(devices=5).train.x, cifar10(devices=5).train.x)
    own = cifar10(partition="iid", devices=5, test="devices")
    assert (own.train.size == 43).all() and (own.test.size == 5).all() and own.held_out


def test_files_as_the_archive_unpacks_them_or_packed(store):
    whole = store / "cifar10" / "cifar-10-batches-bin"
    whole.mkdir()
    write_ten(whole)
    (whole / "test_batch.bin.gz").write_bytes(gzip.compress((whole / "test_batch.bin").read_bytes()))
    (whole / "test_batch.bin").unlink()
    assert cifar10(devices=4).class_names == tuple(NAMES)
    assert load("CIFAR10", devices=4).N == 4  # from the cache


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(partition="dirichlett"), "did you mean 'dirichlet'"),
        (dict(test="serve"), "did you mean 'server'"),
        (dict(devices=201), "devices"),
        (dict(alpha=0.0), "alpha = 0.0: should be a finite number of more than 0"),
        (dict(shards=2), "shards = 2: is only for partition=shards; partition is dirichlet"),
        (dict(draw=-1), "draw = -1"),
    ],
)
def test_bad_settings(store, given, message):
    write_ten(store / "cifar10")
    with pytest.raises(InputError, match=message):
        cifar10(**({"devices": 4} | given))
    with pytest.raises(InputError, match="did you mean 'coarse'"):
        cifar100(labels="coars")


RECORD = bytes(3073)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3.bin", b"", "'0 bytes': should be 1 to 100,000 records of 3,073 bytes"),
        ("data_batch_3.bin", RECORD * 2 + b"\0", "'6,147 bytes': should be 1 to"),
        ("data_batch_3.bin", RECORD[:-1], "'3,072 bytes'"),
        ("test_batch.bin", RECORD + b"\x0a" + RECORD[1:], "label of image 1 = 10: should be 0 .. 9"),
        ("test_batch.bin", gzip.compress(RECORD * 40)[:-9], "should be an undamaged gzip file"),
        ("batches.meta.txt", b"cat\ndog\n", "'2 names': should be 10"),
        ("batches.meta.txt", b"a\n" * 6000, "should be at most 10000"),
    ],
)
def test_damaged_files(store, name, content, message):
    write_ten(store / "cifar10")
    (store / "cifar10" / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        cifar10(devices=4)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_damaged_files_of_cifar_100(store):
    write_hundred(store / "cifar100")
    for label, expected in ((b"\x14\0", "20: should be 0 .. 19"), (b"\0\x64", "100: should be 0 .. 99")):
        (store / "cifar100" / "test.bin").write_bytes(label + RECORD[1:])
        with pytest.raises(InputError, match=expected):
            cifar100(devices=4)


def test_a_file_that_unpacks_to_too_much_is_refused_before_it_fills_the_memory(store, monkeypatch):
    write_ten(store / "cifar10")
    monkeypatch.setattr("folb.data.cifar.MOST", 30)
    with pytest.raises(InputError, match="'more bytes': should be 1 to 30 records"):
        cifar10(devices=4)


def test_a_missing_file_is_named_with_its_place(store):
    write_ten(store / "cifar10")
    (store / "cifar10" / "data_batch_4.bin").unlink()
    with pytest.raises(InputError, match=r"'data_batch_4\.bin': is not there: put it in .*folb data fetch cifar10"):
        cifar10()


def test_the_published_archives_have_all_that_is_read():
    for name, folder, files in (
        ("cifar10", "cifar-10-batches-bin", [*TEN, "batches.meta.txt"]),
        (
            *("cifar100", "cifar-100-binary"),
            ["train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"],
        ),
    ):
        (source,) = fetch.SOURCES[name]
        assert dict(source.members) == {f"{folder}/{file}": file for file in files}
        assert source.limit > 60_000 * 3074


def write_archive(path):
    """Files of CIFAR-10 in an archive like the published one."""
    path.parent.joinpath("unpacked").mkdir()
    write_ten(path.parent / "unpacked")
    (path.parent / "unpacked" / "readme.html").write_text("what it is")
    with tarfile.open(path, "w:gz") as packed:
        packed.add(path.parent / "unpacked", "cifar-10-batches-bin")


@pytest.mark.parametrize("model", ["logistic", pytest.param("resnet", marks=pytest.mark.slow)])
def test_a_comparison_and_its_model(store, tmp_path, undrawn, model):
    """What is kept predicts what was reported, with the names of the classes. Without --model it is the ResNet."""
    write_ten(store / "cifar10", n=20)
    given = {"algorithms": "fedavg", "rounds": 1, "seeds": 1, "out": tmp_path / "run"}
    command = ["compare", "cifar10", *(f"--{name}={value}" for name, value in given.items())]
    more = "--set=width=2" if model == "resnet" else f"--model={model}"
    assert main([*command, "--set=devices=3", "--set=select.K=2", more]) == 0
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    assert document["model"] == model and document["runs"][0]["parameters"]["local.lr"] == 0.05
    kept = folb.load_model(tmp_path / "run")
    federation = load("cifar10", devices=3)
    predicted = kept.predict(federation.expand(federation.table, federation.test.x))
    assert np.mean(predicted == federation.test.y) == pytest.approx(document["runs"][0]["test_accuracy"][-1])
    assert kept.classes == tuple(NAMES) and kept.name == model


def test_what_goes_with_cifar_by_default():
    assert defaults("cifar10") == ("resnet", 0.05, 0.01, 0.5) and defaults("CIFAR100") == ("resnet", 0.05, 0.01, 0.2)
