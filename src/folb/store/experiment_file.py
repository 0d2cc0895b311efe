"""experiment.toml: an experiment as a file, written and read as a plain mapping; and the fields of all files of a run.

A user may have edited them since.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from folb.atomic import regular
from folb.errors import SINGLE, InputError
from folb.measures import Metric


class Kind(NamedTuple):
    """The values that a field may have, and the words for an error."""

    holds: Callable[[Any], bool]
    expected: str


def whole(low: int, high: int) -> Kind:
    return Kind(
        lambda value: type(value) is int and low <= value <= high, f"should be a whole number from {low} to {high}"
    )


def number(low: float, high: float) -> Kind:
    return Kind(
        lambda value: type(value) in (int, float) and low <= value <= high,
        f"should be a number from {low:g} to {high:g}",
    )


def optional(kind: Kind) -> Kind:
    """The same, or null: JSON has no other word for a value that is not finite."""
    return Kind(lambda value: value is None or kind.holds(value), f"{kind.expected}, or null")


def many(kind: Kind) -> Kind:
    return Kind(
        lambda value: isinstance(value, list | tuple) and all(map(kind.holds, value)),
        f"should be a list, and each entry {kind.expected}",
    )


# one that can be printed: JSON can hold halves of characters
TEXT = Kind(lambda value: isinstance(value, str) and not re.search("[\ud800-\udfff]", value), "should be a text")
# what a user calls a run goes to terminals and pages as it is: no control characters, escapes or line breaks
NAME = Kind(
    lambda value: isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable() and value == value.strip(),
    "should be 1 to 100 printable characters, without line breaks and without spaces at its ends",
)
TAGS = Kind(
    lambda value: many(NAME).holds(value) and len(value) <= 20 and not any("," in tag for tag in value),
    "should be at most 20 tags with commas between them, each of 1 to 100 printable characters",
)
TABLE = Kind(lambda value: isinstance(value, dict), "should be a table")
TRUTH = Kind(lambda value: isinstance(value, bool), "should be true or false")
COUNT = whole(0, 2**31 - 1)  # of devices or of rounds
POSITIVE = whole(1, 2**31 - 1)
EVALUATE = Kind(lambda value: value == "all" or POSITIVE.holds(value), f"{POSITIVE.expected}, or all")
SHARE = Kind(lambda value: number(0, 1).holds(value) and value > 0, "should be more than 0 and at most 1")
POSITIVE_NUMBER = Kind(lambda value: number(0, SINGLE).holds(value) and value > 0, "should be more than 0, and finite")
SEED = whole(0, 2**32 - 1)


RUNS = Kind(lambda value: isinstance(value, list), "should be a list")
Kinds = Mapping[str, Kind]


def check_fields(where: str, content: Mapping[str, Any], kinds: Kinds, given: Kinds) -> None:
    """Raise an `InputError` that names a wrong field. Fields of `kinds` must be there; fields of `given` may be."""
    for name, kind in {**kinds, **given}.items():
        if (name in kinds or name in content) and not kind.holds(content.get(name)):
            raise InputError(f"{where}{name}", content.get(name), kind.expected)


def check_with_runs(
    where: str, content: Any, kinds: Kinds, given: Kinds, of_a_run: Kinds, others_of_a_run: Kinds
) -> None:
    """The same for a JSON text that describes runs."""
    if not isinstance(content, dict):
        raise InputError(where, content, "should be a table with a list of runs, as folb wrote it")
    check_fields(f"{where}: ", content, {**kinds, "runs": RUNS}, given)
    for i, run in enumerate(content["runs"]):
        if not isinstance(run, dict):
            raise InputError(f"{where}: runs[{i}]", run, TABLE.expected)
        check_fields(f"{where}: runs[{i}].", run, of_a_run, others_of_a_run)


DEEPEST = 20
REPEAT = "folb run this file to repeat the comparison"
# the fields of every file that folb writes
FIELDS = dict.fromkeys(("dataset", "model", "system", "objective"), TEXT)
FIELDS |= {"algorithms": many(TEXT), "rounds": POSITIVE, "seeds": many(SEED)}
FIELDS |= {"evaluate_every": POSITIVE, "records": TRUTH}
OTHER_FIELDS = {"evaluate": EVALUATE, "device_samples": POSITIVE, "metrics": many(TEXT), "set": TABLE}
OTHER_FIELDS |= {"box": TABLE, "points": POSITIVE, "box_seed": SEED}


def check(content: Mapping[str, Any], where: str, judged_by: Metric) -> None:
    """Raise an `InputError` that names the field, unless this is a complete experiment, as folb writes it."""
    target = SHARE if judged_by.is_share else POSITIVE_NUMBER
    check_fields(where, content, {**FIELDS, "target": target}, OTHER_FIELDS)


def to_text(content: Mapping[str, Any], note: str = "", about: str = REPEAT) -> str:
    """The file's text; comments at the top say what it is for, and describe the data."""
    lines = [f"# {about}", *([f"# the data: {note}"] if note else [])]
    return "\n".join([*lines, *_table(content)]) + "\n"


def _table(content: Mapping[str, Any], heading: str = "") -> Iterator[str]:
    plain = {key: value for key, value in content.items() if not isinstance(value, Mapping)}
    if plain and heading:
        yield from ("", f"[{heading}]")
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _table(value, f"{heading}.{_key(key)}" if heading else _key(key))


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # strings, numbers and booleans are the same in TOML and JSON, except for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_text(path: Path, piped: bool = False) -> str:
    """The text of a file, or of a pipe."""
    try:
        return (path if piped else regular(path)).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise unreadable("experiment", path.name, path, error) from error


def read(path: Path, piped: bool = False) -> dict[str, Any]:
    """The content of any TOML file. Only `piped` may it be a pipe, which a person may have named: /dev/stdin."""
    text = read_text(path, piped)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable("experiment", path.name, path, error) from error
    if _deeper(content, DEEPEST):
        raise InputError("experiment", path.name, f"{path} should have tables and lists of at most {DEEPEST} levels")
    return content


def _deeper(content: Any, levels: int) -> bool:
    """Whether tables and lists are nested in more than `levels` levels: what reads them goes down as far."""
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return levels < 0 or any(_deeper(value, levels - 1) for value in inner)


def unreadable(field: str, name: str, file: Path, error: Exception) -> InputError:
    """The error for a file that the system, or a parser, does not read."""
    return InputError(field, name, f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
