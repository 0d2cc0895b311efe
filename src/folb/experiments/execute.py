"""An experiment carried out in its run directory, from the start or from where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from folb import atomic
from folb.errors import InputError
from folb.experiments.experiment import Experiment, to_mapping, to_toml
from folb.experiments.plan import Plan
from folb.results.document import document
from folb.results.run import Run
from folb.simulation import parallel
from folb.simulation.simulate import Observe, simulate
from folb.store import directory, lock
from folb.store.environment import PROGRAM, about_runs, program
from folb.store.recorder import Recorder

log = logging.getLogger(__name__)


def place(planned: Plan) -> Path:
    """The directory of an experiment: the dataset's name and the beginning of the identity."""
    dataset = planned.experiment.dataset
    stem = Path(dataset).stem if os.path.isabs(dataset) else dataset
    word = re.sub("[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:60]
    return directory.home() / f"{word or 'data'}-{planned.identity[:8]}"


def perform(path: Path, planned: Plan, again: bool, observe: Observe, accelerators: int | str = 1) -> list[Run]:
    """Run a planned experiment in its directory, or go on with it, and leave the results there."""
    atomic.directory(path)
    with lock.claimed(path):
        prepare(path, planned, again, accelerators)
        with Recorder(path, directory.read(path).environment["runs"]) as recorder:

            def record(i: int, first: int, part: Run) -> None:
                recorder.add(i, first, part)
                observe(i, first, part)

            try:
                runs = run(planned, record, path / directory.CHECKPOINTS, accelerators)
                recorder.finish(runs)
            except InputError:  # nothing was run: nothing is left
                directory.clear(path)
                raise
        finish(path, planned, runs)
    return runs


def finished(path: Path, planned: Plan) -> bool:
    """Whether the results of this very experiment are in the directory, and whole."""
    if not directory.is_run(path) or directory.read(path).environment["identity"] != planned.identity:
        return False
    with contextlib.suppress(OSError, ValueError):
        json.loads((path / directory.RESULTS).read_bytes())
        return all(len(run.seconds) == planned.experiment.rounds for run in directory.read(path).runs())
    return False


def prepare(path: Path, planned: Plan, again: bool = False, accelerators: int | str = 1) -> None:
    """Make the claimed directory ready: from scratch, or for going on with what an earlier process left.

    Rounds and checkpoints of other versions of the program are not gone on with: the results would be neither's.
    """
    now = environment(planned, accelerators)
    there = directory.read(path).environment if directory.is_run(path) else None
    if there is None:
        directory.check_own(path, again)
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
        directory.clear(path)
        atomic.replace(path / directory.ENVIRONMENT, (json.dumps(now, indent=1) + "\n").encode())
    atomic.replace(path / directory.EXPERIMENT, to_toml(planned.experiment, planned.federation.note).encode())
    (path / directory.RESULTS).unlink(missing_ok=True)  # if it is there, it is damaged
    (path / directory.CHECKPOINTS).mkdir(exist_ok=True)


def environment(planned: Plan, accelerators: int | str = 1) -> dict[str, Any]:
    """What a result may depend on beside the experiment, and what its runs are."""
    mesh = parallel.mesh(accelerators)
    return program(1 if mesh is None else mesh.size, planned.stream) | {
        "note": planned.federation.note,
        "devices": planned.federation.N,
        "identity": planned.identity,
        "runs": about_runs(planned.algorithms, planned.experiment.seeds),
    }


def finish(path: Path, planned: Plan, runs: Sequence[Run]) -> None:
    """Leave the results and the picture; what was only for going on is removed."""
    leave(path, planned.experiment, planned.federation.note, runs)
    shutil.rmtree(path / directory.CHECKPOINTS, ignore_errors=True)


def leave(path: Path, experiment: Experiment, note: str, runs: Sequence[Run]) -> None:
    """Write the results and the picture."""
    from folb.report.figures import curves

    picture = curves(runs, target=experiment.target, title=f"{experiment.dataset}, {experiment.model}", note=note)
    directory.leave(path, document(to_mapping(experiment), note, runs), picture)


def run(
    planned: Plan,
    observe: Observe | None = None,
    checkpoints: Path | None = None,
    accelerators: int | str = 1,
) -> list[Run]:
    """Run a planned experiment."""
    experiment = planned.experiment
    return simulate(
        planned.federation,
        planned.model,
        planned.algorithms,
        rounds=experiment.rounds,
        seeds=experiment.seeds,
        system=planned.system,
        objective=experiment.objective,
        evaluate_every=experiment.evaluate_every,
        record=("weights", "gamma") if experiment.records else (),
        accelerators=accelerators,
        observe=observe,
        checkpoints=checkpoints,
        stream=planned.stream,
    )
