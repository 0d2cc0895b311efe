"""Tables of TOML files as dataclasses: every key is a field, and every value fits the field's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from folb.core.algorithm import SLOTS, flattened
from folb.errors import InputError, choose


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def all_of(what: Callable[[Any], bool], many: type) -> Callable[[Any], bool]:
    """A test of whether a value is a list or a table, and all its values fit."""

    def fits(value: Any) -> bool:
        if not isinstance(value, many):
            return False
        return all(what(one) for one in (value.values() if isinstance(value, dict) else list(value)))  # type: ignore[call-overload]

    return fits


def _text(value: Any) -> bool:
    return isinstance(value, str)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {  # the TOML values that fit the type of a field
    "str": (_text, "a text"),
    "str | None": (_text, "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_whole, "a whole number"),
    "int | None": (_whole, "a whole number"),
    "float | None": (_number, "a number"),
    "Sequence[str]": (all_of(_text, list), "a list of texts"),
    "Sequence[int]": (all_of(_whole, list), "a list of whole numbers"),
    "Mapping[str, Any]": (lambda value: isinstance(value, dict), "a table"),
    "Mapping[str, str]": (all_of(_text, dict), "a table of texts"),
    "Mapping[str, float]": (all_of(_number, dict), "a table of numbers"),
    "Mapping[str, Sequence[Any]]": (all_of(lambda one: isinstance(one, list) and bool(one), dict), "a table of lists"),
    "Mapping[str, int | str]": (
        all_of(lambda one: one == "never" or (_whole(one) and one > 0), dict),
        "a table of whole numbers from 1 on, or 'never'",
    ),
}


def by_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths: those in a table of a part, such as `local`, too. Other tables are for one name."""
    paths: dict[str, Any] = {}
    for name, value in settings.items():
        known = flattened({name: value}) if name in SLOTS or not isinstance(value, Mapping) else {name: by_path(value)}
        for path, one in known.items():
            if path in paths:
                raise InputError(path, one, f"is given already, as {paths[path]}; give it once")
            paths[path] = one
    return paths


def made(where: str, kind: type, given: Mapping[str, Any]) -> Any:
    """An object of the dataclass `kind`, from a table of a TOML file; `where` begins error messages."""
    known = {field.name: str(field.type) for field in fields(kind)}
    for key, value in given.items():
        choose(f"{where}: key of {kind.__name__.lower()}", key, list(known))
        fits, form = FORMS.get(known[key], (lambda value: True, ""))
        if not fits(value):
            raise InputError(f"{where}: {key} of {kind.__name__.lower()}", value, f"should be {form}")
    needed = [one.name for one in fields(kind) if one.default is one.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise InputError(f"{where}: keys of {kind.__name__.lower()}", sorted(given), f"lacks {', '.join(missing)}")
    return kind(**given)
