"""Where the time of a warm `folb compare` goes: python benchmarks/command.py, or make bench-command.

The command is run twice in processes of their own, with one cache of compiled programs; the second one is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

BEGAN = time.perf_counter()


def parts() -> None:
    """Run the command's work in this process, and print the seconds of each part."""
    from folb.cli.main import save_work

    save_work()
    from folb.cli.options import use_compilation_cache
    from folb.experiments import execute
    from folb.experiments.experiment import Experiment
    from folb.experiments.plan import plan
    from folb.results.run import Run

    laps = [("import jax and folb", time.perf_counter() - BEGAN)]
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        laps.append((name, now - last))
        last = now

    use_compilation_cache()
    planned = plan(Experiment("synthetic_1_1", seeds=(0, 1, 2)))
    lap("plan, and draw the data")
    seen: set[int] = set()
    programs = 0

    def observe(i: int, first: int, part: Run) -> None:
        nonlocal programs
        if first == 1 and i not in seen:
            if not seen or programs < i:
                lap("check, trace, load the first program" if not seen else "load the next program")
            programs = max(programs, i + 1)
            seen.add(i)
        else:
            lap("rounds")

    directory = execute.execute(planned, observe=observe)
    lap("results, picture")
    assert len(directory.runs()) == 9
    total: dict[str, float] = {}
    for name, seconds in laps:
        total[name] = total.get(name, 0.0) + seconds
    for name, seconds in total.items():
        print(f"{name:<40}{seconds:6.2f} s")


def main() -> None:
    """Both runs."""
    with tempfile.TemporaryDirectory() as home:
        for run in ("cold", "warm"):
            begun = time.perf_counter()
            where = os.environ | {"XDG_CACHE_HOME": f"{home}/cache", "FOLB_RUNS": f"{home}/{run}"}
            done = subprocess.run(
                [sys.executable, __file__, "parts"], env=where, capture_output=True, text=True, check=True
            )
        print(done.stdout, end="")
        print(f"{'in all, with the start and end of Python':<40}{time.perf_counter() - begun:6.2f} s")


if __name__ == "__main__":
    parts() if sys.argv[1:] == ["parts"] else main()
