"""Metrics beyond the accuracy: what a model predicts for every test sample, and what is computed from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.data.federation import Federation
from folb.errors import InputError, choose
from folb.measures import ACCURACY, FAIRNESS, KNOWN, OF_CLASSES, OF_NUMBERS, TOP, checked, is_regression
from folb.models import Model, metrics
from folb.simulation.blocks import add_rows, one_each, sum_over_blocks
from folb.simulation.problem import Problem
from folb.simulation.samples import Samples
from folb.typing import Params


class Said(NamedTuple):
    """What a model predicts for samples, in their order."""

    predicted: Array
    scores: Array | None  # only if a metric needs them


class Judged(NamedTuple):
    """The test accuracy (NaN if the model predicts numbers), the metrics, and each device's own figure, if recorded."""

    accuracy: Array
    metrics: dict[str, Array]
    own: Array | None


def chosen_metrics(asked: Sequence[str], model: Model, federation: Federation) -> tuple[str, ...]:
    """What is measured besides the accuracy: what the model is judged by, and what was asked for, if it fits.

    The accuracy of a classifier is measured anyway, and need not be asked for.
    """
    found = dict.fromkeys([model.judged_by, *checked(asked)])
    found.pop(ACCURACY, None)
    for name in found:
        _check_fits(name, model, federation)
    return tuple(found)


def check_judged(model: Model, federation: Federation) -> None:
    """Raise an `InputError` unless the metric that judges the model fits it, and the model fits the labels."""
    by = model.judged_by
    if not (isinstance(by, str) and TOP.fullmatch(by)):
        choose("model: judged_by", by, KNOWN)
    if is_regression(by) and not federation.regression:
        expected = "predicts numbers, but the labels are classes: a classifier would fit, such as logistic; if they are"
        raise InputError("model: judged_by", by, f"{expected} numbers to predict, set regression=true")
    if federation.regression and not is_regression(by):
        expected = (
            "tells classes apart, but the labels are numbers: --model linear would fit, or a Model with judged_by='mse'"
        )
        raise InputError("model: judged_by", by, expected)


def _check_fits(name: str, model: Model, federation: Federation) -> None:
    def refuse(expected: str) -> InputError:
        return InputError("metrics", name, expected)

    top = TOP.fullmatch(name)
    if is_regression(model.judged_by):
        if top or name in OF_CLASSES:
            raise refuse(
                f"is for classes, but the model predicts numbers: {', '.join(OF_NUMBERS)} or fairness would fit"
            )
    elif name in OF_NUMBERS:
        raise refuse(
            f"is for numbers, but the model tells classes apart: {', '.join(OF_CLASSES)} or fairness would fit"
        )
    if (top or name == "auc") and model.scores is None:
        raise refuse("needs the scores of classes, but the model has none (Model.scores): f1 would fit")
    if top and int(top[1]) >= federation.classes:
        least = "there is no such metric for two classes" if federation.classes == 2 else "it would always be 100 %"
        raise refuse(f"should be less than the {federation.classes} classes: {least}")
    if name == FAIRNESS and not federation.test.size.any():
        raise refuse("needs test samples of the devices, but only the server has any")


def said(problem: Problem, samples: Samples, params: Params) -> Said:
    """What the model predicts for every sample, block by block."""
    model, scored = problem.model, any(name == "auc" or TOP.fullmatch(name) for name in problem.metrics)

    def of(params: Params, x: Array, y: Array) -> Said:
        scores = model.scores(params, x) if scored and model.scores is not None else None
        return Said(one_each("predict", model.predict(params, x), y), scores)

    def block(params: Params, x: Array, y: Array, rows: Array, real: Array) -> Said:
        def kept(values: Array) -> Array:
            return jnp.where(real.reshape(-1, *[1] * (values.ndim - 1)), values, 0)

        return jax.tree.map(kept, of(params, x, y))

    def like(samples: Samples, params: Params) -> Said:
        return of(params, *samples.take(jnp.arange(len(samples.y))))

    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(like, samples, params))
    return sum_over_blocks(problem, block, params, samples, zero, add_rows)


def judged(problem: Problem, y: Array, found: Said, device: Array | None = None) -> Judged:
    """The metrics of a model's predictions for all test samples; `device` are those whose own figures are recorded."""
    numbers = is_regression(problem.model.judged_by)
    figure = (found.predicted - y) ** 2 if numbers else found.predicted == y
    values: dict[str, Array] = {}
    own = None
    if FAIRNESS in problem.metrics or device is not None:
        own = metrics.by_device(figure, problem.test.start, problem.test.size)
    for name in problem.metrics:
        if name == FAIRNESS:
            values |= metrics.fairness(own, lower=numbers)._asdict()  # type: ignore[arg-type]
        else:
            values[name] = _value(name, y, found, problem.classes)
    values = {name: value.astype(jnp.float32) for name, value in values.items()}
    accuracy = jnp.float32(jnp.nan) if numbers else metrics.accuracy(y, found.predicted)
    return Judged(accuracy, values, None if own is None or device is None else own[device])


def _value(name: str, y: Array, found: Said, classes: int) -> Any:
    if name == "f1":
        return metrics.f1(y, found.predicted, classes)
    if name == "auc":
        return metrics.auc(y, found.scores)  # type: ignore[arg-type]
    if name in OF_NUMBERS:
        return getattr(metrics, name)(y, found.predicted)
    return metrics.top(y, found.scores, int(TOP.fullmatch(name)[1]))  # type: ignore[arg-type, index]
