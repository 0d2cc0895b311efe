"""The checks of a reply before it touches the model. A reply that fails is rejected, alone, with its reason.

Nothing in a reply is trusted: not the claimed shape of an array, nor its bytes, nor that it answers the question.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from folb.core.codec import Codec
from folb.core.upload import LARGEST
from folb.core.vector import size
from folb.flower import protocol
from folb.flower.protocol import Arrays
from folb.typing import NDArray

MOST_SAMPLES = 2**24  # of one device: the shuffle cannot handle more
LONGEST = 160  # characters of a device's text in a log
HEADER = 10_000  # the most bytes before the numbers in NumPy's format


class Refused(Exception):  # noqa: N818  not an error of the program or its user
    """Why a reply is not used."""


class Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: str = "float32"


class Encoded(NamedTuple):
    """How the server decodes an upload: the codec, the device's random words, and arrays of the decoded shapes."""

    codec: Codec
    words: NDArray
    like: Arrays
    whole: bool  # as in `Codec.decoded`


class Form(NamedTuple):
    """What an upload must be: arrays of these shapes, by name, or None for a single number."""

    shapes: Mapping[str, Shape] | None
    least: float = -LARGEST
    most: float = LARGEST
    encoded: Encoded | None = None  # if it goes through a codec


class Expected(NamedTuple):
    round: int
    uploads: Mapping[str, Form]  # by name
    size: int  # the samples it declared
    node: int


class Reply(NamedTuple):
    """What a device sent, checked: arrays by upload and name, and numbers."""

    arrays: dict[str, Arrays]
    numbers: dict[str, float]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Whatever a reply contains, it affects only its device: any error becomes `Refused`."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(one_line(f"it cannot be read: {type(error).__name__}: {error}")) from error


@alone()
def checked(message: Message, expected: Expected) -> Reply:
    """The content of a reply, or `Refused`."""
    if message.metadata.src_node_id != expected.node:
        raise Refused(f"it is from node {message.metadata.src_node_id}, and {expected.node} was asked")
    content = message.content
    forms = {name: form for name, form in expected.uploads.items() if form.shapes is not None}
    _same("records", list(content), [*forms, protocol.METRICS])
    record = content[protocol.METRICS]
    if not isinstance(record, MetricRecord):
        raise Refused(f"{protocol.METRICS} is of type {type(record).__name__}")
    single = {name: form for name, form in expected.uploads.items() if form.shapes is None}
    _same(protocol.METRICS, list(record), [protocol.ROUND, protocol.SIZE, *single])
    for name, value in ((protocol.ROUND, expected.round), (protocol.SIZE, expected.size)):
        if type(record[name]) is not int or record[name] != value:
            raise Refused(f"{name} is {shown(record[name])}, and should be {value}")
    numbers = {name: number(name, record[name], form) for name, form in single.items()}
    return Reply({name: _arrays(name, content[name], form) for name, form in forms.items()}, numbers)


def _same(what: str, got: list[Any], wanted: list[str]) -> None:
    if sorted(map(str, got)) != sorted(wanted):
        raise Refused(f"{what} are {shown(sorted(map(str, got)))}, and should be {shown(sorted(wanted))}")


def number(name: str, value: Any, form: Form) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not form.least <= value <= form.most:
        raise Refused(f"{name} is {shown(value)}, and should be a number from {form.least:g} to {form.most:g}")
    return float(value)


def _arrays(upload: str, record: Any, form: Form) -> Arrays:
    shapes = form.shapes or {}
    if not isinstance(record, ArrayRecord):
        raise Refused(f"{upload} is of type {type(record).__name__}")
    _same(upload, list(record), list(shapes))
    arrays = {name: _array(f"{upload}: {name}", record[name], *shape) for name, shape in shapes.items()}
    if (how := form.encoded) is not None:  # what is allocated follows from the model alone
        if fault := how.codec.fault(arrays, size(how.like), LARGEST):
            raise Refused(f"{upload}: {fault}")
        arrays = how.codec.decoded(arrays, how.words, how.like, how.whole)
    norm = length(arrays)
    if not norm <= form.most:
        raise Refused(f"{upload} has the norm {norm:.3g}, and should have at most {form.most:g}")
    return arrays


def length(arrays: Arrays) -> float:
    """The norm of an upload, in 64 bits: there the squares of 32-bit numbers cannot overflow."""
    return math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in arrays.values()))


def _array(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> NDArray:
    """The numbers of an array. The format's own header is checked before anything is allocated."""
    if array.stype != "numpy.ndarray" or array.dtype != dtype or tuple(array.shape) != shape:
        got = f"{array.dtype} {tuple(array.shape)} of {array.stype}"
        raise Refused(f"{name} is {shown(got)}, and should be {dtype} {shape} of numpy.ndarray")
    room = np.dtype(dtype).itemsize * math.prod(shape)
    if not room < len(array.data) <= room + HEADER:
        raise Refused(f"{name} has {len(array.data)} bytes, and {room} and a header were expected")
    stream = io.BytesIO(array.data)
    major, minor = np.lib.format.read_magic(stream)
    if (major, minor) not in ((1, 0), (2, 0)):
        raise Refused(f"{name} is in version {(major, minor)} of NumPy's format")
    actual, fortran, kind = getattr(np.lib.format, f"read_array_header_{major}_{minor}")(stream)
    if actual != shape or kind != np.dtype(dtype):
        raise Refused(f"{name} holds {kind} {shown(actual)}, and should hold {dtype} {shape}")
    numbers = np.frombuffer(array.data, dtype, offset=stream.tell())
    if numbers.size != math.prod(shape):
        raise Refused(f"{name} holds {numbers.size} numbers, and should hold {math.prod(shape)}")
    if not np.isfinite(numbers).all():
        raise Refused(f"{name} is not finite")
    return numbers.reshape(shape, order="F" if fortran else "C")


def one_line(text: object) -> str:
    """Foreign text made fit for a log: one line of bounded length."""
    return shown(" ".join(str(text).split()))


def last_words(text: object) -> str:
    """The text of an error. Of a long text only the last line, which in a traceback names the error."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(text)).replace("\\n", "\n")
    if len(plain) <= LONGEST:
        return one_line(plain)
    lines = [line.strip(" \t\r'\"<>") for line in plain.splitlines()]
    return one_line(next((line for line in reversed(lines) if line), plain))


def shown(value: object) -> str:
    """A foreign value made fit for a log."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
