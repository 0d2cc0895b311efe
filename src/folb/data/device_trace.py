"""A trace of devices from a table, csv (gz or plain) or parquet: their speed and connection, and when they are online.

Columns: device (0 to N - 1), speed (mini-batch steps per second), up and down (Mbit/s).
Optional: latency (seconds), and from and until (seconds): a stay online. A device with several stays has several lines.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import numpy as np

from folb.core.clock import LONGEST
from folb.core.system import RATES, High, Link, Low, Rate, System, Tau, rounds
from folb.core.trace import Source, Trace
from folb.data import source_files
from folb.data.tabular import csv_columns, is_number, parquet_table
from folb.errors import InputError, check, choose
from folb.typing import NDArray

NEEDED = ("device", "speed", "up", "down")
STAY = ("from", "until")
COLUMNS = (*NEEDED, "latency", *STAY)
LINES = 5 * 10**6  # in a file


class Table(NamedTuple):
    path: Path
    columns: dict[str, NDArray]

    def refuse(self, name: str, rows: Sequence[int] | NDArray, expected: str) -> None:
        """Raise an error about the first of these rows, if there are any."""
        if len(rows):
            value, place = self.columns[name][rows[0]].item(), self.place(int(rows[0]))
            raise InputError(f"{self.path}, {place}: {name}", value, expected)

    def place(self, row: int) -> str:
        line = _line(self.path, row)
        return f"line {line}" if line else f"row {row + 1}"


def trace(
    *,
    file: Annotated[
        str, "csv or parquet: device, speed (steps/s), up, down (Mbit/s), and optionally latency, from, until (s)"
    ] = "",
    period: Annotated[float | None, "seconds after which from and until repeat; by default never"] = None,
    low: Low = 1,
    high: High = 20,
    tau: Tau = None,
    dropout: Rate = 0.0,
) -> System:
    """As network, but a file has each device's speed, connection, and times online."""
    numbers = rounds(low, high, tau, dropout)
    if period is not None:
        expected = f"should be more than 0, up to {LONGEST:g}"
        check("period", period, lambda period: (period > 0) & (period <= LONGEST), expected)
    check("file", file, Path(file).is_file(), "should be a csv or parquet file with a line for each device")
    table = _read(Path(file))
    lasts = math.inf if period is None else float(period)
    _check(table, lasts)
    return _sorted(table, lasts, numbers)


def _read(path: Path) -> Table:
    def types(header: list[str]) -> list[type]:
        _check_header(path, [name.strip() for name in header])
        return [float] * len(header)

    if path.suffix.lower() == ".parquet":
        table = parquet_table(path, NEEDED)
        _check_header(path, table.column_names)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        for name, values in columns.items():
            check(f"{path}: {name}", str(table[name].type), values.dtype.kind in "iuf", "should be a column of numbers")
            columns[name] = values.astype(np.float64)
    else:
        try:
            columns = {name.strip(): values for name, values in csv_columns(path, types, LINES + 1).items()}
        except InputError:
            raise
        except ValueError:
            _find_text(path)
    count = len(columns["device"])
    check(f"{path}: lines", count, 0 < count <= LINES, f"should be from 1 to {LINES}, besides the header")
    return Table(path, columns)


def _check_header(path: Path, names: list[str]) -> None:
    where = f"{path}: column"
    for name in names:
        choose(where, name, COLUMNS)
    for name in NEEDED:
        check(where, name, name in names, f"is missing; the header should name {', '.join(NEEDED)}")
    check(where, names, len(set(names)) == len(names), "should be different names")
    for one, other in (STAY, STAY[::-1]):
        check(where, one, one not in names or other in names, f"should come with {other}")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a csv file, with their numbers, without empty lines; the first is the header."""
    with source_files.opened(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:  # a value of more than 131,072 characters
            raise InputError(f"{path}, line {reader.line_num}", str(error), "should be numbers") from error


def _line(path: Path, row: int) -> int:
    """Where a row is in a csv file; 0 for parquet."""
    return 0 if path.suffix.lower() == ".parquet" else next(islice(_rows(path), row + 1, None))[0]


def _find_text(path: Path) -> NoReturn:
    """Raise the error about the first line that is not as many numbers as there are names."""
    rows = _rows(path)
    _, names = next(rows)
    for number, cells in rows:
        check(f"{path}, line {number}", ",".join(cells), len(cells) == len(names), f"should have {len(names)} values")
        for name, cell in zip(names, cells, strict=True):
            check(f"{path}, line {number}: {name.strip()}", cell, is_number(cell), "should be a number")
    raise InputError(str(path), ",".join(names), "cannot be read as csv")


def _check(table: Table, period: float) -> None:
    """Raise an error that names the first line with a wrong value."""
    bounds = {"speed": RATES, "up": RATES, "down": RATES, "latency": (0, LONGEST)}
    bounds |= {"device": (0, 2**31 - 2), "from": (0, LONGEST)}
    for name, (least, most) in bounds.items():
        if name in table.columns:
            values = table.columns[name]
            wrong = np.flatnonzero(~((values >= least) & (values <= most)))
            table.refuse(name, wrong, f"should be a number from {least:g} to {most:g}")
    device = table.columns["device"]
    table.refuse("device", np.flatnonzero(device != np.floor(device)), "should be a whole number")
    if STAY[0] in table.columns:
        begin, end = (table.columns[name] for name in STAY)
        table.refuse("until", np.flatnonzero(end <= begin), "should be more than from")
        table.refuse("until", np.flatnonzero(end > period), f"should be at most period = {period:g}")
    else:
        expected = f"needs the columns from and until, which {table.path} does not have"
        check("period", period, math.isinf(period), expected)
    present = np.unique(device)
    absent = np.flatnonzero(present != np.arange(len(present)))
    if len(absent):
        largest = int(present[-1])
        raise InputError(f"{table.path}: device", int(absent[0]), f"has no line; there are devices up to {largest}")


def _sorted(table: Table, period: float, numbers: dict[str, float]) -> Trace:
    """The trace of a checked table; stays that overlap are found here."""
    count = len(table.columns["device"])
    begin = table.columns.get("from", np.zeros(count)).astype(np.float32)
    end = table.columns.get("until", np.full(count, math.inf)).astype(np.float32)
    device = table.columns["device"].astype(np.int32)
    order = np.lexsort((begin, device))
    device, begin, end = device[order], begin[order], end[order]
    same = device[1:] == device[:-1]
    overlapping = np.flatnonzero(same & (begin[1:] < end[:-1]))
    if len(overlapping):
        before, row = (order[overlapping[0] + i] for i in (0, 1))
        first_one = table.place(int(before))
        if "from" not in table.columns:
            table.refuse("device", [row], f"has a line already, {first_one}; for several, add from and until")
        table.refuse("from", [row], f"should not be before the end of {first_one}, of the same device")
    first = np.searchsorted(device, np.arange(device[-1] + 2)).astype(np.int32)
    link = Link(*(table.columns.get(name, np.zeros(count))[order].astype(np.float32) for name in Link._fields))
    return Trace(
        first=first,
        begin=begin,
        end=end,
        leaves=_leaves(first, begin, end, same & (begin[1:] == end[:-1]), np.float32(period)),
        link=link,
        period=period,
        round=numbers,
        halvings=int(np.max(np.diff(first))).bit_length(),
        source=Source(str(table.path), _line(table.path, int(order[-1]))),
    )


def _leaves(first: NDArray, begin: NDArray, end: NDArray, touching: NDArray, period: np.float32) -> NDArray:
    """When the device of each line goes offline: `touching` lines are one stay, also from one period to the next."""
    last = np.where(np.append(touching, False), len(begin), np.arange(len(begin)))  # the last line of each stay
    last = np.minimum.accumulate(last[::-1])[::-1]
    leaves = end[last].copy()
    if not np.isfinite(period):
        return leaves
    opens, closes = first[:-1], first[1:] - 1  # of each device: its first and its last line
    goes_on = (begin[opens] == 0) & (end[closes] == period)
    beyond = np.where(last[opens] == closes, np.float32(np.inf), period + leaves[opens])
    owner = np.repeat(np.arange(len(opens)), np.diff(first))
    at_the_end = goes_on[owner] & (last == closes[owner])
    return np.where(at_the_end, beyond[owner], leaves)
