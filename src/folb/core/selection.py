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
from jax.tree_util import Partial

from folb.core import randomness
from folb.core.memory import DeviceMemory, device_memory
from folb.core.randomness import below
from folb.core.rules import Round
from folb.core.shuffle import shuffled
from folb.core.tree import compiled
from folb.core.upload import BEFORE_WORK, GRAD, LOSS, NORM, Upload, sketch, upload
from folb.errors import InputError, check, check_number, check_whole, choose
from folb.typing import Params

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

    With over-selection a round ends when `wanted` of the K have answered.
    """

    K: int = field(metadata={"static": True})
    replacement: bool = field(metadata={"static": True})
    sampling: Sampling
    second: bool = field(default=False, metadata={"static": True})
    wanted: int | None = field(default=None, metadata={"static": True})

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
    check("over_selection", factor, lambda factor: 1 <= factor <= 10, "should be from 1 to 10")
    K, sampling = math.ceil(how.K * factor - 1e-9), how.sampling
    check("over_selection", factor, MOST >= K, f"times K = {how.K} should be at most {MOST} devices")
    if how.K == K:
        return how
    if sampling.candidates is not None:
        sampling = replace(sampling, candidates=math.ceil(sampling.candidates * K / how.K))
    return replace(how, K=K, sampling=sampling, wanted=how.K)


class Multiset(NamedTuple):
    """K slots: distinct devices in ascending order, each with its multiplicity; repeats have times 0."""

    device: Array
    times: Array


def lb_near_optimal(inner: Array) -> Array:
    """(7): P_k proportional to |<grad f, grad F_k>|, and uniform if all are 0."""
    return _proportional(jnp.abs(inner))


def norm_proxy(norms: Array) -> Array:
    """P_k proportional to ||grad F_k||, the Cauchy-Schwarz approximation of (7) in Sec. III-D."""
    return _proportional(norms)


def lb_near_optimal_hetero(inner: Array, gamma: Array, psi: Array | float, squared_norm: Array) -> Array:
    """(16): P_k proportional to |I_k|, I_k = <grad f, grad F_k> - psi gamma_k ||grad f||^2."""
    return _proportional(jnp.abs(inner - psi * gamma * squared_norm))


def _proportional(importance: Array) -> Array:
    total = jnp.sum(importance)
    return jnp.where(total > 0, importance / jnp.where(total > 0, total, 1.0), 1.0 / importance.size)


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
        return from_distribution(_proportional(chances), known)
    P, some = _reachable(_proportional(chances), known), known.candidates
    return Draw(
        known.K if known.replacement else who,
        lambda words: _multiset(some[_drawn(randomness.uniform(words), P, known.K, known.replacement)]),
        lambda device: jnp.ones(jnp.shape(device)),
    )


def _reachable(P: Array, known: Known) -> Array:
    """The chances P, without those of devices that are offline; if nothing is left, equal ones for the others."""
    if known.online is None:
        return P
    online = known.online if known.candidates is None else known.online[known.candidates]
    left = jnp.where(online, P, 0.0)
    return _proportional(jnp.where(jnp.sum(left) > 0, left, online.astype(P.dtype)))


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


def _uniform(known: Known) -> Draw:
    """P_k = 1/N, without an array of N chances: N may be a million."""
    N, K, replacement = len(known.size), known.K, known.replacement
    if known.online is not None:
        return from_distribution(jnp.full(N, 1 / N), known)
    return Draw(
        K if replacement else 2,
        lambda words: draw_uniform(words, N, K, replacement),
        lambda device: known.share[device] * N,
        another=partial(another_uniform, N=N),
    )


def _poisson(known: Known, *, expected: int | Array) -> Draw:
    """Each device joins by itself, with the chance K/N. If more join than there is room for, the round asks nobody.

    A device that is offline may join, too, but is not reached: which devices join depends on chance alone.
    """
    N = len(known.size)

    def devices(words: Array) -> Multiset:
        joins = randomness.uniform(words) < expected / N
        count = jnp.sum(joins)
        device = jnp.nonzero(joins, size=known.K, fill_value=N - 1)[0].astype(jnp.int32)
        there = (jnp.arange(known.K) < count) & (count <= known.K)
        return Multiset(device, there.astype(jnp.float32))

    return Draw(N, devices, lambda device: known.share[device] * N)


def is_poisson(sampling: Sampling) -> bool:
    """Whether each device joins by itself. Your own sampling may say so (`expected`), but draw in another way."""
    return getattr(sampling.weigh, "func", None) is _poisson


FULL = 1e-5  # how often a round may have no room for all devices that join


def room(K: int) -> int:
    """The slots of a round that K devices join on average."""
    from scipy.special import pdtrc  # here, since it takes time to load and few algorithms need it

    slots = K
    while pdtrc(slots, K) > FULL:
        slots += 1
    return slots


def _by_samples(known: Known) -> Draw:
    """P_k = n_k / n."""
    samples = known.start[-1] + known.size[-1]  # the samples of all devices, even if y holds only a window
    another = partial(another_by_samples, start=known.start, size=known.size)
    if not known.replacement or known.online is not None:
        return from_distribution(known.size / samples, known)._replace(another=another)
    return Draw(
        known.K,
        lambda words: draw_by_samples(words, known.start, samples),
        lambda device: known.share[device] * samples / known.size[device],
        another=another,
    )


def _direct(known: Known) -> Draw:
    """(7): P_k proportional to |<grad f, grad F_k>|, from a survey of all devices."""
    assert known.survey is not None
    return from_distribution(lb_near_optimal(known.survey), known, known.survey)


def _by_norm(known: Known) -> Draw:
    """P_k proportional to ||grad F_k||, from a survey of all devices."""
    assert known.survey is not None
    return from_distribution(norm_proxy(known.survey), known)


def _chosen(device: Array) -> Draw:
    """These devices, whatever the random numbers."""
    return Draw(1, lambda words: _multiset(device), lambda device: jnp.ones(jnp.shape(device)))


def _largest(known: Known, values: Array) -> Draw:
    """The K candidates with the largest values."""
    assert known.candidates is not None
    if known.online is not None:
        values = jnp.where(known.online[known.candidates], values, -jnp.inf)
    return _chosen(known.candidates[jax.lax.top_k(jnp.nan_to_num(values, nan=-jnp.inf), known.K)[1]])


def _power_of_choice(known: Known) -> Draw:
    """Power of choice (Cho et al., 2022): of some random candidates, the K whose loss is largest now."""
    assert known.survey is not None
    return _largest(known, known.survey)


def _largest_remembered(known: Known) -> Draw:
    """Of some random candidates, the K whose loss was largest when they last worked."""
    # A device not met yet has the median loss. If it were drawn first, one that never answers would always be drawn.
    met = jnp.isfinite(known.memory)
    ordered = jnp.sort(jnp.where(met, known.memory, jnp.inf))
    middle = ordered[jnp.maximum(jnp.sum(met) - 1, 0) // 2]
    return _largest(known, jnp.where(met, known.memory, jnp.where(jnp.any(met), middle, 0.0)))


def _not_met(params: Params) -> tuple[tuple[()], Array]:
    """A device that was not met has no loss yet."""
    return (), jnp.float32(jnp.inf)


def _last_loss(round: Round) -> tuple[tuple[()], Array]:
    return (), round.sent["loss"]


SLOW = 2.0  # alpha of Oort: a device that takes r times the median seconds is r^-alpha times as useful
CROWD = 0.95  # no device counts as more useful than this quantile of all devices that were met
HIGHEST = 1e30  # of a device's use: more, times the number of devices, would overflow 32 bits


def _useful_and_fast(known: Known, *, exploration: Array | float) -> Array:
    """Oort (Lai et al., 2021): by samples times the last loss, less for slow devices, and a share for those not met."""
    loss, seconds = known.memory[:, 0], known.memory[:, 1]
    met = jnp.isfinite(loss)
    count = jnp.sum(met)

    def quantile(values: Array, share: float) -> Array:
        """That quantile over the devices met; never the largest of several, which one liar can choose."""
        ordered = jnp.sort(jnp.where(met, values, jnp.inf))
        place = jnp.minimum(jnp.ceil(share * count).astype(jnp.int32) - 1, count - 2)
        return ordered[jnp.maximum(place, 0)]

    slowness = jnp.maximum(seconds / jnp.maximum(quantile(seconds, 0.5), 1e-30), 1.0)
    use = jnp.minimum(known.size * jnp.maximum(loss, 0.0) * slowness**-SLOW, HIGHEST)
    use = jnp.where(met, jnp.minimum(use, quantile(use, CROWD)), 0.0)  # so a liar gains little with a huge loss
    others = jnp.where(jnp.all(met), met, ~met).astype(jnp.float32)
    mixed = (1 - exploration) * _proportional(use) + exploration * _proportional(others)
    return jnp.where(count > 0, mixed, 1.0 / len(loss))


def _no_use_yet(params: Params) -> tuple[tuple[()], Array]:
    return (), jnp.full(2, jnp.inf, jnp.float32)


def _last_use(round: Round) -> tuple[tuple[()], Array]:
    assert round.seconds is not None
    return (), jnp.stack([round.sent["loss"], round.seconds.astype(jnp.float32)], axis=1)


def _of_each_cluster(known: Known) -> Draw:
    """One device of each of K clusters, by a sketch of their first gradients."""
    # if a cluster has no device, another cluster gets a second one
    N, K = len(known.size), known.K
    # a device that came later belongs to any cluster
    label = jnp.where(known.memory < 0, jnp.arange(N) % K, known.memory)

    def devices(words: Array) -> Multiset:
        luck = randomness.uniform(words)
        order = jnp.lexsort((luck, label))
        first = jnp.searchsorted(label[order], label[order], side="left")
        rank = jnp.zeros(N, jnp.int32).at[order].set(jnp.arange(N, dtype=jnp.int32) - first)  # in its cluster
        return _multiset(jnp.lexsort((luck, rank))[:K])

    return Draw(N, devices, lambda device: jnp.ones(jnp.shape(device)))


def _no_cluster(params: Params) -> tuple[tuple[()], Array]:
    return (), jnp.int32(-1)


def _same_cluster(round: Round) -> tuple[tuple[()], Array]:
    return (), round.own


CLUSTERING = 20  # steps of k-means


def clustered(answers: Array, K: Any) -> Array:
    """The cluster, 0 to K - 1, of each row: k-means on directions, begun with rows that are far from each other.

    Rows of a small cluster have -1: they belong to any.
    """
    rows = answers / jnp.maximum(jnp.linalg.norm(answers, axis=1, keepdims=True), 1e-30)
    near = jnp.full(len(rows), -jnp.inf)
    first = jnp.argmax(jnp.linalg.norm(answers, axis=1))

    def further(near: Array, _: Any) -> tuple[Array, Array]:
        centre = rows[jnp.where(jnp.all(jnp.isneginf(near)), first, jnp.argmin(near))]
        return jnp.maximum(near, rows @ centre), centre

    centres = jax.lax.scan(further, near, None, length=K)[1]

    def turn(_: Any, centres: Array) -> Array:
        mine = jax.nn.one_hot(jnp.argmax(rows @ centres.T, axis=1), K)
        total = mine.T @ rows
        norm = jnp.linalg.norm(total, axis=1, keepdims=True)
        return jnp.where(norm > 0, total / jnp.maximum(norm, 1e-30), centres)

    label = jnp.argmax(rows @ jax.lax.fori_loop(0, CLUSTERING, turn, centres).T, axis=1).astype(jnp.int32)
    # A device alone in its cluster would be drawn in every round, and a liar could arrange that. So a cluster has at
    # least half of its share of the devices: none is drawn more than twice as often as by chance.
    count = jnp.zeros(K, jnp.int32).at[label].add(1)
    return jnp.where(2 * K * count[label] < len(rows), -1, label)


SAMPLINGS = {
    "uniform": Sampling(Partial(_uniform)),
    "samples": Sampling(Partial(_by_samples)),
    "poisson": Sampling(Partial(_poisson, expected=0), expected=0),
    "direct": Sampling(Partial(_direct), survey=GRAD),
    "norm": Sampling(Partial(_by_norm), survey=NORM),
    "power_of_choice": Sampling(Partial(_power_of_choice), survey=LOSS, candidates=0),
    "remembered_loss": Sampling(
        Partial(_largest_remembered),
        memory=True,
        keeps=DeviceMemory(_not_met, _last_loss),
        candidates=0,
        uploads=("loss",),
    ),
    "oort": Sampling(
        Partial(_useful_and_fast, exploration=0.1),
        memory=True,
        keeps=DeviceMemory(_no_use_yet, _last_use),
        uploads=("loss",),
    ),
    "clusters": Sampling(
        Partial(_of_each_cluster),
        memory=True,
        keeps=DeviceMemory(_no_cluster, _same_cluster),
        first=First(sketch(64), Partial(clustered)),
    ),
}
CANDIDATES = 2  # times K, by default


def sampling(
    wanted: str | Sampling | Callable[[Known], Any], K: int = 10, candidates: int | None = None, exploration: Any = None
) -> Sampling:
    """A sampling by its name, or your own; a plain function uses neither a survey nor a memory."""
    if exploration is not None and wanted != "oort":
        raise InputError("exploration", exploration, "is for sampling=oort")
    if isinstance(wanted, str):
        found = SAMPLINGS[choose("sampling", wanted, SAMPLINGS)]
        if exploration is not None:
            expected = "should be more than 0 and at most 1"
            check_number("exploration", exploration, lambda share: (share > 0) & (share <= 1), expected)
            found = replace(found, weigh=Partial(_useful_and_fast, exploration=exploration))
        if found.candidates is None and candidates is not None:
            some = ", ".join(name for name, one in SAMPLINGS.items() if one.candidates is not None)
            raise InputError("candidates", candidates, f"is for sampling={some}; sampling is {wanted}")
        if found.expected is not None:
            return replace(found, weigh=Partial(_poisson, expected=K), expected=K)
        if found.candidates is None:
            return found
        if candidates is not None:
            check_whole("candidates", candidates, K, 10**6)
        return replace(found, candidates=CANDIDATES * K if candidates is None else candidates)
    if candidates is not None:
        raise InputError("candidates", candidates, "is for folb's own samplings; set yours in Sampling(candidates=...)")
    made = wanted if isinstance(wanted, Sampling) else Sampling(wanted)
    if not callable(made.weigh):
        raise InputError("sampling", wanted, f"should be one of {', '.join(SAMPLINGS)}, or a function of `Known`")
    survey = None if made.survey is None else upload(made.survey)
    if survey is not None:
        _check_early("survey", survey)
    if made.candidates is not None:
        check_whole("candidates", made.candidates, K, 10**6)
        if survey == GRAD:
            raise InputError(
                "survey", "grad", "should be a number: inner products (7) need the gradients of all devices"
            )
    if made.first is not None and made.keeps is None:
        raise InputError("sampling: keeps", None, "should be a DeviceMemory, which has what `first` asks for")
    if made.first is not None and survey is not None:
        expected = "should be None with a survey: devices are asked either once or in each round"
        raise InputError("sampling: first", getattr(made.first, "upload", made.first), expected)
    keeps, first = device_memory(made.keeps), _first(made.first)
    return replace(made, weigh=compiled(made.weigh), survey=survey, keeps=keeps, first=first)


def _first(wanted: First | None) -> First | None:
    """What all devices are asked for once, checked."""
    if wanted is None:
        return None
    if not isinstance(wanted, First) or not callable(wanted.remember):
        expected = "should be a folb.First: an upload, and a function remember(answers, K)"
        raise InputError("sampling: first", wanted, expected)
    asked = upload(wanted.upload)
    _check_early("sampling: first", asked)
    return First(asked, compiled(wanted.remember))


def _check_early(field: str, asked: Upload) -> None:
    if late := set(asked.needs) - set(BEFORE_WORK):
        expected = f"should need none of {', '.join(sorted(late))}: devices are asked before they work"
        raise InputError(field, asked.name, expected)


def candidates(how: Selection, N: int, seed: Array | int, t: Array | int, online: Array | None = None) -> Array | None:
    """The candidates of round t, in ascending order, if the sampling wants some: online, if so many are."""
    wanted = how.sampling.candidates
    if wanted is None:
        return None
    if online is not None:
        luck = randomness.uniform(randomness.words(seed, t, randomness.CANDIDATES, N))
        return draw(luck, _proportional(online.astype(jnp.float32)), min(wanted, N), replacement=False).device
    words = randomness.words(seed, t, randomness.CANDIDATES, 2)
    return draw_uniform(words, N, min(wanted, N), replacement=False).device


def draw(u: Array, P: Array, K: int, replacement: bool) -> Multiset:
    """K devices from the distribution P [N]: independently, or one after another without replacement.

    `u` are random numbers between 0 and 1: K of them, or N without replacement.
    """
    return _multiset(_drawn(u, P, K, replacement))


def _drawn(u: Array, P: Array, K: int, replacement: bool) -> Array:
    if replacement:
        total = jnp.cumsum(P)
        return jnp.minimum(jnp.searchsorted(total, u * total[-1], side="right"), len(P) - 1)
    # the K largest of log P + Gumbel noise are a draw without replacement from P
    return jax.lax.top_k(jnp.log(P) - jnp.log(-jnp.log(u)), K)[1]


def draw_uniform(words: Array, N: int, K: int, replacement: bool) -> Multiset:
    """K of N devices with equal chances, at a cost that does not grow with N.

    `words` are random: K of them or, without replacement, two: the key of a permutation whose first K are taken.
    """
    if replacement:
        return _multiset(below(N, words))
    return _multiset(shuffled(words, 0, jnp.arange(K), N))


def draw_by_samples(words: Array, start: Array, samples: Array | int) -> Multiset:
    """Devices in proportion to their samples, with replacement: owners of random rows. Device k's begin at start[k]."""
    return _multiset(jnp.searchsorted(start, below(samples, words), side="right") - 1)


def another_uniform(word: Array, others: Array, N: int) -> Array:
    """One of N devices with equal chances, not among `others`, at a cost that does not grow with N.

    The others are distinct; a number of N or more stands for no device.
    """
    place = below(N - jnp.sum(others < N), word)  # among the devices that are left
    before = jnp.sort(others) - jnp.arange(len(others))  # how many of these precede each of the others
    return (place + jnp.sum(before <= place)).astype(jnp.int32)


def another_by_samples(word: Array, others: Array, start: Array, size: Array) -> Array:
    """One device in proportion to its samples, not among `others`: the owner of a random row of the rest."""
    N = len(size)
    others = jnp.sort(others)
    theirs = jnp.where(others < N, size[jnp.minimum(others, N - 1)], 0)
    first = start[jnp.minimum(others, N - 1)]
    place = below(start[-1] + size[-1] - jnp.sum(theirs), word)  # among the rows that are left
    before = first - (jnp.cumsum(theirs) - theirs)  # how many of these precede each of the others' rows
    row = place + jnp.sum(jnp.where(before <= place, theirs, 0))
    return (jnp.searchsorted(start, row, side="right") - 1).astype(jnp.int32)


def _multiset(chosen: Array) -> Multiset:
    device = jnp.sort(chosen.astype(jnp.int32))
    fresh = jnp.concatenate([jnp.array([True]), device[1:] != device[:-1]])
    times = jnp.where(fresh, jnp.sum(device[:, None] == device[None, :], axis=1), 0)
    return Multiset(device, times.astype(jnp.float32))
