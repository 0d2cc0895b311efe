"""The cost of metrics besides the accuracy, if every round is evaluated.

A round without metrics and the same round with one of them take turns: FedAvg, 10 devices, 20 mini-batch steps of 10.
The data are Synthetic_1_1 (660 test samples) with two models, and 1,000 devices with 10,000 test samples of 100
features and 10 classes. On a CPU, by CPU time on one core. Metrics are opt-in, because some cost more than 5 % of a
round. Prints a table, and writes docs/benchmarks/metrics.json.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median

import jax
import numpy as np
from growth import HERE, takes_turns, write

from folb import Federation, algorithms, data, models, system
from folb.simulation.problem import problem
from folb.simulation.settled import measured

TURNS, ROUNDS = 5, 30
ASKED: tuple[tuple[str, ...], ...] = (("fairness",), ("f1",), ("top5",), ("auc",), ("fairness", "f1", "top5", "auc"))


def large() -> Federation:
    """1,000 devices, each with 10 training and 10 test samples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20_000, 100)).astype(np.float32), rng.integers(0, 10, 20_000)
    split = np.tile(np.repeat([0, 1], 10), 1000)
    return Federation.from_arrays("1,000 devices", x, y, np.repeat(np.arange(1000), 20), split)


def main() -> None:
    """Print the table, and leave the figures."""
    parser = argparse.ArgumentParser(description="The cost of metrics.")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    if jax.default_backend() == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    found = []
    print(f"{'data':16}{'model':>10}  {'metrics':28}{'ms without':>12}{'ms with':>10}{'more, %':>22}")
    small, wide = data.load("synthetic_1_1"), large()
    for federation, make in ((small, models.logistic), (small, models.mlp), (wide, models.logistic)):
        model = make(federation.shape, federation.classes)
        algorithm, name = algorithms.fedavg(select={"K": 10}), make.__name__
        turns = [
            takes_turns(
                problem(federation, model, system=system.fixed(work=20), metrics=chosen),
                algorithm,
                ROUNDS,
                every=1,
            )
            for chosen in ((), *(measured(asked, model, federation) for asked in ASKED))
        ]
        times = [[turn() for turn in turns] for _ in range(TURNS)]
        for i, asked in enumerate(ASKED, 1):
            more = sorted(100 * (row[i] / row[0] - 1) for row in times)
            middle = [median(row[j] for row in times) for j in (0, i)]
            figures = (*middle, median(more), more[0], more[-1])
            found.append([federation.name, name, ",".join(asked), *(round(value, 3) for value in figures)])
            told = "{:.0f} ({:.0f} .. {:.0f})".format(*figures[2:])
            shown = f"{federation.name:16}{name:>10}  {','.join(asked):28}"
            print(f"{shown}{middle[0]:12.3f}{middle[1]:10.3f}{told:>22}", flush=True)
    title = "data, model, metrics, ms a round without and with them, how many per cent more, its least and greatest"
    write(options.out / "metrics.json", {"device": jax.devices()[0].device_kind, "turns": TURNS, title: found})


if __name__ == "__main__":
    main()
