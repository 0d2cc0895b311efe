"""Codecs: a vector as fewer bytes, for what devices send and for the model that they are sent.

int8 and int4 have blocks of 256 numbers. The scale of a block is its largest absolute value. Each number is rounded to
one of 255 (15) levels from -scale to scale, up or down by chance, so that it is right on average: QSGD (Alistarh et
al., 2017), with the largest value in place of the norm. sign has one bit for each number, and as scale the mean
absolute value of the block. top_k sends the largest numbers and their places. random_k sends numbers at random
places. The places follow from random words that both sides have, and are not sent.

All sizes follow from the number of parameters and the settings. The same functions run in jax and in NumPy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from folb.core.shuffle import mixed, shuffled
from folb.core.sketch import from_bytes, to_bytes
from folb.core.vector import flat, namespace, over_largest, shaped, size
from folb.errors import InputError, check, choose
from folb.typing import Params

BLOCK = 256  # numbers with one scale
BITS = {"int8": 8, "int4": 4, "sign": 1}
MOST_PLACES = 2**24  # the shuffle of random_k cannot handle more parameters
OWN = 0x5BD1E995  # keeps a codec's random numbers apart from those of the batches
CODECS = {
    "int8": "A byte for each number, right on average, and a scale for each 256.",
    "int4": "Half a byte for each number, right on average, and a scale for each 256.",
    "top_k": "The numbers that are largest in absolute value, and their places.",
    "random_k": "Numbers at random places, which need not be sent.",
    "sign": "A bit for each number, and the mean absolute value of each 256.",
}
SPARSE = ("top_k", "random_k")
WHOLE = ("int8", "int4")  # they keep every number, so the model may go through them


class Codec(NamedTuple):
    """A codec by its name; `keep` is the share of the numbers that top_k and random_k send."""

    name: str
    keep: float = 1.0

    def count(self, d: int) -> int:
        """How many of d numbers are sent."""
        return max(1, math.ceil(self.keep * d - 1e-9)) if self.name in SPARSE else d

    def shapes(self, d: int) -> dict[str, tuple[tuple[int], str]]:
        """The arrays that stand for d numbers: their shapes and types."""
        k = self.count(d)
        if self.name == "top_k":
            return {"places": ((k,), "int32"), "values": ((k,), "float32")}
        if self.name == "random_k":
            if d >= MOST_PLACES:
                expected = f"should be another codec: random_k is for models of fewer than {MOST_PLACES} parameters"
                raise InputError("compress_up", f"random_k, {d} parameters", expected)
            return {"values": ((k,), "float32")}
        return {"codes": ((-(-d * BITS[self.name] // 8),), "uint8"), "scale": ((-(-d // BLOCK),), "float32")}

    def nbytes(self, d: int) -> int:
        """The bytes that stand for d numbers."""
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self.shapes(d).values())

    def encoded(self, a: Params, words: Any) -> dict[str, Any]:
        """The arrays that stand for the tree `a`; `words` are two random words."""
        row = flat(a)
        d = row.shape[0]
        if self.name == "top_k":
            places = _largest(row, self.count(d))
            return {"places": places, "values": row[places]}
        if self.name == "random_k":
            return {"values": row[self._places(words, d)]}
        xp = namespace(row)
        blocks = xp.concat([row, xp.zeros(-d % BLOCK, dtype=xp.float32)]).reshape(-1, BLOCK)
        if self.name == "sign":
            there = xp.minimum(xp.full(blocks.shape[0], BLOCK), d - BLOCK * xp.arange(blocks.shape[0]))
            scale = xp.sum(xp.abs(blocks), axis=1) / there.astype(xp.float32)
            return {"codes": to_bytes((row > 0).astype(xp.uint32), 1), "scale": scale}
        top = _levels(self.name)
        scale = xp.max(xp.abs(blocks), axis=1)
        unit = over_largest(blocks, scale[:, None]).reshape(-1)[:d]
        level = xp.clip(xp.floor(unit * xp.float32(top) + _chances(words, d)), -top, top)
        codes = (level + xp.float32(top + 1)).astype(xp.uint32)
        return {"codes": to_bytes(codes, BITS[self.name]), "scale": scale}

    def decoded(self, sent: dict[str, Any], words: Any, like: Params, whole: bool = False) -> Params:
        """The tree that was encoded, with the errors of the codec, in the shapes of `like`.

        random_k multiplies its numbers by d / k, so that they are right on average. It does not if `whole`: then error
        feedback sends the missing numbers later.
        """
        d = size(like)
        if self.name in SPARSE:
            values = sent["values"]
            if self.name == "random_k" and not whole:
                values = values * namespace(values).float32(d / self.count(d))
            places = sent["places"] if self.name == "top_k" else self._places(words, d)
            return shaped(_placed(values, places, d), like)
        codes = from_bytes(sent["codes"], BITS[self.name], d)
        xp = namespace(codes)
        if self.name == "sign":
            unit = xp.where(codes == 1, xp.float32(1), xp.float32(-1))
        else:
            top = _levels(self.name)
            unit = (codes.astype(xp.float32) - xp.float32(top + 1)) * xp.float32(1 / top)
        return shaped(unit * xp.repeat(sent["scale"], BLOCK)[:d], like)

    def fault(self, sent: dict[str, Any], d: int, most: float) -> str:
        """What is wrong with arrays of the right shapes that a device sent; "" if nothing is."""
        if "scale" in sent and not np.all((sent["scale"] >= 0) & (sent["scale"] <= most)):
            return f"a scale is not from 0 to {most:g}"
        if self.name in WHOLE and not np.all(from_bytes(sent["codes"], BITS[self.name], d) > 0):
            return f"a code is 0, which is not a level of {self.name}"
        if "places" in sent:
            places = sent["places"]
            if not (np.all((places >= 0) & (places < d)) and np.all(places[1:] > places[:-1])):
                return f"the places are not in ascending order, each once, from 0 to {d - 1}"
        return ""

    def _places(self, words: Any, d: int) -> Any:
        return shuffled(_own(words), 0, namespace(words).arange(self.count(d)), d)


class Compression(NamedTuple):
    """The codecs of an algorithm, each None if there is none; and whether both sides have error feedback."""

    up: Codec | None = None
    down: Codec | None = None
    feedback: bool = False

    @property
    def remembers(self) -> bool:
        """Whether each device keeps what its codec left out."""
        return self.up is not None and self.feedback


def compression(up: str | None, down: str | None, keep: float | None, feedback: bool | None) -> Compression:
    """The codecs by name, checked."""
    if up is not None:
        choose("compress_up", up, CODECS)
    if down is not None and choose("compress_down", down, CODECS) not in WHOLE:
        expected = f"should be {' or '.join(WHOLE)}: devices keep no model, so each round sends all of its numbers"
        raise InputError("compress_down", down, expected)
    if keep is not None and up not in SPARSE:
        raise InputError("keep", keep, f"is for compress_up={' or '.join(SPARSE)}; compress_up is {up or 'none'}")
    if keep is not None:
        check("keep", keep, lambda keep: (keep > 0) & (keep <= 1), "should be more than 0 and at most 1")
    if feedback not in (None, True, False):
        raise InputError("error_feedback", feedback, "should be True or False")
    if feedback is not None and up is None and down is None:
        raise InputError("error_feedback", feedback, "needs a codec: set compress_up or compress_down")
    share = (0.1 if keep is None else float(keep)) if up in SPARSE else 1.0
    return Compression(
        None if up is None else Codec(up, share),
        None if down is None else Codec(down),
        up in (*SPARSE, "sign") if feedback is None else feedback,
    )


def _levels(name: str) -> int:
    """The levels on each side of 0."""
    return int(2 ** (BITS[name] - 1) - 1)


def _own(words: Any) -> Any:
    return words ^ namespace(words).uint32(OWN)


def _chances(words: Any, d: int) -> Any:
    """d random numbers from 0 to 1, without 1."""
    own, xp = _own(words), namespace(words)
    bits = mixed(mixed(xp.arange(d, dtype=xp.uint32) ^ own[0]) ^ own[1])
    return (bits >> 8).astype(xp.float32) * xp.float32(2**-24)


def _largest(row: Any, k: int) -> Any:
    """The places of the k numbers that are largest in absolute value, in ascending order; of equals, the first.

    What is not finite is largest, so that it is not left out.
    """
    xp = namespace(row)
    length = xp.where(xp.isfinite(row), xp.abs(row), xp.inf)
    if isinstance(row, np.ndarray):
        return np.sort(np.argsort(-length, kind="stable")[:k]).astype(np.int32)
    import jax

    return jax.numpy.sort(jax.lax.top_k(length, k)[1])


def _placed(values: Any, places: Any, d: int) -> Any:
    """A row of d numbers: `values` at `places`, and 0 elsewhere."""
    row = namespace(values).zeros(d, dtype=values.dtype)
    if not isinstance(row, np.ndarray):
        return row.at[places].set(values)
    row[places] = values
    return row
