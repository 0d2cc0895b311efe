"""What a private run spends: epsilon after so many rounds, and the noise for a budget.

The accountant is that of the package dp-accounting (Renyi differential privacy). A round is a Gaussian mechanism on
devices that were drawn by chance. Neighbouring federations differ in one device, and both have N devices:

- poisson: each device joins with the chance K/N. In the neighbour, one device adds 0: sums differ by at most the clip.
- fixed: K of N, without replacement. In the neighbour, one device has other data: sums differ by at most two clips.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from folb.core.part import at_least
from folb.errors import InputError, check, check_whole
from folb.typing import NDArray

DELTA = 1e-5  # of (epsilon, delta), unless set
SCHEMES = {"poisson": 1.0, "fixed": 2.0}  # by how many clips the sums of neighbours differ
NOISES = (1e-2, 1e4)  # a budget that needs a noise outside these bounds is an error
DIGITS = 4  # of a noise that is found
# of a noise that the user sets: with much less, epsilon is not finite, and no record of a round may have such a value
NOISE = at_least(1e-6)
# orders for fixed draws: with all of the accountant's usual ones, epsilon is 0.3 % less, at four times the time
FEWER = (*range(2, 33), 40, 48, 64, 96, 128)


class Rounds(NamedTuple):
    """How the devices of every round are drawn, and the noise of their sum, in clips."""

    scheme: str
    K: int
    N: int
    noise: float

    def epsilon(self, rounds: int, delta: float) -> float:
        return _epsilon(self, rounds, delta)

    def within(self, epsilon: float, delta: float, most: int) -> int:
        """How many rounds, at most `most`, stay within a budget."""
        return bisect.bisect_right(range(1, most + 1), epsilon, key=lambda rounds: self.epsilon(rounds, delta))


@functools.lru_cache
def noise_for(epsilon: float, delta: float, scheme: str, K: int, N: int, rounds: int) -> float:
    """The least noise, in clips, with which so many rounds stay within a budget."""

    def excess(power: float) -> float:
        return Rounds(scheme, K, N, math.exp(power)).epsilon(rounds, delta) - epsilon

    low, high = map(math.log, NOISES)
    expected = f"should be larger: {rounds} rounds need a noise above {NOISES[1]:g}"
    check("privacy.epsilon", epsilon, excess(high) <= 0, expected)
    if excess(low) <= 0:
        return NOISES[0]
    from scipy.optimize import brentq

    exact = math.exp(brentq(excess, low, high, xtol=1e-5))
    unit = 10.0 ** (math.floor(math.log10(exact)) + 1 - DIGITS)
    steps = math.ceil(exact / unit)
    while excess(math.log(steps * unit)) > 0:
        steps += 1
    return float(f"{steps * unit:.{DIGITS}g}")


def check_budget(epsilon: float | None, delta: float, K: int, N: int) -> None:
    """Raise an `InputError` for a budget, or a number of devices, that makes no sense."""
    if epsilon is not None:
        check("privacy.epsilon", epsilon, lambda value: 0 < value < math.inf, "should be more than 0, and finite")
    check_whole("devices", N, 1)
    check("select.K", K, K <= N, f"should be at most the {N} devices")
    expected = f"should be more than 0 and less than 1 / N = {1 / N:g}, for {N} devices"
    check("privacy.delta", delta, 0 < delta < 1 / N, expected)


@functools.lru_cache(maxsize=10**5)
def _epsilon(how: Rounds, rounds: int, delta: float) -> float:
    if rounds == 0:
        return 0.0
    package, (orders, spent) = _package(), _renyi(*how)
    with _quietly():
        return float(package.rdp.compute_epsilon(orders, rounds * spent, delta)[0])


@functools.lru_cache(maxsize=256)
def _renyi(scheme: str, K: int, N: int, noise: float) -> tuple[Any, NDArray]:
    """The orders, and the Renyi divergence of one round at each."""
    package = _package()
    relations = package.NeighboringRelation
    gaussian = package.GaussianDpEvent(noise / SCHEMES[scheme])
    if scheme == "poisson":
        orders, relation, drawn = None, relations.REPLACE_SPECIAL, package.PoissonSampledDpEvent(K / N, gaussian)
    else:
        orders, relation, drawn = FEWER, relations.REPLACE_ONE, package.SampledWithoutReplacementDpEvent(N, K, gaussian)
    accountant = package.rdp.RdpAccountant(orders, neighboring_relation=relation)
    with _quietly():
        accountant.compose(drawn)
    return accountant._orders, np.asarray(accountant._rdp)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The accountant leaves out orders at which the divergence does not converge, with a warning."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            yield
    finally:
        log.disabled = before


def _package() -> ModuleType:
    try:
        import dp_accounting
        from dp_accounting import rdp  # noqa: F401
    except ModuleNotFoundError as error:
        expected = "is needed to compute epsilon: pip install 'folb[privacy]'"
        raise InputError("privacy", "dp-accounting", expected) from error
    return dp_accounting
