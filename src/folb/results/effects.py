"""A mean over paired runs, and its interval."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from folb.typing import NDArray

# The usual table: scipy.special takes as long to load as a hundred rounds of a small run take to play
STUDENT = (
    *(12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146),
    *(2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274),
    *(2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776),
    *(2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864),
    *(2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972),
    *(2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378),
)


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
    half = student(n - 1) * float(means.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Effect(mean, mean - half, mean + half, len(values))


def student(freedom: int) -> float:
    """The 0.975 quantile of Student's distribution, with so many degrees of freedom."""
    if 1 <= freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
