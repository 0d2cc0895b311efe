"""A device's codec: the model as it came, and the arrays of a reply as they go.

With error feedback, what the codec leaves out of an update stays on the device, in the state that Flower keeps for it
(`Context.state`), and is added to its next update. It is never sent. A device does not know whether a reply is used:
what it left out counts from the moment it answers. Within a run the round numbers only grow. So what was left out in
this round or a later one comes from another run, or from a round that is repeated, and is dropped.

This module imports only numpy and flwr, as `folb.flower.device` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from folb.core.codec import Codec
from folb.core.upload import DELTA, ENCODED
from folb.flower import protocol
from folb.flower.protocol import Arrays, Task

RESIDUAL, ROUND = "folb.residual", "folb.round"  # records of the device's state


def model(task: Task, record: ArrayRecord) -> Arrays:
    """The model of a message."""
    sent = protocol.unpacked(record)
    if not task.down:
        return sent
    return Codec(task.down).decoded(sent, np.array(task.key, np.uint32), protocol.like(task.shapes))


def encoded(task: Task, arrays: dict[str, Arrays], state: RecordDict) -> dict[str, Arrays]:
    """The arrays of a reply as they are sent. What is left out of the update goes to `state`."""
    if not task.codec:
        return arrays
    numbers, words = task.numbers_of("codec"), np.array(task.words, np.uint32)
    codec, found = Codec(task.codec, numbers["keep"]), dict(arrays)
    for name in (upload.name for upload in ENCODED if upload.name in arrays):
        full = arrays[name]
        feedback = name == DELTA.name and numbers["feedback"] > 0
        if feedback and (before := _left_out(task, state)) is not None:
            full = {key: value + before[key] for key, value in full.items()}
        found[name] = codec.encoded(full, words)
        if feedback:
            sent = codec.decoded(found[name], words, full, whole=True)
            state[RESIDUAL] = protocol.packed({key: value - sent[key] for key, value in full.items()})
            state[ROUND] = MetricRecord({protocol.ROUND: task.round})
    return found


def _left_out(task: Task, state: RecordDict) -> Arrays | None:
    """What the last update of this run left out."""
    known: Any = state.metric_records.get(ROUND)
    if known is None or known[protocol.ROUND] >= task.round:
        return None
    return protocol.unpacked(state.array_records[RESIDUAL])
