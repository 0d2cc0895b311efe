"""A device's part of a private run: it clips its update, and adds its share of the noise where asked.

This module imports only numpy and flwr, as `folb.flower.device` does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from folb.core import gaussian
from folb.core.clipping import BOUNDED
from folb.core.upload import DELTA
from folb.core.vector import each
from folb.flower.protocol import Arrays, Task


def private(task: Task, arrays: dict[str, Arrays], numbers: dict[str, Any]) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """The answer to a task as a private run sends it."""
    given = task.numbers_of("privacy")
    if "clip" not in given or DELTA.name not in arrays:
        return arrays, numbers
    sent: dict[str, Any] = {DELTA.name: clipped(arrays[DELTA.name], given["clip"])}
    sent |= {name: np.float32(numbers[name]) for name in BOUNDED if name in numbers}
    if DELTA.name in given:  # the standard deviation of its share
        luck = gaussian.like(sent, (*task.words, task.round) if given["replay"] else None)
        sent = {name: _plus(value, luck[name], np.float32(given[name])) for name, value in sent.items()}
    delta = sent.pop(DELTA.name)
    return {**arrays, DELTA.name: delta}, numbers | {name: float(value) for name, value in sent.items()}


def _plus(value: Any, noise: Any, deviation: Any) -> Any:
    return each(lambda part, luck: part + deviation * luck, value, noise)


def clipped(delta: Arrays, clip: float) -> Arrays:
    """An update shortened to the norm `clip`; one that is not finite is 0."""
    length = math.sqrt(sum(float(np.sum(np.square(part, dtype=np.float64))) for part in delta.values()))
    if not math.isfinite(length):
        return {name: np.zeros_like(part) for name, part in delta.items()}
    factor = np.float32(min(1.0, clip / length) if length > 0 else 1.0)
    return {name: part * factor for name, part in delta.items()}
