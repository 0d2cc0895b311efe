"""Models of dense layers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.whiten import Hidden
from folb.errors import check, check_whole, choose
from folb.models.in_training import Drop, dropped, randomised
from folb.models.model import Model, classifier, made_once, regressor
from folb.typing import Params

MOST = 10**5  # units of a layer

Init = Annotated[Literal["glorot", "torch"] | None, "how weights and biases are drawn; glorot if not set"]


@made_once
def logistic(
    shape: tuple[int, ...],
    classes: int,
    *,
    init: Annotated[Literal["zeros", "glorot", "torch"], "where the weights start"] = "zeros",
    squash: Annotated[
        bool | None, "take the sigmoid of each score before the softmax, as FedML does; no if not set"
    ] = None,
) -> Model:
    """Multinomial logistic regression (Sec. VI): one linear map to the class scores."""
    choose("init", init, ("zeros", "glorot", "torch"))
    check("squash", squash, squash in (None, True, False), "should be True or False")
    inputs = prod(shape)

    def start(key: Array) -> Params:
        if init != "zeros":
            return drawn(key, (inputs, classes), init)
        return {"weight": jnp.zeros((inputs, classes)), "bias": jnp.zeros(classes)}

    def scores(params: Params, x: Array) -> Array:
        linear = apply(params, x.reshape(len(x), inputs))
        return jax.nn.sigmoid(linear) if squash else linear

    return classifier(start, scores)


@made_once
def linear(shape: tuple[int, ...], classes: int) -> Model:
    """Linear regression: one linear map to the label, a number, with the squared error as its loss."""
    inputs = prod(shape)

    def start(key: Array) -> Params:
        return {"weight": jnp.zeros((inputs, 1)), "bias": jnp.zeros(1)}

    def value(params: Params, x: Array) -> Array:
        return apply(params, x.reshape(len(x), inputs))[:, 0]

    return regressor(start, value)


@made_once
def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    first: Annotated[int, "units of the first hidden layer"] = 200,
    second: Annotated[int, "units of the second hidden layer"] = 100,
    init: Init = None,
    drop: Drop = None,
) -> Model:
    """A perceptron of three layers (Sec. VI): two hidden ones with relu, and the class scores.

    With second=200 it is the 2NN of McMahan et al.
    """
    at_least_one(first=first, second=second)
    inputs, units = prod(shape), {"first": first, "second": second, "scores": classes}

    def scores(params: Params, x: Array, key: Array | None) -> Array:
        return perceptron(params, x.reshape(len(x), inputs), units, drop, key)

    start = drawing(shapes(inputs, units), init)
    return classifier(start, randomised(scores, drop=drop), hidden=hidden(units))


def hidden(layers: Iterable[str]) -> tuple[Hidden, ...]:
    """The weights of all layers but the last, which has the outputs."""
    return tuple(Hidden(f"{name}.weight") for name in [*layers][:-1])


def shapes(inputs: int, units: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of dense layers of so many units, one after another."""
    return dict(zip(units, pairwise([inputs, *units.values()]), strict=True))


def perceptron(
    params: Params, x: Array, names: Iterable[str], drop: float | None = None, key: Array | None = None
) -> Array:
    """The output of the last of these dense layers; relu follows each of the others, and with a key dropout."""
    *hidden, last = names
    for layer, name in enumerate(hidden, 1):
        x = dropped(jax.nn.relu(apply(params[name], x)), drop, key, layer)
    return apply(params[last], x)


def drawing(shapes: Mapping[str, tuple[int, ...]], init: str | None) -> Callable[[Array], Params]:
    """The function of a key that draws layers with weights of these shapes, each as `drawn` does."""
    how = "glorot" if init is None else choose("init", init, ("glorot", "torch"))

    def start(key: Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        return {name: drawn(keys[i], shape, how) for i, (name, shape) in enumerate(shapes.items())}

    return start


def drawn(key: Array, shape: tuple[int, ...], init: str = "glorot") -> Params:
    """Initial weights of that shape, outputs last, and biases: Glorot and Bengio's draw, or PyTorch's default."""
    if init == "glorot":
        return {"weight": jax.nn.initializers.glorot_uniform()(key, shape), "bias": jnp.zeros(shape[-1])}
    keys, bound = jax.random.split(key), prod(shape[:-1]) ** -0.5  # from the inputs of an output
    return {
        "weight": jax.random.uniform(keys[0], shape, minval=-bound, maxval=bound),
        "bias": jax.random.uniform(keys[1], shape[-1:], minval=-bound, maxval=bound),
    }


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
    """The derivative. The gradient of the weight is transposed at the end: the narrower matrix is cheaper to turn."""
    (x, weight), (dx, dweight) = primals, tangents
    inputs, outputs = weight.shape
    if outputs < inputs < len(x):
        turned = jax.lax.optimization_barrier(dweight.T)  # the compiler would undo this
        of_weight = jax.lax.dot_general(turned, x, (((1,), (1,)), ((), ()))).T
    else:
        of_weight = x @ dweight
    return x @ weight, dx @ weight + of_weight


def at_least_one(**sizes: int) -> None:
    """Raise an `InputError` if a layer has no units, or too many for any machine."""
    for name, size in sizes.items():
        check_whole(name, size, 1, MOST)
