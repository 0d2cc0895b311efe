"""Many rounds of many runs as one compiled program.

Runs whose algorithms differ only in numbers (mu, psi, lr) or in their seeds are stacked. The samples are on the
accelerator, or come from the host in windows of a few rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core.algorithm import Algorithm
from folb.core.average import ServerModel
from folb.core.privacy import draw_words
from folb.core.round import Chosen, State, kept, sets
from folb.data.federation import Federation, Split
from folb.simulation import parallel
from folb.simulation.evaluate import Evaluation, evaluate, judged, predictions, total_hits, total_loss
from folb.simulation.play import Info, distribution, play, start
from folb.simulation.problem import ENDLESS, Problem, ahead, blocks, rounds_that_fit, window
from folb.simulation.solve import RUNS
from folb.typing import NDArray, Params

CAPACITY = 128  # rounds of one chunk at most
NEVER = 2**31 - 1  # for `every`: no round is evaluated


class Measured(NamedTuple):
    """One round of one run, as recorded; its evaluation is NaN if it is not evaluated."""

    info: Info
    evaluation: Evaluation


@partial(jax.jit, static_argnames="rounds")
def begin(problem: Problem, algorithms: Algorithm, seeds: Array, rounds: int = ENDLESS) -> State:
    """The states of all runs, stacked, before round 1; their memory of devices has room for `rounds` rounds."""
    return parallel.everywhere(jax.vmap(partial(start, problem, rounds=rounds))(algorithms, seeds), problem.mesh)


def _each(problem: Problem, f: Callable[..., Any]) -> Callable[..., Any]:
    """f over the runs, stacked."""
    return jax.vmap(f, axis_name=RUNS) if problem.side_by_side else partial(jax.lax.map, f)


@jax.jit
def one_round(
    problem: Problem,
    algorithms: Algorithm,
    states: State,
    seeds: Array,
    t: Array,
    every: Array,
    chosen: Chosen | None = None,
) -> tuple[State, Measured]:
    """Round t of all runs, stacked, and its evaluation where `every` divides t."""
    runs = (algorithms, states, seeds, chosen)
    states, info = _each(problem, lambda run: play(problem, run[0], run[1], run[2], t, run[3]))(runs)

    def measure(seen: Any) -> Evaluation:
        return _each(problem, lambda run: evaluate(problem, *run))(seen)

    def skip(seen: Any) -> Evaluation:
        if not problem.judges:
            return Evaluation(jnp.full(len(seeds), jnp.nan), jnp.full(len(seeds), jnp.nan))
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), jax.eval_shape(measure, seen))

    seen = (models_kept(algorithms, states), *([info.device] if "own" in problem.record else []))
    return states, Measured(info, jax.lax.cond(t % every == 0, measure, skip, seen))


@jax.jit
def advance(
    problem: Problem,
    algorithms: Algorithm,
    states: State,
    seeds: Array,
    t0: Array,
    t1: Array,
    every: Array,
    chosen: Chosen | None = None,
) -> tuple[State, Measured]:
    """Rounds t0 .. t1 - 1; the record has room for CAPACITY of them. `chosen` begins with round t0."""

    def turn(t: Array, carry: tuple[State, Measured]) -> tuple[State, Measured]:
        states, record = carry
        own = jax.tree.map(lambda leaf: leaf[t - t0], chosen)
        states, measured = one_round(problem, algorithms, states, seeds, t, every, own)
        return states, jax.tree.map(lambda r, m: r.at[t - t0].set(m), record, measured)

    # the same call as in `turn`, so that it is traced once
    first = jax.tree.map(lambda leaf: leaf[0], chosen)
    shapes = jax.eval_shape(one_round, problem, algorithms, states, seeds, t0, every, first)[1]
    record = jax.tree.map(lambda leaf: jnp.zeros((CAPACITY, *leaf.shape), leaf.dtype), shapes)
    return parallel.everywhere(jax.lax.fori_loop(t0, t1, turn, (states, record)), problem.mesh)


@jax.jit
def _choose(problem: Problem, algorithms: Algorithm, seeds: Array, rounds: Array) -> Chosen:
    """The devices of some rounds of all runs, stacked: they do not depend on the models."""

    def of_run(algorithm: Algorithm, seed: Array, t: Array) -> Chosen:
        draw = distribution(problem, algorithm, None, seed, t)
        return sets(draw, algorithm.selection, *draw_words(algorithm, seed, t))

    chosen = jax.lax.map(lambda t: jax.vmap(of_run, in_axes=(0, 0, None))(algorithms, seeds, t), rounds)
    return parallel.everywhere(chosen, problem.mesh)


def models_kept(algorithms: Algorithm, states: State) -> Params:
    """The models of all runs, stacked, that are evaluated and kept."""
    if isinstance(algorithms.average, ServerModel):
        return states.params  # there is no program to compile
    return _averages(algorithms, states)


_averages = jax.jit(jax.vmap(kept))


@partial(jax.jit, static_argnums=0)
def _of_all(f: Callable[..., Any], problem: Problem, runs: Any, *given: Any) -> Any:
    """f(problem, run, *given) of all runs, stacked."""
    return parallel.everywhere(_each(problem, lambda run: f(problem, run, *given))(runs), problem.mesh)


class Window(NamedTuple):
    """Some rounds, with the samples of their devices."""

    problem: Problem
    chosen: Chosen  # for rounds from `base` on
    base: int
    end: int  # the first round whose devices' samples are not there


def pieces(
    problem: Problem, federation: Federation, algorithms: Algorithm, seeds: Any, every: int, first: int, last: int
) -> Iterator[Callable[[], Any]]:
    """Functions that bring the samples of the rounds from `first` to `last`.

    A window has the samples of the devices of as many rounds as fit. If its last round is evaluated, blocks of all
    samples follow, unless the accelerator has the samples to evaluate.
    """

    def of_rounds(chosen: Chosen, base: int, rounds: list[NDArray], end: int) -> Window:
        train = window(federation.train, problem.train, np.concatenate(rounds), problem.mesh)
        return Window(replace(problem, train=train), chosen, base, end)

    def of_rows(side: str, first: int, size: int, seen: int) -> tuple[Problem, Any]:
        split, rows = getattr(federation, side), slice(first, first + size)
        x, y = (parallel.put(np.asarray(a[rows]), problem.mesh) for a in (split.x, split.y))
        changed: dict[str, Any] = {side: replace(getattr(problem, side), x=x, y=y)}
        return replace(problem, **changed), np.int32(seen)

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
            count = rounds_that_fit(federation.train, sets)
            t += count
            yield partial(of_rounds, chosen, base, sets[:count], t)
            if t == evaluated + 1 and problem.measured is None:
                for side in ("train", "test"):
                    yield from (partial(of_rows, side, *block) for block in blocks(getattr(federation, side)))


def _evaluated(
    problem: Problem, coming: Iterator[Any], federation: Federation, params: Params, device: Array | None
) -> Evaluation:
    """The evaluation of all runs on all samples, whose blocks come next."""

    def mean(total: Callable[..., Array], side: Split) -> Any:
        parts: list[Any] = []
        for _ in blocks(side):
            block, seen = next(coming)
            parts.append(_of_all(total, block, params, seen))
            if len(parts) > 1:
                parts[-2] = np.asarray(parts[-2])
        return (np.sum(parts, axis=0, dtype=np.float64) / len(side.y)).astype(np.float32)

    loss, side = mean(total_loss, federation.train), federation.test
    if not problem.judges:
        return Evaluation(loss, mean(total_hits, side))
    made = []
    for _ in blocks(side):
        block, seen = next(coming)
        rows = _of_all(predictions, block, params)
        made.append(jax.tree.map(lambda leaf, first=int(seen): np.asarray(leaf)[:, first:], rows))
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *made)
    y = parallel.put(np.asarray(side.y), problem.mesh)
    return Evaluation(loss, *_of_all(judged, problem, (whole, device), y))


@contextmanager
def advancing(
    problem: Problem, federation: Federation, algorithms: Algorithm, seeds: Any, every: int, first: int, last: int
) -> Iterator[Callable[[State, int, int], tuple[State, Measured]]]:
    """A function of (states, t0, t1) that plays rounds t0 .. t1 - 1; the first call begins with round `first`."""
    if not problem.streamed:
        yield lambda states, t0, t1: advance(
            problem, algorithms, states, seeds, np.int32(t0), np.int32(t1), np.int32(every)
        )
        return
    piece: Window | None = None
    inside = problem.measured is not None  # a small sample is evaluated: it is on the accelerator
    coming = ahead(pieces(problem, federation, algorithms, seeds, every, first, last))

    def at_the_end(values: Any, last: Any) -> Any:
        return np.concatenate([np.asarray(values)[:-1], np.asarray(last)[None]])

    def windows(states: State, t0: int, t1: int) -> tuple[State, Measured]:
        """Window by window; the last window may reach further."""
        nonlocal piece
        parts: list[Measured] = []
        t = t0
        while t < t1:
            if piece is None or t == piece.end:
                piece = next(coming)
            n = min(piece.end, t1) - t
            chosen = jax.tree.map(lambda leaf, i=t - piece.base: np.roll(leaf, -i, axis=0), piece.chosen)
            span = (np.int32(t), np.int32(t + n), np.int32(every if inside else NEVER))
            states, record = advance(piece.problem, algorithms, states, seeds, *span, chosen)
            if parts:  # it waits only now, so that the accelerator has work; and not later: few windows are in memory
                parts[-1] = jax.tree.map(np.asarray, parts[-1])
            part = jax.tree.map(lambda leaf, n=n: leaf[:n], record)
            t += n
            if (t - 1) % every == 0 and not inside:
                device = part.info.device[-1] if "own" in problem.record else None
                models = models_kept(algorithms, states)
                last = _evaluated(piece.problem, coming, federation, models, device)
                part = Measured(part.info, jax.tree.map(at_the_end, part.evaluation, last))
            parts.append(part)
        return states, joined([jax.tree.map(np.asarray, part) for part in parts])

    with closing(coming):
        yield windows


def joined(parts: list[Measured]) -> Measured:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
