"""What devices send through a codec, as the server decodes it; and what is left out, which each device keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.codec import Codec
from folb.core.memory import Rows, empty, gathered, scattered
from folb.typing import Params


def no_residuals(params: Params, N: int, most: int) -> Rows:
    """Nothing left out yet, for N devices of which at most `most` will be met."""
    return empty(jax.tree.map(jnp.zeros_like, params), N, most)


def arrived(codec: Codec, stack: Params, words: Array, whole: bool = False) -> Params:
    """A stack of trees as the server decodes them; `words` are two random words for each."""

    def both(a: Params, words: Array) -> Params:
        return codec.decoded(codec.encoded(a, words), words, a, whole)

    return jax.vmap(both)(stack, words)


def with_feedback(
    codec: Codec, delta: Params, words: Array, device: Array, usable: Array, residuals: Rows
) -> tuple[Params, Any]:
    """Updates as the server decodes them, each with what its device left out before; and what is left out now.

    A device does not know what becomes of its reply. So what it left out changes whenever it sends one.
    """
    full = tree.add(delta, gathered(residuals, device))
    found = arrived(codec, full, words, whole=True)
    return found, scattered(residuals, device, usable, tree.sub(full, found))
