"""The simulator: similar runs are stacked, and play in chunks of rounds that can be watched, stopped and resumed.

Runs are stacked if their algorithms differ only in numbers (mu, psi, lr) or their seeds, as many as fit into memory.
Rounds run in a compiled loop, in chunks of about a quarter of a second. Between chunks, progress is shown and Ctrl-C
works.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb import atomic
from folb.core import privacy
from folb.core.algorithm import Algorithm
from folb.core.guard import check_around
from folb.core.robust import check_enough, different_devices
from folb.core.round import State, over_rounds, upload_shape
from folb.core.solver import Solver
from folb.core.system import System
from folb.core.trace import Trace
from folb.core.traffic import Sizes, nbytes, sizes
from folb.data.federation import Federation
from folb.errors import InputError, check_whole
from folb.measures import measured
from folb.models import Model
from folb.models.model import params_like
from folb.pace import Lines, to_stderr
from folb.results.run import Run
from folb.simulation import parallel, solve, threads
from folb.simulation.blocks import evaluation_block
from folb.simulation.first_look import FirstLook, first_look
from folb.simulation.judge import check_judged, chosen_metrics, said
from folb.simulation.play import Info, start
from folb.simulation.problem import ENDLESS, Problem, problem
from folb.simulation.program import (
    CAPACITY,
    Measured,
    advance,
    advancing,
    begin,
    joined,
    models_kept,
    one_round,
)
from folb.simulation.round_cost import round_cost
from folb.simulation.sample import Evaluate, chosen
from folb.simulation.threads import Observer
from folb.simulation.timing import is_clocked
from folb.store import checkpoint
from folb.store.environment import cores, memory
from folb.store.round_lines import LONGEST_ROUND
from folb.typing import NDArray, Params

log = logging.getLogger(__name__)

CHUNK_SECONDS = 0.25
SMALL_BATCH = 1000  # up to this size, a batch takes little memory, even if no device has so many samples
LONGEST_CHUNK = 5.0  # seconds, with a large memory of devices
LOWERING = threading.Lock()  # one program at a time: the interpreter would finish two at once, both late
COPIED = 1e8  # bytes of that memory for each second of a chunk: the copy takes about 5 % of its time on a CPU


class Job(NamedTuple):
    """One run to do, and its place among the runs that `simulate` returns."""

    place: int
    algorithm: Algorithm
    seed: int
    rounds: int  # that it plays: fewer than others if a budget ends it


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
    evaluate: Evaluate = None,
    metrics: Sequence[str] = (),
    record: Sequence[str] = (),
    abreast: bool | None = None,
    accelerators: int | str = 1,
    observe: Observe | None = None,
    checkpoints: Path | None = None,
    stream: bool | None = None,
    progress: bool = False,
) -> list[Run]:
    """Run every algorithm with every seed; runs come back algorithm by algorithm, seed by seed.

    `evaluate` says on how many samples of each side, training and test, models are evaluated: a number, or "all". By
    default a costly model is evaluated on 1,000 of each, always the same ones, if all of them would take long.
    `metrics` are measured besides the accuracy, on the same test samples, and are in `Run.metrics`: "fairness" (the
    mean, the worst decile and the variance of the devices' own accuracies), "f1", "auc", "top5" (or another number) of
    models that tell classes apart; "fairness", "mse", "mae" of models that predict numbers.
    `record` asks for values of each chosen device, in `Run.records`: any of "weights", "inner", "gamma", "work", "lr",
    "own" (its own accuracy, or mean squared error, in evaluated rounds),
    "attack" (of each round: the liars' part of all weight, the largest weight of a liar, the rate of the backdoor).
    `abreast` is explained at `problem`.
    `accelerators` share the devices of a round: a number, or "auto" for all that JAX finds, in all processes. The
    results agree with those of one accelerator up to rounding.
    `seeds` is a list of seeds, or a number n for the seeds 0 .. n-1.
    `observe(i, first, part)` is called as rounds complete: `part` has the rounds of run i that were completed since the
    last call, beginning with round `first`, and no model. Calls never overlap; they come from other threads if several
    programs play at the same time.
    `checkpoints` is a directory: an interrupted simulation leaves its state there, and the same call resumes from it.
    `stream` says whether the samples stay on the host. If so, the samples of a round's devices are copied while the
    round before is computed; for an evaluation all samples are copied, in blocks. By default they stay if they take
    more than half of the accelerator's memory. Results agree up to rounding.
    With `progress`, lines on standard error say how far it is, and how long the rest will take.
    """
    whole = settled(
        federation,
        model,
        algorithms,
        rounds=rounds,
        seeds=seeds,
        evaluate_every=evaluate_every,
        evaluate=evaluate,
        metrics=metrics,
        stream=stream,
    )
    ready = simulation(
        whole, system=system, objective=objective, record=record, abreast=abreast, accelerators=accelerators
    )
    observers = [] if observe is None else [run_by_run(observe)]
    if progress:
        total = sum(job.rounds for batch in ready.batches for job in batch)
        lines = Lines(total, to_stderr, costs=ready.costs)
        if look := ready.first_look():
            to_stderr(str(look))
        observers.insert(0, run_by_run(lambda i, first, part: lines.advance(len(part.seconds), i)))
    return ready.run(observers, checkpoints)


def run_by_run(observe: Observe) -> Observer:
    """An observer that tells `observe` of one run after another."""

    def observer(first: int, parts: Mapping[int, Run]) -> None:
        for i, part in parts.items():
            observe(i, first, part)

    return observer


@dataclass(frozen=True)
class Simulation:
    """A simulation that can begin: its data is on the accelerator, and a round of every algorithm was checked."""

    problem: Problem
    federation: Federation
    batches: Sequence[list[Job]]
    every: int
    together: int = 1  # programs that play at the same time
    costs: Sequence[float] = (1.0,)  # what a round of each run costs, compared with the others

    def first_look(self) -> FirstLook | None:
        """What can be said before the first round, if that round takes long; otherwise None."""
        job = self.batches[0][0]
        return first_look(self.problem, self.federation, job.algorithm, job.seed, self.costs[job.place])

    def run(
        self,
        observers: Sequence[Observer] = (),
        checkpoints: Path | None = None,
        when_all_play: Callable[[], None] = lambda: None,
    ) -> list[Run]:
        """Play the rounds, as the observers are told; `checkpoints` is explained at `simulate`.

        when_all_play() is called once the first rounds of every program are played.
        """
        if checkpoints is not None:
            atomic.directory(checkpoints)
        begun = itertools.count(1)  # one that threads may share
        ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="folb-compile")

        def play(number: int, tell: Observer) -> dict[int, Run]:
            keep = None if checkpoints is None else (checkpoints, number)
            if self.together > 1:
                compile_ahead(self.problem, self.batches[number], self.every)

            def prepare_next() -> None:
                """Compile the next program while the rounds of this one are played."""
                if next(begun) == len(self.batches):
                    when_all_play()
                for following in self.batches[number + self.together : number + self.together + 1]:
                    ahead.submit(compile_ahead, self.problem, following, self.every)

            return _run_stacked(
                self.problem,
                self.federation,
                self.batches[number],
                self.every,
                tell if observers else None,
                keep,
                prepare_next,
            )

        try:
            found = threads.played(play, len(self.batches), self.together, observers)
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)  # an interruption does not wait for the compiler
        runs = {place: run for batch in found for place, run in batch.items()}
        return [runs[place] for place in sorted(runs)]


@dataclass(frozen=True)
class Settled:
    """What is simulated, checked, and with every choice made that the caller left open."""

    federation: Federation
    model: Model
    algorithms: list[Algorithm]  # with the noise of a private one
    seeds: Sequence[int]
    rounds: list[int]  # of each algorithm: fewer than asked for if a budget ends it
    every: int
    evaluated: int | None  # how many samples of each side; None: all
    metrics: tuple[str, ...]  # besides the accuracy
    streamed: bool


def settled(
    federation: Federation,
    model: Model,
    algorithms: Algorithm | Sequence[Algorithm],
    *,
    rounds: int,
    seeds: int | Sequence[int] = (0,),
    evaluate_every: int = 1,
    evaluate: Evaluate = None,
    metrics: Sequence[str] = (),
    stream: bool | None = None,
) -> Settled:
    """The settings of a simulation. It finds the mistakes that need no data on the accelerator."""
    algorithms = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    if isinstance(seeds, bool):
        raise InputError("seeds", seeds, "should be a number of seeds, or a list of them")
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    streamed = streams(federation, stream)
    check(federation, model, algorithms, rounds, seeds, evaluate_every, streamed)
    algorithms = [
        over_rounds(_bounded(privacy.calibrated(one, federation.N, rounds), federation), rounds) for one in algorithms
    ]
    allowed = [privacy.affordable(one, federation.N, rounds) for one in algorithms]
    for algorithm, most in zip(algorithms, allowed, strict=True):
        if most < evaluate_every:
            expected = f"should be at most {most}, the rounds that the epsilon of {algorithm.name} allows"
            raise InputError("evaluate_every", evaluate_every, expected)
    return Settled(
        federation,
        model,
        algorithms,
        seeds,
        allowed,
        evaluate_every,
        chosen(evaluate, federation, model),
        chosen_metrics(metrics, model, federation),
        streamed,
    )


def simulation(
    whole: Settled,
    *,
    system: System | None = None,
    objective: str = "uniform",
    record: Sequence[str] = (),
    abreast: bool | None = None,
    accelerators: int | str = 1,
) -> Simulation:
    """Everything that `simulate` does before its first round. It finds all other mistakes in the input."""
    federation, model, algorithms, seeds = whole.federation, whole.model, whole.algorithms, whole.seeds
    K = max((one.selection.enough for one in algorithms if not one.selection.distinct), default=0)
    if K > federation.N:
        told = "K = %d draws with replacement from %d devices: a round counts each %.3g times on average"
        log.warning(told, K, federation.N, K / federation.N)
    shared = problem(
        federation,
        model,
        system=system,
        objective=objective,
        record=record,
        abreast=abreast,
        mesh=parallel.mesh(accelerators),
        streamed=whole.streamed,
        evaluated=whole.evaluated,
        metrics=whole.metrics,
    )
    if isinstance(shared.system, Trace):
        for algorithm in algorithms:
            if algorithm.selection.sampling.first is not None:
                expected = "should be an algorithm that does not ask all devices at once: not all are online"
                raise InputError("algorithms", algorithm.name, expected)
            if algorithm.privacy is not None and algorithm.privacy.scheme != "poisson":
                expected = "should be poisson with privacy, if not all devices are online"
                raise InputError("sampling", "uniform", expected)
    if is_clocked(shared.system):
        for algorithm in algorithms:
            if algorithm.asynchrony is not None:
                expected = "should be a system model without a clock, such as network: these devices start one by one"
                raise InputError("system", f"with {algorithm.name}", expected)
    _check_labels(federation, model)
    groups: dict[Any, list[Job]] = {}
    for algorithm, rounds in zip(algorithms, whole.rounds, strict=True):
        for seed in seeds:
            place = sum(map(len, groups.values()))
            alike = (jax.tree.structure(algorithm), rounds)
            groups.setdefault(alike, []).append(Job(place, privacy.with_key(algorithm, _key), seed, rounds))
    each = [round_cost(model, federation, system, algorithm, whole.evaluated, whole.every) for algorithm in algorithms]
    costs = [cost for cost in each for _ in seeds]
    fits = [(jobs, fitting(shared, jobs[0].algorithm, memory(), jobs[0].rounds)) for jobs in groups.values()]
    batches = [batch for jobs, fit in fits for batch in _batches(jobs, fit)]
    if not shared.abreast:  # runs take turns anyway: the cheap ones first, so that there are soon rounds to see
        alone = [job for jobs in groups.values() for job in jobs]
        alone.sort(key=lambda job: (job.place % len(seeds), costs[job.place], job.place))
        batches = [[job] for job in alone]
    for batch in batches:
        check_shapes(shared, batch)
    together = _together(shared, len(batches), filled=sum(len(jobs) / fit for jobs, fit in fits))
    batches.sort(key=len, reverse=True)  # the largest batch begins first; checkpoints are named by this order
    return Simulation(shared, federation, batches, whole.every, together, costs)


def _key() -> NDArray:
    """Two words that no file keeps. All processes play the same run, so they have the same."""
    return parallel.shared(np.frombuffer(os.urandom(8), np.uint32))


def _together(problem: Problem, programs: int, filled: float) -> int:
    """How many programs play at the same time, if all of them take `filled` of the memory for runs.

    A light model's operations are too small for more than one core. Heavy models, GPUs and streamed samples have enough
    work with one program.
    """
    if jax.default_backend() != "cpu" or not problem.abreast or problem.streamed or problem.mesh is not None:
        return 1
    return min(programs, cores()) if filled <= 1 else 1


def check_shapes(problem: Problem, jobs: list[Job]) -> None:
    """Raise an `InputError` if a round of these runs would. The round is traced, not run.

    A rule that returns a wrong shape is found before any other algorithm is run.
    """
    stacked, seeds = _stacked(jobs)
    states = jax.eval_shape(partial(begin, rounds=_remembered(jobs)), problem, stacked, seeds)
    model, survey = _one_model(states), jobs[0].algorithm.selection.sampling.survey
    for upload in (*jobs[0].algorithm.uploads, *([] if survey is None else [survey])):
        upload_shape(upload, model)
    jax.eval_shape(one_round, problem, stacked, states, seeds, np.int32(1), np.int32(1), None)


def _one_model(states: State) -> Params:
    """What the model of one of the stacked runs is like."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states.params)


def _remembered(jobs: list[Job]) -> int:
    """The rounds that a memory of devices needs room for; without a memory, their number does not matter."""
    first = jobs[0].algorithm
    return jobs[0].rounds if first.memory is not None or first.compression.remembers else ENDLESS


def compile_ahead(problem: Problem, jobs: list[Job], every: int) -> None:
    """Compile the program of these runs, so that jax has it when they start; nothing is allocated for them yet."""
    if problem.streamed or problem.mesh is not None:
        return
    stacked, seeds = _stacked(jobs)
    states = jax.eval_shape(partial(begin, rounds=_remembered(jobs)), problem, stacked, seeds)
    span = (np.int32(1), np.int32(2), np.int32(every))
    with LOWERING:
        lowered = advance.lower(problem, stacked, states, seeds, *span)
    lowered.compile()


def _stacked(jobs: list[Job]) -> tuple[Algorithm, Any]:
    """The algorithms of runs that differ only in numbers, stacked as one, and their seeds."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(job.algorithm for job in jobs))
    return stacked, np.asarray([job.seed for job in jobs], np.uint32)


def streams(federation: Federation, stream: bool | None) -> bool:
    """Whether the samples stay on the host: as asked, or if they take more than half of the memory."""
    if stream not in (None, True, False):
        raise InputError("stream", stream, "should be true, false, or none to decide by the samples' size")
    return federation.nbytes > memory() // 2 if stream is None else bool(stream)


def _batches(jobs: list[Job], fit: int) -> list[list[Job]]:
    """The jobs in order, in as few batches of at most `fit` as possible, of about equal size."""
    count = -(-len(jobs) // fit)
    return [jobs[i * len(jobs) // count : (i + 1) * len(jobs) // count] for i in range(count)]


def fitting(problem: Problem, algorithm: Algorithm, memory: int, rounds: int = ENDLESS) -> int:
    """How many stacked runs take half of `memory` bytes: an estimate from shapes alone, and at least 1.

    A run needs its state before, during and after a round. With `abreast` it also needs about eight models for each of
    its K devices (start, update and gradients), and twice what the loss keeps for the gradient of the samples that are
    computed at once: a block for each device, or a block of the evaluation. With streamed samples it needs its share of
    three windows (the previous, the current and the next), and a window may be twice as large as its content.
    """
    model, train, K = problem.model, problem.train, algorithm.selection.K
    state = jax.eval_shape(partial(start, rounds=rounds), problem, algorithm, 0)
    samples = max(K * max(solve.BLOCK, solve.UNROLL * algorithm.solver.batch), evaluation_block(model))

    def backward(params: Params, rows: Array) -> Any:
        x, y = train.take(rows)
        return jax.vjp(lambda w: model.loss(w, x, y), params)[1]

    needed = 4 * nbytes(state)
    if problem.streamed:
        chosen = K * (2 if algorithm.selection.second else 1)
        needed += 6 * chosen * int(np.ceil(np.mean(train.size))) * (nbytes((train.x, train.y)) // len(train.y))
    if problem.judges:
        needed += nbytes(jax.eval_shape(partial(said, problem, problem.test), state.params))
    if problem.abreast:
        held = jax.eval_shape(backward, state.params, jax.ShapeDtypeStruct((samples,), jnp.int32))
        needed += 8 * K * nbytes(state.params) + 2 * nbytes(held)
    return max(1, memory // 2 // needed)


def check(
    federation: Federation,
    model: Model,
    algorithms: list[Algorithm],
    rounds: int,
    seeds: Sequence[int],
    every: int,
    streamed: bool = False,
) -> None:
    """Raise an `InputError` if this cannot be simulated."""
    if not algorithms:
        raise InputError("algorithms", [], "should be at least one")
    for algorithm in algorithms:
        if not isinstance(algorithm, Algorithm):
            raise InputError("algorithms", algorithm, "should be an Algorithm, such as algorithms.folb()")
    if not isinstance(model, Model):
        raise InputError("model", model, "should be a Model, such as models.logistic(shape, classes)")
    check_whole("rounds", rounds, 1, ENDLESS)
    check_whole("evaluate_every", every, 1, ENDLESS)
    if every > rounds:
        raise InputError("evaluate_every", every, f"should be between 1 and rounds = {rounds}")
    if not len(seeds):
        raise InputError("seeds", list(seeds), "should be at least one")
    for seed in seeds:
        check_whole("seeds", seed, 0, 2**32 - 1)
    for algorithm in algorithms:
        K = algorithm.selection.expected
        if algorithm.asynchrony is not None:
            _check_concurrency(algorithm.asynchrony.concurrency, K, federation.N, streamed)
        elif algorithm.selection.distinct and K > federation.N:
            expected = f"should be at most the {federation.N} devices: a round draws each device at most once"
            raise InputError("K" if algorithm.selection.wanted is None else "K times over_selection", K, expected)
        if algorithm.guard is not None:
            check_around(algorithm)
        if algorithm.robust is not None and algorithm.asynchrony is None:
            different = int if algorithm.selection.distinct else partial(different_devices, federation.N)
            check_enough(algorithm.robust, algorithm.selection.enough, different)
        if streamed and not algorithm.selection.ahead:
            reason = "streaming (stream=True, --stream) draws devices some rounds ahead"
            expected = f"should be an algorithm whose draws need neither a survey nor a memory: {reason}"
            raise InputError("algorithms", algorithm.name, expected)
        if streamed and (algorithm.attack is not None or algorithm.root is not None):
            expected = "should have neither an attack nor robust=fltrust: with streaming, only some samples are at hand"
            raise InputError("algorithms", algorithm.name, expected)
        _check_batch(algorithm.solver, int(federation.train.size.max()))
    if len(federation.test.y) == 0:
        raise InputError(f"{federation.name}: test samples", 0, "should be at least 1")
    check_judged(model, federation)
    for algorithm in algorithms:
        if federation.regression and algorithm.attack is not None and algorithm.attack.poison:
            raise InputError(
                "attack", algorithm.origin.settings.get("attack"), "changes classes, but the labels are numbers"
            )
    if model.codes is not None and federation.expand is None:
        _check_codes(federation, model.codes)


def _check_concurrency(M: int, K: int, N: int, streamed: bool) -> None:
    if M > N:
        raise InputError("concurrency", M, f"should be at most the {N} devices: a device works once at a time")
    if K > N:
        raise InputError("K", K, f"should be at most the {N} devices: a round has one reply of each device at most")
    if M + K - 1 > N:
        reason = f"M - 1 devices at work and K - 1 replies in the buffer leave none of the {N} to start"
        raise InputError("concurrency", M, f"should be at most N - K + 1 = {N - K + 1} with K = {K}: {reason}")
    if streamed:
        expected = "should be None with streaming (stream=True, --stream), which draws devices some rounds ahead"
        raise InputError("concurrency", M, expected)


def _check_labels(federation: Federation, model: Model) -> None:
    """A label that the model has no score for would make the loss NaN, as if the run diverged."""
    if model.scores is None:
        return
    sample = jax.ShapeDtypeStruct((1, *federation.shape), federation.kind)
    found = jax.eval_shape(model.scores, params_like(model), sample)
    classes, largest = found.shape[-1], int(max(side.y.max() for side in (federation.train, federation.test)))
    if largest >= classes:
        expected = f"should be at least {largest + 1}, for labels from 0 to {largest}"
        raise InputError("model: classes", classes, expected)


def _check_batch(solver: Solver, largest: int) -> None:
    """A batch of unit "step" may span many passes through a device's samples, and takes memory for each sample."""
    most = max(largest, SMALL_BATCH)
    if solver.unit == "step" and solver.batch > most:
        why = f"the largest device has {largest} samples, and unit is step"
        raise InputError("batch", solver.batch, f"should be at most {most}: {why}")


def _bounded(algorithm: Algorithm, federation: Federation) -> Algorithm:
    """The same algorithm without room for samples that no device has: a batch never spans two epochs."""
    solver, largest = algorithm.solver, int(federation.train.size.max())
    if solver.unit != "epoch" or solver.batch <= largest:
        return algorithm
    return replace(algorithm, solver=replace(solver, batch=largest))


def _check_codes(federation: Federation, codes: int) -> None:
    for x in (federation.train.x, federation.test.x):
        if not np.issubdtype(x.dtype, np.integer):
            raise InputError("x", x.dtype.name, f"should be whole numbers from 0 to {codes - 1}, which the model takes")
        if x.size and not (x.min() >= 0 and x.max() < codes):
            found = f"{x.min()} to {x.max()}"
            raise InputError("x", found, f"should be from 0 to {codes - 1}, as many codes as there are classes")


def _chunk_seconds(states: State) -> float:
    """How long a chunk should take. It begins with a copy of the memory of devices: with more of it, it is longer.

    The earlier memory is kept until the chunk is finished, so that an interruption loses no round.
    """
    copied = sum(leaf.nbytes for leaf in jax.tree.leaves((states.devices, states.residuals))) / COPIED
    return min(LONGEST_CHUNK, max(CHUNK_SECONDS, copied))


def _run_stacked(
    problem: Problem,
    federation: Federation,
    jobs: list[Job],
    every: int,
    observe: Observer | None,
    kept: tuple[Path, int] | None,
    while_playing: Callable[[], None],
) -> dict[int, Run]:
    """Play runs whose algorithms differ only in numbers, as one program; return each by its place.

    while_playing() is called once, when the first rounds are played.
    """
    stacked, seeds = _stacked(jobs)
    rounds = jobs[0].rounds
    states = begin(problem, stacked, seeds, rounds=_remembered(jobs))
    inputs = (problem, stacked, states, seeds, np.int32(1), np.int32(every), None)  # as in `advance`: traced once
    shapes = jax.eval_shape(one_round, *inputs)[1]
    record = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), shapes)
    at = (1, states, [record])
    model, N, names = _one_model(states), federation.N, measured(problem.metrics)
    about = [_About(job.algorithm.name, sizes(job.algorithm, model), N, names) for job in jobs]

    def parts(first: int, record: Measured) -> dict[int, Run]:
        """The rounds of `record`, from round `first` on, as runs."""
        return {job.place: _run(problem, job, about[r], record, r, first, every) for r, job in enumerate(jobs)}

    def tell(first: int, record: Measured) -> None:
        if observe is not None:
            observe(first, parts(first, record))

    @cache
    def mark() -> str:
        """What tells this simulation from others. Printing its program takes a while: only if there are checkpoints."""
        # the samples count through their digest
        others = (problem.share, problem.system, privacy.without_key(stacked), *inputs[2:])
        return checkpoint.fingerprint(federation.digest + str(jax.make_jaxpr(one_round)(*inputs)), others)

    if (
        kept is not None
        and checkpoint.kept(*kept)
        and (found := checkpoint.load(*kept, mark(), (states, record)))
        and found[0] <= rounds + 1
    ):
        at = (found[0], found[1][0], [found[1][1]])
        tell(1, found[1][1])
    at = parallel.shared(at)

    spent = 0.0  # seconds that the last checkpoint took

    def keep() -> None:
        nonlocal spent
        if kept is not None:
            begun = time.perf_counter()
            t, states, chunks = at
            checkpoint.save(*kept, mark(), t, (states, joined(chunks)))
            spent = time.perf_counter() - begun

    saved, length = time.perf_counter(), 1
    try:
        with advancing(problem, federation, stacked, seeds, every, at[0], rounds) as play_on:
            while at[0] <= rounds:
                t, states, chunks = at
                length = min(length, CAPACITY, rounds - t + 1)
                begun = time.perf_counter()
                states, record = play_on(states, t, t + length)
                if kept is not None:
                    mark()  # here, because these rounds are played meanwhile
                part = jax.tree.map(lambda leaf, n=length: np.asarray(leaf)[:n], record)
                _check_seconds(part.info.seconds)
                at = (t + length, states, [*chunks, part])  # one assignment: no interruption can come in between
                tell(t, part)
                if not chunks[1:]:  # these were the first rounds
                    while_playing()
                now = time.perf_counter()
                # grow slowly: the first chunk's time is mostly compilation
                length = parallel.shared(max(1, min(4 * length, int(_chunk_seconds(states) * length / (now - begun)))))
                if now - saved > max(checkpoint.SECONDS, spent / checkpoint.SHARE):
                    keep()
                    saved = time.perf_counter()
    finally:
        keep()
    _, states, chunks = at
    params = jax.tree.map(np.asarray, models_kept(stacked, states))
    runs = parts(1, joined(chunks))
    for r, job in enumerate(jobs):
        runs[job.place] = replace(runs[job.place], params=jax.tree.map(lambda leaf, r=r: leaf[r], params))
    return runs


def _check_seconds(seconds: NDArray) -> None:
    """A user's own system model may return anything."""
    wrong = seconds[~((seconds >= 0) & (seconds <= LONGEST_ROUND))]
    if len(wrong):
        raise InputError("system: seconds of a round", float(wrong[0]), f"should be from 0 to {LONGEST_ROUND:g}")


class _About(NamedTuple):
    """What all parts of a run have in common. It is looked up once: each upload is traced for its shape."""

    algorithm: str
    size: Sizes  # of its messages
    N: int
    metrics: tuple[str, ...]


def _run(problem: Problem, job: Job, about: _About, record: Measured, r: int, first: int, every: int) -> Run:
    """Run r of a stacked record that begins with round `first`, without its model."""
    own = jax.tree.map(lambda leaf: np.asarray(leaf)[:, r], record)
    info = own.info
    up, down = traffic(about.size, info)
    rounds = np.arange(first, first + len(info.asked))
    evaluated = rounds % every == 0
    more = {name: own.own if name == "own" else getattr(info, name) for name in problem.record}
    if job.algorithm.privacy is not None:
        more["epsilon"] = np.array([privacy.spent(job.algorithm, about.N, int(t)) for t in rounds])
    return Run(
        algorithm=about.algorithm,
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
        records=more,
        metrics={name: own.metrics[name][evaluated] for name in about.metrics},
        judged_by=problem.model.judged_by,
    )


def traffic(size: Sizes, info: Info) -> tuple[Any, Any]:
    """Bytes up and down in each round.

    Down: the model, to every distinct device asked, also by a survey, and to each device of S_1 the shift computed from
    its memory. Up: what each distinct device sends in time: its update and the algorithm's uploads; from S_2 of
    Algorithm 2 only what stands for the gradient; and the answers to a survey.
    """
    asked, replied, gradients_only, surveyed = (
        np.asarray(count, np.int64) for count in (info.asked, info.replied, info.gradients_only, info.surveyed)
    )
    working = replied + np.sum(info.lost, axis=-1, dtype=np.int64)
    up = replied * size.reply + gradients_only * size.gradient + surveyed * size.answer
    return up, asked * size.model + working * size.shift
