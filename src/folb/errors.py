"""The one error a user's input can cause, and the checks that raise it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

SINGLE = 3.4028235e38  # the largest number in single precision
SMALLEST = 2**-126  # nearer to 0, a number is computed with as 0
LONGEST = 2000  # characters of a message
NEAR = 0.7  # how alike two names must be for a hint: `flob` and `folb` are, `median` and `feddyn` are not


class InputError(ValueError):
    """Bad input: the message names the field, the value and what would be right, in one line."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        try:
            shown = one_line(repr(value), 80)
        except RecursionError:  # tables within tables
            shown = f"a deep {type(value).__name__}"
        super().__init__(one_line(f"{field} = {shown}: {expected}"))
        self.field, self.value, self.expected = field, value, expected


def one_line(text: str, longest: int = LONGEST) -> str:
    """A text of bounded length without line breaks and control characters, which a file's names and values may have."""
    line = "".join(c if c.isprintable() or 0xDC80 <= ord(c) <= 0xDCFF else _escaped(c) for c in text[:longest])
    return line if len(text) <= longest else line[: longest - 3] + "..."


def _escaped(character: str) -> str:
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")


def check(field: str, value: Any, holds: Any, expected: str) -> None:
    """Raise unless `holds` is true or, if it is a function, holds(value). A TypeError in it counts as false.

    A value that jax traces (as under `vmap`) cannot be checked, and passes.
    """
    if callable(holds):
        try:
            holds = holds(value)
        except TypeError:
            holds = False
    jax = sys.modules.get("jax")  # without jax nothing is traced, and loading it takes a second
    if jax is not None and isinstance(holds, jax.core.Tracer):
        return
    if not holds:
        raise InputError(field, value, expected)


def check_number(field: str, value: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """Raise unless `value` is one finite number for which holds(value) is true."""
    one = not isinstance(value, bool) and getattr(value, "shape", ()) == ()
    check(field, value, one, f"{expected}, and one number")
    check(field, value, holds, expected)
    check(field, value, lambda value: (value >= -SINGLE) & (value <= SINGLE), f"{expected}, and finite in 32 bits")
    if isinstance(value, float) and 0 < abs(value) < SMALLEST:
        check(field, value, holds(0.0), f"{expected}, in 32 bits")


def check_whole(field: str, value: Any, low: int, high: int = 2**32 - 1) -> None:
    """Raise unless `value` is a whole number from `low` to `high`. The default is the largest seed."""
    if not (isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high):
        raise InputError(field, value, f"should be a whole number from {low} to {high}")


def choose(field: str, value: str, choices: Iterable[str]) -> str:
    """`value` if it is one of `choices`; otherwise an error that suggests the nearest."""
    choices = list(choices)
    if isinstance(value, str) and value in choices:  # an array would be compared number by number
        return value
    raise InputError(field, value, f"{hint(value, choices)}choose one of {', '.join(sorted(choices))}")


@contextmanager
def refused(field: str, expected: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise an `InputError` for errors of these kinds, with what they say as the value."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(field, str(error), expected) from error


def hint(value: str, choices: Iterable[str]) -> str:
    """A question about the most similar choice; empty if none is similar."""
    near = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=NEAR)
    return f"did you mean {near[0]!r}? " if near else ""
