"""The one error a user's input can cause, and the checks that raise it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """Bad input: the message names the field, the value and what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} = {shown}: {expected}")
        self.field, self.expected = field, expected


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


def check_whole(field: str, value: Any, low: int, high: int = 2**32 - 1) -> None:
    """Raise unless `value` is a whole number from `low` to `high`. The default is the largest seed."""
    if not (isinstance(value, Integral) and low <= int(value) <= high):
        raise InputError(field, value, f"should be a whole number from {low} to {high}")


def choose(field: str, value: str, choices: Iterable[str]) -> str:
    """`value` if it is one of `choices`; otherwise an error that suggests the nearest."""
    choices = list(choices)
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(field, value, f"{hint}choose one of {', '.join(sorted(choices))}")
