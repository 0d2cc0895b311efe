"""Guarded aggregation: a rule's weights are bounded, whatever a device reports.

FOLB weighs a reply by <grad F_k, grad_1 f>, so a device that inflates its gradient pulls the reference grad_1 f its way
and raises its own weight. A guarded rule screens the round, applies the rule, and bounds its weights:

1. a reply with a value or a norm that is not finite is rejected;
2. a reply whose update does not descend on its own gradient, <Delta_k, -grad F_k> > 0, is rejected too; if a memory
   sent the device a shift of its gradients, that counts as part of its gradient;
3. gamma_k is clamped to [0, 1];
4. the reference is the mean (10) of gradients clipped to their median norm, with p_k / P_k clipped to its median;
5. negative weights are dropped: no update is reversed;
6. no weight exceeds cap / K, by water-filling; it does not exceed 1 / K if only the device's own gradient vouches for
   it: if <grad F_k, g> <= 0, where g is the reference without the part of device k;
7. no weight times the length of its update exceeds m / n, where m is the median length and n the number of devices
   that replied, or K / cap if fewer did: a device with more weight has a shorter update.

K counts all draws of the round, whether a reply came or not: neither a rejected reply nor a lost one raises the bound
of the others. A device has one bound, however often it was drawn. If fewer than K / cap devices are left, their weights
add up to less than 1: the step is shorter, and the bound still holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import Part, Slot, at_least, setting
from folb.core.polar import clipped, median, polar, scaled
from folb.core.rules import Gradients, Round, Rule, Update, fraction, gradient_estimate, weighted
from folb.core.server_step import SERVERS
from folb.errors import InputError, check

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

OTHERWISE = "or set guard=none"
LARGEST = 1e6  # longest gradient, in median norms: weights are bounded, so a longer one would change nothing


class Guard(Part):
    """The bound c/K on a device's weight, around a rule; c is the cap."""

    called = "on"
    cap: float = setting("c of the bound c/K on a device's weight", at_least(1), default=2.0)

    def update(self, rule: Rule, round: Round) -> Update:
        """The sum of the updates with bounded weights: a rule that makes it in another way cannot be guarded.

        The weights of (9) are not normalised: they keep the scale ||grad_1 f||^2 / ||grad_2 f||^2 of clipped gradients.
        """
        sound = screened(round)
        total: Array | float = 1.0
        if sound.second is not None:
            g2 = gradient_estimate(sound.second.grad, sound.second.times, sound.second.correction)
            total = fraction(tree.dot(sound.reference, sound.reference), tree.dot(g2, g2))
        K = len(round.times)
        most = jnp.where(_vouched(sound), self.cap, 1.0) / K
        weights = water_filled(jnp.maximum(rule.update(sound).weights, 0.0), most, total)
        norm, counted = polar(sound.delta, sound.times > 0).norm, sound.times > 0
        length = fraction(median(norm, counted), weights * jnp.maximum(jnp.sum(round.times > 0), K / self.cap))
        kept = jnp.where(counted, jnp.minimum(1.0, fraction(length, norm)), 0.0)
        return weighted(sound._replace(delta=scaled(sound.delta, kept)), weights)._replace(kept=kept)

    def bounded(self, round: Round) -> Round:
        """The round for a memory or a server step: screened, in its own units, and clipped to median norms."""
        sound = screened(round)
        counted = sound.times > 0

        def short(stack: Any) -> Any:
            norm = polar(stack, round.times > 0).norm
            return clipped(stack, norm, counted, median(norm, counted))

        return sound._replace(delta=short(round.delta), grad=short(round.grad))


GUARDS = Slot("guard", Guard, (Guard,), "bound every device's weight, whatever it reports, and never reverse an update")


def guard(algorithm: Algorithm, cap: Any = 2.0) -> Algorithm:
    """The algorithm with a guarded rule, and a server step that sees the same screened replies.

    An algorithm that is already guarded keeps its cap. One whose rule uses no gradients of its devices (FedAvg,
    FedProx, most of FedNu) is returned unchanged: a false gradient has no effect on it. Two lies can have an effect,
    and no guard checks them: a number of samples, if averages or draws use it, and the answers to a survey.
    """
    made = Guard(cap)
    made.check(GUARDS.spelt)
    if algorithm.guard is not None:
        check_around(algorithm)  # a part may have been put in later
        return algorithm
    if not (algorithm.sees_gradients or algorithm.privacy is not None):
        return algorithm
    return algorithm.replace(guard=made)


def check_around(algorithm: Algorithm) -> None:
    """Raise an `InputError` for a part that makes the step longer, or gives one device more than its weight."""
    if (robust := algorithm.robust) is not None and not robust.even:
        which = f"{robust.name} with buckets" if robust.bucket != 1 else robust.name
        expected = "should be norm_bound or none if guarded: in others a device may have more weight than c/K"
        raise InputError("robust", which, f"{expected}; {OTHERWISE}")
    if (memory := algorithm.memory) is not None and memory.has("correct"):
        expected = "should be none, or without `correct`, if guarded: it changes the step after the weights are bounded"
        raise InputError("memory", memory.name, f"{expected}; {OTHERWISE}")
    if algorithm.whiten is not None:
        expected = "should be none if guarded: it makes what few devices say as long as what all say"
        raise InputError("whiten", algorithm.whiten.name, f"{expected}; {OTHERWISE}")
    server, gain, ours = algorithm.server, algorithm.server.gain, type(algorithm.server) in SERVERS.known
    if isinstance(gain, int | float) and math.isinf(gain):
        expected = "should be plain, momentum, nesterov, or lookahead without stretch, if guarded: in the steps of "
        expected += "others a device's weight has no bound; or your own that declares its `gain`"
        raise InputError("server", server.name if ours else "your own", f"{expected}; {OTHERWISE}")
    times = f" (it is {gain:g} times as long)" if isinstance(gain, int | float) else ""
    expected = f"should make the step no longer than the update{times} if guarded, since c/K grows with it"
    field, value = ("server.lr", server.settings["lr"]) if ours else ("server: gain", gain)
    check(field, value, (gain >= 0) & (gain <= 1 + 1e-6), f"{expected}; {OTHERWISE}")


def screened(round: Round) -> Round:
    """The round after steps 1 to 4: a rejected reply counts 0 times.

    Gradients are in units of their median norm, so that nothing overflows; FOLB's weights do not depend on the unit.
    """
    if round.grad is None:
        raise InputError("uploads", (), "a guarded rule needs the devices' gradients: should have 'grad'")
    there, along = round.times > 0, round.downhill
    delta, grad = polar(round.delta, there), polar(round.grad, there)
    moved = delta if round.compared is None else polar(round.compared, there)
    if along is None and round.shift is not None:  # the term that a memory sent, too
        along = tree.add(round.grad, round.shift)
    downhill = grad if along is None else polar(along, there)
    descent = -jax.vmap(tree.dot)(moved.direction, downhill.direction)
    counted = jnp.isfinite(delta.norm) & jnp.isfinite(grad.norm) & (descent > 0)
    gamma = round.gamma
    if gamma is not None:
        counted &= jnp.isfinite(gamma)
        gamma = jnp.where(counted, jnp.clip(gamma, 0.0, 1.0), 0.0)
    times = jnp.where(counted, round.times, 0.0)
    unit = median(grad.norm, counted)
    length = jnp.where(counted, fraction(grad.norm, unit), 0.0)
    short = scaled(grad.direction, jnp.minimum(length, 1.0))
    return round._replace(
        times=times,
        delta=scaled(round.delta, jnp.where(counted, 1.0, 0.0)),
        grad=scaled(grad.direction, jnp.minimum(length, LARGEST)),
        gamma=gamma,
        reference=gradient_estimate(short, times, _even_correction(round._replace(times=times))),
        second=None if round.second is None else _screened_second(round.second, unit),
    )


def _vouched(sound: Round) -> Array:
    """Whether the others vouch for each device: <grad F_k, g> > 0, where g is the reference without its own part."""
    norm = tree.norms(sound.grad)
    own = sound.times * _even_correction(sound) * norm * jnp.minimum(norm, 1.0)
    # alone in a round, a device has both sides equal: rounding must not decide
    several = jnp.sum(sound.times > 0) > 1
    return several & (jnp.sum(sound.times) * tree.dots(sound.grad, sound.reference) > own)


def _even_correction(round: Round) -> Array:
    """p_k / P_k, clipped to its median: p_k is the device's own claim."""
    return jnp.minimum(round.correction, median(round.correction, round.times > 0))


def _screened_second(second: Gradients, unit: Array) -> Gradients:
    """S_2's gradients, clipped to their own median norm, in S_1's unit. S_2 sends no updates to check them against."""
    grad = polar(second.grad, second.times > 0)
    counted = jnp.isfinite(grad.norm) & (grad.norm > 0)
    length = jnp.minimum(grad.norm, median(grad.norm, counted))
    return second._replace(
        grad=scaled(grad.direction, jnp.where(counted, jnp.minimum(fraction(length, unit), LARGEST), 0.0)),
        times=jnp.where(counted, second.times, 0.0),
        correction=jnp.minimum(second.correction, median(second.correction, counted)),
    )


def water_filled(weights: Array, most: Array, total: Array | float) -> Array:
    """min(level * weights, most), with the level that makes them add up to `total`, or `most` if none does."""
    weights = fraction(weights, jnp.max(weights))
    ratio = weights / most
    order = jnp.argsort(-ratio)
    rest = jnp.cumsum(weights[order][::-1])[::-1]  # sum of the j-th and all after it; the smallest are added first
    full = jnp.cumsum(most[order]) - most[order]
    level = fraction(total - full, rest)  # if the first j are at `most`
    fits = (level * ratio[order] <= 1 + 1e-6) & (rest > 0)
    filled = jnp.minimum(level[jnp.argmax(fits)] * weights, most)
    enough = jnp.any(fits) & (total < jnp.sum(jnp.where(weights > 0, most, 0.0)))
    return jnp.where(weights > 0, jnp.where(enough, filled, most), 0.0)
