"""Models as three functions. Any library's model plugs in through the same three."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import choose
from folb.tree import Params


class Model(NamedTuple):
    """What the algorithms need to know of a model.

    init(key) -> params; loss(params, x, y) -> the loss of each sample of a batch; predict(params, x) -> labels.
    """

    init: Callable[[Array], Params]
    loss: Callable[[Params, Array, Array], Array]
    predict: Callable[[Params, Array], Array]


def cross_entropy(logits: Array, y: Array) -> Array:
    """-log softmax(logits)[y], for each row."""
    picked = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


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
        weight = jnp.zeros((inputs, classes))
        if init == "glorot":
            weight = jax.nn.initializers.glorot_uniform()(key, (inputs, classes))
        return {"weight": weight, "bias": jnp.zeros(classes)}

    def scores(params: Params, x: Array) -> Array:
        return x.reshape(len(x), inputs) @ params["weight"] + params["bias"]

    return Model(
        init=start,
        loss=lambda params, x, y: cross_entropy(scores(params, x), y),
        predict=lambda params, x: scores(params, x).argmax(axis=1),
    )


MODELS: dict[str, Callable[..., Model]] = {"logistic": logistic}
