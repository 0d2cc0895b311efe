"""Metrics: how good the predictions of a model are. Each is a function of all test samples (`folb.measures.GIVEN`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def accuracy(y: Array, predicted: Array) -> Array:
    return jnp.sum(predicted == y) / len(y)


def f1(y: Array, predicted: Array, classes: int) -> Array:
    """Macro F1: the mean over the classes of 2 tp / (2 tp + fp + fn); classes that are in neither are left out."""
    right = jnp.bincount(y, (predicted == y).astype(jnp.int32), length=classes)
    both = jnp.bincount(y, length=classes) + jnp.bincount(predicted, length=classes)
    known = both > 0
    return jnp.sum(jnp.where(known, 2 * right / jnp.maximum(both, 1), 0.0)) / jnp.sum(known)


def top(y: Array, scores: Array, k: int) -> Array:
    """The share of samples whose label is among the k highest scores; of equal scores, the first count as higher."""
    own = jnp.take_along_axis(scores, y[:, None], axis=1)
    before = jnp.arange(scores.shape[1]) < y[:, None]
    # not "scores > own": a score that is not a number is above any other, so that such a sample is wrong
    above = ~(scores <= own) | ((scores == own) & before)
    return jnp.sum(jnp.sum(above, axis=1) < k) / len(y)


def auc(y: Array, scores: Array) -> Array:
    """The area under the ROC curve; with more than two classes, the mean over the classes of one against the rest."""
    if scores.shape[1] == 2:
        return _area(y == 1, scores[:, 1] - scores[:, 0])
    likely = jax.nn.log_softmax(scores, axis=1).T  # its order is that of the softmax, with fewer equal values
    areas = jax.lax.map(lambda row: _area(y == row[0], row[1]), (jnp.arange(len(likely)), likely))
    sizes = jnp.bincount(y, length=len(likely))
    known = (sizes > 0) & (sizes < len(y))  # classes without samples, or with all of them, are left out
    return jnp.sum(jnp.where(known, areas, 0.0)) / jnp.sum(known)


def _area(positive: Array, score: Array) -> Array:
    """The mean share of the others that score lower, of which equal scores count half; NaN if any is not finite."""
    n = len(score)
    ordered, positive = jax.lax.sort((score, positive), num_keys=1)
    others = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(~positive, dtype=jnp.int32)])
    places = jnp.arange(n)
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    first = jax.lax.cummax(jnp.where(new, places, 0))  # of the samples with this score
    end = jax.lax.cummin(jnp.where(jnp.roll(new, -1), places + 1, n), reverse=True)
    below = (others[first] + others[end]) / 2
    parts = jnp.where(positive, below / others[-1], 0.0)
    return jnp.where(jnp.all(jnp.isfinite(score)), jnp.sum(parts) / jnp.sum(positive), jnp.nan)


def mse(y: Array, predicted: Array) -> Array:
    return jnp.mean((predicted - y) ** 2)


def mae(y: Array, predicted: Array) -> Array:
    return jnp.mean(jnp.abs(predicted - y))


def by_device(values: Array, start: Array, size: Array) -> Array:
    """The mean of the values of each device's rows; NaN for a device without rows."""
    device = jnp.searchsorted(start + size, jnp.arange(len(values)), side="right")  # rows of the server: beyond all
    sums = jax.ops.segment_sum(values.astype(jnp.float32), device, len(size), indices_are_sorted=True)
    return jnp.where(size > 0, sums / jnp.maximum(size, 1), jnp.nan)


class Fairness(NamedTuple):
    """How a figure is spread over the devices."""

    own_mean: Array
    own_worst: Array
    own_variance: Array


def fairness(own: Array, lower: bool) -> Fairness:
    """Over devices with test samples: the mean of their own figures, the mean of the worst tenth, and the variance.

    NaN in `own` is a device without test samples. A tenth is rounded up. `lower`: the highest figures are the worst.
    """
    known = ~jnp.isnan(own)
    count = jnp.sum(known)

    def mean(values: Array, which: Array, number: Array) -> Array:
        return jnp.sum(jnp.where(which, values, 0.0)) / number

    middle = mean(own, known, count)
    ordered = -jnp.sort(-own) if lower else jnp.sort(own)  # NaN comes last
    tenth = (count + 9) // 10
    worst = mean(ordered, jnp.arange(len(own)) < tenth, tenth)
    return Fairness(middle, worst, mean((own - middle) ** 2, known, count))
