"""Where the time of a round goes: the works of the peers' benchmark on this library, under JAX's profiler, on one core.

Prints, for each work, the share of the time in matrix products, in moving data about, in arithmetic on single numbers,
and in no operation at all; and the operations that take most. The share of the products is larger than in the peers'
benchmark, whose limit assumes the rate of large products: small ones are slower.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

import federations
import jax
import on_folb
from work import LOGISTIC, WORKS, load

ROUNDS = {**dict.fromkeys(LOGISTIC, 200), "cnn": 20, "lstm": 3}
CONTAINERS = ("while", "cond", "call", "ThunkExecutor")
KINDS = {  # by words in the names that XLA gives to what it fused
    "matrix products": ("dot", "ynn", "convolution"),
    "moving data": ("copy", "gather", "scatter", "slice", "concatenate", "transpose", "pad", "sort"),
}


def kind(operation: str) -> str:
    """What an operation does, by the first word that is known."""
    return next((name for name, words in KINDS.items() if any(word in operation for word in words)), "the rest")


def operations(directory: str) -> Counter[str]:
    """Nanoseconds in each operation of a profile."""
    spent: Counter[str] = Counter()
    for path in Path(directory).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events if "XLA" in line.name else ():
                    if not event.name.startswith(CONTAINERS):
                        spent[event.name] += event.duration_ns
    return spent


def profile(name: str, most: int) -> None:
    """Print a work's table."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "work.npz"
        federations.write(name, path)
        work = load(name, str(path))
        run, rounds = on_folb.simulation(work, seed=0), ROUNDS[name]
        every = min(work.settings.every, rounds)
        run(1, 1)  # compilation
        begun = os.times()
        run(rounds, every)
        seconds = os.times().user - begun.user
        begun = os.times()
        run(rounds, rounds)
        once = os.times().user - begun.user
        with jax.profiler.trace(directory):
            run(rounds, every)
        spent = operations(directory)
    total = max(seconds * 1e9, spent.total())
    print(f"\n{name}: {1e3 * seconds / rounds:.3g} ms of CPU a round")
    if every < rounds:
        print(f"  {100 * (1 - once / seconds):5.1f} %  less with one evaluation at the end")
    kinds: Counter[str] = Counter()
    for operation, time in spent.items():
        kinds[kind(operation)] += time
    for title, time in [*kinds.most_common(), ("no operation", total - spent.total())]:
        print(f"  {100 * time / total:5.1f} %  {title}")
    for operation, time in spent.most_common(most):
        print(f"         {100 * time / total:5.1f} %  {operation}")


def main() -> None:
    """Profile the works asked for."""
    parser = argparse.ArgumentParser(description="Where the time of a round goes.")
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--most", type=int, default=6, help="operations to name (6)")
    asked = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    for name in asked.works.split(","):
        if name not in WORKS:
            parser.error(f"{name}: should be one of {', '.join(WORKS)}")
        profile(name, asked.most)


if __name__ == "__main__":
    main()
