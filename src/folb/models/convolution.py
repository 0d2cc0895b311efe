"""The convolutional networks."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import check
from folb.models import dense
from folb.models.model import Model, classifier, made_once
from folb.typing import Params


@made_once
def cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    first: Annotated[int, "channels of the first convolution"] = 32,
    second: Annotated[int, "channels of the second convolution"] = 64,
    hidden: Annotated[int, "units of the dense layer"] = 128,
    init: dense.Init = None,
) -> Model:
    """A convolutional network of three layers (Sec. VI): two 3x3 convolutions and a dense one, then the class scores.

    Each convolution is followed by relu and the maximum of 2x2 pixels. Images are grey (height, width) or have
    channels last.
    """
    dense.at_least_one(first=first, second=second, hidden=hidden)
    units = {"first": first, "second": second, "hidden": hidden, "scores": classes}
    return _network(image("cnn", shape), 3, True, units, dense.check_init(init), block=8)


@made_once
def lenet(
    shape: tuple[int, ...],
    classes: int,
    *,
    first: Annotated[int, "channels of the first convolution"] = 6,
    second: Annotated[int, "channels of the second convolution"] = 16,
    hidden: Annotated[int, "units of the first dense layer"] = 120,
    last: Annotated[int, "units of the second dense layer"] = 84,
    init: dense.Init = None,
) -> Model:
    """LeNet-5 with relu, as in NIID-Bench: two 5x5 convolutions and two dense layers, then the class scores.

    Each convolution is without padding, and followed by relu and the maximum of 2x2 pixels. Images are grey (height,
    width) or have channels last.
    """
    dense.at_least_one(first=first, second=second, hidden=hidden, last=last)
    units = {"first": first, "second": second, "hidden": hidden, "last": last, "scores": classes}
    return _network(image("lenet", shape, 16), 5, False, units, dense.check_init(init), block=64)


def image(name: str, shape: tuple[int, ...], least: int = 4) -> tuple[int, int, int]:
    """The height, width and channels of a model's samples, which should be images."""
    good = len(shape) in (2, 3) and all(side % 4 == 0 and side >= least for side in shape[:2])
    expected = "should be an image whose height and width are multiples of 4"
    check(f"{name}: shape of a sample", shape, good, f"{expected}, from {least} on" if least > 4 else expected)
    height, width, channels = (*shape, 1)[:3]
    return height, width, channels


def _network(
    size: tuple[int, int, int], side: int, padded: bool, units: dict[str, int], init: str, block: int
) -> Model:
    """Two convolutions of `first` and `second` channels, then dense layers of so many units."""
    lost = 0 if padded else side // 2 + 1  # what both convolutions take from a side, in pixels of the quarter image
    pixels, first = (size[0] // 4 - lost) * (size[1] // 4 - lost), units["first"]
    convolutions = {"first": (side, side, size[2], first), "second": (side, side, first, units["second"])}
    dense_units = {name: count for name, count in units.items() if name not in convolutions}

    def scores(params: Params, x: Array) -> Array:
        x = x.reshape(len(x), *size)
        for name in convolutions:
            x = jax.nn.relu(halve(apply(params[name], x, padded)))
        return dense.perceptron(params, x.reshape(len(x), -1), dense_units)

    start = dense.drawing(convolutions | dense.shapes(pixels * units["second"], dense_units), init)
    return classifier(start, scores, heavy=True, block=block, hidden=dense.hidden(units))


def apply(params: Params, x: Array, padded: bool = True) -> Array:
    """The convolution of images [batch, height, width, channels], padded with zeros to keep their size, or not."""
    return convolved(params["weight"], x, padded) + params["bias"]


def convolved(weight: Array, x: Array, padded: bool = True, stride: int = 1) -> Array:
    """The convolution without biases, at every pixel, or at every second one in both directions if the stride is 2.

    It is one matrix product with shifted copies of the images, nine if the weight is 3x3. Inside a loop XLA's own
    convolution is about ten times slower on a CPU, and half as fast on a GPU if each device of a round has its own
    weights.
    """
    side = len(weight)
    if padded:
        x = jnp.pad(x, ((0, 0), (side // 2, side // 2), (side // 2, side // 2), (0, 0)))
    height, width = (n - side + 1 for n in x.shape[1:3])
    shifted = [x[:, i : i + height : stride, j : j + width : stride] for i in range(side) for j in range(side)]
    return dense.product(jnp.concatenate(shifted, axis=-1), weight.reshape(-1, weight.shape[-1]))


def halve(x: Array) -> Array:
    """The maximum of each 2x2 pixels."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
