"""What the server remembers of devices, by their identity.

Devices keep nothing from one round to the next. The server gathers the memory of a round's devices, sends them what
follows from it as a linear term, h_k(w) + <shift_k, w>, and updates it when the round closes. A device whose reply was
lost or refused keeps the memory that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core.rules import Round
from folb.errors import InputError
from folb.typing import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceMemory:
    """A memory of devices: what it starts as, how a round changes it, and what of it a device is sent.

    init(params) -> (shared, own): the server's part, and that of a device which was not met before.
    update(round) -> (shared, own): both after the round. `round.own` is stacked over the slots, and so is the answer;
    slots without a usable reply (`round.times` is 0) are left as they were, whatever is answered for them.
    shift(shared, own) -> a tree of the model's shape, for one device; None sends nothing.
    """

    init: Callable[[Params], tuple[Any, Any]]
    update: Callable[[Round], tuple[Any, Any]]
    shift: Callable[[Any, Any], Params] | None = None


def device_memory(wanted: DeviceMemory | None) -> DeviceMemory | None:
    """The memory with functions that compile, checked."""
    if wanted is None:
        return None
    if not isinstance(wanted, DeviceMemory):
        raise InputError("memory", wanted, "should be a DeviceMemory(init, update, shift)")

    def compiled(f: Any) -> Any:
        return f if f is None or isinstance(f, Partial) else Partial(f)

    return DeviceMemory(compiled(wanted.init), compiled(wanted.update), compiled(wanted.shift))


class Rows(NamedTuple):
    """The memory of all devices, as rows: one for each device, or for many devices one for each that was met.

    `place` [N] is then the row of each device, and -1 for one that was not met, whose memory is `first`; `met` counts
    the rows in use.
    """

    rows: Any
    place: Array | None = None
    met: Array | None = None
    first: Any = None


def empty(own: Any, N: int, most: int) -> Rows:
    """Rows for N devices, of which at most `most` will be met; `own` is the memory of one that was not."""
    count = min(N, most)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), own)
    if count == N:
        return Rows(rows)
    return Rows(rows, jnp.full(N, -1, jnp.int32), jnp.int32(0), own)


def gathered(memory: Rows, device: Array) -> Any:
    """The memory of some devices, stacked."""
    if memory.place is None:
        return jax.tree.map(lambda rows: rows[device], memory.rows)
    place = memory.place[device]

    def known(rows: Array, first: Any) -> Array:
        met = (place >= 0).reshape((-1,) + (1,) * (rows.ndim - 1))
        return jnp.where(met, rows[jnp.maximum(place, 0)], first)

    return jax.tree.map(known, memory.rows, memory.first)


def scattered(memory: Rows, device: Array, changed: Array, values: Any) -> Rows:
    """The memory with new values for those of `device` that `changed`, each of them once."""
    nowhere = 2**31 - 1  # out of bounds: not written
    if memory.place is None or memory.met is None:
        to = jnp.where(changed, device, nowhere)
        return Rows(jax.tree.map(lambda rows, new: rows.at[to].set(new, mode="drop"), memory.rows, values))
    known = memory.place[device]
    new = changed & (known < 0)
    place = jnp.where(new, memory.met + jnp.cumsum(new) - 1, known).astype(jnp.int32)
    to = jnp.where(changed, place, nowhere)
    rows = jax.tree.map(lambda rows, new: rows.at[to].set(new, mode="drop"), memory.rows, values)
    places = memory.place.at[jnp.where(changed, device, nowhere)].set(place, mode="drop")
    return Rows(rows, places, memory.met + jnp.sum(new), memory.first)
