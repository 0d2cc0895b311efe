"""Damaged run directories: sound parts are shown, and one line says what is wrong."""

import functools
import json
import math
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import rundirectory

from folb.cli import main
from folb.errors import InputError
from folb.report import live
from folb.store import directory

NAME, OTHER = "damaged-0123abcd", "other-4567cdef"
ROUNDS, RUNS = 6, 4  # recorded rounds of each run, and runs
EXPERIMENT, ENVIRONMENT, LINES = "experiment.toml", "environment.json", "rounds.jsonl"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A finished run, with all that a directory may have."""
    path = rundirectory.write(
        tmp_path_factory.mktemp("sound"), NAME, algorithms=("folb", "fedavg"), seeds=2, rounds=ROUNDS, chosen=9
    )
    (path / "curves.png").write_bytes(b"\x89PNG")
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "0-000000003.checkpoint").write_bytes(b"left by a crash")
    return path


# ways to do damage: each makes a function of the directory -----------------------------------------------------------


def missing(name):
    return lambda path: shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()


def content(name, value):
    return lambda path: (path / name).write_bytes(value)


def half(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[: (path / name).stat().st_size // 2])


def folder(name):
    def damage(path):
        (path / name).unlink()
        (path / name).mkdir()

    return damage


def dangling(name):
    def damage(path):
        (path / name).unlink()
        (path / name).symlink_to(path / "nowhere")

    return damage


def pipe(name):
    """Nobody writes to it: to open it would wait for ever."""

    def damage(path):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return damage


def appended(name, value):
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + value)


def field(name, value):
    """given.json with another value; `...` for none."""

    def damage(path):
        given = json.loads((path / ENVIRONMENT).read_bytes()) | {name: value}
        (path / ENVIRONMENT).write_text(json.dumps({key: value for key, value in given.items() if value is not ...}))

    return damage


def of_run(name, value):
    """The same of its second run."""

    def damage(path):
        runs = json.loads((path / ENVIRONMENT).read_bytes())["runs"]
        runs[1][name] = value
        runs[1] = {key: value for key, value in runs[1].items() if value is not ...}
        field("runs", runs)(path)

    return damage


def setting(name, text):
    """experiment.toml with another value; without the key if there is no text."""

    def damage(path):
        lines = (path / EXPERIMENT).read_text().splitlines()
        lines = [f"{name} = {text}" if line.startswith(f"{name} = ") else line for line in lines]
        (path / EXPERIMENT).write_text("\n".join(line for line in lines if text or line != f"{name} = "))

    return damage


def line(**changes):
    """One line of rounds.jsonl with other values; `...` for none."""

    def damage(path):
        lines = (path / LINES).read_text().splitlines()
        changed = json.loads(lines[5]) | changes
        lines[5] = json.dumps({key: value for key, value in changed.items() if value is not ...})
        (path / LINES).write_text("\n".join(lines) + "\n")

    return damage


def raw_line(value):
    def damage(path):
        lines = (path / LINES).read_bytes().splitlines()
        lines[5] = value
        (path / LINES).write_bytes(b"\n".join(lines) + b"\n")

    return damage


# the message; none if all of it can be used
NOTHING = None
NO_ENVIRONMENT = "run = 'damaged-0123abcd': is not a run: there is no .*/damaged-0123abcd/environment.json"
CANNOT = "run = 'damaged-0123abcd': .*/damaged-0123abcd/environment.json cannot be read"
NO_EXPERIMENT = "experiment = .*/damaged-0123abcd/experiment.toml cannot be read"
EMPTY = "has no evaluated round yet"  # said by export --format latex alone

DEEP, GARBAGE = b"[" * 100_000, bytes(range(128, 256)) * 20

FILES = {
    "no environment": (missing(ENVIRONMENT), NO_ENVIRONMENT),
    "empty environment": (content(ENVIRONMENT, b""), CANNOT),
    "half an environment": (half(ENVIRONMENT), CANNOT),
    "environment of garbage": (content(ENVIRONMENT, GARBAGE), CANNOT),
    "environment in Latin-1": (content(ENVIRONMENT, '{"folb": "é"}'.encode("latin-1")), CANNOT),
    "environment nested too deep": (content(ENVIRONMENT, DEEP), CANNOT),
    "environment with a number too long": (content(ENVIRONMENT, b"1" * 5000), CANNOT),
    "environment is a list": (content(ENVIRONMENT, b"[]"), "environment.json = .*should be a table"),
    "environment is null": (content(ENVIRONMENT, b"null"), "environment.json = None: .*should be a table"),
    "environment is a directory": (folder(ENVIRONMENT), CANNOT),
    "environment is a pipe": (pipe(ENVIRONMENT), CANNOT + ": not a regular file"),
    "environment is a dangling link": (dangling(ENVIRONMENT), NO_ENVIRONMENT),
    "environment is a link to itself": (
        lambda path: (missing(ENVIRONMENT)(path), (path / ENVIRONMENT).symlink_to(ENVIRONMENT)),
        CANNOT,
    ),
    "no experiment": (missing(EXPERIMENT), NO_EXPERIMENT),
    "empty experiment": (content(EXPERIMENT, b""), "experiment.toml: dataset = None: should be a text"),
    "half an experiment": (half(EXPERIMENT), "experiment"),
    "experiment of garbage": (content(EXPERIMENT, GARBAGE), NO_EXPERIMENT),
    "experiment in Latin-1": (content(EXPERIMENT, '# é\ndataset = "x"'.encode("latin-1")), NO_EXPERIMENT),
    "experiment nested too deep": (content(EXPERIMENT, b"dataset = " + DEEP), NO_EXPERIMENT),
    "experiment with a number too long": (content(EXPERIMENT, b"rounds = " + b"1" * 5000), NO_EXPERIMENT),
    "experiment is a directory": (folder(EXPERIMENT), NO_EXPERIMENT),
    "experiment is a pipe": (pipe(EXPERIMENT), NO_EXPERIMENT + ": not a regular file"),
    "experiment is a dangling link": (dangling(EXPERIMENT), NO_EXPERIMENT),
    "no rounds": (missing(LINES), EMPTY),
    "empty rounds": (content(LINES, b""), EMPTY),
    "rounds are a dangling link": (dangling(LINES), EMPTY),
    "rounds are a directory": (folder(LINES), "rounds.jsonl cannot be read: Is a directory"),
    "rounds are a pipe": (pipe(LINES), "rounds.jsonl cannot be read: not a regular file"),
    "a torn last line": (appended(LINES, b'{"run": 0, "rou'), NOTHING),
    "no results": (missing("results.json"), NOTHING),
    "empty results": (content("results.json", b""), NOTHING),
    "results of garbage": (content("results.json", GARBAGE), NOTHING),
    "results are a directory": (folder("results.json"), NOTHING),
    "results are a pipe": (pipe("results.json"), NOTHING),
    "results are a dangling link": (dangling("results.json"), NOTHING),
    "no picture": (missing("curves.png"), NOTHING),
    "picture of garbage": (content("curves.png", GARBAGE), NOTHING),
    "no checkpoints": (missing("checkpoints"), NOTHING),
    "checkpoints are a file": (lambda path: (missing("checkpoints")(path), (path / "checkpoints").touch()), NOTHING),
    "a lock of garbage": (content(".folb-lock", GARBAGE), NOTHING),
    "a lock is a pipe": (pipe(".folb-lock"), NOTHING),
    "a lock is a directory": (lambda path: (path / ".folb-lock").mkdir(), NOTHING),
}
FIELDS = {
    **{
        f"environment without {name}": (field(name, ...), f"environment.json: {name} = None: should be")
        for name in ("folb", "jax", "device", "command", "started", "note", "identity", "devices", "runs")
    },
    **{
        f"devices are {value}": (field("devices", value), "environment.json: devices = .*should be a whole number")
        for value in ("nine", -1, 10**30, 2.5, math.nan, True, None)
    },
    "started is a number": (field("started", 2026), "environment.json: started = 2026: should be a text"),
    "note is a list": (field("note", []), r"environment.json: note = \[\]: should be a text"),
    "note is half a character": (field("note", "\ud800"), CANNOT),
    "an unknown field is half a character": (field("more", {"a": ["\udfff"]}), CANNOT),
    "carrier is a number": (field("carrier", 5), "environment.json: carrier = 5: should be a text"),
    "stream is a text": (field("stream", "no"), "environment.json: stream = 'no': should be true or false"),
    "accelerators are a list": (field("accelerators", [1]), "environment.json: accelerators = .*whole number"),
    "runs are a table": (field("runs", {}), "environment.json: runs = {}: should be a list"),
    "runs are numbers": (field("runs", [1]), r"environment.json: runs\[0\] = 1: should be a table"),
    "a run without a name": (of_run("name", ...), r"environment.json: runs\[1\].name = None: should be a text"),
    "a run's algorithm is null": (of_run("algorithm", None), r"runs\[1\].algorithm = None: should be a text"),
    "a run's seed is negative": (of_run("seed", -1), r"runs\[1\].seed = -1: should be a whole number"),
    "a run's seed is huge": (of_run("seed", 10**30), r"runs\[1\].seed = .*should be a whole number"),
    "a run's parameters are a list": (of_run("parameters", []), r"runs\[1\].parameters = \[\]: should be a table"),
    "a run's parameters are of any kind": (of_run("parameters", {"a": [None, {"b": math.inf}]}), NOTHING),
    **{
        f"experiment without {name}": (setting(name, ""), f"experiment.toml: {name} = None: should be")
        for name in ("dataset", "model", "system", "objective", "algorithms", "rounds", "seeds", "target", "records")
    },
    **{
        f"rounds are {text}": (setting("rounds", text), "experiment.toml: rounds = .*should be a whole number")
        for text in ("0", "-3", "1e3", "'many'", "nan", "true", str(10**15))
    },
    **{
        f"target is {text}": (
            setting("target", text),
            "experiment.toml: target = .*should be more than 0 and at most 1",
        )
        for text in ("nan", "-1", "inf", "'high'", "[0.7]")
    },
    "seeds are texts": (setting("seeds", "['a']"), "experiment.toml: seeds = .*should be a list"),
    "seeds are a number": (setting("seeds", "3"), "experiment.toml: seeds = 3: should be a list"),
    "dataset is a number": (setting("dataset", "5"), "experiment.toml: dataset = 5: should be a text"),
    "set is a number": (
        lambda path: content(EXPERIMENT, b"set = 3\n" + (path / EXPERIMENT).read_bytes().partition(b"\n[set")[0])(path),
        "experiment.toml: set = 3: should be a table",
    ),
}
# each of these damages its own line only
IN_A_LINE = {
    "garbage": raw_line(b"\xff\xfe\x00garbage"),
    "half a line": raw_line(b'{"run": 0, "rou'),
    "an empty line": raw_line(b""),
    "a list": raw_line(b"[1, 2]"),
    "a number": raw_line(b"7"),
    "null": raw_line(b"null"),
    "nested too deep": raw_line(DEEP),
    "a number too long": raw_line(b'{"run": ' + b"1" * 5000 + b"}"),
    **{f"without {name}": line(**{name: ...}) for name in ("run", "round", "bytes_up", "seconds", "updated", "lost")},
    **{f"run is {value}": line(run=value) for value in (RUNS, -1, "0", None, True, 0.5, [0], {})},
    **{f"round is {value}": line(round=value) for value in (0, -1, 1.5, "1", None, 10**30, True)},
    **{f"bytes are {value}": line(bytes_up=value) for value in (-1, 1.5, "many", 10**30, None)},
    **{f"seconds are {value}": line(seconds=value) for value in (-1, math.nan, math.inf, 1e30, "5", [])},
    "updated is a number": line(updated=2),
    "lost is negative": line(lost=-1),
    **{f"accuracy is {value}": line(test_accuracy=value) for value in (math.nan, 1e300, 10**40, "0.5", [], True)},
    **{f"loss is {value}": line(train_loss=value) for value in (math.inf, 1e39, "low", {})},
    **{f"devices are {value}": line(devices=value) for value in (None, 3, "0", [], [-1], [0.5], [None], [10**12])},
    "no devices, but their weights": line(devices=...),
    **{f"without {name}": line(**{name: ...}) for name in ("times", "lost_devices", "rejected_devices")},
    **{f"too few {name}": line(**{name: [1]}) for name in ("times", "weights", "gamma")},
    **{f"too many {name}": line(**{name: [1] * 99}) for name in ("times", "weights", "gamma")},
    "times are fractions": line(times=[0.5] * 9),
    "weights are texts": line(weights=["a"] * 9),
    "gamma is huge": line(gamma=[1e300] * 9),
    "a lost device is none of the devices": line(lost_devices=[77]),
    "a rejected device is none of the devices": line(rejected_devices=[77]),
    "lost devices are a number": line(lost_devices=3),
    "rejected devices are lists": line(rejected_devices=[[0]]),
    "refused is a text": line(refused="all"),
    "refused are numbers": line(refused=[1, 2]),
    "refused are threes": line(refused=[[1, "a", "b"]]),
    "failed without a reason": line(failed=[[1, None]]),
    "failed in half a character": line(failed=[[1, "\ud800"]]),
    "abandoned is a number": line(abandoned=3),
}
HARMLESS = {
    "accuracy is null": line(test_accuracy=None),
    "loss is null": line(train_loss=None),
    "no loss": line(train_loss=...),
    "seconds are null": line(seconds=None),
    "a loss as large as it can be": line(train_loss=3.4028234663852886e38),
    "another algorithm and seed": line(algorithm=5, seed="x"),
    "a round twice": line(round=1),
    "a round far ahead": line(round=2**31 - 1),
    "more than is known": line(more={"a": 1}),
    "nothing of the devices": line(
        **dict.fromkeys(("devices", "times", "weights", "gamma", "lost_devices", "rejected_devices"), ...)
    ),
}
KINDS = (
    FILES
    | FIELDS
    | {f"a line: {name}": (damage, "left out 1 damaged line") for name, damage in IN_A_LINE.items()}
    | {f"a line: {name}": (damage, NOTHING) for name, damage in HARMLESS.items()}
)


def state(home):
    """All that is on disk."""
    contents = {}
    for folder, folders, names in os.walk(home):
        for name in (*folders, *names):
            path = Path(folder, name)
            contents[path] = path.read_bytes() if path.is_file() else os.readlink(path) if path.is_symlink() else None
    return contents


PARSER = functools.cache(main.parser)  # as slow to make as all the rest


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(main, "parser", PARSER)
    rundirectory.write(tmp_path / "runs", OTHER, algorithms=("folb",), seeds=1, rounds=2)
    return tmp_path / "runs"


def commands(name, output):
    yield ["show", name]
    yield ["report", name, "-o", f"{output}.html"]
    yield ["export", name, "--format", "parquet", "-o", f"{output}.parquet"]
    yield ["export", name, "--format", "latex"]
    yield ["export", name, "--format", "csv"]


def states(listing):
    """What `folb runs` says of each run."""
    rows = [row.split() for row in listing.splitlines() if not row.startswith((" ", "run "))]
    return {name: state for name, state, *_ in rows}


def test_there_are_many_kinds():
    assert len(KINDS) > 140


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_directory_is_shown_or_explained(kind, sound, home, tmp_path, capsys, caplog):
    pytest.importorskip("pyarrow", reason="needs pip install 'folb[parquet]'")
    damage, said = KINDS[kind]
    shutil.copytree(sound, home / NAME)
    damage(home / NAME)
    before, explained = state(home), []

    assert main.main(["runs"]) == 0
    shown = capsys.readouterr()
    assert states(shown.out)[OTHER] == "finished" and "Traceback" not in shown.err
    for command in (["show", str(home / NAME)], *commands(NAME, tmp_path / "out")):
        code, (out, err) = main.main(command), capsys.readouterr()
        if code:
            assert code == 2 and err.startswith("folb: error: ") and len(err.splitlines()) == 1, command
            explained.append(err)
    try:
        news = live.Following(home / NAME).news("", "1")
        json.dumps(news, allow_nan=False)
    except InputError as error:
        explained.append(f"{error}\n")
    assert live._entry(NAME, home / NAME, live.Following(home / NAME))["name"] == NAME

    assert state(home) == before
    if said is None:
        assert not explained and not caplog.text
    elif said.startswith("left out"):
        assert not explained and said in caplog.text
        assert len(out.splitlines()) == 1 + ROUNDS * RUNS - 1  # of the csv
    else:
        assert explained and {bool(re.search(said, err)) for err in explained} == {True}


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_directory_that_cannot_be_looked_into_hides_no_other(error, home, capsys, monkeypatch):
    """Another user's run in a shared FOLB_RUNS. It is simulated: root, who may run these tests, can read all."""
    closed = rundirectory.write(home, "closed-1", rounds=1)

    def refusing(call):
        def look(path, *arguments, **settings):
            if closed in path.parents:
                raise error
            return call(path, *arguments, **settings)

        return look

    for name in ("stat", "lstat", "read_bytes"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    assert main.main(["runs"]) == 0
    assert states(capsys.readouterr().out) == {OTHER: "finished", "closed-1": "unreadable"}
    assert main.main(["show", "last"]) == 0
    assert OTHER in capsys.readouterr().out  # though the other one is newer
    assert main.main(["show", "closed-1"]) == 2
    assert f"environment.json cannot be read: {error.strerror}" in capsys.readouterr().err
    server = live.Server(None, 0)
    try:
        assert list(server.runs()) == [OTHER, "closed-1"]
    finally:
        server.server_close()


def test_a_directory_removed_while_it_is_listed(home, capsys, monkeypatch):
    gone = rundirectory.write(home, "gone-1", rounds=1)
    stat = Path.stat

    def removed(path, **settings):
        if path == gone:
            shutil.rmtree(gone, ignore_errors=True)
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", removed)
    assert [path.name for path in directory.listed()] == [OTHER]
    assert main.main(["show", "last"]) == 0


def test_a_directory_removed_after_it_was_listed(home, capsys, monkeypatch):
    gone = rundirectory.write(home, "gone-1", rounds=1)
    paths = directory.listed()
    shutil.rmtree(gone)
    monkeypatch.setattr(directory, "listed", lambda: paths)
    assert main.main(["runs"]) == 0
    assert states(capsys.readouterr().out) == {OTHER: "finished", "gone-1": "unreadable"}


def test_links_that_lead_nowhere_are_not_runs(home):
    (home / "loop").symlink_to("loop")
    (home / "nowhere").symlink_to("nothing")
    (home / "a file").touch()
    assert [path.name for path in directory.listed()] == [OTHER]


def test_runs_that_are_no_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert main.main(["runs"]) == 2
    assert "FOLB_RUNS = " in capsys.readouterr().err
    server = live.Server(None, 0)
    try:
        assert server.runs() == {}
    finally:
        server.server_close()


def test_the_live_page_is_told_what_is_wrong(sound, home):
    shutil.copytree(sound, home / NAME)
    setting("rounds", "-3")(home / NAME)
    with live.Server(None, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://{live.ADDRESS}:{server.server_port}/data/{NAME}")
        finally:
            server.shutdown()
    with refused.value as answer:
        assert answer.code == 404
        assert "experiment.toml: rounds = -3: should be a whole number" in answer.read().decode()
