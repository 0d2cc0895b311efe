"""A verdict for each claim, computed from stored results.

A claim compares an algorithm (`better`) with others (`worse`) by a `metric`, in each of its `arms`. If `under` lists
words that distinguish variants (such as "local.mu=1, rule.weights=samples"), it does so for each of them. Each such
case is a condition. The effect is paired: the mean, over the runs (draw, seed) of a condition, of

    rounds, seconds, loss, bytes_up  log(worse / better), shown as a ratio; above 1 in favour of `better`
    final, best, mean (accuracy)     better - worse
    drops                            worse - better

with a 95 % interval: Student's, over the means of the draws, or over the seeds where there is one draw. A run that
never reaches the target counts as one round more than it had; or as the seconds of the longest run of the arm, so that
short rounds which lead nowhere do not count as fast. A loss above 1000, or not finite, counts as 1000. A condition
holds if its interval, against each of `worse`, excludes no effect in the claimed direction; or lies beyond `at_least`,
if that is given. With `same`, the interval must lie within that distance of no effect. `than` (arm, better, worse)
demands that the effect is larger than another effect. `keeping` lists metrics that may not fall by more than the given
amounts, because a model that has learnt nothing does not drop. A condition with fewer than three runs is not tested,
nor is a condition in which no run reaches the target. If all conditions of a claim are of the latter kind, the claim
does not hold: no algorithm reached the target, so none was faster.

A claim with `published` compares `better` with a number that others published (`source` says who), such as an accuracy
of 0.9686 or 87 rounds. The effect is ours - theirs; for rounds it is theirs / ours, as above. Its interval counts the
uncertainty of both: of our mean, over draws as above, and of their number, which is `spread` if they give one and
otherwise the standard deviation of our own runs, because it is a single run. A condition holds if the interval includes
no effect, and the effect is smaller than `same`.

Other metrics: `printed` is the factor between our median rounds and the printed ones, as the geometric mean over the
algorithms; it should be below `at_most`. Here a run that never arrives counts as twice the rounds it had. For a check,
`violated` is the share of cases in which a statement is false, and should be 0. `value` and `ratio` are the mean and
the geometric mean of its values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from folb.errors import InputError, choose
from folb.results import summary
from folb.results.summary import Effect, interval, student
from folb.typing import NDArray
from folb_studies.paper.figure_files import Arm, Claim

RESAMPLES, FEWEST, WORST_LOSS = 2000, 3, 1000.0
HOLDS, PARTLY, FAILS, UNTESTED = "holds", "holds only under a condition", "does not hold", "not tested here"

ARRIVALS = ("rounds", "seconds")  # to the target
RATIOS = (*ARRIVALS, "loss", "bytes_up", "printed", "ratio")
ACCURACIES = {"final": "the final accuracy", "best": "the best accuracy", "mean": "the mean accuracy"}
POINTS = tuple(ACCURACIES)
METRICS = (*RATIOS, *POINTS, "drops", "value", "violated")

COST = "so only at the cost of"

Document = Mapping[str, Any]


class Condition(NamedTuple):
    """The claim in one arm and variant: its effect against each of the others, and whether it holds."""

    name: str
    effects: Mapping[str, Effect]
    holds: bool
    note: str = ""
    ours: str = ""  # our number, next to a published one


class Verdict(NamedTuple):
    """The verdict on a claim."""

    claim: Claim
    conditions: Sequence[Condition]
    untested: Sequence[str]  # names of conditions without enough results
    unreached: Sequence[str] = ()  # names of conditions in which no run reaches the target

    @property
    def word(self) -> str:
        """The verdict."""
        held = [condition.holds for condition in self.conditions]
        if not held:
            return FAILS if self.unreached else UNTESTED
        return HOLDS if all(held) else PARTLY if any(held) else FAILS

    @property
    def text(self) -> str:
        """The verdict, with the conditions under which the claim holds if it does not hold under all."""
        names = [condition.name for condition in self.conditions]
        held = [condition.name for condition in self.conditions if condition.holds]
        if self.unreached and not names:
            return f"{self.word}: no run of any algorithm arrives"
        notes = []
        if held and len(held) < len(names):
            notes.append(f"{len(held)} of {len(names)} conditions")
        elif not held and names and self.claim.compares:
            behind = sum(
                any(contrary(self.claim, effect) for effect in one.effects.values()) for one in self.conditions
            )
            some = " at least one of them" if len(self.claim.worse) > 1 else ""
            cost = [one.note for one in self.conditions if one.note.startswith(COST)]
            if behind:
                notes.append(f"behind{some} in {behind} of {len(names)} conditions")
            if cost:
                notes.append(f"{cost[0]} in {len(cost)} of {len(names)} conditions")
            if not behind and not cost:
                notes.append("no clear difference")
        left = len(self.untested) + len(self.unreached)
        if names and left:
            notes.append(f"{left} more not tested")
        said = f"holds only under: {common(held, names)}" if held and len(held) < len(names) else self.word
        return said + (f" ({'; '.join(notes)})" if notes else "")

    @property
    def effect(self) -> str:
        """The effect and its interval; of several effects, the least and the greatest, and against whom they are."""
        effects = sorted((effect, name) for one in self.conditions for name, effect in one.effects.items())
        if not effects:
            return ""
        several = len(self.claim.worse) > 1
        shown = [
            effect_text(self.claim, effect) + (f" (against {name})" if several else "")
            for effect, name in (effects[0], effects[-1])
        ]
        return shown[0] if shown[0] == shown[-1] else f"from {shown[0]} to {shown[-1]}"


def common(held: Sequence[str], names: Sequence[str]) -> str:
    """What distinguishes the names `held` from the others: one or two parts that only they have, or else all names."""
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


def comparison(claim: Claim, effect: Effect) -> str:
    """What one effect says by itself. A condition holds only if all of its comparisons do."""
    yes, no = ("ahead", "behind") if claim.compares else (HOLDS, FAILS)
    return yes if _holds(claim, effect) else no if contrary(claim, effect) else "not clear"


def contrary(claim: Claim, effect: Effect) -> bool:
    """Whether the interval excludes what is claimed. If it does not, the claim may be true and not shown."""
    if claim.metric == "violated":
        return effect.value > 0
    if claim.same is not None:
        margin = _margin(claim)
        return effect.low > margin or effect.high < -margin
    if claim.at_most is not None:
        return effect.low > math.log(claim.at_most)
    return effect.high < _threshold(claim)


def _signed(value: float) -> str:
    """Two digits, or all digits before the point."""
    return f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.2g}"


def check(claim: Claim, arms: Sequence[Arm]) -> None:
    """Check that a claim about `arms` can be judged, before they are run."""
    where = f"{claim.figure}: claim {claim.id}"
    choose(f"{where}: metric", claim.metric, METRICS)
    if not arms:
        raise InputError(f"{where}: arms", list(claim.arms), "should fit an arm")
    of_check = claim.metric in ("value", "violated", "ratio")
    if any((arm.check is not None) is not of_check for arm in arms):
        raise InputError(
            f"{where}: metric", claim.metric, "should be a metric of checks for checks, and of runs for other arms"
        )
    if claim.published is not None:
        _check_published(claim, where)
    elif claim.spread is not None:
        raise InputError(f"{where}: spread", claim.spread, "should come with `published`, and only with it")
    elif not of_check and claim.metric != "printed" and not (claim.better and claim.worse):
        raise InputError(f"{where}: better, worse", (claim.better, list(claim.worse)), "should both name algorithms")
    if (claim.metric == "printed") is not (claim.at_most is not None):
        raise InputError(f"{where}: at_most", claim.at_most, "should come with the metric 'printed', and only with it")
    for name in ("at_least", "at_most"):
        value = getattr(claim, name)
        if value is not None and claim.metric in RATIOS and value <= 0:
            raise InputError(f"{where}: {name}", value, "should be more than 0: effects are ratios")
    if claim.same is not None and claim.same <= 0:
        raise InputError(f"{where}: same", claim.same, "should be more than 0")
    for key in claim.than:
        choose(f"{where}: key of than", key, ("arm", "better", "worse"))
    for metric in claim.keeping:
        choose(f"{where}: key of keeping", metric, POINTS)
    for word in " ".join(claim.under).replace(",", " ").split():
        if "=" not in word:
            raise InputError(f"{where}: under", word, "should be of the form setting=value")


def _check_published(claim: Claim, where: str) -> None:
    choose(f"{where}: metric", claim.metric, ("rounds", *POINTS))
    positive = claim.published is not None and claim.published > 0
    if not positive or (claim.metric in POINTS and claim.published > 1):  # type: ignore[operator]
        expected = "should be an accuracy of at most 1" if claim.metric in POINTS else "should be more than 0"
        raise InputError(f"{where}: published", claim.published, expected)
    if not claim.better or claim.worse or claim.than or claim.keeping:
        expected = "should name one algorithm, and nothing to compare it with but the published number"
        raise InputError(f"{where}: better, worse", (claim.better, list(claim.worse)), expected)
    if claim.same is None or claim.at_least is not None:
        raise InputError(
            f"{where}: same", claim.same, "should say how close to the published number the result must be"
        )
    if claim.spread is not None and claim.spread < 0:
        raise InputError(f"{where}: spread", claim.spread, "should be at least 0")


def judge(claim: Claim, arms: Sequence[Arm], documents: Mapping[str, Document | None]) -> Verdict:
    """The verdict on a claim about `arms`, from the results of all arms by id; None for missing results."""
    parts: list[Condition] = []
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
                parts += conditions
                if not conditions:
                    untested.append(full)
    return Verdict(claim, parts, untested, unreached)


def _conditions(
    claim: Claim, name: str, document: Document, under: str, documents: Mapping[str, Document | None]
) -> Iterator[Condition]:
    if "check" in document:
        for case, values in document["values"].items():
            if not claim.conditions or case in claim.conditions:
                yield _of_check(claim, f"{name}, {case}", np.asarray(values, float), document["draws"].get(case))
        return
    if claim.published is not None:
        effect = _beside(claim, document, under)
        if effect is not None:
            ours = _ours(claim, document, under)
            yield Condition(
                name, {theirs(claim): effect}, _holds(claim, effect), _censored(claim, document, under), ours
            )
        return
    if claim.metric == "printed":
        effects = {"the paper": _printed(document, under)}
    else:
        effects = {worse: _against(claim, document, worse, under, documents) for worse in claim.worse}
    if any(effect is None for effect in effects.values()):
        return
    sound = {against: effect for against, effect in effects.items() if effect is not None}
    kept, lost = all(_holds(claim, effect) for effect in sound.values()), []
    for metric, margin in claim.keeping.items():
        for worse in claim.worse:
            values, draws = paired(document, metric, claim.better, worse, under)
            if interval(values, draws).low <= -margin:
                lost.append(metric)
    note = f"{COST} {' and '.join(ACCURACIES[metric] for metric in dict.fromkeys(lost))}" if kept and lost else ""
    yield Condition(name, sound, kept and not lost, note or _censored(claim, document, under))


def _censored(claim: Claim, document: Document, under: str) -> str:
    """A note if most runs never arrive: their rounds are only known to be more than the run had."""
    if claim.metric not in ARRIVALS:
        return ""
    sides = [document["algorithms"][label(document, name, under)]["runs"] for name in (claim.better, *claim.worse)]
    rounds = [value for side in sides for value in side["rounds"]]
    return "most runs never arrive" if rounds.count(None) > len(rounds) / 2 else ""


def _holds(claim: Claim, effect: Effect) -> bool:
    if claim.same is not None:
        margin = _margin(claim)
        if claim.published is not None:
            return effect.low < 0 < effect.high and abs(effect.value) < margin
        return -margin < effect.low and effect.high < margin
    if claim.metric == "violated":
        return effect.value == 0
    if claim.at_most is not None:
        return effect.high < math.log(claim.at_most)
    return effect.low > _threshold(claim)


def _margin(claim: Claim) -> float:
    assert claim.same is not None
    return math.log1p(claim.same) if claim.metric in RATIOS else claim.same


def _threshold(claim: Claim) -> float:
    """What an effect should be more than."""
    if claim.at_least is None:
        return 0.0
    return math.log(claim.at_least) if claim.metric in RATIOS else claim.at_least


def _of_check(claim: Claim, name: str, values: NDArray, draws: Sequence[int] | None) -> Condition:
    if claim.metric == "violated":
        effect = _share(values)
    else:
        measured = np.log(values) if claim.metric == "ratio" else values
        effect = interval(measured, np.arange(len(values)) if draws is None else np.asarray(draws))
    return Condition(name, {"": effect}, _holds(claim, effect))


def _share(violated: NDArray) -> Effect:
    """The share of cases, with Wilson's interval."""
    n, p, z = len(violated), float(np.mean(violated)), 1.96
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return Effect(p, (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n), n)


def _against(
    claim: Claim, document: Document, worse: str, under: str, documents: Mapping[str, Document | None]
) -> Effect | None:
    effects = _effects(document, claim.metric, claim.better, worse, under)
    if claim.than:
        other = documents.get(claim.than["arm"]) if "arm" in claim.than else document
        if other is None:
            return None
        sides = claim.than.get("better", claim.better), claim.than.get("worse", worse)
        compared = _effects(other, claim.metric, *sides, under)
        effects = {key: value - compared[key] for key, value in effects.items() if key in compared}
    if len(effects) < FEWEST:
        return None
    return interval(np.array(list(effects.values())), np.array([draw for draw, _ in effects]))


def _arrives(claim: Claim, document: Document, under: str) -> bool:
    """Whether there is something to compare. For rounds and seconds, at least one run must arrive."""
    if claim.metric not in ARRIVALS:
        return True
    sides = (document["algorithms"][label(document, name, under)]["runs"] for name in (claim.better, *claim.worse))
    return any(value is not None for side in sides for value in side["rounds"])


def has(document: Document, names: Sequence[str], under: str) -> bool:
    """Whether the algorithms were run with the values of `under`.

    An algorithm without the setting always fits, and so does one with a single value beside one that was run with many.
    """
    settings = document.get("experiment", {}).get("set", {})
    for word in under.replace(",", " ").split():
        key, _, value = word.partition("=")
        if settings and not any(key in own for own in settings.values()):
            raise InputError(f"{document['figure']}: under", word, "should name a setting of what was run")
        those = [settings.get(name.split()[0], {}).get(key, value) for name in filter(None, names)]
        many = any(isinstance(own, list) for own in those)
        for own in those:
            values = map(summary.spelt, own if isinstance(own, list) else [own])
            if (isinstance(own, list) or not many) and value not in values:
                return False
    return True


def paired(document: Document, metric: str, better: str, worse: str, under: str = "") -> tuple[NDArray, NDArray]:
    """The effect in each pair of runs with the same draw and seed, and the draw."""
    effects = _effects(document, metric, better, worse, under)
    return np.array(list(effects.values())), np.array([draw for draw, _ in effects])


def _effects(document: Document, metric: str, better: str, worse: str, under: str) -> dict[tuple[int, int], float]:
    """The same, by draw and seed."""
    sides = [document["algorithms"][label(document, name, under)]["runs"] for name in (better, worse)]
    ours, theirs = (
        dict(zip(zip(side["draw"], side["seed"], strict=True), measured(document, side, metric), strict=True))
        for side in sides
    )
    sign = -1.0 if metric in POINTS else 1.0
    return {key: sign * float(theirs[key] - ours[key]) for key in ours if key in theirs}


def measured(document: Document, runs: Mapping[str, Any], metric: str) -> NDArray:
    """A metric of each run; its logarithm, if effects are ratios."""
    limits = {"rounds": document["experiment"]["rounds"] + 1, "loss": WORST_LOSS}
    if metric == "seconds":
        limits[metric] = max(end for one in document["algorithms"].values() for end in one["runs"]["lasted"])
    values = np.array([limits.get(metric, math.nan) if value is None else value for value in runs[metric]], float)
    if metric == "loss":
        values = np.clip(values, 1e-9, WORST_LOSS)
    return np.log(values) if metric in RATIOS else values


def label(document: Document, wanted: str, under: str = "") -> str:
    """The algorithm of the document with all words of `wanted`, and with the words of `under` that distinguish it."""
    name, *words = wanted.split()
    fits = [label for label in document["algorithms"] if label.split()[0] == name and set(words) <= set(label.split())]
    for word in under.replace(",", " ").split():
        key = word.partition("=")[0] + "="
        if any(other.startswith(key) for label in fits for other in label.split()):
            fits = [label for label in fits if word in label.split()]
    if len(fits) != 1:
        expected = f"should be one of {', '.join(document['algorithms'])}"
        raise InputError(f"{document['figure']}: algorithm of a claim", f"{wanted} {under}".strip(), expected)
    return fits[0]


def resamples(draws: NDArray) -> NDArray:
    """The runs in each resample. It draws the draws with replacement; if there is one draw, it draws the runs."""
    rng = np.random.default_rng(0)
    known = np.unique(draws)
    if len(known) == 1:
        return rng.integers(0, len(draws), (RESAMPLES, len(draws)))
    members = [np.flatnonzero(draws == draw) for draw in known]
    least = min(map(len, members))  # all draws have the same seeds, unless some runs are missing
    groups = np.stack([member[:least] for member in members])
    return groups[rng.integers(0, len(known), (RESAMPLES, len(known)))].reshape(RESAMPLES, -1)


def _beside(claim: Claim, document: Document, under: str) -> Effect | None:
    """Ours - theirs, or the logarithm of theirs / ours, with the uncertainty of both."""
    assert claim.published is not None
    runs = document["algorithms"][label(document, claim.better, under)]["runs"]
    if claim.metric in RATIOS:
        values = math.log(claim.published) - measured(document, runs, claim.metric)
        own = None if claim.spread is None else claim.spread / claim.published
    else:
        values, own = measured(document, runs, claim.metric) - claim.published, claim.spread
    if len(values) < FEWEST:
        return None
    mean, _, high, n = interval(values, np.asarray(runs["draw"]))
    groups = len(np.unique(runs["draw"]))
    t = student((groups if groups > 1 else n) - 1)
    half = math.hypot(high - mean, t * (float(values.std(ddof=1)) if own is None else own))
    return Effect(mean, mean - half, mean + half, n)


def theirs(claim: Claim) -> str:
    """The published number, as people read it, and whose it is."""
    assert claim.published is not None
    scale, unit = (100, " %") if claim.metric in POINTS else (1, " rounds")
    spread = "" if claim.spread is None else f" ± {scale * claim.spread:g}"
    return f"{claim.source or 'published'}: {scale * claim.published:g}{spread}{unit}"


def _ours(claim: Claim, document: Document, under: str) -> str:
    """Our number: mean, standard deviation and range over all runs; of rounds, the median and the range."""
    values = document["algorithms"][label(document, claim.better, under)]["runs"][claim.metric]
    if claim.metric in POINTS:
        low, high = 100 * min(values), 100 * max(values)
        return f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f} % ({low:.1f} to {high:.1f})"
    reached = sorted(math.inf if value is None else value for value in values)
    rounds = document["experiment"]["rounds"]
    low, middle, high = (
        rounds_text(value, rounds) for value in (reached[0], summary.median_round(values), reached[-1])
    )
    return f"{middle} ({low} to {high}) rounds"


def rounds_text(value: float, rounds: int) -> str:
    """Rounds to the target as people read them; infinite, if a run of so many rounds never arrives."""
    return f"> {rounds}" if math.isinf(value) else f"{value:g}"


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
    """The rounds of a run that never arrives, against a printed number: its rounds plus one could look close."""
    return 2 * int(document["experiment"]["rounds"])


def _log_rounds(document: Document, under: str) -> tuple[NDArray | None, NDArray]:
    """[algorithms, runs] for the algorithms with a printed number, and the draw of each run."""
    if not document.get("printed"):
        return None, np.zeros(0)
    runs = [document["algorithms"][label(document, name, under)]["runs"] for name in document["printed"]]
    rounds = [[_far(document) if value is None else value for value in run["rounds"]] for run in runs]
    return np.log(rounds), np.asarray(runs[0]["draw"])


class Nearness(NamedTuple):
    """How near a combination of readings comes to the printed rounds."""

    combination: str
    rows: int  # of the table
    factor: float  # it is off by this factor: the geometric mean over rows and algorithms
    low: float  # of its 95 % interval
    high: float
    ordered: int  # pairs of algorithms in the printed order
    pairs: int


def nearest(documents: Sequence[Document], unders: Sequence[str]) -> list[Nearness]:
    """The combinations of the arms' variants and `unders`, the nearest to the printed rounds first.

    They are compared on the rows that all of them have. Each dataset counts once, with our own draw of it.
    """
    readings: dict[str, dict[str, Document]] = {}
    for document in documents:
        if document.get("printed") and not document["experiment"]["dataset"].endswith(".json.gz"):
            reading = ", ".join(f"{key}={value}" for key, value in document["varied"].items())
            readings.setdefault(reading, {})[document["experiment"]["dataset"]] = document
    readings = {reading: rows for reading, rows in readings.items() if reading}
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
