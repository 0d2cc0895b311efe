"""What an algorithm costs besides its rounds: what crosses the wire, and what the server remembers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from folb.core.algorithm import Algorithm
from folb.core.round import begin, upload_shape
from folb.core.tree import size
from folb.core.upload import DELTA, ENCODED, GRAD, Upload
from folb.typing import Params

D = 9973  # parameters of the model that is measured: a prime, so that multiples of it are told from other numbers


class Costs(NamedTuple):
    """Sizes in words: "d" is the model, "2 d" two of them, "4 B" some bytes."""

    up: str  # from a device
    down: str  # to a device
    server: str  # remembered by the server, once
    device: str  # remembered by the server, for each device


class Sizes(NamedTuple):
    """The bytes of each message of a round, to or from one device."""

    model: int  # the model, to each device that is asked
    shift: int  # what a memory adds to the model for a device of S_1
    up: int  # an update and all uploads, from a device of S_1
    second: int  # what stands for the gradient, from a device of S_2
    answer: int  # the answer to a survey


def sizes(algorithm: Algorithm, params: Params) -> Sizes:
    """The bytes as they are sent, for a model like `params`: all byte counts come from here."""
    codecs, how, memory = algorithm.compression, algorithm.selection.sampling, algorithm.memory
    model, d = nbytes(params), size(params)
    second = GRAD if algorithm.gradient is None else algorithm.gradient.second
    asked = how.survey if how.first is None else how.first.upload
    return Sizes(
        model=model if codecs.down is None else codecs.down.nbytes(d),
        shift=model if memory is not None and memory.shift is not None else 0,
        up=sum(upload_size(algorithm, upload, params) for upload in (DELTA, *algorithm.uploads)),
        second=upload_size(algorithm, second, params),
        answer=0 if asked is None else nbytes(upload_shape(asked, params)),
    )


def upload_size(algorithm: Algorithm, upload: Upload, params: Params) -> int:
    """The bytes of one upload: through the codec, if it goes through one."""
    codec = algorithm.compression.up
    if codec is not None and upload in ENCODED:
        return codec.nbytes(size(params))
    return nbytes(upload_shape(upload, params))


def costs(algorithm: Algorithm) -> Costs:
    """What a device sends and is sent in a round, and what the server remembers. Nothing is computed."""
    params = {"w": jax.ShapeDtypeStruct((D,), jnp.float32)}
    found = sizes(algorithm, params)
    state, own = jax.eval_shape(lambda w: begin(algorithm, w), params)
    uploads = [(upload.name, upload_size(algorithm, upload, params)) for upload in algorithm.uploads]
    update = upload_size(algorithm, DELTA, params)
    up = " + ".join([_size(update), *(f"{_size(size)} ({name})" for name, size in uploads)])
    how = algorithm.selection.sampling
    asked = how.survey if how.first is None else how.first.upload
    if asked is not None:
        who = "each of N" if how.candidates is None else f"each of {how.candidates} candidates"
        once = " once" if how.first is not None else ""
        up += f", and {_size(found.answer)} ({asked.name}) from {who}{once}"
    down = _size(found.model) + (f" + {_size(found.shift)} (shift)" if found.shift else "")
    server = (state.memory, state.shared, state.average, state.step_size, state.residual)
    return Costs(up, down, _size(nbytes(server)), _size(nbytes(own)))


def nbytes(tree: Any) -> int:
    """The bytes of all arrays of a tree."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _size(nbytes: int) -> str:
    models, rest = divmod(nbytes, 4 * D)
    if rest > D // 10:  # through a codec
        return f"{nbytes / (4 * D):.3g} d"
    parts = ([] if not models else ["d" if models == 1 else f"{models} d"]) + ([f"{rest} B"] if rest else [])
    return " + ".join(parts) or "nothing"
