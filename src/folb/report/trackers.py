"""Trackers: log each round for TensorBoard, MLflow or Weights & Biases. Each needs the extra of the same name.

Everything goes into `tracking` in the run directory, and nothing over the network, unless the tool's own environment
variables say otherwise: MLFLOW_TRACKING_URI names a server, WANDB_MODE=online uploads. A resumed run logs all its
rounds again from the first into a new record, so no round is missing or logged twice. On a server this
is a new run, and the unfinished one stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folb.errors import InputError, choose
from folb.measures import is_regression
from folb.results.run import Run
from folb.simulation.stacked import Observer
from folb.store.directory import TRACKING


class About(NamedTuple):
    """A run to track: its name, the runs it was started with, and its parameters."""

    name: str
    group: str
    parameters: Mapping[str, Any]


Rounds = Sequence[tuple[int, Mapping[str, float]]]  # each round's number and values
Log = Callable[[Rounds], None]


@contextlib.contextmanager
def tensorboard(path: Path, about: About) -> Iterator[Log]:
    """Event files, which `tensorboard --logdir` reads: a directory for each run."""
    tool = import_module("tensorboardX")
    with tool.SummaryWriter(str(path / re.sub("[^A-Za-z0-9_.=-]+", "-", about.name))) as writer:
        writer.add_text("parameters", f"```\n{json.dumps(about.parameters, indent=1)}\n```")

        def log(rounds: Rounds) -> None:
            for t, values in rounds:
                for name, value in values.items():
                    writer.add_scalar(name, value, t)
            writer.flush()

        yield log


@contextlib.contextmanager
def mlflow(path: Path, about: About) -> Iterator[Log]:
    """MLflow's files, which `mlflow ui --backend-store-uri` reads: an experiment with its runs."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a store without a server or a database
    tool, entities = import_module("mlflow"), import_module("mlflow.entities")
    client = tool.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or path.resolve().as_uri())
    experiment = client.get_experiment_by_name(about.group)
    where = experiment.experiment_id if experiment else client.create_experiment(about.group)
    run = client.create_run(where, run_name=about.name).info.run_id
    client.log_batch(run, params=[entities.Param(name, str(value)) for name, value in about.parameters.items()])

    def log(rounds: Rounds) -> None:
        now = int(1000 * time.time())
        for t, values in rounds:
            client.log_batch(run, metrics=[entities.Metric(name, value, now, t) for name, value in values.items()])

    status = "KILLED"
    try:
        yield log
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


@contextlib.contextmanager
def wandb(path: Path, about: About) -> Iterator[Log]:
    """The files of Weights & Biases, which `wandb sync` uploads: the runs of an experiment are a group."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_CACHE_DIR", str(path.resolve() / "cache"))
    tool = import_module("wandb")
    path.mkdir(parents=True, exist_ok=True)
    run = tool.init(
        project=os.environ.get("WANDB_PROJECT") or "folb",
        group=about.group,
        name=about.name,
        config=dict(about.parameters),
        dir=str(path),
        mode=os.environ.get("WANDB_MODE") or "offline",
        reinit="create_new",
        # only the rounds, nothing about the machine
        settings=tool.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        ),
    )

    def log(rounds: Rounds) -> None:
        for t, values in rounds:
            run.log(dict(values), step=t)

    code = 1
    try:
        yield log
        code = 0
    finally:
        run.finish(exit_code=code)


TRACKERS: dict[str, tuple[str, Callable[[Path, About], AbstractContextManager[Log]]]] = {
    "tensorboard": ("tensorboardX", tensorboard),
    "mlflow": ("mlflow", mlflow),
    "wandb": ("wandb", wandb),
}


def check(name: str) -> None:
    """Raise an `InputError` unless it is a tracker with its package installed."""
    if find_spec(TRACKERS[choose("track", name, TRACKERS)][0]) is None:
        raise InputError("track", name, f"needs a package that is not installed: pip install 'folb[{name}]'")


@contextlib.contextmanager
def tracking(name: str, path: Path, runs: Sequence[Mapping[str, Any]]) -> Iterator[Observer]:
    """An observer that logs the rounds of `runs` (from environment.json) in the run directory `path`."""
    home, opened = path / TRACKING / name, TRACKERS[name][1]
    logs: dict[int, Log] = {}
    with ExitStack() as stack:

        def observe(first: int, parts: Mapping[int, Run]) -> None:
            if not logs:
                shutil.rmtree(home, ignore_errors=True)
            for i, part in parts.items():
                if i not in logs:
                    run_name = f"{i} {runs[i]['algorithm']} seed {runs[i]['seed']}"
                    about = About(run_name, path.resolve().name, _parameters(runs[i]))
                    logs[i] = stack.enter_context(opened(home, about))
                logs[i](_rounds(first, part))

        yield observe


def _parameters(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"algorithm": run["name"], "seed": run["seed"], **run["parameters"]}


def _rounds(first: int, part: Run) -> Rounds:
    rounds: list[tuple[int, dict[str, float]]] = []
    for n in range(len(part.seconds)):
        values = {name: getattr(part, name)[n].item() for name in ("bytes_up", "bytes_down", "seconds")}
        if "epsilon" in part.records:
            values["epsilon"] = part.records["epsilon"][n].item()
        for at in np.flatnonzero(part.evaluated_rounds == first + n):
            accuracy = () if is_regression(part.judged_by) else ("test_accuracy",)
            values |= {name: getattr(part, name)[at].item() for name in (*accuracy, "train_loss")}
            values |= {name: own[at].item() for name, own in part.metrics.items()}
        rounds.append((first + n, values))
    return rounds
