"""A chosen part of an experiment: a constructor by its name, or from a user's own file, and the settings it has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from folb.errors import InputError, choose
from folb.experiments.settings import FAILURES, Setting, from_file, settings


@dataclass(frozen=True)
class Part:
    """A chosen dataset, model, system or algorithm: its constructor and the settings it has."""

    name: str
    constructor: Callable[..., Any]
    settings: dict[str, Setting]
    swept: bool = False  # a list of values means a run for each
    own: bool = False  # from a user's own file

    def make(self, kind: Any, *arguments: Any, **values: Any) -> Any:
        """What the constructor makes. A user's own may fail in any way; the error then names it as the cause."""
        try:
            made = self.constructor(*arguments, **values)
        except InputError:
            raise
        except FAILURES as error:
            if self.own:
                if (fixed := given_twice(error)) in values:
                    expected = f"is given in the code of {self.name} already, and cannot be set"
                    raise InputError(fixed, values[fixed], expected) from error
                raise InputError(self.name, values, f"fails: {type(error).__name__}: {error}") from error
            raise
        if not isinstance(made, kind):
            what = "function (home, luck, cost) -> Effort" if kind is Callable else f"folb.{kind.__name__}"
            raise InputError(self.name, made, f"should make a {what}")
        return made


def given_twice(error: BaseException) -> str:
    """The setting that a user's code gives itself, and was also given to it; "" if that is not the error."""
    found = re.search(r"multiple values for keyword argument '(\w+)'", str(error))
    return found[1] if isinstance(error, TypeError) and found is not None else ""


def chosen_part(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Part:
    """The part of that name: one of the `registry`, or a function of a user's own file, path.py:function."""
    if ".py:" not in name:
        constructor = registry[choose(field, name, registry)]
        return Part(name, constructor, settings(constructor))
    constructor, short = from_file(field, name), name.rpartition(":")[2]
    try:
        known = settings(constructor)
    except Exception as error:
        expected = f"should be a function with keywords: {type(error).__name__}: {error}"
        raise InputError(field, name, expected) from error
    for one in known.values():
        if isinstance(one.default, float) and not math.isfinite(one.default):
            expected = f"should be a finite number, as the default of a keyword of {short}; or None, for none"
            raise InputError(one.name, one.default, expected)
    return Part(short, constructor, known, own=True)
