"""Results for people and programs: the table and the JSON document."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from folb.runs import Run

if TYPE_CHECKING:
    from rich.table import Table

    from folb.experiment import Experiment


def labelled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the same algorithm and parameters under one label."""
    groups: dict[str, list[Run]] = {}
    for label, run in zip(labels([(run.algorithm, run.parameters) for run in runs]), runs, strict=True):
        groups.setdefault(label, []).append(run)
    return groups


def labels(algorithms: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """For each algorithm and its parameters, its name and what tells it from the others of that name."""
    values: dict[tuple[str, str], set[str]] = {}
    for name, parameters in algorithms:
        for key, value in parameters.items():
            values.setdefault((name, key), set()).add(str(value))
    return [
        " ".join([name, *(f"{key}={spelt(value)}" for key, value in own.items() if len(values[name, key]) > 1)])
        for name, own in algorithms
    ]


def spelt(value: Any) -> str:
    """A setting's value as labels have it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(runs: Sequence[Run], target: float, clock: str = "simulated s") -> Table:
    """One line for each algorithm: medians and means over the seeds."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    first, *others = headings(target, clock)
    shown.add_column(first)
    for heading in others:
        shown.add_column(heading, justify="right")
    for row in rows(runs, target):
        shown.add_row(*map(escape, row))
    return shown


def headings(target: float, clock: str = "simulated s") -> tuple[str, ...]:
    """The headings of `rows`; `clock` is what seconds are."""
    return (
        "algorithm",
        f"rounds to {100 * target:g} %",
        "final accuracy",
        "best",
        "MB up",
        "MB down",
        "drops > 5 points",
        clock,
        "idle rounds",
    )


def rows(runs: Sequence[Run], target: float) -> Iterator[tuple[str, ...]]:
    """The table's cells, a row for each algorithm."""
    for label, group in labelled(runs).items():
        finals = [run.final for run in group]
        diverged = sum(run.diverged for run in group)
        yield (
            label,
            arrival([run.rounds_to(target) for run in group]),
            f"{100 * mean(finals):.1f}{spread(finals)} %"
            + (f" ({diverged} of {len(group)} diverged)" if diverged else ""),
            f"{100 * mean(run.best for run in group):.1f} %",
            f"{mean(run.bytes_up.sum() for run in group) / 1e6:.2f}",
            f"{mean(run.bytes_down.sum() for run in group) / 1e6:.2f}",
            f"{mean(run.drops for run in group):.1f}",
            f"{mean(float(run.seconds.sum()) for run in group):.0f}",
            f"{mean(int((~run.updated).sum()) for run in group):.0f}",
        )


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


def document(experiment: Experiment, note: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The results as one JSON-ready document; a value that is not finite becomes null."""
    return {
        "dataset": experiment.dataset,
        "note": note,
        "model": experiment.model,
        "system": experiment.system,
        "objective": experiment.objective,
        "rounds": experiment.rounds,
        "target": experiment.target,
        "set": experiment.set,
        "runs": [_run(run, experiment.target) for run in runs],
    }


def _run(run: Run, target: float) -> dict[str, Any]:
    return {
        "algorithm": run.algorithm,
        "parameters": {key: plain(value) for key, value in run.parameters.items()},
        "seed": run.seed,
        "evaluated_rounds": run.evaluated_rounds.tolist(),
        "test_accuracy": finite(run.test_accuracy.tolist()),
        "train_loss": finite(run.train_loss.tolist()),
        "bytes_up": int(run.bytes_up.sum()),
        "bytes_down": int(run.bytes_down.sum()),
        "seconds": round(float(run.seconds.sum()), 3),
        "rounds_to_target": run.rounds_to(target),
        "best": finite([run.best])[0],
        "final": finite([run.final])[0],
        "drops": run.drops,
        "idle_rounds": int((~run.updated).sum()),
        "model_sha256": _digest(run.params),
    }


def _digest(params: Any) -> str | None:
    """What tells whether two runs ended with the same model, to the bit; nothing where the model is not there."""
    import jax

    if params is None:
        return None
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """What JSON can hold, and the text of anything else: an algorithm of one's own may have any settings."""
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


def finite(values: Sequence[float]) -> list[float | None]:
    """What JSON can hold: a value that is not finite becomes null."""
    return [value if math.isfinite(value) else None for value in values]
