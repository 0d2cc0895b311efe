"""The code of the parts that a user wrote.

On Flower no whole run is compiled: only this code shows that a rule was edited.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def own_code(parts: Any) -> str:
    """The code of all functions in `parts` that are not folb's; empty if there are none. Comments do not count.

    What a function uses of its own files counts, too: other functions, constants, and the values that it was made with.
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
    elif isinstance(part, SimpleNamespace):
        yield from _all((vars(part),), own, seen)
    elif isinstance(part, tuple | list):
        yield from _all((type(part), *part), own, seen)
    elif isinstance(part, Mapping):
        yield from _all((*part.keys(), *part.values()), own, seen)
    elif isinstance(part, MethodType):
        yield from _all((part.__func__, part.__self__), own, seen)
    elif isinstance(part, type):
        if not _is_library(part):
            yield _source(part)
            yield from _all(part.__bases__, own, seen)
            for method in filter(inspect.isfunction, vars(part).values()):
                yield from _all(_used(method), True, seen)
    elif inspect.isfunction(part):
        mine = not _is_library(part)
        if mine:
            yield _source(part)
            yield from _all(_used(part), True, seen)
        # a function of folb may hold a user's function
        yield from _all((*_held(part), getattr(part, "__wrapped__", None)), own or mine, seen)
    elif callable(part) and hasattr(part, "__wrapped__"):  # such as jax.jit of a function
        yield from _all((part.__wrapped__,), own, seen)
    elif is_dataclass(part):
        values = [getattr(part, field.name) for field in fields(part)]
        yield from _all((type(part), *values), own or not _is_library(type(part)), seen)
    elif not _is_library(type(part)):
        yield from _all((type(part), vars(part) if hasattr(part, "__dict__") else ()), True, seen)


def _all(parts: Any, own: bool, seen: dict[int, Any]) -> Iterator[str]:
    for part in parts:
        yield from _pieces(part, own, seen)


def _is_library(thing: Any) -> bool:
    """Whether a function, class or module comes with Python, or was installed: users do not edit it."""
    name = str(getattr(thing, "__module__", None) or getattr(thing, "__name__", ""))
    home = name.partition(".")[0]
    if home in sys.stdlib_module_names or home in ("folb", "jax", "jaxlib", "numpy"):
        return True
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")


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
    """What a function uses of its own file and of the files beside it: constants, functions and classes."""
    names = sorted(_names(function.__code__))
    for name in [name for name in names if name in function.__globals__]:
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield value
        elif not _is_library(value):
            yield from (getattr(value, other) for other in names if hasattr(value, other))


def _names(code: CodeType) -> set[str]:
    """The names outside of a function that its code, or the code of a function within it, may use."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*within)


def _source(thing: Any) -> str:
    try:
        # a function's own code, and not that of the function that it wraps
        source = textwrap.dedent(inspect.getsource(getattr(thing, "__code__", thing)))
    except (OSError, TypeError):  # typed at a prompt, for instance
        return str(thing.__qualname__)
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the middle of an expression
        return " ".join(_words(source))


def _words(source: str) -> Iterator[str]:
    """A piece of code without its comments and lines."""
    lines = io.StringIO(source).readline
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # it may end in the middle of a bracket
        for token in tokenize.generate_tokens(lines):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                yield token.string
