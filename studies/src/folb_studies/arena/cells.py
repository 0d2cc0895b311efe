"""The stored results of the arena: a cell for each contender on each dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from folb_studies.arena import entries
from folb_studies.arena.entries import Contender, Dataset
from folb_studies.results import Cell, Results

NEVER = 2  # a run that never holds the target counts with this many times what it had


def name(dataset: str, contender: str) -> str:
    """The name of a contender's results on a dataset."""
    return f"{dataset}-{contender}"


def keep(results: Results, cell: Cell) -> None:
    """Store results, in place of earlier ones."""
    results.keep(name(cell["dataset"], cell["contender"]), cell)


def read(results: Results, dataset: Dataset, contender: Contender) -> Cell | None:
    """The stored results, even of other settings; None if there are none."""
    cell = results.get(name(dataset.name, contender.name))
    if cell is None:
        return None
    try:
        lengths = {len(values) for values in cell["runs"].values()}
        if lengths != {len(cell["runs"]["draw"])} or not cell["identity"]:
            raise ValueError("its runs have different lengths")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise results.damaged(name(dataset.name, contender.name), error) from error
    return cell


def fits(cell: Cell, dataset: Dataset, contender: Contender, points: int, target: Any) -> bool:
    """Whether results are of this contender, dataset and budget, and of these targets if there are any."""
    wanted = cell["target"] if target is None else target
    return bool(cell["identity"] == entries.digest(dataset, contender, points, wanted))


def logarithms(held: Sequence[int | None], had: Sequence[float]) -> list[float]:
    """The logarithm of what each run needed to hold the target, from what it had until then, or in all if it never did.

    Contenders are tuned by its mean and compared by its mean: there is no other measure of rounds, bytes or seconds.
    """
    times = (NEVER if at is None else 1 for at in held)
    return [math.log(max(value, 1e-9) * n) for value, n in zip(had, times, strict=True)]


def log_rounds(held: Sequence[int | None], rounds: float) -> list[float]:
    """The same for rounds, of runs that had so many."""
    return logarithms(held, [rounds if at is None else at for at in held])


def merit(held: Sequence[int | None], diverged: bool, rounds: int) -> tuple[bool, float]:
    """The key that ranks the points of a search, smallest first. A point that diverged loses."""
    return diverged, round(mean(log_rounds(held, rounds)), 9)  # sums in another order are equal


def passed_over(cell: Cell) -> Mapping[str, Any] | None:
    """The best of the tried points if it is better than the winner that was run; None if the winner is the best."""

    def key(point: Mapping[str, Any]) -> tuple[bool, float]:
        return merit(point["held"], point["diverged"], cell["rounds"])

    best = min(cell["tried"], key=key, default=None)
    return best if best is not None and key(best) < key(cell["tried"][0]) else None


def own(results: Results, known: Sequence[str]) -> Iterator[Contender]:
    """The contenders of the user's own that have results, besides those in `known`."""
    seen = set(known)
    for where, cell in results.cells().items():
        try:
            about = cell["about"]
            one = Contender(**about) if entries.YOURS in about["groups"] else None
        except (ValueError, KeyError, TypeError) as error:
            raise results.damaged(where, error) from error
        if one is not None and one.name not in seen:
            seen.add(one.name)
            yield one
