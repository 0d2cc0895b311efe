"""The virtual clock: the seconds of all rounds so far."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LONGEST = 1e9  # seconds of a round, 30 years: more would overflow 32 bits
LAST = 2**31 - 1  # second of a run, 68 years after its start: there the clock stops


class Clock(NamedTuple):
    """Whole seconds and the rest: a single number of 32 bits would soon lose the short rounds of a long run."""

    whole: Array
    rest: Array

    @property
    def now(self) -> Array:
        """Seconds since the run began."""
        return self.whole.astype(jnp.float32) + self.rest

    def after(self, seconds: Array) -> Clock:
        """The clock that many seconds later."""
        rest = self.rest + jnp.minimum(seconds, LONGEST)
        whole = jnp.floor(rest)
        added = whole.astype(jnp.int32)
        return Clock(jnp.minimum(self.whole, LAST - added) + added, rest - whole)


def zero() -> Clock:
    """The clock before the first round."""
    return Clock(jnp.int32(0), jnp.float32(0))
