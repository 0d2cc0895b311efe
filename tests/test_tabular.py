"""Tables with a device column, csv and parquet."""

import gzip

import numpy as np
import pytest

import folb
from folb.cli.main import main
from folb.data.tabular import load as tabular
from folb.errors import InputError
from folb.experiments import execute

pytestmark = pytest.mark.usefixtures("undrawn")

TABLE = """\
device,height,width,label
ann,1.5,2,0
bob,0.25,-1,1
ann,3,1e3,1
bob,0,0,0
"""


def write(tmp_path, content, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows(federation):
    """Every (device, x, y), sorted."""
    rows = []
    for split in (federation.train, federation.test):
        device = np.repeat(np.arange(federation.N), split.size)
        rows += [(int(k), *x.tolist(), int(y)) for k, x, y in zip(device, split.x, split.y, strict=True)]
    return sorted(rows)


EXPECTED = [(0, 1.5, 2.0, 0), (0, 3.0, 1000.0, 1), (1, 0.0, 0.0, 0), (1, 0.25, -1.0, 1)]


@pytest.mark.parametrize(
    "content",
    [
        TABLE,
        gzip.compress(TABLE.encode()),
        b"\xef\xbb\xbf" + TABLE.encode(),  # as spreadsheets save it
        TABLE.replace("\n", "\r\n"),
        TABLE.replace("ann", '"ann"'),
        TABLE.replace("bob", '"bob, or\nrobert"'),
        TABLE.rstrip("\n"),
    ],
    ids=["plain", "gzip", "mark", "crlf", "quoted", "comma", "no last newline"],
)
def test_csv(tmp_path, content):
    federation = tabular(write(tmp_path, content))
    assert (federation.N, federation.classes, federation.shape) == (2, 2, (2,))
    assert federation.name.endswith("table.csv")
    assert rows(federation) == EXPECTED
    assert federation.train.x.dtype == np.float32


def test_columns_have_any_names_and_order(tmp_path):
    content = "kind,user,a\nx,u1,1\ny,u2,2\nx,u1,3\nz,u2,4\n"
    federation = tabular(write(tmp_path, content), device="user", label="kind")
    assert federation.classes == 3
    assert rows(federation) == [(0, 1.0, 0), (0, 3.0, 0), (1, 2.0, 1), (1, 4.0, 2)]


def test_a_split_column(tmp_path):
    content = "device,label,a,split\nu,0,1,train\nu,1,2,test\nv,0,3,Train\nv,1,4,TEST\n"
    federation = tabular(write(tmp_path, content))
    assert federation.train.x[:, 0].tolist() == [1, 3]
    assert federation.test.x[:, 0].tolist() == [2, 4]
    numbers = content.replace("TEST", "1").replace("Train", "0")
    assert tabular(write(tmp_path, numbers)).test.x[:, 0].tolist() == [2, 4]
    with pytest.raises(InputError, match=r"split\[1\] = 'dev': should be train or test"):
        tabular(write(tmp_path, content.replace("test", "dev")))


def test_parquet_is_the_same_table(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "device": ["ann", "bob", "ann", "bob"],
        "height": np.array([1.5, 0.25, 3, 0]),
        "width": np.array([2, -1, 1000, 0]),
        "label": np.array([0, 1, 1, 0]),
    }
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=3)
    assert rows(tabular(path)) == EXPECTED

    pq.write_table(pa.table(columns | {"label": ["no", "yes", "yes", "no"]}), path)
    assert rows(tabular(path)) == EXPECTED
    pq.write_table(pa.table(columns | {"split": [True, False, False, False]}), path)
    assert tabular(path).test.size.tolist() == [1, 0]

    for change, message in (
        ({"height": ["a", "b", "c", "d"]}, "height = 'a': should be a column of numbers"),
        ({"height": [1.0, None, 2.0, 3.0]}, "height = None: should have a value in every row"),
        ({"height": [1.0, float("nan"), 2.0, 3.0]}, r"x\[1, 0\] = .*finite"),
        ({"height": [1.0, 1e300, 2.0, 3.0]}, r"x\[1, 0\] = .*finite"),
        ({"label": [0.5, 1.0, 1.0, 0.0]}, r"y\[0\] = 0.5"),
        ({"label": [-1, 1, 1, 0]}, r"y\[0\] = -1"),
    ):
        pq.write_table(pa.table(columns | change), path)
        with pytest.raises(InputError, match=message):
            tabular(path)
    pq.write_table(pa.table(columns).slice(0, 0), path)
    with pytest.raises(InputError, match="rows: should be at least 1"):
        tabular(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot be read as parquet"):
        tabular(path)


def test_a_split_that_was_asked_for_must_be_there(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("device,label,a\nu,0,1\nu,1,2\nv,0,3\nv,1,4\n")
    assert tabular(path).N == 2  # a column called split need not be there
    with pytest.raises(
        InputError, match=r"table\.csv: column = 'fold': should be a column; there are device, label, a"
    ):
        tabular(path, split="fold")
    with pytest.raises(InputError, match="should be different columns"):
        tabular(path, device="label")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "should name every column"),
        ("device,label,a\n", "0: rows: should be at least 1"),
        ("device,label,a,a\nu,0,1,2\n", r"\['a'\]: should name every column, each once"),
        (
            "user,label,a\nu,0,1\n",
            "'device': should be a column; there are user, label, a; say which are yours: --set device=",
        ),
        ("1,2,3\n4,5,6\n", "'device': should be a column; there are 1, 2, 3"),
        ("device,label\nu,0\n", "should have at least one column of numbers"),
        ("device,label,a\nu,0,1\nv,0\n", "requires 3 columns but 2 were found"),
        ("device,label,a\nu,0,1\nv,0,1,2\n", "requires 3 columns but 4 were found"),
        ("device,label,a\nu,0,one\n", "could not convert string 'one'"),
        ("device,label,a\nu,0,nan\n", r"x\[0, 0\] = .*finite"),
        ("device,label,a\nu,0,1e99\n", r"x\[0, 0\] = .*finite"),
        ("device,label,a\nu,-1,1\n", r"y\[0\] = -1"),
        ("device,label,a\nu,0.5,1\n", r"y\[0\] = 0.5"),
        (b"device,label,a\n\xff,0,1\n", "utf-8"),
        (b"dev\xffice,label,a\nu,0,1\n", "utf-8"),
        (gzip.compress(TABLE.encode() + b"ann,1,2,0\n" * 100)[:-20], "should be an undamaged gzip file"),
        (b"device,label,a\n" + b"\0" * 10, "table.csv"),
    ],
)
def test_bad_csv(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as error:
        tabular(write(tmp_path, content))
    assert "table" in str(error.value) and "\n" not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(InputError, match=r"none.csv = 'No such file or directory': should be a readable file"):
        tabular(tmp_path / "none.csv")


# names


def lines(names, labels, count=12):
    return "".join(f"{names[n % len(names)]},{n},{labels[n // 2 % len(labels)]}\n" for n in range(count))


def test_devices_and_classes_keep_their_names(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("device,a,label\n" + lines(["eve", "ann"], ["dog", "cat", "cow"], 60))
    federation = tabular(path)
    assert federation.device_names == ("ann", "eve") and federation.class_names == ("cat", "cow", "dog")
    assert federation.held_out and tabular(path, holdout_seed=3).digest != federation.digest
    assert main(["data", "info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "cat, cow, dog" in shown and "device 1 eve" in shown and "a random tenth of each device's" in shown
    assert (
        main(["compare", str(path), "--algorithms", "fedavg", "--rounds", "1", "--seeds", "1", "--set", "select.K=2"])
        == 0
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "held out" in line]
    held_out = "does not say what to test on: a random tenth of each device's samples is held out"
    assert said == [f"folb: {path} {held_out}; a column or array `split` (0 train, 1 test) says it"]
    stored = folb.read("last")
    assert stored.environment["class_names"] == ["cat", "cow", "dog"]
    assert stored.environment["device_names"] == ["ann", "eve"]
    assert folb.load_model(stored).classes == ("cat", "cow", "dog")
    assert main(["show", "last"]) == 0 and "the classes, from 0 on: cat, cow, dog" in capsys.readouterr().out


def test_numbers_have_no_names_and_a_split_is_not_announced(tmp_path, capsys):
    path = tmp_path / "t.csv"
    marked = "".join(f"d{n % 2},{n},{'test' if n > 8 else 'train'},{n % 3}\n" for n in range(12))
    path.write_text("device,a,split,label\n" + marked)
    federation = tabular(path)
    assert federation.class_names is None and not federation.held_out
    assert main(["data", "info", str(path)]) == 0
    assert "their names" not in capsys.readouterr().out


def test_names_that_a_terminal_would_trip_over(tmp_path, capsys, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("device,a,label\n" + lines(["\x1b[31mred", "x" * 900], ["\x07", "\u202e", "ok"], 60))
    monkeypatch.setattr(execute, "NAMES", 100)  # the devices' names are longer, and are left out of the record
    arguments = ["compare", str(path), "--algorithms", "fedavg", "--rounds", "1", "--seeds", "1", "--set", "select.K=2"]
    for command in (["data", "info", str(path)], arguments, ["show", "last"], ["runs"]):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert not {"\x1b", "\x07", "\u202e"} & {*out, *err} and "x" * 200 not in out
    assert "device_names" not in folb.read("last").environment
    assert folb.load_model("last").classes == ("\x07", "ok", "\u202e")
