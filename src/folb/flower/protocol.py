"""The messages between the server and a device: a task, and its answer.

A task has all that a device needs, including its random words. So devices draw the same batches as the simulator, and
keep no state between messages, except what a codec with error feedback leaves out (`folb.flower.sent`). Models are
flat: named arrays of float32, `first.weight` for a nested tree's leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from folb.errors import check
from folb.typing import NDArray

Arrays = dict[str, NDArray]

MODEL, TASK, SHIFT, MEAN, BEGIN = "arrays", "task", "shift", "mean", "begin"  # records of a message to a device
METRICS = "metrics"  # the record of numbers in its reply, which has each upload of arrays under its own name
ROUND, SIZE, IDENTITY = "round", "num-examples", "identity"  # entries of METRICS, besides the uploads of numbers
VALUE = ""  # the array's name in an upload of one array; no array of a model has this name


@dataclass(frozen=True)
class Task:
    """What a device is asked in a round. `uploads` names the values that it sends back."""

    round: int
    uploads: tuple[str, ...]
    work: int = 0  # units
    words: tuple[int, int] = (0, 0)  # drawn from (seed, round, device)
    key: tuple[int, int] = (0, 0)  # drawn from (seed, round): the same for all devices
    lr: float = 0.0
    mu: float = 0.0
    batch: int = 1
    unit: str = "step"
    step: str = "sgd"  # the local step
    numbers: Mapping[str, float] = field(default_factory=dict)  # `step.beta`, `gamma.most`, `codec.keep`
    codec: str = ""  # of the update and the gradient
    down: str = ""  # of the model
    shapes: tuple[str, ...] = ()  # of the model's arrays, if it has a codec: "60,10 weight"
    fixed: str = "{}"  # the settings of the local step that are no numbers, as JSON

    def record(self) -> ConfigRecord:
        given = vars(self) | {"names": tuple(self.numbers), "values": tuple(map(float, self.numbers.values()))}
        del given["numbers"]
        return ConfigRecord({name: list(v) if isinstance(v, tuple) else v for name, v in given.items()})

    def numbers_of(self, part: str) -> dict[str, float]:
        prefix = f"{part}."
        return {name.removeprefix(prefix): v for name, v in self.numbers.items() if name.startswith(prefix)}


def task(record: Mapping[str, Any]) -> Task:
    """The inverse of `Task.record`."""
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
    numbers = dict(zip(given.pop("names"), given.pop("values"), strict=True))
    return Task(**given, numbers=numbers)


def shapes(params: Arrays) -> tuple[str, ...]:
    return tuple(f"{','.join(map(str, value.shape))} {name}" for name, value in params.items())


def like(shapes: Sequence[str]) -> Arrays:
    """Arrays of these shapes, and without content: the inverse of `shapes`."""
    pairs = (text.split(" ", 1) for text in shapes)
    return {name: np.broadcast_to(np.float32(0), [int(n) for n in shape.split(",") if n]) for shape, name in pairs}


def arrays(params: Any) -> ArrayRecord:
    """A model for `initial_arrays`: a dict of arrays, nested or not, a list of them, or a PyTorch module."""
    if hasattr(params, "named_parameters"):
        params = dict(params.named_parameters())
    if isinstance(params, list | tuple):
        params = {str(i): value for i, value in enumerate(params)}
    expected = "needs arrays by name: a dict, a list or a torch module"
    check("initial_arrays", params, isinstance(params, Mapping), expected)
    return packed(flat(params))


def flat(params: Mapping[str, Any], above: str = "") -> Arrays:
    """The leaves of a nested dict, with dotted names."""
    leaves: Arrays = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{above}{name}.")
        else:
            leaves[f"{above}{name}"] = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return leaves


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict again: the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *above, last = name.split(".")
        reduce(lambda inner, step: inner.setdefault(step, {}), above, tree)[last] = value
    return tree


def packed(named: Mapping[str, NDArray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value, order="C")) for name, value in named.items()})


def unpacked(record: ArrayRecord) -> Arrays:
    return {name: value.numpy() for name, value in record.items()}


def joined(models: Sequence[Arrays]) -> Arrays:
    """Some models as one, with their numbers in front of the names."""
    return {f"{i}.{name}": value for i, model in enumerate(models) for name, value in model.items()}


def parted(arrays: Arrays, names: Sequence[str]) -> tuple[Arrays, ...]:
    """The inverse of `joined`, for models of these arrays."""
    return tuple({name: arrays[f"{i}.{name}"] for name in names} for i in range(len(arrays) // len(names)))


def nbytes(content: RecordDict) -> int:
    """The bytes of all arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
