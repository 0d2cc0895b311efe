"""The results of runs as the text of a table: labels, medians and means over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from folb.errors import InputError
from folb.measures import ACCURACY, Metric, is_regression, measure
from folb.results.run import Run
from folb.typing import NDArray


def labelled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the same algorithm and parameters under one label."""
    groups: dict[str, list[Run]] = {}
    for label, run in zip(labels([(run.algorithm, run.parameters) for run in runs]), runs, strict=True):
        groups.setdefault(label, []).append(run)
    return groups


def labels(algorithms: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """For each algorithm, its name and the parameters that tell it from others of that name."""
    values: dict[tuple[str, str], set[str]] = {}
    for name, parameters in algorithms:
        for key, value in parameters.items():
            values.setdefault((name, key), set()).add(str(value))
    return [
        " ".join([name, *(f"{key}={spelt(value)}" for key, value in own.items() if len(values[name, key]) > 1)])
        for name, own in algorithms
    ]


def spelt(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def begun(runs: Iterable[Run], labels: Iterable[str]) -> list[Run]:
    """The runs that have an evaluated round, each with its label instead of its parameters, for a table."""
    pairs = zip(runs, labels, strict=True)
    return [replace(run, algorithm=label, parameters={}) for run, label in pairs if len(run.evaluated_rounds)]


def table(
    runs: Sequence[Run], target: float, clock: str = "simulated s", rounds: int | None = None
) -> tuple[list[str], list[list[str]]]:
    """The headings of the table of results, and a row for each algorithm; `clock` is the heading for seconds.

    Some columns are left out if they are zero everywhere. If a run has fewer than `rounds`, each row says how many.
    """
    known, groups = judged(runs), labelled(runs)
    goal, each = known.goal(target), groups.values()
    sent = [[run.bytes_to(target) for run in group] for group in each]
    drops = [f"{mean(run.drops for run in group):.1f}" for group in each]
    idle = [f"{mean(int((~run.updated).sum()) for run in group):.0f}" for group in each]
    columns = [
        ("algorithm", list(groups)),
        ("after", [after([len(run.seconds) for run in group]) for group in each]),
        (f"rounds to {goal}", [ranged([run.rounds_to(target) for run in group]) for group in each]),
        ("held from", [ranged([run.held_from(target) for run in group]) for group in each]),
        (f"MB to {goal}", [arrival([None if one is None else one / 1e6 for one in own], ".2f") for own in sent]),
        (f"s to {goal}", [arrival([run.seconds_to(target) for run in group], ".0f") for group in each]),
        (f"final {known.short}", [_averaged(known, [run.final for run in group]) + _diverged(group) for group in each]),
        ("best", [known.text(mean(run.best for run in group)) for group in each]),
        *((other.short, [_last(other, group) for group in each]) for other in metrics(runs)),
        ("epsilon", ["–" if g[0].epsilon is None else f"{max(run.epsilon or 0.0 for run in g):.3g}" for g in each]),
        ("MB up", [f"{mean(run.bytes_up.sum() for run in group) / 1e6:.2f}" for group in each]),
        ("MB down", [f"{mean(run.bytes_down.sum() for run in group) / 1e6:.2f}" for group in each]),
        (clock, [f"{mean(float(run.seconds.sum()) for run in group):.0f}" for group in each]),
        (known.worsened, drops),
        ("idle rounds", idle),
    ]
    said = {
        "after": rounds is not None and any(len(run.seconds) < rounds for run in runs),
        "epsilon": any(run.epsilon is not None for run in runs),
        known.worsened: any(map(float, drops)),
        "idle rounds": any(map(float, idle)),
    }
    kept = [(heading, cells) for heading, cells in columns if said.get(heading, True)]
    return [heading for heading, _ in kept], [list(row) for row in zip(*(cells for _, cells in kept), strict=True)]


SECRET = "draws and noise from the operating system, so the run cannot be replayed"


def judged(runs: Sequence[Run]) -> Metric:
    judges = dict.fromkeys(run.judged_by for run in runs)
    if len(judges) > 1:
        raise InputError("runs", list(judges), "should all be judged by the same metric: there is no table of both")
    return measure(next(iter(judges), ACCURACY))


def metrics(runs: Sequence[Run], asked: Sequence[str] = ()) -> list[Metric]:
    """What else was asked for, or measured in any of the runs."""
    by = judged(runs).name
    always = [] if is_regression(by) else [ACCURACY]
    names = dict.fromkeys([*always, *asked, *(name for run in runs for name in run.metrics)])
    users = {name: one for run in runs for name, one in run.shown.items()}
    return [users.get(name) or measure(name, by) for name in names if name != by]


def after(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,} rounds" if low == high else f"{low:,} to {high:,} rounds"


def _diverged(group: Sequence[Run]) -> str:
    count = sum(run.diverged for run in group)
    return f" ({count} of {len(group)} diverged)" if count else ""


def _averaged(known: Metric, values: Sequence[float]) -> str:
    """The mean over the seeds, and how far they are spread."""
    own = known.factor * np.asarray(values, float)
    with np.errstate(invalid="ignore", over="ignore"):  # an error may be infinite
        middle, spread = np.mean(own), np.std(own, ddof=1) if len(own) > 1 else None
    text = f"{middle:{'.1f' if known.is_share else '.4g'}}"
    if spread is not None:
        text += f" ± {spread:{'.1f' if known.is_share else '.0f' if 100 <= spread < 1e6 else '.2g'}}"
    return f"{text} {known.unit}" if known.unit else text


def _last(known: Metric, group: Sequence[Run]) -> str:
    """A metric in the last evaluated round; a dash if it was not measured."""
    curves = [run.test_accuracy if known.name == ACCURACY else run.metrics.get(known.name) for run in group]
    values = [float(curve[-1]) for curve in curves if curve is not None and len(curve)]
    return _averaged(known, values) if values else "–"


def arrival(reached: Sequence[float | None], form: str = "g") -> str:
    """When the target is reached, as text: the median over the seeds, and how many never arrive."""
    middle, missed = median_round(reached), reached.count(None)
    if math.isinf(middle):
        return "never"
    return f"{middle:{form}}" + (f" ({missed} of {len(reached)} never)" if missed else "")


def ranged(reached: Sequence[float | None]) -> str:
    """When the target is reached, as text: the median over the seeds, and the range."""
    if len(set(reached)) == 1:
        return arrival(reached)
    whole = [math.inf if value is None else value for value in reached]
    return f"{median(whole):g} ({min(whole):g} to {max(whole):g})".replace("inf", "never")


def told_apart(runs: Sequence[Run], target: float) -> str:
    """Which algorithms need the fewest rounds, and which the seeds cannot tell from them; or why none is known."""
    groups, known = labelled(runs), judged(runs)
    counts = {label: [run.rounds_to(target) for run in group] for label, group in groups.items()}
    seeds = min(map(len, groups.values()))
    medians = {label: median_round(reached) for label, reached in counts.items()}
    first = [label for label in medians if medians[label] == min(medians.values())]
    if math.isinf(medians[first[0]]):
        bests = [run.best for run in runs if not math.isnan(run.best)]
        none = f"No algorithm reaches {known.goal(target)} with most of its seeds."
        if all(run.diverged_at_once for run in runs):
            spent = " Epsilon was spent for nothing." if any(run.epsilon is not None for run in runs) else ""
            look = "a far too large step size (--set local.lr=...), a value in the data that is not finite, or code of"
            return f"{none} After the first round no model is finite. Look for {look} your own.{spent}"
        if all(run.diverged for run in runs):
            return f"{none} All runs diverged: a smaller step size (--set local.lr=...) may help."
        if not bests:
            return f"{none} No {known.short} is a finite number: a smaller step size (--set local.lr=...) may help."
        if any(run.rounds_to(target) for run in runs):
            return f"{none} Single seeds do."
        best, other = (min(bests), "higher") if known.lower else (max(bests), "lower")
        return f"{none} The best {known.short} is {known.text(best)}: a {other} target (--target) says more."
    if all(len(run.evaluated_rounds) > 1 and run.rounds_to(target) == run.evaluated_rounds[0] for run in runs):
        least = (max if known.lower else min)(run.best for run in runs)
        bound, other = ("at most", "lower") if known.lower else ("at least", "higher")
        return (
            f"All reach {known.goal(target)} in the first round that is evaluated. The best {known.short} of each run "
            f"is {bound} {known.text(least)}: a {other} target (--target) says more."
        )
    if len(groups) < 2:
        return ""
    together = " (the same median)" if seeds > 1 and len(first) > 1 else ""
    opening = f"Fewest rounds to {known.goal(target)}: {', '.join(first)}{together}."
    if seeds < 2:
        return f"{opening} With one seed this says little: other seeds may say otherwise."
    if len(first) == len(groups):
        return opening
    # a run that never arrives counts as if it did after twice its rounds
    logs = {
        label: np.array([math.log(r or 2 * len(run.seconds)) for r, run in zip(counts[label], group, strict=True)])
        for label, group in groups.items()
    }
    others = [label for label in groups if label not in first]
    pairs = ((label, logs[label][:seeds] - logs[best][:seeds]) for label in others for best in first)
    alike = dict.fromkeys(label for label, later in pairs if interval(later, np.zeros(seeds)).low <= 0)
    apart = f"from {', '.join(alike)} is not clear" if alike else "from all others is clear"
    return f"{opening} With {seeds} seeds, the difference {apart}."


def median_round(reached: Sequence[float | None]) -> float:
    """The median over the seeds; a seed that never arrives counts as later than any that does."""
    return median([math.inf if r is None else r for r in reached])


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON can hold, and the texts of others: a user's own algorithm may have any settings."""
    known = (int, float, str, list, tuple, type(None))
    return {key: value if isinstance(value, known) else str(value) for key, value in values.items()}


def short(value: float, digits: int = 5) -> float | None:
    """So many significant digits, as a page shows them; None for a value that is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def finite(values: Sequence[float]) -> list[float | None]:
    """The values as JSON can hold them: a value that is not finite becomes null."""
    return [value if math.isfinite(value) else None for value in values]


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
