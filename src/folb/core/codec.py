"""Codecs: a vector as fewer bytes, for what devices send and for the model that they are sent.

int8 and int4 have blocks of 256 numbers. The scale of a block is its largest absolute value. Each number is rounded to
one of 255 (15) levels from -scale to scale, up or down by chance, so that it is right on average: QSGD (Alistarh et
al., 2017), with the largest value in place of the norm. The places of random_k follow from random words that both
sides have. All of it runs in jax and in NumPy.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from folb.core.part import Part, Slot, setting, up_to
from folb.core.shuffle import mixed_words, shuffled
from folb.core.sketch import from_bytes, to_bytes
from folb.core.vector import flat, in_rows, namespace, over_largest, shaped, size
from folb.errors import check
from folb.typing import Params

BLOCK = 256  # numbers with one scale
MOST_PLACES = 2**24  # the shuffle of random_k cannot handle more parameters
OWN = 0x5BD1E995  # keeps a codec's random numbers apart from those of the batches


class Codec(Part):
    """A vector as fewer bytes. One of your own is a class of this base with `shapes`, `encode` and `decode`."""

    needed = ("shapes", "encode", "decode")
    whole: ClassVar[bool] = False  # whether it keeps every number, so that the model may go through it
    feedback: ClassVar[bool] = False  # whether it has error feedback unless that is set

    def shapes(self, d: int) -> dict[str, tuple[tuple[int], str]]:
        """The arrays that stand for d numbers: their shapes and types."""
        raise NotImplementedError

    def encode(self, row: Any, words: Any) -> dict[str, Any]:
        """The arrays that stand for a row of numbers; `words` are two random words."""
        raise NotImplementedError

    def decode(self, sent: dict[str, Any], words: Any, d: int, whole: bool) -> Any:
        """The row of d numbers. With `whole`, error feedback sends what is missing later."""
        raise NotImplementedError

    def fault(self, sent: dict[str, Any], d: int, most: float) -> str:
        """What is wrong with arrays of the right shapes that a device sent; "" if nothing is."""
        return ""

    def nbytes(self, d: int) -> int:
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self.shapes(d).values())

    def encoded(self, a: Params, words: Any) -> dict[str, Any]:
        """The arrays that stand for the tree `a`."""
        return self.encode(flat(a), words)

    def decoded(self, sent: dict[str, Any], words: Any, like: Params, whole: bool = False) -> Params:
        """The tree that was encoded, with the errors of the codec, in the shapes of `like`."""
        return shaped(self.decode(sent, words, size(like), whole), like)


class Blocks(Codec):
    """Codecs with some bits for each number, and a scale for each block of them."""

    abstract = True
    bits: ClassVar[int]

    def shapes(self, d: int) -> dict[str, tuple[tuple[int], str]]:
        return {"codes": ((-(-d * self.bits // 8),), "uint8"), "scale": ((-(-d // BLOCK),), "float32")}

    def fault(self, sent: dict[str, Any], d: int, most: float) -> str:
        fits = np.all((sent["scale"] >= 0) & (sent["scale"] <= most))
        return "" if fits else f"a scale is not from 0 to {most:g}"

    def decode(self, sent: dict[str, Any], words: Any, d: int, whole: bool) -> Any:
        unit, scale = self.unit(from_bytes(sent["codes"], self.bits, d)), sent["scale"]
        return unit * namespace(unit).repeat(scale, BLOCK)[:d]

    def unit(self, codes: Any) -> Any:
        """What each code stands for, from -1 to 1."""
        raise NotImplementedError


class Levels(Blocks):
    """Codecs that round to levels at random."""

    abstract = True
    whole = True
    top: ClassVar[int]  # the levels on each side of 0

    def encode(self, row: Any, words: Any) -> dict[str, Any]:
        d, xp, blocks, top = row.shape[0], namespace(row), in_rows(row, BLOCK), self.top
        scale = xp.max(xp.abs(blocks), axis=1)
        unit = over_largest(blocks, scale[:, None]).reshape(-1)[:d]
        chances = (mixed_words(_own(words), d) >> 8).astype(xp.float32) * xp.float32(2**-24)  # from 0, and below 1
        level = xp.clip(xp.floor(unit * xp.float32(top) + chances), -top, top)
        codes = (level + xp.float32(top + 1)).astype(xp.uint32)
        return {"codes": to_bytes(codes, self.bits), "scale": scale}

    def unit(self, codes: Any) -> Any:
        xp = namespace(codes)
        return (codes.astype(xp.float32) - xp.float32(self.top + 1)) * xp.float32(1 / self.top)

    def fault(self, sent: dict[str, Any], d: int, most: float) -> str:
        fits = np.all(from_bytes(sent["codes"], self.bits, d) > 0)
        return super().fault(sent, d, most) or ("" if fits else f"a code is 0, which is not a level of {self.name}")


class Int8(Levels):
    """A byte for each number, right on average, and a scale for each 256."""

    bits, top = 8, 127


class Int4(Levels):
    """Half a byte for each number, right on average, and a scale for each 256."""

    bits, top = 4, 7


class Sign(Blocks):
    """A bit for each number, and the mean absolute value of each 256."""

    bits = 1
    feedback = True

    def encode(self, row: Any, words: Any) -> dict[str, Any]:
        xp, blocks = namespace(row), in_rows(row, BLOCK)
        there = xp.minimum(xp.full(blocks.shape[0], BLOCK), row.shape[0] - BLOCK * xp.arange(blocks.shape[0]))
        scale = xp.sum(xp.abs(blocks), axis=1) / there.astype(xp.float32)
        return {"codes": to_bytes((row > 0).astype(xp.uint32), 1), "scale": scale}

    def unit(self, codes: Any) -> Any:
        xp = namespace(codes)
        return xp.where(codes == 1, xp.float32(1), xp.float32(-1))


class Sparse(Codec):
    """Codecs that send some of the numbers."""

    abstract = True
    feedback = True
    keep: float = setting("the share of the numbers that is sent", up_to(1), default=0.1, static=True)

    def count(self, d: int) -> int:
        return max(1, math.ceil(self.keep * d - 1e-9))


class TopK(Sparse):
    """The numbers that are largest in absolute value, and their places."""

    called = "top_k"

    def shapes(self, d: int) -> dict[str, tuple[tuple[int], str]]:
        return {"places": ((self.count(d),), "int32"), "values": ((self.count(d),), "float32")}

    def encode(self, row: Any, words: Any) -> dict[str, Any]:
        places = _largest(row, self.count(row.shape[0]))
        return {"places": places, "values": row[places]}

    def decode(self, sent: dict[str, Any], words: Any, d: int, whole: bool) -> Any:
        return _placed(sent["values"], sent["places"], d)

    def fault(self, sent: dict[str, Any], d: int, most: float) -> str:
        places = sent["places"]
        fits = np.all((places >= 0) & (places < d)) and np.all(places[1:] > places[:-1])
        return "" if fits else f"the places are not in ascending order, each once, from 0 to {d - 1}"


class RandomK(Sparse):
    """Numbers at random places, which need not be sent."""

    called = "random_k"

    def shapes(self, d: int) -> dict[str, tuple[tuple[int], str]]:
        expected = f"should be another codec: random_k is for models of fewer than {MOST_PLACES} parameters"
        check("compress_up", f"random_k, {d} parameters", d < MOST_PLACES, expected)
        return {"values": ((self.count(d),), "float32")}

    def encode(self, row: Any, words: Any) -> dict[str, Any]:
        return {"values": row[self._places(words, row.shape[0])]}

    def decode(self, sent: dict[str, Any], words: Any, d: int, whole: bool) -> Any:
        """The values at their places, times d / k unless `whole`: then they are right on average."""
        values = sent["values"]
        if not whole:
            values = values * namespace(values).float32(d / self.count(d))
        return _placed(values, self._places(words, d), d)

    def _places(self, words: Any, d: int) -> Any:
        return shuffled(_own(words), 0, namespace(words).arange(self.count(d)), d)


UP = Slot(
    "compress_up",
    Codec,
    (Int8, Int4, TopK, RandomK, Sign),
    "the codec of updates, and of gradients sent with them; by default none",
)
DOWN = Slot("compress_down", Codec, (Int8, Int4), "the codec of the model; by default none")


class Compression(NamedTuple):
    """The codecs of an algorithm, and whether both sides have error feedback."""

    up: Codec | None = None
    down: Codec | None = None
    feedback: bool = False

    @property
    def remembers(self) -> bool:
        """Whether each device keeps what its codec left out."""
        return self.up is not None and self.feedback


def _own(words: Any) -> Any:
    return words ^ namespace(words).uint32(OWN)


def _largest(row: Any, k: int) -> Any:
    """The places of the k numbers that are largest in absolute value, in ascending order; of equals, the first."""
    xp = namespace(row)
    length = xp.where(xp.isfinite(row), xp.abs(row), xp.inf)  # so that what is not finite is not left out
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
