"""The bytes of a round's messages, from shapes alone: those that are counted, and those that a system model times."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from folb.core.algorithm import Algorithm
from folb.core.round import upload_shape
from folb.core.tree import size
from folb.core.upload import DELTA, ENCODED, Upload
from folb.typing import Params


class Sizes(NamedTuple):
    """The bytes of each kind of message."""

    model: int  # to every device that is asked
    shift: int  # to a device of S_1, besides
    reply: int  # from a device of S_1: its update and the algorithm's uploads
    gradient: int  # from a device of S_2 alone
    answer: int  # to a survey


def sizes(algorithm: Algorithm, params: Params) -> Sizes:
    """The bytes of the messages of an algorithm as they are sent, for a model like `params`."""
    codecs, how, memory = algorithm.compression, algorithm.selection, algorithm.memory
    model, d = nbytes(params), size(params)
    asks = how.survey if how.first is None else how.first
    return Sizes(
        model=model if codecs.down is None else codecs.down.nbytes(d),
        shift=model if memory is not None and memory.shifts else 0,
        reply=sum(upload_size(algorithm, upload, params) for upload in (DELTA, *algorithm.uploads)),
        gradient=upload_size(algorithm, algorithm.second_upload, params),
        answer=0 if asks is None else nbytes(upload_shape(asks, params)),
    )


def upload_size(algorithm: Algorithm, upload: Upload, params: Params) -> int:
    """The bytes of one upload: through the codec, if it goes through one."""
    codec = algorithm.compression.up
    if codec is not None and upload in ENCODED:
        return codec.nbytes(size(params))
    return nbytes(upload_shape(upload, params))


def nbytes(tree: Any) -> int:
    """The bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
