"""How far a simulation is: lines where no bar can be drawn."""

import math

import numpy as np
import pytest

import folb
from folb import data, models, pace
from folb.core import algorithms


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_now_and_then_and_estimate_the_rest_without_the_compilation(clock):
    shown = []
    lines = pace.Lines(100, shown.append, every=10)
    for at, rounds in ((30, 10), (31, 10), (35, 10), (41, 10), (90, 60)):
        clock[0] = at
        lines.advance(rounds)
    assert shown == [
        "compiling the program of 100 rounds",
        "10 of 100 rounds",  # 30 seconds, mostly of the compiler
        "40 of 100 rounds, about 22 seconds left",
        "100 rounds in 90 seconds",
    ]


def test_a_long_run_is_announced_once_also_beside_a_bar(clock):
    shown = []
    lines = pace.Lines(1000, shown.append, every=math.inf)
    for at in range(10):
        clock[0] = 4.0 * at
        lines.advance(1)
    assert shown == ["1000 rounds take about 67 minutes"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1, "1 second"), (3, "3 seconds"), (99, "99 seconds"), (100, "2 minutes"), (8000, "2.2 hours")],
)
def test_times_in_words(seconds, words):
    assert pace.clock(seconds) == words


def test_simulate_tells_it(capfd):
    federation = data.synthetic.synthetic(devices=4)
    network, algorithm = models.logistic(federation.shape, federation.classes), algorithms.fedavg(select={"K": 2})
    runs = folb.simulate(federation, network, algorithm, rounds=3, observe="progress")
    assert "folb: compiling the program of 3 rounds" in capfd.readouterr().err
    assert np.isfinite(runs[0].train_loss).all()


def test_the_estimate_knows_what_a_round_of_each_run_costs(clock):
    shown = []
    lines = pace.Lines(200, shown.append, every=math.inf, costs=(10.0, 1.0))  # 100 rounds of each
    for at in range(4):
        clock[0] = float(at)
        lines.advance(1, run=1)  # a second each: then those of the other take ten
    assert shown == ["200 rounds take about 18 minutes"]
