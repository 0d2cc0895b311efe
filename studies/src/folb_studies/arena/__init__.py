"""The arena: contenders on datasets, everyone tuned with the same budget, winners run on other seeds and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from folb.data.source_files import MissingError
from folb.errors import InputError, check_whole
from folb.experiments.box import POINTS
from folb_studies.arena import cells, contest
from folb_studies.arena.entries import YOURS, Contender, Dataset
from folb_studies.draws import Complete, planning
from folb_studies.results import Results

__all__ = ["execute_plan"]


def execute_plan(
    datasets: Sequence[Dataset],
    contenders: Sequence[Contender],
    results: Results,
    complete: Complete,
    tell: Callable[[str], None],
    points: int = POINTS,
    reference: Contender | None = None,
    file: Path | None = None,
) -> None:
    """Run every contender on every dataset, unless its results are there and fit what is asked for.

    `reference` gives each dataset its target; by default it is the contender called fedavg. It is searched first, even
    if it is not among the contenders. Several processes may share one file of results if they have different datasets.
    `file` is the user's own, which the datasets are from: each is planned before the first run.
    """
    check_whole("points", points, 1, 10**6)
    results.check()
    reference = reference or contest.reference(contenders)
    ordered = sorted(contenders, key=lambda one: one.name != reference.name)
    cups = [
        contest.Contest(dataset, reference, results, complete, points) for dataset in datasets if not dataset.left_out
    ]
    if not cups:
        raise InputError("only", [dataset.name for dataset in datasets], "should fit a dataset that is not left out")
    for cup in cups:
        for one in (reference, *ordered):
            cup.check_budget(one)
        if file is not None:
            with planning(file, cup.dataset.name):
                cup.check(reference)
    for contender in contenders:
        if YOURS in contender.groups:
            cups[0].check(contender)
    total, done, missing = len(cups) * len(ordered), 0, []
    for cup in cups:
        for contender in ordered:
            done += 1
            where = f"{cup.dataset.name}, {contender.name}"
            if why := cup.dataset.without.get(contender.name):
                tell(f"{where} is left out ({done} of {total}): {why}")
                continue
            if cup.stored(contender) is not None:
                tell(f"{where} is done already ({done} of {total})")
                continue
            try:
                cells.keep(results, cup.cell_of(contender))
            except MissingError as error:
                tell(f"{cup.dataset.name} is left out: {error}")
                missing.append(error)
                done += len(ordered) - 1 - ordered.index(contender)
                break
            tell(f"{where} is done ({done} of {total})")
    if len(missing) == len(cups):  # nothing to make a page from
        raise missing[0]
