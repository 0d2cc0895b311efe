"""What a network does in training alone, where the loss has a key: dropout, and changed images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from folb.errors import check, check_number, check_whole

IMAGE = 2**31 - 1  # in place of a layer's number: the draws for the images themselves

Drop = Annotated[float | None, "dropout after each hidden layer, with this chance; none if not set"]
DropMaps = Annotated[float | None, "dropout before the first dense layer; none if not set"]
DropUnits = Annotated[float | None, "dropout after each hidden dense layer; none if not set"]
Flip = Annotated[bool | None, "mirror each training image with chance 1/2; no if not set"]
Crop = Annotated[int | None, "a random crop of each training image, padded with so many pixels; none if not set"]


def randomised(
    scores: Callable[..., Array], flip: bool | None = None, crop: int | None = None, **rates: float | None
) -> Callable[..., Array]:
    """scores(params, x, key), if any of these options needs the key; otherwise scores(params, x). They are checked."""
    for name, rate in rates.items():
        if rate is not None:
            check_number(name, rate, lambda rate: (rate >= 0) & (rate < 1), "should be at least 0 and less than 1")
    check("flip", flip, flip in (None, True, False), "should be True or False")
    if crop is not None:
        check_whole("crop", crop, 0, 100)
    return scores if flip or crop or any(rates.values()) else lambda params, x: scores(params, x, None)


def dropped(x: Array, rate: float | None, key: Array | None, layer: int) -> Array:
    """Dropout: each number is 0 with that chance, and otherwise larger, so that its mean stays."""
    if key is None or not rate:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def varied(x: Array, flip: bool | None, crop: int | None, key: Array | None) -> Array:
    """Images [batch, height, width, channels], each mirrored or not, and a random part of it padded with zeros."""
    if key is None:
        return x
    first, second = jax.random.split(jax.random.fold_in(key, IMAGE))
    if flip:
        x = jnp.where(jax.random.bernoulli(first, 0.5, (len(x), 1, 1, 1)), x[:, :, ::-1], x)
    if crop:
        corner = jax.random.randint(second, (len(x), 2), 0, 2 * crop + 1)
        room = jnp.pad(x, ((0, 0), (crop, crop), (crop, crop), (0, 0)))
        x = jax.vmap(lambda whole, at: jax.lax.dynamic_slice(whole, (*at, 0), x.shape[1:]))(room, corner)
    return x
