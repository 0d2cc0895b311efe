"""A user's own samples: a csv or parquet table with a column that names each sample's device, or an .npz of arrays."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from folb import npz
from folb.atomic import regular
from folb.data import source_files
from folb.data.federation import Federation, HoldoutSeed, Regression
from folb.errors import InputError, check, refused
from folb.typing import NDArray

SUFFIXES = (".csv", ".csv.gz", ".parquet")
LONGEST = 1000  # characters of a device's name or a label
ADVICE = "; say which are yours: --set device=COLUMN --set label=COLUMN"
SPLIT = "split"  # an optional column, unless the user gives another name


def load(
    path: str | os.PathLike[str],
    *,
    device: Annotated[str, "the column that names a sample's device"] = "device",
    label: Annotated[
        str, "the column of the labels: whole numbers from 0, or names; any numbers for a regression"
    ] = "label",
    split: Annotated[str, "the column that says train or test, if there is one"] = SPLIT,
    holdout_seed: HoldoutSeed = None,
    regression: Regression = None,
) -> Federation:
    """Any csv or parquet table: a device column, a label column, and numbers in all the others."""
    path = Path(path)
    roles = [device, label, split]
    check("device, label, split", roles, len(set(roles)) == 3, "should be different columns")
    needed = roles if split != SPLIT else roles[:2]
    if path.suffix.lower() == ".parquet":
        table = parquet_table(path, needed)
        columns = {name: table[name].to_numpy() for name in table.column_names}
    else:
        columns = _read_csv(path, needed, roles)
    features = [name for name in columns if name not in roles]
    check(str(path), list(columns), features, "should have at least one column of numbers besides these")
    test = _marks(path, split, columns[split]) if split in columns else None
    x = np.column_stack([_numbers(path, name, columns[name]) for name in features])
    y, names = _classes(f"{path}: {label}", columns[label])
    if regression and names is not None:
        wrong = next(name for name in names if not is_number(name))
        raise InputError(f"{path}: {label}", wrong, "should be a number to predict, or leave out regression")
    classes = None if names is None else max(len(names), 2)
    named = _text(f"{path}: {device}", columns[device])
    federation = Federation.from_arrays(
        str(path), x, y, named, test, classes=classes, holdout_seed=holdout_seed, regression=regression
    )
    return federation if names is None or len(names) < 2 else replace(federation, class_names=names)


def parquet_batches(path: Path, needed: Sequence[str], *, only: bool = True, rows: int = 1 << 16) -> Iterator[Any]:
    """The record batches of a parquet file: the columns it must have, or all. It needs pyarrow, which is optional."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError(str(path), "pyarrow", "is needed to read it: pip install 'folb[parquet]'") from error
    failed = refused(str(path), "cannot be read as parquet", OSError, arrow.ArrowException)
    with failed, parquet.ParquetFile(regular(path)) as file:
        _check_columns(path, file.schema_arrow.names, needed, "" if only else ADVICE)
        yield from file.iter_batches(batch_size=rows, columns=needed if only else None)


def parquet_table(path: Path, needed: Sequence[str]) -> Any:
    """A table of pyarrow without gaps, whose columns are numbers or texts."""
    batches, done = [], 0
    for batch in parquet_batches(path, needed, only=False):
        types = import_module("pyarrow").types
        wrong = (types.is_nested, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            kind = column.type.value_type if types.is_dictionary(column.type) else column.type
            good = not any(test(kind) for test in wrong)
            check(f"{path}: {name}", str(kind), good, "should be a column of numbers or texts")
            check(f"{path}: {name}", None, not column.null_count, "should have a value in every row")
        done += batch.nbytes
        npz.check_room(path, done)
        batches.append(batch)
    check(str(path), 0, batches, "rows: should be at least 1")
    return import_module("pyarrow").Table.from_batches(batches)


def csv_columns(path: Path, types: Callable[[list[str]], list[type]], most: int | None = None) -> dict[str, NDArray]:
    """The columns of a csv file, of its first `most` rows; types(header) checks the header."""
    with source_files.opened(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        with refused(str(path), "first line: should name every column", csv.Error):  # a name of over 131,072 characters
            header = next(csv.reader(lines), [])
        kinds = np.dtype([(f"f{i}", kind) for i, kind in enumerate(types(header))])
        with warnings.catch_warnings(action="ignore"):  # the caller reports that there are no rows
            rows = np.loadtxt(lines, kinds, delimiter=",", quotechar='"', comments=None, ndmin=1, max_rows=most)
    return {name: rows[f"f{i}"] for i, name in enumerate(header)}


def _read_csv(path: Path, needed: Sequence[str], text: Sequence[str]) -> dict[str, NDArray]:
    def types(header: list[str]) -> list[type]:
        _check_columns(path, header, needed, ADVICE)
        return [object if name in text else np.float32 for name in header]

    try:
        columns = csv_columns(path, types)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(path), str(error).partition(";")[0], "cannot be read as csv") from error
    check(str(path), 0, len(columns[needed[0]]), "rows: should be at least 1")
    return columns


def _check_columns(path: Path, names: Sequence[str], needed: Sequence[str], advice: str = "") -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    check(str(path), repeated, names and not repeated, "should name every column, each once")
    for name in needed:
        check(f"{path}: column", name, name in names, f"should be a column; there are {', '.join(names)}{advice}")


def _text(field: str, values: NDArray) -> NDArray:
    """Texts of bounded length: an array of them has room for the longest in every row."""
    if values.dtype != object:
        return values
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    check(field, f"{longest} characters", longest <= LONGEST, f"should be a text of at most {LONGEST} characters")
    return values.astype(np.str_)


def _numbers(path: Path, name: str, values: NDArray) -> NDArray:
    if not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
        raise InputError(f"{path}: {name}", values[0], "should be a column of numbers")
    with np.errstate(over="ignore"):  # a value too large for float32 becomes infinite, which no federation accepts
        return values.astype(np.float32)


def _classes(field: str, labels: NDArray) -> tuple[NDArray, tuple[str, ...] | None]:
    """Labels as numbers, which the federation checks; names are numbered in sorted order, and returned too."""
    labels = _text(field, labels)
    if labels.dtype.kind != "U":
        return labels, None
    try:
        return labels.astype(np.float64), None
    except ValueError:
        names, y = np.unique(labels, return_inverse=True)
        return y, tuple(names.tolist())


def is_number(text: str | bytes) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _marks(path: Path, name: str, values: NDArray) -> NDArray:
    words = np.char.lower(_text(f"{path}: {name}", values).astype(np.str_))
    test = np.isin(words, ("test", "1", "true"))
    odd = np.flatnonzero(~test & ~np.isin(words, ("train", "0", "false")))
    if len(odd):
        raise InputError(f"{path}: {name}[{odd[0]}]", values[odd[0]], "should be train or test")
    return test


def load_arrays(
    path: str | os.PathLike[str], *, holdout_seed: HoldoutSeed = None, regression: Regression = None
) -> Federation:
    """An .npz with arrays x, y, device and optionally split, as Federation.from_arrays takes them."""
    arrays: dict[str, Any] = npz.arrays(Path(path), ("x", "y", "device"), optional=("split",))
    return Federation.from_arrays(os.fspath(path), **arrays, holdout_seed=holdout_seed, regression=regression)
