"""The fields of files that folb wrote, and the values they may have: a user may have edited them since."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from folb.errors import InputError
from folb.measures import ACCURACY, is_measure

LARGEST = 3.4028235e38  # in single precision


class Kind(NamedTuple):
    """The values that a field may have, and the words for an error."""

    holds: Callable[[Any], bool]
    expected: str


def whole(low: int, high: int) -> Kind:
    """A whole number from `low` to `high`."""
    return Kind(
        lambda value: type(value) is int and low <= value <= high,
        f"should be a whole number from {low} to {high}",
    )


def number(low: float, high: float) -> Kind:
    """A number from `low` to `high`, and not NaN."""
    return Kind(
        lambda value: type(value) in (int, float) and low <= value <= high,
        f"should be a number from {low:g} to {high:g}",
    )


def optional(kind: Kind) -> Kind:
    """The same, or null: JSON has no other word for a value that is not finite."""
    return Kind(lambda value: value is None or kind.holds(value), f"{kind.expected}, or null")


def many(kind: Kind) -> Kind:
    """A list of them."""
    return Kind(
        lambda value: isinstance(value, list | tuple) and all(map(kind.holds, value)),
        f"should be a list, and each entry {kind.expected}",
    )


def is_text(value: Any) -> bool:
    """Whether it is a text that can be printed: JSON can hold halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


TEXT = Kind(is_text, "should be a text")
# what a user calls a run goes to terminals and pages as it is: no control characters, escapes or line breaks
NAME = Kind(
    lambda value: isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable() and value == value.strip(),
    "should be 1 to 100 printable characters, without line breaks and without spaces at its ends",
)
TAGS = Kind(
    lambda value: (
        isinstance(value, list) and len(value) <= 20 and all(NAME.holds(tag) and "," not in tag for tag in value)
    ),
    "should be at most 20 tags with commas between them, each of 1 to 100 printable characters",
)
TABLE = Kind(lambda value: isinstance(value, dict), "should be a table")
TRUTH = Kind(lambda value: isinstance(value, bool), "should be true or false")
COUNT = whole(0, 2**31 - 1)  # of devices or of rounds
POSITIVE = whole(1, 2**31 - 1)
EVALUATE = Kind(lambda value: value == "all" or POSITIVE.holds(value), f"{POSITIVE.expected}, or all")
SHARE = Kind(lambda value: type(value) in (int, float) and 0 < value <= 1, "should be more than 0 and at most 1")
POSITIVE_NUMBER = Kind(
    lambda value: type(value) in (int, float) and 0 < value <= LARGEST, "should be more than 0, and finite"
)
JUDGED = Kind(lambda value: value == ACCURACY or is_measure(value), "should be a metric")
SIZE = whole(0, sys.maxsize)  # in bytes
SEED = whole(0, 2**32 - 1)


def check_fields(where: str, content: Mapping[str, Any], kinds: Mapping[str, Kind], given: Mapping[str, Kind]) -> None:
    """Raise an `InputError` that names a wrong field. Fields of `kinds` must be there; fields of `given` may be."""
    for name, kind in {**kinds, **given}.items():
        if (name in kinds or name in content) and not kind.holds(content.get(name)):
            raise InputError(f"{where}{name}", content.get(name), kind.expected)
