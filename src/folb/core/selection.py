"""Which devices a round asks: a multiset of K drawn from P_k^t (Algorithm 1), or a set without replacement.

A sampling is a function of what the server knows: it returns the distribution P_k^t, or draws the devices itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import randomness
from folb.core.memory import DeviceMemory
from folb.core.multiset import (
    Multiset,
    chosen,
    draw,
    draw_uniform,
    multiset,
    proportional,
)
from folb.core.upload import Upload
from folb.errors import InputError, check, check_number

jax.tree_util.register_dataclass(
    Upload, data_fields=["numbers"], meta_fields=["name", "compute", "least", "most", "sizes"]
)


class Known(NamedTuple):
    """What the server knows about all N devices when it draws those of round t."""

    t: Array | int
    K: int
    replacement: bool
    start: Array  # device k owns rows start[k] : start[k] + size[k]
    size: Array  # n_k
    share: Array  # p_k of (1)
    survey: Array | None = None  # the answers to the survey; for gradients, <grad f, grad F_k>
    memory: Any = None  # of the devices, [N, ...] each, if the sampling asks for it
    candidates: Array | None = None  # [d] devices in ascending order: then `survey` and `memory` are theirs alone
    online: Array | None = None  # [N] whether a device can be reached; None: all can


class Draw(NamedTuple):
    """How devices are drawn in a round."""

    words: int  # random words that a draw takes
    devices: Callable[[Array], Multiset]
    correction: Callable[[Array], Array]  # p_k / P_k of devices: corrects a mean over the draw to (1)
    inner: Array | None = None  # <grad f, grad F_k> of all N devices, if the selection (7) needed them
    another: Callable[[Array, Array], Array] | None = None  # by a random word, one device that is not among some others


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """weigh(known) returns a chance for each of the N devices, in any scale, or a `Draw`.

    `survey` is an upload that all N devices are asked for before the draw. With `memory`, the sampling sees what the
    server remembers about each device: the algorithm's memory, or `keeps`, if the sampling has a memory of its own.
    With `candidates`, that many devices are first drawn with equal chances, and only they are asked, remembered and
    chosen from. With `first`, all devices are asked once, before the first round.
    """

    weigh: Callable[[Known], Array | Draw]
    survey: Upload | None = None  # or its name
    memory: bool = field(default=False, metadata={"static": True})
    keeps: DeviceMemory | None = None
    candidates: int | None = field(default=None, metadata={"static": True})
    first: First | None = None
    uploads: tuple[str, ...] = field(default=(), metadata={"static": True})  # what `keeps` needs in each round
    expected: int | None = field(default=None, metadata={"static": True})  # how many join, if each does by itself


class First(NamedTuple):
    """What all devices are asked for once, before the first round.

    remember(answers, K) returns what `keeps` then knows of each device. `answers` is the upload of all devices,
    stacked; so is what it returns.
    """

    upload: Upload  # or its name
    remember: Callable[[Any, Any], Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """How devices are drawn: K of them by `sampling`, and with `second` another K, S_2 of Algorithm 2.

    With over-selection a round asks `factor` times as many as it needs, and ends when `wanted` of the K have answered.
    """

    K: int = field(metadata={"static": True})
    replacement: bool = field(metadata={"static": True})
    sampling: Sampling
    second: bool = field(default=False, metadata={"static": True})
    wanted: int | None = field(default=None, metadata={"static": True})
    factor: float = field(default=1.0, metadata={"static": True})

    @property
    def enough(self) -> int:
        """The replies that a round needs."""
        return self.K if self.wanted is None else self.wanted

    @property
    def expected(self) -> int:
        """The devices of a round, or their expected number if each joins by itself."""
        return self.K if self.sampling.expected is None else self.sampling.expected

    @property
    def ahead(self) -> bool:
        """Whether the devices of a round can be drawn before earlier rounds are played."""
        return self.sampling.survey is None and not self.sampling.memory

    @property
    def distinct(self) -> bool:
        """Whether the K devices of a round must all be different."""
        sampling = self.sampling
        asked = sampling.candidates is not None or sampling.first is not None or sampling.expected is not None
        return not self.replacement or asked


MOST = 10**4  # devices of a round: it has a K x K table of repeats, which would get too large


def over_selected(how: Selection, factor: float | None) -> Selection:
    """The selection with `factor` times as many devices and candidates; the first K replies are enough."""
    if factor is None:
        return how
    check_number("over_selection", factor, lambda factor: (factor >= 1) & (factor <= 10), "should be from 1 to 10")
    if how.sampling.expected is not None and factor != 1:
        raise InputError("over_selection", factor, "should be None with sampling=poisson: any number may join")
    return sized(replace(how, factor=float(factor)), how.enough)


def sized(how: Selection, wanted: int, N: float = math.inf, asked_by: str = "K times over_selection") -> Selection:
    """The selection for rounds that need `wanted` replies, among N devices.

    Over-selection then asks more devices, and candidates in proportion. An error names `asked_by`.
    """
    K, sampling = math.ceil(wanted * how.factor - 1e-9), how.sampling
    if how.distinct:
        K = int(min(K, N))
    check(asked_by, K, MOST >= K, f"should be at most {MOST} devices")
    if sampling.candidates is not None:
        sampling = replace(sampling, candidates=math.ceil(sampling.candidates * K / how.K))
    return replace(how, K=K, sampling=sampling, wanted=wanted if wanted < K else None)


def drawing(how: Selection, known: Known) -> Draw:
    """How the devices of a round are drawn."""
    found = how.sampling.weigh(known)
    if isinstance(found, Draw):
        return found
    N = len(known.size)
    if not isinstance(found, Array | np.ndarray) or jnp.iscomplexobj(found):
        raise InputError("sampling: what it returns", type(found).__name__, "should be an array of chances, or a Draw")
    who = N if known.candidates is None else len(known.candidates)
    if found.shape != (who,):
        raise InputError(
            "sampling: shape", found.shape, f"should be ({who},): a chance for each device it is asked about"
        )
    # a chance that is negative or not finite counts as 0; the largest chance keeps the sum of all finite
    chances = jnp.where(jnp.isfinite(found) & (found > 0), jnp.minimum(found, 1e30), 0.0)
    if known.candidates is None:
        return from_distribution(proportional(chances), known)
    P, some = _reachable(proportional(chances), known), known.candidates
    return Draw(
        known.K if known.replacement else who,
        lambda words: multiset(some[chosen(randomness.uniform(words), P, known.K, known.replacement)]),
        lambda device: jnp.ones(jnp.shape(device)),
    )


def _reachable(P: Array, known: Known) -> Array:
    """The chances P, without those of devices that are offline; if nothing is left, equal ones for the others."""
    if known.online is None:
        return P
    online = known.online if known.candidates is None else known.online[known.candidates]
    left = jnp.where(online, P, 0.0)
    return proportional(jnp.where(jnp.sum(left) > 0, left, online.astype(P.dtype)))


def from_distribution(P: Array, known: Known, inner: Array | None = None) -> Draw:
    """A draw from P [N]."""
    P = _reachable(P, known)
    K, replacement = known.K, known.replacement
    return Draw(
        K if replacement else len(P),
        lambda words: draw(randomness.uniform(words), P, K, replacement),
        lambda device: known.share[device] / jnp.where(P[device] > 0, P[device], 1.0),
        inner,
        partial(_another_from, P),
    )


def _another_from(P: Array, word: Array, others: Array) -> Array:
    """One device from P that is not among `others`; if P allows only those, any other device."""
    idle = jnp.ones(len(P), bool).at[others].set(False, mode="drop")
    chances = jnp.where(idle, P, 0.0)
    chances = jnp.where(jnp.any(chances > 0), chances, idle)
    total = jnp.cumsum(chances)
    found = jnp.searchsorted(total, randomness.uniform(word) * total[-1], side="right")
    last = len(P) - 1 - jnp.argmax(chances[::-1] > 0)  # rounding errors must not lead beyond it
    return jnp.minimum(found, last).astype(jnp.int32)


def candidates(how: Selection, N: int, seed: Array | int, t: Array | int, online: Array | None = None) -> Array | None:
    """The candidates of round t, in ascending order, if the sampling wants some: online, if so many are."""
    wanted = how.sampling.candidates
    if wanted is None:
        return None
    if online is not None:
        order = randomness.uniform(randomness.words(seed, t, randomness.CANDIDATES, N))
        return draw(order, proportional(online.astype(jnp.float32)), min(wanted, N), replacement=False).device
    words = randomness.words(seed, t, randomness.CANDIDATES, 2)
    return draw_uniform(words, N, min(wanted, N), replacement=False).device
