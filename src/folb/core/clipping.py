"""What bounds a device's part of a private sum, in the simulator and, without jax, on a real device."""

from __future__ import annotations

from typing import Any

from folb.core.upload import Upload
from folb.core.vector import namespace, norm
from folb.typing import Params


def _within(delta: Params, *, clip: Any) -> Any:
    """1 if the update is no longer than `clip`, otherwise 0: what adaptive clipping counts."""
    length = norm(delta)
    xp = namespace(length)
    return xp.where(length <= clip, xp.float32(1), xp.float32(0))


def _square(delta: Params, *, clip: Any) -> Any:
    """The squared length of the clipped update, in squares of `clip`: from 0 to 1."""
    length = norm(delta)
    xp = namespace(length)
    return xp.minimum(length / clip, xp.float32(1)) ** 2


# a device may add noise of its own, so these can be any number
WITHIN = Upload("within", _within, {"clip": 1.0})
SQUARE = Upload("square", _square, {"clip": 1.0})
BOUNDED = {one.name: one for one in (WITHIN, SQUARE)}
