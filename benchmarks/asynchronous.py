"""The cost of rounds that do not wait, relative to rounds that do, with the same number of working devices.

FedBuff and FedAvg take turns: 20 mini-batch steps of 10 on each of K devices of 1,000, which have 10 samples with 60
features; no evaluation. On a CPU, by CPU time on one core. The goal: at most twice the device work that a run contains.
Prints a table, and writes docs/benchmarks/asynchronous.json.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median

import jax
from growth import HERE, federation, parameters, takes_turns, write

from folb import algorithms, models, system
from folb.simulation.problem import problem

FEATURES, CLASSES, TURNS, GOAL = 60, 10, 5, 2.0
WORKS = ((10, 10), (10, 30), (10, 100), (1, 10), (1, 100))  # K replies in a buffer, M devices at work


def main() -> None:
    """Print the table, and leave the figures."""
    parser = argparse.ArgumentParser(description="The cost of rounds that do not wait.")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    if jax.default_backend() == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    data, found = federation(1000), []
    print(f"{'parameters':>12}{'K':>6}{'M':>6}{'FedAvg, ms':>12}{'FedBuff, ms':>13}{'ratio':>20}")
    for model in (
        models.logistic((FEATURES,), CLASSES),
        models.mlp((FEATURES,), CLASSES, first=140, second=140),
    ):
        shared, d = problem(data, model, system=system.fixed(work=20)), parameters(model)
        for K, M in WORKS:
            waiting = takes_turns(shared, algorithms.fedavg(select={"K": K, "replacement": False}), 100)
            buffered = takes_turns(shared, algorithms.fedbuff(select={"K": K}, concurrency=M), 100)
            pairs = [(waiting(), buffered()) for _ in range(TURNS)]
            ratios = [ours / theirs for theirs, ours in pairs]
            middle = [median(values) for values in zip(*pairs, strict=True)]
            times = [median(ratios), min(ratios), max(ratios)]
            found.append([d, K, M, *(round(value, 3) for value in (*middle, *times))])
            told = "{:.2f} ({:.2f} .. {:.2f})".format(*times)
            print(f"{d:12,}{K:6}{M:6}{middle[0]:12.2f}{middle[1]:13.2f}{told:>20}", flush=True)
    worst = max(row[5] for row in found)
    print(f"the largest median ratio is {worst:.2f}; the goal is at most {GOAL:g}")
    title = "parameters, K, M, ms a round of FedAvg and of FedBuff, their ratio, its least and greatest"
    write(options.out / "asynchronous.json", {"device": jax.devices()[0].device_kind, "turns": TURNS, title: found})


if __name__ == "__main__":
    main()
