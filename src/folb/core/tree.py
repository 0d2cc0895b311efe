"""Parameter trees as vectors: the few operations the equations need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.part import register_with
from folb.core.vector import over as over
from folb.core.vector import size as size
from folb.errors import InputError, check
from folb.typing import Params

register_with(jax.tree_util.register_dataclass)


def add(a: Params, b: Params, scale: Any = 1.0) -> Params:
    return jax.tree.map(lambda u, v: u + scale * v, a, b)


def sub(a: Params, b: Params) -> Params:
    return jax.tree.map(jnp.subtract, a, b)


def divided(a: Params, by: Any) -> Params:
    return jax.tree.map(lambda u: u / by, a)


def dot(a: Params, b: Params) -> Array:
    """<a, b> over all leaves."""
    return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, a, b), jnp.float32(0))


def norm(a: Params) -> Array:
    return jnp.sqrt(dot(a, a))


def dots(stack: Params, b: Params) -> Array:
    """<a_k, b> for each entry of a stack: [K]."""
    return jax.vmap(dot, in_axes=(0, None))(stack, b)


def norms(stack: Params) -> Array:
    """||a_k|| for each entry of a stack: [K]."""
    return jax.vmap(norm)(stack)


def products(stack: Params) -> Array:
    """<a_j, a_k> for each pair of entries of a stack: [K, K]."""
    pairs = jax.tree.map(lambda leaf: leaf.reshape(len(leaf), -1) @ leaf.reshape(len(leaf), -1).T, stack)
    return jax.tree.reduce(jnp.add, pairs)


def scaled(stack: Params, factors: Array) -> Params:
    """factor_k a_k; an entry whose factor is 0 is 0, whatever it holds."""
    return jax.tree.map(lambda leaf: jnp.where(over(factors == 0, leaf), 0, over(factors, leaf) * leaf), stack)


def total(stack: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stack)


def combine(weights: Array, stack: Params) -> Params:
    """sum_k weights_k a_k. An entry of weight 0 adds nothing, whatever it holds."""
    return total(scaled(stack, weights))


def where(condition: Array, a: Params, b: Params) -> Params:
    """a if the scalar `condition` holds, else b."""
    return jax.tree.map(lambda u, v: jnp.where(condition, u, v), a, b)


def pair(field: str, made: Any) -> tuple[Any, Any]:
    """Two values that a user's function returns; anything else would be unpacked as if it were two."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise InputError(field, type(made).__name__, "should be a pair, a tuple of two")
    return made


def check_like(field: str, made: Params, wanted: Params) -> None:
    """Raise an `InputError` unless both have the same structure, shapes and types: jax would broadcast in silence."""

    def kind(leaf: Any) -> str:
        known = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a Python number
        return f"{known.dtype}{list(known.shape)}"

    kinds, expected = (jax.tree.map(kind, tree) for tree in (made, wanted))
    check(field, kinds, kinds == expected, f"should be {expected}")
