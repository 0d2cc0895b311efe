"""FEMNIST from its three forms: small generated files in the real formats, damaged ones, and the real npz."""

import gzip
import io
import json
import os

import numpy as np
import pytest

from folb.data import femnist as module
from folb.data import source_files
from folb.data.femnist import femnist, scaled
from folb.errors import InputError

REAL = os.environ.get("FOLB_DATA")
ALL = dict(devices=5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data" / "femnist"
    folder.mkdir(parents=True)
    return folder


class Written:
    """Five writers with 20, 30, 40, 50 and 60 images: strokes of ink, darker to the left, on paper."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.ids = np.array(["f0001_00", "f0002_01", "f0003_02", "f0004_03", "f0005_04"])
        self.writer = np.repeat(np.arange(5), [20, 30, 40, 50, 60])
        n = len(self.writer)
        self.images = np.full((n, 28, 28), 255, np.uint8)
        self.images[:, 4:8, 3:20] = rng.integers(0, 128, (n, 4, 17))
        self.labels = rng.integers(0, 62, n)
        self.split = (rng.random(n) < 0.2).astype(np.uint8)


WRITTEN = Written()


def leaf(users, *, images=WRITTEN.images, rows=None):
    """LEAF's json of some writers, as a Python object."""
    data = {}
    for user in users:
        mine = WRITTEN.writer == user
        if rows is not None:
            mine &= rows
        x = (images[mine].reshape(-1, 784) / 255).tolist()
        data[WRITTEN.ids[user]] = {"x": x, "y": WRITTEN.labels[mine].tolist()}
    return {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}


def write_leaf(folder, *, split=True):
    """Two files on each side, as LEAF cuts its writers, one of them packed."""
    sides = {"train": WRITTEN.split == 0, "test": WRITTEN.split == 1} if split else {"all_data": None}
    for side, rows in sides.items():
        (folder / side).mkdir()
        (folder / side / "all_data_0.json").write_text(json.dumps(leaf([3, 0], rows=rows)))
        rest = json.dumps(leaf([1, 2, 4], rows=rows)).encode()
        (folder / side / "all_data_1.json.gz").write_bytes(gzip.compress(rest))


def write_npz(folder, **changes):
    arrays = {"images": WRITTEN.images, "labels": WRITTEN.labels.astype(np.uint8), "split": WRITTEN.split}
    arrays |= {"writer": WRITTEN.writer.astype(np.uint16), "writer_ids": WRITTEN.ids}
    np.savez(folder / "femnist_writers.npz", **{k: v for k, v in (arrays | changes).items() if v is not None})


def write_every_class(folder, n):
    """n images of each class by one writer, all for training."""
    labels = np.repeat(np.arange(62), n).astype(np.uint8)
    images = np.random.default_rng(0).integers(200, 256, (len(labels), 28, 28), dtype=np.uint8)
    zeros = np.zeros(len(labels), np.uint8)
    write_npz(folder, images=images, labels=labels, writer=zeros, split=zeros)
    return images, labels


def png(image):
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


def write_parquet(folder, images=None, **changes):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pngs = [png(image) for image in WRITTEN.images] if images is None else images
    columns = {
        "image": pa.array([{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(pngs)]),
        "writer_id": pa.array(WRITTEN.ids[WRITTEN.writer].tolist()),
        "hsf_id": pa.array([0] * len(pngs)),
        "character": pa.array(WRITTEN.labels),
    }
    columns = {name: column for name, column in (columns | changes).items() if column is not None}
    pq.write_table(pa.table(columns), folder / "train-00000-of-00001.parquet", row_group_size=64)


def contents(federation, *, per_side):
    """What each device has, whatever the order: {device: sorted (image, label)}, train and test apart or together."""
    sides = []
    for split in (federation.train, federation.test):
        device = np.repeat(np.arange(federation.N), split.size)
        sides.append([(int(k), x.tobytes(), int(y)) for k, x, y in zip(device, split.x, split.y, strict=True)])
    return [sorted(side) for side in sides] if per_side else sorted(sides[0] + sides[1])


def test_json_and_npz_give_the_same_federation_with_the_files_own_split(folder):
    write_npz(folder)
    by_npz = femnist(**ALL, source="npz")
    write_leaf(folder)
    by_leaf = femnist(**ALL, source="leaf")
    assert contents(by_leaf, per_side=True) == contents(by_npz, per_side=True)
    assert by_npz.train.size.tolist() == [int(((WRITTEN.writer == k) & (WRITTEN.split == 0)).sum()) for k in range(5)]
    assert len(by_npz.test.y) == WRITTEN.split.sum()


def test_parquet_has_the_same_images_and_a_tenth_for_testing(folder):
    write_npz(folder)
    by_npz = femnist(**ALL, source="npz")
    write_parquet(folder)
    by_parquet = femnist(**ALL, source="parquet")
    assert contents(by_parquet, per_side=False) == contents(by_npz, per_side=False)
    assert by_parquet.test.size.tolist() == [2, 3, 4, 5, 6]


def test_json_that_is_not_split(folder):
    write_leaf(folder, split=False)
    federation = femnist(**ALL)
    assert federation.test.size.tolist() == [2, 3, 4, 5, 6]
    again, other = femnist(**ALL), femnist(**ALL, draw=1)
    assert np.array_equal(federation.test.x, again.test.x)
    assert not np.array_equal(federation.test.x, other.test.x)


def test_paper_is_one_and_ink_zero_whichever_way_round_the_source_is(folder):
    write_npz(folder)
    federation = femnist(**ALL)
    x = scaled(None, federation.train.x)
    assert (federation.shape, x.dtype) == ((28, 28), np.float32)
    assert (x[:, 20:, :] == 1).all()  # paper
    assert x[:, 4:8, 3:20].max() < 0.51  # ink, above and to the left
    write_npz(folder, images=255 - WRITTEN.images)
    assert np.array_equal(femnist(**ALL).train.x, federation.train.x)


def test_the_largest_writers_are_kept_and_a_sample_says_so(folder):
    write_npz(folder)
    federation = femnist(devices=2)
    assert (federation.train.size + federation.test.size).tolist() == [50, 60]
    assert federation.note == "a sample of FEMNIST: 5 of LEAF's 3,550 writers"
    assert federation.classes == 62
    with pytest.raises(InputError, match=r"devices = 200: should be a whole number from 1 to 5"):
        femnist()


def test_the_paper_s_other_reading_is_a_power_law_over_classes(folder):
    write_every_class(folder, 20)
    federation = femnist(partition="power_law", devices=62)
    y = [federation.train.y[s : s + n] for s, n in zip(federation.train.start, federation.train.size, strict=True)]
    assert all(set(labels) <= {k, (k + 1) % 62} for k, labels in enumerate(y))
    assert federation.test.size.min() >= 1  # the file's split, all train, is another partition's


def test_fedprox_s_draw_has_a_to_j_and_no_image_twice(folder):
    images, labels = write_every_class(folder, 40)
    federation = femnist(partition="fedprox", devices=20)
    assert (federation.N, federation.classes) == (20, 10)
    x, y = (np.concatenate([getattr(s, side) for s in (federation.train, federation.test)]) for side in "xy")
    assert set(y) == set(range(10))
    assert len({image.tobytes() for image in x}) == len(x)  # nor shared between devices, nor between train and test
    label = {image.tobytes(): int(c) for image, c in zip(images, labels, strict=True)}
    assert all(label[image.tobytes()] == c + 36 for image, c in zip(x, y, strict=True))
    write_npz(folder, labels=WRITTEN.labels.astype(np.uint8) % 10)
    with pytest.raises(InputError, match="needs images of the letters a-j"):
        femnist(partition="fedprox")


def test_without_files_the_hub_s_is_named(folder):
    with pytest.raises(InputError, match=r"'train-00000-of-00001.parquet': is not there: put it in .*femnist"):
        femnist()
    write_npz(folder)
    with pytest.raises(InputError, match=r"train/\*.json and test/\*.json"):
        femnist(source="leaf")
    with pytest.raises(InputError, match="did you mean 'writer'"):
        femnist(partition="writers")
    with pytest.raises(InputError, match="choose one of any, leaf, npz, parquet"):
        femnist(source="web")


# damaged and hostile files


def edited(change):
    """LEAF's json of two writers, with one thing changed."""
    content = leaf([0, 1])
    change(content, content["user_data"]["f0001_00"])
    return json.dumps(content).encode()


JSON_DAMAGE = {
    "cut": (lambda c, u: None, "should be json"),
    "no users": (lambda c, u: c.pop("users"), "users = None: is missing"),
    "user without data": (lambda c, u: c["user_data"].pop("f0001_00"), "user_data = None: is missing"),
    "user without x": (lambda c, u: u.pop("x"), "x = None: is missing"),
    "user_data a list": (lambda c, u: c.update(user_data=[]), r"user_data = \[\]: should be an object"),
    "empty user": (
        lambda c, u: (u.update(x=[], y=[]), c["num_samples"].__setitem__(0, 0)),
        "samples = 0: should be at least 1",
    ),
    "wrong count": (lambda c, u: c["num_samples"].__setitem__(0, 19), "num_samples = 19: should be the number"),
    "count of another type": (lambda c, u: c["num_samples"].__setitem__(0, "20"), "num_samples = '20'"),
    "fewer counts": (lambda c, u: c["num_samples"].pop(), "len.num_samples. = 1: should be len.users. = 2"),
    "fewer labels": (lambda c, u: u["y"].pop(), "len.y. = 19: should be len.x. = 20"),
    "short image": (lambda c, u: u["x"][3].pop(), r"x\[3\] = \(783,\): should be \(784,\)"),
    "short images": (lambda c, u: [row.pop() for row in u["x"]], r"\(20, 783\): should be 784 numbers"),
    "nested images": (lambda c, u: u.update(x=[[row] for row in u["x"]]), "should be 784 numbers"),
    "not a number": (lambda c, u: u["x"][0].__setitem__(0, "ink"), r"x\[0\] = .*should be a number"),
    "nan": (lambda c, u: u["x"][0].__setitem__(0, float("nan")), "should be a finite number"),
    "bright": (lambda c, u: u["x"][0].__setitem__(0, 255), "between 0 and 1"),
    "label 62": (lambda c, u: u["y"].__setitem__(2, 62), r"y\[2\] = 62: should be a whole number from 0 to 61"),
    "negative label": (lambda c, u: u["y"].__setitem__(2, -1), r"y\[2\] = -1"),
    "label 1.5": (lambda c, u: u["y"].__setitem__(2, 1.5), r"y\[2\] = 1.5"),
    "huge label": (lambda c, u: u["y"].__setitem__(2, 10**40), r"y\[2\] = 1000"),
    "same user twice": (
        lambda c, u: (c["users"].append("f0001_00"), c["num_samples"].append(20)),
        "the user is listed twice",
    ),
}


@pytest.mark.parametrize("damage", JSON_DAMAGE)
def test_damaged_json(folder, damage):
    change, message = JSON_DAMAGE[damage]
    content = edited(change)
    (folder / "all.json").write_bytes(content[:-100] if damage == "cut" else content)
    with pytest.raises(InputError, match=message) as error:
        femnist(devices=2)
    assert "all.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should be json"),
        (b"\xff\xfe\xfd", "should be utf-8"),
        (b'{"users": ["\xe9"]}', "should be utf-8"),
        (b"[" * 200_000, "should be json"),
        (b"[1]", "should be a json object"),
        (gzip.compress(edited(lambda c, u: None))[:-50], "should be an undamaged gzip file"),
    ],
    ids=["empty", "utf-16", "latin-1", "deep", "list", "cut gzip"],
)
def test_files_that_are_not_leaf_s(folder, content, message):
    (folder / "all.json").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        femnist(devices=2)
    assert "all.json" in str(error.value)


def test_a_gzip_bomb_is_not_unpacked_further_than_the_limit(folder, monkeypatch):
    monkeypatch.setattr("folb.data.leaf.LIMIT", 100_000)
    (folder / "all.json.gz").write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(InputError, match=r"bytes = [0-9]+: should be at most 100000 when unpacked"):
        femnist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(images=None), "images = None: is missing"),
        (dict(images=WRITTEN.images[:-1]), r"labels = .*should be 199 whole numbers"),
        (dict(images=WRITTEN.images[:, :, :27]), "should be bytes, n x 28 x 28"),
        (dict(images=WRITTEN.images / 255), "should be bytes, n x 28 x 28"),
        (dict(labels=WRITTEN.labels + 1), r"labels: y\[\d+\] = 62"),
        (dict(labels=WRITTEN.labels / 1), "should be 200 whole numbers"),
        (dict(writer=WRITTEN.writer + 1), r"each should have a writer 0 .. 4"),
        (dict(split=WRITTEN.split * 2), "should be 0 for train or 1 for test"),
        (dict(writer_ids=np.array([{}], dtype=object)), "without Python objects"),
    ],
)
def test_damaged_npz(folder, changes, message):
    write_npz(folder, **changes)
    with pytest.raises(InputError, match=message) as error:
        femnist(**ALL)
    assert "femnist_writers.npz" in str(error.value)


def test_an_npz_bomb(folder, monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 100_000)
    write_npz(folder)
    with pytest.raises(InputError, match=r"bytes = [0-9]+: should be at most 100000"):
        femnist(**ALL)


def test_damaged_parquet(folder):
    pa = pytest.importorskip("pyarrow")
    good = [png(image) for image in WRITTEN.images]
    wide = png(np.zeros((28, 29), np.uint8))
    for changes, message in (
        (dict(images=[*good[:-1], good[-1][:60]]), r"rows from 0: image\[199\] = .*should be a PNG file"),
        (dict(images=[b"GIF89a", *good[1:]]), r"image\[0\] = .*should be a PNG file"),
        (dict(images=[wide, *good[1:]]), r"image\[0\] = \(29, 28\): should be 28 x 28 pixels"),
        (dict(images=[None, *good[1:]]), r"image\[0\] = .*should be a PNG file"),
        (dict(image=pa.array(good)), "should be structs with the bytes"),
        (dict(character=None), "'character': should be a column"),
        (dict(character=pa.array(WRITTEN.labels + 1)), r"character: y\[\d+\] = 62"),
        (dict(writer_id=pa.array([None, *WRITTEN.ids[WRITTEN.writer][1:]])), "should have a value in every row"),
    ):
        write_parquet(folder, **changes)
        with pytest.raises(InputError, match=message) as error:
            femnist(**ALL)
        assert ".parquet" in str(error.value)
    path = folder / "train-00000-of-00001.parquet"
    for content in (b"", b"PAR1", path.read_bytes()[:-20], path.read_bytes()[:2000]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="cannot be read as parquet"):
            femnist(**ALL)


def test_without_pyarrow_the_error_says_what_to_install(folder, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("folb.data.tabular.import_module", missing)
    (folder / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pyarrow.*pip install 'folb\[parquet\]'"):
        femnist()


@pytest.mark.skipif(not REAL, reason="FOLB_DATA is not set")
def test_the_real_sample(monkeypatch):
    monkeypatch.setenv("FOLB_DATA", REAL)
    if not (source_files.directory() / "femnist" / "femnist_writers.npz").exists():
        pytest.skip("no FEMNIST npz in FOLB_DATA")
    federation = femnist(source="npz")
    sizes = federation.train.size + federation.test.size
    assert (federation.N, sizes.sum()) == (200, 56_653)
    assert set(np.unique(federation.train.y)) == set(range(62))
    assert "367 of LEAF's 3,550 writers" in federation.note
    assert scaled(None, federation.train.x[:500]).mean() > 0.9
    everyone = femnist(source="npz", devices=367)
    assert (everyone.train.size + everyone.test.size).sum() == 79_637
    assert femnist(source="npz", partition="power_law").N == 200
    assert femnist(source="npz", partition="fedprox").classes == 10
