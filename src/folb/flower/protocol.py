"""What travels between the server and a device: a task, and what it asks for.

A task says all that a device needs, its random words too, so devices keep no state between messages and draw the very
batches that the simulator draws. Models are flat: named arrays of float32, `first.weight` for a nested tree's leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

NDArray = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, NDArray]

# records of a message to a device
MODEL, TASK, MEAN = "arrays", "task", "mean"
# records of its reply; the arrays are named for what they are
DELTA, GRAD, WEIGHTED, METRICS = "delta", "grad", "weighted", "metrics"
# entries of METRICS
ROUND, SIZE, IDENTITY, GAMMA, NORM, IMPORTANCE = "round", "num-examples", "identity", "gamma", "norm", "importance"

RECORDS = (DELTA, GRAD, WEIGHTED)  # uploads that are the size of the model; the others are numbers


@dataclass(frozen=True)
class Task:
    """What a device is asked in a round. `uploads` names what it is to send back."""

    round: int
    uploads: tuple[str, ...]
    work: int = 0  # units
    words: tuple[int, int] = (0, 0)  # of (seed, round, device)
    lr: float = 0.0
    mu: float = 0.0
    batch: int = 1
    unit: str = "step"
    clamp_gamma: bool = True
    # where only sums are to be learnt, the device does what the server would have done with its reply
    scale: float = 1.0  # of the gradient
    times: float = 1.0  # in the multiset
    psi: float = 0.0
    never_flip: bool = False

    def record(self) -> ConfigRecord:
        """The task as it travels."""
        fields = asdict(self)
        return ConfigRecord(fields | {"uploads": list(self.uploads), "words": [int(word) for word in self.words]})


def task(record: Mapping[str, Any]) -> Task:
    """The task that travelled."""
    fields = dict(record)
    return Task(**fields | {"uploads": tuple(fields["uploads"]), "words": tuple(fields["words"])})


def arrays(params: Any) -> ArrayRecord:
    """A model for `initial_arrays`: a dict of arrays, nested or not, a list of them, or a PyTorch module."""
    if hasattr(params, "named_parameters"):
        params = dict(params.named_parameters())
    if isinstance(params, list | tuple):
        params = {str(i): value for i, value in enumerate(params)}
    return packed(flat(params))


def flat(params: Mapping[str, Any], above: str = "") -> Arrays:
    """A nested dict's leaves under dotted names."""
    found: Arrays = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return found


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """The dict that `flat` made flat."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        *above, last = name.split(".")
        inner = found
        for step in above:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return found


def packed(named: Mapping[str, NDArray]) -> ArrayRecord:
    """Named arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in named.items()})


def unpacked(record: ArrayRecord) -> Arrays:
    """A record as named arrays."""
    return {name: value.numpy() for name, value in record.items()}


def nbytes(content: RecordDict) -> int:
    """The bytes of all arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
