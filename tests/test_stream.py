"""Samples that stay on the host: the same runs as with all of them on the accelerator."""

import json
import threading
import tracemalloc

import jax
import numpy as np
import pytest

from folb import InputError, algorithms, data, models, simulate, system
from folb.cli import main
from folb.data.federation import Federation, Split
from folb.simulation import problem as problems
from folb.simulation import program, settled, stacked
from folb.store import run_arrays

SIZES = [20, 31, 45, 150, 12, 60, 300, 25]
FEDERATION = data.load("synthetic_1_1", sizes=SIZES)
MODEL = models.logistic(FEDERATION.shape, FEDERATION.classes)


def words(table, x):
    return table[x]


def referring():
    """A federation whose samples are references into a table."""
    rng = np.random.default_rng(5)

    def split(size):
        start = (np.cumsum(size) - size).astype(np.int32)
        n = int(np.sum(size))
        x, y = rng.integers(0, 40, (n, 3), np.int32), rng.integers(0, 4, n, np.int32)
        return Split(x, y, start, np.asarray(size, np.int32))

    table = rng.normal(size=(40, 5)).astype(np.float32)
    return Federation("words", split([7, 30, 9, 14]), split([1, 0, 2, 2]), 4, table, words)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """An evaluation of several blocks; the last one reaches back."""
    monkeypatch.setattr(problems, "BLOCK", 30_000)


OPTIONS = {"rounds": 6, "seeds": (1, 2), "evaluate_every": 3, "system": system.uniform(high=4, dropout=0.2)}


def both(federation, model, contenders, **options):
    return [
        simulate(federation, model, contenders, stream=streamed, **OPTIONS, **options) for streamed in (False, True)
    ]


def assert_alike(resident, streamed):
    """The same draws, and on a CPU the same models to the last bit; sums over other blocks agree to rounding."""
    exact = jax.default_backend() == "cpu"
    for a, b in zip(resident, streamed, strict=True):
        for field in ("devices", "times", "lost", "bytes_up", "bytes_down", "seconds", "updated", "evaluated_rounds"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        for x, y in zip(jax.tree.leaves((a.params, a.records)), jax.tree.leaves((b.params, b.records)), strict=True):
            np.testing.assert_allclose(x, y, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)
        np.testing.assert_allclose(a.train_loss, b.train_loss, rtol=1e-5)
        np.testing.assert_allclose(a.test_accuracy, b.test_accuracy, atol=1e-6 if exact else 0.01)
        assert b.train_loss.dtype == a.train_loss.dtype and b.test_accuracy.dtype == a.test_accuracy.dtype


CONTENDERS = {
    "folb": [algorithms.folb(select={"K": 4}, local={"mu": mu}) for mu in (0.0, 1.0)],
    "folb_two_set": [algorithms.folb_two_set(select={"K": 4}, local={"mu": mu}) for mu in (0.0, 1.0)],
    "samples": [algorithms.fedavg(select={"name": "samples", "K": 4})],
}


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_streamed_run_is_the_resident_run(name):
    assert len(problems.blocks(FEDERATION.train)) > 2
    assert_alike(*both(FEDERATION, MODEL, CONTENDERS[name], record=("weights",)))


def test_a_window_of_several_rounds_is_the_resident_run(monkeypatch):
    monkeypatch.setattr(problems, "BLOCK", 1 << 26)
    assert_alike(*both(FEDERATION, MODEL, CONTENDERS["folb"], record=("weights",)))


def test_samples_that_refer_to_a_table_stream_and_the_table_stays():
    federation = referring()
    algorithm = algorithms.fedavg(select={"name": "samples", "K": 2, "replacement": False})
    assert_alike(*both(federation, models.logistic(federation.shape, 4), algorithm))


def streaming():
    return [thread for thread in threading.enumerate() if thread.name.startswith("folb-stream")]


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    """Windows that were on their way are dropped, and no thread is left."""
    options = OPTIONS | {"record": ("weights",), "stream": True}
    whole = simulate(FEDERATION, MODEL, CONTENDERS["samples"], **options)

    def interrupt(i, first, part):
        if first + len(part.seconds) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(FEDERATION, MODEL, CONTENDERS["samples"], **options, checkpoints=tmp_path, observe=interrupt)
    assert not streaming() and len(run_arrays.checkpoints(tmp_path, 0)) == 1
    seen = []
    again = simulate(
        FEDERATION,
        MODEL,
        CONTENDERS["samples"],
        **options,
        checkpoints=tmp_path,
        observe=lambda *part: seen.append(part),
    )
    assert seen[0][1] == 1 and 2 <= len(seen[0][2].seconds) < 6  # what the checkpoint holds
    for a, b in zip(whole, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, (a.params, a.train_loss), (b.params, b.train_loss))
    assert not streaming()


def test_the_next_window_is_made_while_a_round_is_played(monkeypatch):
    made = [threading.Event() for _ in range(6)]
    begun, window, advance = iter(made), program.window, program.advance
    monkeypatch.setattr(problems, "BLOCK", 1)  # a window for each round

    def note(split, known, chosen, mesh):
        if chosen.size:  # what a problem begins with is empty
            next(begun).set()
        return window(split, known, chosen, mesh)

    def wait(problem, algorithms, states, seeds, t, *more):
        assert t == len(made) or made[t].wait(60)  # that of round t + 1; round t has no result yet
        return advance(problem, algorithms, states, seeds, t, *more)

    monkeypatch.setattr(program, "window", note)
    monkeypatch.setattr(program, "advance", wait)
    options = OPTIONS | {"evaluate_every": 6, "record": ("weights",), "stream": True}  # no evaluation in between
    simulate(FEDERATION, MODEL, CONTENDERS["samples"], **options)
    assert made[-1].is_set()


def test_a_window_holds_as_many_rounds_as_fit():
    split = FEDERATION.train
    each = split.x.nbytes // len(split.y)
    sets = [np.array([0, 1]), np.array([1]), np.array([2, 0]), np.array([3])]
    rows = [int(split.size[list(devices)].sum()) for devices in ({0, 1}, {0, 1, 2}, {0, 1, 2, 3})]
    for room, count in ((1, 1), (rows[0], 2), (rows[1] - 1, 2), (rows[1], 3), (rows[2], 4), (10**9, 4)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(problems, "BLOCK", room * each)
            assert problems.rounds_that_fit(split, sets) == count


def test_what_fails_in_the_thread_fails_in_the_run():
    def fail():
        raise OSError("the disk is gone")

    pieces = problems.ahead([lambda: 1, lambda: 2, fail])
    assert [next(pieces), next(pieces)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(pieces)
    unused = problems.ahead([lambda: 1, lambda: 2])
    next(unused)
    unused.close()
    assert not streaming()


def test_streaming_is_for_what_does_not_fit(monkeypatch):
    assert settled.streams(FEDERATION, None) is False and settled.streams(FEDERATION, True) is True
    monkeypatch.setattr(settled, "memory", lambda: 2 * FEDERATION.nbytes - 2)
    assert settled.streams(FEDERATION, None) is True and settled.streams(FEDERATION, False) is False
    with pytest.raises(InputError, match=r"algorithms = 'fednu_norm': should be .* neither a survey nor a memory"):
        simulate(FEDERATION, MODEL, algorithms.fednu_norm(select={"K": 2}), rounds=1)


def test_fewer_runs_are_stacked_where_windows_are_large():
    def fit(streamed):
        problem = problems.problem(FEDERATION, MODEL, streamed=streamed)
        return stacked.fitting(problem, algorithms.folb(), 1 << 30)

    assert 1 < fit(True) < fit(False)


def equal(a, b):
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.tree.leaves([vars(side.train), vars(side.test)]) for side in (a, b))
    )
    assert (a.classes, a.note, a.N) == (b.classes, b.note, b.N)


def test_a_saved_federation_is_mapped(tmp_path, capsys):
    FEDERATION.save(tmp_path / "mine")
    mine = data.load(tmp_path / "mine")
    equal(mine, FEDERATION)
    assert mine.digest == FEDERATION.digest
    for side in (mine.train, mine.test):
        assert isinstance(side.x, np.memmap)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    with pytest.raises(InputError, match="should not exist yet"):
        FEDERATION.save(tmp_path / "mine")
    assert main.main(["data", "info", str(tmp_path / "mine")]) == 0
    assert "mapped, not read" in capsys.readouterr().out


def test_a_federation_with_a_table_is_saved_as_models_see_it(tmp_path):
    federation = referring()
    federation.save(tmp_path / "words")
    plain = data.load(tmp_path / "words")
    assert plain.shape == federation.shape == (3, 5) and plain.classes == 4
    np.testing.assert_array_equal(plain.train.x, words(federation.table, federation.train.x))
    np.testing.assert_array_equal(plain.test.size, [1, 0, 2, 2])


def test_devices_may_have_names(tmp_path):
    FEDERATION.save(tmp_path / "mine")
    for side in ("train", "test"):
        file = tmp_path / "mine" / side / "device.npy"
        np.save(file, np.array([f"user {k}" for k in np.load(file)]))
    (tmp_path / "mine" / "federation.json").unlink()
    equal(data.load(tmp_path / "mine"), FEDERATION)


def replaced(name, change):
    def spoil(path):
        np.save(path / name, change(np.load(path / name)))

    return spoil


def with_value(index, value):
    def change(array):
        array[index] = value
        return array

    return change


def written(name, text):
    return lambda path: (path / name).write_text(text)


BAD = {
    "no labels": (lambda path: (path / "train/y.npy").unlink(), "train/y.npy = 'No such file"),
    "no axis": (lambda path: np.save(path / "train/x.npy", np.float32(3)), r"train: shape of x = \(\)"),
    "a note of two lines": (
        written("federation.json", '{"note": "a\\nb"}'),
        "federation.json: note = .* one line of text",
    ),
    "deep": (written("federation.json", "[" * 100_000), "federation.json = .*should be json"),
    "too many classes": (
        written("federation.json", '{"classes": 1e400}'),
        "classes = inf: should be a whole number from 2",
    ),
    "other names": (
        lambda path: np.save(path / "test/device.npy", np.load(path / "test/device.npy").astype(str)),
        "test: device = '<U.*should be int32, as in train",
    ),
    "one side": (lambda path: [file.unlink() for file in (path / "test").iterdir()], "test/x.npy = 'No such file"),
    "damaged": (lambda path: (path / "test/x.npy").write_bytes(b"what"), "test/x.npy = .* undamaged"),
    "cut": (lambda path: (path / "test/x.npy").write_bytes((path / "test/x.npy").read_bytes()[:-9]), "test/x.npy = "),
    "doubles": (replaced("train/x.npy", lambda x: x.astype(float)), "type of x = '<f8': should be float32"),
    "Fortran": (replaced("train/x.npy", np.asfortranarray), "type of x = '<f4, Fortran'"),
    "infinite": (replaced("train/x.npy", with_value((200, 7), np.inf)), r"train: x\[200, 7\] = inf"),
    "narrow": (replaced("test/x.npy", lambda x: x[:, :9].copy()), r"test: shape of x = \(9,\): should be \(60,\)"),
    "bytes": (replaced("test/x.npy", lambda x: x.astype(np.uint8)), "test: dtype of x = 'uint8'"),
    "short": (replaced("train/y.npy", lambda y: y[1:]), r"train: len\(y\) = "),
    "label": (replaced("test/y.npy", with_value(3, -1)), r"test: y\[3\] = -1"),
    "unsorted": (replaced("train/device.npy", lambda k: k[::-1].copy()), r"train: device\[\d+\] = 6: .* after 7"),
    "fractions": (replaced("train/device.npy", lambda k: k + 0.5), "train: device = 'float64'"),
    "stranger": (replaced("test/device.npy", lambda k: k + 1), "test: device = 8: should have samples in train"),
    "kinds": (replaced("test/device.npy", lambda k: k.astype(str)), "test: device = "),
    "no json": (lambda path: (path / "federation.json").write_text("{"), "federation.json = .* should be json"),
    "classes": (lambda path: (path / "federation.json").write_text('{"classes": "9"}'), "classes = '9'"),
}


@pytest.mark.parametrize("spoil", BAD)
def test_bad_directories_are_refused(tmp_path, monkeypatch, spoil):
    monkeypatch.setattr("folb.data.federation.BLOCK", 10_000)
    change, message = BAD[spoil]
    path = tmp_path / "mine"
    FEDERATION.save(path)
    change(path)
    with pytest.raises(InputError, match=message):
        data.load(path)


def test_a_mapped_file_is_never_held_as_a_whole(tmp_path, monkeypatch):
    """A sparse file of 64 MB: neither checking, hashing, windows nor blocks take half of that."""
    monkeypatch.setattr("folb.data.federation.BLOCK", 1 << 20)
    monkeypatch.setattr(problems, "BLOCK", 1 << 20)
    n, N = 16_000, 100
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        rows = n if side == "train" else N
        np.lib.format.open_memmap(tmp_path / side / "x.npy", "w+", np.float32, (rows, 1000))
        np.save(tmp_path / side / "y.npy", np.arange(rows) % 3)
        np.save(tmp_path / side / "device.npy", np.repeat(np.arange(N), rows // N))
    tracemalloc.start()
    try:
        federation = data.load(tmp_path)
        assert federation.digest
        problem = problems.problem(federation, models.logistic(federation.shape, 3), streamed=True)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), algorithms.fedavg(select={"K": 2}))
        seeds = np.zeros(1, np.uint32)
        pieces = problems.ahead(program.pieces(problem, federation, stacked, seeds, 1, 1, 2))
        windows, rows = 0, 0
        for piece in pieces:
            if isinstance(piece, program.Window):
                windows += len(piece.problem.train.y)
            else:  # the rows of a block that are new
                block, seen = piece
                rows += max(len(block.train.y), len(block.test.y)) - seen
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert windows == 2 * problems.LEAST and rows == 2 * (n + N)
    assert federation.train.x.nbytes == 64_000_000 and peak < 30_000_000


def test_the_command_line_streams(tmp_path, monkeypatch, capsys):
    """It is the same experiment, in the same place; a resumed run keeps the choice it began with."""
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path / "runs"))
    FEDERATION.save(tmp_path / "mine")
    command = ["compare", str(tmp_path / "mine"), "--algorithms", "fedavg", "--rounds", "2", "--seeds", "1", "--json"]
    assert main.main([*command, "--stream"]) == 0
    streamed = json.loads(capsys.readouterr().out)
    (path,) = (tmp_path / "runs").iterdir()
    assert json.loads((path / "environment.json").read_bytes())["stream"] is True
    assert main.main(command) == 0  # finished already
    assert json.loads(capsys.readouterr().out) == streamed
    (path / "results.json").unlink()
    assert main.main(["resume", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == streamed
    assert main.main([*command[:2], "--algorithms", "fednu_direct", "--stream"]) == 2
    assert "neither a survey nor a memory" in capsys.readouterr().err
