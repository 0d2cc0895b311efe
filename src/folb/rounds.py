"""A round of Algorithm 1 or 2, and the evaluation of a model: pure functions of the problem, the state and the seed.

All randomness is a pure function of (seed, round, device), so any round can be replayed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from folb import device as devices
from folb import parallel, randomness, selection, stream, tree
from folb.algorithms import Algorithm
from folb.device import Samples, Slots
from folb.errors import InputError, check_whole, choose
from folb.federation import Federation
from folb.models import Model
from folb.rules import Gradients, Round, Update, inner_products
from folb.selection import Multiset
from folb.system import Effort, System, uniform
from folb.tree import Params

RECORDS = ("weights", "inner", "gamma", "work")
EVALUATION_BLOCK = 4096  # samples evaluated at once, if the model is light
HEAVY_BLOCK = 256  # if it is heavy: its activations are many times the size of a sample


class State(NamedTuple):
    """All that a run needs to go on: the model and the server's memory."""

    params: Params
    memory: Any


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """What stays the same over a run: the data and model, the objective and the system."""

    train: Samples
    test: Samples
    share: Array  # p_k of (1)
    system: System
    model: Model = field(metadata={"static": True})
    record: tuple[str, ...] = field(metadata={"static": True})
    abreast: bool = field(metadata={"static": True})
    mesh: Mesh | None = field(metadata={"static": True})

    @property
    def streamed(self) -> bool:
        """Whether the samples stay on the host, but for a window of them."""
        return self.train.present is not None


def problem(
    federation: Federation,
    model: Model,
    *,
    system: System | None = None,
    objective: str = "uniform",
    record: Sequence[str] = (),
    abreast: bool | None = None,
    mesh: Mesh | None = None,
    streamed: bool = False,
) -> Problem:
    """Bring a federation to the accelerator and fix the objective (1): "uniform" or "samples".

    With `streamed`, what is known of its devices, and none of its samples yet.

    `abreast` says whether devices and runs are computed side by side. Left open, they are unless the model is
    heavy and this is a CPU, on which one large product after another is faster than many at once. The accelerators
    of `mesh` share the devices of a round.
    """
    choose("objective", objective, ("uniform", "samples"))
    if system is not None and not callable(system):
        raise InputError("system", system, "should be made by a function of folb.system, such as deadline()")
    if not isinstance(model, Model):
        raise InputError("model", model, "should be a Model, such as models.logistic(shape, classes)")
    if model.block is not None:
        check_whole("model: block", model.block, 1)
    for name in record:
        choose("record", name, RECORDS)
    n = federation.train.size
    share = n / n.sum() if objective == "samples" else np.full(federation.N, 1 / federation.N)
    bring = stream.nothing if streamed else devices.bring
    table = None if federation.table is None else parallel.put(federation.table, mesh)
    return Problem(
        train=bring(federation, federation.train, table, mesh),
        test=bring(federation, federation.test, table, mesh),
        share=parallel.put(share.astype(np.float32), mesh),
        system=uniform() if system is None else system,
        model=model,
        record=tuple(record),
        abreast=not (model.heavy and jax.default_backend() == "cpu") if abreast is None else abreast,
        mesh=mesh,
    )


def start(problem: Problem, algorithm: Algorithm, seed: Array | int) -> State:
    """The state before the first round: a function of the model and the seed alone."""
    params = problem.model.init(jax.random.key(seed))
    return State(params, algorithm.server.init(params))


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
        return devices.gradients(model, train, stack, chosen.device, wanted, problem.abreast, problem.mesh)

    # What nobody uses below is not computed: the compiler drops it.
    here = jax.tree.map(lambda v: jnp.broadcast_to(v, (K, *v.shape)), state.params)
    delta = devices.solve(model, train, algorithm.solver, state.params, slots, problem.abreast, problem.mesh)
    grad = gradients_at(here, drawn, usable)
    after = gradients_at(jax.tree.map(jnp.add, here, delta), drawn, usable)
    gamma = devices.inexactness(algorithm.solver, delta, grad, after, algorithm.clamp_gamma)
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


def close(algorithm: Algorithm, state: State, round: Round) -> tuple[State, Update, Array]:
    """The state after a round, its update, and whether the model changed.

    A round without a usable reply leaves the model, and the server's memory, as they were.
    """
    update = algorithm.rule(round)
    _check_update(update, state.params, algorithm.selection.K)
    updated = jnp.any(round.times > 0) & jnp.any(update.weights != 0)
    params, memory = algorithm.server.apply(state.memory, round, update)
    return tree.where(updated, State(params, memory), state), update, updated


def _check_update(update: Update, params: Params, K: int) -> None:
    """Shapes are known before anything runs: a rule that got them wrong is told so, rather than broadcast."""
    delta, weights = jax.tree.map(jnp.shape, tuple(update))
    if delta != jax.tree.map(jnp.shape, params) or weights != (K,):
        expected = f"should be an update of the shapes of the model, and weights of shape ({K},)"
        raise InputError("rule: shapes", (delta, weights), expected)


Chosen = tuple[Multiset, Multiset | None]  # S_1, and S_2 of Algorithm 2


class Draw(NamedTuple):
    """How devices are drawn in a round."""

    words: int  # random words that a draw takes
    devices: Callable[[Array], Multiset]
    correction: Callable[[Array], Array]  # p_k / P_k of devices: what makes a mean over the draw one of (1)
    survey: Array | None = None  # the exact inner products of all N devices, where the selection (7) needed them

    def sets(self, algorithm: Algorithm, seed: Array | int, t: Array | int) -> Chosen:
        """The devices of round t."""
        luck = randomness.words(seed, t, randomness.SERVER, 2 * self.words)
        second = self.devices(luck[self.words :]) if "second" in algorithm.uploads else None
        return self.devices(luck[: self.words]), second


def distribution(problem: Problem, algorithm: Algorithm, params: Params) -> Draw:
    """The distribution P_k^t of a problem's devices."""
    train, survey = problem.train, None
    if algorithm.selection.sampling == "direct":
        survey = survey_inner_products(problem, params)
    elif algorithm.selection.sampling == "norm":
        survey = survey_norms(problem, params, algorithm.selection.K)
    return drawing(algorithm.selection, train.start, train.size, problem.share, survey)


def drawing(how: selection.Selection, start: Array, size: Array, share: Array, survey: Array | None = None) -> Draw:
    """The distribution P_k^t. Where no survey makes it, it is not written down: N may be a million.

    `survey` is what (7) or its stand-in are made of: inner products, or norms.
    """
    K, replacement, sampling = how.K, how.replacement, how.sampling
    samples = start[-1] + size[-1]  # of all devices, even where y is a window
    N = len(size)
    if sampling == "uniform":
        return Draw(
            K if replacement else 2,
            lambda words: selection.draw_uniform(words, N, K, replacement),
            lambda device: share[device] * N,
        )
    if sampling == "samples" and replacement:
        return Draw(
            K,
            lambda words: selection.draw_by_samples(words, start, samples),
            lambda device: share[device] * samples / size[device],
        )
    if survey is None:
        P = size / samples
    elif sampling == "direct":
        P = selection.lb_near_optimal(survey)
    else:
        P = selection.norm_proxy(survey)
    return Draw(
        K if replacement else N,
        lambda words: selection.draw(randomness.uniform(words), P, K, replacement),
        lambda device: share[device] / jnp.where(P[device] > 0, P[device], 1.0),
        survey if sampling == "direct" else None,
    )


def efforts(
    problem: Problem, algorithm: Algorithm, chosen: Multiset, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and what its device manages in round t."""
    size = problem.train.size[chosen.device]
    return managed(problem.system, algorithm.solver, size, chosen.device, seed, t)


def managed(
    system: System, solver: devices.Solver, size: Array, who: Array, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """Of devices `who` with `size` samples, the random words for their batches, and what they manage in round t."""
    home = randomness.uniform(randomness.words(seed, randomness.HOME, who, 2))
    words = randomness.words(seed, t, who, 4)
    return words[:, :2], jax.vmap(system)(home, randomness.uniform(words[:, 2:]), devices.unit_cost(solver, size))


def survey_inner_products(problem: Problem, params: Params) -> Array:
    """<grad f, grad F_k> for all N devices, without N gradients: one gradient, one jvp, one segment sum."""
    train, loss = problem.train, problem.model.loss
    owner, weight = owners(problem)

    def gradient_block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Params:
        params, weight = given
        return jax.grad(lambda w: jnp.sum(jnp.where(real, weight[rows], 0.0) * loss(w, x, y)))(params)

    g = sum_over_blocks(problem, gradient_block, (params, weight), train, jax.tree.map(jnp.zeros_like, params))

    def slope_block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, g, owner = given
        slope = jax.jvp(lambda w: loss(w, x, y), (params,), (g,))[1]
        return jax.ops.segment_sum(jnp.where(real, slope, 0.0), owner[rows], len(train.size))

    slopes = sum_over_blocks(problem, slope_block, (params, g, owner), train, jnp.zeros(len(train.size)))
    return slopes / train.size


def owners(problem: Problem) -> tuple[Array, Array]:
    """The device of each training sample, and the sample's weight p_k / n_k in the objective (1)."""
    size = problem.train.size
    owner = jnp.repeat(jnp.arange(len(size)), size, total_repeat_length=len(problem.train.y))
    return owner, (problem.share / size)[owner]


def survey_norms(problem: Problem, params: Params, group: int) -> Array:
    """||grad F_k|| for all N devices, `group` gradients in memory at a time."""
    N = len(problem.train.size)
    stack = jax.tree.map(lambda v: jnp.broadcast_to(v, (group, *v.shape)), params)

    def norms(first: Array) -> Array:
        device = first + jnp.arange(group)
        g = devices.gradients(
            problem.model,
            problem.train,
            stack,
            jnp.minimum(device, N - 1),
            device < N,
            problem.abreast,
            problem.mesh,
        )
        return tree.norms(g)

    return jax.lax.map(norms, jnp.arange(0, N, group)).reshape(-1)[:N]


def evaluate(problem: Problem, params: Params) -> tuple[Array, Array]:
    """Training loss and test accuracy, each sample counting once whatever its device."""
    train, test = problem.train, problem.test
    return total_loss(problem, train, params) / len(train.y), total_hits(problem, test, params) / len(test.y)


def total_loss(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """The sum of the samples' losses, but for the first `seen` of them."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(jnp.where(real & (rows >= seen), _one_each("loss", model.loss(params, x, y), y), 0.0))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.float32(0))


def total_hits(problem: Problem, samples: Samples, params: Params, seen: Array | int = 0) -> Array:
    """How many samples the model gets right, the first `seen` of them left out."""
    model = problem.model

    def block(given: Any, x: Array, y: Array, rows: Array, real: Array) -> Array:
        params, seen = given
        return jnp.sum(real & (rows >= seen) & (_one_each("predict", model.predict(params, x), y) == y))

    return sum_over_blocks(problem, block, (params, seen), samples, jnp.int32(0))


def _one_each(name: str, values: Array, y: Array) -> Array:
    """What a model says of a batch, if it is a value for each sample: anything else would be broadcast in silence."""
    if jnp.shape(values) != y.shape:
        expected = f"should be {y.shape}, a value for each"
        raise InputError(f"model: shape of {name}(...) for {len(y)} samples", jnp.shape(values), expected)
    return values


def sum_over_blocks(problem: Problem, block: Callable[..., Any], given: Any, samples: Samples, zero: Any) -> Any:
    """The sum of block(given, x, y, rows, real) over all rows, as many at a time as suits the model.

    Blocks are slices, which cost far less than gathers: the last reaches back over rows already seen, which
    `real` leaves out.
    """
    n, parts = len(samples.y), 1 if problem.mesh is None else problem.mesh.size
    blocks = -(-n // (evaluation_block(problem.model) * parts)) * parts
    size = -(-n // blocks)  # as even as can be, so that little is seen twice

    def span(first: Any, last: Any, samples: Samples, given: Any) -> Any:
        def turn(i: Array, total: Any) -> Any:
            begin = jnp.minimum(i * size, n - size)
            rows = begin + jnp.arange(size)
            part = block(given, *samples.slice(begin, size), rows, rows >= i * size)
            return jax.tree.map(jnp.add, total, part)

        return jax.lax.fori_loop(first, last, turn, zero)

    return parallel.sum_of_spans(span, blocks, (samples, given), problem.mesh)


def evaluation_block(model: Model) -> int:
    return model.at_once(HEAVY_BLOCK if model.heavy else EVALUATION_BLOCK)
