"""What whitening costs, in one run and as ratios: rounds of `cnn` with it, and with orthogonal steps on the devices.

The work: K = 10 of 20 devices, 20 steps of batch 10 on 28x28 images, four rounds. The arms take turns; each ratio is
of two runs that follow each other.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from folb import algorithms, models, simulate, system
from folb.data.federation import Federation

DEVICES, ROUNDS, TURNS = 20, 4, 7


def main() -> None:
    rng = np.random.default_rng(0)
    n = 60 * DEVICES
    x, y = rng.normal(size=(n, 28, 28)).astype(np.float32), rng.integers(0, 10, n)
    federation = Federation.from_arrays("images", x, y, np.arange(n) % DEVICES)
    model, steps = models.cnn(federation.shape, federation.classes), system.uniform(low=20, high=20)
    plain = algorithms.accord(step_size=None, whiten=None)
    arms = {
        "plain": plain,
        "whiten=orthogonal": plain.replace(whiten="orthogonal"),
        "local=orthogonal": plain.replace(local="orthogonal"),
    }

    def seconds(name: str) -> float:
        began = time.process_time()
        simulate(federation, model, arms[name], rounds=ROUNDS, system=steps, evaluate_every=ROUNDS, evaluate=100)
        return time.process_time() - began

    for name in arms:
        seconds(name)  # compiles
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(TURNS):
        spent = {name: seconds(name) for name in arms}
        for name in arms:
            ratios[name].append(spent[name] / spent["plain"])
    for name, found in ratios.items():
        print(f"{name:20} {median(found):.2f} times the CPU time ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
