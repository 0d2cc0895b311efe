"""Parameter trees as vectors, whether their arrays are jax's or NumPy's.

The simulator has trees of jax arrays; a real device has a dict of NumPy arrays. A local step or an upload that is
written with these functions runs on both, and the device does not need jax.
"""

from __future__ import annotations

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
    """<a, b> over all arrays."""
    return sum(_arrays(each(lambda u, v: namespace(u).vdot(u, v), a, b)))


def norm(a: Params) -> Any:
    """||a|| over all arrays."""
    square = dot(a, a)
    return namespace(square).sqrt(square)


def scaled(a: Params, factor: Any) -> Params:
    """factor * a."""
    return each(lambda value: factor * value, a)


def zeros(a: Params) -> Params:
    """A tree of zeros, with the structure of `a`."""
    return each(lambda value: namespace(value).zeros_like(value), a)


def namespace(array: Any) -> Any:
    """The library of an array: numpy, or jax.numpy."""
    return array.__array_namespace__()


def _arrays(tree: Params) -> list[Any]:
    jax = sys.modules.get("jax")
    return list(tree.values()) if jax is None else jax.tree.leaves(tree)
