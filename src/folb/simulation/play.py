"""A round of Algorithm 1 or 2 in the simulator: a pure function of the problem, the state, the seed and the round."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.algorithm import Algorithm
from folb.core.round import Chosen, Draw, State, close, drawing, managed
from folb.core.rules import Gradients, Round, inner_products
from folb.core.selection import Multiset
from folb.core.system import Effort
from folb.simulation import solve
from folb.simulation.problem import Problem
from folb.simulation.solve import Slots
from folb.simulation.survey import survey_inner_products, survey_norms
from folb.typing import Params


class Info(NamedTuple):
    """What is worth recording of a round. Fields not asked for are None."""

    device: Array  # [K] the distinct devices chosen
    times: Array  # [K] times each counts; 0 for repeats and lost devices
    lost: Array  # [K] chosen, but without a usable reply
    asked: Array  # distinct devices that were sent the model
    replied: Array  # distinct devices of S_1 whose update came back
    gradients_only: Array  # distinct devices of S_2, not of S_1, whose gradient came back
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

    The devices may have been `chosen` before, for their samples to be here.
    """
    model, train = problem.model, problem.train
    uploads = algorithm.uploads
    K = algorithm.selection.K

    draw = distribution(problem, algorithm, state.params)
    drawn, other = draw.sets(algorithm, seed, t) if chosen is None else chosen
    words, effort = efforts(problem, algorithm, drawn, seed, t)
    usable = (drawn.times > 0) & ~effort.lost
    times = jnp.where(usable, drawn.times, 0.0)
    slots = Slots(drawn.device, jnp.where(usable, effort.work, 0), words)

    def gradients_at(stack: Params, chosen: Multiset, wanted: Array) -> Params:
        return solve.gradients(model, train, stack, chosen.device, wanted, problem.abreast, problem.mesh)

    # What nobody uses below is not computed: the compiler drops it.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (K, *v.shape)), state.params)
    delta = solve.solve(model, train, algorithm.solver, state.params, slots, problem.abreast, problem.mesh)
    grad = gradients_at(here, drawn, usable)
    after = gradients_at(jax.tree.map(jnp.add, here, delta), drawn, usable)
    gamma = solve.inexactness(algorithm.solver, delta, grad, after, algorithm.clamp_gamma)
    second, asked, gradients_only, wait = None, drawn.times > 0, jnp.int32(0), jnp.float32(0)
    if other is not None:
        _, other_effort = efforts(problem, algorithm, other, seed, t)
        arrived = (other.times > 0) & ~other_effort.lost
        second = Gradients(
            gradients_at(here, other, arrived),
            jnp.where(arrived, other.times, 0.0),
            draw.correction(other.device),
            other.device,
        )
        repeated = jnp.any(other.device[:, None] == drawn.device[None, :], axis=1)
        fresh = (other.times > 0) & ~repeated
        asked = jnp.concatenate([asked, fresh])
        gradients_only = jnp.sum(fresh & arrived)
        wait = jnp.max(jnp.where(fresh & other_effort.lost, other_effort.seconds, 0.0))

    inner = None if draw.survey is None else draw.survey[drawn.device]
    round = Round(
        params=state.params,
        times=times,
        size=train.size[drawn.device].astype(jnp.float32),
        correction=draw.correction(drawn.device),
        delta=delta,
        grad=grad if "grad" in uploads else None,
        gamma=gamma if "gamma" in uploads else None,
        inner=inner,
        second=second,
        device=drawn.device,
    )
    following, update, updated = close(algorithm, state, round)
    surveyed = jnp.int32(len(train.size)) if algorithm.selection.survey else jnp.sum(asked)
    info = Info(
        device=drawn.device,
        times=times,
        lost=(drawn.times > 0) & effort.lost,
        asked=surveyed,
        replied=jnp.sum(usable),
        gradients_only=gradients_only,
        seconds=jnp.maximum(wait, jnp.max(jnp.where(drawn.times > 0, effort.seconds, 0.0))),
        updated=updated,
        weights=update.weights if "weights" in problem.record else None,
        inner=inner_products(round._replace(grad=grad))[0] if "inner" in problem.record else None,
        gamma=gamma if "gamma" in problem.record else None,
        work=slots.work if "work" in problem.record else None,
    )
    return following, info


def distribution(problem: Problem, algorithm: Algorithm, params: Params) -> Draw:
    """The distribution P_k^t of a problem's devices."""
    train, survey = problem.train, None
    if algorithm.selection.sampling == "direct":
        survey = survey_inner_products(problem, params)
    elif algorithm.selection.sampling == "norm":
        survey = survey_norms(problem, params, algorithm.selection.K)
    return drawing(algorithm.selection, train.start, train.size, problem.share, survey)


def efforts(
    problem: Problem, algorithm: Algorithm, chosen: Multiset, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and what its device manages in round t."""
    size = problem.train.size[chosen.device]
    return managed(problem.system, algorithm.solver, size, chosen.device, seed, t)
