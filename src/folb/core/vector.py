"""Parameter trees as vectors, whether trees of jax arrays, as in the simulator, or dicts of NumPy's, as on a device.

A local step or an upload that is written with these functions runs on both, and the device does not need jax.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from folb.typing import Params


def each(f: Callable[..., Any], *trees: Params) -> Params:
    """Apply f, array by array, to trees of one structure."""
    jax = sys.modules.get("jax")
    if jax is not None:
        return jax.tree.map(f, *trees)
    first = trees[0]  # without jax: arrays by name, and what a step's state may be made of
    if isinstance(first, dict):
        return {name: each(f, *(tree[name] for tree in trees)) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(each(f, *parts) for parts in zip(*trees, strict=True))
    return f(*trees)


def dot(a: Params, b: Params) -> Any:
    return sum(leaves(each(lambda u, v: namespace(u).vdot(u, v), a, b)))


def norm(a: Params) -> Any:
    square = dot(a, a)
    return namespace(square).sqrt(square)


def scaled(a: Params, factor: Any) -> Params:
    return each(lambda value: factor * value, a)


def over_largest(a: Any, largest: Any) -> Any:
    """a / largest, from -1 to 1, where `largest` is the largest absolute value; 0 if that is 0."""
    xp = namespace(largest)
    # XLA multiplies by 1 / largest, which counts as 0 if `largest` is above 2^126: so both are made smaller first
    shrink = xp.where(largest > 1, xp.float32(2**-8), xp.float32(1))
    return a * shrink / (xp.where(largest > 0, largest, xp.float32(1)) * shrink)


def over(values: Any, stack: Any) -> Any:
    """One value per entry of a stack, shaped to broadcast over it."""
    return values.reshape((-1,) + (1,) * (stack.ndim - 1))


def zeros(a: Params) -> Params:
    return each(lambda value: namespace(value).zeros_like(value), a)


def flat(a: Params) -> Any:
    """All numbers of a tree, in one row; arrays by name in the order of their names."""
    parts = leaves(a)
    return namespace(parts[0]).concat([part.reshape(-1) for part in parts])


def in_rows(row: Any, length: int) -> Any:
    """The numbers of a row in rows of this length; the last is filled up with 0."""
    xp = namespace(row)
    return xp.concat([row, xp.zeros(-row.shape[0] % length, dtype=row.dtype)]).reshape(-1, length)


def shaped(row: Any, like: Params) -> Params:
    """The tree whose numbers are in `row`: the inverse of `flat`. `like` has its shapes."""
    parts, first = [], 0
    for part in leaves(like):
        last = first + math.prod(part.shape)
        parts.append(row[first:last].reshape(part.shape))
        first = last
    jax = sys.modules.get("jax")
    if jax is not None:
        return jax.tree.unflatten(jax.tree.structure(like), parts)
    return dict(zip(sorted(like), parts, strict=True))


def namespace(array: Any) -> Any:
    """The library of an array: numpy, or jax.numpy."""
    return array.__array_namespace__()


def leaves(a: Params) -> list[Any]:
    """The arrays of a tree; arrays by name in the order of their names."""
    jax = sys.modules.get("jax")
    return jax.tree.leaves(a) if jax is not None else [a[name] for name in sorted(a)]


def size(a: Params) -> int:
    return sum(math.prod(part.shape) for part in leaves(a))
