"""Runs that were made before: read by name, as a data frame, and shown in one line."""

import builtins
import importlib
import sys
import types

import numpy as np
import pytest

import folb
from folb import InputError, algorithms, data, models, simulate

COLUMNS = ["run", "algorithm", "seed", "round", "test_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds"]
CHOICES = {"dataset": "synthetic_1_1", "rounds": 6, "evaluate_every": 2, "seeds": 2}

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two algorithms with two seeds, evaluated three times."""
    experiment = {
        **CHOICES,
        "algorithms": ["fedprox"],
        "set": {"sizes": [20, 30], "select.K": 2, "local.mu": [0.1, 1.0]},
    }
    return folb.execute(experiment, directory=tmp_path_factory.mktemp("reading") / "one")


@pytest.fixture(scope="module")
def simulated():
    federation = data.load("synthetic_1_1", sizes=[20, 30])
    model = models.logistic(federation.shape, federation.classes)
    return federation, model, simulate(federation, model, algorithms.fedavg(select={"K": 2}), rounds=3, seeds=2)


@pytest.fixture(params=["pandas", "polars", "a stand-in"])
def kind(request, monkeypatch):
    """Each library where it is installed; and a stand-in, so that the rest is always tested."""
    if request.param != "a stand-in":
        pytest.importorskip(request.param)
        return request.param
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=Frame))
    return "pandas"


class Frame(dict):
    """What both libraries have in common."""

    @property
    def columns(self):
        return list(self)


def test_a_row_for_each_evaluated_round(stored, kind):
    frame = stored.to_frame(kind)
    assert list(frame.columns) == COLUMNS and len(frame["round"]) == 4 * 3
    assert list(frame["round"]) == [2, 4, 6] * 4 and list(frame["seed"]) == ([0] * 3 + [1] * 3) * 2
    assert list(frame["algorithm"]) == ["fedprox local.mu=0.1"] * 6 + ["fedprox local.mu=1"] * 6
    assert set(frame["run"]) == {"one"}
    runs = stored.runs()
    assert np.allclose(frame["test_accuracy"], np.concatenate([run.test_accuracy for run in runs]))
    assert np.allclose(frame["train_loss"], np.concatenate([run.train_loss for run in runs]))
    assert list(frame["bytes_up"])[:3] == [int(runs[0].bytes_up[:t].sum()) for t in (2, 4, 6)]
    assert np.isclose(list(frame["seconds"])[2], runs[0].seconds.sum(dtype=float))


def test_runs_in_memory_and_several_directories(stored, simulated, kind):
    frame = folb.to_frame([*simulated[2], stored, str(stored.path)], kind=kind)
    assert len(frame["round"]) == 2 * 3 + 2 * 12
    assert list(frame["algorithm"])[:6] == ["fedavg"] * 6 and [name is None or name != name for name in frame["run"]][
        :7
    ] == [True] * 6 + [False]


def test_a_kind_that_is_not_there(stored, monkeypatch):
    real = importlib.import_module

    def absent(name, *rest):
        if name in ("pandas", "polars"):
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr("folb.store.reading.import_module", absent)
    with pytest.raises(InputError, match="to_frame = None: needs pandas or polars: pip install pandas"):
        stored.to_frame()
    with pytest.raises(InputError, match="to_frame = 'polars': needs polars: pip install polars"):
        stored.to_frame("polars")
    with pytest.raises(InputError, match="kind = 'panda': did you mean 'pandas'"):
        stored.to_frame("panda")


@pytest.mark.parametrize("runs", [[], [3], None])
def test_what_is_not_a_run(runs, kind):
    with pytest.raises(InputError, match="runs = "):
        folb.to_frame(runs, kind=kind)


def test_read_finds_by_name_and_path(stored, monkeypatch):
    monkeypatch.setenv("FOLB_RUNS", str(stored.path.parent))
    for name in ("one", "o", "last", stored.path, str(stored.path), stored):
        assert folb.read(name).path.resolve() == stored.path.resolve()
    with pytest.raises(InputError, match="run = 'two': there is no such run"):
        folb.read("two")


def test_everything_is_shown_in_one_line(stored, simulated):
    federation, model, runs = simulated
    shown = {
        repr(
            federation
        ): "Federation(synthetic_1_1: 2 devices, 45 training and 5 test samples of shape (60,), 10 classes)",
        repr(federation.train): "Split(45 samples of 2 devices)",
        repr(runs[1]): f"Run(fedavg, seed 1: 3 rounds, final accuracy {runs[1].final:.4f})",
        repr(stored): f"RunDirectory({stored.path}: finished, 4 runs)",
        repr(model): "Model(logistic)",
        repr(folb.Model(builtins.len, builtins.len, builtins.len)): "Model(len)",
    }
    assert list(shown) == list(shown.values())
    algorithm = repr(algorithms.fedprox(local={"mu": 0.5}, select={"K": 3}))
    assert algorithm.startswith("Algorithm(fedprox, ") and "select.K=3, " in algorithm and "local.mu=0.5" in algorithm
    assert "\n" not in algorithm and len(algorithm) < 400
