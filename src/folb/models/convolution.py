"""The convolutional networks."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import check
from folb.models import dense
from folb.models.in_training import Crop, DropMaps, DropUnits, Flip, dropped, randomised, varied
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
    once: Annotated[bool | None, "no padding, and one maximum, after the second convolution; no if not set"] = None,
    drop_maps: DropMaps = None,
    drop_units: DropUnits = None,
    flip: Flip = None,
    crop: Crop = None,
) -> Model:
    """A convolutional network of three layers (Sec. VI): two 3x3 convolutions and a dense one, then the class scores.

    Each convolution is followed by relu and the maximum of 2x2 pixels. Images are grey (height, width) or have
    channels last. With once=True, drop_maps=0.25 and drop_units=0.5 it is the network of the CIFAR10 benchmark of
    pfl-research, and of Reddi et al. for EMNIST.
    """
    dense.at_least_one(first=first, second=second, hidden=hidden)
    check("once", once, once in (None, True, False), "should be True or False")
    units = {"first": first, "second": second, "hidden": hidden, "scores": classes}
    varying = {"drop_maps": drop_maps, "drop_units": drop_units, "flip": flip, "crop": crop}
    size = image("cnn", shape, 8 if once else 4)
    return _network(size, 3, units, init, varying, block=8, padded=not once, once=bool(once))


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
    drop_maps: DropMaps = None,
    drop_units: DropUnits = None,
    flip: Flip = None,
    crop: Crop = None,
) -> Model:
    """LeNet-5 with relu, as in NIID-Bench: two 5x5 convolutions and two dense layers, then the class scores.

    Each convolution is without padding, and followed by relu and the maximum of 2x2 pixels. Images are grey (height,
    width) or have channels last.
    """
    dense.at_least_one(first=first, second=second, hidden=hidden, last=last)
    units = {"first": first, "second": second, "hidden": hidden, "last": last, "scores": classes}
    varying = {"drop_maps": drop_maps, "drop_units": drop_units, "flip": flip, "crop": crop}
    return _network(image("lenet", shape, 16), 5, units, init, varying, block=64)


def image(name: str, shape: tuple[int, ...], least: int = 4) -> tuple[int, int, int]:
    """The height, width and channels of a model's samples, which should be images."""
    good = len(shape) in (2, 3) and all(side % 4 == 0 and side >= least for side in shape[:2])
    expected = "should be an image whose height and width are multiples of 4"
    check(f"{name}: shape of a sample", shape, good, f"{expected}, from {least} on" if least > 4 else expected)
    height, width, channels = (*shape, 1)[:3]
    return height, width, channels


def _network(
    size: tuple[int, int, int],
    side: int,
    units: dict[str, int],
    init: str | None,
    varying: dict[str, Any],
    block: int,
    padded: bool = False,
    once: bool = False,
) -> Model:
    """Two convolutions and dense layers. The maximum of 2x2 pixels follows each, or `once` the second alone."""
    halved = ("second",) if once else ("first", "second")
    height, width, first = size[0], size[1], units["first"]
    convolutions = {"first": (side, side, size[2], first), "second": (side, side, first, units["second"])}
    for name in convolutions:
        lost, by = 0 if padded else side - 1, 2 if name in halved else 1
        height, width = (height - lost) // by, (width - lost) // by
    dense_units = {name: count for name, count in units.items() if name not in convolutions}

    def scores(params: Params, x: Array, key: Array | None) -> Array:
        x = varied(x.reshape(len(x), *size), varying["flip"], varying["crop"], key)
        for name in convolutions:
            x = convolved(params[name]["weight"], x, padded) + params[name]["bias"]
            x = jax.nn.relu(halve(x) if name in halved else x)
        x = dropped(x.reshape(len(x), -1), varying["drop_maps"], key, 0)
        return dense.perceptron(params, x, dense_units, varying["drop_units"], key)

    start = dense.drawing(convolutions | dense.shapes(height * width * units["second"], dense_units), init)
    return classifier(start, randomised(scores, **varying), heavy=True, block=block, hidden=dense.hidden(units))


def convolved(weight: Array, x: Array, padded: bool = True, stride: int = 1) -> Array:
    """The convolution of images [batch, height, width, channels], padded with zeros to keep their size, or not."""
    # One product with shifted copies of the images. Inside a loop XLA's own convolution is about ten times slower on a
    # CPU, and half as fast on a GPU if each device of a round has its own weights.
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
