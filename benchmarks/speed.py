"""Speed, in one run and as ratios: the simulator against plain device loops, and `folb compare` cold and warm.

The work: Synthetic_1_1, logistic 60 -> 10, K = 10 of 30 devices without replacement, 20 SGD steps of batch 10
over shuffled samples, average weighted by samples, training loss and test accuracy after every round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import numpy as np

from folb import algorithms, data, models, simulate, system
from folb.data.federation import Federation

K, STEPS, BATCH, LR = 10, 20, 10, 0.01


def shuffled_rows(rng: np.random.Generator, n: int) -> Any:
    """STEPS batches of row numbers, from one shuffled pass into the next."""
    passes = -(-STEPS * BATCH // n)
    return np.concatenate([rng.permutation(n) for _ in range(passes)])[: STEPS * BATCH].reshape(STEPS, BATCH)


def torch_loop(federation: Federation) -> Callable[[int], float]:
    """A device loop as one writes it in PyTorch."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    train, test = federation.train, federation.test
    x, y = torch.from_numpy(train.x), torch.from_numpy(train.y).long()
    x_test, y_test = torch.from_numpy(test.x), torch.from_numpy(test.y).long()
    model = torch.nn.Linear(*federation.shape, federation.classes)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)

    def run(rounds: int) -> float:
        rng = np.random.default_rng(0)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        for _ in range(rounds):
            w = [p.detach().clone() for p in model.parameters()]
            total, samples = [torch.zeros_like(p) for p in w], 0
            for k in rng.choice(federation.N, K, replace=False):
                start, n = int(train.start[k]), int(train.size[k])
                with torch.no_grad():
                    for p, q in zip(model.parameters(), w, strict=True):
                        p.copy_(q)
                for rows in torch.from_numpy(start + shuffled_rows(rng, n)):
                    optimiser.zero_grad()
                    F.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimiser.step()
                with torch.no_grad():
                    for t, p in zip(total, model.parameters(), strict=True):
                        t.add_(p, alpha=n)
                samples += n
            with torch.no_grad():
                for p, t in zip(model.parameters(), total, strict=True):
                    p.copy_(t / samples)
                F.cross_entropy(model(x), y).item()
                accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        return float(accuracy)

    return run


def numpy_loop(federation: Federation) -> Callable[[int], float]:
    """The same loop with the gradient of logistic regression written out by hand."""
    train, test = federation.train, federation.test

    def softmax(z: Any) -> Any:
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def run(rounds: int) -> float:
        rng = np.random.default_rng(0)
        W: Any = np.zeros((*federation.shape, federation.classes), np.float32)
        b: Any = np.zeros(federation.classes, np.float32)
        for _ in range(rounds):
            total_W, total_b, samples = np.zeros_like(W), np.zeros_like(b), 0
            for k in rng.choice(federation.N, K, replace=False):
                start, n = int(train.start[k]), int(train.size[k])
                V, c = W.copy(), b.copy()
                for rows in start + shuffled_rows(rng, n):
                    x = train.x[rows]
                    p = softmax(x @ V + c)
                    p[np.arange(BATCH), train.y[rows]] -= 1
                    V -= LR / BATCH * (x.T @ p)
                    c -= LR / BATCH * p.sum(axis=0)
                total_W, total_b, samples = total_W + n * V, total_b + n * c, samples + n
            W, b = total_W / np.float32(samples), total_b / np.float32(samples)
            -np.log(softmax(train.x @ W + b)[np.arange(len(train.y)), train.y]).mean()
            accuracy = float(((test.x @ W + b).argmax(axis=1) == test.y).mean())
        return accuracy

    return run


def simulator(federation: Federation, seeds: int) -> Callable[[int], float]:
    """The compiled simulator."""
    model = models.logistic(federation.shape, federation.classes)
    algorithm = algorithms.fedavg(
        rule={"weights": "samples"}, select={"K": K, "replacement": False}, local={"batch": BATCH, "lr": LR}
    )

    def run(rounds: int) -> float:
        work = system.fixed(work=STEPS)
        runs = simulate(federation, model, algorithm, rounds=rounds, seeds=range(seeds), system=work)
        return float(np.mean([one.final for one in runs]))

    return run


def rounds_per_second(runners: dict[str, tuple[Callable[[int], float], int, int]]) -> dict[str, float]:
    """The median of five turns taken in rotation, so that a noisy moment does not favour one of them."""
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for run, rounds, _ in runners.values():
        run(min(rounds, 200))  # warm-up, and compilation
    for _ in range(5):
        for name, (run, rounds, seeds) in runners.items():
            begun = time.perf_counter()
            accuracy = run(rounds)
            speeds[name].append(rounds * seeds / (time.perf_counter() - begun))
            assert accuracy > 0.5, f"{name} did not learn: {accuracy}"
    return {name: median(values) for name, values in speeds.items()}


def compare_seconds() -> tuple[float, float]:
    """`folb compare` of three algorithms, three seeds, 100 rounds: from an empty cache, and again."""
    command = [sys.executable, "-m", "folb", "compare", "synthetic_1_1", "--algorithms", "folb,fedprox,fedavg"]
    command += ["--set", "rule.weights=equal", "--rounds", "100", "--seeds", "3", "--json", "--again"]
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            begun = time.perf_counter()
            environment = os.environ | {"XDG_CACHE_HOME": cache, "FOLB_RUNS": f"{cache}/runs"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Speed against plain device loops, in one run.")
    parser.add_argument("--seeds", type=int, default=16, help="runs stacked into one program")
    seeds = parser.parse_args().seeds
    federation = data.load("synthetic_1_1")
    speeds = rounds_per_second(
        {
            "PyTorch device loop": (torch_loop(federation), 30, 1),
            "NumPy device loop": (numpy_loop(federation), 100, 1),
            "folb, one run": (simulator(federation, 1), 500, 1),
            f"folb, {seeds} seeds as one program": (simulator(federation, seeds), 100, seeds),
        }
    )
    floor = speeds["PyTorch device loop"]
    print(f"folb on {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    print(f"{'':32}{'rounds/s':>10}{'ratio':>9}")
    for name, speed in speeds.items():
        print(f"{name:32}{speed:10.1f}{speed / floor:8.1f}x")
    cold, warm = compare_seconds()
    print(f"\nfolb compare, 3 algorithms x 3 seeds x 100 rounds: {cold:.1f} s cold, {warm:.1f} s warm")


if __name__ == "__main__":
    main()
