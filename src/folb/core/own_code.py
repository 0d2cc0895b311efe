"""The code of the parts that a user wrote.

On Flower no whole run is compiled: only this code shows that a rule was edited.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def own_code(parts: Any) -> str:
    """The code of all functions in `parts` that are not folb's; empty if there are none. Comments do not count.

    What a function uses of its own file counts, too: other functions, constants, and the values that it was made with.
    """
    return "\n".join(_pieces(parts, own=False, seen={}))


def _pieces(part: Any, own: bool, seen: dict[int, Any]) -> Iterator[str]:
    """The code in a part; if a user's function holds the part (`own`), also the values in it."""
    if isinstance(part, CONSTANTS):
        if own:
            yield repr(part)
        return
    if id(part) in seen:  # a function that calls itself, for instance
        return
    seen[id(part)] = part  # kept, so that no other part gets its id
    if isinstance(part, np.ndarray | jax.Array):
        if own:
            yield f"{part.dtype}{part.shape} {hashlib.sha256(np.asarray(part).tobytes()).hexdigest()}"
    elif isinstance(part, partial):
        yield from _all((part.func, part.args, part.keywords), own, seen)
    elif isinstance(part, tuple | list):
        yield from _all(part, own, seen)
    elif isinstance(part, Mapping):
        yield from _all((*part.keys(), *part.values()), own, seen)
    elif isinstance(part, MethodType):
        yield from _all((part.__func__, part.__self__), own, seen)
    elif isinstance(part, type):
        if not _is_library(part):
            yield _source(part)
            for method in filter(inspect.isfunction, vars(part).values()):
                yield from _all(_used(method), True, seen)
    elif inspect.isfunction(function := inspect.unwrap(part) if callable(part) else part):
        mine = not _is_library(function)
        if mine:
            yield _source(function)
            yield from _all(_used(function), True, seen)
        # a function of folb may hold a user's function
        yield from _all(_held(function), own or mine, seen)
    elif is_dataclass(part):
        values = [getattr(part, field.name) for field in fields(part)]
        yield from _all((type(part), *values), own or not _is_library(type(part)), seen)
    elif not _is_library(type(part)):
        yield from _all((type(part), vars(part) if hasattr(part, "__dict__") else ()), True, seen)


def _all(parts: Any, own: bool, seen: dict[int, Any]) -> Iterator[str]:
    for part in parts:
        yield from _pieces(part, own, seen)


def _is_library(thing: Any) -> bool:
    """Whether a function or a class comes with Python or folb: their versions are recorded already."""
    home = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return home in sys.stdlib_module_names or home in ("folb", "jax", "jaxlib", "numpy")


def _held(function: FunctionType) -> Iterator[Any]:
    """The values that a function took with it from the function that made it, and its arguments' defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _used(function: FunctionType) -> Iterator[Any]:
    """What a function uses of its own file: constants, and the file's functions and classes."""
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if callable(value) and not isinstance(value, partial):
            if getattr(value, "__module__", None) != function.__module__:
                continue
        elif isinstance(value, ModuleType):
            continue
        yield value


def _names(code: CodeType) -> set[str]:
    """The names outside of a function that its code, or the code of a function within it, may use."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*within)


def _source(thing: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed at a prompt, for instance
        return str(thing.__qualname__)
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the middle of an expression
        return source.strip()
