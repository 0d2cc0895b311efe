"""`folb data`, the registry, what goes with a dataset by default, and the notes that every output repeats."""

import json
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from test_cifar import TEN, write_archive
from test_cli import folb
from test_femnist import write_npz as write_femnist
from test_mnist import write as write_mnist

from folb import data
from folb.cli import tables
from folb.cli.main import main
from folb.data import fetch
from folb.errors import InputError
from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan
from folb.experiments.settings import algorithm_settings, read, settings
from folb.report.figures import plot, portrait
from folb.results.run import Run

NOTE = "a sample of FEMNIST: 5 of LEAF's 3,550 writers"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty data directory."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("mnist", "femnist"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


def facts(out):
    """The lines `heading  value` that `folb data info` begins with."""
    lines = out.split("\n\n")[0].splitlines()
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines}


# ---- the commands


def test_path_is_the_data_directory(store, capsys):
    assert folb(capsys, "data", "path")[:2] == (0, f"{store}\n")


def test_list_says_what_is_here_and_where_the_rest_is_expected(store, capsys):
    write_mnist(store / "mnist")
    code, out, _ = folb(capsys, "data", "list")
    assert code == 0
    assert set(data.DATASETS) <= {line.split()[0] for line in out.splitlines() if line}
    said = " ".join(out.split())
    assert f"mnist present in {store / 'mnist'} " in said
    assert "femnist absent: folb data fetch femnist " in said
    assert "synthetic_iid generated" in said and said.endswith(f"data directory: {store}")
    (store / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "mnist absent: folb data fetch mnist " in " ".join(folb(capsys, "data", "list")[1].split())


def test_info_counts_what_the_federation_has(store, tmp_path, capsys):
    write_mnist(store / "mnist")
    code, out, err = folb(capsys, "data", "info", "mnist", "--set", "devices=7", "--set", "mnist.partition=iid")
    assert code == 0, err
    shown = facts(out)
    assert shown["devices"] == "7"
    assert shown["samples"] == "700: 630 to train on, 70 to test on, a random tenth of each device's"
    assert shown["per device"] == "mean 100.0, sd 0.0, from 100 to 100"
    assert shown["classes"] == "10; a device has 10.0 of them on average"
    assert shown["defaults"] == "model logistic, local.lr 0.03, local.mu 1 for fedprox, target 0.8"
    federation = data.load("mnist", devices=7, partition="iid")
    assert federation.labels().sum(axis=1).tolist() == [100] * 7
    assert f"{100 * np.bincount(federation.test.y).max() / 70:.1f} % of the test samples" in shown["majority"]
    assert "  100 - 100 ████" in out
    assert out.count("device ") >= 5


def test_info_shows_uneven_sizes_and_labels(tmp_path, capsys):
    rows = ["u,0,1"] * 2 + ["v,1,2"] * 10 + ["w,1,2"] * 90 + ["w,0,2"] * 10
    (tmp_path / "t.csv").write_text("\n".join(["device,label,a", *rows]) + "\n")
    code, out, err = folb(capsys, "data", "info", tmp_path / "t.csv")
    assert code == 0, err
    assert facts(out)["per device"] == f"mean 37.3, sd {np.std([2, 10, 100]):.1f}, from 2 to 100"
    assert facts(out)["defaults"].startswith("model logistic, local.lr 0.01")
    histogram = out.split("\n\n")[1].splitlines()[1:]
    assert sum(int(line.split()[-1]) for line in histogram) == 3
    assert "device 0 u    |█ | 2\n" in out and "device 2 w    |▁█| 100\n" in out  # the smallest value shows


def test_info_draws_into_a_file_or_a_directory(store, tmp_path, capsys):
    write_femnist(store / "femnist")
    for out_path, expected in ((tmp_path / "new" / "dir", "femnist.png"), (tmp_path / "a" / "picture.svg", "")):
        code, out, err = folb(capsys, "data", "info", "femnist", "--set", "devices=5", "--out", out_path)
        assert code == 0, err
        path = out_path / expected
        assert out.endswith(f"written to {path}\n")
        assert [other.name for other in path.parent.iterdir()] == [path.name]
    assert (tmp_path / "new" / "dir" / "femnist.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "a" / "picture.svg").read_text()
    assert NOTE in svg and "5 devices, 200 samples" in svg
    assert facts(out)["note"] == NOTE


REFUSED = {
    "unknown dataset": (["info", "mnst"], "dataset = 'mnst': did you mean 'mnist'?"),
    "no such path": (["info", "no/such.csv"], "dataset = 'no/such.csv': no such file or directory"),
    "unknown setting": (["info", "mnist", "--set", "device=3"], "setting of mnist = 'device': did you mean 'devices'?"),
    "another's setting": (["info", "synthetic_1_1", "--set", "alpha=3"], "setting of synthetic_1_1 = 'alpha'"),
    "another's by name": (["info", "synthetic_1_1", "--set", "mnist.draw=3"], "set = 'mnist'"),
    "misspelt by name": (
        ["info", "Synthetic_1_1", "--set", "synthetic_1_1.bogus=3"],
        "setting of Synthetic_1_1 = 'bogus'",
    ),
    "its own name": (
        ["info", "synthetic_1_1", "--set", "synthetic_1_1=3"],
        "setting of synthetic_1_1 = 'synthetic_1_1'",
    ),
    "no text": (["info", "synthetic_1_1", "--out", ""], "out = '': should be a directory, or a file that ends in .png"),
    "no picture": (["info", "synthetic_1_1", "--out", "a.gif"], "out = 'a.gif': should be a directory, or a file"),
    "no number": (["info", "mnist", "--set", "devices=many"], "devices = 'many': should be a whole number"),
    "no value": (["info", "mnist", "--set", "devices"], "set = 'devices': should be KEY=VALUE"),
    "files absent": (["info", "mnist"], "mnist = 'train-images-idx3-ubyte.gz': is not there: put it in "),
    "nothing to fetch": (
        ["fetch", "synthetic"],
        "dataset = 'synthetic': choose one of cifar10, cifar100, femnist, glove, mnist",
    ),
    "no action": ([], "the following arguments are required: ACTION"),
    "unknown action": (["lst"], "'lst'"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    code, out, err = folb(capsys, "data", *arguments)
    assert code == 2 and message in err
    assert len(err.strip().splitlines()) == 1 and out == ""


def test_a_picture_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    info = ("data", "info", "synthetic_1_1", "--set", "sizes=20,30", "--out")
    code, _, err = folb(capsys, *info, tmp_path / "file" / "picture.png")
    assert code == 2 and "out = " in err and len(err.splitlines()) == 1


@pytest.fixture
def server(tmp_path):
    """The files of tmp_path/public, over http on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    (tmp_path / "public").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "public"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_fetch_gets_the_files_and_prints_where_they_are(store, tmp_path, server, monkeypatch, capsys):
    write_mnist(tmp_path / "public")
    names = sorted(path.name for path in (tmp_path / "public").iterdir())
    sources = tuple(fetch.Source(f"mnist/{name}", (f"{server}/{name}",)) for name in names)
    monkeypatch.setitem(fetch.SOURCES, "mnist", sources)
    code, out, err = folb(capsys, "data", "fetch", "MNIST")
    assert code == 0, err
    assert out.splitlines() == [str(store / "mnist" / name) for name in names]
    assert "train-images-idx3-ubyte.gz" in err  # the progress bar
    assert data.load("mnist", devices=7, partition="iid").N == 7

    monkeypatch.setitem(fetch.SOURCES, "mnist", (fetch.Source("mnist/gone", (f"{server}/gone",)),))
    code, out, err = folb(capsys, "data", "fetch", "mnist")
    assert code == 2 and out == ""
    assert f"fetch = 'gone': put it in {store / 'mnist'} yourself" in err


def test_fetch_unpacks_the_archive_of_cifar_10(store, tmp_path, server, monkeypatch, capsys):
    write_archive(tmp_path / "public" / "cifar-10-binary.tar.gz")
    (published,) = fetch.SOURCES["cifar10"]
    here = published._replace(urls=(f"{server}/cifar-10-binary.tar.gz",), size=None, sha256=None)
    monkeypatch.setitem(fetch.SOURCES, "cifar10", (here,))
    code, out, err = folb(capsys, "data", "fetch", "CIFAR10")
    assert code == 0, err
    assert out.splitlines() == [str(store / "cifar10" / name) for name in [*TEN, "batches.meta.txt"]]
    assert sorted(path.name for path in (store / "cifar10").iterdir()) == sorted([*TEN, "batches.meta.txt"])
    assert data.load("cifar10", devices=4).N == 4


# ---- the registry


def test_tables_are_found_by_their_suffix(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"who": ["a", "b"] * 5, "label": [0, 1] * 5, "height": np.arange(10.0)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "t.CSV").write_text("\n".join(["who,label,height", *lines]))
    for name in ("t.parquet", "t.CSV"):
        assert list(settings(data.constructor(tmp_path / name))) == [
            *("device", "label", "split", "holdout_seed", "regression")
        ]
        federation = data.load(tmp_path / name, device="who", holdout_seed=3)
        assert (federation.N, federation.name) == (2, str(tmp_path / name))
        with pytest.raises(InputError, match=r"setting of .*: did you mean 'device'"):
            data.load(tmp_path / name, devic="who")


def test_every_dataset_has_defaults_and_settings_that_text_can_give():
    assert set(data.DEFAULTS) < set(data.DATASETS)
    for make in data.DATASETS.values():
        for name, setting in settings(make).items():
            if not isinstance(setting.default, str):  # the dataset checks names of files
                assert read(name, setting.type, str(setting.default)) == setting.default


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int | Literal["all"], "12", 12),
        (int | Literal["all"], "all", "all"),
        (int | Literal["all"], "All", "all"),
        (float | None, "0.5", 0.5),
        (float | None, 2, 2.0),
        (float | None, "none", None),
        (float | None, None, None),
        (str | None, "a/b", "a/b"),
        (int | None, "7", 7),
    ],
)
def test_settings_of_two_types(kind, text, value):
    parsed = read("field", kind, text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int | Literal["all"], "most", "field = 'most': should be a whole number, or all"),
        (int | Literal["all"], "1.5", "should be a whole number, or all"),
        (float | None, "much", "field = 'much': should be a finite number, or none"),
        (float | None, "nan", "should be a finite number"),
    ],
)
def test_bad_settings_of_two_types(kind, text, message):
    with pytest.raises(InputError) as error:
        read("field", kind, text)
    assert message in str(error.value)


# ---- defaults by dataset


def test_the_defaults_are_those_of_the_public_fedprox_code(tmp_path):
    known = {name: tuple(data.defaults(name)) for name in ("mnist", "FEMNIST", "shakespeare", "sent140")}
    assert known == {
        "mnist": ("logistic", 0.03, 1, 0.8),
        "FEMNIST": ("logistic", 0.003, 1, 0.25),
        "shakespeare": ("char_lstm", 0.8, 0.001, 0.2),
        "sent140": ("sentiment_lstm", 0.3, 0.01, 0.7),
    }
    for name in ("synthetic", "synthetic_1_1", "synthetic_0.5_2", tmp_path / "mine.npz"):
        assert data.defaults(name) == ("logistic", 0.01, 1, 0.7)
    assert data.defaults("synthetic_iid") == ("logistic", 0.01, 1, 0.45)


def test_a_target_that_is_not_given_is_the_datasets():
    assert Experiment("mnist").target == Experiment("mnist", target=None).target == 0.8
    assert Experiment("mnist", target=0.7).target == 0.7
    tiny = {"algorithms": ["fedavg"], "set": {"sizes": "20,30"}}
    usual, given, other = (
        plan(Experiment("synthetic_1_1", **tiny, **more)) for more in ({}, {"target": 0.7}, {"target": 0.8})
    )
    assert usual.identity == given.identity != other.identity and "target" not in given.differs
    assert "target=0.8" in other.differs


def rates(**changes):
    """(algorithm, lr, mu) of a planned comparison."""
    algorithms = ("folb", "fedprox", "fedavg", "examples/my_rule.py:softmax")
    experiment = Experiment("synthetic_1_1", algorithms=algorithms, set={"sizes": "20,30"} | changes)
    return experiment.model, [(a.name, a.solver.lr, a.solver.mu) for a in plan(experiment).algorithms]


def test_lr_is_for_all_algorithms_and_mu_for_fedprox_unless_set(monkeypatch):
    monkeypatch.setitem(data.DEFAULTS, "synthetic_1_1", data.Defaults("mlp", 0.5, 0.125))
    model, measured = rates()
    assert model == "mlp"
    own = measured[3][2]
    assert measured == [("folb", 0.5, 0.01), ("fedprox", 0.5, 0.125), ("fedavg", 0.5, 0.0), ("softmax", 0.5, own)]
    _, measured = rates(**{"local.lr": "0.2", "folb": {"local.lr": "0.3"}, "local.mu": "0.7"})
    assert measured == [("folb", 0.3, 0.7), ("fedprox", 0.2, 0.7), ("fedavg", 0.2, 0.0), ("softmax", 0.2, 0.7)]
    _, measured = rates(fedprox={"local.mu": [1, 2]})
    assert [(lr, mu) for name, lr, mu in measured if name == "fedprox"] == [(0.5, 1.0), (0.5, 2.0)]


def test_a_lr_that_an_own_algorithm_has_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(data.DEFAULTS, "synthetic_1_1", data.Defaults(lr=0.5))
    (tmp_path / "own.py").write_text("from folb import Algorithm\n\nmine = Algorithm(local={'lr': 0.25})\n")
    experiment = Experiment("synthetic_1_1", algorithms=[f"{tmp_path}/own.py:mine"], set={"sizes": "20,30"})
    assert plan(experiment).algorithms[0].solver.lr == 0.25


def test_a_model_that_is_named_is_taken():
    assert Experiment("mnist", model="cnn").model == "cnn"
    assert Experiment("shakespeare").model == Experiment("shakespeare", model="by dataset").model == "char_lstm"


# ---- notes


def test_the_note_and_the_effective_model_are_in_every_output(store, tmp_path, capsys):
    write_femnist(store / "femnist")
    command = ["compare", "femnist", "--set", "devices=5", "--algorithms", "fedprox", "--rounds", 2, "--seeds", 1]
    code, out, err = folb(capsys, *command, "--out", tmp_path / "out")
    assert code == 0, err
    assert f"femnist ({NOTE}): 5 devices" in " ".join(out.split())
    assert "model logistic" in out
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (document["note"], document["model"]) == (NOTE, "logistic")
    assert (document["runs"][0]["parameters"]["local.lr"], document["runs"][0]["parameters"]["local.mu"]) == (
        0.003,
        1.0,
    )
    toml = (tmp_path / "out" / "experiment.toml").read_text()
    assert NOTE in toml and tomllib.loads(toml)["model"] == "logistic"
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["note"] == NOTE
    assert NOTE in " ".join(folb(capsys, "show", tmp_path / "out")[1].split())


def test_the_note_is_in_the_pictures(tmp_path):
    one = np.ones(1, int)
    run = Run(
        "fedavg", {}, 0, one, one / 2, one / 2, one, one, one, one[:, None], one[:, None], one[:, None] > 1, one > 0
    )
    plot([run], tmp_path / "curves.svg", title="data, model", note="only a sample")
    assert "only a sample" in (tmp_path / "curves.svg").read_text()
    federation = data.load("synthetic_1_1", sizes=[20, 30])
    assert "2 devices, 50 samples, 25.0 ± 5.0 each" in portrait(federation, "svg").decode()


@pytest.mark.parametrize("what", ["parts", "systems", "folb"])
def test_a_list_fits_a_terminal_of_80_columns(what, monkeypatch, capsys):
    monkeypatch.setattr(tables, "console", lambda: tables.Output(width=80))
    main(["list", what])
    lines = capsys.readouterr().out.splitlines()
    assert lines and max(map(len, lines)) <= 80


def test_the_names_that_a_setting_takes_are_those_that_there_are():
    """A new part is not known to the command line until its name is in the setting's annotation."""
    from folb.core.algorithm import hints
    from folb.core.algorithms import ALGORITHMS
    from folb.core.codec import DOWN, UP
    from folb.core.drift import MEMORIES
    from folb.core.liars import ATTACKS
    from folb.core.local_step import LOCAL_STEPS
    from folb.core.robust import ROBUST
    from folb.core.samplings import SAMPLINGS
    from folb.core.server_step import SERVERS
    from folb.core.staleness import STALENESS
    from folb.core.step_size import STEP_SIZES

    def names(hint):
        if get_origin(hint) is Literal:
            return set(get_args(hint))
        return set().union(*map(names, get_args(hint)))

    common = hints()
    known = {
        "local": LOCAL_STEPS,
        "memory": MEMORIES.parts,
        "server": SERVERS.parts,
        "step_size": STEP_SIZES.parts,
        "staleness": STALENESS.parts,
        "compress_up": UP.parts,
        "compress_down": DOWN.parts,
        "robust": ROBUST.parts,
        "attack": ATTACKS.parts,
    }
    for setting, parts in known.items():
        assert names(common[setting]) == set(parts), setting
    named = algorithm_settings(ALGORITHMS["fedavg"])["select"].type
    # the others are algorithms: fednu_direct and fednu_norm
    assert names(named) == set(SAMPLINGS.parts) - {"direct", "norm"}
