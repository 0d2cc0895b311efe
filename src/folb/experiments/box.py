"""A box of settings, and points that are drawn from it: for each setting a range, a range of logarithms, or values.

    "0.1..3"          uniform from 0.1 to 3
    "log:0.001..1"    its logarithm is uniform: as many points from 0.001 to 0.01 as from 0.1 to 1
    [5, 10]           these values

A range is cut into as many parts as there are points, and each part has one point. Values come about equally often.
The points depend only on the box, their number and the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union, get_args, get_origin

from folb.errors import InputError, check
from folb.experiments.settings import read

POINTS = 12  # if the experiment does not say how many
LOG, TO = "log:", ".."
HYPHEN = re.compile("{0}-{0}".format(r"(\d[\d.]*(?:e[+-]?\d+)?)"), re.IGNORECASE)
EXAMPLE = "such as local.lr=log:0.001..1"


class Range(NamedTuple):
    """The numbers from `low` to `high`, uniform or with uniform logarithms."""

    low: float
    high: float
    log: bool = False
    whole: bool = False  # whole numbers, and `high` is one of them

    def __str__(self) -> str:
        """As an experiment has it."""
        low, high = (repr(float(end)).removesuffix(".0") for end in (self.low, self.high))
        return f"{LOG if self.log else ''}{low}{TO}{high}"

    @property
    def size(self) -> float:
        return self.high + 1 - self.low if self.whole else math.inf

    def drawn(self, place: int, offset: float, n: int) -> float:
        """The number at `offset`, from 0 to 1, in part `place` of n."""
        exact = self._at((place + offset) / n)
        if self.whole:
            return min(max(math.floor(exact), int(self.low)), int(self.high))
        first, after = self._at(place / n), self._at((place + 1) / n)
        short = (float(f"{exact:.{digits}g}") for digits in range(3, 18))
        return next((number for number in short if first <= number < after), exact)  # few digits, for people to read

    def _at(self, share: float) -> float:
        low, high = self.low, self.high + 1 if self.whole else self.high
        if share in (0, 1):
            return high if share else low
        if self.log:
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return low + share * (high - low)


Choice = Range | Sequence[Any]  # of one setting


def parse(name: str, given: Any) -> Choice:
    """A range from its text, or a list of values; not yet checked against the setting's type."""
    if not (isinstance(given, str) and (TO in given or given.startswith(LOG))):
        values = list(given) if isinstance(given, list | tuple) else [given]
        check(name, given, bool(values), "should be a range, or at least one value")
        return values
    log = given.startswith(LOG)
    try:
        low, high = map(float, given.removeprefix(LOG).split(TO))
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(name, given, "should be a range of numbers: LOW..HIGH or log:LOW..HIGH")
    check(name, given, low < high, "should be LOW..HIGH with LOW less than HIGH")
    check(name, given, low > 0 or not log, "should begin above 0: it is a range of logarithms")
    return Range(low, high, log)


def spelt(box: Any) -> dict[str, Any]:
    """The box as an experiment has it, each range in one spelling. A mapping in it is for one algorithm alone."""
    check("box", box, isinstance(box, Mapping), f"should have a range or values for each setting, {EXAMPLE}")
    own: dict[str, Any] = {}
    for name, given in box.items():
        choice = spelt(given) if isinstance(given, Mapping) else parse(name, given)
        own[name] = str(choice) if isinstance(choice, Range) else choice
    return own


def is_empty(box: Mapping[str, Any]) -> bool:
    return not any(not isinstance(given, Mapping) or given for given in box.values())


def choice(name: str, kind: Any, given: Any) -> Choice:
    """A range or values for a setting of the type `kind`."""
    parsed = parse(name, given)
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    number = next((one for one in kinds if one in (int, float)), None)  # a setting may be a number or something else
    if isinstance(parsed, Range):
        if number is None:
            raise InputError(name, given, "is a range, but the setting is not a number: give values, as V1,V2")
        low, high = (read(name, number, end) for end in (parsed.low, parsed.high))
        return Range(low, high, parsed.log, number is int)
    values = []
    for value in parsed:
        try:
            values.append(read(name, kind, value))
        except InputError as error:
            meant = HYPHEN.fullmatch(str(value))  # two numbers with a hyphen were meant for a range
            if meant is None or number is None:
                raise
            raise InputError(name, value, f"{error.expected}, or a range: {TO.join(meant.groups())}") from None
    check(name, given, len(set(map(repr, values))) == len(values), "should be different values")
    return values


# the words that stand for settings in the seeds of a draw; they stay, because stored searches have these points
SEEDED = {"local.lr": "lr", "local.mu": "mu", "rule.weights": "averaging", "server.beta": "beta", "select.K": "K"}


def draw(box: Mapping[str, Choice], n: int, seed: int) -> list[dict[str, Any]]:
    """n different points of the box."""
    size = math.prod(choice.size if isinstance(choice, Range) else len(choice) for choice in box.values())
    check("points", n, n <= size, f"should be at most {size:.0f}: the box has no more points")
    points: dict[str, tuple[Any, ...]] = {}
    turns, words = itertools.count(), [SEEDED.get(name, name.replace(".", "_")) for name in box]
    while len(points) < n:  # with whole numbers or values, a point may be drawn twice; then more are drawn
        key = f"{seed} {next(turns)}"
        columns = map(_column, words, box.values(), _orders(words, n, key), itertools.repeat(key))
        for point in zip(*columns, strict=True):
            points.setdefault(repr(point), point)
    return [dict(zip(box, point, strict=True)) for point in list(points.values())[:n]]


def _orders(words: Sequence[str], n: int, key: str) -> list[list[int]]:
    """For each setting, the part of its range that each point is in."""
    # the least correlated of many: or the high values of one setting would often meet only low values of another
    tries = [
        [sorted(range(n), key=lambda i: _chance(f"{key} {k} {word} {i}")) for word in words]
        for k in range(max(1, TRIED // n))
    ]
    return min(tries, key=_correlation)


TRIED = 2000  # places of each setting, in all draws together


def _correlation(orders: Sequence[Sequence[int]]) -> int:
    """The largest correlation of two settings, times a constant."""
    n = len(orders[0])
    pairs = itertools.combinations(orders, 2)
    return max((abs(4 * sum(map(int.__mul__, a, b)) - n * (n - 1) ** 2) for a, b in pairs), default=0)


def _column(word: str, of_setting: Choice, order: Sequence[int], key: str) -> list[Any]:
    n = len(order)
    places = [(place, _chance(f"{key} within {word} {i}")) for i, place in enumerate(order)]
    if isinstance(of_setting, Range):
        return [of_setting.drawn(place, offset, n) for place, offset in places]
    return [of_setting[int((place + offset) / n * len(of_setting))] for place, offset in places]


def _chance(key: str) -> float:
    """A number from 0 to 1. It comes from a hash: a library's random numbers may change with its version."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48
