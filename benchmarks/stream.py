"""The cost of keeping the samples on the host: the same run with resident and with streamed samples.

FedAvg, K = 10 devices of 100 images of 28 x 28 in float32, 10 steps of batch 10, from files that are mapped. Rounds
without an evaluation, then rounds with one, which reads every sample. The two ways take turns; a number is the median
of three turns, without compilation. If the samples do not fit on the accelerator, there is only the streamed run.

XLA_PYTHON_CLIENT_MEM_FRACTION=0.2 makes a GPU look five times smaller, and --gigabytes can then exceed its memory.
Prints a table, and writes docs/benchmarks/stream.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from folb import Model, algorithms, data, system
from folb.core.round import State
from folb.data.federation import Federation
from folb.models import MODELS
from folb.simulation.problem import Problem, problem
from folb.simulation.program import CAPACITY, NEVER, advancing, begin
from folb.store.environment import memory
from folb.typing import NDArray

SHAPE, CLASSES, EACH, TESTED = (28, 28), 10, 100, 10
HERE = Path(__file__).parent.parent / "docs" / "benchmarks"
TURNS = 3


@contextmanager
def mapped(gigabytes: float, folder: Path | None) -> Iterator[Federation]:
    """Devices of 100 images to train on and 10 to test on: noise that repeats, because its content does not matter."""
    N = max(20, int(gigabytes * 1e9 / ((EACH + TESTED) * 4 * 28 * 28)))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((EACH * 200, *SHAPE), np.float32)
    with tempfile.TemporaryDirectory(dir=folder) as home:
        for side, each in (("train", EACH), ("test", TESTED)):
            path, n = Path(home) / side, N * each
            path.mkdir()
            about = {"descr": "<f4", "fortran_order": False, "shape": (n, *SHAPE)}
            with open(path / "x.npy", "wb") as file:
                np.lib.format.write_array_header_1_0(file, about)
                for first in range(0, n, len(noise)):
                    noise[: n - first].tofile(file)
            np.save(path / "y.npy", rng.integers(0, CLASSES, n, np.int32))
            np.save(path / "device.npy", np.repeat(np.arange(N, dtype=np.int32), each))
        yield data.load(home)


class Way:
    """One way to hold the samples: the problem, and the runs before their first round."""

    def __init__(self, federation: Federation, model: Model, runs: int, streamed: bool) -> None:
        begun = time.perf_counter()
        self.federation = federation
        self.problem: Problem = jax.block_until_ready(
            problem(federation, model, system=system.fixed(work=10), streamed=streamed)
        )
        self.setup = time.perf_counter() - begun
        self.stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[algorithms.fedavg()] * runs)
        self.seeds = np.arange(runs, dtype=np.uint32)
        self.states: State = begin(self.problem, self.stacked, self.seeds)

    def go(self, rounds: int, every: int) -> tuple[float, NDArray]:
        """Seconds a round, and the models after the last."""
        states = self.states
        begun = time.perf_counter()
        with advancing(self.problem, self.federation, self.stacked, self.seeds, every, 1, rounds) as advance:
            for t in range(1, rounds + 1, CAPACITY):
                states, record = advance(states, t, min(rounds + 1, t + CAPACITY))
                jax.block_until_ready((states, record))
        seconds = (time.perf_counter() - begun) / rounds
        return seconds, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(states.params)])


def measure(ways: dict[str, Way], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a round without and with an evaluation, each way in turn."""
    found: dict[str, dict[str, list[float]]] = {name: {"round": [], "evaluated": []} for name in ways}
    last: dict[str, NDArray] = {}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            plain, last[name] = way.go(rounds, NEVER)
            evaluated, _ = way.go(3, 1)
            if turn:  # the first is compilation
                found[name]["round"].append(plain)
                found[name]["evaluated"].append(evaluated)
    if len(last) == 2:
        apart = float(np.max(np.abs(last["resident"] - last["streamed"])))
        print(f"models after {rounds} rounds apart by at most {apart:.1e}")
    return {name: {kind: median(times) for kind, times in kinds.items()} for name, kinds in found.items()}


def main() -> None:
    """Print the table, and leave the figures."""
    parser = argparse.ArgumentParser(description="The same run, resident and streamed.")
    parser.add_argument("--gigabytes", type=float, default=0.2, help="of samples (0.2)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds without an evaluation (30)")
    parser.add_argument("--runs", type=int, default=1, help="runs stacked (1)")
    parser.add_argument("--models", default="logistic,mlp", help="of logistic, mlp, cnn (logistic,mlp)")
    parser.add_argument("--folder", type=Path, help="where the samples are put for a while, such as /dev/shm")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with mapped(options.gigabytes, options.folder) as federation:
        size, room = federation.nbytes / 1e9, memory() / 1e9
        fits = federation.nbytes < 0.7 * memory()
        print(f"{jax.devices()[0].device_kind}, {room:.1f} GB: {federation.N:,} devices, {size:.2f} GB of samples")
        print(f"{'':10}{'':10}{'ms a round':>12}{'with evaluation':>17}{'ratio':>8}{'ratio':>8}")
        for name in options.models.split(","):
            model = MODELS[name](SHAPE, CLASSES)
            kinds = ("resident", "streamed") if fits else ("streamed",)
            ways = {kind: Way(federation, model, options.runs, kind == "streamed") for kind in kinds}
            found[name] = measure(ways, options.rounds)
            for kind, seconds in found[name].items():
                ratios = [seconds[key] / found[name][kinds[0]][key] for key in seconds] if fits else []
                times = f"{1000 * seconds['round']:12.2f}{1000 * seconds['evaluated']:17.1f}"
                print(f"{name:10}{kind:10}{times}{''.join(f'{ratio:8.2f}' for ratio in ratios)}", flush=True)
            del ways
    document = {
        "device": jax.devices()[0].device_kind,
        "memory GB": room,
        "samples GB": size,
        "devices": federation.N,
        "runs": options.runs,
        "seconds": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stream.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
