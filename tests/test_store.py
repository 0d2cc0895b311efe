"""The run directory: it survives failures of the process and of the disk, and says what is in it."""

import errno
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from folb import atomic
from folb.cli.main import main
from folb.errors import InputError
from folb.experiments import execute
from folb.experiments.experiment import Experiment, from_toml, to_toml
from folb.experiments.plan import plan
from folb.simulation import stacked
from folb.store import directory, run_arrays
from folb.store.round_lines import Recorder

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = {"sizes": [20, 30, 40], "select.K": 2}


def run(path, planned, observe=None):
    return execute.execute(planned, directory=path, observe=observe)


@pytest.fixture(scope="module")
def planned():
    return plan(Experiment("synthetic_1_1", algorithms=["folb"], rounds=30, seeds=2, records=True, set=TINY))


@pytest.fixture(scope="module")
def whole(planned, tmp_path_factory):
    """The directory of a run that was left alone."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run(path, planned)
    return path


@pytest.fixture
def often(monkeypatch):
    """A checkpoint after every chunk, and chunks whose lengths do not depend on the machine: 1, 4, 16, 9."""
    monkeypatch.setattr(run_arrays, "SECONDS", -1.0)
    monkeypatch.setattr(run_arrays, "SHARE", 1e9)
    monkeypatch.setattr(stacked, "CHUNK_SECONDS", 1e6)


def heard(path, planned):
    """Run it, and tell what was observed: run, first round, number of rounds."""
    seen = []
    run(path, planned, lambda i, first, part: seen.append((i, first, len(part.seconds))))
    return seen


# what is in it


def test_a_run_directory_explains_itself(whole, planned):
    assert sorted(p.name for p in whole.iterdir()) == [
        "curves.png",
        "environment.json",
        "experiment.toml",
        "model.npz",
        "results.json",
        "rounds.jsonl",
    ]
    stored = directory.read(whole)
    assert stored.state == "finished"
    assert stored.environment["jax"] == jax.__version__ and stored.environment["devices"] == 3
    lines, end = stored.rounds()
    assert end == (whole / "rounds.jsonl").stat().st_size
    assert [line["round"] for line in lines if line["run"] == 1] == list(range(1, 31))
    assert len(lines) * 400 + sum(60 * len(line["devices"]) for line in lines) > end  # as --help says


def test_the_rounds_on_disk_are_those_of_the_run(whole, planned):
    runs = execute.ready(planned).run()
    for live, kept in zip(runs, directory.read(whole).runs(), strict=True):
        assert (live.algorithm, live.parameters, live.seed) == (kept.algorithm, kept.parameters, kept.seed)
        for name in ("evaluated_rounds", "test_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds", "updated"):
            np.testing.assert_array_equal(getattr(live, name), getattr(kept, name))
        for t in range(len(live.seconds)):
            used = live.times[t] > 0
            weights = dict(zip(live.devices[t][used], live.records["weights"][t][used], strict=True))
            there = kept.times[t] > 0
            assert weights == dict(zip(kept.devices[t][there], kept.records["weights"][t][there], strict=True))


def test_its_name_comes_from_the_content(planned, monkeypatch, tmp_path):
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path))
    same = plan(
        Experiment(
            "synthetic_1_1", algorithms=("folb",), rounds=30, seeds=[0, 1], records=True, set=TINY | {"local.lr": 0.01}
        )
    )
    assert execute.place(same) == execute.place(planned)  # 0.01 is what lr is by default
    other = plan(
        Experiment(
            "synthetic_1_1", algorithms=["folb"], rounds=30, seeds=2, records=True, set=TINY | {"local.lr": 0.02}
        )
    )
    assert execute.place(other) != execute.place(planned)


def test_changed_data_and_changed_files_are_other_experiments(tmp_path):
    def identity(labels, rule):
        np.savez(tmp_path / "mine.npz", x=np.eye(8), y=labels, device=np.arange(8) % 2)
        (tmp_path / "own.py").write_text(f"import folb\nown = folb.algorithms.fedavg()\n# {rule}")
        algorithms = [f"{tmp_path / 'own.py'}:own"]
        return plan(Experiment(str(tmp_path / "mine.npz"), algorithms=algorithms, rounds=1, seeds=1)).identity

    labels = np.arange(8) % 2
    first = identity(labels, "one")
    assert identity(labels, "one") == first
    assert identity(labels, "two") != first
    assert identity(1 - labels, "one") != first


SYSTEM = """
from folb.core.system import Effort

def own(*, work=2):
    def effort(home, draws, cost):
        return Effort(work + {more}, 1.0 * cost, draws[1] < 0)
    return effort

def failing(*, work=2):
    return 1 / 0

def empty():
    return None
"""


def test_a_changed_system_of_one_s_own_is_another_experiment(tmp_path, monkeypatch):
    def planned(spec, more=0):
        (tmp_path / "mine.py").write_text(SYSTEM.format(more=more))
        return plan(
            Experiment("synthetic_1_1", algorithms=["fedavg"], system=spec, rounds=2, seeds=1, set={"sizes": [20, 30]})
        )

    first = planned(f"{tmp_path / 'mine.py'}:own")
    assert planned(f"{tmp_path / 'mine.py'}:own", more=0).identity == first.identity
    assert planned(f"{tmp_path / 'mine.py'}:own", more=1).identity != first.identity
    monkeypatch.chdir(tmp_path)  # and it can be repeated from anywhere
    assert planned("mine.py:own").identity == first.identity
    assert planned("mine.py:own").experiment.system == f"{tmp_path / 'mine.py'}:own"
    assert execute.execute(first).runs()[0].updated.all()


def test_a_failing_system_of_one_s_own_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(SYSTEM.format(more=0))
    for name, said in (
        ("failing", "fails: ZeroDivisionError"),
        ("empty", r"should make a function \(home, draws, cost"),
    ):
        with pytest.raises(InputError, match=f"^{name} = .*{said}"):
            plan(Experiment("synthetic_1_1", system=f"{tmp_path / 'mine.py'}:{name}", rounds=2, seeds=1))


def test_the_experiment_file_is_the_whole_experiment(planned, whole):
    again = from_toml(whole / "experiment.toml")
    assert again == planned.experiment
    assert plan(again).identity == planned.identity
    assert again.set["folb"]["local.mu"] == 0.01 and "server.beta" not in again.set["folb"]
    assert to_toml(plan(again).experiment) == to_toml(planned.experiment)


def test_find_by_name_beginning_and_path(whole, monkeypatch):
    monkeypatch.setenv("FOLB_RUNS", str(whole.parent))
    assert directory.find("run") == directory.find("r") == whole == directory.find(str(whole))
    with pytest.raises(InputError, match="run = 'x': there is no such run"):
        directory.find("x")
    (whole.parent / "runner").symlink_to(whole)
    with pytest.raises(InputError, match="could be any of run, runner"):
        directory.find("r")
    assert directory.find("run") == whole
    (whole.parent / "runner").unlink()


# what can happen to it


class Full:
    """A disk that is full from the nth operation on; a write then writes half of its bytes."""

    def __init__(self, patch, left):
        self.left = left
        for name in ("write", "fsync", "replace", "mkdir", "open"):
            patch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, real):
        def call(*arguments, **options):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **options)
            self.left -= 1
            if self.left < 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_at_any_write(step, planned, whole, often, tmp_path, monkeypatch):
    """Whichever write fails, what is there can be read, and the run resumes from there to the same results."""
    monkeypatch.setattr(jax, "make_jaxpr", lambda program: lambda *inputs: "the text of a program takes long")
    path, n, resumed = tmp_path / "run", 0, 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            disk = Full(patch, n)
            try:
                run(path, planned)
            except (OSError, InputError) as error:
                assert getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if disk.left >= 0:
                break
        before = []
        if (path / directory.ENVIRONMENT).exists():
            stored = directory.read(path)
            before = stored.rounds()[0]
            stored.runs()
            assert stored.state in ("interrupted", "finished")
        seen = [(0, 1, 30)] if execute.finished(path, planned) else heard(path, planned)
        assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()
        after = [json.dumps(line) for line in directory.read(path).rounds()[0]]
        assert set(map(json.dumps, before)) <= set(after) and len(after) == 60  # no recorded round is lost
        # what was played again is at most the chunk in flight: 16 rounds at the most
        kept = next(length for i, first, length in seen if i == 0 and first == 1)
        played = max((line["round"] for line in before), default=0)
        assert played - kept <= 16
        resumed += kept > 1
        assert not [p.name for p in path.iterdir() if p.name.endswith(".part") or p.name == directory.LOCK]
        directory.remove(path)
        n += step
    assert n > 40 and resumed > 10 / step, (n, resumed)


def test_checkpoints_damaged_in_300_ways(tmp_path, caplog):
    """A damaged checkpoint is never loaded without a warning, and the one before it is used instead."""
    tree = {"w": np.arange(60, dtype=np.float32).reshape(6, 10), "n": np.int32(3)}
    for t in (2, 3, 4, 5):
        run_arrays.save_checkpoint(tmp_path, 0, "mark", t, jax.tree.map(lambda v, t=t: v * t, tree))
    assert [path.name for path in run_arrays.checkpoints(tmp_path, 0)] == [
        f"0-00000000{t}.checkpoint" for t in (5, 4, 3)
    ]
    assert run_arrays.load_checkpoint(tmp_path, 0, "another simulation", tree) is None
    last = run_arrays.checkpoints(tmp_path, 0)[0]
    content = last.read_bytes()
    rng = random.Random(0)
    for case in range(300):
        damaged = bytearray(content)
        at = rng.randrange(len(content))
        match case % 6:
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                del damaged[at:]
            case 2:
                damaged[at : at + 64] = bytes(64)
                if damaged == content:
                    damaged[0] ^= 1
            case 3:
                damaged += bytes([rng.randrange(256)])
            case 4:
                del damaged[at]
            case 5:
                damaged[at:at] = bytes([rng.randrange(256)])
        last.write_bytes(damaged)
        caplog.clear()
        t, loaded = run_arrays.load_checkpoint(tmp_path, 0, "mark", tree)
        assert t == 4 and np.array_equal(loaded["w"], 4 * tree["w"])
        assert "is damaged; trying the one before" in caplog.text
    last.write_bytes(content)
    assert run_arrays.load_checkpoint(tmp_path, 0, "mark", tree)[0] == 5


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_checkpoint_of_more_or_fewer_arrays_is_passed_over(tmp_path, caplog, count):
    """As another version of folb may have left it."""
    tree = {"w": np.arange(3.0), "n": np.int32(3)}
    run_arrays.save_checkpoint(tmp_path, 0, "mark", 2, tree)
    run_arrays.save_checkpoint(tmp_path, 0, "mark", 3, [np.zeros(2)] * count)
    t, loaded = run_arrays.load_checkpoint(tmp_path, 0, "mark", tree)
    assert t == 2 and np.array_equal(loaded["w"], tree["w"])
    assert f"0-000000003.checkpoint has {count} arrays, but should have 2; trying the one before" in caplog.text


def interrupted(path, planned):
    """The directory of a run that was stopped soon after its fifth round."""

    def stop(i, first, part):
        if first > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, planned, stop)
    return path


def test_a_damaged_checkpoint_costs_a_chunk_and_no_result(planned, whole, often, tmp_path, caplog):
    path = interrupted(tmp_path / "run", planned)
    latest, *others = sorted((path / directory.CHECKPOINTS).iterdir(), reverse=True)
    assert len(others) == 2 and directory.read(path).state == "interrupted"
    latest.write_bytes(latest.read_bytes()[:-7])
    assert heard(path, planned)[0] == (0, 1, 5) and "is damaged" in caplog.text
    assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


@pytest.mark.parametrize("gone", [False, True])
def test_damaged_checkpoints_lose_no_recorded_round(planned, whole, often, tmp_path, gone):
    """They are computed again to the same bits, and the record never gets shorter."""
    path = interrupted(tmp_path / "run", planned)
    for file in (path / directory.CHECKPOINTS).iterdir():
        if gone:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-7])
    recorded = (path / "rounds.jsonl").read_bytes()
    sizes = []
    execute.execute(planned, directory=path, observe=lambda *part: sizes.append((path / "rounds.jsonl").read_bytes()))
    assert recorded and all(now.startswith(recorded) for now in sizes)
    assert sorted((path / "rounds.jsonl").read_text().splitlines()) == sorted(
        (whole / "rounds.jsonl").read_text().splitlines()
    )
    assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_a_run_of_other_accelerators_is_not_replaced(planned, often, tmp_path):
    path = interrupted(tmp_path / "run", planned)
    there = json.loads((path / "environment.json").read_bytes())
    for key, value in (("accelerators", 4), ("stream", True)):
        (path / "environment.json").write_text(json.dumps(there | {key: value}))
        before = sorted((path / directory.CHECKPOINTS).iterdir())
        with pytest.raises(InputError, match=f"^{key} = .*should be {value}, as when it began; --again"):
            run(path, planned)
        assert sorted((path / directory.CHECKPOINTS).iterdir()) == before and before


def test_rounds_of_another_version_are_said_not_to_count(planned, often, tmp_path, caplog):
    path = tmp_path / "run"
    path.mkdir()
    execute.prepare(path, planned)
    there = json.loads((path / "environment.json").read_bytes())
    (path / "environment.json").write_text(json.dumps(there | {"jax": "0.0.1"}))
    execute.prepare(path, planned)
    assert "because its rounds were made with jax 0.0.1, now" in caplog.text


def test_torn_and_damaged_lines_are_left_out_and_written_again(planned, whole, tmp_path):
    lines = (whole / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    runs = directory.read(whole).environment["runs"]
    (tmp_path / "rounds.jsonl").write_bytes(
        b"".join(lines[:3]) + b'{"run": 0, "rou\n' + b"".join(lines[5:9]) + lines[9][:20]
    )
    with Recorder(tmp_path, runs) as recorder:
        recorder.add(1, dict(enumerate(directory.read(whole).runs())))
    (tmp_path / "environment.json").write_bytes((whole / "environment.json").read_bytes())
    written = directory.read(tmp_path).runs()
    for a, b in zip(written, directory.read(whole).runs(), strict=True):
        np.testing.assert_array_equal(a.train_loss, b.train_loss)


def test_altered_lines_are_set_right(planned, whole, tmp_path):
    path = tmp_path / "run"
    run(path, planned)
    lines = (path / "rounds.jsonl").read_bytes()
    altered = lines.replace(b'"round": 3, "test_accuracy": ', b'"round": 3, "test_accuracy": 0.123, "was": ')
    assert altered != lines
    (path / "rounds.jsonl").write_bytes(altered)
    (path / "results.json").unlink()
    run(path, planned)
    assert sorted((path / "rounds.jsonl").read_bytes().splitlines()) == sorted(lines.splitlines())


def test_only_one_process_at_a_time(tmp_path):
    with atomic.claimed(tmp_path):
        assert atomic.holder(tmp_path)["pid"] == os.getpid()
        with pytest.raises(InputError, match=f"is being run by process {os.getpid()} on"), atomic.claimed(tmp_path):
            pass
    assert atomic.holder(tmp_path) is None and not (tmp_path / directory.LOCK).exists()
    (tmp_path / directory.LOCK).write_text('{"pid": 1}')  # left by one that was killed
    assert atomic.holder(tmp_path) is None
    with atomic.claimed(tmp_path):
        pass


def test_other_versions_start_over(planned, often, tmp_path):
    path = tmp_path / "run"

    def stop(i, first, part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, planned, stop)
    environment = json.loads((path / "environment.json").read_text())
    atomic.replace(path / "environment.json", json.dumps(environment | {"jax": "0.0.1"}).encode())
    assert heard(path, planned)[0] == (0, 1, 1)
    assert json.loads((path / "environment.json").read_text())["jax"] == jax.__version__
    assert len(directory.read(path).rounds()[0]) == 60


# real processes


def folb(*arguments, **options):
    """A folb command in a process of its own."""
    command = [sys.executable, "-m", "folb", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)


LONG = [
    "compare",
    "synthetic_1_1",
    "--algorithms",
    "folb",
    "--set",
    "server=adam",
    "--set",
    "sizes=20,30,40,50",
    "--set",
    "select.K=2",
    "--seeds",
    "1",
    "--evaluate-every",
    "5",
]
ROUNDS = 4000  # seconds, in which it can be killed


@pytest.fixture(scope="module")
def long_results(tmp_path_factory, usual_loops):
    """What the long run of so many rounds leaves if nothing happens to it; it fills the compilation cache, too.

    It needs no process of its own.
    """

    @functools.cache
    def results(rounds):
        out = tmp_path_factory.mktemp("long") / "whole"
        assert main([*LONG, "--rounds", str(rounds), "--out", str(out)]) == 0
        return (out / "results.json").read_bytes()

    results(ROUNDS)
    return results


def end(process):
    """Exit code and standard error."""
    err = process.communicate(timeout=120)[1].decode()
    return process.returncode, err


def size(path):
    return path.stat().st_size if path.exists() else 0


def wait_for_rounds(process, path, beyond, seconds=math.inf):
    """Wait until more rounds are on disk, or so long."""
    end = time.monotonic() + seconds
    while process.poll() is None and size(path / "rounds.jsonl") <= beyond and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random_moments(long_results, tmp_path, kills):
    """SIGKILL while it starts, computes and writes: each time it resumes, and ends with the same bits."""
    rng = random.Random(kills)
    path, farthest, rounds = tmp_path / "run", 0, ROUNDS * (1 + kills // 3)
    for kill in range(kills):
        before = size(path / "rounds.jsonl")
        process = folb(*LONG, "--rounds", rounds, "--out", path)
        if kill % 5 == 1:  # somewhere in the start, which ends with the first round on disk
            wait_for_rounds(process, path, before, rng.uniform(0, 3))
        else:
            # at first for more than 20 rounds, which a busy machine would not reach in so short a time
            wait_for_rounds(process, path, before if kill else 20 * 500)
            time.sleep(rng.uniform(0, 0.3))
        process.kill()
        assert end(process)[0] == -signal.SIGKILL, "the run ended before it could be killed"
        if (path / "environment.json").exists():
            stored = directory.read(path)
            done = [line["round"] for line in stored.rounds()[0]]
            assert done == list(range(1, len(done) + 1)) and len(done) >= farthest
            assert stored.state == "interrupted"
            farthest = len(done)
    assert farthest > 10 * kills
    code, err = end(folb("resume", path))
    assert code == 0, err
    assert (path / "results.json").read_bytes() == long_results(rounds)


def test_ctrl_c_says_how_to_go_on_and_a_second_process_is_refused(long_results, tmp_path, capsys):
    path = tmp_path / "run"
    process = folb(*LONG, "--rounds", ROUNDS, "--out", path)
    wait_for_rounds(process, path, 0)
    code, err = main(["resume", str(path)]), capsys.readouterr().err  # this process is the second
    assert code == 2 and f"is being run by process {process.pid} on" in err and len(err.splitlines()) == 1
    for stop in (signal.SIGINT, signal.SIGTERM):
        begun = time.monotonic()
        process.send_signal(stop)
        code, err = end(process)
        assert code == 130, err
        assert time.monotonic() - begun < 4  # a second or two, on a machine that has other things to do
        assert f"resume with: folb resume {path}" in err
        process = folb("resume", path)
        wait_for_rounds(process, path, size(path / "rounds.jsonl"))
    code, err = end(process)
    assert code == 0, err
    assert (path / "results.json").read_bytes() == long_results(ROUNDS)


SLOW = """
import pathlib, time
import jax
from folb import Model, models

def slow(shape, classes):
    fast = models.logistic(shape, classes)

    def wait(guess):
        pathlib.Path(__file__).with_name("begun").touch()
        time.sleep(60)
        return guess

    def predict(params, x):
        guess = fast.predict(params, x)
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(guess.shape, guess.dtype), guess, vmap_method="sequential")

    return Model(fast.init, fast.loss, predict)
"""


def test_ctrl_c_does_not_wait_for_a_long_round(tmp_path):
    (tmp_path / "own.py").write_text(SLOW)
    model = f"{tmp_path / 'own.py'}:slow"
    process = folb("compare", "synthetic_1_1", "--model", model, "--algorithms", "fedavg", "--rounds", 2, "--seeds", 1)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.01)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, err = end(process)
    assert code == 130 and "resume with: folb resume" in err and "Traceback" not in err, err
    assert time.monotonic() - begun < 4
