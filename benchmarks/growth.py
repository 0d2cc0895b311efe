"""How the cost of a round grows: with the devices there are, those chosen, the parameters, and the runs stacked.

FedAvg, 20 mini-batch steps of 10 on devices of 10 samples with 60 features; no evaluation in the rounds measured. Time
is the median of three chunks of rounds; memory is what the compiled program asks for beside its inputs and outputs.
Prints a table, and writes docs/benchmarks/growth.json and growth.png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from folb import Model, algorithms, models, system
from folb.data.federation import Federation, Split
from folb.simulation.problem import problem
from folb.simulation.program import NEVER, advance, begin

FEATURES, CLASSES, EACH = 60, 10, 10
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
    algorithm = algorithms.fedavg(K=K)
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


def sweeps(largest: int) -> Iterator[tuple[str, int, Federation, Model, int, int]]:
    """What is varied, its value, and the work."""
    small = federation(1000)
    logistic = models.logistic((FEATURES,), CLASSES)
    for N in (30, 1000, 30_000, 1_000_000):
        if largest >= N:
            yield "devices N", N, federation(N), logistic, 10, 1
    for K in (10, 30, 100, 300, 1000):
        yield "chosen K", K, small, logistic, K, 1
    for width in (14, 140, 1400, 3000):
        model = models.mlp((FEATURES,), CLASSES, first=width, second=width)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        yield "parameters", parameters, small, model, 10, 1
    for runs in (1, 10, 100, 1000):
        yield "runs stacked", runs, small, logistic, 10, runs


def main() -> None:
    """Print the table, and leave the figures and the picture."""
    parser = argparse.ArgumentParser(description="How the cost of a round grows.")
    parser.add_argument("--largest", type=int, default=1_000_000, help="devices at most (1000000, which takes 8 GB)")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}\n{'':16}{'':>12}{'ms a round':>12}{'MB':>10}")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, value, data, model, K, runs in sweeps(options.largest):
        seconds, megabytes = cost(data, model, K, runs)
        found.setdefault(name, []).append((value, 1000 * seconds, megabytes))
        print(f"{name:16}{value:12,}{1000 * seconds:12.2f}{megabytes:10.1f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"device": jax.devices()[0].device_kind, "ms a round and MB": found}
    (options.out / "growth.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(found, options.out / "growth.png")


def draw(found: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """A panel for each sweep, with time and memory on one logarithmic axis for all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(3 * len(found), 3), layout="constrained", sharey=True)
    for panel, (name, rows) in zip(panels, found.items(), strict=True):
        values, ms, megabytes = zip(*rows, strict=True)
        lines: Any = panel.loglog(values, ms, "o-", color="#0072b2", label="ms a round")
        lines += panel.loglog(
            values, megabytes, "s--", color="#d55e00", label="MB that the program takes beside its data"
        )
        panel.set_xlabel(name)
        panel.set_ylim(0.1, 1e5)
    figure.legend(handles=lines, frameon=False, fontsize="small", loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
