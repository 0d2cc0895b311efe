"""The size of the devices' steps, set by the server from round to round: a factor of `lr`, sent with the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Round, fraction
from folb.core.vector import scaled, zeros
from folb.errors import InputError, check_number, choose
from folb.typing import Params


class StepSize(NamedTuple):
    """init(params) -> memory; factor(memory) -> what `lr` is multiplied by; update(memory, round) -> memory."""

    init: Callable[[Params], Any]
    factor: Callable[[Any], Any]
    update: Callable[[Any, Round], Any]


MOST = 100.0  # the factor stays between 1 / MOST and MOST


class Agreed(NamedTuple):
    """The memory of `agreement`: the logarithm of the factor, and the last round's mean update."""

    log: Array
    before: Params


def between_rounds(before: Params, round: Round) -> Array:
    """The cosine between the mean updates of this round and of the last; 0 if one of them is 0."""
    assert round.update is not None
    now = round.update.delta
    found = tree.dot(_direction(now), _direction(before))
    return jnp.where(jnp.isfinite(found), found, 0.0)


def _through_noise(before: Params, now: Params, noise: Array) -> tuple[Array, Array]:
    """The cosine between two mean updates without their noise, and how far it can be trusted: from 0 to 1.

    `noise` is the squared length of the noise in each, on average. It makes updates longer, and adds nothing to their
    product but luck, whose standard deviation is noise / sqrt(d).
    """
    luck = noise / math.sqrt(tree.size(now))
    lengths = [jnp.maximum(tree.dot(a, a) - noise, luck) for a in (before, now)]
    product = jnp.sqrt(lengths[0] * lengths[1])
    return jnp.clip(tree.dot(before, now) / product, -1.0, 1.0), (product - luck) / (product + luck)


def _direction(a: Params) -> Params:
    return scaled(a, fraction(jnp.float32(1), tree.norm(a)))


def _start(params: Params) -> Agreed:
    return Agreed(jnp.float32(0), zeros(params))


def _factor(memory: Agreed) -> Array:
    return jnp.exp(memory.log)


def _agree(memory: Agreed, round: Round, *, gain: Any, goal: Any) -> Agreed:
    assert round.update is not None
    if round.noise_square is None:
        change = gain * (between_rounds(memory.before, round) - goal)
    else:
        cosine, trust = _through_noise(memory.before, round.update.delta, round.noise_square)
        change = trust * gain * (cosine - goal)
    began = tree.norm(memory.before) > 0
    most = jnp.log(jnp.float32(MOST))
    log = jnp.clip(memory.log + jnp.where(began, change, 0.0), -most, most)
    return Agreed(log, round.update.delta)


def agreement(gain: Any = 1.25, goal: Any = 0.2) -> StepSize:
    """Longer local steps while the rounds agree on the way, and shorter ones once they do not.

    lr <- lr exp(gain (c - goal)), where c is the cosine between the mean updates of two rounds in a row. If steps are
    too short, one round repeats the other, and c is near 1. If they are too long, one undoes the other, and c is below
    0. The first round changes nothing.
    """
    return StepSize(Partial(_start), Partial(_factor), Partial(_agree, gain=gain, goal=goal))


STEP_SIZES: dict[str, Callable[..., StepSize]] = {"agreement": agreement}
RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gain": (lambda gain: (gain >= 0) & (gain <= 100), "should be from 0 to 100"),
    "goal": (lambda goal: (goal >= -1) & (goal <= 1), "should be from -1 to 1: it is a cosine"),
}


def step_size(wanted: str | StepSize | None, **numbers: Any) -> StepSize | None:
    """A step size by its name, with the numbers that are not None; or your own. None leaves `lr` as it is."""
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        check_number(f"step_{name}", value, *RANGES[name])
        if not isinstance(wanted, str):
            which = "your own" if isinstance(wanted, StepSize) else "not set"
            raise InputError(f"step_{name}", value, f"is for step_size=agreement; step_size is {which}")
    if wanted is None:
        return None
    if isinstance(wanted, StepSize):
        return StepSize(*map(tree.compiled, wanted))
    if not isinstance(wanted, str):
        raise InputError("step_size", wanted, "should be agreement, or a StepSize(init, factor, update)")
    return STEP_SIZES[choose("step_size", wanted, STEP_SIZES)](**given)
