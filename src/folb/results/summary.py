"""The results of runs as the text of a table: labels, medians and means over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from folb.results.run import Run


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
    """A setting's value as labels show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(runs: Sequence[Run], target: float, clock: str = "simulated s") -> tuple[list[str], list[list[str]]]:
    """The headings of the table of results, and a row for each algorithm; `clock` is the heading for seconds.

    A column that may well be zero everywhere is left out if it is.
    """
    share = f"{100 * target:g} %"
    headings = ["algorithm", f"rounds to {share}", "held from", f"MB to {share}", f"s to {share}"]
    headings += ["final accuracy", "best", "MB up", "MB down", clock, DROPS, IDLE]
    rows = [_row(label, group, target) for label, group in labelled(runs).items()]
    told = [i for i, name in enumerate(headings) if name not in (DROPS, IDLE) or any(float(row[i]) for row in rows)]
    return [headings[i] for i in told], [[row[i] for i in told] for row in rows]


DROPS, IDLE = "drops > 5 points", "idle rounds"


def _row(label: str, group: Sequence[Run], target: float) -> list[str]:
    finals = [run.final for run in group]
    diverged = sum(run.diverged for run in group)
    sent = [run.bytes_to(target) for run in group]
    return [
        label,
        arrival([run.rounds_to(target) for run in group]),
        arrival([run.held_from(target) for run in group]),
        arrival([None if total is None else total / 1e6 for total in sent], ".2f"),
        arrival([run.seconds_to(target) for run in group], ".0f"),
        f"{100 * mean(finals):.1f}{spread(finals)} %" + (f" ({diverged} of {len(group)} diverged)" if diverged else ""),
        f"{100 * mean(run.best for run in group):.1f} %",
        f"{mean(run.bytes_up.sum() for run in group) / 1e6:.2f}",
        f"{mean(run.bytes_down.sum() for run in group) / 1e6:.2f}",
        f"{mean(float(run.seconds.sum()) for run in group):.0f}",
        f"{mean(run.drops for run in group):.1f}",
        f"{mean(int((~run.updated).sum()) for run in group):.0f}",
    ]


def spread(shares: Sequence[float]) -> str:
    """The standard deviation over the seeds, if there are several."""
    return f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""


def arrival(reached: Sequence[float | None], form: str = "g") -> str:
    """When the target is reached, as text: the median over the seeds, and how many never arrive."""
    middle = median_round(reached)
    text = "never" if math.isinf(middle) else f"{middle:{form}}"
    missed = reached.count(None)
    return f"{text} ({missed} of {len(reached)} never)" if missed and not math.isinf(middle) else text


def median_round(reached: Sequence[float | None]) -> float:
    """The median over the seeds; a seed that never arrives counts as later than any that does."""
    return median([math.inf if r is None else r for r in reached])


def plain(value: Any) -> Any:
    """The value if JSON can hold it, otherwise its text: a user's own algorithm may have any settings."""
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


def short(value: float, digits: int = 5) -> float | None:
    """So many significant digits, as a page shows them; None for a value that is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def finite(values: Sequence[float]) -> list[float | None]:
    """The values as JSON can hold them: a value that is not finite becomes null."""
    return [value if math.isfinite(value) else None for value in values]
