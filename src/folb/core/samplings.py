"""The samplings by their names: (7), its approximations, and those that look at losses."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness
from folb.core.memory import DeviceMemory
from folb.core.part import Slot, setting, up_to, whole
from folb.core.randomness import Multiset, multiset, proportional
from folb.core.rules import Round
from folb.core.selection import Draw, Known, Sampling, Selection, from_distribution, room
from folb.core.upload import GRAD, LOSS, NORM, sketch
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


class Uniform(Sampling):
    """P_k = 1/N, without an array of N chances: N may be a million."""

    scheme = "fixed"

    def weigh(self, known: Known) -> Draw:
        N, K, replacement = len(known.size), known.K, known.replacement
        if known.online is not None:
            return from_distribution(jnp.full(N, 1 / N), known)
        return Draw(
            K if replacement else 2,
            lambda words: randomness.draw_uniform(words, N, K, replacement),
            lambda device: known.share[device] * N,
            another=partial(randomness.another_uniform, N=N),
        )


class Samples(Sampling):
    """P_k = n_k / n."""

    def weigh(self, known: Known) -> Draw:
        samples = known.start[-1] + known.size[-1]  # the samples of all devices, even if y holds only a window
        another = partial(randomness.another_by_samples, start=known.start, size=known.size)
        if not known.replacement or known.online is not None:
            return from_distribution(known.size / samples, known)._replace(another=another)
        return Draw(
            known.K,
            lambda words: randomness.draw_by_samples(words, known.start, samples),
            lambda device: known.share[device] * samples / known.size[device],
            another=another,
        )


class Poisson(Sampling):
    """Each device joins by itself, with the chance K/N. If more join than there is room for, the round asks nobody.

    A device that is offline may join, too, but is not reached: which devices join depends on chance alone.
    """

    scheme = "poisson"

    def weigh(self, known: Known) -> Draw:
        N, slots = len(known.size), room(known.K)

        def devices(words: Array) -> Multiset:
            joins = randomness.uniform(words) < known.K / N
            count = jnp.sum(joins)
            device = jnp.nonzero(joins, size=slots, fill_value=N - 1)[0].astype(jnp.int32)
            there = (jnp.arange(slots) < count) & (count <= slots)
            return Multiset(device, there.astype(jnp.float32))

        return Draw(N, devices, lambda device: known.share[device] * N)


class Direct(Sampling):
    """(7): P_k proportional to |<grad f, grad F_k>|, from a survey of all devices."""

    survey = GRAD
    naive = True

    def weigh(self, known: Known) -> Draw:
        return from_distribution(lb_near_optimal(known.survey), known, known.survey)


class Norm(Sampling):
    """P_k proportional to ||grad F_k||, from a survey of all devices."""

    survey = NORM
    naive = True

    def weigh(self, known: Known) -> Draw:
        return from_distribution(norm_proxy(known.survey), known)


def _largest(known: Known, values: Array) -> Draw:
    """The K candidates with the largest values, whatever the random numbers."""
    assert known.candidates is not None
    if known.online is not None:
        values = jnp.where(known.online[known.candidates], values, -jnp.inf)
    largest = known.candidates[jax.lax.top_k(jnp.nan_to_num(values, nan=-jnp.inf), known.K)[1]]
    return Draw(1, lambda words: multiset(largest), lambda device: jnp.ones(jnp.shape(device)))


class Candidates(Sampling):
    """The base of samplings that choose K of some random candidates."""

    candidates: int | None = setting("d: K of d candidates are chosen; by default 2 K", whole(1, 10**6), default=None)

    def pool(self, K: int) -> int:
        return 2 * K if self.candidates is None else self.candidates


class PowerOfChoice(Candidates):
    """Power of choice (Cho et al., 2022): of some random candidates, the K whose loss is largest now."""

    called = "power_of_choice"
    survey = LOSS

    def weigh(self, known: Known) -> Draw:
        return _largest(known, known.survey)


class LastWork(DeviceMemory):
    """The loss of each device when it last worked, and its seconds if `timed`; infinity for one that was not met."""

    uploads = ("loss",)
    timed: bool = field(default=False, metadata={"static": True})

    def init(self, params: Params) -> tuple[tuple[()], Array]:
        return (), jnp.full(2 if self.timed else (), jnp.inf, jnp.float32)

    def update(self, round: Round) -> tuple[tuple[()], Array]:
        loss = round.sent["loss"]
        return (), jnp.stack([loss, round.seconds.astype(jnp.float32)], axis=1) if self.timed else loss


class RememberedLoss(Candidates):
    """Of some random candidates, the K whose loss was largest when they last worked."""

    called = "remembered_loss"
    keeps = LastWork()

    def weigh(self, known: Known) -> Draw:
        # A device not met yet has the median loss. If it were drawn first, one that never answers would always be.
        met = jnp.isfinite(known.memory)
        ordered = jnp.sort(jnp.where(met, known.memory, jnp.inf))
        middle = ordered[jnp.maximum(jnp.sum(met) - 1, 0) // 2]
        return _largest(known, jnp.where(met, known.memory, jnp.where(jnp.any(met), middle, 0.0)))


SLOW = 2.0  # alpha of Oort: a device that takes r times the median seconds is r^-alpha times as useful
CROWD = 0.95  # no device counts as more useful than this quantile of all devices that were met
HIGHEST = 1e30  # of a device's use: more, times the number of devices, would overflow 32 bits


class Oort(Sampling):
    """Oort (Lai et al., 2021): by samples times the last loss, less for slow devices, and a share for those not met."""

    exploration: float = setting("the share of draws for devices not met yet", up_to(1), default=0.1)
    keeps = LastWork(timed=True)

    def weigh(self, known: Known) -> Array:
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
        mixed = (1 - self.exploration) * proportional(use) + self.exploration * proportional(others)
        return jnp.where(count > 0, mixed, 1.0 / len(loss))


class OwnCluster(DeviceMemory):
    """The cluster of each device; -1 for one that came later."""

    def init(self, params: Params) -> tuple[tuple[()], Array]:
        return (), jnp.int32(-1)

    def update(self, round: Round) -> tuple[tuple[()], Array]:
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


class Clusters(Sampling):
    """One device of each of K clusters, by a sketch of their first gradients."""

    first = sketch(64)
    keeps = OwnCluster()

    def remember(self, answers: Array, K: Any) -> Array:
        return clustered(answers, K)

    def weigh(self, known: Known) -> Draw:
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


SAMPLINGS = Slot(
    "select",
    Sampling,
    (Uniform, Samples, Poisson, Direct, Norm, PowerOfChoice, RememberedLoss, Oort, Clusters),
    "P_k: which devices a round asks",
    optional=False,
    record=Selection,
    inside="sampling",
)
