"""The networks' speed on a CPU, in one run and as ratios: the simulator against a plain PyTorch loop, by CPU time.

The work: K = 10 of 30 devices without replacement, 10 SGD steps of batch 10 over shuffled samples, average weighted
by samples, training loss and test accuracy after the last round. The convolutional network (conv 32, conv 64,
dense 128, 62 classes) learns 28x28 images, the character LSTM (embedding 8, 2 x 256) windows of 80 characters. All on
one core, where CPU time measures the work, and no threads that wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

with contextlib.suppress(AttributeError):  # not every system can; before the libraries count the cores
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import torch
import torch.nn.functional as F  # noqa: N812

from folb import Model, algorithms, models, simulate, system
from folb.data.federation import Federation

DEVICES, K, STEPS, BATCH = 30, 10, 10, 10


class Work(NamedTuple):
    """A network in both libraries, and what it is trained on."""

    federation: Federation
    model: Model
    network: Callable[[Any], Any]
    parameters: list[Any]
    lr: float
    rounds: int


def images() -> Work:
    """Noisy copies of one image for each class."""
    rng = np.random.default_rng(0)
    n, classes = 60 * DEVICES, 62
    y = rng.integers(0, classes, n)
    x = rng.normal(size=(classes, 28, 28))[y] + rng.normal(size=(n, 28, 28))
    federation = Federation.from_arrays("images", x, y, np.arange(n) % DEVICES, classes=classes)
    network = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 28)),
        *(torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(64 * 7 * 7, 128), torch.nn.ReLU(), torch.nn.Linear(128, classes)),
    )
    parameters = list(network.parameters())
    return Work(federation, models.cnn((28, 28), classes), network, parameters, lr=0.05, rounds=3)


def text() -> Work:
    """Characters as unequally frequent as those of a language."""
    rng = np.random.default_rng(0)
    n, classes = 20 * DEVICES, 80
    frequency = 1 / np.arange(1, classes + 1)
    x = rng.choice(classes, (n, 81), p=frequency / frequency.sum())
    federation = Federation.from_arrays("text", x[:, :80], x[:, 80], np.arange(n) % DEVICES, classes=classes)
    embedding, lstm = torch.nn.Embedding(classes, 8), torch.nn.LSTM(8, 256, 2, batch_first=True)
    scores = torch.nn.Linear(256, classes)

    def network(x: Any) -> Any:
        return scores(lstm(embedding(x))[0][:, -1])

    parameters = [*embedding.parameters(), *lstm.parameters(), *scores.parameters()]
    return Work(federation, models.char_lstm((80,), classes), network, parameters, lr=0.3, rounds=2)


def torch_loop(work: Work) -> Callable[[], float]:
    """A device loop as one writes it in PyTorch."""
    federation, network, parameters = work.federation, work.network, work.parameters
    train, test = federation.train, federation.test
    x, x_test = (torch.from_numpy(side.x) for side in (train, test))
    y, y_test = (torch.from_numpy(side.y).long() for side in (train, test))
    optimiser = torch.optim.SGD(parameters, lr=work.lr)
    initial = [p.detach().clone() for p in parameters]

    def put(values: list[Any]) -> None:
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)

    def run() -> float:
        rng = np.random.default_rng(0)
        w = initial
        for _ in range(work.rounds):
            total, samples = [torch.zeros_like(p) for p in w], 0
            for k in rng.choice(federation.N, K, replace=False):
                start, n = int(train.start[k]), int(train.size[k])
                passes = -(-STEPS * BATCH // n)
                rows = start + np.concatenate([rng.permutation(n) for _ in range(passes)])[: STEPS * BATCH]
                put(w)
                for batch in torch.from_numpy(rows).split(BATCH):
                    optimiser.zero_grad()
                    F.cross_entropy(network(x[batch]), y[batch]).backward()
                    optimiser.step()
                with torch.no_grad():
                    for t, p in zip(total, parameters, strict=True):
                        t.add_(p, alpha=n)
                samples += n
            w = [t / samples for t in total]
        put(w)
        with torch.no_grad():
            (network(x_test).argmax(1) == y_test).float().mean().item()
            return float(F.cross_entropy(network(x), y).item())

    return run


def simulator(work: Work) -> Callable[[], float]:
    """The compiled simulator."""
    algorithm = algorithms.fedavg(
        rule={"weights": "samples"}, select={"K": K, "replacement": False}, local={"batch": BATCH, "lr": work.lr}
    )

    def run() -> float:
        steps = system.fixed(work=STEPS)
        runs = simulate(
            work.federation,
            work.model,
            algorithm,
            rounds=work.rounds,
            evaluate_every=work.rounds,
            evaluate="all",
            system=steps,
        )
        return float(runs[0].train_loss[-1])

    return run


def rounds_per_cpu_second(runners: dict[str, Callable[[], float]], work: Work) -> dict[str, float]:
    """The median of five turns taken in rotation, so that a noisy moment does not favour one of them."""
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        run()  # warm-up, and compilation
    for _ in range(5):
        for name, run in runners.items():
            begun = time.process_time()
            loss = run()
            speeds[name].append(work.rounds / (time.process_time() - begun))
            assert loss < np.log(work.federation.classes), f"{name} did not learn: {loss}"
    return {name: median(values) for name, values in speeds.items()}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':32}{'PyTorch':>10}{'folb':>10}{'ratio':>9}   (rounds per CPU-second)")
    for name, work in (("CNN", images()), ("character LSTM", text())):
        speeds = rounds_per_cpu_second({"PyTorch": torch_loop(work), "folb": simulator(work)}, work)
        print(f"{name:32}{speeds['PyTorch']:10.2f}{speeds['folb']:10.2f}{speeds['folb'] / speeds['PyTorch']:8.2f}x")


if __name__ == "__main__":
    main()
