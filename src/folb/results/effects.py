"""A mean over paired runs, and its interval."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from folb.typing import NDArray


class Effect(NamedTuple):
    """A mean over runs and its interval; of logarithms, if the metric is a ratio."""

    value: float
    low: float
    high: float
    runs: int


def interval(values: NDArray, draws: NDArray) -> Effect:
    """The mean, and Student's 95 % interval over the means of the draws; over the values if there is one draw.

    A bootstrap of so few values would be too narrow: with three values it covers 75 %.
    """
    known = np.unique(draws)
    means = values if len(known) == 1 else np.array([values[draws == draw].mean() for draw in known])
    n, mean = len(means), float(values.mean())
    half = float(stdtrit(n - 1, 0.975)) * float(means.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Effect(mean, mean - half, mean + half, len(values))
