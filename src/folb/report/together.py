"""Several run directories as one comparison: a label for each of their arms, one table, and what is unequal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from folb.report.looks import looks
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import RunDirectory

WHOLE = ("dataset", "model", "system", "objective")  # the choices that all algorithms of an experiment share


def together(stored: Sequence[RunDirectory], runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The joined table at the first target, a label and a look for each run of each directory, and what is unequal."""
    labelled = labels(stored)
    own = looks(chain(*labelled))
    target, clocks = stored[0].experiment["target"], {one.clock for one in stored}
    begun = summary.begun(chain(*runs), chain(*labelled))
    clock = clocks.pop() if len(clocks) == 1 else "s, simulated or real"
    headings, rows = summary.table(begun, target, clock, max(one.experiment["rounds"] for one in stored))
    return {
        "labels": labelled,
        "styles": [[own[label].style for label in names] for names in labelled],
        "table": {"headings": headings, "rows": rows},
        "target": target,
        "unequal": list(_unequal(stored)),
    }


def labels(stored: Sequence[RunDirectory]) -> list[list[str]]:
    """For each run of each directory, its algorithm and what distinguishes it from the others.

    These are its settings, choices of the whole experiment and, if still needed, the directory's name with a number.
    """
    entries = [one.environment["runs"] for one in stored]
    flat = iter(summary.labels([(entry["name"], entry["parameters"]) for own in entries for entry in own]))
    labels = [[next(flat) for _ in own] for own in entries]
    for own, names, words in zip(entries, labels, _apart(stored), strict=True):
        if len(set(names)) != len({entry["algorithm"] for entry in own}):  # a label that settings do not explain
            names[:] = [entry["algorithm"] for entry in own]
        names[:] = [" ".join([name, *words]) for name in names]
    shared = Counter(chain(*map(set, labels)))
    directories = [one.name for one in stored]
    for n, (names, handle) in enumerate(zip(labels, directories, strict=True)):
        if directories.count(handle) > 1:
            handle += f" {directories[:n].count(handle) + 1}"
        names[:] = [f"{name} ({handle})" if shared[name] > 1 else name for name in names]
    return labels


def _apart(stored: Sequence[RunDirectory]) -> list[list[str]]:
    """For each experiment, its choices that are not the same in all of them."""
    own = {key for one in stored for entry in one.environment["runs"] for key in entry["parameters"]}
    chosen = [dict(_choices(one.experiment, own)) for one in stored]
    keys = dict.fromkeys(key for choices in chosen for key in choices)
    differing = [key for key in keys if len({choices.get(key) for choices in chosen}) > 1]
    return [[f"{key}={choices[key]}" for key in differing if key in choices] for choices in chosen]


def _choices(experiment: Mapping[str, Any], own: set[str]) -> Iterable[tuple[str, str]]:
    """The choices of an experiment as text, without the settings in `own`, which the labels already have."""
    for key in WHOLE:
        yield key, os.path.basename(experiment[key]) or experiment[key]
    parts = {experiment[key] for key in WHOLE}
    for part, settings in experiment.get("set", {}).items():
        if part in parts and isinstance(settings, Mapping):
            yield from ((key, summary.spelt(value)) for key, value in settings.items() if key not in own)


def _unequal(stored: Sequence[RunDirectory]) -> Iterable[str]:
    """What a reader of the joined table should know, a sentence each."""
    experiments = [one.experiment for one in stored]
    datasets = dict.fromkeys(os.path.basename(one["dataset"]) or one["dataset"] for one in experiments)
    rounds = sorted({one["rounds"] for one in experiments})
    targets = list(dict.fromkeys(one.measure.goal(one.experiment["target"]) for one in stored))
    if len(datasets) > 1:
        yield f"The runs are of different data: {', '.join(datasets)}."
    if len(rounds) > 1:
        yield f"The runs have from {rounds[0]:,} to {rounds[-1]:,} rounds: a curve ends with its run."
    if len(targets) > 1:
        yield f"The runs have the targets {', '.join(targets)}: here all are measured by one, at first {targets[0]}."
    if len({one.clock for one in stored}) > 1:
        yield "Seconds are simulated in some of them and real in others."
