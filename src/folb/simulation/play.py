"""A round of Algorithm 1 or 2 in the simulator: a pure function of the problem, the state, the seed and the round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import clock
from folb.core.algorithm import Algorithm
from folb.core.event_queue import NOBODY
from folb.core.memory import Rows, empty, gathered, scattered, started
from folb.core.multiset import Multiset
from folb.core.privacy import draw_words, with_noise
from folb.core.round import (
    Chosen,
    Closed,
    Exchange,
    State,
    begin,
    close,
    first_replies,
    kept,
    managed,
    model_sent,
    sets,
    shared_words,
    shifts,
    with_step_size,
)
from folb.core.rules import Gradients, Round, inner_products
from folb.core.selection import Draw, Known, candidates, drawing
from folb.core.solver import steps_of
from folb.core.system import Effort, times_bytes
from folb.core.tree import check_like
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA
from folb.simulation import poison, solve, uploads
from folb.simulation.events import arrivals, start_of
from folb.simulation.problem import ENDLESS, Problem
from folb.simulation.solve import Slots
from folb.simulation.survey import survey_arrays, survey_inner_products, survey_upload
from folb.simulation.timing import is_clocked, joined_late, opening, reached, timing
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
    N, how, codecs = len(problem.train.size), algorithm.selection, algorithm.compression
    if is_clocked(problem.system):
        state = state._replace(clock=clock.zero())
    if codecs.remembers:
        state = state._replace(residuals=uploads.no_residuals(state.params, N, rounds * how.K))
    if not jax.tree.leaves(own):
        return state
    first = how.sampling.first
    if first is None:
        return state._replace(devices=empty(own, N, rounds * how.K))
    key = shared_words(seed, 1)
    model = model_sent(algorithm, state, key)
    answers = survey_arrays(problem, first.upload, model, algorithm.solver.mu, min(how.K, N), key)
    known = first.remember(answers, how.K)
    check_like("sampling: first: what `remember` returns", known, empty(own[1], N, N).rows)
    # the sampling knows all devices now; the algorithm's own memory, which may be as large as models, only grows
    return state._replace(devices=(empty(own[0], N, rounds * how.K), Rows(known)))


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
    algorithm = with_step_size(algorithm, state, t)
    model, train = problem.model, problem.train
    how, solver = algorithm.selection, algorithm.solver

    key = shared_words(seed, t)
    model_at = model_sent(algorithm, state, key)
    opened = opening(problem, state.clock)
    draw = distribution(problem, algorithm, state, seed, t, model_at, opened.online)
    begun = _Begun(problem, algorithm, state, seed, t, draw, model_at)
    if algorithm.asynchrony is not None:
        return _play_without_waiting(begun)
    drawn, other = sets(draw, how, *draw_words(algorithm, seed, t)) if chosen is None else chosen
    drawn = reached(drawn, opened.online)
    timed = timing(problem, algorithm, opened, state.clock, state.params, seed, t)
    words, effort = efforts(problem, algorithm, drawn, seed, t, None if timed is None else timed.first())
    end = None
    if how.wanted is not None:
        effort, end = first_replies(drawn, effort, how.wanted, words[:, 0])
    usable = (drawn.times > 0) & ~effort.lost
    times = jnp.where(usable, drawn.times, 0.0)
    slots = Slots(drawn.device, jnp.where(usable, effort.work, 0), words)

    # Unused values are dropped by the compiler.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (how.K, *v.shape)), model_at)
    second, asked, gradients_only, wait = None, drawn.times > 0, jnp.int32(0), jnp.float32(0)
    if other is not None:
        other = reached(other, opened.online)
        upload, worked = algorithm.second_upload, None
        asks = None if timed is None else timed.second(_within(other, drawn.times > 0, drawn), algorithm.second_works)
        other_words, other_effort = efforts(problem, algorithm, other, seed, t, asks)
        if end is not None:
            again, lost = (_within(other, some, drawn) for some in (drawn.times > 0, effort.lost))
            other_effort = joined_late(other_effort, end, again, lost, times_bytes(problem.system))
        arrived = (other.times > 0) & ~other_effort.lost
        if algorithm.second_works:  # it works like S_1, but only for this upload
            there = Slots(other.device, jnp.where(arrived, other_effort.work, 0), other_words)
            worked = solve.solve(model, train, solver, here, there, problem.side_by_side, problem.mesh)
        theirs = Sources(problem, here, other.device, arrived, mu=solver.mu, key=key, delta=worked)
        answers = computed((upload,), theirs)[upload.name]
        if algorithm.compression.up is not None and upload == GRAD:
            answers = uploads.arrived(algorithm.compression.up, answers, other_words)
        second = Gradients(
            answers,
            jnp.where(arrived, other.times, 0.0),
            draw.correction(other.device),
            other.device,
            None if worked is None else steps_of(solver, there.work, train.size[other.device]),
        )
        repeated = jnp.any(other.device[:, None] == drawn.device[None, :], axis=1)
        fresh = (other.times > 0) & ~repeated
        asked = jnp.concatenate([asked, fresh])
        gradients_only = jnp.sum(fresh & arrived)
        awaited = fresh if times_bytes(problem.system) else fresh & other_effort.lost
        wait = jnp.max(jnp.where(awaited, other_effort.seconds, 0.0))

    done = _work_and_close(begun, slots, times, here, key, second=second, seconds=effort.seconds)
    surveyed = jnp.int32(0)
    if how.sampling.survey is not None and opened.online is not None:
        asked_before = candidates(how, len(train.size), seed, t, opened.online)
        surveyed += jnp.sum(opened.online if asked_before is None else opened.online[asked_before])
    elif how.sampling.survey is not None:
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
        updated=done.closed.updated,
        **done.records,
    )
    following = done.closed.state._replace(residuals=done.residuals)
    if timed is not None:
        info = info._replace(seconds=timed.began + info.seconds)
    if is_clocked(problem.system):
        following = following._replace(clock=state.clock.after(info.seconds))
    if jax.tree.leaves(done.closed.own):
        devices = scattered(state.devices, drawn.device, done.closed.updated & usable, done.closed.own)
        following = following._replace(devices=devices)
    return following, info


class _Begun(NamedTuple):
    """A round that has begun: what it depends on, how its devices are drawn, and the model that the server sends."""

    problem: Problem
    algorithm: Algorithm
    state: State
    seed: Array | int
    t: Array | int
    draw: Draw
    model: Params


def _play_without_waiting(begun: _Begun) -> tuple[State, Info]:
    """A round if devices do not wait for each other: the next K replies, each from the model that it started from."""
    problem, algorithm, state, seed, _, draw, model_at = begun
    queue, came = arrivals(problem, algorithm, draw, model_at, state.queue, seed)
    usable = came.device != NOBODY
    device = jnp.where(usable, came.device, 0)
    words, effort = jax.vmap(lambda k, n: start_of(problem, algorithm, model_at, k, seed, n))(device, came.number)
    slots = Slots(device, jnp.where(usable, effort.work, 0), words)
    starts, version, lr = jax.tree.map(lambda v: v[came.row], (queue.models, queue.version, queue.lr))
    staleness = jnp.where(usable, queue.steps - version, 0)
    # Sketches can be compared only if all have one key: at the start nobody knows which will meet in a buffer.
    key = shared_words(seed, 1)
    done = _work_and_close(begun, slots, usable.astype(jnp.float32), starts, key, lr=lr, staleness=staleness)
    records = {name: value for name, value in done.records.items() if value is not None}

    def with_lost(values: Array) -> Array:
        """The values of the replies, and 0 for each device that was lost."""
        return jnp.pad(values, (0, len(came.gone)))

    info = Info(
        device=jnp.concatenate([device, jnp.where(came.gone == NOBODY, 0, came.gone)]),
        times=with_lost(usable.astype(jnp.float32)),
        lost=jnp.concatenate([jnp.zeros_like(usable), came.gone != NOBODY]),
        asked=came.started,
        surveyed=jnp.int32(0),
        replied=came.replied,
        gradients_only=jnp.int32(0),
        seconds=came.seconds,
        updated=done.closed.updated,
        **{name: value if name == "attack" else with_lost(value) for name, value in records.items()},
    )
    queue = queue._replace(steps=queue.steps + done.closed.updated)
    return done.closed.state._replace(queue=queue, residuals=done.residuals), info


class _Done(NamedTuple):
    """A closed round, what its devices' codecs left out, and the records that were asked for."""

    closed: Closed
    residuals: Any
    records: dict[str, Array | None]


def _work_and_close(
    begun: _Begun,
    slots: Slots,
    times: Array,
    here: Params,
    key: Array,
    *,
    second: Gradients | None = None,
    seconds: Array | None = None,
    lr: Array | None = None,
    staleness: Array | None = None,
) -> _Done:
    """The devices of the slots work, each from its own model in `here`, and the server closes the round.

    `lr` has the step size of each slot, if they may differ.
    """
    problem, algorithm, state, seed, t, draw, start = begun
    train, solver = problem.train, algorithm.solver if lr is None else replace(algorithm.solver, lr=lr)
    size = train.size[slots.device]
    steps = steps_of(solver, slots.work, size)
    own = _own(algorithm, state, slots.device)
    shift = shifts(algorithm, state, own, steps, jnp.int32(len(train.size)))
    theirs, who = poison.poisoned(problem, algorithm, slots.device)
    rows = slots._replace(device=who)
    delta = solve.solve(problem.model, theirs.train, solver, here, rows, problem.side_by_side, problem.mesh, shift)
    sources = Sources(theirs, here, who, times > 0, mu=solver.mu, key=key, delta=delta)
    sent = computed(algorithm.uploads, sources)
    codecs, residuals = algorithm.compression, state.residuals
    if codecs.up is not None:
        if codecs.feedback:
            delta, residuals = uploads.with_feedback(codecs.up, delta, slots.words, slots.device, times > 0, residuals)
        else:
            delta = uploads.arrived(codecs.up, delta, slots.words)
        if GRAD.name in sent:
            sent[GRAD.name] = uploads.arrived(codecs.up, sent[GRAD.name], slots.words)
    round = Round(
        params=state.params,
        times=times,
        size=size.astype(jnp.float32),
        correction=draw.correction(slots.device),
        delta=delta,
        grad=sent.pop("grad", None),
        gamma=sent.pop("gamma", None),
        inner=None if draw.inner is None else draw.inner[slots.device],
        second=second,
        device=slots.device,
        sent=sent,
        t=jnp.asarray(t, jnp.int32),
        N=jnp.int32(len(train.size)),
        steps=steps,
        lr=solver.lr,
        own=own,
        key=key,
        start=start,
        seconds=seconds,
        trusted=poison.trusted_update(problem, algorithm, start, seed, jnp.where(times > 0, steps, 0)),
        staleness=staleness,
        starts=None if staleness is None else here,
    )
    closed = close(algorithm, state, with_noise(algorithm, round, seed))
    weights = closed.weights
    if algorithm.asynchrony is not None and staleness is not None:
        weights = weights * algorithm.asynchrony.weights(staleness)  # of the updates as they came
    records = {
        "weights": weights if "weights" in problem.record else None,
        "inner": inner_products(round._replace(grad=sources.grad))[0] if "inner" in problem.record else None,
        "gamma": _gamma(algorithm, round, sources) if "gamma" in problem.record else None,
        "work": slots.work if "work" in problem.record else None,
        "lr": jnp.asarray(solver.lr, jnp.float32) if "lr" in problem.record else None,
        "attack": poison.gained(problem, algorithm, slots.device, weights, kept(algorithm, closed.state))
        if "attack" in problem.record
        else None,
    }
    return _Done(closed, residuals, records)


def _within(other: Multiset, some: Array, drawn: Multiset) -> Array:
    """Which devices of `other` are among `some` of those drawn."""
    return jnp.any((other.device[:, None] == drawn.device[None, :]) & some[None, :], axis=1)


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
    online: Array | None = None,
) -> Draw:
    """How the devices of round t are drawn, from those `online`; `params` is the model that they are sent.

    The state and the model may be None if the selection does not need them.
    """
    train, how, survey, memory = problem.train, algorithm.selection, None, None
    asked, some = how.sampling.survey, candidates(how, len(train.size), seed, t, online)
    if online is not None:  # the objective is then that of the devices online
        present = jnp.where(online, problem.share, 0.0)
        problem = replace(problem, share=present / jnp.maximum(jnp.sum(present), 1e-30))
    if asked is not None and params is not None:
        survey = (
            survey_inner_products(problem, params)
            if asked == GRAD
            else survey_upload(problem, asked, params, algorithm.solver.mu, how.K, shared_words(seed, t), some)
        )
    if how.sampling.memory and state is not None:
        memory = _own(algorithm, state, jnp.arange(len(train.size)) if some is None else some)
        if algorithm.memory is not None:
            memory = algorithm.memory.samplings(memory)
    known = Known(
        jnp.asarray(t, jnp.int32),
        how.K,
        how.replacement,
        train.start,
        train.size,
        problem.share,
        survey,
        memory,
        some,
        online,
    )
    return drawing(how, known)


def efforts(
    problem: Problem,
    algorithm: Algorithm,
    chosen: Multiset,
    seed: Array | int,
    t: Array | int,
    exchange: Exchange | None = None,
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and its device's effort in round t."""
    size = problem.train.size[chosen.device]
    return managed(problem.system, algorithm.solver, size, chosen.device, seed, t, exchange)
