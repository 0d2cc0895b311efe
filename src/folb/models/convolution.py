"""The convolutional network."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import check
from folb.models import dense
from folb.models.model import Model, classifier
from folb.typing import Params


def cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    first: Annotated[int, "channels of the first convolution"] = 32,
    second: Annotated[int, "channels of the second convolution"] = 64,
    hidden: Annotated[int, "units of the dense layer"] = 128,
) -> Model:
    """A convolutional network of three layers (Sec. VI): two 3x3 convolutions and a dense one, then the class scores.

    Each convolution is followed by relu and the maximum of 2x2 pixels. Images are grey (height, width) or have
    channels last.
    """
    dense.at_least_one(first=first, second=second, hidden=hidden)
    good = len(shape) in (2, 3) and shape[0] % 4 == shape[1] % 4 == 0
    check("cnn: shape of a sample", shape, good, "should be an image whose height and width are multiples of 4")
    height, width, channels = (*shape, 1)[:3]
    pixels = height // 4 * (width // 4)

    def start(key: Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "first": layer(keys[0], channels, first),
            "second": layer(keys[1], first, second),
            "hidden": dense.layer(keys[2], pixels * second, hidden),
            "scores": dense.layer(keys[3], hidden, classes),
        }

    def scores(params: Params, x: Array) -> Array:
        x = x.reshape(len(x), height, width, channels)
        x = jax.nn.relu(halve(apply(params["first"], x)))
        x = jax.nn.relu(halve(apply(params["second"], x)))
        x = jax.nn.relu(dense.apply(params["hidden"], x.reshape(len(x), -1)))
        return dense.apply(params["scores"], x)

    return classifier(start, scores, heavy=True, block=8)


def layer(key: Array, channels: int, outputs: int) -> Params:
    """The initial 3x3 convolution: weights from Glorot and Bengio's uniform draw, and zero bias."""
    weight = jax.nn.initializers.glorot_uniform()(key, (3, 3, channels, outputs))
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def apply(params: Params, x: Array) -> Array:
    """The convolution of images [batch, height, width, channels], padded with zeros.

    It is one matrix product with nine shifted copies of the images. Inside a loop XLA's own convolution is about ten
    times slower on a CPU, and half as fast on a GPU if each device of a round has its own weights.
    """
    _, height, width, _ = x.shape
    weight = params["weight"]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return dense.product(jnp.concatenate(shifted, axis=-1), weight.reshape(-1, weight.shape[-1])) + params["bias"]


def halve(x: Array) -> Array:
    """The maximum of each 2x2 pixels."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
