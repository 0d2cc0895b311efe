"""The samplings by their names, and the reading of your own: (7), its approximations, and those that look at losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import randomness
from folb.core.memory import DeviceMemory, device_memory
from folb.core.multiset import (
    Multiset,
    another_by_samples,
    another_uniform,
    draw_by_samples,
    draw_uniform,
    multiset,
    proportional,
)
from folb.core.rules import Round
from folb.core.selection import Draw, First, Known, Sampling, from_distribution
from folb.core.tree import compiled
from folb.core.upload import BEFORE_WORK, GRAD, LOSS, NORM, Upload, sketch, upload
from folb.errors import InputError, check_number, check_whole, choose
from folb.typing import Params


def lb_near_optimal(inner: Array) -> Array:
    """(7): P_k proportional to |<grad f, grad F_k>|, and uniform if all are 0."""
    return proportional(jnp.abs(inner))


def norm_proxy(norms: Array) -> Array:
    """P_k proportional to ||grad F_k||, the Cauchy-Schwarz approximation of (7) in Sec. III-D."""
    return proportional(norms)


def lb_near_optimal_hetero(inner: Array, gamma: Array, psi: Array | float, squared_norm: Array) -> Array:
    """(16): P_k proportional to |I_k|, I_k = <grad f, grad F_k> - psi gamma_k ||grad f||^2."""
    return proportional(jnp.abs(inner - psi * gamma * squared_norm))


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
    return Draw(1, lambda words: multiset(device), lambda device: jnp.ones(jnp.shape(device)))


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


class LastLoss(DeviceMemory):
    """The loss of each device when it last worked; infinity for one that was not met."""

    def init(self, params: Params) -> tuple[tuple[()], Array]:
        """Not met."""
        return (), jnp.float32(jnp.inf)

    def update(self, round: Round) -> tuple[tuple[()], Array]:
        """The loss."""
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
    mixed = (1 - exploration) * proportional(use) + exploration * proportional(others)
    return jnp.where(count > 0, mixed, 1.0 / len(loss))


class LastUse(DeviceMemory):
    """The loss and the seconds of each device when it last worked; infinity for one that was not met."""

    def init(self, params: Params) -> tuple[tuple[()], Array]:
        """Not met."""
        return (), jnp.full(2, jnp.inf, jnp.float32)

    def update(self, round: Round) -> tuple[tuple[()], Array]:
        """Both."""
        assert round.seconds is not None
        return (), jnp.stack([round.sent["loss"], round.seconds.astype(jnp.float32)], axis=1)


def _of_each_cluster(known: Known) -> Draw:
    """One device of each of K clusters, by a sketch of their first gradients."""
    # if a cluster has no device, another cluster gets a second one
    N, K = len(known.size), known.K
    # a device that came later belongs to any cluster
    label = jnp.where(known.memory < 0, jnp.arange(N) % K, known.memory)

    def devices(words: Array) -> Multiset:
        chance = randomness.uniform(words)
        order = jnp.lexsort((chance, label))
        first = jnp.searchsorted(label[order], label[order], side="left")
        rank = jnp.zeros(N, jnp.int32).at[order].set(jnp.arange(N, dtype=jnp.int32) - first)  # in its cluster
        return multiset(jnp.lexsort((chance, rank))[:K])

    return Draw(N, devices, lambda device: jnp.ones(jnp.shape(device)))


class OwnCluster(DeviceMemory):
    """The cluster of each device; -1 for one that came later."""

    def init(self, params: Params) -> tuple[tuple[()], Array]:
        """None."""
        return (), jnp.int32(-1)

    def update(self, round: Round) -> tuple[tuple[()], Array]:
        """As it is."""
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
        keeps=LastLoss(),
        candidates=0,
        uploads=("loss",),
    ),
    "oort": Sampling(
        Partial(_useful_and_fast, exploration=0.1),
        memory=True,
        keeps=LastUse(),
        uploads=("loss",),
    ),
    "clusters": Sampling(
        Partial(_of_each_cluster),
        memory=True,
        keeps=OwnCluster(),
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
