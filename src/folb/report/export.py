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
    **dict.fromkeys(("test_accuracy", "train_loss"), "float32"),
    **dict.fromkeys(("bytes_up", "bytes_down"), "int64"),
    "seconds": "float32",
    "updated": "bool_",
    # the last two belong to the whole run, and are the same in each of its rounds
    **dict.fromkeys(("lost", "rounds_to_target", "held_from"), "int32"),
}
SPENT = {"epsilon": "float64"}  # only of private runs
OF_DEVICES = {
    **dict.fromkeys(("devices", "times"), "int32"),
    **dict.fromkeys(("weights", "gamma", "own"), "float32"),
    **dict.fromkeys(("lost_devices", "rejected_devices"), "int32"),
}


def to_csv(stored: RunDirectory) -> bytes:
    """A line for each round of each run. Unmeasured values are empty; spaces separate the values of devices."""
    names, rows = _rounds(stored)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([" ".join(map(str, v)) if isinstance(v, list) else v for v in row] for row in rows)
    return text.getvalue().encode()


def to_parquet(stored: RunDirectory) -> bytes:
    """The same columns with their types. Unmeasured values are null; the values of devices are lists."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError("format", "parquet", "needs pyarrow: pip install 'folb[parquet]'") from error
    names, rows = _rounds(stored)
    types = {name: getattr(arrow, kind)() for name, kind in (COLUMNS | SPENT | {"note": "string"}).items()}
    types |= {name: arrow.list_(getattr(arrow, kind)()) for name, kind in OF_DEVICES.items()}
    schema = arrow.schema([(name, types.get(name, arrow.float32())) for name in names])  # the others are metrics
    content = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema), content)
    return content.getvalue()


def _rounds(stored: RunDirectory) -> tuple[list[str], Iterator[list[Any]]]:
    """The columns, and the rounds run by run. A value that is not finite is nan; a missing value is None."""
    lines = sorted(stored.rounds()[0], key=lambda line: (line["run"], line["round"]))
    note, target = stored.environment["note"], float(stored.experiment["target"])
    recorded = [name for name in (*SPENT, *OF_DEVICES) if any(name in line for line in lines)]
    metrics = dict.fromkeys(name for line in lines for name in line.get("metrics", {}))
    names = [*COLUMNS, *metrics, *recorded, *(["note"] if note else [])]
    known = []
    for about, run in zip(stored.environment["runs"], stored.runs(), strict=True):
        arrivals = {"rounds_to_target": run.rounds_to(target), "held_from": run.held_from(target)}
        reached = {name: t for name, t in arrivals.items() if t is not None}  # a target that is never reached: empty
        known.append({"algorithm": about["algorithm"], "seed": about["seed"], "note": note} | reached)
    whole = (line.get("metrics", {}) | line | known[line["run"]] for line in lines)
    return names, ([_value(line[name]) if name in line else None for name in names] for line in whole)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_value, value))
    return math.nan if value is None else value


def to_latex(stored: RunDirectory) -> bytes:
    r"""The table of `folb show`, for \usepackage{booktabs}."""
    experiment, note = stored.experiment, stored.environment["note"]
    if not (begun := stored.begun()):
        raise InputError("run", stored.name, "has no evaluated round yet")
    headings, rows = summary.table(begun, experiment["target"], stored.clock, experiment["rounds"])
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


SPECIAL = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
    | {character: f"\\{character}" for character in "&%$#_{}"}
)


def escaped(text: str) -> str:
    return " ".join(text.split()).translate(SPECIAL)


FORMATS: dict[str, Callable[[RunDirectory], bytes]] = {"csv": to_csv, "parquet": to_parquet, "latex": to_latex}
