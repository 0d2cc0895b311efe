"""What the server remembers about each device.

Devices keep nothing of it. The server gathers the memory of a round's devices, sends each of them a linear
term computed from it, h_k(w) + <shift_k, w>, and updates the memory when the round closes. If a reply is lost or
rejected, the memory of its device does not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.rules import Round
from folb.core.tree import compiled, pair
from folb.errors import InputError, check_number, choose
from folb.typing import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceMemory:
    """A memory of devices: how it starts, how a round changes it, and what a device is sent.

    init(params) -> (shared, own): the server's part, and the part of a device that was not met before.
    update(round) -> (shared, own): both after the round. `round.own` and the result are stacked over the slots. Slots
    without a usable reply (`round.times` is 0) keep their memory, whatever the result says. A round that does not
    change the model (no usable reply, or all weights 0) changes no memory.
    shift(shared, own) -> a tree of the model's shape, for one device; None sends nothing. It may have further
    arguments, by name: `params` (the server's model), `steps` (the device's local steps), `lr` and `N`.
    correct(round) -> the server's step, a tree, in place of the rule's, which is round.update.delta.
    A device's steps are `pace` times as long, and its proximal weight is larger by `prox`.
    """

    init: Callable[[Params], tuple[Any, Any]]
    update: Callable[[Round], tuple[Any, Any]]
    shift: Callable[..., Params] | None = None
    correct: Callable[[Round], Params] | None = None
    pace: Any = 1.0
    prox: Any = 0.0
    uploads: tuple[str, ...] = field(default=(), metadata={"static": True})  # what `update` needs of the devices
    one_size: bool = field(default=False, metadata={"static": True})  # whether it divides by the size of a local step
    sampling: DeviceMemory | None = None  # what a sampling remembers besides; then all memory is a pair

    def algorithms(self, remembered: Any) -> Any:
        """Of what is remembered, shared or own, the algorithm's part."""
        return remembered if self.sampling is None else remembered[0]

    def samplings(self, remembered: Any) -> Any:
        """Of what is remembered, shared or own, what the sampling sees: its own part, if it has one."""
        return remembered if self.sampling is None else remembered[1]

    def seen(self, round: Round) -> Round:
        """The round as the rule, the server step and this memory see it: without the sampling's part."""
        return round._replace(shared=self.algorithms(round.shared), own=self.algorithms(round.own))


SHIFTED_BY = ("params", "steps", "lr", "N")  # what a shift may be computed from, besides the memory


def device_memory(wanted: DeviceMemory | None, sampling: DeviceMemory | None = None) -> DeviceMemory | None:
    """The memory of an algorithm and of its sampling, checked, with functions that can be compiled."""
    for one in (wanted, sampling):
        if one is not None and not isinstance(one, DeviceMemory):
            raise InputError("memory", one, "should be a DeviceMemory(init, update, shift)")
    if sampling is not None:
        wanted = DeviceMemory(_nothing, _unchanged) if wanted is None else wanted
    if wanted is None:
        return None
    for name in ("init", "update", "shift", "correct"):
        function = getattr(wanted, name)
        if not callable(function) and (function is not None or name in ("init", "update")):
            raise InputError(f"memory: {name}", function, "should be a function")
    for name in ("pace", "prox"):
        check_number(f"memory: {name}", getattr(wanted, name), lambda number: number >= 0, "should be at least 0")
    parts = {name: compiled(getattr(wanted, name)) for name in ("init", "update", "shift", "correct")}
    return replace(wanted, **parts, sampling=device_memory(sampling))


def _nothing(params: Params) -> tuple[Any, Any]:
    return (), ()


def _unchanged(round: Round) -> tuple[Any, Any]:
    return round.shared, round.own


def started(memory: DeviceMemory | None, params: Params) -> tuple[Any, Any]:
    """The server's part, and the part of a device that was not met before."""
    if memory is None:
        return (), ()
    found = pair("memory: what init(params) returns", memory.init(params))
    if memory.sampling is None:
        return found
    return tuple(zip(found, started(memory.sampling, params), strict=True))  # type: ignore[return-value]


def updated(memory: DeviceMemory | None, round: Round) -> tuple[Any, Any]:
    """Both parts after a round. `round` has all of the memory."""
    if memory is None:
        return (), ()
    found = pair("memory: what update(round) returns", memory.update(memory.seen(round)))
    if memory.sampling is None:
        return found
    other = round._replace(shared=memory.samplings(round.shared), own=memory.samplings(round.own))
    return tuple(zip(found, updated(memory.sampling, other), strict=True))  # type: ignore[return-value]


def shifted_by(memory: DeviceMemory) -> tuple[str, ...]:
    """What its shift needs besides the memory."""
    shift: Any = memory.shift
    names = list(inspect.signature(getattr(shift, "func", shift)).parameters.values())[2:]
    wanted = tuple(p.name for p in names if p.kind is not p.KEYWORD_ONLY)
    for name in wanted:
        choose("what the shift of a memory needs", name, SHIFTED_BY)
    return wanted


class Rows(NamedTuple):
    """The memory of all devices: a row for each device or, if there are many, for each device that was met.

    In the second case `place` [N] is the row of each device, or -1 if it was not met: its memory is then `first`. `met`
    counts the rows in use.
    """

    rows: Any
    place: Array | None = None
    met: Array | None = None
    first: Any = None


def empty(own: Any, N: int, most: int) -> Rows:
    """Rows for N devices, if at most `most` of them will be met; `own` is the memory of a device not met yet."""
    count = min(N, most)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), own)
    if count == N:
        return Rows(rows)
    return Rows(rows, jnp.full(N, -1, jnp.int32), jnp.int32(0), own)


def gathered(memory: Rows | tuple[Rows, ...], device: Array) -> Any:
    """The memory of some devices, stacked; of several memories, a tuple."""
    if not isinstance(memory, Rows):
        return tuple(gathered(one, device) for one in memory)
    if memory.place is None:
        return jax.tree.map(lambda rows: rows[device], memory.rows)
    place = memory.place[device]

    def known(rows: Array, first: Any) -> Array:
        met = (place >= 0).reshape((-1,) + (1,) * (rows.ndim - 1))
        return jnp.where(met, rows[jnp.maximum(place, 0)], first)

    return jax.tree.map(known, memory.rows, memory.first)


def scattered(memory: Any, device: Array, changed: Array, values: Any) -> Any:
    """The memory with new values for the devices that `changed`; each occurs once."""
    if not isinstance(memory, Rows):
        return tuple(scattered(one, device, changed, new) for one, new in zip(memory, values, strict=True))
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
