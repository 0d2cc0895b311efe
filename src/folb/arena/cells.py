"""The stored results: one file for each contender on each dataset, so that processes do not disturb each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from folb import atomic
from folb.arena import entries
from folb.arena.entries import Contender, Dataset
from folb.errors import InputError
from folb.regular import regular

Cell = Mapping[str, Any]  # the results of a contender on a dataset
NEVER = 2  # a run that never holds the target counts with this many times what it had


def check_home(home: Path) -> None:
    """Raise unless results can be written."""
    atomic.directory(home / "results")


def place(home: Path, dataset: str, contender: str) -> Path:
    """The file of a contender's results on a dataset."""
    return home / "results" / f"{dataset}-{contender}.json"


def keep(home: Path, cell: Cell) -> Path:
    """Write results, and replace earlier ones."""
    path = place(home, cell["dataset"], cell["contender"])
    atomic.document(path, cell)
    return path


def read(home: Path, dataset: Dataset, contender: Contender) -> Cell | None:
    """The stored results, even of other settings; None if there are none."""
    path = place(home, dataset.name, contender.name)
    if not path.is_file():
        return None
    try:
        cell: Cell = json.loads(path.read_bytes())
        lengths = {len(values) for values in cell["runs"].values()}
        if lengths != {len(cell["runs"]["draw"])} or not cell["identity"]:
            raise ValueError("its runs have different lengths")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
    return cell


def damaged(path: Path, error: Exception) -> InputError:
    """The error for a file of results that cannot be read."""
    expected = f"is damaged ({type(error).__name__}: {error}): delete the file, and run it again"
    return InputError("results", str(path), expected)


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


def own(home: Path, known: Sequence[str]) -> Iterator[Contender]:
    """The contenders of the user's own that have results, besides those in `known`."""
    seen = set(known)
    for path in sorted((home / "results").glob("*.json")):
        try:
            about = json.loads(regular(path).read_bytes())["about"]
            one = Contender(**about) if entries.YOURS in about["groups"] else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
        if one is not None and one.name not in seen:
            seen.add(one.name)
            yield one
