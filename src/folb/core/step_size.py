"""The size of the devices' steps, set by the server from round to round: a factor of `lr`, sent with the model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Round, fraction
from folb.core.server_step import disagreement, without_noise
from folb.core.vector import scaled, zeros
from folb.errors import InputError, check_number, choose
from folb.typing import Params


class StepSize(NamedTuple):
    """init(params) -> memory; factor(memory) -> what `lr` is multiplied by; update(memory, round) -> memory.

    factor(memory, t) is told the number of the round, too: 1, 2, and so on.
    """

    init: Callable[[Params], Any]
    factor: Callable[..., Any]
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
    # a product of roots: that of the squares would overflow
    product = jnp.sqrt(_length_square(before, noise)) * jnp.sqrt(_length_square(now, noise))
    cosine = jnp.clip(fraction(tree.dot(before, now), product), -1.0, 1.0)
    return cosine, jnp.clip(fraction(product - luck, product + luck), 0.0, 1.0)


def _length_square(a: Params, noise: Array) -> Array:
    return without_noise(tree.dot(a, a), noise, tree.size(a))


def _direction(a: Params) -> Params:
    return scaled(a, fraction(jnp.float32(1), tree.norm(a)))


def _start(params: Params) -> Agreed:
    return Agreed(jnp.float32(0), zeros(params))


def _factor(memory: Agreed | Consensus) -> Array:
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
    log = jnp.clip(memory.log + jnp.where(began & jnp.isfinite(change), change, 0.0), -most, most)
    return Agreed(log, round.update.delta)


def agreement(gain: Any, goal: Any) -> StepSize:
    """Longer local steps while the rounds agree on a direction, and shorter ones once they do not.

    lr <- lr exp(gain (c - goal)), where c is the cosine between the mean updates of two rounds in a row. If steps are
    too short, one round repeats the other, and c is near 1. If they are too long, one undoes the other, and c is below
    0. The first round changes nothing.
    """
    return StepSize(Partial(_start), Partial(_factor), Partial(_agree, gain=gain, goal=goal))


SETTLING = 10.0  # rounds after which the step size changes half as fast


class Consensus(NamedTuple):
    """The memory of `consensus`: the logarithm of the factor, the last mean update, the lengths of the last two mean
    updates, and the number of rounds so far."""

    log: Array
    before: Params
    lengths: Array
    rounds: Array


def _start_consensus(params: Params) -> Consensus:
    return Consensus(jnp.float32(0), zeros(params), jnp.zeros(2), jnp.float32(0))


def _seek_consensus(memory: Consensus, round: Round, *, gain: Any, goal: Any) -> Consensus:
    assert round.update is not None
    now, longest = round.update.delta, jnp.max(memory.lengths)
    if round.noise_square is None:
        c, trust, length = between_rounds(memory.before, round), jnp.float32(1), tree.norm(now)
    else:
        c, trust = _through_noise(memory.before, now, round.noise_square)
        length = jnp.sqrt(_length_square(now, round.noise_square))
    growth = jnp.clip(jnp.nan_to_num(fraction(length, longest)) - 1.0, 0.0, 1.0)
    change = jnp.maximum(c, 0.0) + jnp.minimum(c, 0.0) * growth - goal * disagreement(round, round.update) ** 2
    change *= trust * gain / (1 + (memory.rounds + 1) / SETTLING)
    most = jnp.log(jnp.float32(MOST))
    log = jnp.clip(memory.log + jnp.where((longest > 0) & jnp.isfinite(change), change, 0.0), -most, most)
    return Consensus(log, now, jnp.stack([memory.lengths[1], length]), memory.rounds + 1)


def consensus(gain: Any, goal: Any) -> StepSize:
    """Longer local steps while rounds agree on a direction, and shorter ones while the devices of a round do not.

    lr <- lr exp(gain_t (max(c, 0) - goal q^2 - max(-c, 0) g)), with gain_t = gain / (1 + t / 10): it settles. t counts
    the rounds that changed the model.
    c is the cosine between the mean updates of two rounds in a row. If steps are too short, it is near 1.
    q is the disagreement of the round's devices, from 0 to 1. If it is large, their steps lead away from each other.
    g = min(max(||Delta|| / max(||Delta'||, ||Delta''||) - 1, 0), 1) is how much longer the mean update is than those of
    both rounds before. c < 0 alone says little: with momentum, rounds undo each other along steep directions, whatever
    the step. If the updates also grow, the steps are too long. The first round changes nothing.
    """
    return StepSize(Partial(_start_consensus), Partial(_factor), Partial(_seek_consensus, gain=gain, goal=goal))


LENGTHS = (_seek_consensus,)  # what looks at the lengths of single updates; with privacy nothing wraps it


def _nothing(params: Params) -> tuple[()]:
    return ()


def _unchanged(memory: tuple[()], round: Round) -> tuple[()]:
    return memory


def _constant(memory: tuple[()], t: Any, *, warmup: Any) -> Array:
    """min(t / (warmup + 1), 1): `lr` as it is, after the warmup."""
    return jnp.minimum(jnp.float32(t) / (warmup + 1), 1.0)


def _cosine(memory: tuple[()], t: Any, *, warmup: Any, rounds: Any, end: Any) -> Array:
    """end + (1 - end) (1 + cos(pi s / T)) / 2, s rounds after the warmup: from 1 down to `end`, where it stays."""
    share = jnp.minimum(_after(t, warmup) / _known(rounds), 1.0)
    return _constant(memory, t, warmup=warmup) * (end + (1 - end) * (1 + jnp.cos(jnp.pi * share)) / 2)


def _step(memory: tuple[()], t: Any, *, warmup: Any, rounds: Any, factor: Any) -> Array:
    """factor^floor(s / T), s rounds after the warmup: a step down every T rounds."""
    return _constant(memory, t, warmup=warmup) * jnp.float32(factor) ** jnp.floor(_after(t, warmup) / _known(rounds))


def _inverse(memory: tuple[()], t: Any, *, warmup: Any, rounds: Any) -> Array:
    """1 / (1 + s / T), s rounds after the warmup: T rounds halve it."""
    return _constant(memory, t, warmup=warmup) / (1 + _after(t, warmup) / _known(rounds))


def _after(t: Any, warmup: Any) -> Array:
    """The rounds between the first one after the warmup and round t."""
    return jnp.maximum(jnp.float32(t) - 1 - warmup, 0.0)


def _known(rounds: Any) -> Any:
    if rounds is None:
        raise InputError("step_rounds", None, "should be a number here: it is not known how many rounds there will be")
    return rounds


SHARES: dict[Any, float] = {_cosine: 1.0, _step: 1 / 3, _inverse: 1 / 10}  # of all rounds: the usual T


def _scheduled(factor: Callable[..., Array]) -> Callable[..., StepSize]:
    """The step size that depends on the number of the round alone."""

    def make(**numbers: Any) -> StepSize:
        return StepSize(Partial(_nothing), Partial(factor, **numbers), Partial(_unchanged))

    make.__doc__ = factor.__doc__
    return make


def is_schedule(size: StepSize) -> bool:
    """Whether it depends on the number of the round alone, and not on what devices send."""
    return getattr(size.factor, "func", None) in (_constant, *SHARES)


def over(size: StepSize | None, rounds: int) -> StepSize | None:
    """The step size of a run of so many rounds: a schedule whose T is not set is over its usual share of them."""
    factor: Any = None if size is None else size.factor
    function = getattr(factor, "func", None)
    if size is None or function not in SHARES:
        return size
    numbers = factor.keywords
    left = rounds - float(numbers["warmup"])
    if numbers["rounds"] is None:
        T = max(1.0, SHARES[function] * left)
        return size._replace(factor=Partial(function, **{**numbers, "rounds": T}))
    if function is _cosine and numbers["end"] == 0 and numbers["rounds"] < left:
        expected = f"should be at least {left:g}, the rounds after the warmup, or step_end more than 0: lr would be 0"
        raise InputError("step_rounds", numbers["rounds"], expected)
    return size


def factor_in(size: StepSize, memory: Any, t: Any) -> Any:
    """What `lr` is multiplied by in round t."""
    told = "t" in inspect.signature(size.factor).parameters
    return size.factor(memory, t) if told else size.factor(memory)


STEP_SIZES: dict[str, Callable[..., StepSize]] = {
    "consensus": consensus,
    "agreement": agreement,
    "cosine": _scheduled(_cosine),
    "step": _scheduled(_step),
    "inverse": _scheduled(_inverse),
    "constant": _scheduled(_constant),
}
NUMBERS: dict[str, dict[str, Any]] = {  # of each, with their usual values
    "consensus": {"gain": 1.5, "goal": 0.2},
    "agreement": {"gain": 1.25, "goal": 0.2},
    "cosine": {"warmup": 0.0, "rounds": None, "end": 0.0},
    "step": {"warmup": 0.0, "rounds": None, "factor": 0.1},
    "inverse": {"warmup": 0.0, "rounds": None},
    "constant": {"warmup": 0.0},
}
RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gain": (lambda gain: (gain >= 0) & (gain <= 100), "should be from 0 to 100"),
    "goal": (lambda goal: (goal >= -1) & (goal <= 1), "should be from -1 to 1"),
    "rounds": (lambda rounds: rounds >= 1, "should be at least 1"),
    "end": (lambda end: (end >= 0) & (end <= 1), "should be from 0 to 1"),
    "factor": (lambda factor: (factor > 0) & (factor <= 1), "should be more than 0 and at most 1"),
    "warmup": (lambda warmup: warmup >= 0, "should be at least 0"),
}


def step_size(wanted: str | StepSize | None, **numbers: Any) -> StepSize | None:
    """A step size by its name, with the numbers that are not None; or your own. None leaves `lr` as it is."""
    given = {name: value for name, value in numbers.items() if value is not None}
    if wanted is not None and not isinstance(wanted, str | StepSize):
        expected = f"should be one of {', '.join(STEP_SIZES)}, or a StepSize(init, factor, update)"
        raise InputError("step_size", wanted, expected)
    if isinstance(wanted, str):
        choose("step_size", wanted, STEP_SIZES)
    known = NUMBERS[wanted] if isinstance(wanted, str) else {}
    for name, value in given.items():
        check_number(f"step_{name}", value, *RANGES[name])
        if name not in known:
            owners = ", ".join(other for other, own in NUMBERS.items() if name in own)
            which = wanted if isinstance(wanted, str) else "not set" if wanted is None else "your own"
            raise InputError(f"step_{name}", value, f"is for step_size={owners}; step_size is {which}")
    if isinstance(wanted, str):
        return STEP_SIZES[wanted](**known | given)
    return None if wanted is None else tree.functions("step_size", wanted)
