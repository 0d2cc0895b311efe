"""The trackers: what they wrote is read back with the tools' own packages, offline."""

import json
import math
import shutil
import socket
import struct

import numpy as np
import pytest

from folb.cli.main import main
from folb.report import trackers
from folb.results.run import Run
from folb.store import directory

TINY = [
    "synthetic_1_1",
    "--algorithms",
    "folb",
    "--set",
    "sizes=20,30,40",
    "--set",
    "select.K=2",
    "--set",
    "local.mu=0.01,1",
]
MEASURES = ("test_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No server, an empty home directory, and no network."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    connect = socket.socket.connect

    def refuse(self, address):
        assert self.family == socket.AF_UNIX, address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


# The readers: for each run, by its name, its parameters and {measure: [(round, value), ...]}


def read_tensorboard(path):
    from tensorboardX.proto.event_pb2 import Event

    logged = {}
    for home in path.iterdir():
        values, parameters = {}, None
        for file in sorted(home.iterdir()):
            content = file.read_bytes()
            while content:
                (length,) = struct.unpack("<Q", content[:8])
                event = Event.FromString(content[12 : 12 + length])
                content = content[16 + length :]
                for value in event.summary.value:
                    if value.tag.startswith("parameters"):
                        parameters = json.loads(value.tensor.string_val[0].decode().strip("`"))
                    else:
                        values.setdefault(value.tag, []).append((event.step, value.simple_value))
        logged[home.name.replace("-", " ")] = parameters, values
    return logged


def read_mlflow(path):
    from mlflow import MlflowClient

    client = MlflowClient(path.as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name != "Default")
    logged = {}
    for run in client.search_runs([experiment.experiment_id]):
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        values = {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}
        logged[run.info.run_name] = run.data.params, values
    return logged


def read_wandb(path):
    import wandb

    wandb.teardown()  # its own process may still be writing; it ends with ours, or here
    logged = {}
    for file in path.glob("wandb/offline-run-*/*.wandb"):
        name, parameters, values = None, {}, {}
        for record in wandb_records(file.read_bytes()):
            if record.HasField("run"):
                name = record.run.display_name
                parameters |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for key in set(items) & set(MEASURES):
                    values.setdefault(key, []).append((items["_step"], float(items[key])))
        logged[name] = parameters, values
    return logged


def wandb_records(content):
    """The file is LevelDB's log: blocks of 32 KiB with records in them; longer records are in pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at < len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.mark.parametrize("name", READERS)
def test_every_round_of_every_run_arrives(name, tmp_path, capsys):
    options = ["--rounds", "4", "--seeds", "1", "--evaluate-every", "2", "--track", name]
    assert main(["compare", *TINY, *options]) == 0
    (path,) = directory.listed()
    stored = directory.read(path)
    logged = READERS[name](path / "tracking" / name)
    assert set(logged) == {"0 folb local.mu=0.01 seed 0", "1 folb local.mu=1 seed 0"}
    for i, (title, mu) in enumerate(zip(sorted(logged), (0.01, 1), strict=True)):
        parameters, values = logged[title]
        assert (parameters["algorithm"], float(parameters["local.mu"]), int(parameters["seed"])) == ("folb", mu, 0)
        for measure in MEASURES:
            lines = [line for line in stored.rounds()[0] if line["run"] == i and measure in line]
            assert [step for step, _ in values[measure]] == [line["round"] for line in lines]
            np.testing.assert_array_equal(
                np.array([value for _, value in values[measure]], np.float32),
                np.array([line[measure] for line in lines], np.float32),
            )
        assert [step for step, _ in values["train_loss"]] == [2, 4]  # the evaluated rounds
    assert not (tmp_path / "home").exists()
    # `folb rm` takes it along, and leaves what is not folb's
    (path / "mine.txt").write_text("mine")
    assert main(["rm", path.name, "--yes"]) == 0
    assert [file.name for file in path.iterdir()] == ["mine.txt"]


def part(first, losses):
    """Rounds of a run from `first` on, all evaluated."""
    n = len(losses)
    rounds, zeros = np.arange(first, first + n), np.zeros(n)
    loss = np.array(losses, np.float32)
    return Run("a", {}, 0, rounds, loss, loss, zeros, zeros, zeros, zeros, zeros, zeros, zeros)


ABOUT = [{"algorithm": "a b/c=<1>", "name": "a", "seed": 7, "parameters": {"none": None, "list": [1, 2], "text": "x"}}]


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_has_every_round_once(name, tmp_path):
    with pytest.raises(KeyboardInterrupt), trackers.tracking(name, tmp_path / "before", ABOUT) as observe:
        observe(1, {0: part(1, [5.0, 4.0])})
        raise KeyboardInterrupt
    # elsewhere: MLflow remembers a directory for as long as the process lives
    shutil.copytree(tmp_path / "before", tmp_path / "run", symlinks=True)
    with trackers.tracking(name, tmp_path / "run", ABOUT) as observe:  # tells the rounds before the interruption again
        observe(1, {0: part(1, [5.0, 4.0])})
        observe(3, {0: part(3, [3.0, math.nan])})
    ((parameters, values),) = READERS[name](tmp_path / "run" / "tracking" / name).values()
    assert parameters["text"] == "x" and int(parameters["seed"]) == 7
    assert [step for step, _ in values["train_loss"]] == [1, 2, 3, 4]
    np.testing.assert_array_equal([value for _, value in values["train_loss"]], [5, 4, 3, math.nan])


def test_a_package_that_is_missing_is_named_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert main(["compare", *TINY, "--track", "wandb"]) == 2
    assert "track = 'wandb'" in (message := capsys.readouterr().err) and "pip install 'folb[wandb]'" in message
    assert directory.listed() == []
