"""Experiments over several draws of the data: one plan and one run directory for each draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from folb.experiments.experiment import Experiment
from folb.experiments.plan import Plan
from folb.results.run import Run
from folb.store.directory import RunDirectory

MACHINE = ("folb", "jax", "numpy", "python", "device", "accelerators")

# Runs a planned experiment in the run store, unless it is finished already. The text describes it for people.
Complete = Callable[[Plan, str], RunDirectory]


def draws_of(given: Mapping[str, Any], draws: Sequence[int], drawn: str = "draw") -> Iterator[tuple[int, Experiment]]:
    """The experiment of each draw, a value of the setting `drawn`; the dataset's own if there are none."""
    for draw in draws or (None,):
        settings = dict(given.get("set", {})) | ({} if draw is None else {drawn: draw})
        yield draw or 0, Experiment(**{**given, "set": settings})


def by_algorithm(planned: Plan, draws: Iterable[Sequence[Run]]) -> list[list[Run]]:
    """For each algorithm of a plan, its runs on all draws; each draw has the runs of one algorithm after another."""
    groups: list[list[Run]] = [[] for _ in planned.algorithms]
    for runs in draws:
        n = len(runs) // len(groups)
        for i, group in enumerate(groups):
            group += runs[i * n : (i + 1) * n]
    return groups


def machines(stored: Iterable[RunDirectory]) -> list[dict[str, Any]]:
    """The different machines that the runs were made on."""
    found: list[dict[str, Any]] = []
    for one in stored:
        machine = {key: one.environment[key] for key in MACHINE}
        if machine not in found:
            found.append(machine)
    return found
