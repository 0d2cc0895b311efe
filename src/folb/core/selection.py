"""Which devices a round asks: a multiset of K drawn from P_k^t (Algorithm 1), or a set without replacement.

A sampling weighs what the server knows: it returns the distribution P_k^t, or draws the devices itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import randomness
from folb.core.memory import DeviceMemory, device_memory
from folb.core.part import FLAG, Part, setting, whole
from folb.core.randomness import Multiset, chosen, draw, draw_uniform, multiset, proportional
from folb.core.upload import BEFORE_WORK, GRAD, Upload, upload
from folb.errors import InputError, check, check_whole

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
    survey: Any = None  # the answers to the survey; for gradients, <grad f, grad F_k>
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


class Sampling(Part):
    """Which devices a round asks. One of your own is a class of this base with `weigh`."""

    needed = ("weigh",)
    survey: ClassVar[str | Upload | None] = None  # what devices are asked for before each draw: an upload, or its name
    first: ClassVar[str | Upload | None] = None  # what all are asked for once, before the first round, to `remember` it
    keeps: ClassVar[DeviceMemory | None] = None  # its own memory of devices, besides that of the algorithm
    memory: ClassVar[bool] = False  # whether it sees the algorithm's memory, if it has none of its own
    # how its draws are counted for privacy. poisson: each device joins by itself, with the chance K/N; fixed: K of N
    # have equal chances, if without replacement; None: others
    scheme: ClassVar[Literal["poisson", "fixed"] | None] = None
    naive: ClassVar[bool] = False  # whether it is only for an algorithm of its own

    @property
    def remembers(self) -> bool:
        """Whether it sees what the server remembers of each device."""
        return self.memory or self.keeps is not None

    @property
    def one_by_one(self) -> bool:
        """Whether it can draw devices one by one, as rounds that do not wait do."""
        asks = self.survey is not None or self.first is not None or self.pool(1) is not None
        return not (asks or self.remembers or self.scheme == "poisson")

    def pool(self, K: int) -> int | None:
        """How many candidates are first drawn with equal chances, if K of some are chosen; only they are asked."""
        return None

    def remember(self, answers: Any, K: Any) -> Any:
        """What `keeps` knows of each device after the first question. Both are stacked over all devices."""

    def weigh(self, known: Known) -> Array | Draw:
        """A chance for each of the N devices, or for each candidate, in any scale; or a `Draw`."""
        raise NotImplementedError

    def check(self, spelt: Callable[[str], str] = str) -> None:
        super().check(spelt)
        if self.scheme not in (None, "poisson", "fixed"):
            raise InputError("select: scheme", self.scheme, "should be poisson, fixed or None")
        device_memory(self.keeps)
        for name, asked in (("select: survey", self.survey), ("select: first", self.first)):
            if asked is not None and (late := set(upload(asked).needs) - set(BEFORE_WORK)):
                expected = f"should need none of {', '.join(sorted(late))}: devices are asked before they work"
                raise InputError(name, upload(asked).name, expected)
        if self.first is None:
            return
        if self.keeps is None:
            raise InputError("select: keeps", None, "should be a DeviceMemory, which has what `first` asks for")
        if not self.has("remember"):
            raise InputError("select", self.name, "should have a method remember(answers, K), for what `first` asks")
        if self.survey is not None:
            expected = "should be None with a survey: devices are asked either once or in each round"
            raise InputError("select: first", getattr(self.first, "name", self.first), expected)


TIMES = "select.K times select.over_selection"
MOST = 10**4  # devices of a round: it has a K x K table of repeats, which would get too large


class Selection(Part):
    """How devices are drawn: K of them by `sampling`, and with `second` another K, S_2 of Algorithm 2."""

    sampling: Sampling
    K: int = setting("devices per round", whole(1, MOST), default=10)
    over_selection: float | None = setting(
        "1.3 asks 30 % more devices than K, and ends the round once K have answered; by default 1",
        (1, 10),
        default=None,
        static=True,
    )
    replacement: bool = setting("true: draw with replacement, as in Algorithm 1; false: without", FLAG, default=True)
    second: bool = field(default=False, metadata={"static": True})
    wanted: int | None = field(default=None, metadata={"static": True})  # replies that end an over-selected round
    candidates: int | None = field(default=None, metadata={"static": True})  # drawn first
    mean: int | None = field(default=None, metadata={"static": True})  # how many join on average; K is then the room

    @property
    def survey(self) -> Upload | None:
        """What devices are asked for before each draw."""
        return None if self.sampling.survey is None else upload(self.sampling.survey)

    @property
    def first(self) -> Upload | None:
        """What all devices are asked for once, before the first round."""
        return None if self.sampling.first is None else upload(self.sampling.first)

    @property
    def factor(self) -> float:
        """The devices that a round asks, over those that it needs."""
        return float(self.over_selection or 1)

    @property
    def enough(self) -> int:
        return self.K if self.wanted is None else self.wanted

    @property
    def expected(self) -> int:
        """The devices of a round, or their expected number if each joins by itself."""
        return self.K if self.mean is None else self.mean

    @property
    def ahead(self) -> bool:
        """Whether the devices of a round can be drawn before earlier rounds are played."""
        return self.sampling.survey is None and not self.sampling.remembers

    @property
    def distinct(self) -> bool:
        """Whether the K devices of a round must all be different."""
        asked = self.candidates is not None or self.sampling.first is not None or self.mean is not None
        return not self.replacement or asked


FULL = 1e-5  # how often a round may have no room for all devices that join


def room(K: int) -> int:
    """The slots of a round that K devices join on average."""
    from scipy.special import pdtrc  # here, since it takes time to load and few algorithms need it

    slots = K
    while pdtrc(slots, K) > FULL:
        slots += 1
    return slots


def settled(made: Selection, second: bool) -> Selection:
    """How an algorithm's devices are drawn, with all that follows from the settings."""
    made, sampling = replace(made, second=second), made.sampling
    if (some := sampling.pool(made.K)) is not None:
        check_whole("select.candidates", some, made.K, 10**6)
        if made.survey == GRAD:
            expected = "should be a number: inner products (7) need the gradients of all devices"
            raise InputError("select: survey", "grad", expected)
        made = replace(made, candidates=some)
    if sampling.scheme == "poisson":
        made = replace(made, K=room(made.K), mean=made.K)
    factor = made.over_selection
    if factor is None:
        return made
    if made.mean is not None and factor != 1:
        raise InputError("select.over_selection", factor, "should be None with select=poisson: any number may join")
    return sized(replace(made, over_selection=None) if factor == 1 else made, made.enough)


def sized(how: Selection, wanted: int, N: float = math.inf, asked_by: str = TIMES) -> Selection:
    """The selection for rounds that need `wanted` replies of N devices; an error names the setting `asked_by`."""
    K, candidates = math.ceil(wanted * how.factor - 1e-9), how.candidates
    if how.distinct:
        K = int(min(K, N))
    check(asked_by, K, MOST >= K, f"should be at most {MOST} devices")
    if candidates is not None:
        candidates = math.ceil(candidates * K / how.K)
    return replace(how, K=K, candidates=candidates, wanted=wanted if wanted < K else None)


def drawing(how: Selection, known: Known) -> Draw:
    weighed = how.sampling.weigh(known)
    if isinstance(weighed, Draw):
        return weighed
    N = len(known.size)
    if not isinstance(weighed, Array | np.ndarray) or jnp.iscomplexobj(weighed):
        raise InputError("select: what it returns", type(weighed).__name__, "should be an array of chances, or a Draw")
    who = N if known.candidates is None else len(known.candidates)
    if weighed.shape != (who,):
        expected = f"should be ({who},): a chance for each device it is asked about"
        raise InputError("select: shape", weighed.shape, expected)
    # a chance that is negative or not finite counts as 0; the largest chance keeps the sum of all finite
    chances = jnp.where(jnp.isfinite(weighed) & (weighed > 0), jnp.minimum(weighed, 1e30), 0.0)
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
    place = jnp.searchsorted(total, randomness.uniform(word) * total[-1], side="right")
    last = len(P) - 1 - jnp.argmax(chances[::-1] > 0)  # rounding errors must not lead beyond it
    return jnp.minimum(place, last).astype(jnp.int32)


def candidates(how: Selection, N: int, seed: Array | int, t: Array | int, online: Array | None = None) -> Array | None:
    """The candidates of round t, in ascending order, if the sampling wants some: online, if so many are."""
    wanted = how.candidates
    if wanted is None:
        return None
    if online is not None:
        order = randomness.uniform(randomness.words(seed, t, randomness.CANDIDATES, N))
        return draw(order, proportional(online.astype(jnp.float32)), min(wanted, N), replacement=False).device
    words = randomness.words(seed, t, randomness.CANDIDATES, 2)
    return draw_uniform(words, N, min(wanted, N), replacement=False).device
