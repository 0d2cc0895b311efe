"""A system model from a trace: each device's speed and connection, and when it is online, line by line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core.system import Effort, Link, exchanged
from folb.errors import check

ROUNDING = 4e-7  # of the clock, which has 24 bits


@dataclass(frozen=True)
class Source:
    """Where a trace is from, only for errors: traces of one shape share one program, wherever they are from."""

    path: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)  # of the device with the largest number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trace:
    """The lines of a trace, by device and time. A device is online from `begin` to `end` of each of its lines."""

    first: Any  # [N + 1] device k has the lines first[k] to first[k + 1] - 1
    begin: Any  # [lines]
    end: Any
    leaves: Any  # the end of a stay: of lines that touch
    link: Link
    period: Any  # seconds after which times repeat; may be infinite
    round: dict[str, Any]  # the numbers of `exchanged`
    halvings: int = field(metadata={"static": True})  # that find one line among those of a device
    source: Source = field(default_factory=Source, metadata={"static": True})

    def __call__(
        self,
        home: Array,
        draws: Array,
        cost: Array,
        down: Array,
        up: Array,
        now: Array,
        device: Array,
        asked: Any = None,
    ) -> Effort:
        """As in `network`, by the device's line at this moment. A reply after it goes offline is lost."""
        line, online = self._line(device, now)
        link = Link(*(jnp.asarray(numbers)[line] for numbers in self.link))
        effort = exchanged(link, draws, cost, down, up, self.round, asked)
        left = jnp.where(online, jnp.asarray(self.leaves)[line] - self._phase(now), 0.0)
        lost = effort.lost | (effort.seconds > left)
        return Effort(jnp.where(lost, 0, effort.work), jnp.minimum(effort.seconds, left), lost)

    def online(self, now: Array) -> Array:
        """[N] which devices can be reached."""
        return jax.vmap(self._line, in_axes=(0, None))(jnp.arange(len(self.first) - 1), now)[1]

    def wait(self, now: Array) -> Array:
        """Seconds until a device is online; infinite if none will be."""
        phase, begin = self._within(now), jnp.asarray(self.begin)
        longest = jnp.min(jnp.where(begin > phase, begin - phase, begin + self.period - phase))
        return jnp.where(jnp.any(self.online(now)), 0.0, longest)

    def check(self, N: int) -> None:
        """Raise an `InputError` unless these are the devices of a federation of N."""
        count = len(self.first) - 1
        where = f"{self.source.path}, line {self.source.line}: device"
        check(where, count - 1, count <= N, f"should be at most {N - 1}: the federation has {N} devices")
        check(f"{self.source.path}: device", count, count == N, f"has no line; devices are 0 to {N - 1}")

    @property
    def digest(self) -> str:
        """A hash of all that results depend on, besides the settings."""
        digest = hashlib.sha256()
        for numbers in (self.first, self.begin, self.end, *self.link):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        return digest.hexdigest()

    def _within(self, now: Array) -> Array:
        return jnp.where(jnp.isfinite(self.period), jnp.mod(now, self.period), now)

    def _phase(self, now: Array) -> Array:
        """The time within the period. A moment at which a device leaves or comes counts as past, for all rounding."""
        return self._within(now * (1 + ROUNDING))

    def _line(self, device: Array, now: Array) -> tuple[Array, Array]:
        """The device's last line that has begun, or else its first; and whether it is online."""
        phase, begin, first = self._phase(now), jnp.asarray(self.begin), jnp.asarray(self.first)
        low, high = first[device], first[device + 1]
        for _ in range(self.halvings):
            middle = (low + high) // 2
            begun = begin[middle] <= phase
            low, high = jnp.where(begun, middle, low), jnp.where(begun, high, middle)
        return low, (begin[low] <= phase) & (phase < jnp.asarray(self.end)[low])
