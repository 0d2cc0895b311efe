"""Run directories as folb.store keeps them, written without running anything."""

import json
import math
from pathlib import Path

import numpy as np

TOML = """\
# folb run this file to repeat the comparison
dataset = "synthetic_1_1"
model = "logistic"
system = "uniform"
objective = "uniform"
algorithms = {algorithms}
rounds = {rounds}
seeds = {seeds}
target = 0.7
evaluate_every = {every}
records = {records}

[set.synthetic_1_1]
draw = 0
"""


def write(
    home: Path,
    name: str = "synthetic_1_1-0123abcd",
    *,
    algorithms=("folb", "fedprox", "fedavg"),
    seeds=3,
    rounds=40,
    done=None,
    devices=30,
    chosen=10,
    every=1,
    records=True,
    finished=True,
    note="",
    differs="",
    started="2026-01-02T03:04:05+00:00",
) -> Path:
    """A run directory with `done` rounds of each run on disk, and results.json if it is `finished`."""
    path = home / name
    path.mkdir(parents=True)
    runs = [
        {"algorithm": label, "name": label, "seed": seed, "parameters": {}, "judged_by": "accuracy"}
        for label in algorithms
        for seed in range(seeds)
    ]
    text = TOML.format(
        algorithms=json.dumps(list(algorithms)),
        rounds=rounds,
        seeds=list(range(seeds)),
        every=every,
        records=str(records).lower(),
    )
    (path / "experiment.toml").write_text(text, encoding="utf-8")
    environment = {
        "folb": "0.1.0",
        "python": "3.13.0",
        "jax": "0.10.2",
        "device": "cpu",
        "command": "folb compare synthetic_1_1",
        "started": started,
        "note": note,
        "devices": devices,
        "identity": "0123abcd" * 8,
        "carrier": "simulator",
        "differs": differs,
        "accelerators": 1,
        "stream": False,
        "keep_model": True,
        "runs": runs,
    }
    (path / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (path / "rounds.jsonl").touch()
    append(path, 1, rounds if done is None else done, devices=devices, chosen=chosen, every=every, records=records)
    if finished:
        (path / "results.json").write_text("{}\n")
    return path


def append(path: Path, first: int, last: int, *, devices=30, chosen=10, every=1, records=True) -> None:
    """Write rounds first .. last of every run: curves that rise towards each algorithm's own level, with noise."""
    runs = json.loads((path / "environment.json").read_bytes())["runs"]
    labels = sorted({run["algorithm"] for run in runs})
    lines = []
    for t in range(first, last + 1):
        for i, run in enumerate(runs):
            rng = np.random.default_rng([i, t])
            level = 0.9 - 0.1 * labels.index(run["algorithm"])
            line = {"run": i, "algorithm": run["algorithm"], "seed": run["seed"], "round": t}
            if t % every == 0:
                accuracy = max(0.05, level * (1 - math.exp(-t / 15)) + rng.normal(0, 0.02))
                line |= {"test_accuracy": float(np.float32(accuracy)), "train_loss": 0.2 + 2 * math.exp(-t / 20)}
            line |= {"bytes_up": 48800, "bytes_down": 24400, "seconds": round(rng.uniform(10, 30), 3)}
            line |= {"updated": True, "lost": 0}
            if records:
                line |= _of_devices(rng, devices, chosen)
                line["lost"] = len(line["lost_devices"])
            lines.append(json.dumps(line) + "\n")
    with open(path / "rounds.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(lines))


def _of_devices(rng, devices: int, chosen: int) -> dict:
    """Of every ten, the fifth is lost and the ninth rejected."""
    who = np.sort(rng.permutation(devices)[:chosen])
    weights = rng.normal(0.1, 0.1, chosen).round(6)
    lost, rejected = np.arange(chosen) % 10 == 4, np.arange(chosen) % 10 == 8
    weights[lost | rejected] = 0.0
    gamma = [
        None if gone else float(value) for gone, value in zip(lost, rng.uniform(0, 1, chosen).round(6), strict=True)
    ]
    return {
        "devices": who.tolist(),
        "times": np.where(lost, 0, 1).tolist(),
        "weights": weights.tolist(),
        "gamma": gamma,
        "lost_devices": who[lost].tolist(),
        "rejected_devices": who[rejected].tolist(),
    }
