"""The simulator: a round is one pure function, and many rounds of many runs are one compiled program.

Algorithms that differ only in numbers (mu, psi, lr) and all seeds are stacked and `vmap`ped, as many as fit into
memory. Rounds run in a compiled loop, cut into chunks of about a quarter of a second, between which progress is
shown and Ctrl-C is heard. All randomness is a pure function of (seed, round, device), so any round can be replayed
alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from folb import checkpoint, parallel, randomness, selection, stream, tree
from folb import device as devices
from folb.algorithms import Algorithm
from folb.device import Samples, Slots
from folb.errors import InputError, check_whole, choose
from folb.federation import Federation, NDArray, Split
from folb.models import Model
from folb.rules import Gradients, Round, Update, inner_products
from folb.runs import Run
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

    draw = _distribution(problem, algorithm, state.params)
    drawn, other = draw.sets(algorithm, seed, t) if chosen is None else chosen
    words, effort = _effort(problem, algorithm, drawn, seed, t)
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
        _, other_effort = _effort(problem, algorithm, other, seed, t)
        arrived = (other.times > 0) & ~other_effort.lost
        second = Gradients(
            gradients_at(here, other, arrived), jnp.where(arrived, other.times, 0.0), draw.correction(other.device)
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
    )
    update = algorithm.rule(round)
    _check_update(update, state.params, K)
    updated = jnp.any(times > 0) & jnp.any(update.weights != 0)
    params, memory = algorithm.server.apply(state.memory, round, update)
    # a round without a usable reply leaves the model, and the server's memory, as they were
    following = tree.where(updated, State(params, memory), state)
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


def _distribution(problem: Problem, algorithm: Algorithm, params: Params) -> Draw:
    """The distribution P_k^t. Where no survey makes it, it is not written down: N may be a million."""
    K, replacement, sampling = algorithm.selection.K, algorithm.selection.replacement, algorithm.selection.sampling
    size, share = problem.train.size, problem.share
    samples = problem.train.start[-1] + size[-1]  # of all devices, even where y is a window
    N, survey = len(size), None
    if sampling == "uniform":
        return Draw(
            K if replacement else 2,
            lambda words: selection.draw_uniform(words, N, K, replacement),
            lambda device: share[device] * N,
        )
    if sampling == "samples" and replacement:
        return Draw(
            K,
            lambda words: selection.draw_by_samples(randomness.uniform(words), problem.train.start, samples),
            lambda device: share[device] * samples / size[device],
        )
    if sampling == "samples":
        P = size / samples
    elif sampling == "direct":
        survey = survey_inner_products(problem, params)
        P = selection.lb_near_optimal(survey)
    else:
        P = selection.norm_proxy(survey_norms(problem, params, K))
    return Draw(
        K if replacement else N,
        lambda words: selection.draw(randomness.uniform(words), P, K, replacement),
        lambda device: share[device] / jnp.where(P[device] > 0, P[device], 1.0),
        survey,
    )


def _effort(
    problem: Problem, algorithm: Algorithm, chosen: Multiset, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For each slot, two random words for its batches, and what its device manages in round t."""
    home = randomness.uniform(randomness.words(seed, randomness.HOME, chosen.device, 2))
    words = randomness.words(seed, t, chosen.device, 4)
    cost = devices.unit_cost(algorithm.solver, problem.train.size[chosen.device])
    return words[:, :2], jax.vmap(problem.system)(home, randomness.uniform(words[:, 2:]), cost)


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
    blocks = -(-n // (_evaluation_block(problem.model) * parts)) * parts
    size = -(-n // blocks)  # as even as can be, so that little is seen twice

    def span(first: Any, last: Any, samples: Samples, given: Any) -> Any:
        def turn(i: Array, total: Any) -> Any:
            begin = jnp.minimum(i * size, n - size)
            rows = begin + jnp.arange(size)
            part = block(given, *samples.slice(begin, size), rows, rows >= i * size)
            return jax.tree.map(jnp.add, total, part)

        return jax.lax.fori_loop(first, last, turn, zero)

    return parallel.sum_of_spans(span, blocks, (samples, given), problem.mesh)


def _evaluation_block(model: Model) -> int:
    return model.at_once(HEAVY_BLOCK if model.heavy else EVALUATION_BLOCK)


CAPACITY = 128  # rounds of one chunk at most
NEVER = 2**31 - 1  # no round is evaluated every so many
CHUNK_SECONDS = 0.25


class Measured(NamedTuple):
    """One round of one run, as recorded; loss and accuracy are NaN in rounds that are not evaluated."""

    info: Info
    train_loss: Array
    test_accuracy: Array


@jax.jit
def _start(problem: Problem, algorithms: Algorithm, seeds: Array) -> State:
    """The states of all runs, stacked, before round 1."""
    return jax.vmap(start, in_axes=(None, 0, 0))(problem, algorithms, seeds)


def _each(problem: Problem, f: Callable[..., Any]) -> Callable[..., Any]:
    """f over the runs, stacked."""
    return jax.vmap(f) if problem.abreast else partial(jax.lax.map, f)


def _play(
    problem: Problem, algorithms: Algorithm, states: State, seeds: Array, t: Array, chosen: Chosen | None
) -> tuple[State, Info]:
    """Round t of all runs, stacked."""
    runs = (algorithms, states, seeds, chosen)
    played = _each(problem, lambda run: play(problem, run[0], run[1], run[2], t, run[3]))(runs)
    return parallel.everywhere(played, problem.mesh)


@jax.jit
def _round(
    problem: Problem,
    algorithms: Algorithm,
    states: State,
    seeds: Array,
    t: Array,
    every: Array,
    chosen: Chosen | None = None,
) -> tuple[State, Measured]:
    """Round t of all runs, stacked, and its evaluation where `every` divides t."""
    states, info = _play(problem, algorithms, states, seeds, t, chosen)

    def measure(params: Params) -> tuple[Array, Array]:
        return _each(problem, partial(evaluate, problem))(params)

    def skip(params: Params) -> tuple[Array, Array]:
        return jnp.full(len(seeds), jnp.nan), jnp.full(len(seeds), jnp.nan)

    return states, Measured(info, *jax.lax.cond(t % every == 0, measure, skip, states.params))


@jax.jit
def _advance(
    problem: Problem,
    algorithms: Algorithm,
    states: State,
    seeds: Array,
    t0: Array,
    t1: Array,
    every: Array,
    chosen: Chosen | None = None,
) -> tuple[State, Measured]:
    """Rounds t0 .. t1 - 1; the record has room for CAPACITY of them. What is `chosen` is so for t0 and on."""

    def turn(t: Array, carry: tuple[State, Measured]) -> tuple[State, Measured]:
        states, record = carry
        own = jax.tree.map(lambda leaf: leaf[t - t0], chosen)
        states, measured = _round(problem, algorithms, states, seeds, t, every, own)
        return states, jax.tree.map(lambda r, m: r.at[t - t0].set(m), record, measured)

    shapes = jax.eval_shape(_round, problem, algorithms, states, seeds, t0, every)[1]
    record = jax.tree.map(lambda leaf: jnp.zeros((CAPACITY, *leaf.shape), leaf.dtype), shapes)
    return jax.lax.fori_loop(t0, t1, turn, (states, record))


@jax.jit
def _choose(problem: Problem, algorithms: Algorithm, seeds: Array, rounds: Array) -> Chosen:
    """The devices of some rounds of all runs, stacked: they do not depend on the models."""

    def of_run(algorithm: Algorithm, seed: Array, t: Array) -> Chosen:
        return _distribution(problem, algorithm, None).sets(algorithm, seed, t)

    chosen = jax.lax.map(lambda t: jax.vmap(of_run, in_axes=(0, 0, None))(algorithms, seeds, t), rounds)
    return parallel.everywhere(chosen, problem.mesh)


@jax.jit
def _losses(problem: Problem, params: Params, seen: Array) -> Array:
    return _each(problem, lambda w: total_loss(problem, problem.train, w, seen))(params)


@jax.jit
def _hits(problem: Problem, params: Params, seen: Array) -> Array:
    return _each(problem, lambda w: total_hits(problem, problem.test, w, seen))(params)


class Window(NamedTuple):
    """Some rounds, with the samples of their devices."""

    problem: Problem
    chosen: Chosen  # for rounds from `base` on
    base: int
    end: int  # the first round whose devices' samples are not there


def _pieces(
    problem: Problem, federation: Federation, algorithms: Algorithm, seeds: Any, every: int, first: int, last: int
) -> Iterator[Callable[[], Any]]:
    """What brings the samples of the rounds from `first` to `last`.

    First those of the devices of some rounds, as many as fill a window; and where the last of these is evaluated, all.
    """

    def window(chosen: Chosen, base: int, rounds: list[NDArray], end: int) -> Window:
        train = stream.window(federation.train, problem.train, np.concatenate(rounds), problem.mesh)
        return Window(replace(problem, train=train), chosen, base, end)

    def train(first: int, size: int, seen: int) -> tuple[Problem, Any]:
        block = stream.block(federation.train, problem.train, first, size, problem.mesh)
        return replace(problem, train=block), np.int32(seen)

    def test(first: int, size: int, seen: int) -> tuple[Problem, Any]:
        block = stream.block(federation.test, problem.test, first, size, problem.mesh)
        return replace(problem, test=block), np.int32(seen)

    t = first
    for base in range(first, last + 1, CAPACITY):
        following = np.arange(base, base + CAPACITY, dtype=np.int32)
        chosen = jax.tree.map(np.asarray, _choose(problem, algorithms, seeds, following))
        while t < min(base + CAPACITY, last + 1):
            evaluated = t + (-t) % every
            sets = [
                np.concatenate([multiset.device[i - base].ravel() for multiset in chosen if multiset is not None])
                for i in range(t, min(base + CAPACITY, last + 1, evaluated + 1))
            ]
            count = stream.fitting(federation.train, sets)
            t += count
            yield partial(window, chosen, base, sets[:count], t)
            if t == evaluated + 1:
                yield from (partial(train, *block) for block in stream.blocks(federation.train))
                yield from (partial(test, *block) for block in stream.blocks(federation.test))


def _advance_streamed(
    pieces: Iterator[Any],
    window: Window | None,
    federation: Federation,
    algorithms: Algorithm,
    states: State,
    seeds: Any,
    t0: int,
    t1: int,
    every: int,
) -> tuple[State, Measured, Window | None]:
    """Rounds t0 .. t1 - 1, in their windows, of which the last may reach further.

    The result of a window is awaited only when the next is on its way, so that the accelerator has work; and not
    later, so that few windows are there at once.
    """
    parts: list[Measured] = []
    t = t0
    while t < t1:
        if window is None or t == window.end:
            window = next(pieces)
        n = min(window.end, t1) - t
        chosen = jax.tree.map(lambda leaf, i=t - window.base: np.roll(leaf, -i, axis=0), window.chosen)
        span = (np.int32(t), np.int32(t + n), np.int32(NEVER))
        states, record = _advance(window.problem, algorithms, states, seeds, *span, chosen)
        if parts:
            parts[-1] = jax.tree.map(np.asarray, parts[-1])
        parts.append(jax.tree.map(lambda leaf, n=n: leaf[:n], record))
        t += n
        if (t - 1) % every == 0:
            loss = _mean(_losses, pieces, federation.train, states.params)
            accuracy = _mean(_hits, pieces, federation.test, states.params)
            parts[-1] = _evaluated(parts[-1], loss, accuracy)
    return states, _joined([jax.tree.map(np.asarray, part) for part in parts]), window


def _evaluated(part: Measured, loss: Any, accuracy: Any) -> Measured:
    """A record with the evaluation of its last round."""

    def at_the_end(values: Any, last: Any) -> Any:
        return np.concatenate([np.asarray(values)[:-1], last[None]])

    return part._replace(
        train_loss=at_the_end(part.train_loss, loss), test_accuracy=at_the_end(part.test_accuracy, accuracy)
    )


def _mean(total: Callable[..., Array], pieces: Iterator[Any], side: Split, params: Params) -> Any:
    """The mean over all samples of a side, whose blocks come next, for each run."""
    parts: list[Any] = []
    for _ in stream.blocks(side):
        problem, seen = next(pieces)
        parts.append(total(problem, params, seen))
        if len(parts) > 1:
            parts[-2] = np.asarray(parts[-2])
    return (np.sum(parts, axis=0, dtype=np.float64) / len(side.y)).astype(np.float32)


Advance = Callable[[State, int, int], tuple[State, Measured]]


@contextmanager
def _advancing(
    problem: Problem, federation: Federation, algorithms: Algorithm, seeds: Any, every: int, first: int, last: int
) -> Iterator[Advance]:
    """A function of (states, t0, t1) that plays rounds t0 .. t1 - 1, the first time from `first` on."""
    if not problem.streamed:
        yield lambda states, t0, t1: _advance(
            problem, algorithms, states, seeds, np.int32(t0), np.int32(t1), np.int32(every)
        )
        return
    window = None
    with closing(stream.ahead(_pieces(problem, federation, algorithms, seeds, every, first, last))) as pieces:

        def advance(states: State, t0: int, t1: int) -> tuple[State, Measured]:
            nonlocal window
            states, record, window = _advance_streamed(
                pieces, window, federation, algorithms, states, seeds, t0, t1, every
            )
            return states, record

        yield advance


class Job(NamedTuple):
    """One run to be done: its place among those that `simulate` returns."""

    place: int
    algorithm: Algorithm
    seed: int


Observe = Callable[[int, int, Run], None]


def simulate(
    federation: Federation,
    model: Model,
    algorithms: Algorithm | Sequence[Algorithm],
    *,
    rounds: int,
    seeds: int | Sequence[int] = (0,),
    system: System | None = None,
    objective: str = "uniform",
    evaluate_every: int = 1,
    record: Sequence[str] = (),
    abreast: bool | None = None,
    accelerators: int | str = 1,
    observe: Observe | None = None,
    checkpoints: Path | None = None,
    stream: bool | None = None,
) -> list[Run]:
    """Run every algorithm with every seed; runs come back algorithm by algorithm, seed by seed.

    `record` asks for more than the standard metrics: any of "weights", "inner", "gamma", "work".
    `abreast` is explained at `problem`.
    `accelerators` share the devices of a round: how many, or "auto" for all that JAX knows of, in all processes. The
    results agree with those of one to rounding.
    `seeds` are the seeds themselves, or how many, from 0.
    `observe(i, first, part)` is called as rounds complete: `part` is run i of those returned, from round `first` on,
    with the rounds completed since the last call, and no model.
    `checkpoints` is a directory in which an interrupted simulation leaves what the same call goes on from.
    `stream` says whether the samples stay on the host, from which those of a round's devices are copied while the
    round before is computed, and blocks of all of them for an evaluation. Left open, they do if they take more than
    half of the accelerator's memory. Results agree to rounding.
    """
    algorithms = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    streamed = streams(federation, stream)
    check(federation, algorithms, rounds, seeds, evaluate_every, streamed)
    shared = problem(
        federation,
        model,
        system=system,
        objective=objective,
        record=record,
        abreast=abreast,
        mesh=parallel.mesh(accelerators),
        streamed=streamed,
    )
    groups: dict[Any, list[Job]] = {}
    for algorithm in algorithms:
        for seed in seeds:
            place = sum(map(len, groups.values()))
            groups.setdefault(jax.tree.structure(algorithm), []).append(Job(place, algorithm, seed))
    runs: dict[int, Run] = {}
    for number, batch in enumerate(batch for jobs in groups.values() for batch in _batches(shared, jobs)):
        keep = None if checkpoints is None else (checkpoints, number)
        runs |= _run_stacked(shared, federation, batch, rounds, evaluate_every, observe, keep)
    return [runs[place] for place in sorted(runs)]


def streams(federation: Federation, stream: bool | None) -> bool:
    """Whether the samples stay on the host: as asked, or because they take more than half of the memory."""
    return federation.nbytes > memory() // 2 if stream is None else stream


def _batches(problem: Problem, jobs: list[Job]) -> list[list[Job]]:
    """The jobs in their order, in as few parts as fit into memory, and as even."""
    fit = 1 if len(jobs) == 1 else fitting(problem, jobs[0].algorithm, memory())
    count = -(-len(jobs) // fit)
    return [jobs[i * len(jobs) // count : (i + 1) * len(jobs) // count] for i in range(count)]


def memory() -> int:
    """The memory that the device may use, in bytes; a CPU's is the machine's.

    In whole GiB: stacks of other sizes are other programs, whose results may differ in the last digit, and a page
    more or less should not make the difference.
    """
    stats = jax.local_devices()[0].memory_stats()
    available = stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, available >> 30) << 30


def fitting(problem: Problem, algorithm: Algorithm, memory: int) -> int:
    """How many runs stacked take half of `memory` bytes: an estimate from shapes alone, and at least 1.

    A run has its state, before and after a round and in between. Abreast it also has about eight models for each of
    its K devices (their start, update and gradients), and, twice over, what the loss keeps for its gradient of the
    samples at work at once: a block for each device, or one of the evaluation. Streamed, its devices have their share
    of three windows (one in use, one before and one to come), whose room may be twice what they hold.
    """
    model, train, K = problem.model, problem.train, algorithm.selection.K
    state = jax.eval_shape(start, problem, algorithm, 0)
    samples = max(K * max(devices.BLOCK, devices.UNROLL * algorithm.solver.batch), _evaluation_block(model))

    def backward(params: Params, rows: Array) -> Any:
        x, y = train.take(rows)
        return jax.vjp(lambda w: model.loss(w, x, y), params)[1]

    needed = 4 * _nbytes(state)
    if problem.streamed:
        chosen = K * (2 if "second" in algorithm.uploads else 1)
        needed += 6 * chosen * int(np.ceil(np.mean(train.size))) * (_nbytes((train.x, train.y)) // len(train.y))
    if problem.abreast:
        held = jax.eval_shape(backward, state.params, jax.ShapeDtypeStruct((samples,), jnp.int32))
        needed += 8 * K * _nbytes(state.params) + 2 * _nbytes(held)
    return max(1, memory // 2 // needed)


def _nbytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def check(
    federation: Federation,
    algorithms: list[Algorithm],
    rounds: int,
    seeds: Sequence[int],
    every: int,
    streamed: bool = False,
) -> None:
    """Raise an `InputError` for what cannot be simulated."""
    if not algorithms:
        raise InputError("algorithms", [], "should be at least one")
    for algorithm in algorithms:
        if not isinstance(algorithm, Algorithm):
            raise InputError("algorithms", algorithm, "should be an Algorithm, such as algorithms.folb()")
    check_whole("rounds", rounds, 1)
    check_whole("evaluate_every", every, 1)
    if every > rounds:
        raise InputError("evaluate_every", every, f"should be between 1 and rounds = {rounds}")
    if not len(seeds):
        raise InputError("seeds", list(seeds), "should be at least one")
    for seed in seeds:
        check_whole("seeds", seed, 0, 2**32 - 1)
    for algorithm in algorithms:
        K = algorithm.selection.K
        if not algorithm.selection.replacement and K > federation.N:
            raise InputError("K", K, f"should be at most the {federation.N} devices there are, without replacement")
        if streamed and algorithm.selection.survey:
            reason = "a survey reads all samples in every round, and these stream from the host (unless stream=False)"
            expected = f"should be an algorithm that samples devices uniformly or by samples: {reason}"
            raise InputError("algorithms", algorithm.name, expected)
    if len(federation.test.y) == 0:
        raise InputError(f"{federation.name}: test samples", 0, "should be at least 1")


def _run_stacked(
    problem: Problem,
    federation: Federation,
    jobs: list[Job],
    rounds: int,
    every: int,
    observe: Observe | None,
    kept: tuple[Path, int] | None,
) -> dict[int, Run]:
    """Runs whose algorithms differ in numbers alone, as one program: each by its place."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(job.algorithm for job in jobs))
    seeds = np.asarray([job.seed for job in jobs], np.uint32)
    states = _start(problem, stacked, seeds)
    inputs = (problem, stacked, states, seeds, np.int32(1), np.int32(every))
    shapes = jax.eval_shape(_round, *inputs)[1]
    record = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), shapes)
    at = (1, states, [record])
    model = sum(leaf[0].nbytes for leaf in jax.tree.leaves(states.params))

    def parts(first: int, record: Measured) -> dict[int, Run]:
        """The rounds of `record`, the earliest being `first`, as runs."""
        return {job.place: _run(problem, job, record, r, first, every, model) for r, job in enumerate(jobs)}

    def tell(first: int, record: Measured) -> None:
        if observe is None:
            return
        for place, part in parts(first, record).items():
            observe(place, first, part)

    mark = ""
    if kept is not None:
        others = (problem.share, problem.system, *inputs[1:])  # the samples' digest is known
        mark = checkpoint.fingerprint(federation.digest + str(jax.make_jaxpr(_round)(*inputs)), others)
    if kept is not None and (found := checkpoint.load(*kept, mark, (states, record))) and found[0] <= rounds + 1:
        at = (found[0], found[1][0], [found[1][1]])
        tell(1, found[1][1])
    at = parallel.shared(at)

    spent = 0.0  # seconds that the last checkpoint took

    def keep() -> None:
        nonlocal spent
        if kept is not None:
            begun = time.perf_counter()
            t, states, chunks = at
            checkpoint.save(*kept, mark, t, (states, _joined(chunks)))
            spent = time.perf_counter() - begun

    saved, length = time.perf_counter(), 1
    try:
        with _advancing(problem, federation, stacked, seeds, every, at[0], rounds) as advance:
            while at[0] <= rounds:
                t, states, chunks = at
                length = min(length, CAPACITY, rounds - t + 1)
                begun = time.perf_counter()
                states, record = advance(states, t, t + length)
                part = jax.tree.map(lambda leaf, n=length: np.asarray(leaf)[:n], record)
                at = (t + length, states, [*chunks, part])  # at once: an interruption must not come in between
                tell(t, part)
                now = time.perf_counter()
                # grow slowly: the first chunk's time is compilation
                length = parallel.shared(max(1, min(4 * length, int(CHUNK_SECONDS * length / (now - begun)))))
                if now - saved > max(checkpoint.SECONDS, spent / checkpoint.SHARE):
                    keep()
                    saved = time.perf_counter()
    finally:
        keep()
    _, states, chunks = at
    params = jax.tree.map(np.asarray, states.params)
    runs = parts(1, _joined(chunks))
    for r, job in enumerate(jobs):
        runs[job.place] = replace(runs[job.place], params=jax.tree.map(lambda leaf, r=r: leaf[r], params))
    return runs


def _joined(chunks: list[Measured]) -> Measured:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)


def _run(problem: Problem, job: Job, record: Measured, r: int, first: int, every: int, model: int) -> Run:
    """Run r of a stacked record whose earliest round is `first`, without its model of `model` bytes."""
    own = jax.tree.map(lambda leaf: np.asarray(leaf)[:, r], record)
    info = own.info
    up, down = traffic(job.algorithm, info, len(problem.train.size), model)
    rounds = np.arange(first, first + len(info.asked))
    evaluated = rounds % every == 0
    return Run(
        algorithm=job.algorithm.name,
        parameters=dict(job.algorithm.origin.settings),
        seed=int(job.seed),
        evaluated_rounds=rounds[evaluated],
        test_accuracy=own.test_accuracy[evaluated],
        train_loss=own.train_loss[evaluated],
        bytes_up=up,
        bytes_down=down,
        seconds=info.seconds,
        devices=info.device,
        times=info.times.astype(np.int32),
        lost=info.lost,
        updated=info.updated,
        records={name: getattr(info, name) for name in problem.record},
    )


def traffic(algorithm: Algorithm, info: Info, N: int, model: int) -> tuple[Any, Any]:
    """Bytes up and down in each round, those of the model being `model`.

    Down: the model, to every distinct device asked (all N for a survey). Up: what reaches the server in time
    from each distinct device: its update; its gradient and gamma where the rule uses them; the gradient
    alone from S_2 of Algorithm 2; and to a survey, a gradient (7) or its norm from all N.
    """
    scalar = 4
    reply = model * (2 if "grad" in algorithm.uploads else 1) + scalar * ("gamma" in algorithm.uploads)
    survey = {"direct": N * model, "norm": N * scalar}.get(algorithm.selection.sampling, 0)
    up = np.asarray(info.replied, np.int64) * reply + np.asarray(info.gradients_only, np.int64) * model + survey
    return up, np.asarray(info.asked, np.int64) * model
