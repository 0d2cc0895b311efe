"""The accelerators that share the work of a round: those of this machine, and those of other processes.

Each holds all the data, computes the updates and gradients of an equal part of the round's slots, and evaluates an
equal part of the samples. Several processes all play the same rounds: process 0 decides where to resume and when a
chunk ends, and tells the others.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from folb.errors import InputError, check

T = TypeVar("T")

AXIS = "accelerators"
PATIENCE = 300  # seconds to wait for all processes
HEARTBEAT = 15  # seconds without a sign of life, after which a process counts as dead
REPLICATED, SPLIT = PartitionSpec(), PartitionSpec(AXIS)


def mesh(count: int | str = 1) -> Mesh | None:
    """The first `count` accelerators; "auto" means all of every process. None if there is only one."""
    available = jax.devices()
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    if count != "auto" and not (whole and 1 <= int(count) <= len(available)):
        raise InputError("accelerators", count, f"should be auto, or a number from 1 to the {len(available)} available")
    expected = f"should be auto, or all {len(available)} of the {jax.process_count()} processes"
    check("accelerators", count, jax.process_count() == 1 or count in ("auto", len(available)), expected)
    chosen = available if count == "auto" else available[: int(count)]
    return None if len(chosen) == 1 else Mesh(np.asarray(chosen), (AXIS,))


def join(
    coordinator: str,
    process: str,
    waiting: Callable[[str], object] = lambda text: None,
    late: Callable[[InputError], object] = lambda error: None,
) -> None:
    """Join this process to others: "0/2" is the first of two, and listens at `coordinator`, HOST:PORT.

    `waiting` is called with a text that says what this process waits for. `late` is called, in another thread, if the
    others do not come in time. Nothing can interrupt the wait, so `late` can only end the process, before the runtime
    aborts it.
    """
    host, _, port = coordinator.rpartition(":")
    fits = host and port.isdecimal() and port.isascii() and 0 < int(port) < 2**16
    check("coordinator", coordinator, fits, "should be HOST:PORT, where process 0 listens")
    number, _, count = process.partition("/")
    fits = process.isascii() and number.isdecimal() and count.isdecimal() and int(number) < int(count)
    check("process", process, fits, "should be NUMBER/COUNT, such as 0/2 and 1/2 for two processes")
    waiting(f"process {number} of {count} waits for the others at {coordinator}")
    expected = f"should be an address where {count} processes meet within {PATIENCE} s"
    patience = threading.Timer(PATIENCE, late, (InputError("coordinator", coordinator, expected),))
    patience.daemon = True
    patience.start()
    limits: dict[str, Any] = {"initialization_timeout": PATIENCE + 60, "heartbeat_timeout_seconds": HEARTBEAT}
    jax.distributed.initialize(coordinator, int(count), int(number), **limits)
    patience.cancel()


def check_alike(text: str) -> None:
    """Raise an `InputError` unless all processes have the same text, which is the identity of an experiment."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(digest))
    if not (everyone == digest).all():
        process = f"{jax.process_index()}/{jax.process_count()}"
        raise InputError("process", process, "should run the same experiment, on the same data, as the others")


def put(value: Any, mesh: Mesh | None) -> Array:
    """An array on every accelerator."""
    if mesh is None:
        return jax.device_put(value)  # jnp.asarray would hold another copy for a while
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, REPLICATED), lambda index: host[index])


def everywhere(values: T, mesh: Mesh | None) -> T:
    """The values of a compiled program, whole on each accelerator and so in each process."""
    return values if mesh is None else jax.lax.with_sharding_constraint(values, NamedSharding(mesh, REPLICATED))


def over_parts(f: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """f(data, *arrays), an equal part of the slots on each accelerator. Arrays and result have an entry per slot."""
    if mesh is None:
        return f

    specs: Any = {"in_specs": (REPLICATED, SPLIT), "out_specs": SPLIT}
    part: Any = jax.shard_map(lambda data, arrays: f(data, *arrays), mesh=mesh, **specs, check_vma=False)

    def whole(data: Any, *arrays: Any) -> Any:
        slots = len(jax.tree.leaves(arrays)[0])  # if they do not divide evenly, the last one is computed again
        index = jnp.minimum(jnp.arange(-(-slots // mesh.size) * mesh.size), slots - 1)
        result = part(data, jax.tree.map(lambda v: v[index], arrays))
        return jax.tree.map(lambda v: v[:slots], result)

    return whole


def sum_of_spans(span: Callable[..., Any], count: int, values: Any, mesh: Mesh | None) -> Any:
    """The sum of span(first, last, *values) over parts of range(count), one for each accelerator."""
    if mesh is None:
        return span(0, count, *values)

    def part(values: Any) -> Any:
        i = jax.lax.axis_index(AXIS)
        return jax.lax.psum(span(i * count // mesh.size, (i + 1) * count // mesh.size, *values), AXIS)

    return jax.shard_map(part, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)(values)


def leads() -> bool:
    """Whether this is the only process, or the first."""
    return jax.process_index() == 0


def shared(value: T) -> T:
    """The `value` that process 0 has."""
    if jax.process_count() == 1:
        return value
    on_host = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, Array) else leaf, value)
    packed = np.frombuffer(pickle.dumps(on_host), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int64(len(packed))))
    own = np.zeros(size, np.uint8)
    if leads():
        own[:] = packed
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes())
