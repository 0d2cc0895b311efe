"""Traces of devices: what a file may hold, who is online when, and rounds against a literal loop."""

import gzip
import math
import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_numbers import words

import folb
from folb import Experiment, InputError, algorithms, simulate, trace
from folb.core import randomness, samplings, selection
from folb.core.selection import Known, drawing
from folb.data.synthetic import synthetic
from folb.experiments.plan import plan
from folb.models import logistic

N, SEED, MODEL_BYTES = 6, 2, 4 * 610
FEDERATION = synthetic(devices=N, sizes=[20, 31, 45, 150, 12, 60])
MODEL = logistic(FEDERATION.shape, FEDERATION.classes)
run = partial(simulate, FEDERATION, MODEL, seeds=[SEED])

HEADER = "device,speed,up,down,latency,from,until"
# device 2 changes its bandwidth while it is online; device 4 is online from one period to the next; nobody is at 60
LINES = """\
0,2,0.05,0.1,0.5,0,20
0,2,0.05,0.1,0.5,30,50
1,1,0.02,0.1,0.2,5,45
2,4,0.05,0.2,0.1,10,25
2,4,0.5,2,0.1,25,40
3,0.5,0.01,0.02,1,0,15
4,3,0.1,0.1,0.3,80,100
4,3,0.1,0.1,0.3,0,12
5,5,1,1,0,33,36
"""
PERIOD = 100.0


def write(tmp_path, content, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, f"{HEADER}\n{LINES}")


ROWS = [tuple(map(float, line.split(","))) for line in LINES.split()]


def line_at(k, now):
    """The line of device k at that time, or None; who leaves at this moment has left."""
    phase = (now + 1e-4) % PERIOD
    return next((row for row in ROWS if row[0] == k and row[5] <= phase < row[6]), None)


def leaves(k, now):
    """When device k goes offline, followed line by line."""
    base = math.floor((now + 1e-4) / PERIOD) * PERIOD
    while True:
        row = line_at(k, now)
        if row is None:
            return now
        now = base + row[6]
        base += PERIOD if row[6] == PERIOD else 0


def next_online(now):
    while not any(line_at(k, now) for k in range(N)):
        now = math.floor(now) + 1.0  # all stays begin at whole seconds
    return now


DRAWS = np.asarray(
    jax.jit(
        lambda: jax.vmap(lambda t: randomness.uniform(randomness.words(SEED, t, jnp.arange(N), 4)[:, 2:]))(
            jnp.arange(1, 41)
        )
    )(),
    float,
)


@pytest.mark.parametrize("replacement", [False, True])
def test_rounds_are_the_literal_loop_s(file, replacement):
    K, low, high, dropout, rounds = 3, 2, 12, 0.1, 40
    algorithm = algorithms.fedavg(select={"K": K, "replacement": replacement})
    model = trace(file=file, period=PERIOD, low=low, high=high, dropout=dropout)
    played = run(algorithm, rounds=rounds, system=model)[0]
    now, gone, waited, few = 0.0, 0, 0, 0
    for t in range(rounds):
        begin = next_online(now)
        waited += begin > now + 0.1
        online = {k for k in range(N) if line_at(k, begin)}
        reached = {int(k) for k in played.devices[t][(played.times[t] > 0) | played.lost[t]]}
        assert reached <= online
        if not replacement:
            assert len(reached) == min(K, len(online))
            few += len(online) < K
        lost, seconds = set(), []
        for k in reached:
            draws = DRAWS[t, k]
            _, speed, up, down, latency, *_ = line_at(k, begin)
            work = min(low + int(draws[0] * (high - low + 1)), high)
            arrival = latency + MODEL_BYTES * 8e-6 / down + work / speed + MODEL_BYTES * 8e-6 / up
            left = leaves(k, begin) - begin
            gone += arrival > left
            if arrival > left or draws[1] < dropout:
                lost.add(k)
            seconds.append(min(arrival, left))
            assert abs(arrival - left) > 1e-2
        assert {int(k) for k in played.devices[t][played.lost[t]]} == lost
        assert played.bytes_down[t] == len(reached) * MODEL_BYTES
        assert played.bytes_up[t] == (len(reached) - len(lost)) * MODEL_BYTES
        assert played.seconds[t] == pytest.approx(begin - now + max(seconds), abs=1e-3)
        now = begin + max(seconds)
    assert gone and waited and (few or replacement)
    assert now > 2 * PERIOD


@pytest.mark.parametrize("sampling", ["samples", "norm", "direct", "power_of_choice", "remembered_loss"])
def test_no_sampling_asks_who_is_offline(file, sampling):
    """And a survey asks nobody else, either."""
    K = 2
    algorithm = folb.Algorithm(select={"name": sampling, "K": K, "replacement": False})
    played = run(algorithm, rounds=12, system=trace(file=file, period=PERIOD, high=3))[0]
    now = 0.0
    for t in range(12):
        begin = next_online(now)
        online = {k for k in range(N) if line_at(k, begin)}
        reached = {int(k) for k in played.devices[t][(played.times[t] > 0) | played.lost[t]]}
        assert reached <= online
        assert len(reached) == min(K, len(online))
        assert played.bytes_down[t] <= len(online) * MODEL_BYTES
        if sampling in ("norm", "direct"):
            assert played.bytes_down[t] == len(online) * MODEL_BYTES
        now += float(played.seconds[t])


def test_the_second_set_is_online_too(file):
    played = run(algorithms.folb_two_set(select={"K": 2}), rounds=12, system=trace(file=file, period=PERIOD, high=3))[0]
    assert played.updated.any()
    assert np.all(played.bytes_down <= 4 * MODEL_BYTES)


@pytest.mark.parametrize("replacement", [True, False])
def test_those_online_have_equal_chances_and_weights(replacement):
    online = np.array([True, False, True, True, False, True])
    size = np.arange(1, N + 1, dtype=np.int32)
    numbers = (np.cumsum(size) - size, size, np.float32(online / 4))
    known = Known(jnp.int32(1), 2, replacement, *map(jnp.asarray, numbers), online=jnp.asarray(online))
    how = selection.Selection(samplings.Uniform(), 2, replacement=replacement)

    @jax.jit
    def many(words):
        draw = drawing(how, known)
        chosen = jax.vmap(draw.devices)(words.reshape(-1, draw.words))
        return chosen, draw.correction(jnp.arange(N))

    drawn, correction = many(words(1, 1, np.arange(4000 * (2 if replacement else N)), 1))
    counts = np.bincount(np.asarray(drawn.device).ravel(), np.asarray(drawn.times).ravel(), N)
    assert not counts[~online].any()
    assert np.all(np.abs(counts[online] - 2000) < 5 * np.sqrt(2000))
    np.testing.assert_allclose(np.asarray(correction)[online], 1, rtol=1e-5)


def test_a_trace_that_ends(tmp_path):
    """If nobody will ever be online again, rounds ask nobody, take no time and change nothing."""
    lines = "".join(f"{k},10,1,1,0,3\n" for k in range(N))
    path = write(tmp_path, "device,speed,up,down,from,until\n" + lines)
    played = run(algorithms.fedavg(select={"K": 2}), rounds=8, system=trace(file=path, low=5, high=5))[0]
    assert played.updated.tolist() == [True] * 5 + [False] * 3  # a round takes 0.54 seconds
    assert played.bytes_down[6:].tolist() == [0, 0]
    assert played.seconds[6:].tolist() == [0, 0]
    assert np.sum(played.seconds) == pytest.approx(3, rel=1e-4)
    assert not played.lost[6:].any()


def test_a_trace_resumes_bit_for_bit(file, tmp_path):
    play = partial(run, algorithms.folb(select={"K": 3, "over_selection": 1.3}), system=trace(file=file, period=PERIOD))
    whole = play(rounds=12)[0]
    play(rounds=5, checkpoints=tmp_path / "kept")
    observed = []
    rest = play(rounds=12, checkpoints=tmp_path / "kept", observe=lambda i, first, part: observed.append(first))[0]
    assert observed[:2] == [1, 6]
    np.testing.assert_array_equal(rest.seconds, whole.seconds)
    np.testing.assert_array_equal(rest.devices, whole.devices)
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)


# The file


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert a.digest == b.digest


def test_csv_gz_and_parquet_are_one_trace(file, tmp_path):
    plain = trace(file=file, period=PERIOD)
    text = f"{HEADER}\n{LINES}"
    same(plain, trace(file=write(tmp_path, gzip.compress(text.encode()), "a.csv.gz"), period=PERIOD))
    reordered = "\n".join([HEADER, *reversed(LINES.split())]).replace("\n", "\r\n\r\n")
    same(plain, trace(file=write(tmp_path, b"\xef\xbb\xbf" + reordered.encode(), "b.csv"), period=PERIOD))
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = dict(zip(HEADER.split(","), np.array(ROWS).T, strict=True))
    columns["device"] = columns["device"].astype(np.int64)
    pq.write_table(pa.table(columns), tmp_path / "c.parquet", row_group_size=4)
    same(plain, trace(file=str(tmp_path / "c.parquet"), period=PERIOD))
    pq.write_table(pa.table(columns | {"up": np.where(np.arange(9) == 4, -1.0, 1.0)}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c\.parquet, row 5: up = -1\.0: should be a number from 1e-09"):
        trace(file=str(tmp_path / "c.parquet"), period=PERIOD)
    pq.write_table(pa.table(columns | {"up": ["fast"] * 9}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c\.parquet: up = 'string': should be a column of numbers"):
        trace(file=str(tmp_path / "c.parquet"), period=PERIOD)


def test_only_four_columns_are_needed(tmp_path):
    path = write(tmp_path, "down,device,up,speed\n" + "".join(f"2,{k},1,10\n" for k in range(N)))
    traced = trace(file=path, low=4, high=4)
    played = run(algorithms.fedavg(select={"K": 2}), rounds=2, system=traced)[0]
    np.testing.assert_allclose(played.seconds, 0.4 + MODEL_BYTES * 8e-6 * (1 / 2 + 1 / 1), rtol=1e-5)


WRONG = {
    "zero bandwidth": ("1,1,0.02", "1,1,0", r"line 4: up = 0\.0: should be a number from 1e-09 to 1e\+09"),
    "negative bandwidth": ("2,4,0.5,2", "2,4,0.5,-2", r"line 6: down = -2\.0: should be a number from 1e-09"),
    "no speed": ("3,0.5", "3,0", r"line 7: speed = 0\.0: should be a number from 1e-09"),
    "not a number": ("1,1,0.02", "1,1,nan", r"line 4: up = nan: should be a number from"),
    "infinite": ("1,1,0.02", "1,inf,0.02", r"line 4: speed = inf: should be a number from"),
    "negative latency": ("0.5,30,50", "-1,30,50", r"line 3: latency = -1\.0: should be a number from 0 to"),
    "text": ("1,1,0.02", "1,fast,0.02", r"line 4: speed = 'fast': should be a number"),
    "an empty cell": ("0.5,30,50", "0.5,,50", r"line 3: from = '': should be a number"),
    "a short line": ("0.5,30,50", "0.5,30", r"line 3 = '0,2,0\.05,0\.1,0\.5,30': should have 7 values"),
    "an overlap": ("0,2,0.05,0.1,0.5,30", "0,2,0.05,0.1,0.5,19", r"line 3: from = 19\.0: .* the end of line 2, of the"),
    "backwards": ("33,36", "36,33", r"line 10: until = 33\.0: should be more than from"),
    "too late": ("80,100", "80,101", r"line 8: until = 101\.0: should be at most period = 100"),
    "a fraction": ("5,5,1,1", "4.5,5,1,1", r"line 10: device = 4\.5: should be a whole number"),
    "a negative device": ("5,5,1,1", "-5,5,1,1", r"line 10: device = -5\.0: should be a number from 0"),
    "a missing device": ("3,0.5", "5,0.5", r"trace\.csv: device = 3: has no line; there are devices up to 5"),
    "an unknown device": ("5,5,1,1,0,33,36", "5,5,1,1,0,33,36\n6,5,1,1,0,3,6", r"line 11: device = 6: .* 6 devices"),
    "too few devices": ("5,5,1,1,0,33,36", "", r"trace\.csv: device = 5: has no line; devices are 0 to 5"),
    "a long value": ("1,1,0.02", f"1,{'1' * 131_073}x,0.02", r"line 4 = 'field larger .*: should be numbers"),
    "a long name": ("latency", "x" * 131_073, r"trace\.csv = 'field larger .*: first line: should name every column"),
    "no such column": ("latency", "latencies", r"column = 'latencies': did you mean 'latency'"),
    "no speed column": ("speed", "latency", r"column = 'speed': is missing"),
    "no until": (",until", "", r"column = 'from': should come with until"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_with_its_place(tmp_path, name):
    before, after, said = WRONG[name]
    text = f"{HEADER}\n{LINES}"
    assert before in text
    with pytest.raises(InputError, match=said) as raised:
        run(
            algorithms.fedavg(select={"K": 2}),
            rounds=1,
            system=trace(file=write(tmp_path, text.replace(before, after, 1)), period=PERIOD),
        )
    assert "trace.csv" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_mistakes(tmp_path, file):
    one, two = "device,speed,up,down\n0,1,1,1\n", "device,speed,up,down\n0,1,1,1\n0,1,1,1\n"
    with pytest.raises(InputError, match=r"line 3: device = 0\.0: has a line already, line 2"):
        trace(file=write(tmp_path, two, "other.csv"))
    with pytest.raises(InputError, match=r"period = 10\.0: needs the columns from and until"):
        trace(file=write(tmp_path, one, "other.csv"), period=10.0)
    with pytest.raises(InputError, match="lines = 0: should be from 1"):
        trace(file=write(tmp_path, "device,speed,up,down\n", "other.csv"))
    with pytest.raises(InputError, match="should be utf-8"):
        trace(file=write(tmp_path, b"device,speed,up,down\n0,1,1,\xff\n", "other.csv"))
    with pytest.raises(InputError, match="file = '': should be a csv or parquet file"):
        trace()
    with pytest.raises(InputError, match="period = -1: should be more than 0"):
        trace(file=file, period=-1)
    with pytest.raises(InputError, match="stream = True: should be false: the devices online"):
        run(algorithms.fedavg(select={"K": 2}), rounds=1, system=trace(file=file, period=PERIOD), stream=True)
    clusters = folb.Algorithm(select={"name": "clusters", "K": 2, "replacement": False})
    with pytest.raises(InputError, match="does not ask all devices at once"):
        run(clusters, rounds=1, system=trace(file=file, period=PERIOD))


def test_a_hundred_thousand_devices_load_in_seconds(tmp_path):
    count = 100_000
    begin = np.random.default_rng(0).uniform(0, 40_000, count)
    table = np.column_stack([np.arange(count), begin / 1e4 + 1, begin / 1e4 + 1, begin / 1e4 + 2, begin, begin + 9000])
    path = tmp_path / "many.csv"
    np.savetxt(path, table, delimiter=",", header="device,speed,up,down,from,until", comments="", fmt="%.9g")
    start = time.process_time()
    traced = trace(file=str(path), period=86_400)
    assert time.process_time() - start < 5
    online = np.asarray(jax.jit(lambda model, now: model.online(now))(traced, jnp.float32(86_400 + 20_000)))
    assert 0.2 < online.mean() < 0.25
    near = np.abs(begin - 20_000) < 1, np.abs(begin + 9000 - 20_000) < 1  # rounding in 32 bits
    expected = (begin <= 20_000) & (begin + 9000 > 20_000)
    np.testing.assert_array_equal(online[~near[0] & ~near[1]], expected[~near[0] & ~near[1]])


# In an experiment


def test_the_file_is_part_of_the_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "device,speed,up,down\n" + "".join(f"{k},10,1,2\n" for k in range(30))
    write(tmp_path, text)
    experiment = Experiment("synthetic_1_1", system="trace", algorithms=["fedavg"], set={"file": "trace.csv"})
    first = plan(experiment)
    assert first.experiment.set["trace"]["file"] == os.path.join(os.getcwd(), "trace.csv")
    assert plan(first.experiment).identity == first.identity
    write(tmp_path, text.replace("3,10,1,2", "3,10,1,3"))
    assert plan(experiment).identity != first.identity


def test_over_selection_is_swept_and_what_is_none_by_default_is_not_written():
    experiment = Experiment("synthetic_1_1", system="network", algorithms=["fedavg"])
    planned = plan(Experiment("synthetic_1_1", algorithms=["fedavg"], set={"select.over_selection": ["none", 1.3, 2]}))
    assert [algorithm.selection.K for algorithm in planned.algorithms] == [10, 13, 20]
    assert "over_selection" not in plan(experiment).experiment.set["fedavg"]
    assert plan(experiment).experiment.set["network"].get("tau") is None
