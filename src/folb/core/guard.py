"""Guarded aggregation: a rule's weights are bounded, whatever a device reports.

FOLB weighs a reply by <grad F_k, grad_1 f>, so a device that inflates its gradient pulls the reference grad_1 f its way
and raises its own weight. A guarded rule screens the round, applies the rule, and bounds its weights:

1. a reply with a value or a norm that is not finite is rejected;
2. a reply whose update does not descend on its own gradient, <Delta_k, -grad F_k> > 0, is rejected too; if a memory
   sent the device a shift of its gradients, that counts as part of its gradient;
3. gamma_k is clamped to [0, 1];
4. the norm of Delta_k is clipped to 3 times the median;
5. the reference is the mean (10) of gradients clipped to their median norm, with p_k / P_k clipped to its median;
6. negative weights are dropped: no update is reversed;
7. no weight exceeds cap / K, by water-filling.

K counts all replies that arrived, rejected or not, each as often as its device was drawn: rejecting a reply does not
raise the bound of the others. A device has one bound, however often it was drawn. If fewer than K / cap devices are
left, their weights add up to less than 1: the step is shorter, and the bound still holds.
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
from folb.errors import InputError, check_number
from folb.typing import Params

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

REACH = 3.0  # an update's norm may be this many times the median
SMALLEST = 1e-30  # a vector without a larger entry counts as 0
LARGEST = 1e6  # longest gradient, in median norms: weights are bounded, so a longer one would change nothing


def guard(algorithm: Algorithm, cap: Any = 2.0) -> Algorithm:
    """The algorithm with a guarded rule, and a server step that sees the same screened replies.

    An algorithm that is already guarded keeps its cap. One whose rule uses no gradients of its devices (FedAvg,
    FedProx, most of FedNu) is returned unchanged: a false gradient has no effect on it. Two lies can have an effect,
    and no guard checks them: a number of samples, if averages or draws use it, and the answers to a survey.
    """
    check_number("cap", cap, lambda cap: (cap >= 1) & (cap < jnp.inf), "should be a number of at least 1")
    if not (algorithm.sends("grad") or algorithm.gradient is not None) or is_guarded(algorithm):
        return algorithm
    server, size = algorithm.server, algorithm.step_size
    if getattr(server.apply, "keywords", {}).get("stretch") is not None:
        raise InputError(
            "stretch", algorithm.name, "should be None with the guard: it would stretch the bound c/K, too"
        )
    return replace(
        algorithm,
        rule=guarded(algorithm.rule, cap),
        server=server._replace(apply=Partial(_apply_screened, apply=server.apply)),
        memory=_screening(algorithm.memory),
        step_size=None if size is None else size._replace(update=Partial(_sized_screened, update=size.update)),
        origin=replace(algorithm.origin, settings={**algorithm.origin.settings, "guarded": True, "cap": cap}),
    )


def is_guarded(algorithm: Algorithm) -> bool:
    """Whether the algorithm's rule is guarded."""
    return getattr(algorithm.rule, "func", None) is _guarded


def guarded(rule: Rule, cap: Any = 2.0) -> Rule:
    """`rule` on screened rounds, with weights of at least 0 and at most cap / K.

    The update is the sum of the updates with these weights, and so must be that of `rule`: a rule that makes its update
    in another way, such as a median, cannot be guarded.

    With cap = 1 every device that counts has weight 1/K: the mean (2), if each was drawn once and none is rejected.
    With cap >= K only the screening has an effect. The weights of (9) are not normalised: they keep the scale
    ||grad_1 f||^2 / ||grad_2 f||^2, computed from clipped gradients.
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
    return apply(memory, _bounded(round), update)


def _sized_screened(memory: Any, round: Round, *, update: Any) -> Any:
    return update(memory, _bounded(round))


def _screening(memory: DeviceMemory | None) -> DeviceMemory | None:
    if memory is None:
        return None
    correct = None if memory.correct is None else Partial(_correct_screened, correct=memory.correct)
    return replace(memory, update=Partial(_update_screened, update=memory.update), correct=correct)


def _correct_screened(round: Round, *, correct: Any) -> Params:
    return correct(_bounded(round))


def _update_screened(round: Round, *, update: Any) -> tuple[Any, Any]:
    """A device whose reply is rejected keeps its memory."""
    sound = _bounded(round)
    shared, own = update(sound)
    return shared, jax.vmap(tree.where)(sound.times > 0, own, round.own)


def _bounded(round: Round) -> Round:
    """The screened round for a memory or a server step: gradients in their own unit, clipped as updates are."""
    sound = screened(round)
    assert round.grad is not None
    counted, norm = sound.times > 0, _polar(round.grad, round.times > 0).norm
    shorter = jnp.minimum(1.0, fraction(REACH * median(norm, counted), norm))
    return sound._replace(grad=_scaled(round.grad, jnp.where(counted, shorter, 0.0)))


def screened(round: Round) -> Round:
    """The round after steps 1 to 5: a rejected reply counts 0 times.

    Gradients are in units of their median norm, so that nothing overflows; FOLB's weights do not depend on the unit.
    """
    if round.grad is None:
        raise InputError("uploads", (), "a guarded rule needs the devices' gradients: should have 'grad'")
    delta = _polar(round.delta, round.times > 0)
    grad = _polar(round.grad, round.times > 0)
    moved = delta if round.compared is None else _polar(round.compared, round.times > 0)
    descent = -jax.vmap(tree.dot)(moved.direction, _downhill(round, grad).direction)
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
            jnp.minimum(round.correction, median(round.correction, counted)),  # p_k is the device's own claim
        ),
        second=None if round.second is None else _screened_second(round.second, unit),
    )


def _downhill(round: Round, grad: Polar) -> Polar:
    """What each device was to descend along: its gradient, and the term that a memory sent it."""
    if round.downhill is not None:
        return _polar(round.downhill, round.times > 0)
    if round.shift is None:
        return grad
    return _polar(tree.add(round.grad, round.shift), round.times > 0)


def _screened_second(second: Gradients, unit: Array) -> Gradients:
    """S_2's gradients, clipped to their own median norm, in S_1's unit. S_2 sends no updates to check them against."""
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

    norm: Array  # not finite if a value of the entry is not, or if the norm overflows
    direction: Params  # 0 for an entry that has none


def _polar(stack: Params, wanted: Array) -> Polar:
    """Each entry is divided by its largest value before it is squared: the square of 1e20 overflows 32 bits."""
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
    """One value per entry of a stack, shaped to broadcast over a leaf."""
    return values.reshape((-1,) + (1,) * (leaf.ndim - 1))


def median(values: Array, counted: Array) -> Array:
    """The median of the counted values, each device once. Of two, the smaller: a liar could raise their mean."""
    ordered = jnp.sort(jnp.where(counted, values, jnp.inf))
    n = jnp.sum(counted)
    return jnp.where(n > 0, ordered[jnp.maximum(n - 1, 0) // 2], 0.0)


def water_filled(weights: Array, most: Array | float, total: Array | float) -> Array:
    """min(level * weights, most), with the level that makes them add up to `total`.

    What exceeds `most` goes to the other devices in proportion. If even all at `most` add up to less than `total`, all
    are at `most`.
    """
    weights = fraction(weights, jnp.max(weights))
    ordered = jnp.sort(weights, descending=True)
    rest = jnp.cumsum(ordered[::-1])[::-1]  # sum of the j-th largest and all after it; the smallest are added first
    level = fraction(total - jnp.arange(len(weights)) * most, rest)  # if the largest j are at `most`
    fits = (level * ordered <= most * (1 + 1e-6)) & (rest > 0)
    filled = jnp.minimum(level[jnp.argmax(fits)] * weights, most)
    enough = jnp.any(fits) & (total < most * jnp.sum(weights > 0))
    return jnp.where(weights > 0, jnp.where(enough, filled, most), 0.0)
