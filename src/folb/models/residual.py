"""The residual network, with group norm: a device's batches are small, and batch norm would mix up their statistics."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.whiten import Hidden
from folb.errors import check, check_whole
from folb.models import dense
from folb.models.convolution import convolved, image
from folb.models.in_training import Crop, Flip, randomised, varied
from folb.models.model import Model, classifier, made_once
from folb.typing import Params

STAGES = 3
EPS = 1e-5  # added to a variance, as PyTorch does


@made_once
def resnet(
    shape: tuple[int, ...],
    classes: int,
    *,
    depth: Annotated[int, "layers with weights: 8, 14, 20, 26 and so on"] = 8,
    width: Annotated[int, "channels of the first third; the others have twice and four times as many"] = 16,
    groups: Annotated[int, "groups of channels that are normalised together"] = 2,
    flip: Flip = None,
    crop: Crop = None,
) -> Model:
    """The ResNet for small images (He et al., 2016), with group norm (Wu and He, 2018) in place of batch norm.

    A 3x3 convolution, three stages of (depth - 2) / 6 blocks each, the mean over all pixels, and the class scores. A
    block is two 3x3 convolutions, to which its input is added. The second and the third stage halve height and width; a
    1x1 convolution then fits the input of their first block. Weights are He et al.'s normal draws. Images are grey
    (height, width) or have channels last.
    """
    check_whole("depth", depth, 8, 110)
    check("depth", depth, (depth - 2) % 6 == 0, "should be 2 more than a multiple of 6, such as 8, 14 or 20")
    dense.at_least_one(width=width, groups=groups)
    check("groups", groups, width % groups == 0, f"should divide the width, {width}")
    size = image("resnet", shape)
    # the channels into and out of each block, and its stride
    plan = [
        (width * (2 ** max(stage - 1, 0) if i == 0 else 2**stage), width * 2**stage, 2 if stage and i == 0 else 1)
        for stage in range(STAGES)
        for i in range((depth - 2) // 6)
    ]

    def start(key: Array) -> Params:
        first, last, *keys = jax.random.split(key, 2 + len(plan))
        blocks = [_block(one, inputs, outputs) for one, (inputs, outputs, _) in zip(keys, plan, strict=True)]
        return {
            "first": layer(first, 3, size[-1], width),
            **{f"block{i}": block for i, block in enumerate(blocks, 1)},
            "scores": dense.drawn(last, (plan[-1][1], classes)),
        }

    def scores(params: Params, x: Array, key: Array | None) -> Array:
        x = varied(x.reshape(len(x), *size), flip, crop, key)
        x = jax.nn.relu(apply(params["first"], x, groups))
        for i, (_, _, stride) in enumerate(plan, 1):
            x = residual(params[f"block{i}"], x, groups, stride)
        return dense.apply(params["scores"], x.mean(axis=(1, 2)))

    hidden = [Hidden("first.weight")]
    for i, (into, out, _) in enumerate(plan, 1):
        hidden += [Hidden(f"block{i}.{one}.weight") for one in ("one", "two", *([] if into == out else ["across"]))]
    return classifier(start, randomised(scores, flip, crop), heavy=True, block=16, hidden=hidden)


def layer(key: Array, side: int, inputs: int, outputs: int) -> Params:
    """The initial convolution and its norm: weights of variance 2 / (inputs of an output), scales 1 and shifts 0."""
    weight = jax.nn.initializers.he_normal()(key, (side, side, inputs, outputs))
    return {"weight": weight, "scale": jnp.ones(outputs), "shift": jnp.zeros(outputs)}


def _block(key: Array, inputs: int, outputs: int) -> Params:
    keys = jax.random.split(key, 3)
    fitted = {} if inputs == outputs else {"across": layer(keys[2], 1, inputs, outputs)}
    return {"one": layer(keys[0], 3, inputs, outputs), "two": layer(keys[1], 3, outputs, outputs)} | fitted


def residual(params: Params, x: Array, groups: int, stride: int) -> Array:
    """relu(f(x) + x), where f is two convolutions with norms; the second x is fitted if f changes its shape."""
    h = jax.nn.relu(apply(params["one"], x, groups, stride))
    h = apply(params["two"], h, groups)
    return jax.nn.relu(h + (apply(params["across"], x, groups, stride) if "across" in params else x))


def apply(params: Params, x: Array, groups: int, stride: int = 1) -> Array:
    """A convolution, and its group norm: each group has mean 0 and variance 1 over its channels and all pixels."""
    x = convolved(params["weight"], x, stride=stride)
    batch, height, width, channels = x.shape
    h = x.reshape(batch, height * width, groups, channels // groups)
    mean = h.mean(axis=(1, 3), keepdims=True)
    variance = jnp.square(h - mean).mean(axis=(1, 3), keepdims=True)
    h = ((h - mean) * jax.lax.rsqrt(variance + EPS)).reshape(x.shape)
    return h * params["scale"] + params["shift"]
