"""Experiments over several draws of the data: one plan and one run directory for each draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from folb.data.source_files import MissingError
from folb.errors import InputError
from folb.experiments.experiment import Experiment
from folb.experiments.plan import Plan, plan
from folb.store.directory import RunDirectory

MACHINE = ("folb", "jax", "numpy", "python", "device", "accelerators")

# Runs a planned experiment in the run store, unless it is finished already. The text describes it for people.
Complete = Callable[[Plan, str], RunDirectory]


def plan_of(experiment: Experiment) -> Plan:
    """The plan of an experiment, as `folb.experiments.plan` makes it, if it has classes."""
    planned = plan(experiment)
    if planned.federation.regression:
        expected = "has numbers to predict; should have classes: the studies compare accuracies"
        raise InputError("dataset", experiment.dataset, expected)
    return planned


@contextlib.contextmanager
def planning(file: Path | None, dataset: str) -> Iterator[None]:
    """Begin an error with the user's file and the dataset's name. Files of folb's own datasets may be missing."""
    try:
        yield
    except MissingError:
        pass
    except InputError as error:
        if file is None:
            raise
        field = error.field.removeprefix(f"{dataset}: ")
        raise InputError(f"{file.name}: {dataset}: {field}", error.value, error.expected) from error


def draws_of(given: Mapping[str, Any], draws: Sequence[int], drawn: str = "draw") -> Iterator[tuple[int, Experiment]]:
    """The experiment of each draw, a value of the setting `drawn`; the dataset's own if there are none."""
    for draw in draws or (None,):
        settings = dict(given.get("set", {})) | ({} if draw is None else {drawn: draw})
        yield draw or 0, Experiment(**{**given, "set": settings})


def machines(stored: Iterable[RunDirectory]) -> list[dict[str, Any]]:
    """The different machines that the runs were made on."""
    machines: list[dict[str, Any]] = []
    for one in stored:
        machine = {key: one.environment[key] for key in MACHINE}
        if machine not in machines:
            machines.append(machine)
    return machines
