"""`folb export`: a run's rounds as csv or parquet, its table as latex."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from folb.errors import InputError
from folb.results import summary
from folb.store.directory import RunDirectory

# the columns of a round, and their types in parquet; the columns of its devices exist only if they were recorded
COLUMNS = {
    "algorithm": "string",
    "seed": "int64",
    "round": "int32",
    "test_accuracy": "float32",
    "train_loss": "float32",
    "bytes_up": "int64",
    "bytes_down": "int64",
    "seconds": "float32",
    "updated": "bool_",
    "lost": "int32",
    "rounds_to_target": "int32",  # these two belong to the whole run, and are the same in each of its rounds
    "held_from": "int32",
}
SPENT = {"epsilon": "float64"}  # only of private runs
OF_DEVICES = {
    "devices": "int32",
    "times": "int32",
    "weights": "float32",
    "gamma": "float32",
    "own": "float32",
    "lost_devices": "int32",
    "rejected_devices": "int32",
}
OF_METRICS = "float32"  # the type of each metric; it has a column of its name if it was measured


def to_csv(stored: RunDirectory) -> bytes:
    """A line for each round of each run. Unmeasured values are empty; spaces separate the values of devices."""
    names, rows = _rounds(stored)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([" ".join(map(str, value)) if isinstance(value, list) else value for value in row])
    return text.getvalue().encode()


def to_parquet(stored: RunDirectory) -> bytes:
    """The same columns with their types. Unmeasured values are null; the values of devices are lists."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError("format", "parquet", "needs pyarrow: pip install 'folb[parquet]'") from error
    names, rows = _rounds(stored)
    types = {name: getattr(arrow, kind)() for name, kind in (COLUMNS | SPENT).items()} | {"note": arrow.string()}
    types |= {name: arrow.list_(getattr(arrow, kind)()) for name, kind in OF_DEVICES.items()}
    metric = getattr(arrow, OF_METRICS)()
    schema = arrow.schema([(name, types.get(name, metric)) for name in names])
    content = io.BytesIO()
    table = arrow.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema)
    parquet.write_table(table, content)
    return content.getvalue()


def _rounds(stored: RunDirectory) -> tuple[list[str], Iterator[list[Any]]]:
    """The columns, and the rounds run by run. A value that is not finite is nan; a missing value is None."""
    lines = sorted(stored.rounds()[0], key=lambda line: (line["run"], line["round"]))
    note, target = stored.environment["note"], float(stored.experiment["target"])
    recorded = [name for name in (*SPENT, *OF_DEVICES) if any(name in line for line in lines)]
    metrics = dict.fromkeys(name for line in lines for name in line.get("metrics", {}))
    names = [*COLUMNS, *metrics, *recorded, *(["note"] if note else [])]
    runs = stored.environment["runs"]
    known = [{"algorithm": run["algorithm"], "seed": run["seed"], "note": note} for run in runs]
    for about, run in zip(known, stored.runs(), strict=True):
        arrivals = {"rounds_to_target": run.rounds_to(target), "held_from": run.held_from(target)}
        about |= {name: t for name, t in arrivals.items() if t is not None}  # a target that is never reached: empty
    return names, (
        [_value(line.get("metrics", {}) | line | known[line["run"]], name) for name in names] for line in lines
    )


def _value(line: dict[str, Any], name: str) -> Any:
    if name not in line:
        return None
    if isinstance(line[name], list):
        return [math.nan if value is None else value for value in line[name]]
    return math.nan if line[name] is None else line[name]


def to_latex(stored: RunDirectory) -> bytes:
    r"""The table of `folb show`, for \usepackage{booktabs}."""
    target = float(stored.experiment["target"])
    begun = stored.begun()
    if not begun:
        raise InputError("run", stored.name, "has no evaluated round yet")
    headings, rows = summary.table(begun, target, stored.clock, stored.experiment["rounds"])
    note = stored.environment["note"]
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        r"\toprule",
        _row(headings),
        r"\midrule",
        *map(_row, rows),
        r"\bottomrule",
        *([rf"\multicolumn{{{len(headings)}}}{{l}}{{{escaped(note)}}} \\"] if note else []),
        r"\end{tabular}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _row(cells: list[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"


SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def escaped(text: str) -> str:
    """Text with latex's special characters escaped."""
    return "".join(SPECIAL.get(character, character) for character in " ".join(text.split()))


FORMATS: dict[str, Callable[[RunDirectory], bytes]] = {"csv": to_csv, "parquet": to_parquet, "latex": to_latex}
