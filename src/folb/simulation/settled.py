"""What is simulated: the settings, checked, with every choice made that the caller left open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal

import jax
import numpy as np

from folb import measures
from folb.core import privacy
from folb.core.algorithm import Algorithm
from folb.core.guard import check_around
from folb.core.robust import check_enough, different_devices
from folb.core.round import over_rounds
from folb.core.selection import TIMES
from folb.core.whiten import hidden_matrices
from folb.data.federation import Federation
from folb.errors import InputError, check, check_whole, choose
from folb.measures import ACCURACY, CLASSES, KNOWN, NUMBERS, TOP, Metric, is_regression, measure
from folb.models import Model
from folb.models.model import check_model, operations, params_like
from folb.simulation.problem import ENDLESS
from folb.store.environment import memory
from folb.typing import Params

SMALL_BATCH = 1000  # up to this size, a batch takes little memory, even if no device has so many samples


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
    metrics: tuple[Metric, ...]  # besides the accuracy
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
    metrics: Sequence[str | Metric | Callable[..., Any]] = (),
    stream: bool | None = None,
) -> Settled:
    """The settings of a simulation. It finds the mistakes that need no data on the accelerator."""
    algorithms = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    check("seeds", seeds, not isinstance(seeds, bool), "should be a number of seeds, or a list of them")
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    streamed = streams(federation, stream)
    check("algorithms", algorithms, len(algorithms) > 0, "should be at least one")
    for algorithm in algorithms:
        if not isinstance(algorithm, Algorithm):
            raise InputError("algorithms", algorithm, "should be an Algorithm, such as algorithms.folb()")
    check("model", model, isinstance(model, Model), "should be a Model, such as models.logistic(shape, classes)")
    check_whole("rounds", rounds, 1, ENDLESS)
    check_whole("evaluate_every", evaluate_every, 1, ENDLESS)
    expected = f"should be between 1 and rounds = {rounds}"
    check("evaluate_every", evaluate_every, evaluate_every <= rounds, expected)
    check("seeds", [], len(seeds) > 0, "should be at least one")
    for seed in seeds:
        check_whole("seeds", seed, 0, 2**32 - 1)
    for algorithm in algorithms:
        _check_algorithm(algorithm, federation, streamed)
    check(f"{federation.name}: test samples", 0, len(federation.test.y) > 0, "should be at least 1")
    _check_judged(model, federation)
    if model.codes is not None and federation.expand is None:
        _check_codes(federation, model.codes)
    N, params = federation.N, params_like(model)
    sample = jax.ShapeDtypeStruct((1, *federation.shape), federation.kind)
    check_model(model, params, sample, jax.ShapeDtypeStruct((1,), federation.train.y.dtype))
    hidden = hidden_matrices("model: hidden", model.hidden, params) if model.hidden else ()
    algorithms = [one.of(hidden) for one in algorithms]
    algorithms = [over_rounds(_bounded(privacy.calibrated(one, N, rounds), federation), rounds) for one in algorithms]
    allowed = [privacy.affordable(one, N, rounds) for one in algorithms]
    for algorithm, most in zip(algorithms, allowed, strict=True):
        if most < evaluate_every:
            expected = f"should be at most {most}, the rounds that the epsilon of {algorithm.name} allows"
            raise InputError("evaluate_every", evaluate_every, expected)
    _check_labels(federation, model, params, sample)
    evaluated, besides = how_many(evaluate, federation, model), measured(metrics, model, federation)
    return Settled(federation, model, algorithms, seeds, allowed, evaluate_every, evaluated, besides, streamed)


def streams(federation: Federation, stream: bool | None) -> bool:
    """Whether the samples stay on the host: as asked, or if they take more than half of the memory."""
    expected = "should be true, false, or none to decide by the samples' size"
    check("stream", stream, stream in (None, True, False), expected)
    return federation.nbytes > memory() // 2 if stream is None else bool(stream)


def _check_algorithm(algorithm: Algorithm, federation: Federation, streamed: bool) -> None:
    how, solver, N = algorithm.selection, algorithm.solver, federation.N
    if algorithm.asynchrony is not None:
        _check_concurrency(algorithm.asynchrony.concurrency, how.expected, N, streamed)
    elif how.distinct and how.expected > N:
        expected = f"should be at most the {N} devices: a round draws each device at most once"
        raise InputError("select.K" if how.wanted is None else TIMES, how.expected, expected)
    if algorithm.guard is not None:
        check_around(algorithm)
    if algorithm.robust is not None and algorithm.asynchrony is None:
        check_enough(algorithm.robust, how.enough, int if how.distinct else partial(different_devices, N))
    if streamed:
        reason = "streaming (stream=True, --stream) draws devices some rounds ahead"
        expected = f"should be an algorithm whose draws need neither a survey nor a memory: {reason}"
        check("algorithms", algorithm.name, how.ahead, expected)
        expected = "should have neither an attack nor robust=fltrust: with streaming, only some samples are at hand"
        check("algorithms", algorithm.name, algorithm.attack is None and not algorithm.own_samples, expected)
    if federation.regression and algorithm.attack is not None and algorithm.attack.poison:
        raise InputError("attack", algorithm.settings.get("attack"), "changes classes, but the labels are numbers")
    # a batch of unit "step" may span many passes through a device's samples, and takes memory for each sample
    largest = int(federation.train.size.max())
    most = max(largest, SMALL_BATCH)
    if solver.unit == "step" and solver.batch > most:
        why = f"the largest device has {largest} samples, and local.unit is step"
        raise InputError("local.batch", solver.batch, f"should be at most {most}: {why}")


def _check_concurrency(M: int, K: int, N: int, streamed: bool) -> None:
    check("concurrency", M, M <= N, f"should be at most the {N} devices: a device works once at a time")
    check("select.K", K, K <= N, f"should be at most the {N} devices: a round has one reply of each device at most")
    reason = f"M - 1 devices at work and K - 1 replies in the buffer leave none of the {N} to start"
    check("concurrency", M, M + K - 1 <= N, f"should be at most N - K + 1 = {N - K + 1} with K = {K}: {reason}")
    expected = "should be None with streaming (stream=True, --stream), which draws devices some rounds ahead"
    check("concurrency", M, not streamed, expected)


def _check_labels(federation: Federation, model: Model, params: Params, sample: jax.ShapeDtypeStruct) -> None:
    """A label that the model has no score for would make the loss NaN, as if the run diverged."""
    if model.scores is None:
        return
    scores = jax.eval_shape(model.scores, params, sample)
    classes, largest = scores.shape[-1], int(max(side.y.max() for side in (federation.train, federation.test)))
    expected = f"should be at least {largest + 1}, for labels from 0 to {largest}"
    check("model: classes", classes, largest < classes, expected)


def _bounded(algorithm: Algorithm, federation: Federation) -> Algorithm:
    """The same algorithm without room for samples that no device has: a batch never spans two epochs."""
    solver, largest = algorithm.solver, int(federation.train.size.max())
    if solver.unit != "epoch" or solver.batch <= largest:
        return algorithm
    return algorithm.but(solver=replace(solver, batch=largest))


def _check_codes(federation: Federation, codes: int) -> None:
    for x in (federation.train.x, federation.test.x):
        expected = f"should be whole numbers from 0 to {codes - 1}, which the model takes"
        check("x", x.dtype.name, np.issubdtype(x.dtype, np.integer), expected)
        if x.size and not (x.min() >= 0 and x.max() < codes):
            span = f"{x.min()} to {x.max()}"
            raise InputError("x", span, f"should be from 0 to {codes - 1}, as many codes as there are classes")


def measured(asked: Sequence[Any], model: Model, federation: Federation) -> tuple[Metric, ...]:
    """What is measured besides the accuracy: what the model is judged by, and what was asked for, if it fits."""
    judge = measure(model.judged_by)
    wanted = tuple(dict.fromkeys(one for one in (judge, *measures.chosen(asked)) if one.name != ACCURACY))
    for one in wanted:
        _check_fits(one, model, federation)
    return wanted


def _check_judged(model: Model, federation: Federation) -> None:
    """The metric that judges the model should fit it, and the model the labels."""
    by = model.judged_by
    if not (isinstance(by, str) and TOP.fullmatch(by)):
        choose("model: judged_by", by, KNOWN)
    if is_regression(by) and not federation.regression:
        expected = "predicts numbers, but the labels are classes: a classifier would fit, such as logistic; if they are"
        raise InputError("model: judged_by", by, f"{expected} numbers to predict, set regression=true")
    if federation.regression and not is_regression(by):
        expected = "tells classes apart, but the labels are numbers: --model linear would fit"
        raise InputError("model: judged_by", by, f"{expected}, or a Model with judged_by='mse'")


def _check_fits(metric: Metric, model: Model, federation: Federation) -> None:
    fits = partial(check, "metrics", metric.name)
    fitting, k = NUMBERS if is_regression(model.judged_by) else CLASSES, dict(metric.fixed).get("k", 0)
    known = (name for name, one in KNOWN.items() if one.task == fitting and name != ACCURACY)
    does = {CLASSES: "tells classes apart", NUMBERS: "predicts numbers"}[fitting]
    others = f"{', '.join(known)} or fairness would fit"
    fits(metric.task in ("", fitting), f"is for {metric.task}, but the model {does}: {others}")
    scored = "scores" not in metric.needs or model.scores is not None
    fits(scored, "needs the scores of classes, but the model has none (Model.scores): f1 would fit")
    least = "there is no such metric for two classes" if federation.classes == 2 else "it would always be 100 %"
    fits(not k or k < federation.classes, f"should be less than the {federation.classes} classes: {least}")
    has_own = "own" not in metric.needs or federation.test.size.any()
    fits(has_own, "needs test samples of the devices, but only the server has any")


SAMPLE = 1000  # samples of each side that a costly model is evaluated on
COSTLY = 5e5  # operations for one sample, from which on a model is costly
LONG = 2e10  # operations of an evaluation that takes about half a second on two cores
NORMAL = 1.96  # 95 % of a normal distribution are within so many standard deviations

Evaluate = int | Literal["all"] | None


def check_evaluate(evaluate: Any) -> None:
    """Raise an `InputError` unless it is "all", a number of samples, or None."""
    number = isinstance(evaluate, Integral) and not isinstance(evaluate, bool) and int(evaluate) >= 1
    if not (number or evaluate is None or (isinstance(evaluate, str) and evaluate == "all")):
        expected = "should be all, a number of samples from 1 on, or none to decide by the model's cost"
        raise InputError("evaluate", evaluate, expected)


def usual(federation: Federation, model: Model) -> int | None:
    """How many samples of each side are evaluated by default, the same on every machine; None: all of them."""
    samples = len(federation.train.y) + len(federation.test.y)
    if samples <= SAMPLE:
        return None
    each = operations(model, jax.ShapeDtypeStruct(federation.shape, federation.kind))
    return _fewer(federation, SAMPLE) if each >= COSTLY and each * samples >= LONG else None


def how_many(evaluate: Evaluate, federation: Federation, model: Model) -> int | None:
    """How many samples of each side are evaluated: as asked, or as usual; None: all of them."""
    check_evaluate(evaluate)
    if evaluate is None:
        return usual(federation, model)
    return None if evaluate == "all" else _fewer(federation, int(evaluate))


def _fewer(federation: Federation, n: int) -> int | None:
    """n, or None if neither side has more samples."""
    return n if n < max(len(federation.train.y), len(federation.test.y)) else None


def evaluated_on(federation: Federation, n: int | None, judged_by: str = ACCURACY, fairness: bool = False) -> str:
    """What is evaluated, and how far the accuracy, with `fairness` also a device's, may be from that on all samples."""
    if n is None:
        return ""
    train, test = len(federation.train.y), len(federation.test.y)
    words = []
    if n < test:
        known = measure(judged_by)
        on = f"{n:,} of {test:,} test samples"
        if is_regression(judged_by):
            words.append(f"{known.words} on {on}")
        else:
            words.append(f"accuracy on {on}: within ±{100 * _error(n, test):.1f} points (95 %)")
            words += [f"{known.words} on the same samples"] if judged_by != ACCURACY else []
        if fairness:
            words.append(_of_devices(federation, n, is_regression(judged_by)))
    if n < train:
        words.append(f"training loss on {n:,} of {train:,} training samples")
    return "; ".join(words)


def _error(n: int, of: int) -> float:
    """How far a share of n samples is from that of all `of`, with 95 % certainty."""
    # of a share near 1/2, where it varies most; a sample without repetitions varies less than one with them
    return NORMAL * math.sqrt((of - n) / max(of - 1, 1) / (4 * n))


def _of_devices(federation: Federation, n: int, regression: bool) -> str:
    """How many of its samples a device is judged on, and how exact that is."""
    size, all_of_it = federation.test.sample(n).size, federation.test.size
    judged = size > 0
    if not judged.any():
        return "no device has a sample among them"
    typical = np.flatnonzero(judged)[np.argsort(size[judged], kind="stable")[judged.sum() // 2]]
    few, whole = int(size[typical]), int(all_of_it[typical])
    devices = f"{judged.sum():,} of {(all_of_it > 0).sum():,} devices judged"
    words = f"{devices}, a typical one on {few:,} of {whole:,} samples"
    if regression:
        return words
    points = 100 * min(1.0, _error(few, whole))
    return f"{words}: its own accuracy within ±{points:.0f} points, so the variance is larger"
