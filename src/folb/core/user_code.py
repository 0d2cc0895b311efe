"""The code of the parts that a user wrote: on Flower, where no run is compiled, it shows that a rule was edited."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import io
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def user_code(parts: Any) -> str:
    """The code of all functions in `parts` that are not folb's, and what they use of their files, without comments."""
    return "\n".join(_pieces(parts, own=False, seen={}))


def _pieces(part: Any, own: bool, seen: dict[tuple[int, bool], Any]) -> Iterator[str]:
    """The code in a part; if a user's function holds the part (`own`), also the values in it."""
    if isinstance(part, CONSTANTS):
        if own:
            yield repr(part)
        return
    if (id(part), own) in seen:  # a function that calls itself, for instance
        return
    seen[id(part), own] = part  # kept, so that no other part gets its id
    if isinstance(part, np.ndarray | jax.Array | set | frozenset):
        if own:
            yield str(sorted(map(repr, part))) if isinstance(part, set | frozenset) else _digest(part)
    elif isinstance(part, partial):
        yield from _all((part.func, part.args, part.keywords), own, seen)
    elif isinstance(part, SimpleNamespace):
        yield from _all((vars(part),), own, seen)
    elif isinstance(part, tuple | list):
        kind = () if type(part) in (tuple, list) else (type(part),)
        yield from _all((*kind, *part), own, seen)
    elif isinstance(part, Mapping):
        yield from _all((*part.keys(), *part.values()), own, seen)
    elif isinstance(part, MethodType):
        yield from _all((part.__func__, part.__self__), own, seen)
    elif isinstance(part, type):
        if not _is_library(part):
            yield _source(part)
            members = [getattr(member, "fget", getattr(member, "__func__", member)) for member in vars(part).values()]
            methods = (one for one in members if inspect.isfunction(one) or _wrapped(one))  # also jax.jit of one
            yield from _all((*part.__bases__, *methods), own, seen)
            yield from _all(filter(is_dataclass, members), True, seen)  # such as an upload that its class asks for
        elif own:
            yield _name(part)
    elif inspect.isfunction(part):
        mine = not _is_library(part)
        if mine:
            yield _source(part)
            yield from _all(_used(part), True, seen)
        elif own:
            yield _name(part)
        # a function of folb may hold a user's function
        yield from _all((*_held(part), *_wrapped(part)), own or mine, seen)
    elif callable(part) and _wrapped(part):  # such as jax.jit of a function
        yield from _all(_wrapped(part), own, seen)
    elif is_dataclass(part):
        values = [getattr(part, field.name) for field in fields(part)]
        yield from _all((type(part), *values), own or not _is_library(type(part)), seen)
    elif not _is_library(type(part)):
        yield from _all((type(part), vars(part) if hasattr(part, "__dict__") else ()), True, seen)
    elif own:
        text = repr(part)
        yield _name(part) if " at 0x" in text else text


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _digest(array: Any) -> str:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    numbers = np.asarray(array)
    content = repr(numbers.tolist()).encode() if numbers.dtype == object else numbers.tobytes()
    return f"{numbers.dtype}{numbers.shape} {hashlib.sha256(content).hexdigest()}"


def _wrapped(part: Any) -> tuple[Any, ...]:
    """The functions that a function was made from; those of jax.custom_vjp have other names."""
    named = (vars(part).get(name) for name in ("__wrapped__", "fwd", "bwd", "jvp")) if hasattr(part, "__dict__") else ()
    functions = [one for one in (*named, getattr(part, "__wrapped__", None)) if callable(one)]
    return tuple(dict.fromkeys(functions))


def _all(parts: Any, own: bool, seen: dict[tuple[int, bool], Any]) -> Iterator[str]:
    for part in parts:
        yield from _pieces(part, own, seen)


def _is_library(thing: Any) -> bool:
    """Whether a function, class or module comes with Python, or was installed: users do not edit it."""
    name = str(getattr(thing, "__module__", None) or getattr(thing, "__name__", ""))
    top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(installed) or top == "folb" or file.startswith(sysconfig.get_path("stdlib"))


def _held(function: FunctionType) -> Iterator[Any]:
    """The values that a function took with it from the function that made it, and its arguments' defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _used(function: FunctionType) -> Iterator[Any]:
    """What a function uses of its own file and of the files beside it: constants, functions and classes."""
    names = sorted(_names(function.__code__))
    waiting = [function.__globals__[name] for name in names if name in function.__globals__]
    met: list[ModuleType] = []
    while waiting:
        value = waiting.pop(0)
        if not isinstance(value, ModuleType):
            yield value
        elif _is_library(value):
            yield value.__name__
        elif value not in met:
            met.append(value)
            waiting += [getattr(value, name) for name in names if hasattr(value, name)]


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
