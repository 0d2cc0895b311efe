"""The search's speed, in one run and as ratios: the grid as one program against its points one by one.

The work: heterogeneity-aware FOLB (18) on Synthetic_1_1, logistic 60 -> 10, K = 10 of 30 devices; mu in
{1e-4, ..., 1} times psi in {0.1, 1, 10, 100}, 20 points with 5 seeds each, 50 rounds, training loss and test accuracy
after every round. In one process, everything compiled beforehand; and as commands, each a process of its own that
finds its program in the compilation cache.

With --epochs, a larger search instead: 140 points, each 200 rounds of 1 to 20 epochs, as one program on one seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from folb import algorithms, data, models, simulate
from folb.core.algorithm import Algorithm

MU, PSI = (1e-4, 1e-3, 1e-2, 1e-1, 1.0), (0.1, 1.0, 10.0, 100.0)
POINTS = list(itertools.product(MU, PSI))
SEEDS, ROUNDS, TURNS = 5, 50, 3


def ways() -> dict[str, Callable[[], None]]:
    """The ways to go through the grid in one process."""
    federation = data.load("synthetic_1_1")
    model = models.logistic(federation.shape, federation.classes)
    grid = [algorithms.folb_hetero(local={"mu": mu}, rule={"psi": psi}) for mu, psi in POINTS]

    def some(points: list[Algorithm], seeds: range) -> None:
        runs = simulate(federation, model, points, rounds=ROUNDS, seeds=seeds)
        assert all(len(run.seconds) == ROUNDS for run in runs) and len(runs) == len(points) * len(seeds)

    def by_point() -> None:
        for point in grid:
            some([point], range(SEEDS))

    def by_run() -> None:
        for point in grid:
            for seed in range(SEEDS):
                some([point], range(seed, seed + 1))

    return {
        "the grid as one program": lambda: some(grid, range(SEEDS)),
        "point by point, 5 seeds stacked": by_point,
        "run by run": by_run,
    }


def of_epochs() -> dict[str, Any]:
    """The larger search: what it takes the first time, with compilation, and the second."""
    federation = data.load("synthetic_1_1")
    model = models.logistic(federation.shape, federation.classes)
    mu, psi = np.geomspace(1e-4, 1, 14), np.geomspace(0.1, 100, 10)
    grid = [
        algorithms.folb_hetero(local={"mu": m, "unit": "epoch"}, rule={"psi": p}) for m, p in itertools.product(mu, psi)
    ]

    def search() -> None:
        assert len(simulate(federation, model, grid, rounds=200)) == 140

    times = {"with compilation": seconds(search), "compiled": median(seconds(search) for _ in range(TURNS))}
    return {"device": jax.devices()[0].device_kind, "points": len(grid), "rounds": 200, "seconds": times}


def seconds(go: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    go()
    return time.perf_counter() - begun


def in_one_process() -> dict[str, float]:
    """The median of a few turns taken in rotation, so that a noisy moment does not favour one of the ways."""
    found = ways()
    for go in found.values():
        go()  # compilation
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(TURNS):
        for name, go in found.items():
            times[name].append(seconds(go))
    return {name: median(values) for name, values in times.items()}


def as_commands(count: int) -> dict[str, float]:
    """`folb tune` of the grid, which also runs its winner on 5 more seeds; and `folb compare` of each point.

    Of the points, `count` are measured, spread over the grid, and the rest are assumed to be like them.
    """
    shared = ["--seeds", str(SEEDS), "--rounds", str(ROUNDS), "--json"]
    grid = [f"--{name}={','.join(map(str, values))}" for name, values in (("local.mu", MU), ("rule.psi", PSI))]
    tune = ["tune", "synthetic_1_1", "--algorithm", "folb_hetero", *grid, *shared]
    compare = ["compare", "synthetic_1_1", "--algorithms", "folb_hetero", *shared]
    measured = [
        [*compare, "--set", f"local.mu={mu}", "--set", f"rule.psi={psi}"]
        for mu, psi in POINTS[:: -(-len(POINTS) // count)]
    ]
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"XDG_CACHE_HOME": f"{home}/cache", "FOLB_RUNS": f"{home}/runs"}

        def command(arguments: list[str]) -> float:
            words = [sys.executable, "-m", "folb", *arguments, "--again"]
            quiet = subprocess.DEVNULL
            return seconds(lambda: subprocess.run(words, check=True, env=environment, stdout=quiet, stderr=quiet))

        for warming in (tune, measured[0]):
            command(warming)
        whole = median(command(tune) for _ in range(TURNS))
        return {
            "folb tune": whole,
            f"folb compare, once for each point ({len(measured)} of {len(POINTS)} measured)": (
                len(POINTS) * median(map(command, measured))
            ),
        }


def show(times: dict[str, float]) -> None:
    """Print the table's lines, as ratios to the first."""
    first = next(iter(times.values()))
    for name, value in times.items():
        print(f"{name:56}{value:9.2f} s{value / first:8.1f}x", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The search as one program against its points one by one.")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="points run as commands (4); 0: none")
    parser.add_argument("--epochs", action="store_true", help="the larger search of epochs, and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figures of --epochs go, as JSON")
    asked = parser.parse_args()
    if asked.epochs:
        found = of_epochs()
        print(json.dumps(found))
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    count = asked.processes
    print(
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores; {len(POINTS)} points, {SEEDS} seeds, {ROUNDS} rounds"
    )
    show(in_one_process())
    if count > 0:
        show(as_commands(min(count, len(POINTS))))


if __name__ == "__main__":
    main()
