"""A verdict for each claim, computed from stored results.

A claim compares an algorithm (`better`) with others (`worse`) by a `metric`, in each of its `arms` and, where `under`
lists words that tell variants apart (as "mu=1, averaging=samples"), under each of those: a condition. The effect is
paired: over the runs (draw, seed) of a condition the mean of

    rounds, loss, bytes_up       log(worse / better), shown as a ratio; above 1 in favour of `better`
    final, best, mean (accuracy) better - worse
    drops                        worse - better

with a 95 % bootstrap interval that resamples whole draws, or seeds where there is one draw. A run that never arrives
at the target counts as one round more than it had; a loss that is above 1000 or not finite counts as 1000. A condition
holds if its interval, against each of `worse`, lies beyond no effect in the claimed direction; beyond `at_least`, if
that is given. With `same` it is to lie within that much of no effect. `than` (arm, better, worse) asks that the effect
exceed another. With fewer than three runs a condition is not tested, nor is one in which no run arrives; a claim of
which that is all there is does not hold: nobody reached the target, and so nobody sooner.

Other metrics: `printed` is the factor between our median rounds and the printed ones, as the geometric mean over the
algorithms, to be below `at_most`; a run that never arrives counts as twice the rounds it had. Of a check, `violated`
is the share of cases in which a statement is false, and should be 0; `value` and `ratio` are its values' mean and
geometric mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from folb import report
from folb.errors import InputError, choose
from folb.federation import NDArray
from folb.reproduction.files import Arm, Claim

RESAMPLES, FEWEST, WORST_LOSS = 2000, 3, 1000.0
HOLDS, PARTLY, FAILS, UNTESTED = "holds", "holds only under a condition", "does not hold", "not tested here"

RATIOS = ("rounds", "loss", "bytes_up", "printed", "ratio")
POINTS = ("final", "best", "mean")
METRICS = (*RATIOS, *POINTS, "drops", "value", "violated")

Document = Mapping[str, Any]


class Effect(NamedTuple):
    """A mean over runs and its interval: of logarithms, where the metric is a ratio."""

    value: float
    low: float
    high: float
    runs: int


class Condition(NamedTuple):
    """The claim in one arm and variant: the weakest of its effects, against which algorithm, and whether it holds."""

    name: str
    against: str
    effect: Effect
    holds: bool


class Verdict(NamedTuple):
    """What became of a claim."""

    claim: Claim
    conditions: Sequence[Condition]
    untested: Sequence[str]  # names of conditions without enough results
    unreached: Sequence[str] = ()  # and of those in which no run arrives at the target

    @property
    def word(self) -> str:
        """The verdict."""
        held = [condition.holds for condition in self.conditions]
        if not held:
            return FAILS if self.unreached else UNTESTED
        return HOLDS if all(held) else PARTLY if any(held) else FAILS

    @property
    def text(self) -> str:
        """The verdict, with the conditions under which it holds if not under all."""
        names = [condition.name for condition in self.conditions]
        held = [condition.name for condition in self.conditions if condition.holds]
        if held and len(held) < len(names):
            return f"holds only under: {common(held, names)} ({len(held)} of {len(names)} conditions)"
        if self.unreached and not names:
            return f"{self.word}: no run of any algorithm arrives"
        notes = []
        if not held and names and self.claim.compares:
            contrary = sum(condition.effect.high < 0 for condition in self.conditions)
            notes.append(
                f"the contrary in {contrary} of {len(names)} conditions" if contrary else "no clear difference"
            )
        left = len(self.untested) + len(self.unreached)
        if names and left:
            notes.append(f"{left} of {len(names) + left} conditions not tested")
        return self.word + (f" ({'; '.join(notes)})" if notes else "")

    @property
    def effect(self) -> str:
        """The effect and its interval; where there are several conditions, the least and the greatest."""
        if not self.conditions:
            return ""
        ordered = sorted(self.conditions, key=lambda condition: condition.effect.value)
        shown = [effect_text(self.claim, condition.effect) for condition in ordered]
        return shown[0] if shown[0] == shown[-1] else f"from {shown[0]} to {shown[-1]}"


def common(held: Sequence[str], names: Sequence[str]) -> str:
    """What tells the names `held` from the others: one part or two that they alone have, or else each of them."""
    parts = {name: name.split(", ") for name in names}
    known = list(dict.fromkeys(part for name in names for part in parts[name]))
    for n in (1, 2):
        for chosen in itertools.combinations(known, n):
            if set(held) == {name for name in names if set(chosen) <= set(parts[name])}:
                return ", ".join(chosen)
    if len({len(part) for part in parts.values()}) > 1:
        return "; ".join(held)
    differ = [i for i in range(len(parts[names[0]])) if len({part[i] for part in parts.values()}) > 1]
    return "; ".join(", ".join(parts[name][i] for i in differ) for name in held)


def effect_text(claim: Claim, effect: Effect) -> str:
    """An effect as people read it."""
    if claim.metric in RATIOS:
        value, low, high = (f"{math.exp(x):.3g}" for x in effect[:3])
        return f"{value} [{low}, {high}] times"
    if claim.metric in POINTS:
        value, low, high = (_signed(100 * x) for x in effect[:3])
        return f"{value} [{low}, {high}] points"
    if claim.metric == "violated":
        return f"false in {round(effect.value * effect.runs)} of {effect.runs}"
    value, low, high = map(_signed, effect[:3])
    return f"{value} [{low}, {high}]{' drops' if claim.metric == 'drops' else ''}"


def _signed(value: float) -> str:
    """Two digits, or all of those before the point."""
    return f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.2g}"


def judge(claim: Claim, arms: Sequence[Arm], documents: Mapping[str, Document | None]) -> Verdict:
    """The verdict on a claim about `arms`, from the results of all arms by id; None where there are none."""
    choose(f"{claim.figure}: metric of {claim.id}", claim.metric, METRICS)
    found: list[Condition] = []
    untested, unreached = [], []
    for arm in arms:
        document = documents[arm.id]
        for under in claim.under or ("",):
            full = ", ".join(filter(None, (arm.name, under)))
            if document is None or not has(document, [claim.better, *claim.worse], under):
                untested.append(full)
            elif not _arrives(claim, document, under):
                unreached.append(full)
            else:
                conditions = list(_conditions(claim, full, document, under, documents))
                found += conditions
                if not conditions:
                    untested.append(full)
    return Verdict(claim, found, untested, unreached)


def _conditions(
    claim: Claim, name: str, document: Document, under: str, documents: Mapping[str, Document | None]
) -> Iterator[Condition]:
    if "check" in document:
        for case, values in document["values"].items():
            if not claim.conditions or case in claim.conditions:
                yield _of_check(claim, f"{name}, {case}", np.asarray(values, float), document["draws"].get(case))
        return
    if claim.metric == "printed":
        effects = {"the paper": _printed(document, under)}
    else:
        effects = {worse: _against(claim, document, worse, under, documents) for worse in claim.worse}
    if any(effect is None for effect in effects.values()):
        return
    sound = {against: effect for against, effect in effects.items() if effect is not None}
    against = min(sound, key=lambda key: sound[key].low)
    yield Condition(name, against, sound[against], all(_holds(claim, effect) for effect in sound.values()))


def _holds(claim: Claim, effect: Effect) -> bool:
    scale: Callable[[float], float] = math.log if claim.metric in RATIOS else float
    if claim.same is not None:
        margin = math.log1p(claim.same) if claim.metric in RATIOS else claim.same
        return -margin < effect.low and effect.high < margin
    if claim.metric == "violated":
        return effect.value == 0
    if claim.at_most is not None:
        return effect.high < scale(claim.at_most)
    return effect.low > (0.0 if claim.at_least is None else scale(claim.at_least))


def _of_check(claim: Claim, name: str, values: NDArray, draws: Sequence[int] | None) -> Condition:
    if claim.metric == "violated":
        effect = _share(values)
    else:
        measured = np.log(values) if claim.metric == "ratio" else values
        effect = bootstrap(measured, np.arange(len(values)) if draws is None else np.asarray(draws))
    return Condition(name, "", effect, _holds(claim, effect))


def _share(violated: NDArray) -> Effect:
    """The share of cases, with Wilson's interval."""
    n, p, z = len(violated), float(np.mean(violated)), 1.96
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return Effect(p, (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n), n)


def _against(
    claim: Claim, document: Document, worse: str, under: str, documents: Mapping[str, Document | None]
) -> Effect | None:
    values, draws = paired(document, claim.metric, claim.better, worse, under)
    if claim.than:
        other = documents.get(claim.than["arm"]) if "arm" in claim.than else document
        if other is None:
            return None
        sides = claim.than.get("better", claim.better), claim.than.get("worse", worse)
        compared, _ = paired(other, claim.metric, *sides, under)
        values = values - compared[: len(values)] if len(compared) >= len(values) else values[:0]
    return bootstrap(values, draws) if len(values) >= FEWEST else None


def _arrives(claim: Claim, document: Document, under: str) -> bool:
    """Whether there is something to compare: of rounds, there is not if no run arrives."""
    if claim.metric != "rounds":
        return True
    sides = (document["algorithms"][label(document, name, under)]["runs"] for name in (claim.better, *claim.worse))
    return any(value is not None for side in sides for value in side["rounds"])


def has(document: Document, names: Sequence[str], under: str) -> bool:
    """Whether the algorithms were run with what `under` asks for; one without such a setting is the same under any."""
    settings = document.get("experiment", {}).get("set", {})
    for word in under.replace(",", " ").split():
        key, _, value = word.partition("=")
        for name in filter(None, names):
            own = settings.get(name.split()[0], {}).get(key, value)
            if value not in map(report.spelt, own if isinstance(own, list) else [own]):
                return False
    return True


def paired(document: Document, metric: str, better: str, worse: str, under: str = "") -> tuple[NDArray, NDArray]:
    """The effect in each pair of runs that have the draw and the seed in common, and the draw."""
    sides = [document["algorithms"][label(document, name, under)]["runs"] for name in (better, worse)]
    keys = [list(zip(side["draw"], side["seed"], strict=True)) for side in sides]
    ours, theirs = (
        dict(zip(key, measured(document, side, metric), strict=True)) for key, side in zip(keys, sides, strict=True)
    )
    common = [key for key in keys[0] if key in theirs]
    effect = np.array([theirs[key] - ours[key] for key in common])
    return (-effect if metric in POINTS else effect), np.array([draw for draw, _ in common])


def measured(document: Document, runs: Mapping[str, Any], metric: str) -> NDArray:
    """A metric of each run; its logarithm, where effects are ratios."""
    limits = {"rounds": document["experiment"]["rounds"] + 1, "loss": WORST_LOSS}
    values = np.array([limits.get(metric, math.nan) if value is None else value for value in runs[metric]], float)
    if metric == "loss":
        values = np.clip(values, 1e-9, WORST_LOSS)
    return np.log(values) if metric in RATIOS else values


def label(document: Document, wanted: str, under: str = "") -> str:
    """The algorithm of the document that has all the words of `wanted`, and those of `under` that tell it apart."""
    name, *words = wanted.split()
    found = [label for label in document["algorithms"] if label.split()[0] == name and set(words) <= set(label.split())]
    for word in under.replace(",", " ").split():
        key = word.partition("=")[0] + "="
        if any(other.startswith(key) for label in found for other in label.split()):
            found = [label for label in found if word in label.split()]
    if len(found) != 1:
        expected = f"should be one of {', '.join(document['algorithms'])}"
        raise InputError(f"{document['figure']}: algorithm of a claim", f"{wanted} {under}".strip(), expected)
    return found[0]


def resamples(draws: NDArray) -> NDArray:
    """Which runs are in each resample: those of draws drawn with replacement, or of one draw, runs so drawn."""
    rng = np.random.default_rng(0)
    known = np.unique(draws)
    if len(known) == 1:
        return rng.integers(0, len(draws), (RESAMPLES, len(draws)))
    members = [np.flatnonzero(draws == draw) for draw in known]
    least = min(map(len, members))  # all draws have the same seeds, unless some are still to be run
    groups = np.stack([member[:least] for member in members])
    return groups[rng.integers(0, len(known), (RESAMPLES, len(known)))].reshape(RESAMPLES, -1)


def bootstrap(values: NDArray, draws: NDArray) -> Effect:
    """The mean, and the 95 % interval of its resamples."""
    means = values[resamples(draws)].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Effect(float(values.mean()), float(low), float(high), len(values))


def _printed(document: Document, under: str) -> Effect | None:
    """The geometric mean over the algorithms of the factor between our median rounds and the printed ones."""
    logs, draws = _log_rounds(document, under)
    if logs is None or len(draws) < FEWEST or not has(document, list(document["printed"]), under):
        return None
    paper = _log_printed(document)

    def distance(index: NDArray) -> NDArray:
        return np.abs(np.median(logs[:, index], axis=-1) - paper.reshape(-1, *[1] * (index.ndim - 1))).mean(axis=0)

    spread = distance(resamples(draws))
    low, high = np.percentile(spread, (2.5, 97.5))
    return Effect(float(distance(np.arange(len(draws)))), float(low), float(high), len(draws))


def _log_printed(document: Document) -> NDArray:
    return np.log([_far(document) if value == "never" else value for value in document["printed"].values()])


def _far(document: Document) -> int:
    """What a run that never arrives counts as beside a printed number: one more than it had could seem near."""
    return 2 * int(document["experiment"]["rounds"])


def _log_rounds(document: Document, under: str) -> tuple[NDArray | None, NDArray]:
    """[algorithms, runs] of those that have a printed number, and the draw of each run."""
    if not document.get("printed"):
        return None, np.zeros(0)
    runs = [document["algorithms"][label(document, name, under)]["runs"] for name in document["printed"]]
    rounds = [[_far(document) if value is None else value for value in run["rounds"]] for run in runs]
    return np.log(rounds), np.asarray(runs[0]["draw"])


class Nearness(NamedTuple):
    """How near a combination of readings comes to the printed rounds."""

    combination: str
    rows: int  # of the table
    factor: float  # off by so much, as the geometric mean over rows and algorithms
    low: float  # of its 95 % interval
    high: float
    ordered: int  # pairs of algorithms in the printed order
    pairs: int


def nearest(documents: Sequence[Document], unders: Sequence[str]) -> list[Nearness]:
    """The combinations of what the arms vary and `unders`, the nearest to the printed rounds first.

    They are compared on the rows that all of them have.
    """
    found: dict[str, dict[str, Document]] = {}
    for document in documents:
        if document.get("printed"):
            reading = ", ".join(f"{key}={value}" for key, value in document["varied"].items())
            found.setdefault(reading, {})[document["experiment"]["dataset"]] = document
    readings = {reading: rows for reading, rows in found.items() if reading}
    if not readings:
        return []
    common = set.intersection(*(set(rows) for rows in readings.values()))
    near = [
        _nearness(f"{reading}, {under}", [rows[dataset] for dataset in sorted(common)], under)
        for reading, rows in readings.items()
        for under in unders
        if common
    ]
    return sorted(near, key=lambda one: one.factor)


def _nearness(combination: str, documents: Sequence[Document], under: str) -> Nearness:
    off, spread = [], []
    ordered = pairs = 0
    for document in documents:
        logs, draws = _log_rounds(document, under)
        assert logs is not None
        ours, paper = np.median(logs, axis=1), _log_printed(document)
        off.append(np.abs(ours - paper))
        spread.append(np.abs(np.median(logs[:, resamples(draws)], axis=-1) - paper[:, None]))
        for i in range(len(paper)):
            for j in range(i):
                if paper[i] != paper[j]:
                    pairs += 1
                    ordered += int(np.sign(ours[i] - ours[j]) == np.sign(paper[i] - paper[j]))
    low, high = np.exp(np.percentile(np.concatenate(spread).mean(axis=0), (2.5, 97.5)))
    factor = math.exp(float(np.concatenate(off).mean()))
    return Nearness(combination, len(documents), factor, float(low), float(high), ordered, pairs)
