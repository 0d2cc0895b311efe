"""A panel of curves: a line and a band for each algorithm; and the one legend of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from folb.report.looks import Look
from folb.typing import NDArray

WINDOW = 5  # values in a running mean
FEW = 4 * WINDOW  # a shorter curve is not smoothed
# a curve swings if one value in ten is further than this from the mean of its neighbours: points, or a share of a loss
POINTS, SHARE, OFTEN = 1.5, 0.06, 0.1
SMOOTHED = f"running mean of {WINDOW}, raw pale"
ENTRY, LETTER, ROW = 0.7, 0.07, 0.19  # inches: a legend's entry without its text, a letter of it, and a row


class Curve(NamedTuple):
    """The middle of several runs and how far they reach; NaN where a value is not finite."""

    rounds: Any
    low: NDArray
    middle: NDArray
    high: NDArray


def draw(
    axes: Any,
    curves: Mapping[str, Curve],
    looks: Mapping[str, Look],
    heading: str,
    log: bool = False,
    thick: float = 1.6,
) -> None:
    """Draw curves by label. If one of them swings, all are running means, with the single values pale behind.

    `log` is for losses: what counts as a swing is then a share, and the axis is logarithmic.
    """
    tangled = any(_swings(curve.middle, log) for curve in curves.values())
    for label, curve in curves.items():
        line = looks[label].line
        if np.any(curve.low < curve.high):
            axes.fill_between(curve.rounds, curve.low, curve.high, color=line["color"], alpha=0.12, linewidth=0)
        if tangled:
            axes.plot(
                curve.rounds, curve.middle, color=line["color"], alpha=0.3, linewidth=0.6, zorder=1.5
            )  # behind all means
        middle = running_mean(curve.middle) if tangled else curve.middle
        axes.plot(curve.rounds, middle, label=label, linewidth=thick, **line)
    if log and any(np.any(curve.middle > 0) for curve in curves.values()):  # false if all are NaN
        _logarithmic(axes)
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"{heading}\n{SMOOTHED}" if tangled else heading)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _logarithmic(axes: Any) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10, ...

    matplotlib would draw powers of ten with its parser of mathematics, which takes a while.
    """

    def plain(value: float, _: Any) -> str:
        return f"{value:g}" if f"{value:e}"[0] in "125" else ""

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)


def running_mean(values: NDArray) -> NDArray:
    """The mean of each value and of as many before as after it: two, or fewer at the ends."""
    smooth = np.array(values, float)
    for reach in range(1, WINDOW // 2 + 1):
        width = 2 * reach + 1
        if len(smooth) >= width:
            smooth[reach:-reach] = np.lib.stride_tricks.sliding_window_view(values, width).mean(axis=1)
    return smooth


def _swings(values: NDArray, log: bool) -> bool:
    if len(values) < FEW:
        return False
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.log(values) if log else values
        off = np.abs(height[1:-1] - (height[:-2] + height[2:]) / 2)
    off = off[np.isfinite(off)]
    return bool(len(off) and np.quantile(off, 1 - OFTEN) > (SHARE if log else POINTS))


def legend_rows(labels: Mapping[str, Any], width: float) -> tuple[int, int]:
    """Rows and columns of a legend in a picture of that width, in inches: a guess, because measuring texts is slow."""
    most = max(1, int(width / (ENTRY + LETTER * max(map(len, labels), default=0))))
    rows = max(1, -(-len(labels) // most))
    return rows, max(1, -(-len(labels) // rows))


def legend(figure: Any, lines: Mapping[str, Any], width: float, place: str = "outside lower center") -> None:
    """One legend for all panels, below them."""
    _, columns = legend_rows(lines, width)
    shown = figure.legend(
        lines.values(), lines.keys(), frameon=False, fontsize="small", loc=place, ncols=columns, handlelength=3
    )
    for text in shown.get_texts():
        text.set_parse_math(False)


def lines(panels: Any) -> dict[str, Any]:
    """The labelled lines of panels, each label once."""
    lines: dict[str, Any] = {}
    for axes in panels:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    return lines
