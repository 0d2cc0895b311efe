"""The bytes of a round's messages, from shapes alone: those that are counted, and those that a system model times."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from folb.core.algorithm import Algorithm
from folb.core.round import upload_shape
from folb.typing import Params


class Sizes(NamedTuple):
    """The bytes of each kind of message."""

    model: int  # to every device that is asked
    shift: int  # to a device of S_1, besides
    reply: int  # from a device of S_1: its update and the algorithm's uploads
    gradient: int  # from a device of S_2 alone
    answer: int  # to a survey


def sizes(algorithm: Algorithm, params: Params) -> Sizes:
    """The bytes of the messages of an algorithm, for a model like `params`."""
    how, second = algorithm.selection.sampling, algorithm.gradient
    asks = how.survey if how.first is None else how.first.upload
    model = nbytes(params)
    return Sizes(
        model=model,
        shift=model if algorithm.memory is not None and algorithm.memory.shift is not None else 0,
        reply=model + sum(nbytes(upload_shape(upload, params)) for upload in algorithm.uploads),
        gradient=model if second is None else nbytes(upload_shape(second.second, params)),
        answer=0 if asks is None else nbytes(upload_shape(asks, params)),
    )


def nbytes(tree: Any) -> int:
    """The bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
