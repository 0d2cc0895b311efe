"""The size of the devices' steps, set by the server from round to round: a factor of `lr`, sent with the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import Part, Slot, at_least, between, setting, up_to
from folb.core.rules import Round, fraction
from folb.core.server_step import disagreement, mean_square, without_noise
from folb.core.vector import scaled, zeros
from folb.errors import InputError
from folb.typing import Params

MOST = 100.0  # the factor stays between 1 / MOST and MOST
SETTLING = 10.0  # rounds after which `consensus` changes it half as fast


class StepSize(Part):
    """What `lr` is multiplied by in each round. One of your own is a class of this base with `factor`."""

    needed = ("factor",)
    scheduled: ClassVar[bool] = False  # whether it depends on the number of the round alone, and not on devices
    by_lengths: ClassVar[bool] = False  # whether it looks at the lengths of single updates

    def init(self, params: Params) -> Any:
        """The memory before the first round."""
        return ()

    def factor(self, memory: Any, t: Any) -> Any:
        """What `lr` is multiplied by in round t: 1, 2, and so on."""

    def update(self, memory: Any, round: Round) -> Any:
        """The memory after a round."""
        return memory

    def over(self, rounds: int) -> StepSize:
        """The step size of a run of so many rounds."""
        return self


class Learned(NamedTuple):
    """The memory of a step size that follows the rounds, with what it looks at besides."""

    log: Array  # the logarithm of the factor
    before: Params = None  # the last mean update
    lengths: Any = None  # of the last two mean updates
    rounds: Any = None  # how many there were


class _Learning(StepSize):
    """A step size that follows the rounds."""

    abstract = True

    def factor(self, memory: Learned, t: Any) -> Array:
        return jnp.exp(memory.log)


def _agreement(before: Params, round: Round) -> tuple[Array, Array, Array]:
    """The cosine between the mean updates of the last round and of this one, how far it can be trusted, from 0 to 1,
    and the length of this one; all without noise, which adds to a product what chance does: noise / sqrt(d)."""
    now, noise = round.update.delta, round.noise_square
    if noise is None:
        here, there = (scaled(a, fraction(jnp.float32(1), tree.norm(a))) for a in (now, before))
        cosine = tree.dot(here, there)
        return jnp.where(jnp.isfinite(cosine), cosine, 0.0), jnp.float32(1), tree.norm(now)
    d = tree.size(now)
    last, length = (jnp.sqrt(without_noise(tree.dot(a, a), noise, d)) for a in (before, now))
    product, chance = last * length, noise / math.sqrt(d)  # of roots: a product of squares would overflow
    cosine = jnp.clip(fraction(tree.dot(before, now), product), -1.0, 1.0)
    return cosine, jnp.clip(fraction(product - chance, product + chance), 0.0, 1.0), length


class Agreement(_Learning):
    """Longer local steps while the rounds agree on a direction, and shorter ones once they do not.

    lr <- lr exp(gain (c - goal)), where c is the cosine between the mean updates of two rounds in a row. If steps are
    too short, one round repeats the other, and c is near 1. If they are too long, one undoes the other, and c is below
    0. The first round changes nothing.
    """

    gain: float = setting("how fast local.lr changes", between(0, 100), default=1.25)
    goal: float = setting("the cosine between rounds at which local.lr stays", between(-1, 1), default=0.2)

    def init(self, params: Params) -> Learned:
        return Learned(jnp.float32(0), zeros(params))

    def update(self, memory: Learned, round: Round) -> Learned:
        cosine, trust, _ = _agreement(memory.before, round)
        change = trust * self.gain * (cosine - self.goal)
        return Learned(_changed(memory.log, tree.norm(memory.before) > 0, change), round.update.delta)


def _changed(log: Array, begun: Array, change: Array) -> Array:
    """The logarithm of the factor, within its bounds."""
    most = jnp.log(jnp.float32(MOST))
    return jnp.clip(log + jnp.where(begun & jnp.isfinite(change), change, 0.0), -most, most)


class Consensus(_Learning):
    """Longer local steps while rounds agree on a direction, and shorter ones while the devices of a round do not.

    lr <- lr exp(gain_t (max(c, 0) - goal q^2 - max(-c, 0) g)), with gain_t = gain / (1 + t / 10): it settles. t counts
    the rounds that changed the model.
    c is the cosine between the mean updates of two rounds in a row. If steps are too short, it is near 1.
    q is the disagreement of the round's devices, from 0 to 1. If it is large, their steps lead away from each other.
    g = min(max(||Delta|| / max(||Delta'||, ||Delta''||) - 1, 0), 1) is how much longer the mean update is than those of
    both rounds before. c < 0 alone says little: with momentum, rounds undo each other along steep directions, whatever
    the step. If the updates also grow, the steps are too long. The first round changes nothing.
    """

    by_lengths = True
    gain: float = setting("how fast local.lr changes", between(0, 100), default=1.5)
    goal: float = setting("how much the disagreement of devices counts", between(-1, 1), default=0.2)

    def init(self, params: Params) -> Learned:
        return Learned(jnp.float32(0), zeros(params), jnp.zeros(2), jnp.float32(0))

    def update(self, memory: Learned, round: Round) -> Learned:
        c, trust, length = _agreement(memory.before, round)
        longest = jnp.max(memory.lengths)
        growth = jnp.clip(jnp.nan_to_num(fraction(length, longest)) - 1.0, 0.0, 1.0)
        apart = disagreement(round, round.update)
        change = jnp.maximum(c, 0.0) + jnp.minimum(c, 0.0) * growth - self.goal * apart**2
        change *= trust * self.gain / (1 + (memory.rounds + 1) / SETTLING)
        log = _changed(memory.log, longest > 0, change)
        return Learned(log, round.update.delta, jnp.stack([memory.lengths[1], length]), memory.rounds + 1)


def _warm(t: Any, warmup: Any) -> Array:
    return jnp.minimum(jnp.float32(t) / (warmup + 1), 1.0)


class Constant(StepSize):
    """min(t / (warmup + 1), 1): `lr` as it is, after the warmup."""

    scheduled = True
    warmup: float = setting("rounds in which local.lr rises to its value", at_least(0), default=0.0)

    def factor(self, memory: tuple[()], t: Any) -> Array:
        return _warm(t, self.warmup)


class Schedule(StepSize):
    """A step size that depends on the number of the round alone. If its T is not set, it is `share` of all rounds."""

    scheduled = True
    share: ClassVar[float] = 1.0
    warmup: float = setting("rounds in which local.lr rises to its value", at_least(0), default=0.0)
    rounds: float | None = setting("T; by default a share of all rounds", at_least(1), default=None)

    def over(self, rounds: int) -> StepSize:
        if self.rounds is not None:
            return self
        return replace(self, rounds=max(1.0, self.share * (rounds - float(self.warmup))))

    def passed(self, t: Any) -> Array:
        """s / T, where s are the rounds between the first one after the warmup and round t."""
        if self.rounds is None:
            expected = "should be a number here: nobody knows how many rounds there will be"
            raise InputError("step_size.rounds", None, expected)
        return jnp.maximum(jnp.float32(t) - 1 - self.warmup, 0.0) / self.rounds


class Cosine(Schedule):
    """end + (1 - end) (1 + cos(pi s / T)) / 2, s rounds after the warmup: from 1 down to `end`, where it stays."""

    rounds: float | None = setting("T; by default all rounds", at_least(1), default=None)
    end: float = setting("the share of local.lr that is left at the end", between(0, 1), default=0.0)

    def factor(self, memory: tuple[()], t: Any) -> Array:
        done = jnp.minimum(self.passed(t), 1.0)
        return _warm(t, self.warmup) * (self.end + (1 - self.end) * (1 + jnp.cos(jnp.pi * done)) / 2)

    def over(self, rounds: int) -> StepSize:
        left = rounds - float(self.warmup)
        if self.rounds is not None and self.end == 0 and self.rounds < left:
            expected = f"should be at least {left:g}, the rounds after the warmup, or step_size.end more than 0"
            raise InputError("step_size.rounds", self.rounds, f"{expected}: lr would be 0")
        return super().over(rounds)


class Step(Schedule):
    """lowered^floor(s / T), s rounds after the warmup: a step down every T rounds."""

    share = 1 / 3
    rounds: float | None = setting("T; by default a third of all rounds", at_least(1), default=None)
    lowered: float = setting("what local.lr is multiplied by every T rounds", up_to(1), default=0.1)

    def factor(self, memory: tuple[()], t: Any) -> Array:
        return _warm(t, self.warmup) * jnp.float32(self.lowered) ** jnp.floor(self.passed(t))


class Inverse(Schedule):
    """1 / (1 + s / T), s rounds after the warmup: T rounds halve it."""

    share = 1 / 10
    rounds: float | None = setting("T; by default a tenth of all rounds", at_least(1), default=None)

    def factor(self, memory: tuple[()], t: Any) -> Array:
        return _warm(t, self.warmup) / (1 + self.passed(t))


class Relative(_Learning):
    """Local steps that move a device away from the model by a share of the model's length, whatever the gradients.

    lr <- lr (goal_t / r)^gain, at most e times as long, or as short: r is the length of the devices' updates (the root
    of their mean square) over that of the model, and goal_t = goal / (1 + t / rounds). It needs no guess of the
    gradients' scale, which differs by orders of magnitude between networks, and says nothing for a model that starts
    at 0.
    """

    by_lengths = True
    goal: float = setting("the length of a device's update over the model's", between(1e-6, 1), default=0.035)
    rounds: float = setting("the rounds in which that halves", at_least(1), default=20.0)
    gain: float = setting("how fast local.lr changes; 1: at once", between(0, 1), default=0.5)

    def init(self, params: Params) -> Learned:
        return Learned(jnp.float32(0), rounds=jnp.float32(0))

    def update(self, memory: Learned, round: Round) -> Learned:
        length, model = jnp.sqrt(mean_square(round, round.update)), tree.norm(round.params)
        goal = self.goal / (1 + memory.rounds / self.rounds)
        change = jnp.clip(self.gain * (jnp.log(goal) + jnp.log(model) - jnp.log(length)), -1.0, 1.0)
        return Learned(_changed(memory.log, (length > 0) & (model > 0), change), rounds=memory.rounds + 1)


class ByModel(_Learning):
    """`relative` for a network, and `consensus` for a model without hidden matrices. The record says which it was."""

    called = "by_model"
    by_lengths = True

    def of(self, hidden: Any) -> StepSize:
        return Relative() if hidden else Consensus()

    def init(self, params: Params) -> Any:
        return Consensus().init(params)

    def update(self, memory: Any, round: Round) -> Any:
        return Consensus().update(memory, round)


STEP_SIZES = Slot(
    "step_size",
    StepSize,
    (Consensus, Relative, ByModel, Agreement, Cosine, Step, Inverse, Constant),
    "how the server changes local.lr from round to round; by default it does not",
)
