"""Runs whose algorithms differ only in numbers (mu, psi, lr) or their seeds: stacked, and played as one program.

Rounds run in a compiled loop, in chunks of about a quarter of a second. Between chunks, observers learn what was
played, it is kept, and Ctrl-C works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import privacy
from folb.core.algorithm import Algorithm
from folb.core.round import Sizes, State, nbytes, sizes
from folb.data.federation import Federation
from folb.errors import InputError
from folb.measures import measured
from folb.models.model import params_like
from folb.results.run import Run
from folb.simulation import parallel, solve
from folb.simulation.evaluate import evaluation_block, predictions
from folb.simulation.play import Info, start
from folb.simulation.problem import ENDLESS, Problem
from folb.simulation.program import CAPACITY, Measured, advance, advancing, begin, joined, models_kept, one_round
from folb.store import run_arrays
from folb.store.round_lines import LONGEST_ROUND
from folb.typing import NDArray, Params

CHUNK_SECONDS = 0.25
LONGEST_CHUNK = 5.0  # seconds, with a large memory of devices
LOWERING = threading.Lock()  # one program at a time: the interpreter would finish two at once, both late
COPIED = 1e8  # bytes of that memory for each second of a chunk: the copy takes about 5 % of its time on a CPU
# called with rounds as they complete: the first of them, and the part of each run that a program plays
Observer = Callable[[int, Mapping[int, Run]], None]


class Job(NamedTuple):
    """One run to do, and its place among the runs that `simulate` returns."""

    place: int
    algorithm: Algorithm
    seed: int
    rounds: int  # that it plays: fewer than others if a budget ends it


def check_shapes(problem: Problem, jobs: list[Job]) -> None:
    """Trace a round, so that a rule that returns a wrong shape is found before any other algorithm is run."""
    stacked, states, seeds = _begun(problem, jobs, jax.eval_shape)
    sizes(jobs[0].algorithm, params_like(problem.model))  # it tells what is wrong with an upload
    jax.eval_shape(one_round, problem, stacked, states, seeds, np.int32(1), np.int32(1), None)


def compile_ahead(problem: Problem, jobs: list[Job], every: int) -> None:
    """Compile the program of these runs, so that jax has it when they start; nothing is allocated for them yet."""
    if problem.streamed or problem.mesh is not None:
        return
    given = _begun(problem, jobs, jax.eval_shape)
    with LOWERING:
        lowered = advance.lower(problem, *given, np.int32(1), np.int32(2), np.int32(every))
    lowered.compile()


def _begun(problem: Problem, jobs: list[Job], call: Callable[..., State]) -> tuple[Algorithm, State, NDArray]:
    """Runs that differ only in numbers: their algorithms stacked as one, their states, by call(begin, …), and seeds."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(job.algorithm for job in jobs))
    remembers = stacked.memory is not None or stacked.compression.remembers
    # without a memory of devices that needs room, the number of rounds does not matter
    first = partial(begin, rounds=jobs[0].rounds if remembers else ENDLESS)
    seeds = np.asarray([job.seed for job in jobs], np.uint32)
    return stacked, call(first, problem, stacked, seeds), seeds


def batched(jobs: list[Job], fit: int) -> list[list[Job]]:
    """The jobs in order, in as few batches of at most `fit` as possible, of about equal size."""
    count = -(-len(jobs) // fit)
    return [jobs[i * len(jobs) // count : (i + 1) * len(jobs) // count] for i in range(count)]


def fitting(problem: Problem, algorithm: Algorithm, memory: int, rounds: int = ENDLESS) -> int:
    """How many stacked runs take half of `memory` bytes: an estimate from shapes alone, and at least 1.

    A run needs its state before, during and after a round. With `side_by_side` it also needs about eight models for
    each of its K devices (start, update and gradients), and twice what the loss keeps for the gradient of the samples
    that are computed at once: a block for each device, or a block of the evaluation. With streamed samples it needs its
    share of three windows (the previous, the current and the next), and a window may be twice as large as its content.
    """
    model, train, K = problem.model, problem.train, algorithm.selection.K
    state = jax.eval_shape(partial(start, rounds=rounds), problem, algorithm, 0)
    samples = max(K * max(solve.BLOCK, solve.UNROLL * algorithm.solver.batch), evaluation_block(model))

    def backward(params: Params, rows: Array) -> Any:
        x, y = train.take(rows)
        return jax.vjp(lambda w: model.losses(w, x, y), params)[1]

    needed = 4 * nbytes(state)
    if problem.streamed:
        chosen = K * (2 if algorithm.selection.second else 1)
        needed += 6 * chosen * int(np.ceil(np.mean(train.size))) * (nbytes((train.x, train.y)) // len(train.y))
    if problem.judges:
        needed += nbytes(jax.eval_shape(partial(predictions, problem), state.params))
    if problem.side_by_side:
        held = jax.eval_shape(backward, state.params, jax.ShapeDtypeStruct((samples,), jnp.int32))
        needed += 8 * K * nbytes(state.params) + 2 * nbytes(held)
    return max(1, memory // 2 // needed)


class _Stack:
    """Runs whose algorithms differ only in numbers, as they are played."""

    def __init__(self, problem: Problem, federation: Federation, jobs: list[Job], every: int) -> None:
        self.problem, self.federation, self.jobs, self.every = problem, federation, jobs, every
        self.algorithms, states, self.seeds = _begun(problem, jobs, lambda f, *given: f(*given))
        # as in `advance`: traced once
        self.inputs = (problem, self.algorithms, states, self.seeds, np.int32(1), np.int32(every), None)
        shapes = jax.eval_shape(one_round, *self.inputs)[1]
        nothing = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), shapes)
        self.at = (1, states, [nothing])  # the next round, the states before it, and what was recorded
        # looked up once: each upload is traced for the sizes of messages, which are those of all runs
        self.sizes, self.metrics = sizes(jobs[0].algorithm, params_like(problem.model)), measured(problem.metrics)
        known = [job.algorithm for job in jobs]
        self.about: list[Any] = [{"algorithm": one.name, "parameters": dict(one.settings)} for one in known]

    def runs(self, first: int, record: Measured) -> dict[int, Run]:
        """The rounds of `record`, from round `first` on, as runs without models, each by its place."""
        rounds = np.arange(first, first + len(record.info.asked))
        return {job.place: self._run(r, rounds, record) for r, job in enumerate(self.jobs)}

    def _run(self, r: int, rounds: NDArray, record: Measured) -> Run:
        job, evaluated = self.jobs[r], rounds % self.every == 0
        own: Any = jax.tree.map(lambda leaf: np.asarray(leaf)[:, r], record)
        info, values = own.info, jax.tree.map(lambda leaf: leaf[evaluated], own.evaluation)
        up, down = traffic(self.sizes, info)
        more = {name: own.evaluation.own if name == "own" else getattr(info, name) for name in self.problem.record}
        if job.algorithm.privacy is not None:
            more["epsilon"] = np.array([privacy.spent(job.algorithm, self.federation.N, int(t)) for t in rounds])
        return Run(
            **self.about[r],
            seed=int(job.seed),
            evaluated_rounds=rounds[evaluated],
            test_accuracy=values.test_accuracy,
            train_loss=values.train_loss,
            bytes_up=up,
            bytes_down=down,
            seconds=info.seconds,
            devices=info.device,
            times=info.times.astype(np.int32),
            lost=info.lost,
            updated=info.updated,
            records=more,
            metrics={name: values.metrics[name] for name in self.metrics},
            shown={one.name: one for one in self.problem.metrics if one.own},
            judged_by=self.problem.model.judged_by,
        )

    @cached_property
    def mark(self) -> str:
        """What tells this simulation from others. Printing its program takes a while: only if there are checkpoints."""
        # the samples count through their digest
        known = (self.problem.share, self.problem.system, privacy.without_key(self.algorithms), *self.inputs[2:])
        return run_arrays.fingerprint(self.federation.digest + str(jax.make_jaxpr(one_round)(*self.inputs)), known)

    def keep(self, path: Path, number: int) -> float:
        """Save a checkpoint; the seconds that it took."""
        began = time.perf_counter()
        t, states, chunks = self.at
        run_arrays.save_checkpoint(path, number, self.mark, t, (states, joined(chunks)))
        return time.perf_counter() - began


def run_stacked(
    problem: Problem,
    federation: Federation,
    jobs: list[Job],
    every: int,
    observe: Observer | None,
    kept: tuple[Path, int] | None,
    while_playing: Callable[[], None],
) -> dict[int, Run]:
    """Play runs that differ only in numbers; each by its place. while_playing() is called after the first rounds."""
    stack, rounds = _Stack(problem, federation, jobs, every), jobs[0].rounds
    if kept is not None and run_arrays.checkpoints(*kept):
        _, states, (nothing,) = stack.at
        saved = run_arrays.load_checkpoint(*kept, stack.mark, (states, nothing))
        if saved is not None and saved[0] <= rounds + 1:
            t, (states, record) = saved
            stack.at = (t, states, [record])
    if stack.at[0] > 1 and observe is not None:
        observe(1, stack.runs(1, stack.at[2][0]))
    stack.at = parallel.shared(stack.at)
    # a chunk begins with a copy of the memory of devices, so that an interruption loses no round: more takes longer
    copied = nbytes((stack.at[1].devices, stack.at[1].residuals)) / COPIED
    aim = min(LONGEST_CHUNK, max(CHUNK_SECONDS, copied))
    last, spent, length = time.perf_counter(), 0.0, 1
    try:
        with advancing(problem, federation, stack.algorithms, stack.seeds, every, stack.at[0], rounds) as play_on:
            while stack.at[0] <= rounds:
                t, states, chunks = stack.at
                length = min(length, CAPACITY, rounds - t + 1)
                begun = time.perf_counter()
                states, record = play_on(states, t, t + length)
                if kept is not None:
                    _ = stack.mark  # here, because these rounds are played meanwhile
                part = jax.tree.map(lambda leaf, n=length: np.asarray(leaf)[:n], record)
                seconds = part.info.seconds  # a user's own system model may return anything
                if len(wrong := seconds[~((seconds >= 0) & (seconds <= LONGEST_ROUND))]):
                    expected = f"should be from 0 to {LONGEST_ROUND:g}"
                    raise InputError("system: seconds of a round", float(wrong[0]), expected)
                stack.at = (t + length, states, [*chunks, part])  # one assignment: nothing can come in between
                if observe is not None:
                    observe(t, stack.runs(t, part))
                if not chunks[1:]:  # these were the first rounds
                    while_playing()
                now = time.perf_counter()
                # grow slowly: the first chunk's time is mostly compilation
                length = parallel.shared(max(1, min(4 * length, int(aim * length / (now - begun)))))
                if kept is not None and now - last > max(run_arrays.SECONDS, spent / run_arrays.SHARE):
                    spent, last = stack.keep(*kept), now
    finally:
        if kept is not None:
            stack.keep(*kept)
    _, states, chunks = stack.at
    models = jax.tree.map(np.asarray, models_kept(stack.algorithms, states))
    params = (jax.tree.map(lambda leaf, r=r: leaf[r], models) for r in range(len(jobs)))
    runs = stack.runs(1, joined(chunks)).items()
    return {place: replace(run, params=model) for (place, run), model in zip(runs, params, strict=True)}


def traffic(size: Sizes, info: Info) -> tuple[Any, Any]:
    """Bytes up and down in each round.

    Down: the model, to every distinct device asked, also by a survey, and to each device of S_1 the shift computed from
    its memory. Up: what each distinct device sends in time: its update and the algorithm's uploads; from S_2 of
    Algorithm 2 only what stands for the gradient; and the answers to a survey.
    """
    counts = (info.asked, info.replied, info.gradients_only, info.surveyed)
    asked, replied, gradients_only, surveyed = (np.asarray(count, np.int64) for count in counts)
    working = replied + np.sum(info.lost, axis=-1, dtype=np.int64)
    up = replied * size.reply + gradients_only * size.gradient + surveyed * size.answer
    return up, asked * size.model + working * size.shift
