"""Models of dense layers alone."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import check_whole, choose
from folb.models.model import Model, classifier
from folb.typing import Params

MOST = 10**5  # units of a layer


def logistic(
    shape: tuple[int, ...],
    classes: int,
    *,
    init: Annotated[Literal["zeros", "glorot"], "where the weights start"] = "zeros",
) -> Model:
    """Multinomial logistic regression (Sec. VI): one linear map to the class scores."""
    choose("init", init, ("zeros", "glorot"))
    inputs = prod(shape)

    def start(key: Array) -> Params:
        if init == "glorot":
            return layer(key, inputs, classes)
        return {"weight": jnp.zeros((inputs, classes)), "bias": jnp.zeros(classes)}

    return classifier(start, lambda params, x: apply(params, x.reshape(len(x), inputs)))


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    first: Annotated[int, "units of the first hidden layer"] = 200,
    second: Annotated[int, "units of the second hidden layer"] = 100,
) -> Model:
    """A perceptron of three layers (Sec. VI): two hidden ones with relu, and the class scores."""
    at_least_one(first=first, second=second)
    inputs = prod(shape)

    def start(key: Array) -> Params:
        keys = jax.random.split(key, 3)
        return {
            "first": layer(keys[0], inputs, first),
            "second": layer(keys[1], first, second),
            "scores": layer(keys[2], second, classes),
        }

    def scores(params: Params, x: Array) -> Array:
        x = jax.nn.relu(apply(params["first"], x.reshape(len(x), inputs)))
        x = jax.nn.relu(apply(params["second"], x))
        return apply(params["scores"], x)

    return classifier(start, scores)


def layer(key: Array, inputs: int, outputs: int) -> Params:
    """The initial dense layer: weights from Glorot and Bengio's uniform draw, and zero bias."""
    return {"weight": jax.nn.initializers.glorot_uniform()(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def apply(params: Params, x: Array) -> Array:
    """The output of a dense layer for x: [..., inputs] -> [..., outputs]."""
    return product(x, params["weight"]) + params["bias"]


def product(x: Array, weight: Array) -> Array:
    """x @ weight as a product of two matrices: its gradients need no transposed copies."""
    if x.ndim == 2:
        return x @ weight
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)  # images may be bytes, which have no derivative
    return multiply(rows, weight).reshape(*x.shape[:-1], weight.shape[-1])


@jax.custom_jvp
def multiply(x: Array, weight: Array) -> Array:
    """x @ weight, with a derivative that is faster on a CPU if x has many rows."""
    return x @ weight


@multiply.defjvp
def _multiply_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The derivative, written so that the gradient of the weight is transposed at the end.

    That gradient is the product of x and the result's gradient, one of them transposed: the narrower one is cheaper.
    The barrier keeps the compiler from undoing this.
    """
    (x, weight), (dx, dweight) = primals, tangents
    inputs, outputs = weight.shape
    if outputs < inputs < len(x):
        turned = jax.lax.optimization_barrier(dweight.T)
        of_weight = jax.lax.dot_general(turned, x, (((1,), (1,)), ((), ()))).T
    else:
        of_weight = x @ dweight
    return x @ weight, dx @ weight + of_weight


def at_least_one(**sizes: int) -> None:
    """Raise an `InputError` if a layer has no units, or too many for any machine."""
    for name, size in sizes.items():
        check_whole(name, size, 1, MOST)
