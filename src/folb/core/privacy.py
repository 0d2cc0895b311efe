"""Differential privacy of devices: what a round releases is a sum of bounded parts, with Gaussian noise.

Each part that the server adds up has a bound on what one device can add, and noise in proportion to it:

- delta: the updates, clipped to `clip`; in FOLB each times its weight, which is from -1 to 1;
- within: how many updates were no longer than `clip`, less half of the devices, if the clip adapts to a quantile;
- square: the squared lengths of the clipped updates, if the server's step looks at lengths;
- gradient: in FOLB, the gradients or their sketches, clipped to `clip_gradient`;
- importance: in FOLB, the absolute values of the weights.

`noise` is the standard deviation of the noise in bounds of the whole. A part has a share of the whole, and noise of
standard deviation noise bound / sqrt(share). The shares add up to 1, so all parts together are one Gaussian mechanism
with `noise`, though a later part (FOLB's weights) may depend on an earlier one (the released gradient). Sums are
divided by K, the expected number of devices, and never by how many came. What follows sees no more than the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import accountant, randomness, tree
from folb.core.accountant import Rounds
from folb.core.part import FLAG, Part, Range, Slot, more_than, setting
from folb.core.polar import polar, scaled
from folb.core.rules import Round, Rule, Update
from folb.core.shuffle import mixed_words
from folb.core.upload import BOUNDED, SQUARE, WITHIN
from folb.core.vector import shaped
from folb.errors import InputError, check
from folb.typing import Params

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

SHARES = {"within": 0.05, "square": 0.05, "gradient": 0.2, "importance": 0.05}  # of the whole; `delta` has the rest
RATE = 0.2  # of adaptive clipping (Andrew et al., 2021)
TIGHT = 1 - 1e-6  # so that rounding errors do not exceed a bound
LEAST = 0.1  # of K: FOLB divides by no smaller sum of weights, which would be mostly noise
SURE = 6.0  # standard deviations that the noise of a device does not exceed
INSIDE = Range(lambda value: (value > 0) & (value < 1), "should be more than 0 and less than 1")


class Privacy(Part):
    """How an algorithm is private. The fields that are no settings follow from its other parts (`finished`)."""

    needed = ("noise_of",)
    by_devices: ClassVar[bool] = False  # whether what devices send has noise already
    epsilon: float | None = setting(
        "the budget; by default the noise is such that all rounds together spend it; if privacy.noise is set, the run "
        "ends when it is spent",
        more_than(0),
        default=None,
    )
    delta: float = setting("delta, less than 1 / N", INSIDE, default=accountant.DELTA)
    noise: float | None = setting(
        "the standard deviation of the noise on a sum of updates, in units of privacy.clip; by default computed from "
        "privacy.epsilon",
        accountant.NOISE,
        default=None,
    )
    clip: float = setting("the largest norm of an update; longer updates are clipped to it", more_than(0), default=1.0)
    clip_quantile: float | None = setting(
        "adapt privacy.clip to this quantile of the updates' lengths; by default it stays", INSIDE, default=None
    )
    clip_gradient: float | None = setting(
        "for FOLB: the largest norm of a gradient, or of its sketch; by default 1", more_than(0), default=None
    )
    replay: bool = setting(
        "in the simulator: false takes draws and noise from the operating system, so that nobody can "
        "replay the run; true takes them from the seed",
        FLAG,
        default=True,
    )
    scheme: str = field(default="", kw_only=True, metadata={"static": True})  # of accountant.SCHEMES; "": of none
    K: int = field(default=0, kw_only=True, metadata={"static": True})  # devices of a round, or their expected number
    parts: tuple[str, ...] = field(default=(), kw_only=True, metadata={"static": True})  # the sums that are released
    key: Any = field(default=None, kw_only=True)  # two words, by `with_key`

    def noise_of(self, noise: Noise, part: str, there: Array) -> Params:
        """The noise of a sum, before it is scaled; `there` says which slots' devices came."""
        raise NotImplementedError

    def share(self, part: str) -> float:
        """What a part has of the whole."""
        return SHARES.get(part, 1.0 - sum(SHARES.get(other, 0.0) for other in self.parts))

    def bound(self, part: str, clip: Any) -> Any:
        """The largest norm of what one device adds to a sum."""
        return {"delta": clip, "within": 0.5, "gradient": self.clip_gradient}.get(part, 1.0)

    def deviation(self, part: str, clip: Any) -> Any:
        """The standard deviation of the noise in a sum."""
        return self.noise * self.bound(part, clip) / math.sqrt(self.share(part))

    def rounds(self, N: int) -> Rounds:
        """What the accountant is told, if there are N devices."""
        return Rounds(self.scheme, self.K, N, float(self.noise))  # type: ignore[arg-type]


class Central(Privacy):
    """The server adds the noise to the sum."""

    def noise_of(self, noise: Noise, part: str, there: Array) -> Params:
        return noise.server[part]


class Distributed(Privacy):
    """Each device adds its share of the noise to what it sends."""

    by_devices = True

    def noise_of(self, noise: Noise, part: str, there: Array) -> Params:
        """Amplification holds only while nobody knows how many devices came: so the server adds the others' shares."""
        slots = len(there)
        # whole numbers are subtracted: 1 - K (1/K), as XLA computes 1 - K/K, may be less than 0
        own = jax.tree.map(lambda leaf: leaf * jnp.sqrt((slots - jnp.sum(there)) / slots), noise.server[part])
        if noise.devices is None:
            return own
        return tree.add(own, tree.combine(there / math.sqrt(slots), noise.devices[part]))


PRIVACIES = Slot(
    "privacy",
    Privacy,
    (Central, Distributed),
    "differential privacy of devices (docs/privacy.md): who adds the noise, the server or the devices",
)


class Noise(NamedTuple):
    """Standard normal numbers for each part: the server's, and those of each slot's device, stacked."""

    server: dict[str, Any]
    devices: dict[str, Any] | None = None  # None: the server adds all noise, or replies came with their devices'


class Released(NamedTuple):
    """What a private round releases: its update, that update in a round without replies, and the next clip."""

    update: Update
    round: Round
    clip: Any


def finished(algorithm: Algorithm) -> Algorithm:
    """The algorithm with all that its privacy depends on: the draws, the sums, and what devices send for them."""
    private = algorithm.privacy
    if private is None:
        return algorithm
    weighs, size = algorithm.rule.alone is not None, algorithm.step_size
    parts = {
        "delta": True,
        "within": private.clip_quantile is not None,
        "square": algorithm.server.by_lengths or (size is not None and size.by_lengths),
        "gradient": weighs,
        "importance": weighs,
    }
    made = replace(
        private,
        clip_gradient=1.0 if weighs and private.clip_gradient is None else private.clip_gradient,
        scheme=algorithm.selection.sampling.scheme or "",
        K=algorithm.selection.expected,
        parts=tuple(part for part, wanted in parts.items() if wanted),
    )
    asked = tuple(one for name, one in BOUNDED.items() if name in made.parts)
    return with_clip(algorithm.but(privacy=made, uploads=(*algorithm.uploads, *asked)), ())


def calibrated(algorithm: Algorithm, N: int, rounds: int) -> Algorithm:
    """The algorithm with the noise for its budget, if none was given. Its numbers are checked for N devices."""
    private = algorithm.privacy
    if private is None:
        return algorithm
    epsilon, delta = None if private.epsilon is None else float(private.epsilon), float(private.delta)
    accountant.check_budget(epsilon, delta, private.K, N)
    if private.noise is not None or epsilon is None:
        return algorithm
    noise = accountant.noise_for(epsilon, delta, private.scheme, private.K, N, rounds)
    return algorithm.but(privacy=replace(private, noise=noise))


def affordable(algorithm: Algorithm, N: int, rounds: int) -> int:
    """How many of `rounds` rounds the budget of a calibrated algorithm allows."""
    private = algorithm.privacy
    if private is None or private.epsilon is None:
        return rounds
    allowed = private.rounds(N).within(float(private.epsilon), float(private.delta), rounds)
    if allowed == 0:
        first = private.rounds(N).epsilon(1, float(private.delta))
        raise InputError("privacy.epsilon", private.epsilon, f"should be more: the first round spends {first:.3g}")
    return allowed


def spent(algorithm: Algorithm, N: int, rounds: int) -> float:
    """The epsilon of so many rounds of a calibrated algorithm."""
    assert algorithm.privacy is not None
    return algorithm.privacy.rounds(N).epsilon(rounds, float(algorithm.privacy.delta))


def with_clip(algorithm: Algorithm, clip: Any) -> Algorithm:
    """The algorithm with the clip for its devices in the next round: `clip` of the state, or () if it is fixed."""
    if algorithm.privacy is None:
        return algorithm
    now = algorithm.privacy.clip if isinstance(clip, tuple) else clip
    bounded = [replace(one, numbers={"clip": now}) if one.name in BOUNDED else one for one in algorithm.uploads]
    return algorithm.but(privacy=replace(algorithm.privacy, clip=now), uploads=tuple(bounded))


def with_key(algorithm: Algorithm, drawn: Callable[[], Any]) -> Algorithm:
    """The algorithm for one run. If draws and noise are secret, they follow from two words, drawn()."""
    private = algorithm.privacy
    if private is None or private.replay:
        return algorithm
    return algorithm.but(privacy=replace(private, key=tuple(drawn())))


def without_key(algorithm: Algorithm) -> Algorithm:
    """What the runs of an algorithm have in common."""
    private = algorithm.privacy
    return algorithm if private is None else algorithm.but(privacy=replace(private, key=None))


def draw_words(algorithm: Algorithm, seed: Any, t: Any) -> tuple[Any, Any]:
    """The two words that the draws and the noise of round t follow from: the seed and t, or else words of the key."""
    if algorithm.privacy is None or algorithm.privacy.replay:
        return seed, t
    expected = "should be True here, where no run has a key from the operating system"
    check("privacy.replay", False, algorithm.privacy.key is not None, expected)
    first, second = algorithm.privacy.key
    own = randomness.words(first, second, t, 2)
    return own[0], own[1]


def shapes(algorithm: Algorithm, round: Round) -> dict[str, Any]:
    """The shape of each part of a round's noise."""
    assert algorithm.privacy is not None
    number, grad = jax.ShapeDtypeStruct((), jnp.float32), None
    if "gradient" in algorithm.privacy.parts:  # itself, or a sketch
        stack = jax.eval_shape(algorithm.gradient.view, round).grad
        grad = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    return {part: {"delta": round.params, "gradient": grad}.get(part, number) for part in algorithm.privacy.parts}


def normals(shapes: dict[str, Any], words: Array) -> dict[str, Any]:
    """Standard normal numbers in these shapes, from two random words."""
    key = randomness.key_of(words)
    leaves, structure = jax.tree.flatten(shapes)
    drawn = [jax.random.normal(jax.random.fold_in(key, i), leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def quick_normals(shapes: dict[str, Any], words: Array) -> dict[str, Any]:
    """The same for each of many devices: bits from two rounds of mixing, at a fifth of the cost."""
    numbers = mixed_words(words, tree.size(shapes))
    return shaped(math.sqrt(2) * jax.lax.erf_inv(2 * randomness.uniform(numbers) - 1), shapes)


def with_noise(algorithm: Algorithm, round: Round, seed: Any) -> Round:
    """The round with its noise, by `draw_words` and by device; with the noise of its devices, too, if it names them."""
    private = algorithm.privacy
    if private is None:
        return round
    assert round.t is not None
    wanted, own = shapes(algorithm, round), draw_words(algorithm, seed, round.t)
    server = normals(wanted, randomness.words(*own, randomness.NOISE, 2))
    if not private.by_devices or round.device is None:
        return round._replace(noise=Noise(server))
    # the first four words of a device are for its batches and its effort
    words = randomness.words(*own, round.device, 6)[:, 4:]
    # mixing can be undone: who knows some of its numbers could find the key, which the block cipher does not give away
    how = quick_normals if private.replay else normals
    return round._replace(noise=Noise(server, jax.vmap(lambda one: how(wanted, one))(words)))


def release(algorithm: Algorithm, round: Round) -> Released:
    """The private update of a round of an algorithm `with_clip`. Every use of what devices sent is in here."""
    private = algorithm.privacy
    assert private is not None and round.noise is not None
    g = None
    if "gradient" in private.parts:
        g = tree.divided(_noisy(private, "gradient", gradient_sum(private, round), round), private.K)
    total = {part: _noisy(private, part, known, round) for part, known in sums(algorithm, round, g).items()}
    size = jnp.maximum(total["importance"], LEAST * private.K) if "importance" in total else private.K
    update = Update(tree.divided(total["delta"], size), jnp.where(round.times > 0, 1.0 / private.K, 0.0))
    # weights that do not show which devices replied
    blind = update._replace(weights=jnp.full(len(round.times), 1.0 / private.K))
    square = None
    if SQUARE.name in total:
        square = jnp.maximum(total[SQUARE.name] / private.K, 0.0) * jnp.float32(private.clip) ** 2
    clip: Any = ()
    if private.clip_quantile is not None:
        share = total[WITHIN.name] / private.K + 0.5
        clip = jnp.float32(private.clip) * jnp.exp(-RATE * (jnp.clip(share, 0.0, 1.0) - private.clip_quantile))
    blank: Any = None
    alone = Round(round.params, blank, blank, blank, blank, t=round.t, N=round.N, lr=round.lr, key=round.key)
    added = tree.size(round.params) * (private.deviation("delta", private.clip) / size) ** 2
    seen = alone._replace(start=round.start, mean_square=square, noise_square=added, update=blind)
    return Released(update, seen, clip)


def gradient_sum(private: Privacy, round: Round) -> Params:
    """The sum of the clipped gradients, before its noise."""
    return tree.total(_clipped(private, "gradient", round))


def sums(algorithm: Algorithm, round: Round, g: Params | None) -> dict[str, Any]:
    """The sum of each other part, before its noise; `g` is the mean gradient as it was released, in FOLB."""
    private = algorithm.privacy
    assert private is not None
    there, delta, total = round.times > 0, _clipped(private, "delta", round), {}
    if g is not None:
        grad = _clipped(private, "gradient", round)
        weights = jnp.where(there, _weights(algorithm.rule, private, grad, g, round.gamma), 0.0)
        delta = scaled(delta, weights)
        total["importance"] = jnp.sum(jnp.abs(weights))
    total["delta"] = tree.total(delta)
    for name, middle in ((WITHIN.name, 0.5), (SQUARE.name, 0.0)):
        if name in private.parts:
            spread = private.deviation(name, private.clip) / math.sqrt(private.K)
            beyond = SURE * spread if _came_noisy(private, round) else 0.0
            sent = jnp.clip(jnp.nan_to_num(round.sent[name]), -beyond, 1.0 + beyond)
            total[name] = jnp.sum(jnp.where(there, sent - middle, 0.0))
    return total


def _came_noisy(private: Privacy, round: Round) -> bool:
    """Whether the replies have their devices' noise already: those of real devices."""
    return private.by_devices and round.noise is not None and round.noise.devices is None


def _clipped(private: Privacy, part: str, round: Round) -> Params:
    """Each entry shortened to the part's bound; one that is not finite, or did not come, is 0."""
    most, there = private.bound(part, private.clip) * TIGHT, round.times > 0
    stack = round.delta if part == "delta" else round.grad
    own = polar(stack, there)
    if _came_noisy(private, round):  # shortened to what a clipped update with noise can have
        d = tree.size(stack) // len(there)
        spread = private.deviation(part, private.clip) / math.sqrt(len(round.times))
        most = most + spread * (math.sqrt(d) + SURE)
    length = jnp.where(there & jnp.isfinite(own.norm), jnp.minimum(own.norm, most), 0.0)
    return scaled(own.direction, length)


def _noisy(private: Privacy, part: str, total: Params, round: Round) -> Params:
    assert round.noise is not None
    return tree.add(total, private.noise_of(round.noise, part, round.times > 0), private.deviation(part, private.clip))


def _weights(rule: Rule, private: Privacy, grad: Params, g: Params, gamma: Array | None) -> Array:
    """FOLB's weight of each device, from -1 to 1: its importance over the squared length of `g`, which is released."""
    d = tree.size(g)
    added = d * (private.deviation("gradient", private.clip) / private.K) ** 2  # the length of the noise in `g`
    square = jnp.maximum(tree.dot(g, g) - added, added * math.sqrt(2 / d))
    gamma = None if gamma is None else jnp.clip(jnp.nan_to_num(gamma), 0.0, 1.0)
    importance = rule.importance(tree.dots(grad, g), gamma, square)
    return jnp.clip(jnp.nan_to_num(importance / square), -1.0, 1.0)
