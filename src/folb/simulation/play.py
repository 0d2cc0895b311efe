"""A round of Algorithm 1 or 2 in the simulator: a pure function of the problem, the state, the seed and the round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import clock
from folb.core.algorithm import Algorithm
from folb.core.memory import Rows, empty, gathered, scattered, started
from folb.core.privacy import draw_words, with_noise
from folb.core.randomness import Multiset
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
    sizes,
    told,
    with_step_size,
)
from folb.core.rules import Gradients, Round, inner_products
from folb.core.selection import Draw, Known, candidates, drawing
from folb.core.solver import steps_of
from folb.core.system import Effort, asked_for, times_bytes
from folb.core.tree import check_like
from folb.core.upload import ENCODED, GAMMA, GRAD, UNCLAMPED_GAMMA
from folb.errors import InputError
from folb.simulation import solve
from folb.simulation.evaluate import gained
from folb.simulation.problem import ENDLESS, Problem, opening, poisoned
from folb.simulation.solve import Slots, Sources, computed, decoded, with_feedback
from folb.simulation.survey import survey_arrays, survey_inner_products
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
    """The state before the first of `rounds` rounds. Its memory of devices has room for those that they can meet."""
    state, own = begin(algorithm, problem.model.init(jax.random.key(seed)))
    N, how, codecs = len(problem.train.size), algorithm.selection, algorithm.compression
    if problem.clocked:
        state = state._replace(clock=clock.zero())
    if codecs.remembers:
        state = state._replace(residuals=empty(jax.tree.map(jnp.zeros_like, state.params), N, rounds * how.K))
    if not jax.tree.leaves(own):
        return state
    first = how.first
    if first is None:
        return state._replace(devices=empty(own, N, rounds * how.K))
    key = shared_words(seed, 1)
    model = model_sent(algorithm, state, key)
    answers = survey_arrays(problem, first, model, algorithm.solver.mu, min(how.K, N), key)
    known = how.sampling.remember(answers, how.K)
    check_like("select: first: what `remember` returns", known, empty(own[1], N, N).rows)
    # the sampling knows all devices now; the algorithm's own memory, which may be as large as models, only grows
    return state._replace(devices=(empty(own[0], N, rounds * how.K), Rows(known)))


def play(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    seed: Array | int,
    t: Array | int,
    chosen: Chosen | None = None,  # if they were chosen earlier, so that their samples could be brought here
) -> tuple[State, Info]:
    """Round t (1, 2, …) of Algorithm 1 or 2: select, solve, aggregate, step."""
    algorithm = with_step_size(algorithm, state, t)
    how, key = algorithm.selection, shared_words(seed, t)
    model_at = model_sent(algorithm, state, key)
    waited, online = opening(problem, state.clock)
    draw = distribution(problem, algorithm, state, seed, t, model_at, online)
    begun = Begun(problem, algorithm, state, seed, t, key, draw, model_at, online)
    if algorithm.asynchrony is not None:
        from folb.simulation.events import play_without_waiting  # it builds on this module

        return play_without_waiting(begun)
    drawn, other = sets(draw, how, *draw_words(algorithm, seed, t)) if chosen is None else chosen
    drawn, end = reached(drawn, online), None
    timed = timing(begun, waited)
    words, effort = efforts(begun, drawn.device, None if timed is None else timed.first)
    if how.wanted is not None:
        effort, end = first_replies(drawn, effort, how.wanted, words[:, 0])
    usable = (drawn.times > 0) & ~effort.lost
    times = jnp.where(usable, drawn.times, 0.0)
    slots = Slots(drawn.device, jnp.where(usable, effort.work, 0), words)

    # Unused values are dropped by the compiler.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (how.K, *v.shape)), model_at)
    second, asked, gradients_only, wait = None, drawn.times > 0, jnp.int32(0), jnp.float32(0)
    if other is not None:
        other = reached(other, online)
        second, fresh, gradients_only, wait = _second_set(begun, drawn, other, effort, end, timed, here)
        asked = jnp.concatenate([asked, fresh])

    closed, records = work_and_close(begun, slots, times, here, second=second, seconds=effort.seconds)
    surveyed = jnp.int32(0)
    if how.first is not None:
        surveyed = jnp.where(jnp.asarray(t) == 1, jnp.int32(len(problem.train.size)), 0)
    elif how.survey is not None:
        surveyed = jnp.sum(_asked(begun)[1])
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
        **records,
    )
    following = closed.state
    if timed is not None:
        info = info._replace(seconds=timed.began + info.seconds)
    if problem.clocked:
        following = following._replace(clock=state.clock.after(info.seconds))
    if jax.tree.leaves(closed.own):
        devices = scattered(state.devices, drawn.device, closed.updated & usable, closed.own)
        following = following._replace(devices=devices)
    return following, info


class Begun(NamedTuple):
    """A round that has begun: what it depends on, how its devices are drawn, and the model that the server sends."""

    problem: Problem
    algorithm: Algorithm
    state: State
    seed: Array | int
    t: Array | int
    key: Array  # two random words that its devices share
    draw: Draw
    model: Params
    online: Array | None  # the devices that can be reached, if not all


def _second_set(
    begun: Begun, drawn: Multiset, other: Multiset, effort: Effort, end: Any, timed: Timing | None, here: Params
) -> tuple[Gradients, Array, Array, Array]:
    """What S_2 of Algorithm 2 sends; which of it are not in S_1; how many of these answer; and how long they take.

    A device in both sets is asked once: S_1 was `drawn`, and makes this `effort`, until the `end` of the round.
    """
    problem, algorithm, asks, worked, steps = begun.problem, begun.algorithm, None, None, None
    solver, upload = algorithm.solver, algorithm.gradient.second

    def within(some: Array) -> Array:
        """Which devices of S_2 are among `some` of S_1."""
        return jnp.any((other.device[:, None] == drawn.device[None, :]) & some[None, :], axis=1)

    if timed is not None:
        again, first = within(drawn.times > 0), timed.first
        down, up = jnp.where(again, first.down, timed.model), jnp.where(again, first.up, timed.gradient)
        asks = Exchange(down, up, first.now, again | algorithm.gradient.works)
    other_words, other_effort = efforts(begun, other.device, asks)
    if end is not None:  # a reply for both sets counts for both, or is lost for both
        again, lost = within(drawn.times > 0), within(effort.lost)
        late = jnp.where(again, lost, (other_effort.seconds > end) & times_bytes(problem.system))
        seconds = jnp.minimum(other_effort.seconds, end)
        other_effort = other_effort._replace(seconds=seconds, lost=other_effort.lost | late)
    usable = (other.times > 0) & ~other_effort.lost
    if algorithm.gradient.works:  # it works like S_1, but only for this upload
        there = Slots(other.device, jnp.where(usable, other_effort.work, 0), other_words)
        worked = solve.solve(problem, solver, here, there).delta
        steps = steps_of(solver, there.work, problem.train.size[other.device])
    theirs = Sources(problem, here, other.device, usable, mu=solver.mu, key=begun.key, delta=worked)
    answers = computed((upload,), theirs)[upload.name]
    if algorithm.compression.up is not None and upload == GRAD:
        answers = decoded(algorithm.compression.up, answers, other_words)
    times, correction = jnp.where(usable, other.times, 0.0), begun.draw.correction(other.device)
    second = Gradients(answers, times, correction, other.device, steps)
    fresh = (other.times > 0) & ~jnp.any(other.device[:, None] == drawn.device[None, :], axis=1)
    awaited = fresh if times_bytes(problem.system) else fresh & other_effort.lost
    return second, fresh, jnp.sum(fresh & usable), jnp.max(jnp.where(awaited, other_effort.seconds, 0.0))


def _asked(begun: Begun) -> tuple[Array, Array]:
    """The devices that a survey asks, and which of them are there to answer."""
    N, online = len(begun.problem.train.size), begun.online
    who = candidates(begun.algorithm.selection, N, begun.seed, begun.t, online)
    who = jnp.arange(N) if who is None else who
    return who, jnp.ones(len(who), bool) if online is None else online[who]


def work_and_close(
    begun: Begun, slots: Slots, times: Array, here: Params, lr: Any = None, staleness: Array | None = None, **more: Any
) -> tuple[Closed, dict[str, Array]]:
    """The devices of the slots work, each from its own model in `here`; the closed round, and what is to be recorded.

    `lr` has the step size of each slot, if they may differ. The rule sees `more` in its round.
    """
    problem, algorithm, state, seed, t, key, draw, start, _ = begun
    train, solver = problem.train, algorithm.solver if lr is None else replace(algorithm.solver, lr=lr)
    size = train.size[slots.device]
    steps = steps_of(solver, slots.work, size)
    own = _own(algorithm, state, slots.device)
    sent_down = told(algorithm, state, own, steps, jnp.int32(len(train.size)))
    theirs, who = poisoned(problem, algorithm, slots.device)
    there, wanted = slots._replace(device=who), any("momentum" in one.needs for one in algorithm.uploads)
    delta, momentum = solve.solve(theirs, solver, here, there, *sent_down, momentum=wanted)
    sources = Sources(theirs, here, who, times > 0, mu=solver.mu, key=key, delta=delta, momentum=momentum)
    sent = computed(algorithm.uploads, sources)
    codecs, residuals = algorithm.compression, state.residuals
    if codecs.up is not None:
        if codecs.feedback:
            delta, residuals = with_feedback(codecs.up, delta, slots.words, slots.device, times > 0, residuals)
        else:
            delta = decoded(codecs.up, delta, slots.words)
        for name in (one.name for one in ENCODED if one.name in sent):
            sent[name] = decoded(codecs.up, sent[name], slots.words)
    round = Round(
        params=state.params,
        times=times,
        size=size.astype(jnp.float32),
        correction=draw.correction(slots.device),
        delta=delta,
        grad=sent.pop("grad", None),
        gamma=sent.pop("gamma", None),
        inner=None if draw.inner is None else draw.inner[slots.device],
        device=slots.device,
        sent=sent,
        t=jnp.asarray(t, jnp.int32),
        N=jnp.int32(len(train.size)),
        steps=steps,
        lr=solver.lr,
        own=own,
        key=key,
        start=start,
        trusted=solve.trusted_update(problem, algorithm, start, seed, jnp.where(times > 0, steps, 0)),
        staleness=staleness,
        starts=None if staleness is None else here,
        **more,
    )
    closed = close(algorithm, state, with_noise(algorithm, round, seed))
    weights = closed.weights
    if algorithm.asynchrony is not None and staleness is not None:
        weights = weights * algorithm.asynchrony.weights(staleness)  # of the updates as they came
    gamma = GAMMA if algorithm.clamp_gamma else UNCLAMPED_GAMMA  # it is recorded whether it was sent or not
    records: dict[str, Callable[[], Array]] = {
        "weights": lambda: weights,
        "inner": lambda: inner_products(round._replace(grad=sources.grad))[0],
        "gamma": lambda: computed((gamma,), sources)["gamma"] if round.gamma is None else round.gamma,
        "work": lambda: slots.work,
        "lr": lambda: jnp.asarray(solver.lr, jnp.float32),
        "attack": lambda: gained(problem, algorithm, slots.device, weights, kept(algorithm, closed.state)),
    }
    asked = {name: value() for name, value in records.items() if name in problem.record}
    return closed._replace(state=closed.state._replace(residuals=residuals)), asked


def _own(algorithm: Algorithm, state: State, device: Array) -> Any:
    """The memory of some devices, stacked; () if the algorithm has no memory."""
    if jax.tree.leaves(state.devices):
        return gathered(state.devices, device)
    return started(algorithm.memory, state.params)[1]  # it has no arrays


def distribution(
    problem: Problem,
    algorithm: Algorithm,
    state: State | None,  # None if the selection does not need it
    seed: Array | int,
    t: Array | int,
    params: Params | None = None,  # the model that the devices are sent; None as above
    online: Array | None = None,
) -> Draw:
    """How the devices of round t are drawn, from those `online`."""
    train, how, survey, memory = problem.train, algorithm.selection, None, None
    asked, some = how.survey, candidates(how, len(train.size), seed, t, online)
    if online is not None:  # the objective is then that of the devices online
        present = jnp.where(online, problem.share, 0.0)
        problem = replace(problem, share=present / jnp.maximum(jnp.sum(present), 1e-30))
    if asked is not None and params is not None and asked == GRAD:
        survey = survey_inner_products(problem, params)
    elif asked is not None and params is not None:
        survey = survey_arrays(problem, asked, params, algorithm.solver.mu, how.K, shared_words(seed, t), some)
        if jnp.ndim(survey) != 1:
            raise InputError(f"survey: shape of {asked.name}", jnp.shape(survey)[1:], "should be (): a number")
    if how.sampling.remembers and state is not None:
        memory = _own(algorithm, state, jnp.arange(len(train.size)) if some is None else some)
        if algorithm.memory is not None:
            memory = algorithm.memory.samplings(memory)
    known = Known(jnp.asarray(t, jnp.int32), how.expected, how.replacement, train.start, train.size, problem.share)
    return drawing(how, known._replace(survey=survey, memory=memory, candidates=some, online=online))


def efforts(begun: Begun, device: Array, exchange: Exchange | None) -> tuple[Array, Effort]:
    """For each device, two random words for its batches, and its effort."""
    problem, solver = begun.problem, begun.algorithm.solver
    return managed(problem.system, solver, problem.train.size[device], device, begun.seed, begun.t, exchange)


def reached(chosen: Multiset, online: Array | None) -> Multiset:
    """The chosen devices; those that are offline count 0 times, and are not asked."""
    return chosen if online is None else chosen._replace(times=jnp.where(online[chosen.device], chosen.times, 0.0))


class Timing(NamedTuple):
    """What a system model knows in a round, if it asks for more than random numbers."""

    began: Any  # seconds of the round that were over when its devices were asked
    first: Exchange  # with a device of S_1
    model: Any  # bytes: 0 if a survey has brought the model
    gradient: int  # bytes from a device of S_2 alone


def timing(begun: Begun, waited: Any) -> Timing | None:
    """The timing of a round; None if its system model asks for nothing more. A survey comes before other messages.

    Surveys have answers from all devices that they ask. Their computations take no time.
    """
    problem, algorithm = begun.problem, begun.algorithm
    if not asked_for(problem.system):
        return None
    how, size = algorithm.selection.sampling, sizes(algorithm, begun.state.params)
    now = waited + begun.state.clock.now if problem.clocked else 0.0
    took: Any = 0.0
    model: Any = size.model
    if times_bytes(problem.system) and (how.survey is not None or how.first is not None):
        who, there = _asked(begun)
        _, effort = efforts(begun, who, Exchange(size.model, size.answer, now, works=False))
        took, model = jnp.max(jnp.where(there, effort.seconds, 0.0)), jnp.float32(0)
        if how.survey is None:  # once, before the first round
            first = jnp.asarray(begun.t) == 1
            took, model = jnp.where(first, took, 0.0), jnp.where(first, 0.0, size.model)
    return Timing(waited + took, Exchange(model + size.shift, size.reply, now + took), model, size.gradient)
