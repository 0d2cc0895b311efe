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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, tree
from folb.core.polar import SMALLEST, clipped, median, over, polar, scaled
from folb.core.rules import Round, Update, fraction
from folb.core.selection import MOST
from folb.errors import InputError, check_number, check_whole, choose
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
        """How many count."""
        return jnp.sum(self.counted)

    @property
    def even(self) -> Array:
        """Weights of a mean."""
        return fraction(self.counted.astype(jnp.float32), self.n)


Centre = Callable[[Vectors], Update]  # the weights are the vectors' shares


def coordinate_median(given: Vectors) -> Update:
    """The median of each coordinate (Yin et al., 2018). A device's weight is its share of the coordinates."""
    return _trimmed(given, (given.n - 1) // 2)


def trimmed_mean(given: Vectors) -> Update:
    """The mean of each coordinate without its largest and smallest values (Yin et al., 2018), as many as may lie."""
    return _trimmed(given, jnp.minimum(given.liars, (given.n - 1) // 2))


def _trimmed(given: Vectors, trim: Array) -> Update:
    """The mean of each coordinate without the `trim` smallest and the `trim` largest values."""
    n, left = given.n, jnp.maximum(given.n - 2 * trim, 1)

    def kept(leaf: Array) -> Array:
        rank = jnp.argsort(jnp.argsort(jnp.where(over(given.counted, leaf), leaf, jnp.inf), axis=0), axis=0)
        return jnp.where((rank >= trim) & (rank < n - trim), 1.0 / left, 0.0)

    weights = jax.tree.map(kept, given.stack)
    delta = jax.tree.map(lambda w, leaf: jnp.sum(w * leaf, axis=0), weights, given.stack)
    shares = jax.tree.map(lambda w: jnp.sum(w.reshape(len(w), -1), axis=1), weights)
    return Update(delta, jax.tree.reduce(jnp.add, shares) / tree.size(delta))


def krum(given: Vectors) -> Update:
    """Krum (Blanchard et al., 2017): the vector with the smallest sum of squared distances to its n - f - 2 nearest."""
    return _nearest(given, jnp.int32(1))


def multi_krum(given: Vectors) -> Update:
    """Multi-Krum (Blanchard et al., 2017): the mean of the n - f vectors that Krum likes best."""
    return _nearest(given, jnp.maximum(given.n - given.liars, 1))


def _nearest(given: Vectors, m: Array) -> Update:
    """The mean of the m vectors with the smallest scores of Krum."""
    pairs = jax.tree.map(lambda leaf: leaf.reshape(len(leaf), -1) @ leaf.reshape(len(leaf), -1).T, given.stack)
    products = jax.tree.reduce(jnp.add, pairs)
    squares = jnp.maximum(jnp.diag(products)[:, None] + jnp.diag(products) - 2 * products, 0.0)
    others = given.counted[None, :] & given.counted[:, None] & ~jnp.eye(len(squares), dtype=bool)
    ordered = jnp.sort(jnp.where(others, squares, jnp.inf), axis=1)
    near = jnp.arange(len(squares)) < jnp.clip(given.n - given.liars - 2, 1, jnp.maximum(given.n - 1, 1))
    score = jnp.sum(jnp.where(near & jnp.isfinite(ordered), ordered, 0.0), axis=1)
    rank = jnp.argsort(jnp.argsort(jnp.where(given.counted, score, jnp.inf)))
    chosen = (given.counted & (rank < m)).astype(jnp.float32)
    return _mean(given.stack, fraction(chosen, jnp.sum(chosen)))


def geometric_median(given: Vectors) -> Update:
    """The geometric median (Pillutla et al., 2022): smoothed Weiszfeld steps, from the mean of clipped vectors."""
    first, norm = norm_bound(given), tree.norms(given.stack)
    smallest = 1e-6 * median(norm, given.counted) + SMALLEST

    def turn(_: Any, at: Update) -> Update:
        closeness = jnp.where(given.counted, 1.0 / jnp.maximum(_distances(given.stack, at.delta), smallest), 0.0)
        return _mean(given.stack, fraction(closeness, jnp.sum(closeness)))

    return jax.lax.fori_loop(0, TURNS, turn, Update(first.delta, first.weights))


def centred_clipping(given: Vectors) -> Update:
    """Centred clipping (Karimireddy et al., 2021): v <- v + mean of the distances to v, each clipped to their median.

    It begins at 0, so its first step is the norm bound; the paper begins at the last round's v, and tunes the radius.
    """

    def turn(_: Any, at: Update) -> Update:
        away = _distances(given.stack, at.delta)
        short = jnp.minimum(1.0, fraction(median(away, given.counted), away)) * given.even
        keeps = 1.0 - jnp.sum(short)
        delta = tree.add(tree.combine(short, given.stack), at.delta, keeps)
        return Update(delta, keeps * at.weights + short)

    return jax.lax.fori_loop(0, TURNS, turn, Update(_zero(given.stack), jnp.zeros_like(given.even)))


def norm_bound(given: Vectors) -> Update:
    """The mean of vectors clipped to their median norm (Sun et al., 2019)."""
    norm = tree.norms(given.stack)
    kept = jnp.minimum(1.0, fraction(median(norm, given.counted), norm))
    return _mean(scaled(given.stack, kept), given.even)._replace(kept=kept)


def fltrust(given: Vectors) -> Update:
    """FLTrust (Cao et al., 2021): vectors as long as the server's own update, weighed by their cosine with it."""
    assert given.trusted is not None
    own, norm = tree.norm(given.trusted), tree.norms(given.stack)
    cosine = fraction(tree.dots(given.stack, given.trusted), norm * own)
    trust = jnp.where(given.counted, jnp.maximum(cosine, 0.0), 0.0)
    weights, kept = fraction(trust, jnp.sum(trust)), fraction(own, norm)
    return _mean(scaled(given.stack, kept), weights)._replace(kept=kept)


def _mean(stack: Params, weights: Array) -> Update:
    return Update(tree.combine(weights, stack), weights)


def _distances(stack: Params, centre: Params) -> Array:
    return tree.norms(jax.tree.map(jnp.subtract, stack, centre))


def _zero(stack: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), stack)


def _for_a_majority(f: Any) -> Any:
    return 2 * f + 1


def _for_krum(f: Any) -> Any:
    return 2 * f + 3


def _one(f: Any) -> Any:
    return 1


class KnownCentre(NamedTuple):
    """A centre, and what others must know of it."""

    centre: Centre
    needs: Callable[[Any], Any]  # f -> how many vectors it needs to hold against f false ones
    even: bool = False  # whether no vector has more than an even share of it


CENTRES = {
    "median": KnownCentre(coordinate_median, _for_a_majority),
    "trimmed_mean": KnownCentre(trimmed_mean, _for_a_majority),
    "krum": KnownCentre(krum, _for_krum),
    "multi_krum": KnownCentre(multi_krum, _for_krum),
    "geometric_median": KnownCentre(geometric_median, _for_a_majority),
    "centred_clipping": KnownCentre(centred_clipping, _for_a_majority),
    "norm_bound": KnownCentre(norm_bound, _one, even=True),
    "fltrust": KnownCentre(fltrust, _one),
}
ROOT = 100  # samples of the server, for FLTrust, unless set


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Robust:
    """A centre in place of a rule's mean."""

    name: str = field(metadata={"static": True})
    liars: Any = 0.2  # the share of devices that may lie
    bucket: Any = 1.0  # replies are first averaged in random groups of this size

    @property
    def even(self) -> bool:
        """Whether no reply has more than an even share of the centre."""
        # the last bucket may have fewer replies than the others, which then weigh more
        return CENTRES[self.name].even and bool(self.bucket == 1)

    def enough(self, replies: int) -> bool:
        """Whether so many replies, each of another device, are enough."""
        return math.ceil(replies / self.bucket) >= CENTRES[self.name].needs(_most_liars(self.liars, replies))


def robust(name: str | None, liars: Any, bucket: Any, K: int) -> Robust | None:
    """A robust centre by its name, for rounds of K devices; None leaves the mean."""
    for setting, value in (("liars", liars), ("bucket", bucket)):
        if value is not None and name is None:
            raise InputError(setting, value, "is for a robust rule; robust is none")
    if name is None:
        return None
    choose("robust", name, CENTRES)
    liars = 0.2 if liars is None else liars
    check_number("liars", liars, lambda liars: (liars >= 0) & (liars < 0.5), "should be at least 0 and less than 0.5")
    if bucket is not None:
        check_whole("bucket", bucket, 1, 10**4)
    made = Robust(name, liars, 1.0 if bucket is None else float(bucket))
    check_enough(made, K)
    return made


def check_enough(how: Robust, K: int, different: Callable[[int], int] = int) -> None:
    """Raise unless K devices are enough, of which different(K) are different ones."""
    if isinstance(how.liars, jax.core.Tracer) or how.enough(different(K)):
        return
    least = next((k for k in range(K, MOST + 1) if how.enough(different(k))), None)
    expected = "no K is enough" if least is None else f"should be {least}, the next that is enough,"
    found = f"robust={how.name}, liars={float(how.liars):g}" + ("" if how.bucket == 1 else f", bucket={how.bucket:g}")
    why = "among fewer replies the liars decide"
    if different(K) < K:
        expected = f"should be drawn with replacement=False, or {expected.removeprefix('should ')}"
        why = f"{K} draws with replacement are {different(K)} different devices, among which the liars decide"
    raise InputError("K", K, f"{expected} with {found}: {why}")


def different_devices(N: int, K: int) -> int:
    """How many of N devices K draws with replacement are, on average and by equal chances."""
    return math.floor(N * (1 - (1 - 1 / N) ** K))


def _most_liars(liars: Any, n: Any) -> Any:
    """How many of n replies may be false."""
    if isinstance(n, int):
        return math.ceil(liars * n - 1e-4)
    return jnp.ceil(liars * n - 1e-4).astype(jnp.int32)


def root(centre: str | None, samples: int | None) -> int | None:
    """How many samples the server needs for a centre; None if it needs none."""
    if centre is not None and choose("robust", centre, CENTRES) == "fltrust":
        check_whole("root", ROOT if samples is None else samples, 1, 10**6)
        return ROOT if samples is None else int(samples)
    if samples is not None:
        raise InputError("root", samples, f"is for robust=fltrust; robust is {'none' if centre is None else centre}")
    return None


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
    known, sound = CENTRES[how.name], finite(round)
    n = jnp.sum(sound.times > 0)
    parts = scaled(round.delta, jnp.where(sound.times > 0, n * made.weights * made.kept, 0.0))
    norm = polar(parts, sound.times > 0).norm
    counted = (sound.times > 0) & jnp.isfinite(norm)
    short = clipped(parts, norm, counted, LARGEST * median(norm, counted))
    false = _most_liars(how.liars, n)
    shares, groups = _buckets(round, counted, how.bucket)
    mixed = jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, axes=1), short)
    found = known.centre(Vectors(mixed, groups, false, round.trusted))
    enough = jnp.where(jnp.sum(groups) >= known.needs(false), 1.0, 0.0)
    whole = jnp.where(counted, enough * n * made.weights, 0.0)
    weights = whole * (found.weights @ shares)
    kept = fraction(whole * made.kept * ((found.weights * found.kept) @ shares), weights)
    return Update(jax.tree.map(lambda leaf: enough * leaf, found.delta), weights, kept)


def _buckets(round: Round, counted: Array, size: Any) -> tuple[Array, Array]:
    """Bucketing (Karimireddy et al., 2022): the part of each reply in each bucket, a mean of `size` random replies.

    The second result says which buckets exist. With size 1 each reply is alone.
    """
    key = jnp.zeros(2, jnp.uint32) if round.key is None else round.key
    chances = randomness.uniform(randomness.words(key[0], key[1], jnp.arange(len(counted)), 1))[:, 0]
    place = jnp.argsort(jnp.argsort(jnp.where(counted, chances, 2.0)))
    inside = counted & (place // size == jnp.arange(len(counted))[:, None])
    count = jnp.sum(inside, axis=1)
    return fraction(inside.astype(jnp.float32), count[:, None].astype(jnp.float32)), count > 0
