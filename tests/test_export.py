"""`folb export`: the rounds as csv and parquet, the table as latex, of runs finished or not."""

import csv
import io
import json
import math
import shutil
import sys

import numpy as np
import pytest

from folb import atomic
from folb.cli.main import main
from folb.experiments import execute
from folb.experiments.experiment import Experiment
from folb.report import export
from folb.results import summary
from folb.store import directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run directory with records of its devices."""
    settings = {"sizes": [20, 30, 40], "select.K": 2, "local.mu": [0.01, 1]}
    choices = {"rounds": 6, "seeds": 2, "evaluate_every": 2, "records": True, "set": settings}
    experiment = Experiment("synthetic_1_1", algorithms=["folb"], **choices)
    path = tmp_path_factory.mktemp("export") / "run"
    execute.execute(experiment, directory=path)
    return path


@pytest.fixture
def path(whole, tmp_path):
    """A copy to be tampered with."""
    return shutil.copytree(whole, tmp_path / "run")


def exported(capsys, path, form, *options):
    assert main(["export", str(path), "--format", form, *map(str, options)]) == 0
    return capsys.readouterr().out


def parsed(text):
    return list(csv.DictReader(io.StringIO(text)))


def edit(path, change):
    """Change the lines of rounds.jsonl."""
    lines = [json.loads(line) for line in (path / directory.ROUNDS).read_text().splitlines()]
    content = "".join(json.dumps(line) + "\n" for line in map(change, lines) if line)
    atomic.replace(path / directory.ROUNDS, content.encode())


def diverging(line):
    """The line as it is of a run whose loss is not finite in round 4, and with a lost device in round 1."""
    if line["round"] == 4:
        return line | {"train_loss": None}
    lists = {"devices": [0, 2], "times": [1, 0], "weights": [-0.5, 0.0], "gamma": [0.25, None], "lost_devices": [2]}
    return line | lists if line["round"] == 1 else line


def test_csv_has_every_round_run_by_run(path, capsys):
    rows = parsed(exported(capsys, path, "csv"))
    runs = directory.read(path).runs()
    assert len(rows) == 4 * 6 and list(rows[0]) == [
        *export.COLUMNS,
        *(name for name in export.OF_DEVICES if name != "own"),  # it has no metrics
    ]
    assert [row["algorithm"] for row in rows] == 12 * ["folb local.mu=0.01"] + 12 * ["folb local.mu=1"]
    assert [int(row["round"]) for row in rows] == 4 * [1, 2, 3, 4, 5, 6]
    for run, own in zip(runs, (rows[i : i + 6] for i in range(0, 24, 6)), strict=True):
        assert [int(row["seed"]) for row in own] == 6 * [run.seed]
        assert [row["train_loss"] == "" for row in own] == 3 * [True, False]
        for name in ("test_accuracy", "train_loss"):
            np.testing.assert_array_equal(np.float32([row[name] for row in own[1::2]]), getattr(run, name))
        assert [int(row["bytes_up"]) for row in own] == run.bytes_up.tolist()
        np.testing.assert_array_equal(np.float32([row["seconds"] for row in own]), run.seconds)
        assert {row["updated"] for row in own} == {"True"} and {row["lost"] for row in own} == {"0"}
        for name, expected in {"devices": run.devices, "weights": run.records["weights"]}.items():
            for row, times, values in zip(own, run.times, expected, strict=True):
                np.testing.assert_array_equal(np.float32(row[name].split()), values[times > 0])
    edit(path, lambda line: {name: value for name, value in line.items() if name not in export.OF_DEVICES})
    assert list(parsed(exported(capsys, path, "csv"))[0]) == list(export.COLUMNS)


def test_divergence_lost_devices_and_the_note_are_in_the_csv(path, capsys):
    edit(path, diverging)
    environment = json.loads((path / directory.ENVIRONMENT).read_bytes())
    atomic.replace(path / directory.ENVIRONMENT, json.dumps(environment | {"note": 'a "sample", of 3'}).encode())
    rows = parsed(exported(capsys, path, "csv"))
    assert [row["train_loss"] for row in rows if row["round"] in "34"] == 4 * ["", "nan"]
    assert {row["note"] for row in rows} == {'a "sample", of 3'}
    lists = ("devices", "times", "weights", "gamma", "lost_devices", "rejected_devices")
    assert [rows[0][name] for name in lists] == ["0 2", "1 0", "-0.5 0.0", "0.25 nan", "2", ""]


def test_both_crossings_are_in_every_round_of_their_run(path, capsys, tmp_path):
    accuracy = {0: [0.2, 0.9, 0.1, 0.8, 0.8, 0.9], 1: [0.8, 0.1, 0.1, 0.1, 0.1, 0.1]}  # held from 2; never
    edit(path, lambda line: line | {"test_accuracy": accuracy[line["seed"]][line["round"] - 1], "train_loss": 1.0})
    rows = parsed(exported(capsys, path, "csv"))
    arrivals = [(row["seed"], row["rounds_to_target"], row["held_from"]) for row in rows]
    assert arrivals == 2 * (6 * [("0", "2", "2")] + 6 * [("1", "1", "")])
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    exported(capsys, path, "parquet", "-o", tmp_path / "rounds.parquet")
    table = parquet.read_table(tmp_path / "rounds.parquet", columns=["held_from"])
    assert table["held_from"].to_pylist() == 2 * (6 * [2] + 6 * [None])


def test_parquet_has_the_same_columns_with_their_types(path, capsys, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    edit(path, diverging)
    exported(capsys, path, "parquet", "-o", tmp_path / "rounds.parquet")
    table = parquet.read_table(tmp_path / "rounds.parquet")
    rows = parsed(exported(capsys, path, "csv"))
    assert table.column_names == list(rows[0]) and len(table) == len(rows)
    assert table.schema.field("train_loss").type == arrow.float32()
    assert table.schema.field("gamma").type == arrow.list_(arrow.float32())
    assert table["updated"].to_pylist() == len(rows) * [True]
    assert table["bytes_up"].to_pylist() == [int(row["bytes_up"]) for row in rows]
    losses = table["train_loss"].to_pylist()
    assert losses[0] is None and math.isnan(losses[3]) and losses[1] == np.float32(rows[1]["train_loss"])
    assert table["devices"].to_pylist()[0] == [0, 2] and math.isnan(table["gamma"].to_pylist()[0][1])


def test_latex_has_the_numbers_of_the_table(path, capsys):
    text = exported(capsys, path, "latex")
    lines = text.splitlines()
    headings, table = summary.table(directory.read(path).runs(), 0.7)
    assert lines[1] == rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}" and lines[-1] == r"\end{tabular}"
    head, *rows = [line for line in lines if line.endswith(r" \\")]
    assert head.startswith(r"algorithm & rounds to 70 \% & held from & MB to 70 \%") and "drops $>$ 5 points" in head
    for row, cells in zip(rows, table, strict=True):
        plain = row.removesuffix(r" \\").replace(r"\%", "%").replace(r"$\pm$", "±").split(" & ")
        assert plain == cells


def test_latex_escapes_what_it_would_take_for_its_own():
    assert export.escaped("a_b & 100 %\n<$x^2~#{}>\\") == (
        r"a\_b \& 100 \% $<$\$x\textasciicircum{}2\textasciitilde{}\#\{\}$>$\textbackslash{}"
    )


def test_unfinished_runs_are_exported_as_far_as_they_are(path, capsys):
    (path / directory.RESULTS).unlink()
    edit(path, lambda line: line if (line["run"], line["round"]) in ((0, 1), (0, 2), (1, 1)) else None)
    with open(path / directory.ROUNDS, "ab") as file:
        file.write(b'{"run": 0, "round": 3, "te')  # as a kill leaves it
    rows = parsed(exported(capsys, path, "csv"))
    assert [(row["seed"], row["round"]) for row in rows] == [("0", "1"), ("0", "2"), ("1", "1")]
    (row,) = [line for line in exported(capsys, path, "latex").splitlines() if line.startswith("folb")]
    assert row.startswith("folb local.mu=0.01 & ")  # by its name in the whole experiment
    (path / directory.ROUNDS).unlink()
    assert exported(capsys, path, "csv") == ",".join(export.COLUMNS) + "\n"
    assert main(["export", str(path), "--format", "latex"]) == 2
    assert "has no evaluated round yet" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(path, capsys, tmp_path, monkeypatch):
    target = tmp_path / "rounds.csv"
    target.write_text("before")
    monkeypatch.setattr(atomic.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main(["export", str(path), "--format", "csv", "-o", str(target)]) == 2
    assert "No space left" in capsys.readouterr().err and target.read_text() == "before"
    monkeypatch.undo()
    assert exported(capsys, path, "csv", "-o", target) == ""
    assert len(parsed(target.read_text())) == 24


def test_what_is_missing_is_named(path, capsys, monkeypatch, tmp_path):
    assert main(["export", str(path), "--format", "parquet"]) == 2
    assert "output = None: should be a file" in capsys.readouterr().err
    assert main(["export", str(path), "--format", "csv", "-o", str(tmp_path)]) == 2
    assert "should be a file to write to" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(path), "--format", "parquet", "-o", str(tmp_path / "x")]) == 2
    assert "pip install 'folb[parquet]'" in capsys.readouterr().err
    assert main(["export", "nothing", "--format", "csv"]) == 2
    assert "run = 'nothing'" in capsys.readouterr().err
