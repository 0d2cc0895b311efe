"""Trackers: log each round for TensorBoard, MLflow or Weights & Biases. Each needs the extra of the same name.

Everything goes into `tracking` in the run directory, and nothing over the network, unless the tool's own environment
variables say otherwise: MLFLOW_TRACKING_URI names a server, WANDB_MODE=online uploads. A resumed run logs all rounds
again into a new record, so no round is missing or logged twice. On a server the unfinished record stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from folb.errors import InputError, choose
from folb.measures import is_regression
from folb.results.run import Run
from folb.simulation.stacked import Observer
from folb.store.directory import TRACKING

Parameters = Mapping[str, Any]
Rounds = Sequence[tuple[int, Mapping[str, float]]]  # each round's number and values
# what logs rounds, and what ends the record of a run: of a whole one, or of an interrupted one
Tracked = tuple[Callable[[Rounds], object], Callable[[bool], object]]


# each tracker gets where its files go, a run's name, that of the runs it was started with, and its parameters


def tensorboard(path: Path, name: str, group: str, parameters: Parameters) -> Tracked:
    """Event files, which `tensorboard --logdir` reads: a directory for each run."""
    tool = import_module("tensorboardX")
    writer = tool.SummaryWriter(str(path / re.sub("[^A-Za-z0-9_.=-]+", "-", name)))
    writer.add_text("parameters", f"```\n{json.dumps(parameters, indent=1)}\n```")

    def log(rounds: Rounds) -> None:
        for t, values in rounds:
            for key, value in values.items():
                writer.add_scalar(key, value, t)
        writer.flush()

    return log, lambda _: writer.close()


def mlflow(path: Path, name: str, group: str, parameters: Parameters) -> Tracked:
    """MLflow's files, which `mlflow ui --backend-store-uri` reads: an experiment with its runs."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a store without a server or a database
    tool, entities = import_module("mlflow"), import_module("mlflow.entities")
    client = tool.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or path.resolve().as_uri())
    experiment = client.get_experiment_by_name(group)
    where = experiment.experiment_id if experiment else client.create_experiment(group)
    run = client.create_run(where, run_name=name).info.run_id
    client.log_batch(run, params=[entities.Param(key, str(value)) for key, value in parameters.items()])

    def log(rounds: Rounds) -> None:
        now = int(1000 * time.time())
        for t, values in rounds:
            client.log_batch(run, metrics=[entities.Metric(key, value, now, t) for key, value in values.items()])

    return log, lambda whole: client.set_terminated(run, "FINISHED" if whole else "KILLED")


def wandb(path: Path, name: str, group: str, parameters: Parameters) -> Tracked:
    """The files of Weights & Biases, which `wandb sync` uploads: the runs of an experiment are a group."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_CACHE_DIR", str(path.resolve() / "cache"))
    tool = import_module("wandb")
    path.mkdir(parents=True, exist_ok=True)
    # only the rounds, nothing about the machine
    unused = dict.fromkeys(("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True)
    run = tool.init(
        project=os.environ.get("WANDB_PROJECT") or "folb",
        group=group,
        name=name,
        config=dict(parameters),
        dir=str(path),
        mode=os.environ.get("WANDB_MODE") or "offline",
        reinit="create_new",
        settings=tool.Settings(silent=True, console="off", x_save_requirements=False, **unused),
    )

    def log(rounds: Rounds) -> None:
        for t, values in rounds:
            run.log(dict(values), step=t)

    return log, lambda whole: run.finish(exit_code=0 if whole else 1)


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


def check(name: str) -> None:
    """Raise an `InputError` unless it is a tracker with its package installed."""
    if find_spec({"tensorboard": "tensorboardX"}.get(choose("track", name, TRACKERS), name)) is None:
        raise InputError("track", name, f"needs a package that is not installed: pip install 'folb[{name}]'")


@contextlib.contextmanager
def tracking(name: str, path: Path, runs: Sequence[Mapping[str, Any]]) -> Iterator[Observer]:
    """An observer that logs the rounds of `runs` (from environment.json) in the run directory `path`."""
    home = path / TRACKING / name
    logs: dict[int, Callable[[Rounds], object]] = {}
    with contextlib.ExitStack() as stack:

        def observe(first: int, parts: Mapping[int, Run]) -> None:
            if not logs:
                shutil.rmtree(home, ignore_errors=True)
            for i, part in parts.items():
                if i not in logs:
                    own = runs[i]
                    parameters = {"algorithm": own["name"], "seed": own["seed"], **own["parameters"]}
                    own_name = f"{i} {own['algorithm']} seed {own['seed']}"
                    logs[i], end = TRACKERS[name](home, own_name, path.resolve().name, parameters)
                    stack.push(partial(_ended, end))
                logs[i](_rounds(first, part))

        yield observe


def _ended(end: Callable[[bool], object], error: type[BaseException] | None, *_: object) -> None:
    end(error is None)


def _rounds(first: int, part: Run) -> Rounds:
    always = {name: getattr(part, name) for name in ("bytes_up", "bytes_down", "seconds")}
    always |= {name: own for name, own in part.records.items() if name == "epsilon"}
    curves = () if is_regression(part.judged_by) else ("test_accuracy",)
    evaluated = {name: getattr(part, name) for name in (*curves, "train_loss")} | part.metrics
    rounds = [
        (t, {name: own[n].item() for name, own in always.items()})
        for n, t in enumerate(range(first, first + len(part.seconds)))
    ]
    for at, t in enumerate(part.evaluated_rounds.tolist()):
        rounds[t - first][1].update({name: own[at].item() for name, own in evaluated.items()})
    return rounds
