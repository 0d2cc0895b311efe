"""Guarded aggregation: a rule's weights, bounded whatever a device reports.

FOLB weighs a reply by <grad F_k, grad_1 f>, so a device that inflates its gradient buys both the reference
grad_1 f and its own weight. A guarded rule is the rule itself on a round that has been screened, its weights bounded:

1. a reply with a value that is not finite, or a norm that is not, is refused;
2. so is one whose update does not descend on its own gradient, <Delta_k, -grad F_k> > 0;
3. gamma_k is clamped to [0, 1];
4. the norm of Delta_k is clipped to 3 times the median;
5. the reference is the mean (10) of gradients clipped to their median norm, p_k / P_k to its median;
6. negative weights are dropped, not turned round;
7. no weight exceeds cap / K, by water-filling.

K is what arrived, refused or not, each as often as it was drawn: a refusal raises nobody's bound. The bound is one
device's, however often it was drawn. Where fewer than K / cap devices are left their weights add up to less than 1:
the step is shorter, and the bound holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.memory import DeviceMemory
from folb.core.rules import Gradients, Round, Rule, Update, fraction, gradient_estimate, weighted
from folb.core.server_step import ServerStep
from folb.errors import InputError, check
from folb.typing import Params

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

REACH = 3.0  # an update may have this many times the median norm
SMALLEST = 1e-30  # a vector without a larger entry is taken for 0
LARGEST = 1e6  # median norms that a gradient counts for, at most: with any bound on weights, as good as infinitely many


def guard(algorithm: Algorithm, cap: Any = 2.0) -> Algorithm:
    """The algorithm with its rule guarded, and a server step that sees the replies as the rule did.

    One that is guarded already keeps its own cap. One whose rule uses no gradients of its devices (FedAvg, FedProx,
    most of FedNu) comes back as it is: a gradient buys nothing in it. A number of samples does where they are what
    averages or draws go by, and so does what a survey is told: no guard checks those.
    """
    check("cap", cap, lambda cap: (cap >= 1) & (cap < jnp.inf), "should be a number of at least 1")
    if not algorithm.sends("grad") or is_guarded(algorithm):
        return algorithm
    return replace(
        algorithm,
        rule=guarded(algorithm.rule, cap),
        server=ServerStep(algorithm.server.init, Partial(_apply_screened, apply=algorithm.server.apply)),
        memory=_screening(algorithm.memory),
        origin=replace(algorithm.origin, settings={**algorithm.origin.settings, "guarded": True, "cap": cap}),
    )


def is_guarded(algorithm: Algorithm) -> bool:
    """Whether the algorithm's rule is a guarded one."""
    return getattr(algorithm.rule, "func", None) is _guarded


def guarded(rule: Rule, cap: Any = 2.0) -> Rule:
    """`rule` on screened rounds, with weights of at least 0 and at most cap / K.

    With cap = 1 every device that counts has 1/K, as in the mean (2) where all were drawn once and none is refused;
    from cap = K on only the screening is left. (9), whose
    weights are not normalised, keeps its scale ||grad_1 f||^2 / ||grad_2 f||^2, but of clipped gradients.
    """
    return Partial(_guarded, rule=rule if isinstance(rule, Partial) else Partial(rule), cap=cap)


def _guarded(round: Round, *, rule: Rule, cap: Any) -> Update:
    sound = screened(round)
    total: Array | float = 1.0
    if sound.second is not None:
        g2 = gradient_estimate(sound.second.grad, sound.second.times, sound.second.correction)
        total = fraction(tree.dot(sound.reference, sound.reference), tree.dot(g2, g2))
    most = cap / jnp.maximum(jnp.sum(round.times) if round.K is None else round.K, 1.0)
    return weighted(sound, water_filled(jnp.maximum(rule(sound).weights, 0.0), most, total))


def _apply_screened(memory: Any, round: Round, update: Update, *, apply: Any) -> tuple[Params, Any]:
    return apply(memory, screened(round), update)


def _screening(memory: DeviceMemory | None) -> DeviceMemory | None:
    return None if memory is None else replace(memory, update=Partial(_update_screened, update=memory.update))


def _update_screened(round: Round, *, update: Any) -> tuple[Any, Any]:
    """A device whose reply is refused keeps its memory."""
    sound = screened(round)
    shared, own = update(sound)
    return shared, jax.vmap(tree.where)(sound.times > 0, own, round.own)


def screened(round: Round) -> Round:
    """The round after steps 1 to 5: a reply that was refused counts 0 times.

    Gradients are in units of their median norm, in which nothing overflows; FOLB's weights do not depend on it.
    """
    if round.grad is None:
        raise InputError("uploads", (), "a guarded rule needs the devices' gradients: should have 'grad'")
    delta = _polar(round.delta, round.times > 0)
    grad = _polar(round.grad, round.times > 0)
    descent = -jax.vmap(tree.dot)(delta.direction, grad.direction)
    counted = jnp.isfinite(delta.norm) & jnp.isfinite(grad.norm) & (descent > 0)
    gamma = round.gamma
    if gamma is not None:
        counted &= jnp.isfinite(gamma)
        gamma = jnp.where(counted, jnp.clip(gamma, 0.0, 1.0), 0.0)
    times = jnp.where(counted, round.times, 0.0)
    shorter = jnp.minimum(1.0, fraction(REACH * median(delta.norm, counted), delta.norm))
    unit = median(grad.norm, counted)
    length = jnp.where(counted, fraction(grad.norm, unit), 0.0)
    return round._replace(
        times=times,
        delta=_scaled(round.delta, jnp.where(counted, shorter, 0.0)),
        grad=_scaled(grad.direction, jnp.minimum(length, LARGEST)),
        gamma=gamma,
        reference=gradient_estimate(
            _scaled(grad.direction, jnp.minimum(length, 1.0)),
            times,
            jnp.minimum(round.correction, median(round.correction, counted)),  # p_k is what the device says it has
        ),
        second=None if round.second is None else _screened_second(round.second, unit),
    )


def _screened_second(second: Gradients, unit: Array) -> Gradients:
    """S_2's gradients, clipped to their own median norm, in S_1's unit. It sends no update to hold them against."""
    grad = _polar(second.grad, second.times > 0)
    counted = jnp.isfinite(grad.norm) & (grad.norm > 0)
    length = jnp.minimum(grad.norm, median(grad.norm, counted))
    return second._replace(
        grad=_scaled(grad.direction, jnp.where(counted, jnp.minimum(fraction(length, unit), LARGEST), 0.0)),
        times=jnp.where(counted, second.times, 0.0),
        correction=jnp.minimum(second.correction, median(second.correction, counted)),
    )


class Polar(NamedTuple):
    """The entries of a stack as norms and directions."""

    norm: Array  # not finite where a value of the entry is not, or where it does not fit
    direction: Params  # 0 where there is none


def _polar(stack: Params, wanted: Array) -> Polar:
    """Each entry divided by its largest value before it is squared: squares of 1e20 do not fit into 32 bits."""
    finite = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf), axis=_inner(leaf)), stack)
    fine = wanted & jax.tree.reduce(jnp.logical_and, finite)
    kept = jax.tree.map(lambda leaf: jnp.where(_over(fine, leaf), leaf, 0), stack)
    parts = jax.tree.map(lambda leaf: jnp.max(jnp.abs(leaf), axis=_inner(leaf), initial=0.0), kept)
    largest = jax.tree.reduce(jnp.maximum, parts)
    some = largest > SMALLEST
    small = jax.tree.map(
        lambda leaf: jnp.where(_over(some, leaf), leaf / _over(jnp.where(some, largest, 1.0), leaf), 0), kept
    )
    norms = tree.norms(small)
    direction = _scaled(small, fraction(jnp.ones_like(norms), norms))
    return Polar(jnp.where(wanted & ~fine, jnp.inf, largest * norms), direction)


def _scaled(stack: Params, factors: Array) -> Params:
    """factor_k a_k; an entry whose factor is 0 is 0, whatever it holds."""
    return jax.tree.map(lambda leaf: jnp.where(_over(factors == 0, leaf), 0, _over(factors, leaf) * leaf), stack)


def _inner(leaf: Array) -> tuple[int, ...]:
    return tuple(range(1, leaf.ndim))


def _over(values: Array, leaf: Array) -> Array:
    """A value for each entry of a stack, in the shape of a leaf of it."""
    return values.reshape((-1,) + (1,) * (leaf.ndim - 1))


def median(values: Array, counted: Array) -> Array:
    """The middle of those counted, each device once; of two the smaller, for one liar in two could raise their mean."""
    ordered = jnp.sort(jnp.where(counted, values, jnp.inf))
    n = jnp.sum(counted)
    return jnp.where(n > 0, ordered[jnp.maximum(n - 1, 0) // 2], 0.0)


def water_filled(weights: Array, most: Array | float, total: Array | float) -> Array:
    """min(level * weights, most), the level being such that they add up to `total`.

    What one device may not have goes to the others in proportion. Where even all at `most` add up to less, all are.
    """
    weights = fraction(weights, jnp.max(weights))
    ordered = jnp.sort(weights, descending=True)
    rest = jnp.cumsum(ordered[::-1])[::-1]  # of the j-th largest and all after it, the smallest added first
    level = fraction(total - jnp.arange(len(weights)) * most, rest)  # if the largest j are at `most`
    fits = (level * ordered <= most * (1 + 1e-6)) & (rest > 0)
    filled = jnp.minimum(level[jnp.argmax(fits)] * weights, most)
    enough = jnp.any(fits) & (total < most * jnp.sum(weights > 0))
    return jnp.where(weights > 0, jnp.where(enough, filled, most), 0.0)
