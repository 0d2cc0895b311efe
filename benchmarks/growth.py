"""How the cost of a round grows with the number of devices, of chosen devices, of parameters, and of stacked runs.

Then the cost of a round of SCAFFOLD relative to one of FedAvg on the same work. The two take turns; on a CPU, by CPU
time on one core. Each turn continues from the state of the last; its memory has rows for all devices that can be met.

FedAvg, 20 mini-batch steps of 10 on devices of 10 samples with 60 features; the measured rounds are not evaluated. Time
is the median of three chunks of rounds; memory is what the compiled program needs besides its inputs and outputs.
Prints tables, and writes docs/benchmarks/growth.json, growth.png and growth-scaffold.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from folb import Algorithm, Model, algorithms, models, system
from folb.data.federation import Federation, Split
from folb.report import figures
from folb.report.looks import COLOURS
from folb.simulation.problem import Problem, problem
from folb.simulation.program import NEVER, advance, begin

FEATURES, CLASSES, EACH = 60, 10, 10
TURNS = 5  # of SCAFFOLD and FedAvg
HERE = Path(__file__).parent.parent / "docs" / "benchmarks"


def federation(N: int) -> Federation:
    """N devices of 10 training samples and one to test on."""
    rng = np.random.default_rng(0)

    def split(each: int) -> Split:
        x = rng.standard_normal((N * each, FEATURES), np.float32)
        y = rng.integers(0, CLASSES, N * each, np.int32)
        return Split(x, y, np.arange(N, dtype=np.int32) * each, np.full(N, each, np.int32))

    return Federation("growth", split(EACH), split(1), CLASSES)


def cost(data: Federation, model: Model, K: int, runs: int) -> tuple[float, float]:
    """Seconds a round, and MB of memory the program takes."""
    algorithm = algorithms.fedavg(select={"K": K})
    shared = problem(data, model, system=system.fixed(work=20))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[algorithm] * runs)
    seeds = np.arange(runs, dtype=np.uint32)
    states = begin(shared, stacked, seeds)
    never = np.int32(NEVER)
    program = advance.lower(shared, stacked, states, seeds, np.int32(1), np.int32(2), never).compile()

    def chunk(rounds: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(shared, stacked, states, seeds, np.int32(1), np.int32(1 + rounds), never))
        return (time.perf_counter() - begun) / rounds

    rounds = max(1, min(100, int(0.5 / chunk(1))))
    memory: Any = program.memory_analysis()
    return median(chunk(rounds) for _ in range(3)), memory.temp_size_in_bytes / 1e6


def parameters(model: Model) -> int:
    """How many numbers a model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def sweeps(largest: int) -> Iterator[tuple[str, int, Federation, Model, int, int]]:
    """The varied number by name, its value, and the work."""
    small = federation(1000)
    logistic = models.logistic((FEATURES,), CLASSES)
    for N in (30, 1000, 30_000, 1_000_000):
        if largest >= N:
            yield "devices N", N, federation(N), logistic, 10, 1
    for K in (10, 30, 100, 300, 1000):
        yield "chosen K", K, small, logistic, K, 1
    for width in (14, 140, 1400, 3000):
        model = models.mlp((FEATURES,), CLASSES, first=width, second=width)
        yield "parameters", parameters(model), small, model, 10, 1
    for runs in (1, 10, 100, 1000):
        yield "runs stacked", runs, small, logistic, 10, runs


def takes_turns(shared: Problem, algorithm: Algorithm, rounds: int, every: int = NEVER) -> Callable[[], float]:
    """A function that runs `rounds` more rounds, and returns the milliseconds of a round.

    One of `every` rounds is evaluated; by default none.
    """
    stacked, seeds = jax.tree.map(lambda leaf: np.stack([leaf]), algorithm), np.zeros(1, np.uint32)
    states, t = begin(shared, stacked, seeds, (1 + TURNS) * rounds), 1

    def turn() -> float:
        nonlocal states, t
        span = (np.int32(t), np.int32(t + rounds), np.int32(every))
        begun = _clock()
        states = jax.block_until_ready(advance(shared, stacked, states, seeds, *span)[0])
        t += rounds
        return 1000 * (_clock() - begun) / rounds

    turn()  # compilation
    return turn


def _clock() -> float:
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def small_works(largest: int) -> Iterator[tuple[str, int, Federation, Model, int]]:
    """For SCAFFOLD: the varied number by name, its value, the work, and the rounds of a turn."""
    for N in (100, 1000, 10_000, 100_000, 1_000_000):
        if largest >= N:
            yield "devices N", N, federation(N), models.logistic((FEATURES,), CLASSES), 100
    for width, rounds in ((14, 100), (140, 100), (1400, 3)):  # about a chunk of a run, which copies the memory once
        model = models.mlp((FEATURES,), CLASSES, first=width, second=width)
        yield "parameters", parameters(model), federation(1000), model, rounds


def against_fedavg(largest: int) -> dict[str, Any]:
    """Print and return the milliseconds of a round of both, and the median, least and greatest ratio."""
    print(f"{'':16}{'':>12}{'FedAvg, ms':>12}{'SCAFFOLD, ms':>14}{'ratio':>20}")
    found: dict[str, Any] = {}
    for name, value, data, model, rounds in small_works(largest):
        shared = problem(data, model, system=system.fixed(work=20))
        one, other = (takes_turns(shared, make(K=10), rounds) for make in (algorithms.fedavg, algorithms.scaffold))
        pairs = [(one(), other()) for _ in range(TURNS)]
        ratios = [theirs / ours for ours, theirs in pairs]
        middle = [median(values) for values in zip(*pairs, strict=True)]
        times = [median(ratios), min(ratios), max(ratios)]
        found.setdefault(name, []).append((value, *middle, *times))
        told = "{:.2f} ({:.2f} .. {:.2f})".format(*times)
        print(f"{name:16}{value:12,}{middle[0]:12.2f}{middle[1]:14.2f}{told:>20}", flush=True)
    return found


def main() -> None:
    """Print the tables, and leave the figures and the picture."""
    parser = argparse.ArgumentParser(description="How the cost of a round grows.")
    parser.add_argument("--largest", type=int, default=1_000_000, help="devices at most (1000000, which takes 8 GB)")
    parser.add_argument("--only", choices=("fedavg", "scaffold"), help="one of the two tables")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    options.out.mkdir(parents=True, exist_ok=True)
    print(device)
    if options.only != "scaffold":
        found = of_fedavg(options.largest)
        write(options.out / "growth.json", {"device": device, "ms a round and MB": found})
        draw(found, options.out / "growth.png")
    if options.only != "fedavg":
        if jax.default_backend() == "cpu":
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
        ratios = against_fedavg(options.largest)
        title = "FedAvg and SCAFFOLD, ms a round; their ratio, its least and greatest"
        write(options.out / "growth-scaffold.json", {"device": device, "turns": TURNS, title: ratios})


def write(path: Path, document: dict[str, Any]) -> None:
    """The figures as JSON."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def of_fedavg(largest: int) -> dict[str, list[tuple[int, float, float]]]:
    """Print and return the cost of a round of FedAvg: for each sweep its values, milliseconds and MB."""
    print(f"{'':16}{'':>12}{'ms a round':>12}{'MB':>10}")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, value, data, model, K, runs in sweeps(largest):
        seconds, megabytes = cost(data, model, K, runs)
        found.setdefault(name, []).append((value, 1000 * seconds, megabytes))
        print(f"{name:16}{value:12,}{1000 * seconds:12.2f}{megabytes:10.1f}", flush=True)
    return found


def draw(found: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """A panel for each sweep, with time and memory on one logarithmic axis for all."""
    figure, panels = figures.subplots(1, len(found), figsize=(2.4 * len(found), 2.8), sharey=True)
    for panel, (name, rows) in zip(panels, found.items(), strict=True):
        values, ms, megabytes = zip(*rows, strict=True)
        lines: Any = panel.loglog(values, ms, "o-", color=COLOURS[0], label="milliseconds a round")
        lines += panel.loglog(
            values, megabytes, "s--", color=COLOURS[1], label="MB that the program takes beside its data"
        )
        panel.set_xlabel(name)
        panel.set_ylim(0.1, 1e5)
        panel.grid(color="0.9", linewidth=0.6)
    panels[0].set_ylabel("milliseconds, or MB")
    figure.legend(handles=lines, frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    path.write_bytes(figures.small(figures.finished(figure, "A round of FedAvg", "", "png")))


if __name__ == "__main__":
    main()
