"""A trial: an experiment carried out in its run directory, from the start or from where it was left."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from folb import __version__, durable, parallel, report, store
from folb.algorithms import Algorithm
from folb.errors import InputError
from folb.experiment import Experiment, Plan, run, to_toml
from folb.runs import Run
from folb.simulator import Observe, memory

log = logging.getLogger(__name__)

# what may change a result's last digit
PROGRAM = ("folb", "python", "jax", "jaxlib", "numpy", "machine", "device", "accelerators", "memory", "stream")


def place(planned: Plan) -> Path:
    """The directory of an experiment: the dataset's name and the beginning of the identity."""
    dataset = planned.experiment.dataset
    stem = Path(dataset).stem if os.path.isabs(dataset) else dataset
    word = re.sub("[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:60]
    return store.home() / f"{word or 'data'}-{planned.identity[:8]}"


def perform(path: Path, planned: Plan, again: bool, observe: Observe, accelerators: int | str = 1) -> list[Run]:
    """Run a planned experiment in its directory, or go on with it, and leave the results there."""
    durable.directory(path)
    with store.claimed(path):
        prepare(path, planned, again, accelerators)
        with store.Recorder(path, store.read(path).environment["runs"]) as recorder:

            def record(i: int, first: int, part: Run) -> None:
                recorder.add(i, first, part)
                observe(i, first, part)

            try:
                runs = run(planned, record, path / store.CHECKPOINTS, accelerators)
                recorder.finish(runs)
            except InputError:  # nothing was run: nothing is left
                store.clear(path)
                raise
        finish(path, planned, runs)
    return runs


def finished(path: Path, planned: Plan) -> bool:
    """Whether the results of this very experiment are in the directory, and whole."""
    if not store.is_run(path) or store.read(path).environment["identity"] != planned.identity:
        return False
    with contextlib.suppress(OSError, ValueError):
        json.loads((path / store.RESULTS).read_bytes())
        return all(len(run.seconds) == planned.experiment.rounds for run in store.read(path).runs())
    return False


def prepare(path: Path, planned: Plan, again: bool = False, accelerators: int | str = 1) -> None:
    """Make the claimed directory ready: from scratch, or for going on with what an earlier process left.

    Rounds and checkpoints of other versions of the program are not gone on with: the results would be neither's.
    """
    now = environment(planned, accelerators)
    there = store.read(path).environment if store.is_run(path) else None
    if there is None:
        store.check_own(path, again)
    if there and not again and there["identity"] != now["identity"]:
        raise InputError("out", str(path), "holds the run of another experiment; --again replaces it")
    if there and not again:
        for key, usual in (("accelerators", 1), ("stream", False)):
            if there.get(key, usual) != now[key]:
                raise InputError(
                    key, now[key], f"should be {there.get(key, usual)}, as this run began; --again runs it anew"
                )
    changed = [] if there is None else [key for key in PROGRAM if there.get(key) != now[key]]
    if changed and not again:
        what = ", ".join(f"{key} {there.get(key)}, now {now[key]}" for key in changed) if there else ""
        log.warning("%s: its rounds are not gone on with, for they were made with %s", path, what)
    if there is None or again or changed:
        store.clear(path)
        durable.replace(path / store.ENVIRONMENT, (json.dumps(now, indent=1) + "\n").encode())
    durable.replace(path / store.EXPERIMENT, to_toml(planned.experiment, planned.federation.note).encode())
    (path / store.RESULTS).unlink(missing_ok=True)  # if it is there, it is damaged
    (path / store.CHECKPOINTS).mkdir(exist_ok=True)


def environment(planned: Plan, accelerators: int | str = 1) -> dict[str, Any]:
    """What a result may depend on beside the experiment, and what its runs are."""
    mesh = parallel.mesh(accelerators)
    return program(1 if mesh is None else mesh.size, planned.stream) | {
        "note": planned.federation.note,
        "devices": planned.federation.N,
        "identity": planned.identity,
        "runs": about_runs(planned.algorithms, planned.experiment.seeds),
    }


def program(accelerators: int = 1, stream: bool = False) -> dict[str, Any]:
    """The versions and the machine that a run is made with, and when."""
    return {
        "folb": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
        "accelerators": accelerators,
        "memory": f"{memory() >> 30} GiB",  # which decides how many runs are stacked
        "stream": stream,
        "command": store.command(),
        "started": store.now(),
    }


def about_runs(algorithms: Sequence[Algorithm], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What each run is: an algorithm, its settings, a seed."""
    labels = report.labels([(algorithm.name, algorithm.origin.settings) for algorithm in algorithms])
    return [
        {
            "algorithm": label,
            "name": algorithm.name,
            "seed": seed,
            "parameters": {key: report.plain(value) for key, value in algorithm.origin.settings.items()},
        }
        for label, algorithm in zip(labels, algorithms, strict=True)
        for seed in seeds
    ]


def finish(path: Path, planned: Plan, runs: Sequence[Run]) -> None:
    """Leave the results and the picture; what was only for going on is removed."""
    leave(path, planned.experiment, planned.federation.note, runs)
    shutil.rmtree(path / store.CHECKPOINTS, ignore_errors=True)


def leave(path: Path, experiment: Experiment, note: str, runs: Sequence[Run]) -> None:
    """Write the results and the picture."""
    from folb.figures import curves

    title = f"{experiment.dataset}, {experiment.model}"
    text = json.dumps(report.document(experiment, note, runs), indent=1, allow_nan=False) + "\n"
    durable.replace(path / store.RESULTS, text.encode())
    durable.replace(path / store.CURVES, curves(runs, target=experiment.target, title=title, note=note))
