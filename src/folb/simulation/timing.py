"""When a round begins, which devices are online then, and the bytes of its messages for a system model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from folb.core.algorithm import Algorithm
from folb.core.multiset import Multiset
from folb.core.round import Exchange, managed
from folb.core.selection import candidates
from folb.core.system import Effort, System, asked_for, times_bytes
from folb.core.trace import Trace
from folb.core.traffic import Sizes, sizes
from folb.simulation.problem import Problem
from folb.typing import Params


def is_clocked(system: System) -> bool:
    """Whether a run has a clock: its system model asks for the time."""
    return "now" in asked_for(system)


class Opening(NamedTuple):
    """How a round opens: the seconds until then, and the devices that are online; None if all always are."""

    waited: Any
    online: Array | None


def opening(problem: Problem, clock: Any) -> Opening:
    """A round opens as soon as a device is online. If none ever will be, it asks no device and takes no time."""
    if not isinstance(problem.system, Trace):
        return Opening(0.0, None)
    wait = problem.system.wait(clock.now)
    wait = jnp.where(jnp.isfinite(wait), wait, 0.0)
    return Opening(wait, problem.system.online(clock.now + wait))


def reached(chosen: Multiset, online: Array | None) -> Multiset:
    """The chosen devices; those that are offline count 0 times, and are not asked."""
    return chosen if online is None else chosen._replace(times=jnp.where(online[chosen.device], chosen.times, 0.0))


class Timing(NamedTuple):
    """What a system model is given in a round, if it asks for more than random numbers."""

    began: Any  # seconds of the round that were over when its devices were asked
    now: Any
    model: Any  # bytes: 0 if a survey has brought the model
    size: Sizes

    def first(self) -> Exchange:
        """The exchange with a device of S_1."""
        return Exchange(self.model + self.size.shift, self.size.reply, self.now)

    def second(self, again: Array, works: bool) -> Exchange:
        """The exchange with a device of S_2; one that is also in S_1 is asked once."""
        first = self.first()
        down, up = jnp.where(again, first.down, self.model), jnp.where(again, first.up, self.size.gradient)
        return Exchange(down, up, self.now, again | works)


def timing(
    problem: Problem, algorithm: Algorithm, opened: Opening, clock: Any, params: Params, seed: Any, t: Any
) -> Timing | None:
    """The timing of round t; None if its system model asks for nothing more. A survey comes before the other messages.

    Surveys have answers from all devices that they ask. Their computations take no time.
    """
    if not asked_for(problem.system):
        return None
    how, size = algorithm.selection.sampling, sizes(algorithm, params)
    began, now = opened.waited, opened.waited + clock.now if is_clocked(problem.system) else 0.0
    if not times_bytes(problem.system) or (how.survey is None and how.first is None):
        return Timing(began, now, size.model, size)
    N = len(problem.train.size)
    who = candidates(algorithm.selection, N, seed, t, opened.online)
    who = jnp.arange(N) if who is None else who
    asked = Exchange(size.model, size.answer, now, works=False)
    effort = managed(problem.system, algorithm.solver, problem.train.size[who], who, seed, t, asked)[1]
    there = jnp.ones(len(who), bool) if opened.online is None else opened.online[who]
    took, model = jnp.max(jnp.where(there, effort.seconds, 0.0)), jnp.float32(0)
    if how.survey is None:  # once, before the first round
        took, model = jnp.where(jnp.asarray(t) == 1, took, 0.0), jnp.where(jnp.asarray(t) == 1, 0.0, size.model)
    return Timing(began + took, now + took, model, size)


def joined_late(effort: Effort, end: Array, again: Array, lost: Array, timed: bool) -> Effort:
    """The effort of S_2 in a round that ends at `end`. A reply for both sets counts for both, or is `lost` for both."""
    late = jnp.where(again, lost, (effort.seconds > end) & timed)
    return effort._replace(seconds=jnp.minimum(effort.seconds, end), lost=effort.lost | late)
