"""Robust rules: what stands in for a mean when some devices lie about their updates.

The update of a rule is the mean of n a_k Delta_k over the n devices that replied, where a_k are its weights. A robust
rule puts another centre in place of this mean. So it goes with any rule, and a device counts once, however often it was
drawn. A reply that is not finite is rejected. `liars` is the share of devices that may lie, as the server assumes.
A centre holds against f liars if there are enough others. A round with fewer replies changes nothing.

The server step, the memories of devices and the step size see updates clipped to their median norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, tree
from folb.core.part import Part, Slot, below, setting, whole
from folb.core.polar import SMALLEST, clipped, median, polar, scaled
from folb.core.rules import Round, Update, fraction
from folb.core.selection import MOST
from folb.errors import InputError
from folb.typing import Params

LARGEST = 1e6  # longest vector, in median norms: a longer one changes no centre, and its square could overflow
TURNS = 8  # of the iterations for the geometric median and of centred clipping


class Vectors(NamedTuple):
    """What a centre is computed from: a stack of vectors, some of which count."""

    stack: Params
    counted: Array
    liars: Array  # how many of them may be false
    trusted: Params | None = None

    @property
    def n(self) -> Array:
        return jnp.sum(self.counted)

    @property
    def even(self) -> Array:
        return fraction(self.counted.astype(jnp.float32), self.n)


class Robust(Part):
    """A centre in place of a rule's mean. One of your own is a class of this base with `centre`."""

    needed = ("centre",)
    of_false: ClassVar[int] = 2  # it holds against f false vectors if there are so many times f,
    besides: ClassVar[int] = 1  # and so many more
    even: ClassVar[Any] = False  # whether no reply has more than an even share of the centre
    own_samples: ClassVar[Any] = 0  # how many the server needs, for `Vectors.trusted`
    liars: float = setting("the share of devices that may lie", below(0.5), default=0.2)
    bucket: int = setting(
        "replies are first averaged in random groups of this size", whole(1, 10**4, number=True), default=1
    )

    def centre(self, given: Vectors) -> Update:
        """The centre, and the share of each vector in it."""
        raise NotImplementedError

    def needs(self, f: Any) -> Any:
        """How many vectors it needs to hold against f false ones."""
        return self.of_false * f + self.besides

    def enough(self, replies: int) -> bool:
        """Whether so many replies, each of another device, are enough."""
        false = math.ceil(self.liars * replies - 1e-4)
        return bool(math.ceil(replies / self.bucket) >= self.needs(false))


class Median(Robust):
    """The median of each coordinate (Yin et al., 2018). A device's weight is its share of the coordinates."""

    def centre(self, given: Vectors) -> Update:
        return _trimmed(given, (given.n - 1) // 2)


class TrimmedMean(Robust):
    """The mean of each coordinate without its largest and smallest values (Yin et al., 2018), as many as may lie."""

    called = "trimmed_mean"

    def centre(self, given: Vectors) -> Update:
        return _trimmed(given, jnp.minimum(given.liars, (given.n - 1) // 2))


class Krum(Robust):
    """Krum (Blanchard et al., 2017): the vector with the smallest sum of squared distances to its n - f - 2 nearest."""

    besides = 3

    def centre(self, given: Vectors) -> Update:
        return _nearest(given, jnp.int32(1))


class MultiKrum(Robust):
    """Multi-Krum (Blanchard et al., 2017): the mean of the n - f vectors that Krum likes best."""

    called = "multi_krum"
    besides = 3

    def centre(self, given: Vectors) -> Update:
        return _nearest(given, jnp.maximum(given.n - given.liars, 1))


class GeometricMedian(Robust):
    """The geometric median (Pillutla et al., 2022): smoothed Weiszfeld steps, from the mean of clipped vectors."""

    called = "geometric_median"

    def centre(self, given: Vectors) -> Update:
        first, norm = _norm_bound(given), tree.norms(given.stack)
        smallest = 1e-6 * median(norm, given.counted) + SMALLEST

        def turn(_: Any, at: Update) -> Update:
            away = tree.norms(tree.sub(given.stack, at.delta))
            closeness = jnp.where(given.counted, 1.0 / jnp.maximum(away, smallest), 0.0)
            return _mean(given.stack, fraction(closeness, jnp.sum(closeness)))

        return jax.lax.fori_loop(0, TURNS, turn, Update(first.delta, first.weights))


class CentredClipping(Robust):
    """Centred clipping (Karimireddy et al., 2021): v <- v + mean of the distances to v, each clipped to their median.

    It begins at 0, so its first step is the norm bound; the paper begins at the last round's v, and tunes the radius.
    """

    called = "centred_clipping"

    def centre(self, given: Vectors) -> Update:
        def turn(_: Any, at: Update) -> Update:
            away = tree.norms(tree.sub(given.stack, at.delta))
            short = jnp.minimum(1.0, fraction(median(away, given.counted), away)) * given.even
            keeps = 1.0 - jnp.sum(short)
            return Update(tree.add(tree.combine(short, given.stack), at.delta, keeps), keeps * at.weights + short)

        zero = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), given.stack)
        return jax.lax.fori_loop(0, TURNS, turn, Update(zero, jnp.zeros_like(given.even)))


class NormBound(Robust):
    """The mean of vectors clipped to their median norm (Sun et al., 2019)."""

    of_false = 0  # it bounds liars, and never leaves them out
    called = "norm_bound"

    @property
    def even(self) -> bool:
        return bool(self.bucket == 1)  # a last bucket of fewer replies than the others would have more

    def centre(self, given: Vectors) -> Update:
        return _norm_bound(given)


class FLTrust(Robust):
    """FLTrust (Cao et al., 2021): vectors as long as the server's own update, weighed by their cosine with it."""

    of_false = 0  # the server trusts its own update
    root: int = setting("training samples that the server has, too", whole(1, 10**6), default=100)

    @property
    def own_samples(self) -> int:
        return self.root

    def centre(self, given: Vectors) -> Update:
        assert given.trusted is not None
        own, norm = tree.norm(given.trusted), tree.norms(given.stack)
        cosine = fraction(tree.dots(given.stack, given.trusted), norm * own)
        trust = jnp.where(given.counted, jnp.maximum(cosine, 0.0), 0.0)  # none if it points away from the server's
        weights, kept = fraction(trust, jnp.sum(trust)), fraction(own, norm)
        return _mean(scaled(given.stack, kept), weights)._replace(kept=kept)


ROBUST = Slot(
    "robust",
    Robust,
    (Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, CentredClipping, NormBound, FLTrust),
    "what replaces the mean of the updates, if devices may lie; by default the mean is used",
)


def _trimmed(given: Vectors, trim: Array) -> Update:
    """The mean of each coordinate without the `trim` smallest and the `trim` largest values."""
    n, left = given.n, jnp.maximum(given.n - 2 * trim, 1)

    def kept(leaf: Array) -> Array:
        rank = jnp.argsort(jnp.argsort(jnp.where(tree.over(given.counted, leaf), leaf, jnp.inf), axis=0), axis=0)
        return jnp.where((rank >= trim) & (rank < n - trim), 1.0 / left, 0.0)

    weights = jax.tree.map(kept, given.stack)
    delta = jax.tree.map(lambda w, leaf: jnp.sum(w * leaf, axis=0), weights, given.stack)
    shares = jax.tree.map(lambda w: jnp.sum(w.reshape(len(w), -1), axis=1), weights)
    return Update(delta, jax.tree.reduce(jnp.add, shares) / tree.size(delta))


def _nearest(given: Vectors, m: Array) -> Update:
    """The mean of the m vectors with the smallest scores of Krum."""
    products = tree.products(given.stack)
    squares = jnp.maximum(jnp.diag(products)[:, None] + jnp.diag(products) - 2 * products, 0.0)
    others = given.counted[None, :] & given.counted[:, None] & ~jnp.eye(len(squares), dtype=bool)
    ordered = jnp.sort(jnp.where(others, squares, jnp.inf), axis=1)
    near = jnp.arange(len(squares)) < jnp.clip(given.n - given.liars - 2, 1, jnp.maximum(given.n - 1, 1))
    score = jnp.sum(jnp.where(near & jnp.isfinite(ordered), ordered, 0.0), axis=1)
    rank = jnp.argsort(jnp.argsort(jnp.where(given.counted, score, jnp.inf)))
    chosen = (given.counted & (rank < m)).astype(jnp.float32)
    return _mean(given.stack, fraction(chosen, jnp.sum(chosen)))


def _norm_bound(given: Vectors) -> Update:
    norm = tree.norms(given.stack)
    kept = jnp.minimum(1.0, fraction(median(norm, given.counted), norm))
    return _mean(scaled(given.stack, kept), given.even)._replace(kept=kept)


def _mean(stack: Params, weights: Array) -> Update:
    return Update(tree.combine(weights, stack), weights)


def check_enough(how: Robust, K: int, different: Callable[[int], int] = int) -> None:
    """Raise unless K devices are enough, of which different(K) are different ones."""
    if isinstance(how.liars, jax.core.Tracer) or how.enough(different(K)):
        return
    least = next((k for k in range(K, MOST + 1) if how.enough(different(k))), None)
    expected = "no K is enough" if least is None else f"should be {least}, the next that is enough,"
    chosen = f"robust={how.name}, robust.liars={float(how.liars):g}"
    chosen += "" if how.bucket == 1 else f", robust.bucket={how.bucket:g}"
    why = "among fewer replies the liars decide"
    if different(K) < K:
        expected = f"should be drawn with select.replacement=False, or {expected.removeprefix('should ')}"
        why = f"{K} draws with replacement are {different(K)} different devices, among which the liars decide"
    raise InputError("select.K", K, f"{expected} with {chosen}: {why}")


def different_devices(N: int, K: int) -> int:
    """How many of N devices K draws with replacement are, on average and by equal chances."""
    return math.floor(N * (1 - (1 - 1 / N) ** K))


def bounded(round: Round) -> Round:
    """The round with updates clipped to their median norm; a reply that is not finite counts 0 times."""
    norm = polar(round.delta, round.times > 0).norm
    counted = (round.times > 0) & jnp.isfinite(norm)
    short = clipped(round.delta, norm, counted, median(norm, counted))
    return round._replace(times=jnp.where(counted, round.times, 0.0), delta=short)


def finite(round: Round) -> Round:
    """The round in which a reply that is not finite counts 0 times."""
    counted = jnp.isfinite(polar(round.delta, round.times > 0).norm)
    return round._replace(times=jnp.where(counted, round.times, 0.0))


def recentred(made: Update, how: Robust, round: Round) -> Update:
    """What a rule made of a round, with a robust centre in place of its mean."""
    sound = finite(round).times > 0
    n = jnp.sum(sound)
    parts = scaled(round.delta, jnp.where(sound, n * made.weights * made.kept, 0.0))
    norm = polar(parts, sound).norm
    counted = sound & jnp.isfinite(norm)
    short = clipped(parts, norm, counted, LARGEST * median(norm, counted))
    false = jnp.ceil(how.liars * n - 1e-4).astype(jnp.int32)
    shares, groups = _buckets(round, counted, how.bucket)
    mixed = jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, axes=1), short)
    centred = how.centre(Vectors(mixed, groups, false, round.trusted))
    tree.check_like("robust: the delta of centre(given)", centred.delta, round.params)
    tree.check_like("robust: the weights of centre(given)", centred.weights, made.weights)
    enough = jnp.where(jnp.sum(groups) >= how.needs(false), 1.0, 0.0)
    full = jnp.where(counted, enough * n * made.weights, 0.0)
    weights = full * (centred.weights @ shares)
    kept = fraction(full * made.kept * ((centred.weights * centred.kept) @ shares), weights)
    return Update(jax.tree.map(lambda leaf: enough * leaf, centred.delta), weights, kept)


def _buckets(round: Round, counted: Array, size: Any) -> tuple[Array, Array]:
    """Bucketing (Karimireddy et al., 2022): each reply's part in each mean of `size` random ones; which exist."""
    key = jnp.zeros(2, jnp.uint32) if round.key is None else round.key
    chances = randomness.uniform(randomness.words(key[0], key[1], jnp.arange(len(counted)), 1))[:, 0]
    place = jnp.argsort(jnp.argsort(jnp.where(counted, chances, 2.0)))
    inside = counted & (place // size == jnp.arange(len(counted))[:, None])
    count = jnp.sum(inside, axis=1)
    return fraction(inside.astype(jnp.float32), count[:, None].astype(jnp.float32)), count > 0
