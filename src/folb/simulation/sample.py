"""What an evaluation looks at: all samples or, if that would take long, a fixed sample of them."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import jax
import numpy as np

from folb.data.federation import Federation
from folb.errors import InputError
from folb.measures import ACCURACY, is_regression, measure
from folb.models import Model
from folb.models.cost import operations

SAMPLE = 1000  # samples of each side that a costly model is evaluated on
COSTLY = 5e5  # operations for one sample, from which on a model is costly
LONG = 2e10  # operations of an evaluation that takes about half a second on two cores
NORMAL = 1.96  # 95 % of a normal distribution are within so many standard deviations

Evaluate = int | Literal["all"] | None
EXPECTED = "should be all, a number of samples from 1 on, or none to decide by the model's cost"


def check_evaluate(evaluate: Any) -> None:
    """Raise an `InputError` unless it is "all", a number of samples, or None."""
    number = isinstance(evaluate, Integral) and not isinstance(evaluate, bool) and int(evaluate) >= 1
    if not (number or evaluate is None or (isinstance(evaluate, str) and evaluate == "all")):
        raise InputError("evaluate", evaluate, EXPECTED)


def usual(federation: Federation, model: Model) -> int | None:
    """How many samples of each side the model is evaluated on by default; None: all of them.

    It depends on the model and the data alone, so that it is the same on every machine.
    """
    samples = len(federation.train.y) + len(federation.test.y)
    if samples <= SAMPLE:
        return None
    each = operations(model, jax.ShapeDtypeStruct(federation.shape, federation.kind))
    return _fewer(federation, SAMPLE) if each >= COSTLY and each * samples >= LONG else None


def chosen(evaluate: Evaluate, federation: Federation, model: Model) -> int | None:
    """How many samples of each side are evaluated: as asked, or as usual; None: all of them."""
    check_evaluate(evaluate)
    if evaluate is None:
        return usual(federation, model)
    return None if evaluate == "all" else _fewer(federation, int(evaluate))


def _fewer(federation: Federation, n: int) -> int | None:
    """n, or None if neither side has more samples."""
    return n if n < max(len(federation.train.y), len(federation.test.y)) else None


def sampled(federation: Federation, n: int) -> Federation:
    """The federation with n samples of each side, drawn from those of all devices: always the same."""
    return replace(federation, train=federation.train.sample(n), test=federation.test.sample(n))


def words(federation: Federation, n: int | None, judged_by: str = ACCURACY, fairness: bool = False) -> str:
    """What is evaluated, and how far the accuracy may be from that on all test samples; "" if it is on all.

    With `fairness`, also how far the accuracy of a device may be from that on all of its test samples.
    """
    if n is None:
        return ""
    train, test = len(federation.train.y), len(federation.test.y)
    notes = []
    if n < test:
        known = measure(judged_by)
        on = f"{n:,} of {test:,} test samples"
        if is_regression(judged_by):
            notes.append(f"{known.words} on {on}")
        else:
            notes.append(f"accuracy on {on}: within ±{100 * _error(n, test):.1f} points (95 %)")
            notes += [f"{known.words} on the same samples"] if judged_by != ACCURACY else []
        if fairness:
            notes.append(_of_devices(federation, n, is_regression(judged_by)))
    if n < train:
        notes.append(f"training loss on {n:,} of {train:,} training samples")
    return "; ".join(notes)


def _error(n: int, of: int) -> float:
    """How far a share of n samples is from that of all `of`, with 95 % certainty."""
    # of a share near 1/2, where it varies most; a sample without repetitions varies less than one with them
    return NORMAL * math.sqrt((of - n) / max(of - 1, 1) / (4 * n))


def _of_devices(federation: Federation, n: int, regression: bool) -> str:
    """How many of its samples a device is judged on, and how exact that is."""
    size, all_of_it = sampled(federation, n).test.size, federation.test.size
    judged = size > 0
    if not judged.any():
        return "no device has a sample among them"
    typical = np.flatnonzero(judged)[np.argsort(size[judged], kind="stable")[judged.sum() // 2]]
    few, whole = int(size[typical]), int(all_of_it[typical])
    judges = (
        f"{judged.sum():,} of {(all_of_it > 0).sum():,} devices judged, a typical one on {few:,} of {whole:,} samples"
    )
    if regression:
        return judges
    return (
        f"{judges}: its own accuracy within ±{100 * min(1.0, _error(few, whole)):.0f} points, so the variance is larger"
    )
