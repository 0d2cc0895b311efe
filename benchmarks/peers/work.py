"""The work that every library does, and how it is measured. NumPy alone: each environment imports this.

A work is a federation, a network as it starts and the numbers below. In each round K devices, drawn uniformly
without replacement, do `steps` SGD steps on batches of BATCH samples that run from one shuffled pass over their own
samples into the next; the server averages their models, weighted by samples. `folb` adds the proximal term, and each
device's full gradient for rule (13). `mimelite` adds the server's momentum BETA to the local steps, and each device's
full gradient to renew it. `scaffold` adds control variates (option 2), and averages without weights. After every
`every` rounds: the loss over all training samples, and the accuracy over all test samples.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

K, BATCH = 10, 10
BETA = 0.9  # the momentum of `mimelite`
BLOCK = 256  # samples of a network that are evaluated at once, where the library leaves it to the caller


class Settings(NamedTuple):
    """How a federation is trained."""

    steps: int
    lr: float
    rounds: int
    every: int
    mu: float = 0.0


WORKS = {
    "logistic": Settings(steps=20, lr=0.01, rounds=200, every=1),
    "folb": Settings(steps=20, lr=0.01, rounds=200, every=1, mu=0.01),
    "mimelite": Settings(steps=20, lr=0.01, rounds=200, every=1),
    "scaffold": Settings(steps=20, lr=0.01, rounds=200, every=1),
    "cnn": Settings(steps=10, lr=0.05, rounds=20, every=20),
    "lstm": Settings(steps=10, lr=0.3, rounds=3, every=3),
}
LOGISTIC = ("logistic", "folb", "mimelite", "scaffold")  # on Synthetic_1_1
FULL_GRADIENTS = ("folb", "mimelite")


class Work(NamedTuple):
    """Device k owns rows start[k] : start[k] + size[k] of x and y; `initial` is the network, by "layer.name"."""

    name: str
    settings: Settings
    x: Array
    y: Array
    start: Array
    size: Array
    x_test: Array
    y_test: Array
    initial: dict[str, Array]

    @property
    def N(self) -> int:
        """The number of devices."""
        return len(self.size)

    @property
    def block(self) -> int:
        """Samples evaluated at once: all, unless the network is large."""
        return len(self.y) if self.name in LOGISTIC else BLOCK

    def rows(self, k: int) -> slice:
        """Where device k's samples are."""
        return slice(int(self.start[k]), int(self.start[k] + self.size[k]))

    @property
    def operations(self) -> float:
        """Additions and multiplications in the matrix products that a round needs at least, on average.

        Forward: one product for each weight. Backward: one for the weight's gradient and, except where the data itself
        is the input, one for the input's gradient.
        """
        forward, of_data = _products(self.name)
        steps = K * self.settings.steps * BATCH * (3 * forward - of_data)
        gradients = K * len(self.y) / self.N * (3 * forward - of_data)
        gradients = gradients if self.name in FULL_GRADIENTS else 0.0
        return steps + gradients + forward * (len(self.y) + len(self.y_test)) / self.settings.every


def _products(name: str) -> tuple[float, float]:
    """Operations of a sample's forward pass, and of those the ones whose input is the data."""
    if name == "cnn":
        first, second = 2 * 28 * 28 * 9 * 32, 2 * 14 * 14 * 9 * 32 * 64
        return first + second + 2 * (7 * 7 * 64 * 128 + 128 * 62), first
    if name == "lstm":
        return 80 * 2 * ((8 + 256) + (256 + 256)) * 4 * 256 + 2 * 256 * 80, 0.0
    return 2 * 60 * 10, 2 * 60 * 10


def load(name: str, path: str) -> Work:
    """A work as `federations` wrote it."""
    with np.load(path) as arrays:
        fields = {key: arrays[key] for key in arrays.files}
    initial = {key.removeprefix("initial."): fields.pop(key) for key in list(fields) if key.startswith("initial.")}
    return Work(name, WORKS[name], **fields, initial=initial)


def shuffled_rows(rng: np.random.Generator, work: Work, k: int) -> Array:
    """The rows of all the batches of device k in a round: [steps, BATCH]."""
    n, count = int(work.size[k]), work.settings.steps * BATCH
    passes = [rng.permutation(n) for _ in range(-(-count // n))]
    return int(work.start[k]) + np.concatenate(passes)[:count].reshape(-1, BATCH)


class Task(NamedTuple):
    """What the driver asks of a script."""

    work: Work
    path: str
    rounds: int
    seed: int


def task() -> Task:
    """The command line: a work, its file, how many rounds and which draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("path")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    return Task(load(asked.work, asked.path), asked.path, asked.rounds, asked.seed)


class Scores(NamedTuple):
    """The last evaluation of a run."""

    train_loss: float
    test_accuracy: float


def measure(
    task: Task,
    run: Callable[[int, int], Scores],
    version: str,
    cpu: Callable[[], float] = time.process_time,
) -> None:
    """Run one round, evaluated, to warm up; then the work; and print what it took as one line of JSON.

    `run(rounds, every)` starts from the initial network.
    """
    begun = time.perf_counter()
    run(1, 1)
    warm = time.perf_counter() - begun
    begun, spent = time.perf_counter(), cpu()
    scores = run(task.rounds, min(task.work.settings.every, task.rounds))
    cpu_seconds, seconds = cpu() - spent, time.perf_counter() - begun
    if not scores.train_loss < np.log(1 + task.work.y.max()):
        raise SystemExit(f"did not learn: training loss {scores.train_loss}")
    measured = {
        "rounds": task.rounds,
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "warm_up_seconds": warm,
        **scores._asdict(),
        "version": version,
    }
    print(json.dumps(measured), flush=True)
