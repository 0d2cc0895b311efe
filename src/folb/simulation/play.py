"""A round of Algorithm 1 or 2 in the simulator: a pure function of the problem, the state, the seed and the round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.algorithm import Algorithm
from folb.core.memory import empty, gathered, scattered, started
from folb.core.round import (
    Chosen,
    State,
    begin,
    close,
    kept,
    managed,
    model_sent,
    sets,
    shared_words,
    shifts,
    with_step_size,
)
from folb.core.rules import Gradients, Round, inner_products
from folb.core.selection import Draw, Known, Multiset, candidates, drawing
from folb.core.solver import steps_of
from folb.core.system import Effort
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA
from folb.simulation import poison, solve, trust
from folb.simulation.problem import ENDLESS, Problem
from folb.simulation.solve import Slots
from folb.simulation.survey import survey_arrays, survey_inner_products, survey_upload
from folb.simulation.uploads import Sources, computed
from folb.typing import Params


class Info(NamedTuple):
    """The record of a round. Fields that were not asked for are None."""

    device: Array  # [K] the distinct devices chosen
    times: Array  # [K] times each counts; 0 for repeats and lost devices
    lost: Array  # [K] chosen, but without a usable reply
    asked: Array  # distinct devices that were sent the model
    surveyed: Array  # devices that answered a survey before the draw
    replied: Array  # distinct devices of S_1 whose update came back
    gradients_only: Array  # distinct devices of S_2, but not of S_1, whose gradient came back
    seconds: Array
    updated: Array  # whether the model changed: some reply was usable and some weight not zero
    weights: Array | None = None
    inner: Array | None = None
    gamma: Array | None = None
    work: Array | None = None
    lr: Array | None = None
    attack: Array | None = None  # [3]: the liars' part of the weight, their largest weight, the backdoor's rate


def start(problem: Problem, algorithm: Algorithm, seed: Array | int, rounds: int = ENDLESS) -> State:
    """The state before the first of `rounds` rounds: a function of the model and the seed alone.

    These rounds meet at most `rounds` times K devices: the memory of devices has room for no more.
    """
    state, own = begin(algorithm, problem.model.init(jax.random.key(seed)))
    if not jax.tree.leaves(own):
        return state
    N, how = len(problem.train.size), algorithm.selection
    first = how.sampling.first
    if first is None:
        return state._replace(devices=empty(own, N, rounds * how.K))
    model, key = model_sent(algorithm, state), shared_words(seed, 1)
    answers = survey_arrays(problem, first.upload, model, algorithm.solver.mu, min(how.K, N), key)
    rows = empty(own, N, N)
    known = first.remember(answers, how.K)
    return state._replace(devices=rows._replace(rows=(rows.rows[0], known)))


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
    algorithm = with_step_size(algorithm, state)
    model, train = problem.model, problem.train
    how, solver = algorithm.selection, algorithm.solver

    model_at = model_sent(algorithm, state)
    draw = distribution(problem, algorithm, state, seed, t, model_at)
    drawn, other = sets(draw, how, seed, t) if chosen is None else chosen
    words, effort = efforts(problem, algorithm, drawn, seed, t)
    usable = (drawn.times > 0) & ~effort.lost
    times = jnp.where(usable, drawn.times, 0.0)
    theirs, who = poison.poisoned(problem, algorithm, drawn.device)
    slots = Slots(who, jnp.where(usable, effort.work, 0), words)
    own = _own(algorithm, state, drawn.device)

    # Unused values are dropped by the compiler.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (how.K, *v.shape)), model_at)
    size = train.size[drawn.device]
    steps = steps_of(solver, slots.work, size)
    key = shared_words(seed, t)
    shift = shifts(algorithm, state, own, steps, jnp.int32(len(train.size)))
    delta = solve.solve(model, theirs.train, solver, model_at, slots, problem.abreast, problem.mesh, shift)
    sources = Sources(theirs, model_at, here, who, usable, mu=solver.mu, key=key, delta=delta)
    sent = computed(algorithm.uploads, sources)
    second, asked, gradients_only, wait = None, drawn.times > 0, jnp.int32(0), jnp.float32(0)
    if other is not None:
        other_words, other_effort = efforts(problem, algorithm, other, seed, t)
        arrived = (other.times > 0) & ~other_effort.lost
        upload, worked = GRAD if algorithm.gradient is None else algorithm.gradient.second, None
        if "delta" in upload.needs:  # it works like S_1, but for nothing else
            there = Slots(other.device, jnp.where(arrived, other_effort.work, 0), other_words)
            worked = solve.solve(model, train, solver, model_at, there, problem.abreast, problem.mesh)
        others = Sources(problem, model_at, here, other.device, arrived, mu=solver.mu, key=key, delta=worked)
        second = Gradients(
            computed((upload,), others)[upload.name],
            jnp.where(arrived, other.times, 0.0),
            draw.correction(other.device),
            other.device,
            None if worked is None else steps_of(solver, there.work, train.size[other.device]),
        )
        repeated = jnp.any(other.device[:, None] == drawn.device[None, :], axis=1)
        fresh = (other.times > 0) & ~repeated
        asked = jnp.concatenate([asked, fresh])
        gradients_only = jnp.sum(fresh & arrived)
        wait = jnp.max(jnp.where(fresh & other_effort.lost, other_effort.seconds, 0.0))

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
        steps=steps,
        lr=solver.lr,
        own=own,
        key=key,
        trusted=trust.update(problem, algorithm, model_at, seed, jnp.where(usable, steps, 0)),
    )
    closed = close(algorithm, state, round)
    surveyed = jnp.int32(0)
    if how.sampling.survey is not None:
        surveyed += min(how.sampling.candidates or len(train.size), len(train.size))
    if how.sampling.first is not None:
        surveyed += jnp.where(jnp.asarray(t) == 1, len(train.size), 0)
    info = Info(
        device=drawn.device,
        times=times,
        lost=(drawn.times > 0) & effort.lost,
        asked=jnp.maximum(jnp.sum(asked), surveyed),
        surveyed=surveyed,
        replied=jnp.sum(usable),
        gradients_only=gradients_only,
        seconds=jnp.maximum(wait, jnp.max(jnp.where(drawn.times > 0, effort.seconds, 0.0))),
        updated=closed.updated,
        weights=closed.update.weights if "weights" in problem.record else None,
        inner=inner_products(round._replace(grad=sources.grad))[0] if "inner" in problem.record else None,
        gamma=_gamma(algorithm, round, sources) if "gamma" in problem.record else None,
        work=slots.work if "work" in problem.record else None,
        lr=jnp.asarray(solver.lr, jnp.float32) if "lr" in problem.record else None,
        attack=poison.gained(problem, algorithm, drawn.device, closed.update.weights, kept(algorithm, closed.state))
        if "attack" in problem.record
        else None,
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
    return started(algorithm.memory, state.params)[1]  # it has no arrays


def _gamma(algorithm: Algorithm, round: Round, sources: Sources) -> Array:
    """gamma_k for the record, sent or not."""
    if round.gamma is not None:
        return round.gamma
    gamma = GAMMA if algorithm.clamp_gamma else UNCLAMPED_GAMMA
    return computed((gamma,), sources)["gamma"]


def distribution(
    problem: Problem,
    algorithm: Algorithm,
    state: State | None,
    seed: Array | int,
    t: Array | int,
    params: Params | None = None,
) -> Draw:
    """How the devices of round t are drawn; `params` is the model that they are sent.

    The state and the model may be None if the selection does not need them.
    """
    train, how, survey, memory = problem.train, algorithm.selection, None, None
    asked, some = how.sampling.survey, candidates(how, len(train.size), seed, t)
    if asked is not None and params is not None:
        survey = (
            survey_inner_products(problem, params)
            if asked == GRAD
            else survey_upload(problem, asked, params, algorithm.solver.mu, how.K, shared_words(seed, t), some)
        )
    if how.sampling.memory and state is not None:
        memory = _own(algorithm, state, jnp.arange(len(train.size)) if some is None else some)
        if algorithm.memory is not None and algorithm.memory.sampling is not None:
            memory = memory[1]
    known = Known(
        jnp.asarray(t, jnp.int32), how.K, how.replacement, train.start, train.size, problem.share, survey, memory, some
    )
    return drawing(how, known)


def efforts(
    problem: Problem, algorithm: Algorithm, chosen: Multiset, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and its device's effort in round t."""
    size = problem.train.size[chosen.device]
    return managed(problem.system, algorithm.solver, size, chosen.device, seed, t)
