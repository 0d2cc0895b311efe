"""How soon a comparison shows its first point: python benchmarks/first_point.py ["DATASET OPTIONS" ...].

`folb compare` is started for each dataset (`make bench-first`), or with the given words: with an empty cache of
compiled programs, and then with that cache. It is stopped once its run directory has an accuracy or, if the first round
takes long, once it has printed one before that round. CPU seconds are those of all cores, until it has stopped.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from folb.data import DATASETS

LONGEST = 600.0  # seconds
LONG_ROUNDS = ["shakespeare --algorithms folb"]


def first_point(words: str, home: Path) -> str:
    """Start a comparison with its files in `home`, and stop it at its first point: the seconds, or what went wrong."""
    before, began = _cpu(), time.monotonic()
    environment = os.environ | {
        "FOLB_RUNS": str(home / f"runs-{time.time_ns()}"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    with (home / "log").open("w+") as log:
        command = [sys.executable, "-m", "folb", "compare", *shlex.split(words)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while not (_has_point(Path(environment["FOLB_RUNS"])) or "test accuracy" in (home / "log").read_text()):
                if process.poll() is not None or time.monotonic() - began > LONGEST:
                    return (home / "log").read_text().strip().splitlines()[-1]
                time.sleep(0.1)
            seconds = time.monotonic() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    return f"{seconds:.0f} ({_cpu() - before:.0f})"


def _has_point(runs: Path) -> bool:
    return any("test_accuracy" in json.loads(line) for path in runs.glob("*/rounds.jsonl") for line in _lines(path))


def _lines(path: Path) -> list[str]:
    """The complete lines of a file that is being written."""
    return path.read_text().split("\n")[:-1]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """A line for each dataset."""
    print("| folb compare | cold: seconds (CPU seconds) | warm: seconds (CPU seconds) |\n|---|---|---|")
    for words in sys.argv[1:] or [*DATASETS, *LONG_ROUNDS]:
        with tempfile.TemporaryDirectory() as home:
            print(f"| {words} | {first_point(words, Path(home))} | {first_point(words, Path(home))} |", flush=True)


if __name__ == "__main__":
    main()
