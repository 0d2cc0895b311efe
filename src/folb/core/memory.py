"""What the server remembers about each device.

Devices keep nothing of it. The server gathers the memory of a round's devices, sends each of them a linear
term computed from it, h_k(w) + <shift_k, w>, and updates the memory when the round closes. If a reply is lost or
rejected, the memory of its device does not change.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.part import Part, check_part
from folb.core.rules import Round
from folb.core.tree import over, pair
from folb.errors import check_number
from folb.typing import Params


class Sent(NamedTuple):
    """What a shift may be computed from, besides the memory."""

    params: Params  # the server's model
    steps: Any  # the device's local steps
    lr: Any
    N: Any


class DeviceMemory(Part):
    """A memory of devices: how it starts, how a round changes it, and what a device is sent.

    One of your own is a class of this base with `init` and `update`.
    """

    needed = ("init", "update")
    uploads: ClassVar[Any] = ()  # what `update` needs of the devices
    one_size: ClassVar[Any] = False  # whether it divides by the size of a local step
    pace: ClassVar[Any] = 1.0  # a device's steps are so many times as long
    prox: ClassVar[Any] = 0.0  # a device's proximal weight is larger by this
    sampling: Any = field(default=None, kw_only=True)  # what a sampling remembers besides; then all memory is a pair

    def init(self, params: Params) -> tuple[Any, Any]:
        """(shared, own): the server's part, and the part of a device that was not met before."""
        raise NotImplementedError

    def update(self, round: Round) -> tuple[Any, Any]:
        """(shared, own): both after the round.

        `round.own` and the result are stacked over the slots. Slots without a usable reply (`round.times` is 0) keep
        their memory, whatever the result says. A round that does not change the model (no usable reply, or all weights
        0) changes no memory.
        """
        raise NotImplementedError

    def shift(self, shared: Any, own: Any, sent: Sent) -> Params:
        """A tree of the model's shape, for one device, if it is sent one."""

    def begin(self, shared: Any, own: Any, sent: Sent) -> tuple[Params, ...]:
        """Trees of the model's shape, for one device: what its local step starts from, if it has this method."""
        raise NotImplementedError

    def correct(self, round: Round) -> Params:
        """The server's step in place of the rule's, which is round.update.delta, if it changes that."""

    def algorithms(self, remembered: Any) -> Any:
        """Of what is remembered, shared or own, the algorithm's part."""
        return remembered if self.sampling is None else remembered[0]

    def samplings(self, remembered: Any) -> Any:
        """Of what is remembered, shared or own, what the sampling sees: its own part, if it has one."""
        return remembered if self.sampling is None else remembered[1]

    def seen(self, round: Round) -> Round:
        """The round as the rule, the server step and this memory see it: without the sampling's part."""
        return round._replace(shared=self.algorithms(round.shared), own=self.algorithms(round.own))


class Nothing(DeviceMemory):
    """The memory of an algorithm that has none, beside that of its sampling."""

    def init(self, params: Params) -> tuple[Any, Any]:
        return (), ()

    def update(self, round: Round) -> tuple[Any, Any]:
        return round.shared, round.own


def device_memory(wanted: DeviceMemory | None, sampling: DeviceMemory | None = None) -> DeviceMemory | None:
    """The memory of an algorithm and of its sampling, checked."""
    for one in [one for one in (wanted, sampling) if one is not None]:
        check_part("memory", one, DeviceMemory)
        for name in ("pace", "prox"):
            check_number(f"memory: {name}", getattr(one, name), lambda number: number >= 0, "should be at least 0")
    return wanted if sampling is None else replace(Nothing() if wanted is None else wanted, sampling=sampling)


def started(memory: DeviceMemory | None, params: Params) -> tuple[Any, Any]:
    """The server's part, and the part of a device that was not met before."""
    if memory is None:
        return (), ()
    first = pair("memory: what init(params) returns", memory.init(params))
    if memory.sampling is None:
        return first
    return tuple(zip(first, started(memory.sampling, params), strict=True))  # type: ignore[return-value]


def updated(memory: DeviceMemory | None, round: Round) -> tuple[Any, Any]:
    """Both parts after a round. `round` has all of the memory."""
    if memory is None:
        return (), ()
    following = pair("memory: what update(round) returns", memory.update(memory.seen(round)))
    if memory.sampling is None:
        return following
    other = round._replace(shared=memory.samplings(round.shared), own=memory.samplings(round.own))
    return tuple(zip(following, updated(memory.sampling, other), strict=True))  # type: ignore[return-value]


class Rows(NamedTuple):
    """The memory of all devices: a row for each device or, if there are many, for each device that was met."""

    rows: Any
    place: Array | None = None  # in the second case: the row of each device, or -1 if it was not met
    met: Any = None  # how many rows are in use
    first: Any = None  # the memory of a device that was not met


def empty(own: Any, N: int, most: int) -> Rows:
    """Rows for N devices, if at most `most` of them will be met; `own` is the memory of a device not met yet."""
    count = min(N, most)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), own)
    return Rows(rows) if count == N else Rows(rows, jnp.full(N, -1, jnp.int32), jnp.int32(0), own)


def gathered(memory: Rows | tuple[Rows, ...], device: Array) -> Any:
    """The memory of some devices, stacked; of several memories, a tuple."""
    if not isinstance(memory, Rows):
        return tuple(gathered(one, device) for one in memory)
    if memory.place is None:
        return jax.tree.map(lambda rows: rows[device], memory.rows)
    place = memory.place[device]
    known = jax.tree.map(lambda rows: rows[jnp.maximum(place, 0)], memory.rows)
    return jax.tree.map(lambda row, first: jnp.where(over(place >= 0, row), row, first), known, memory.first)


def scattered(memory: Any, device: Array, changed: Array, values: Any) -> Any:
    """The memory with new values for the devices that `changed`; each occurs once."""
    if not isinstance(memory, Rows):
        return tuple(scattered(one, device, changed, new) for one, new in zip(memory, values, strict=True))
    nowhere = 2**31 - 1  # out of bounds: not written
    place, whose = device, jnp.where(changed, device, nowhere)
    if memory.place is not None:
        known = memory.place[device]
        new = changed & (known < 0)
        place = jnp.where(new, memory.met + jnp.cumsum(new) - 1, known).astype(jnp.int32)
        places = memory.place.at[whose].set(place, mode="drop")
        memory = memory._replace(place=places, met=memory.met + jnp.sum(new))
    to = jnp.where(changed, place, nowhere)
    return memory._replace(rows=jax.tree.map(lambda rows, new: rows.at[to].set(new, mode="drop"), memory.rows, values))
