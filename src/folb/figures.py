"""The picture of a comparison: test accuracy and training loss over rounds, with a band over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from folb.report import labelled
from folb.runs import Run


def plot(runs: Sequence[Run], path: str | Path, *, target: float | None = None, title: str = "") -> None:
    """Draw the median over the seeds of each algorithm as a line, and its range as a band, into a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, group in labelled(runs).items():
        rounds = group[0].evaluated_rounds
        accuracy = 100 * np.stack([run.test_accuracy for run in group])
        loss = np.stack([run.train_loss for run in group])
        _band(left, rounds, accuracy, label)
        _band(right, rounds, loss, label)
    if target is not None:
        left.axhline(100 * target, color="0.6", linewidth=0.8, linestyle=":")
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("training loss")
    right.set_yscale("log")
    left.legend(frameon=False, fontsize="small", loc="lower right")
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    seeds = len({run.seed for run in runs})
    figure.suptitle(f"{title} — median and range over {seeds} seeds" if seeds > 1 else title, fontsize="medium")
    figure.savefig(path, dpi=130, format=Path(path).suffix.lstrip(".") or "png")
    plt.close(figure)


def _band(axes: Any, rounds: Any, values: Any, label: str) -> None:
    finite = np.where(np.isfinite(values), values, np.nan)
    (line,) = axes.plot(rounds, np.median(finite, axis=0), label=label, linewidth=1.6)
    if len(values) > 1:
        axes.fill_between(
            rounds, finite.min(axis=0), finite.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0
        )
