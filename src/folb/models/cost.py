"""What a model costs: the operations in its products, counted in its traced program."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from folb.models.model import Model, params_like

FEW = 32  # outputs, such as the channels of a convolution


def operations(model: Model, sample: jax.ShapeDtypeStruct, moved: int = 0) -> int:
    """Additions and multiplications in the products that the loss of one sample takes.

    `sample` has its shape and type. Nothing is computed. A product with few outputs takes as long as `moved` operations
    for each number that it reads or writes.
    """
    x = jax.ShapeDtypeStruct((1, *sample.shape), sample.dtype)
    return _counted(
        jax.make_jaxpr(model.loss)(params_like(model), x, jax.ShapeDtypeStruct((1,), jnp.int32)).jaxpr, moved
    )


def _counted(program: Any, moved: int) -> int:
    return sum(_of(step, moved) for step in program.eqns)


def _of(step: Any, moved: int) -> int:
    """The operations of one step of a program. A loop without a known end counts as one turn."""
    name = step.primitive.name
    if name == "dot_general":
        (contracted, _), _ = step.params["dimension_numbers"]
        left, out = step.invars[0].aval.shape, step.outvars[0].aval.shape
        products = 2 * prod(out) * prod(left[i] for i in contracted)
        return products if out[-1] >= FEW else max(products, moved * (prod(left) + prod(out)))
    if name == "conv_general_dilated":
        kernel, numbers = step.invars[1].aval.shape, step.params["dimension_numbers"]
        return 2 * prod(step.outvars[0].aval.shape) * prod(kernel) // kernel[numbers.rhs_spec[0]]
    inner = [_counted(program, moved) for program in _inside(step)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (step.params["length"] if name == "scan" else 1)


def _inside(step: Any) -> Iterator[Any]:
    """The programs that a step runs: the body of a loop, the branches of a choice, a function."""
    for value in step.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            program = getattr(one, "jaxpr", one)
            if hasattr(program, "eqns"):
                yield program
