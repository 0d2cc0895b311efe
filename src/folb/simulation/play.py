"""A round of Algorithm 1 or 2 in the simulator: a pure function of the problem, the state, the seed and the round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.algorithm import Algorithm
from folb.core.memory import gathered, scattered
from folb.core.round import Chosen, State, close, managed, sets, shifts
from folb.core.rules import Gradients, Round, inner_products
from folb.core.selection import Draw, Known, Multiset, drawing
from folb.core.solver import steps_of
from folb.core.system import Effort
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA
from folb.simulation import solve
from folb.simulation.problem import Problem
from folb.simulation.solve import Slots
from folb.simulation.survey import survey_inner_products, survey_upload
from folb.simulation.uploads import Sources, computed


class Info(NamedTuple):
    """The record of a round. Fields that were not asked for are None."""

    device: Array  # [K] the distinct devices chosen
    times: Array  # [K] times each counts; 0 for repeats and lost devices
    lost: Array  # [K] chosen, but without a usable reply
    asked: Array  # distinct devices that were sent the model
    replied: Array  # distinct devices of S_1 whose update came back
    gradients_only: Array  # distinct devices of S_2, but not of S_1, whose gradient came back
    seconds: Array
    updated: Array  # whether the model changed: some reply was usable and some weight not zero
    weights: Array | None = None
    inner: Array | None = None
    gamma: Array | None = None
    work: Array | None = None


def play(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    seed: Array | int,
    t: Array | int,
    chosen: Chosen | None = None,
) -> tuple[State, Info]:
    """Round t (1, 2, …) of Algorithm 1 or 2: select, solve, aggregate, step.

    The devices may have been `chosen` earlier, so that their samples could be brought here.
    """
    model, train = problem.model, problem.train
    how, solver = algorithm.selection, algorithm.solver

    draw = distribution(problem, algorithm, state, t)
    drawn, other = sets(draw, how, seed, t) if chosen is None else chosen
    words, effort = efforts(problem, algorithm, drawn, seed, t)
    usable = (drawn.times > 0) & ~effort.lost
    times = jnp.where(usable, drawn.times, 0.0)
    slots = Slots(drawn.device, jnp.where(usable, effort.work, 0), words)
    own = _own(algorithm, state, drawn.device)

    # Unused values are dropped by the compiler.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (how.K, *v.shape)), state.params)
    shift = shifts(algorithm, state, own)
    delta = solve.solve(model, train, solver, state.params, slots, problem.abreast, problem.mesh, shift)
    sources = Sources(problem, state.params, here, drawn.device, usable, mu=solver.mu, delta=delta)
    sent = computed(algorithm.uploads, sources)
    second, asked, gradients_only, wait = None, drawn.times > 0, jnp.int32(0), jnp.float32(0)
    if other is not None:
        _, other_effort = efforts(problem, algorithm, other, seed, t)
        arrived = (other.times > 0) & ~other_effort.lost
        second = Gradients(
            Sources(problem, state.params, here, other.device, arrived, mu=solver.mu).grad,
            jnp.where(arrived, other.times, 0.0),
            draw.correction(other.device),
            other.device,
        )
        repeated = jnp.any(other.device[:, None] == drawn.device[None, :], axis=1)
        fresh = (other.times > 0) & ~repeated
        asked = jnp.concatenate([asked, fresh])
        gradients_only = jnp.sum(fresh & arrived)
        wait = jnp.max(jnp.where(fresh & other_effort.lost, other_effort.seconds, 0.0))

    size = train.size[drawn.device]
    round = Round(
        params=state.params,
        times=times,
        size=size.astype(jnp.float32),
        correction=draw.correction(drawn.device),
        delta=delta,
        grad=sent.pop("grad", None),
        gamma=sent.pop("gamma", None),
        inner=None if draw.inner is None else draw.inner[drawn.device],
        second=second,
        device=drawn.device,
        sent=sent,
        t=jnp.asarray(t, jnp.int32),
        N=jnp.int32(len(train.size)),
        steps=steps_of(solver, slots.work, size),
        lr=solver.lr,
        own=own,
    )
    closed = close(algorithm, state, round)
    surveyed = jnp.int32(len(train.size)) if how.sampling.survey is not None else jnp.sum(asked)
    info = Info(
        device=drawn.device,
        times=times,
        lost=(drawn.times > 0) & effort.lost,
        asked=surveyed,
        replied=jnp.sum(usable),
        gradients_only=gradients_only,
        seconds=jnp.maximum(wait, jnp.max(jnp.where(drawn.times > 0, effort.seconds, 0.0))),
        updated=closed.updated,
        weights=closed.update.weights if "weights" in problem.record else None,
        inner=inner_products(round._replace(grad=sources.grad))[0] if "inner" in problem.record else None,
        gamma=_gamma(algorithm, round, sources) if "gamma" in problem.record else None,
        work=slots.work if "work" in problem.record else None,
    )
    following = closed.state
    if jax.tree.leaves(own):
        devices = scattered(state.devices, drawn.device, closed.updated & usable, closed.own)
        following = following._replace(devices=devices)
    return following, info


def _own(algorithm: Algorithm, state: State, device: Array) -> Any:
    """The memory of some devices, stacked; () if the algorithm has no memory."""
    if algorithm.memory is None:
        return ()
    if jax.tree.leaves(state.devices):
        return gathered(state.devices, device)
    return algorithm.memory.init(state.params)[1]  # it has no arrays


def _gamma(algorithm: Algorithm, round: Round, sources: Sources) -> Array:
    """gamma_k for the record, sent or not."""
    if round.gamma is not None:
        return round.gamma
    gamma = GAMMA if algorithm.clamp_gamma else UNCLAMPED_GAMMA
    return computed((gamma,), sources)["gamma"]


def distribution(problem: Problem, algorithm: Algorithm, state: State | None, t: Array | int) -> Draw:
    """How the devices of round t are drawn. The state may be None if the selection does not need it."""
    train, how, survey, memory = problem.train, algorithm.selection, None, None
    asked = how.sampling.survey
    if asked is not None and state is not None:
        survey = (
            survey_inner_products(problem, state.params)
            if asked == GRAD
            else survey_upload(problem, asked, state.params, algorithm.solver.mu, how.K)
        )
    if how.sampling.memory and state is not None:
        memory = _own(algorithm, state, jnp.arange(len(train.size)))
    known = Known(
        jnp.asarray(t, jnp.int32), how.K, how.replacement, train.start, train.size, problem.share, survey, memory
    )
    return drawing(how, known)


def efforts(
    problem: Problem, algorithm: Algorithm, chosen: Multiset, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and its device's effort in round t."""
    size = problem.train.size[chosen.device]
    return managed(problem.system, algorithm.solver, size, chosen.device, seed, t)
