"""What a device sends: clipped and with its share of the noise in a private run, and through the codec.

With error feedback, what the codec leaves out of an update stays on the device, in the state that Flower keeps for it
(`Context.state`), and is added to its next update. It is never sent. A device does not know whether a reply is used:
what it left out counts from the moment it answers. Within a run the round numbers only grow. So what was left out in
this round or a later one comes from another run, or from a round that is repeated, and is dropped.

This module imports only numpy and flwr, as `folb.flower.device` does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from folb.core import gaussian
from folb.core.codec import DOWN, UP
from folb.core.upload import BOUNDED, DELTA, ENCODED
from folb.core.vector import each
from folb.flower import protocol
from folb.flower.local_work import plus
from folb.flower.protocol import Arrays, Task
from folb.flower.replies import length

RESIDUAL, ROUND = "folb.residual", "folb.round"  # records of the device's state


def model(task: Task, record: ArrayRecord) -> Arrays:
    sent = protocol.unpacked(record)
    if not task.down:
        return sent
    return DOWN.changed(None, {"": task.down}).decoded(sent, np.array(task.key, np.uint32), protocol.like(task.shapes))


def encoded(task: Task, arrays: dict[str, Arrays], state: RecordDict) -> dict[str, Arrays]:
    """The arrays of a reply as they are sent. What is left out of the update goes to `state`."""
    if not task.codec:
        return arrays
    given, words = task.numbers_of("codec"), np.array(task.words, np.uint32)
    feeds_back = given.pop("feedback") > 0
    codec, sent_arrays = UP.changed(None, {"": task.codec, **given}), dict(arrays)
    for name in (upload.name for upload in ENCODED if upload.name in arrays):
        full = arrays[name]
        feedback = name == DELTA.name and feeds_back
        before: Any = state.metric_records.get(ROUND)  # of this run only if it is earlier
        if feedback and before is not None and before[protocol.ROUND] < task.round:
            full = plus(full, protocol.unpacked(state.array_records[RESIDUAL]))
        sent_arrays[name] = codec.encoded(full, words)
        if feedback:
            sent = codec.decoded(sent_arrays[name], words, full, whole=True)
            state[RESIDUAL] = protocol.packed({key: value - sent[key] for key, value in full.items()})
            state[ROUND] = MetricRecord({protocol.ROUND: task.round})
    return sent_arrays


def private(task: Task, arrays: dict[str, Arrays], numbers: dict[str, Any]) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """The answer to a task as a private run sends it."""
    given = task.numbers_of("privacy")
    if "clip" not in given or DELTA.name not in arrays:
        return arrays, numbers
    sent: dict[str, Any] = {DELTA.name: clipped(arrays[DELTA.name], given["clip"])}
    sent |= {name: np.float32(numbers[name]) for name in BOUNDED if name in numbers}
    if DELTA.name in given:  # the standard deviation of its share
        noise = gaussian.like(sent, (*task.words, task.round) if given["replay"] else None)
        for name, value in sent.items():
            deviation = np.float32(given[name])
            sent[name] = each(lambda part, normal, d=deviation: part + d * normal, value, noise[name])
    delta = sent.pop(DELTA.name)
    return {**arrays, DELTA.name: delta}, numbers | {name: float(value) for name, value in sent.items()}


def clipped(delta: Arrays, clip: float) -> Arrays:
    """An update shortened to the norm `clip`; one that is not finite is 0."""
    norm = length(delta)
    if not math.isfinite(norm):
        return {name: np.zeros_like(part) for name, part in delta.items()}
    factor = np.float32(min(1.0, clip / norm) if norm > 0 else 1.0)
    return {name: part * factor for name, part in delta.items()}
