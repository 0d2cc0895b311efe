"""Inputs that hurt: settings, files and places that were found by trying to break folb. Each costs one line."""

import contextlib
import gc
import gzip
import io
import math
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from folb import Federation, algorithms, models, npz, simulate, system
from folb.cli.main import main
from folb.cli.options import drop_damaged, use_compilation_cache
from folb.cli.running import interruptible
from folb.data import cache, fetch, leaf, source_files, tabular
from folb.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")

RANDOM = np.random.default_rng(0)
SAMPLES = RANDOM.normal(size=(40, 3)).astype(np.float32)
FEDERATION = Federation.from_arrays("four labels", SAMPLES, np.arange(40) % 4, np.repeat([0, 1], 20))
MODEL = models.logistic((3,), 4)


def failed(capsys, *arguments):
    """The error of a command that fails: it is one line."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("folb: error: "), lines
    return lines[0]


# -- settings ----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "K is true": (lambda: algorithms.fedavg(select={"K": True}), "select.K = True: should be a whole number"),
    "batch is true": (lambda: algorithms.fedavg(local={"batch": True}), "local.batch = True: should be a whole number"),
    "mu is true": (
        lambda: algorithms.fedprox(local={"mu": True}),
        "local.mu = True: should be at least 0, and one number",
    ),
    "mu is infinite": (
        lambda: algorithms.fedprox(local={"mu": math.inf}),
        "local.mu = inf: should be at least 0, and finite",
    ),
    "mu is infinite in 32 bits": (
        lambda: algorithms.fedprox(local={"mu": 1e39}),
        r"local.mu = 1e\+39: should be at least 0, and finite",
    ),
    "two values of mu": (
        lambda: algorithms.fedprox(local={"mu": np.array([1.0, 2.0])}),
        "local.mu = array.*, and one number",
    ),
    "lr is infinite": (
        lambda: algorithms.fedavg(local={"lr": math.inf}),
        "local.lr = inf: should be more than 0, and finite",
    ),
    "server.lr is infinite": (lambda: algorithms.fedavg(server={"lr": math.inf}), "server.lr = inf: .* and finite"),
    "psi is infinite": (lambda: algorithms.folb_hetero(rule={"psi": math.inf}), "rule.psi = inf: .* and finite"),
    "two values of psi": (
        lambda: algorithms.folb_hetero(rule={"psi": np.array([1.0, 2.0])}),
        "rule.psi = array.* and one number",
    ),
    "eps is infinite": (
        lambda: algorithms.fedavg(server={"name": "adam", "eps": math.inf}),
        "server.eps = inf: .* and finite",
    ),
    "tau is infinite": (lambda: system.deadline(tau=math.inf), "tau = inf: .* and at most"),
    "two rates of drop-out": (lambda: system.uniform(dropout=np.array([0.1, 0.2])), "dropout = array.* and one number"),
}


@pytest.mark.parametrize(("make", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_one_finite_number(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_numpy_number_is_a_number():
    assert algorithms.fedprox(local={"mu": np.float32(0.5)}, select={"K": np.int64(3)}).selection.K == 3


def test_a_batch_is_bounded_by_the_data():
    with pytest.raises(InputError, match="batch = 1000000: should be at most 1000: the largest device has 18 samples"):
        simulate(FEDERATION, MODEL, algorithms.fedavg(select={"K": 2}, local={"batch": 10**6}), rounds=1)
    whole, bounded = (
        simulate(
            FEDERATION, MODEL, algorithms.fedavg(select={"K": 2}, local={"batch": batch, "unit": "epoch"}), rounds=2
        )[0]
        for batch in (10**6, 18)
    )
    np.testing.assert_array_equal(whole.params["weight"], bounded.params["weight"])
    assert whole.parameters["local.batch"] == 10**6


def test_a_model_for_fewer_labels_than_there_are():
    with pytest.raises(InputError, match="model: classes = 2: should be at least 4, for labels from 0 to 3"):
        simulate(FEDERATION, models.logistic((3,), 2), algorithms.fedavg(select={"K": 2}), rounds=1)


@pytest.mark.parametrize("name", ["rounds", "evaluate_every"])
def test_rounds_fit_into_32_bits(name):
    counts = {"rounds": 2**31 - 1} | {name: 2**31}
    with pytest.raises(InputError, match=f"{name} = 2147483648: should be a whole number from 1 to 2147483647"):
        simulate(FEDERATION, MODEL, algorithms.fedavg(select={"K": 2}), **counts)


@pytest.mark.parametrize("name", ["median", "adam", "fedopt", "xgboost"])
def test_only_a_near_name_is_suggested(name, capsys):
    assert "did you mean" not in failed(capsys, "compare", "synthetic_1_1", "--algorithms", name)


def test_a_message_is_one_line_of_bounded_length():
    error = str(InputError("a\nfield\x1b[31m", np.zeros((3, 3)), "should be " + "x" * 10**6))
    assert len(error) <= 2000 and error.isprintable() and error.startswith(r"a field\x1b[31m = array([[0., 0., 0.],")


# -- files of settings -------------------------------------------------------------------------------------------------

DEEP = ".".join(["a"] * 3000)
TOML = {
    "a deep setting": f"dataset = 'synthetic_1_1'\n[set.folb.mu.{DEEP}]\nb = 1\n",
    "a deep dataset": f"[dataset.{DEEP}]\nb = 1\n",
    "a deep box": f"dataset = 'synthetic_1_1'\n[box.{DEEP}]\nb = 1\n",
    "deep lists": f"dataset = {'[' * 3000}{']' * 3000}\n",
    "many digits": f"dataset = 'synthetic_1_1'\nseeds = {'9' * 5000}\n",
    "a control character": 'dataset = "\\u001b[31m\\n"\n',
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_an_experiment_file_that_hurts(text, tmp_path, capsys):
    (tmp_path / "e.toml").write_text(text)
    assert len(failed(capsys, "run", tmp_path / "e.toml")) < 2100


# -- removing runs -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path))
    few = ["--set", "sizes=20,30", "--set", "select.K=2", "--rounds", "1", "--seeds", "1"]
    assert main(["compare", "synthetic_1_1", "--algorithms", "fedavg", *few]) == 0
    capsys.readouterr()
    return next(tmp_path.glob("synthetic*"))


def test_runs_are_removed_only_after_a_question(run, capsys, monkeypatch):
    assert main(["rm", "synth", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove {run}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "should be given with --yes: there is no terminal to ask on" in failed(capsys, "rm", "synth")
    for answer in ("", "n\n", "yesterday\n"):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert main(["rm", "synth"]) == 2 and "is kept: the answer was not yes" in capsys.readouterr().err
    assert run.is_dir()
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["rm", "synth"]) == 0 and not run.exists()


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def homeless(monkeypatch):
    """A user of a container, without HOME and unknown to the system."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "FOLB_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_user_without_a_home(homeless, capsys, tmp_path, monkeypatch):
    assert "HOME = None: should name a directory" in failed(capsys, "data", "list")
    use_compilation_cache()  # there is none
    monkeypatch.setenv("FOLB_DATA", str(tmp_path))
    assert source_files.directory() == tmp_path
    assert cache.directories() == [tmp_path.with_name(tmp_path.name + ".processed")]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_output(closed, tmp_path):
    def shell(command):
        return subprocess.run(
            ["sh", "-c", f"{sys.executable} -m folb {command} {closed}"], capture_output=True, text=True
        )

    listed, wrong = shell("runs"), shell("show nothing")
    assert (listed.returncode, wrong.returncode) == (0, 2)
    assert "Traceback" not in listed.stderr + wrong.stderr
    assert listed.stdout[:10] == ("" if ">&-" in closed.split() else "no runs in")
    assert wrong.stdout == "" and wrong.stderr[:12] == ("" if "2>&-" in closed else "folb: error:")


def test_a_damaged_entry_of_the_compilation_cache_is_compiled_again(tmp_path):
    code = """
from folb.cli.options import use_compilation_cache
use_compilation_cache()
import jax
print(jax.jit(lambda x: x * 2.5 + 1)(3.0))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHONWARN"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path)}

    def compiled():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)

    compiled()
    (entry,) = (path for path in tmp_path.glob("folb/compiled/*-cache") if "lambda" in path.name)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:50])
    assert compiled().stderr == "" and len(entry.read_bytes()) > 50


def test_a_warning_about_anything_else_is_shown(tmp_path, monkeypatch, capsys):
    import warnings

    seen = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *about, **more: seen.append(str(message)))
    (tmp_path / "jit_f-0-cache").write_bytes(b"")
    drop_damaged(tmp_path)
    for message in ("other", "Error reading persistent compilation cache entry for 'jit_g': ValueError: x"):
        warnings.showwarning(UserWarning(message), UserWarning, "file", 1)
    assert len(seen) == 2 and (tmp_path / "jit_f-0-cache").exists()


def test_ctrl_c_within_a_search_for_garbage_is_not_lost():
    def _xla_gc_callback(phase, about):  # as jax's own is called
        if phase == "start" and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)

    sent: list[bool] = []
    gc.disable()  # no search before it is time
    gc.callbacks.append(_xla_gc_callback)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            gc.collect(0)  # of the youngest objects: there are many others in this process
            for _ in range(100):  # it may come while this sleeps, and is noticed afterwards
                time.sleep(0.05)
    finally:
        gc.callbacks.remove(_xla_gc_callback)
        gc.enable()
    assert sent


# -- files of samples --------------------------------------------------------------------------------------------------

TABLE = {"device": pa.array([0, 0, 1, 1]), "label": pa.array([0, 1, 0, 1]), "x": pa.array([1.0, 2.0, 3.0, 4.0])}
COLUMNS = {
    "lists": pa.array([[1, 2]] * 4),
    "lists of other lengths": pa.array([[1], [1, 2]] * 2),
    "lists of a fixed length": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
    "tables": pa.array([{"a": 1}] * 4),
    "maps": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int32())),
    "bytes": pa.array([b"\xff\x00"] * 4),
    "bytes of a fixed length": pa.array([b"ab"] * 4, pa.binary(2)),
    "a dictionary of bytes": pa.array([b"\xff", b"\xfe"] * 2).dictionary_encode(),
    "nothing": pa.nulls(4),
    "a long text": pa.array(["a" * 10**5, "b", "c", "d"]),
}


@pytest.mark.parametrize("role", ["device", "label", "split", "x"])
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_column_of_parquet_that_hurts(role, column, tmp_path):
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table(TABLE | {role: column}), path)
    with pytest.raises(InputError, match=f"table.parquet: {role}"):
        tabular.load(path)


def test_columns_of_one_name(tmp_path):
    columns = pa.Table.from_arrays([*TABLE.values(), TABLE["x"]], names=[*TABLE, "x"])
    parquet.write_table(columns, tmp_path / "table.parquet")
    with pytest.raises(InputError, match=r"\['x'\]: should name every column, each once"):
        tabular.load(tmp_path / "table.parquet")


def test_a_column_with_a_name_of_many_characters(tmp_path):
    (tmp_path / "table.csv").write_text(f"device,label,{'x' * 131_073}\n0,1,2\n")
    with pytest.raises(InputError, match="field larger than field limit"):
        tabular.load(tmp_path / "table.csv")


@pytest.fixture
def little_room(monkeypatch):
    """Files that unpack to more than 100 kB, or twice their size, are too large."""
    monkeypatch.setattr(npz, "UNPACKED", 100_000)
    monkeypatch.setattr(npz, "TIMES", 2)


def test_a_small_file_that_unpacks_to_a_large_one(little_room, tmp_path):
    zeros = np.zeros((10_000, 5), np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", x=zeros, y=zeros[:, 0], device=zeros[:, 0])
    np.savez(tmp_path / "plain.npz", x=zeros, y=np.arange(10_000) % 2, device=np.arange(10_000) % 3)
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(b"device,label,x\n" + b"0,1,2\n" * 10**5))
    (tmp_path / "line.csv.gz").write_bytes(gzip.compress(b"device,label,x" + b"x" * 10**6))
    many = {name: pa.array([0] * 10**5) for name in TABLE}
    parquet.write_table(pa.table(many), tmp_path / "bomb.parquet")
    for name, load in {
        "bomb.npz": tabular.load_arrays,
        "bomb.csv.gz": tabular.load,
        "line.csv.gz": tabular.load,
        "bomb.parquet": tabular.load,
    }.items():
        assert (tmp_path / name).stat().st_size < 20_000
        with pytest.raises(InputError, match=f"{name}: bytes = .*: should be at most 100000 when unpacked"):
            load(tmp_path / name)
    assert tabular.load_arrays(tmp_path / "plain.npz").N == 3  # larger than 100 kB on the disk, too


class Endless(BaseHTTPRequestHandler):
    """Sends without an end, and does not say how much."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *arguments):
        pass


def test_a_download_without_a_length_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MOST", 10**6)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(InputError, match="bytes: should be at most 1000000"):
            fetch.download(f"http://127.0.0.1:{server.server_port}/x", tmp_path / "x")
        server.shutdown()
    assert list(tmp_path.iterdir()) == []


# -- generated ---------------------------------------------------------------------------------------------------------

HURTS = [
    *(math.nan, math.inf, -math.inf, -1, -1e300, 1e300, 10**400, True, None, "", "nan", "x" * 10**5, "\x1b[2J", b"1"),
    *([], [1.0], {}, {"a": {}}, object(), np.zeros((2, 2)), np.array([1.0, math.nan]), 1j, range(3), lambda: 1),
]
NUMBERS = {
    "fedprox": ("local.mu", "local.lr", "select.K", "local.batch", "server.lr"),
    "folb_hetero": ("local.mu", "rule.psi", "local.lr", "select.K", "local.batch"),
    "feddyn": ("memory.alpha", "local.lr", "select.K"),
    "accord": ("step_size.gain", "step_size.goal", "local.lr", "server.stretch"),
}
HARMLESS = {"step_size.goal": -1}


def hostile_setting(random):
    """A setting with a value that it cannot have; None means the default, which is no mistake."""
    name = random.choice(sorted(NUMBERS))
    setting, value = random.choice(NUMBERS[name]), random.choice(HURTS)
    sound = value is None or value is HARMLESS.get(setting)
    getattr(algorithms, name)(**{setting: math.nan if sound else value})


WHOLE = {
    ".csv": b"device,label,a,b\n0,0,1.5,2\n0,1,2,3\n1,0,3,4\n1,1,4,5\n",
    ".json": b'{"users":["a"],"num_samples":[2],"user_data":{"a":{"x":[[1.0],[2.0]],"y":[0,1]}}}',
    ".npz": b"",
}


def hostile_file(random, folder):
    """A file of samples with some bytes changed, moved, repeated or missing. It may still be sound."""
    suffix = random.choice(sorted(WHOLE))
    content = bytearray(WHOLE[suffix] or packed())
    for _ in range(random.randint(1, 6)):
        place, size = random.randrange(len(content)), random.randint(1, 20)
        change = random.choice(["cut", "noise", "repeat", "word"])
        if change == "cut" and len(content) > 2 * size:
            del content[place : place + size]
        elif change == "noise":
            content[place : place + size] = random.randbytes(size)
        elif change == "repeat":
            content[place:place] = content[place : place + size] * random.randint(1, 50)
        else:
            content[place:place] = random.choice(
                [b"nan", b"1e999", b'"', b",", b"[" * 2000, b"\xff", b"\0", b"-1", b"{"]
            )
    path = folder / f"file{suffix}"
    path.write_bytes(content)
    load = {".csv": tabular.load, ".json": leaf.load, ".npz": tabular.load_arrays}[suffix]
    load(path)
    raise InputError("sound", 0, "after all")


def packed():
    stream = io.BytesIO()
    np.savez(stream, x=SAMPLES, y=np.arange(40) % 4, device=np.repeat([0, 1], 20))
    return stream.getvalue()


def hostile_toml(random, folder):
    """An experiment file with values that hurt."""
    keys = random.sample(["dataset", "rounds", "seeds", "algorithms", "target", "set", "box", "model", "system"], 3)
    values = [
        "nan",
        "-1",
        "9" * 30,
        "true",
        "'x'",
        "[]",
        "[[1]]",
        "{a = {b = 1}}",
        "'\\u001b'",
        "1979-05-27",
        "''",
        "inf",
    ]
    text = "dataset = 'nothing like it'\n" if "dataset" not in keys else ""
    path = folder / "e.toml"
    path.write_text(text + "\n".join(f"{key} = {random.choice(values)}" for key in keys))
    if main(["run", str(path)]) == 2:
        raise InputError("toml", path, "exit code 2")


def rejected_alone(seed, folder, capsys):
    random = Random(seed)
    attempt = random.choice([hostile_setting, hostile_file, hostile_toml])
    with pytest.raises(InputError) as error:
        attempt(*([random] if attempt is hostile_setting else [random, folder]))
    assert str(error.value).isprintable() and len(str(error.value)) <= 2000
    said = capsys.readouterr().err
    assert said == "" or (said.startswith("folb: error: ") and said.count("\n") == 1)


def test_generated_inputs_are_rejected_alone(tmp_path, capsys):
    for seed in range(60):
        rejected_alone(seed, tmp_path, capsys)


def test_a_thousand_generated_inputs_are_rejected_alone(tmp_path, capsys):
    for seed in range(1000, 2000):
        rejected_alone(seed, tmp_path, capsys)
