"""`folb.read` and `folb.to_frame`: runs that were made before, and what they measured, as a data frame."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np

from folb.errors import InputError, choose
from folb.results.run import Run
from folb.results.summary import labels
from folb.store import directory
from folb.store.directory import RunDirectory

Kind = Literal["pandas", "polars"]
Source = Run | RunDirectory | str | os.PathLike[str]


def read(run: RunDirectory | str | os.PathLike[str]) -> RunDirectory:
    """A run directory: by its path, its name, the beginning of its name, or "last" for the newest."""
    return run if isinstance(run, RunDirectory) else directory.read(directory.find(os.fspath(run)))


def to_frame(runs: Source | Iterable[Source], *, kind: Kind | None = None) -> Any:
    """What runs measured, as a data frame with one row for each evaluated round of each run.

    `runs` are those of `simulate`, run directories, or names that `read` takes; one of these, or several.
    `kind` is "pandas" or "polars"; by default the one that is installed, pandas first. The columns are:

    - `run`: the name of the run directory; none for a run of `simulate`
    - `algorithm`: its label in the table, which has the settings that tell it from others of that name
    - `seed`, `round`
    - `test_accuracy`, `train_loss`: after this round; NaN where it was not measured
    - `bytes_up`, `bytes_down`, `seconds`: of all rounds up to this one, together
    - a column for each metric that any of the runs measured, such as `f1` or `own_worst`; NaN where it was not measured
    """
    make = _library(kind).DataFrame
    parts = [_columns(name, label, run) for name, label, run in _labelled(runs)]
    metrics = dict.fromkeys(name for part in parts for name in part if name not in COLUMNS)
    for part in parts:
        absent = np.full(len(part["round"]), np.nan, np.float32)
        part |= {name: absent for name in metrics if name not in part}
    whole = {column: np.concatenate([part[column] for part in parts]) for column in (*COLUMNS, *metrics)}
    # texts as lists: polars takes an array of them for objects
    return make({column: values.tolist() if values.dtype == object else values for column, values in whole.items()})


COLUMNS = ("run", "algorithm", "seed", "round", "test_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds")


def _library(kind: Kind | None) -> Any:
    names = get_args(Kind) if kind is None else (choose("kind", kind, get_args(Kind)),)
    for name in names:
        with contextlib.suppress(ImportError):
            return import_module(name)
    raise InputError("to_frame", kind, f"needs {' or '.join(names)}: pip install {names[0]}")


def _labelled(runs: Source | Iterable[Source]) -> Iterator[tuple[str | None, str, Run]]:
    """The directory's name, the label and the content of each run."""
    given = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    if not given:
        raise InputError("runs", [], "should be at least one")
    simulated = [run for run in given if isinstance(run, Run)]
    own = iter(labels([(run.algorithm, run.parameters) for run in simulated]))
    for one in given:
        if isinstance(one, Run):
            yield None, next(own), one
        elif isinstance(one, RunDirectory | str | os.PathLike):
            stored = read(one)
            for about, run in zip(stored.environment["runs"], stored.runs(), strict=True):
                yield stored.name, about["algorithm"], run
        else:
            raise InputError("runs", one, "should be runs of simulate, run directories, or their names")


def _columns(name: str | None, label: str, run: Run) -> dict[str, Any]:
    rows = run.evaluated_rounds - 1
    return {
        "run": np.full(len(rows), name, object),
        "algorithm": np.full(len(rows), label, object),
        "seed": np.full(len(rows), run.seed, np.int64),
        "round": run.evaluated_rounds.astype(np.int64),
        "test_accuracy": run.test_accuracy,
        "train_loss": run.train_loss,
        **{key: np.cumsum(getattr(run, key), dtype=np.int64)[rows] for key in ("bytes_up", "bytes_down")},
        "seconds": np.cumsum(run.seconds, dtype=np.float64)[rows],
        **run.metrics,
    }
