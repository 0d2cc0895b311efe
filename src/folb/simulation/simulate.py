"""The simulator: similar runs are stacked, as many as fit into memory, and several stacks play at the same time."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from folb import atomic
from folb.core import privacy
from folb.core.algorithm import Algorithm
from folb.core.round import managed
from folb.core.solver import unit_cost
from folb.core.system import System
from folb.core.trace import Trace
from folb.core.upload import Upload
from folb.data.federation import Federation
from folb.errors import InputError, check
from folb.measures import Metric
from folb.models import Model
from folb.models.model import operations
from folb.pace import Lines, clock, tell
from folb.results.run import Run
from folb.simulation import parallel
from folb.simulation.evaluate import evaluate
from folb.simulation.play import start
from folb.simulation.problem import Problem, problem
from folb.simulation.settled import Evaluate, Settled, settled
from folb.simulation.stacked import Job, Observer, batched, check_shapes, compile_ahead, fitting, run_stacked
from folb.store.environment import cores, memory
from folb.typing import NDArray

log = logging.getLogger(__name__)
Observe = Callable[[int, int, Run], None]
T = TypeVar("T")

FORWARD = 1 / 3  # a loss, or a prediction, in gradients
PASSES = {"grad": 1.0, "after": 1.0, "loss": FORWARD}  # through a device's samples, by what an upload needs
LONG = 2e12  # operations of a round that takes about half a minute on two cores
ASKED = 1000  # devices that are asked how much work they manage


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
    metrics: Sequence[str | Metric | Callable[..., Any]] = (),
    record: Sequence[str] = (),
    accelerators: int | str = 1,
    observe: Observe | Literal["progress"] | None = None,
    checkpoints: Path | None = None,
    stream: bool | None = None,
) -> list[Run]:
    """Run every algorithm with every seed; runs come back algorithm by algorithm, seed by seed.

    `evaluate` says on how many samples of each side, training and test, models are evaluated: a number, or "all". By
    default a costly model is evaluated on 1,000 of each, always the same ones, if all of them would take long.
    `metrics` are measured besides the accuracy, on the same test samples, and are in `Run.metrics`: "fairness" (the
    mean, the worst decile and the variance of the devices' own accuracies), "f1", "auc", "top5" (or another number) of
    models that tell classes apart; "fairness", "mse", "mae" of models that predict numbers; or your own: a function of
    some of y, predicted, scores, classes and own, or a `folb.Metric`.
    `record` asks for values of each chosen device, in `Run.records`: any of "weights", "inner", "gamma", "work", "lr",
    "own" (its own accuracy, or mean squared error, in evaluated rounds),
    "attack" (of each round: the liars' part of all weight, the largest weight of a liar, the rate of the backdoor).
    `accelerators` share the devices of a round: a number, or "auto" for all that JAX finds, in all processes. The
    results agree with those of one accelerator up to rounding.
    `seeds` is a list of seeds, or a number n for the seeds 0 .. n-1.
    `observe(i, first, part)` is called as rounds complete: `part` has the rounds of run i that were completed since the
    last call, beginning with round `first`, and no model. Calls never overlap; they come from other threads if several
    programs play at the same time. With "progress", lines on standard error say how far it is, and how long the rest
    will take.
    `checkpoints` is a directory: an interrupted simulation leaves its state there, and the same call resumes from it.
    `stream` says whether the samples stay on the host. If so, the samples of a round's devices are copied while the
    round before is computed; for an evaluation all samples are copied, in blocks. By default they stay if they take
    more than half of the accelerator's memory. Results agree up to rounding.
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
    ready = simulation(whole, system=system, objective=objective, record=record, accelerators=accelerators)
    observers = [run_by_run(observe)] if callable(observe) else []
    if observe == "progress":
        total = sum(job.rounds for batch in ready.batches for job in batch)
        lines = Lines(total, tell, costs=ready.costs)
        if look := ready.first_look():
            tell(look)
        observers.append(run_by_run(lambda i, first, part: lines.advance(len(part.seconds), i)))
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

    def first_look(self) -> str | None:
        """What the evaluation of the first run's first model says, and how long a round will take, by its time.

        None if there is soon something to see anyway, or if the look itself would take long. With several accelerators
        there is none: only the first of several processes would look.
        """
        problem, job = self.problem, self.batches[0][0]
        if not problem.model.heavy or problem.side_by_side or problem.streamed or problem.mesh is not None:
            return None
        looked_at = FORWARD * (len(problem.looked_at.y) + len(problem.test.y))
        each = operations(problem.model, jax.ShapeDtypeStruct(self.federation.shape, self.federation.kind)) / FORWARD
        if not each * looked_at < LONG <= each * self.costs[job.place]:
            return None

        look = jax.jit(lambda problem, algorithm, seed: evaluate(problem, start(problem, algorithm, seed).params))
        given = (problem, job.algorithm, np.uint32(job.seed))
        compiled = look.lower(*given).compile()
        began = time.perf_counter()
        evaluation = jax.block_until_ready(compiled(*given))
        seconds = (time.perf_counter() - began) / looked_at * self.costs[job.place]
        loss, right = float(evaluation.train_loss), float(evaluation.test_accuracy)
        accuracy = "" if math.isnan(right) else f"test accuracy {100 * right:.1f} %, "  # NaN if it predicts numbers
        takes = f"a round of {job.algorithm.name} takes about {clock(seconds)}"
        return f"before round 1: {accuracy}training loss {loss:.3g}; {takes}"

    def run(
        self,
        observers: Sequence[Observer] = (),
        checkpoints: Path | None = None,
        when_all_play: Callable[[], None] = lambda: None,  # called once the first rounds of every program are played
    ) -> list[Run]:
        """Play the rounds, and let the observers know; `checkpoints` is explained at `simulate`."""
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

            given = (self.problem, self.federation, self.batches[number], self.every)
            return run_stacked(*given, tell if observers else None, keep, prepare_next)

        try:
            batches_played = played(play, len(self.batches), self.together, observers)
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)  # an interruption does not wait for the compiler
        runs = {place: run for batch in batches_played for place, run in batch.items()}
        return [runs[place] for place in sorted(runs)]


def simulation(whole: Settled, *, accelerators: int | str = 1, **chosen: Any) -> Simulation:
    """All that `simulate` does before its first round. It finds all other mistakes. `problem` explains `chosen`."""
    federation, algorithms, seeds = whole.federation, whole.algorithms, whole.seeds
    K = max((one.selection.enough for one in algorithms if not one.selection.distinct), default=0)
    if K > federation.N:
        warning = "K = %d draws with replacement from %d devices: a round counts each %.3g times on average"
        log.warning(warning, K, federation.N, K / federation.N)
    shared = problem(
        federation,
        whole.model,
        mesh=parallel.mesh(accelerators),
        streamed=whole.streamed,
        evaluated=whole.evaluated,
        metrics=whole.metrics,
        **chosen,
    )
    traced = isinstance(shared.system, Trace)
    for algorithm in algorithms:
        if traced:
            expected = "should be an algorithm that does not ask all devices at once: not all are online"
            check("algorithms", algorithm.name, algorithm.selection.first is None, expected)
            each_joins = algorithm.privacy is None or algorithm.privacy.scheme == "poisson"
            check("select", "uniform", each_joins, "should be poisson with privacy, if not all devices are online")
        if shared.clocked and algorithm.asynchrony is not None:
            expected = "should be a system model without a clock, such as network: these devices start one by one"
            raise InputError("system", f"with {algorithm.name}", expected)
    groups: dict[Any, list[Job]] = {}
    pairs = itertools.product(zip(algorithms, whole.rounds, strict=True), seeds)
    for place, ((algorithm, rounds), seed) in enumerate(pairs):
        alike = (jax.tree.structure(algorithm), rounds)
        groups.setdefault(alike, []).append(Job(place, privacy.with_key(algorithm, _key), seed, rounds))
    costs = [cost for one in algorithms for cost in [round_cost(whole, shared.system, one)] * len(seeds)]
    fits = [(jobs, fitting(shared, jobs[0].algorithm, memory(), jobs[0].rounds)) for jobs in groups.values()]
    batches = [batch for jobs, fit in fits for batch in batched(jobs, fit)]
    if not shared.side_by_side:  # runs take turns anyway: the cheap ones first, so that there are soon rounds to see
        alone = [job for jobs in groups.values() for job in jobs]
        alone.sort(key=lambda job: (job.place % len(seeds), costs[job.place], job.place))
        batches = [[job] for job in alone]
    for batch in batches:
        check_shapes(shared, batch)
    # a light model's operations are too small for more than one core; all else has enough work with one program
    light = shared.side_by_side and not shared.streamed and shared.mesh is None and jax.default_backend() == "cpu"
    filled = sum(len(jobs) / fit for jobs, fit in fits)  # of the memory for runs
    together = min(len(batches), cores()) if light and filled <= 1 else 1
    batches.sort(key=len, reverse=True)  # the largest batch begins first; checkpoints are named by this order
    return Simulation(shared, federation, batches, whole.every, together, costs)


def _key() -> NDArray:
    """Two words that no file keeps. All processes play the same run, so they have the same."""
    return parallel.shared(np.frombuffer(os.urandom(8), np.uint32))


class Stopped(BaseException):
    """Another program failed, or the user interrupted them all."""


def played(play: Callable[[int, Observer], T], programs: int, together: int, observers: Sequence[Observer]) -> list[T]:
    """play(number, tell) for each program, some of them `together`. Calls of tell(), for all observers, never overlap.

    If one fails or is interrupted, the others stop after the rounds that they are at.
    """
    stop, alone = threading.Event(), threading.Lock()
    place = jax.config.jax_default_device  # type: ignore[attr-defined]  # it may hold for this thread only

    def tell(first: int, parts: Mapping[int, Run]) -> None:
        with alone:
            if stop.is_set():
                raise Stopped
            for observe in observers:
                observe(first, parts)

    def work(number: int) -> T:
        if stop.is_set():
            raise Stopped
        try:
            with jax.default_device(place):
                return play(number, tell)
        except BaseException:
            stop.set()
            raise

    if together == 1:
        return [play(number, tell) for number in range(programs)]
    with ThreadPoolExecutor(together, thread_name_prefix="folb-play") as pool:
        futures = [pool.submit(work, number) for number in range(programs)]
        try:
            wait(futures)
        finally:
            stop.set()  # Ctrl-C ends the wait
    for future in sorted(futures, key=lambda future: isinstance(future.exception(), Stopped)):
        future.result()  # raises what went wrong, before it is raised that others were stopped
    return [future.result() for future in futures]


def round_cost(whole: Settled, system: System, algorithm: Algorithm) -> float:
    """About how many gradients of single samples a round computes, with its share of the evaluations."""
    federation, evaluated = whole.federation, whole.evaluated
    if not whole.model.heavy:  # it is not the samples that take the time
        return 1.0
    solver, size = algorithm.solver, federation.train.size
    devices = jnp.arange(min(len(size), ASKED))
    own = jnp.asarray(size[: len(devices)])
    _, effort = jax.jit(managed)(system, solver, own, devices, 0, 1)
    each = np.asarray(effort.work * unit_cost(solver, own), float).mean() * solver.batch
    each += size.mean() * _passes(algorithm.uploads)
    survey = algorithm.selection.survey
    sampled = algorithm.selection.K * each + size.sum() * _passes([] if survey is None else [survey])
    looked_at = sum(min(evaluated or len(side.y), len(side.y)) for side in (federation.train, federation.test))
    return float(sampled + FORWARD * looked_at / whole.every)


def _passes(uploads: Iterable[Upload]) -> float:
    """How often the gradients of a device's samples are computed for these uploads."""
    return sum(PASSES.get(need, 0.0) for need in {need for upload in uploads for need in upload.needs})
