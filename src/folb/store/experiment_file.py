"""experiment.toml: the choices of an experiment as a file, written and read as a plain mapping."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from folb.atomic import regular
from folb.errors import EVALUATE, POSITIVE, SEED, SHARE, TABLE, TEXT, TRUTH, InputError, Kind, check_fields, many

DEEPEST = 20
REPEAT = "folb run this file to repeat the comparison"
# the fields of every file that folb writes
FIELDS = {
    "dataset": TEXT,
    "model": TEXT,
    "system": TEXT,
    "objective": TEXT,
    "algorithms": many(TEXT),
    "rounds": POSITIVE,
    "seeds": many(SEED),
    "target": SHARE,
    "evaluate_every": POSITIVE,
    "records": TRUTH,
}


def check(content: Mapping[str, Any], where: str = "", target: Kind = SHARE) -> None:
    """Raise an `InputError` that names the field, unless this is a complete experiment, as folb writes it."""
    sizes = {"evaluate": EVALUATE, "device_samples": POSITIVE, "metrics": many(TEXT)}
    given = sizes | {"set": TABLE, "box": TABLE, "points": POSITIVE, "box_seed": SEED}
    check_fields(where, content, FIELDS | {"target": target}, given)


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
        raise _unreadable(path, error) from error


def read(path: Path, piped: bool = False) -> dict[str, Any]:
    """The content of any TOML file. Only `piped` may it be a pipe, which a person may have named: /dev/stdin."""
    text = read_text(path, piped)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if _deeper(content, DEEPEST):
        raise InputError("experiment", path.name, f"{path} should have tables and lists of at most {DEEPEST} levels")
    return content


def _deeper(content: Any, levels: int) -> bool:
    """Whether tables and lists are nested in more than `levels` levels: what reads them goes down as far."""
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return levels < 0 or any(_deeper(value, levels - 1) for value in inner)


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError("experiment", path.name, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
