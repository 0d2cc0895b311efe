"""What a device sends besides its update: named quantities, each a function of what the device has.

The function's arguments name what it needs (KNOWN), and only that is computed. Its keyword-only arguments are numbers,
which can be swept, or whole numbers that fix the shape. It returns a number, an array, a dict of arrays, or a tree of
the model's shape, in float32 or, if it was packed, in bytes (uint8). A function that is written with `folb.core.vector`
runs both in the simulator and on a real device. The server checks the shapes, and that numbers are in their bounds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from folb.core.sketch import BITS, MOST, packed, sketched
from folb.core.vector import each, namespace, norm
from folb.errors import InputError, check, check_whole, choose
from folb.typing import Params

LARGEST = 1e15  # norm of an upload: the product of two larger ones overflows 32 bits

KNOWN = {
    "params": "w^t, the model that the device was sent",
    "delta": "its update w_k - w^t",
    "grad": "grad F_k(w^t)",
    "after": "grad F_k(w_k)",
    "loss": "F_k(w^t)",
    "momentum": "the mean of gradients that its local step ends with",
    "mu": "the weight of the proximal term",
    "key": "two random words that all devices of the round share",
    "mean": "the estimate (10) of grad f, which a two-phase server sends with the model",
}
BEFORE_WORK = ("params", "grad", "loss", "mu", "key")  # all that a survey can ask for


@dataclass(frozen=True)
class Upload:
    """A named quantity: how it is computed, and what it may be."""

    name: str
    compute: Callable[..., Any]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    least: float = -LARGEST  # of a single number
    most: float = LARGEST  # of a single number, or of the norm of arrays
    sizes: tuple[tuple[str, int], ...] = ()  # whole numbers that fix the shape, by name

    @property
    def needs(self) -> tuple[str, ...]:
        """The names in KNOWN that it is computed from."""
        parameters = inspect.signature(self.compute).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    def __call__(self, known: Any) -> Any:
        """The quantity, computed from known[name] of each name that it needs."""
        return self.compute(*(known[name] for name in self.needs), **self.numbers, **dict(self.sizes))


def inexactness(delta: Params, grad: Params, after: Params, mu: Any) -> Any:
    """gamma_k = ||grad h_k(w_k, w^t)|| / ||grad h_k(w^t, w^t)|| of Assumption 4 and Sec. V; 0 at a stationary point."""
    before = norm(grad)
    left = norm(each(lambda g, d: g + mu * d, after, delta))
    xp = namespace(before)
    return xp.where(before > 0, left / xp.where(before > 0, before, 1.0), 0.0)


def _gamma(delta: Params, grad: Params, after: Params, mu: Any, *, most: Any) -> Any:
    """SGD may end with a larger gradient than it began with. The paper has gamma_k in [0, 1]: then `most` is 1."""
    gamma = inexactness(delta, grad, after, mu)
    return namespace(gamma).minimum(gamma, most)


def _within(delta: Params, *, clip: Any) -> Any:
    """1 if the update is no longer than `clip`, otherwise 0: what adaptive clipping counts."""
    length = norm(delta)
    return namespace(length).float32(length <= clip)


def _square(delta: Params, *, clip: Any) -> Any:
    """The squared length of the clipped update, in squares of `clip`: from 0 to 1."""
    length = norm(delta)
    xp = namespace(length)
    return xp.minimum(length / clip, xp.float32(1)) ** 2


def _sketch(grad: Params, key: Any, *, m: int, bits: int) -> Any:
    return packed(sketched(grad, key, m), bits)


def sketch(m: int = 256, bits: int = 32) -> Upload:
    """A sketch of the gradient: m numbers of so many bits."""
    check_whole("sketch", m, 1, MOST)
    check("bits", bits, bits in BITS, f"should be one of {', '.join(map(str, BITS))}")
    return Upload("sketch", _sketch, sizes=(("m", int(m)), ("bits", int(bits))))


DELTA = Upload("delta", lambda delta: delta)  # every device of S_1 sends it
GRAD = Upload("grad", lambda grad: grad)
GAMMA = Upload("gamma", _gamma, {"most": 1.0}, least=0.0, most=1.0)
UNCLAMPED_GAMMA = replace(GAMMA, numbers={"most": math.inf}, most=LARGEST)
NORM = Upload("norm", lambda grad: norm(grad), least=0.0)
LOSS = Upload("loss", lambda loss: loss)
MOMENTUM = Upload("last_momentum", lambda momentum: momentum)
# what bounds a device's part of a private sum; a device may add noise of its own, so these can be any number
WITHIN = Upload("within", _within, {"clip": 1.0})
SQUARE = Upload("square", _square, {"clip": 1.0})
BOUNDED = {one.name: one for one in (WITHIN, SQUARE)}
ENCODED = (DELTA, GRAD, MOMENTUM)  # what goes through the codec of an algorithm: the uploads of the model's shape

# names that mean something else: in `compose`, in a message, or where a device computes its own weight
TAKEN = (
    *(DELTA.name, "second", "step", "arrays", "task", "shift", "mean", "metrics", "round", "identity", "codec"),
    *("scaled_grad", "weighted", "importance", "hetero_weighted", "hetero_importance"),
    *("privacy", "within", "square"),
)

UPLOADS = {upload.name: upload for upload in (GRAD, GAMMA, NORM, LOSS, MOMENTUM, sketch())}


def upload(wanted: str | Upload) -> Upload:
    """An upload by its name, or your own, checked."""
    if not isinstance(wanted, Upload):
        return UPLOADS[choose("uploads", wanted, UPLOADS)]
    own = wanted not in UPLOADS.values() and wanted is not UNCLAMPED_GAMMA and wanted.compute is not _sketch
    taken = (*UPLOADS, *TAKEN)
    if own and (wanted.name in taken or not (isinstance(wanted.name, str) and wanted.name.isidentifier())):
        raise InputError("uploads", wanted.name, f"should be a word, but not one of {', '.join(taken)}")
    bounds = (wanted.least, wanted.most)
    if not all(isinstance(bound, int | float) for bound in bounds) or not wanted.least < wanted.most:
        raise InputError(f"upload {wanted.name}: least, most", bounds, "should be numbers, the first the smaller")
    for need in wanted.needs:
        choose(f"what the upload {wanted.name} needs", need, KNOWN)
    return wanted
