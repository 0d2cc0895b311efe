"""The code of the parts that a user wrote.

On Flower no whole run is compiled, so this is what tells an edited rule from the earlier one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any


def own_code(parts: Any) -> str:
    """The code of all functions in `parts` that are not folb's; empty if there are none. Comments do not count."""
    return "\n".join(_code(function) for function in _functions(parts))


def _functions(part: Any) -> Iterator[Any]:
    if isinstance(part, partial):
        yield from _functions((part.func, part.args, part.keywords))
    elif isinstance(part, tuple | list):
        for one in part:
            yield from _functions(one)
    elif isinstance(part, Mapping):
        yield from _functions(tuple(part.values()))
    elif is_dataclass(part) and not isinstance(part, type):
        yield from _functions(tuple(getattr(part, field.name) for field in fields(part)))
    elif callable(part):
        function = inspect.unwrap(part)
        if inspect.isfunction(function):
            if not _is_folb(function):
                yield function
            # a function that was made by another one may hold a user's function, or a number of theirs
            yield from _functions(tuple(_held(function)))
        elif not isinstance(function, type) and not _is_folb(type(function)):
            yield type(function)


def _is_folb(function: Any) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("folb", "builtins", "jax", "jaxlib", "numpy")


def _held(function: Any) -> Iterator[Any]:
    """The values that a function took with it from the function that made it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue


def _code(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed at a prompt, for instance
        return str(function.__qualname__)
    try:
        source = ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the middle of an expression
        source = source.strip()
    held = _held(function) if inspect.isfunction(function) else ()
    numbers = [value for value in held if isinstance(value, bool | int | float | str)]
    return f"{source} {numbers}" if numbers else source
