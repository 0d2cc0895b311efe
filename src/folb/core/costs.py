"""What an algorithm costs besides its rounds: what is sent, and what the server remembers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from folb.core.algorithm import Algorithm
from folb.core.round import begin, nbytes, sizes, upload_size
from folb.core.upload import DELTA

D = 9973  # parameters of the model that is measured: a prime, so that its multiples are seen among other numbers


class Costs(NamedTuple):
    """Sizes in words: "d" is the model, "2 d" two of them, "4 B" some bytes."""

    up: str  # from a device
    down: str  # to a device
    server: str  # remembered by the server, once
    device: str  # remembered by the server, for each device


def costs(algorithm: Algorithm) -> Costs:
    """What a device sends and is sent in a round, and what the server remembers. Nothing is computed."""
    params = {"w": jax.ShapeDtypeStruct((D,), jnp.float32)}
    bytes_of = sizes(algorithm, params)
    state, own = jax.eval_shape(lambda w: begin(algorithm, w), params)
    uploads = [(upload.name, upload_size(algorithm, upload, params)) for upload in algorithm.uploads]
    update = upload_size(algorithm, DELTA, params)
    up = " + ".join([_size(update), *(f"{_size(size)} ({name})" for name, size in uploads)])
    how = algorithm.selection
    asked = how.survey if how.first is None else how.first
    if asked is not None:
        who = "each of N" if how.candidates is None else f"each of {how.candidates} candidates"
        once = " once" if how.first is not None else ""
        up += f", and {_size(bytes_of.answer)} ({asked.name}) from {who}{once}"
    kinds = {"shift": "shift", "begin": "start"}
    what = ", ".join(word for method, word in kinds.items() if algorithm.memory and algorithm.memory.has(method))
    down = _size(bytes_of.model) + (f" + {_size(bytes_of.shift)} ({what})" if bytes_of.shift else "")
    server = (state.memory, state.shared, state.average, state.step_size, state.residual, state.queue)
    return Costs(up, down, _size(nbytes(server)), _size(nbytes(own)))


def _size(size: int) -> str:
    models, rest = divmod(size, 4 * D)
    if rest > D // 10:  # through a codec
        return f"{size / (4 * D):.3g} d"
    parts = ([] if not models else ["d" if models == 1 else f"{models} d"]) + ([f"{rest} B"] if rest else [])
    return " + ".join(parts) or "nothing"
