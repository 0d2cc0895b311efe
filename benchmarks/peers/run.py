"""Speed against the peers, in one run: the same work on each library, in turn, on the same cores.

Each peer gets a virtual environment of its own under .venv-peers/, with the versions pinned beside this file. A script
for each library does the work (see work.py) in a process of its own and prints one line. The libraries take turns, so
that a noisy moment does not favour one of them, and a turn is a draw: its number is the seed. If a library
cannot be installed or does not run, the results name the reason.

With --gpu, only the libraries built on JAX run, on one GPU. They must be installed in this environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import federations
from table import draw, table
from work import WORKS, Settings, load

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-peers"
FEDAVG = ("logistic", "cnn", "lstm")
ON_GPU = ("folb", "fedjax")
LIMIT = 3600.0  # seconds that a process may take


class Library(NamedTuple):
    """What is measured: its name, and the works that it has."""

    title: str
    works: tuple[str, ...]


LIBRARIES = {
    "folb": Library("folb", tuple(WORKS)),
    "fedjax": Library("FedJAX", (*FEDAVG, "folb", "mimelite")),
    "pfl": Library("pfl", (*FEDAVG, "scaffold")),
    "flower": Library("Flower simulation", FEDAVG),
    "fedlab": Library("FedLab", FEDAVG),
    "torch": Library("PyTorch loop", FEDAVG),
}


class Failure(Exception):  # noqa: N818
    """Why a library has no figures, in one line."""


def python(name: str, gpu: bool) -> str:
    """The interpreter of a library's environment, which is made unless it has the pinned versions already."""
    if name == "folb" or gpu:
        return sys.executable
    home, pins = ENVIRONMENTS / name, HERE / f"requirements-{name}.txt"
    interpreter, installed = str(home / "bin" / "python"), home / "installed.txt"
    if not installed.exists() or installed.read_text() != pins.read_text():
        say(f"installing {LIBRARIES[name].title}")
        ENVIRONMENTS.mkdir(exist_ok=True)
        (ENVIRONMENTS / ".gitignore").write_text("*\n")
        call(sys.executable, "-m", "venv", "--clear", str(home))
        call(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins))
        installed.write_text(pins.read_text())
    return interpreter


def call(*command: str, environment: dict[str, str] | None = None) -> str:
    """What a command prints; or a `Failure`, with the last line of its error output."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Failure(f"took more than {LIMIT:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines() or lines or ["no word of why"]
        raise Failure(complaint[-1].strip())
    return lines[-1] if lines else ""


def script(name: str, file: str, *arguments: str, cores: int, gpu: bool) -> dict[str, Any]:
    """What a script of this directory prints in a library's environment."""
    threads = {f"{library}_NUM_THREADS": str(cores) for library in ("OMP", "OPENBLAS", "MKL")}
    environment = os.environ | ({} if gpu else threads | {"JAX_PLATFORMS": "cpu"})
    line = call(python(name, gpu), str(HERE / file), *arguments, environment=environment)
    try:
        return json.loads(line)
    except ValueError:
        raise Failure(f"printed no figures, but {line!r}") from None


def pin(count: int) -> None:
    """Keep this process, and so all it starts, to the last `count` of its cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])


def machine() -> str:
    """The processor's name."""
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def say(text: str) -> None:
    """Progress, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def take_turns(works: dict[str, Settings], names: list[str], turns: int, cores: int, gpu: bool) -> dict[str, Any]:
    """The figures of each run; the reasons for missing ones, by library or by library and work; and the matrix rate."""
    failures: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    operations: dict[str, float] = {}
    for name in names:
        try:
            python(name, gpu)
        except Failure as failure:
            failures[name] = f"not installed: {failure}"
    if not gpu:
        python("torch", gpu)
        pin(cores)  # installing may use them all
    limit = script("torch", "rate.py", *["--gpu"] * gpu, cores=cores, gpu=gpu)
    with tempfile.TemporaryDirectory() as directory:
        for work, settings in works.items():
            path = Path(directory) / f"{work}.npz"
            federations.write(work, path)
            operations[work] = load(work, str(path)).operations
            for turn, name in itertools.product(range(turns), names):
                if work not in LIBRARIES[name].works or failures.keys() & {name, f"{name} {work}"}:
                    continue
                try:
                    asked = ["--rounds", str(settings.rounds), "--seed", str(turn)]
                    found = script(name, f"on_{name}.py", work, str(path), *asked, cores=cores, gpu=gpu)
                except Failure as failure:
                    failures[f"{name} {work}"] = said = str(failure)
                else:
                    runs.append({"work": work, "library": name, "turn": turn, **found})
                    speed = found["rounds"] / found["seconds" if gpu else "cpu_seconds"]
                    said = f"{speed:.3g} rounds per {'second' if gpu else 'CPU-second'}"
                say(f"{work}, turn {turn + 1}, {LIBRARIES[name].title}: {said}")
    return {**limit, "operations": operations, "failures": failures, "runs": runs}


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="The same work on every library, in turn, on the same cores.")
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--peers", default=",".join(LIBRARIES), help=f"of {', '.join(LIBRARIES)} (all; folb always)")
    parser.add_argument("--turns", type=int, default=3, help="times that each library does each work (3)")
    parser.add_argument("--rounds", type=int, help="rounds of a run, in place of each work's own number")
    parser.add_argument("--cores", type=int, default=1, help="cores to run on (1)")
    parser.add_argument("--gpu", action="store_true", help="run folb and FedJAX on the GPU, as installed here")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs" / "benchmarks",
        help="where peers.json and .png go, or peers-gpu.json and .png",
    )
    asked = parser.parse_args()
    chosen, names = asked.works.split(","), list(dict.fromkeys(["folb", *asked.peers.split(",")]))
    if asked.gpu:
        names = [name for name in names if name in ON_GPU]
    for value, known in [(work, WORKS) for work in chosen] + [(name, LIBRARIES) for name in names]:
        if value not in known:
            parser.error(f"{value}: should be one of {', '.join(known)}")
    there = len(os.sched_getaffinity(0))
    if not 1 <= asked.cores <= there:
        parser.error(f"--cores {asked.cores}: should be from 1 to the {there} there are")
    if asked.turns < 1 or (asked.rounds is not None and asked.rounds < 1):
        parser.error("--turns and --rounds should be at least 1")
    works = {work: WORKS[work] for work in chosen}
    if asked.rounds:
        works = {
            work: own._replace(rounds=asked.rounds, every=min(own.every, asked.rounds)) for work, own in works.items()
        }
    results = {
        "machine": machine(),
        "python": platform.python_version(),
        "cores": None if asked.gpu else asked.cores,  # none are pinned for a GPU
        "turns": asked.turns,
        "works": {work: settings._asdict() for work, settings in works.items()},
        "libraries": {name: LIBRARIES[name].title for name in names},
        **take_turns(works, names, asked.turns, asked.cores, asked.gpu),
    }
    print(table(results))
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = "peers-gpu" if asked.gpu else "peers"
    (asked.out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, asked.out / f"{stem}.png")


if __name__ == "__main__":
    main()
