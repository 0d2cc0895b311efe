"""The pictures: accuracy and loss of a comparison over rounds, and sizes and labels of a federation."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from folb.report.looks import COLOURS, Look, looks
from folb.results.outcomes import outcomes
from folb.results.run import Run
from folb.results.summary import judged, labelled
from folb.typing import NDArray

if TYPE_CHECKING:  # a Flower server draws curves without a dataset
    from folb.data.federation import Federation

DPI = 150
FEWER = 128  # colours of a picture that is stored in the repository
LETTERS = 10  # of a note, for each inch of a picture
COLUMNS = 4000  # the most columns of a portrait: more than its pixels


def plot(
    runs: Sequence[Run], path: str | Path, *, target: float | None = None, title: str = "", note: str = ""
) -> None:
    """Draw runs into a file; its name ends in png, svg or pdf. See `curves`."""
    form = Path(path).suffix.lstrip(".") or "png"
    Path(path).write_bytes(curves(runs, form, target=target, title=title, note=note))


def curves(
    runs: Sequence[Run], form: str = "png", *, target: float | None = None, title: str = "", note: str = ""
) -> bytes:
    """A picture in that format: for each algorithm, the median over the seeds as a line and the range as a band."""
    groups = labelled(runs)
    own = looks(groups)
    # a fixed place for axes and legend: fitting them to their texts would take as long as drawing them
    width = 9.0
    beneath = 0.55 + ROW * legend_rows(groups, width)[0]
    above = 0.35 + 0.2 * len(_lines(width, note))
    height = 2.9 + above + beneath
    figure, (left, right) = subplots(1, 2, figsize=(width, height), layout=None)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=beneath / height, top=1 - above / height, wspace=0.3)
    known = judged(runs)
    bands = {label: _curve(group, [known.factor * run.judged for run in group]) for label, group in groups.items()}
    draw(left, bands, own, known.axis, log=not known.is_share)
    bands = {label: _curve(group, [run.train_loss for run in group]) for label, group in groups.items()}
    draw(right, bands, own, "training loss", log=True)
    if target is not None:
        left.axhline(known.factor * target, color="0.6", linewidth=0.8, linestyle=":")
    legend(figure, [left], width, "lower center")
    seeds = len({run.seed for run in runs})
    return finished(figure, f"{title} — median and range over {seeds} seeds" if seeds > 1 else title, note, form)


def attacks(runs: Sequence[Run], form: str = "png", *, title: str = "", note: str = "") -> bytes:
    """The final accuracy of each rule under each attack, a panel for each share of liars."""
    ends = outcomes(runs)
    shares = list(dict.fromkeys(one.attackers for one in ends))
    rules, names = (list(dict.fromkeys(getattr(one, field) for one in ends)) for field in ("rule", "attack"))
    size = (3.0 + 0.5 * len(names), len(shares) * (1.6 + 0.3 * len(rules)))
    figure, panels = subplots(len(shares), 1, figsize=size, squeeze=False)
    for share, axes in zip(shares, panels[:, 0], strict=True):
        table = np.full((len(rules), len(names)), np.nan)
        for one in ends:
            if one.attackers == share:
                table[rules.index(one.rule), names.index(one.attack)] = 100 * np.mean(one.accuracy)
        axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=100)
        for (i, j), value in np.ndenumerate(table):
            if np.isfinite(value):
                ink = "black" if value > 60 else "white"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize="x-small", color=ink)
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize="x-small")
        axes.set_yticks(range(len(rules)), rules, fontsize="x-small")
        axes.set_ylabel("rule", fontsize="small")
        axes.set_title(f"{100 * share:g} % of the devices lie", fontsize="small")
    panels[-1, 0].set_xlabel("attack", fontsize="small")
    return finished(figure, f"{title} — final accuracy in %", note, form)


def portrait(federation: Federation, form: str = "png") -> bytes:
    """How many samples each device has, and which labels: a column for one device or several, the largest first."""
    labels = federation.labels()
    size = labels.sum(axis=1)
    edges = np.linspace(0, federation.N, min(federation.N, COLUMNS) + 1).astype(int)
    order = np.argsort(-size, kind="stable")
    shown = np.add.reduceat(labels[order], edges[:-1])
    figure, (above, below) = subplots(2, 1, figsize=(11, 6), sharex=True, height_ratios=(2, 3))
    above.stairs(shown.sum(axis=1) / np.diff(edges), edges, fill=True, baseline=0.5, color=COLOURS[0])
    above.set_yscale("log")
    above.set_ylim(size.min() / 2, 1.3 * size.max())
    above.set_ylabel("samples")
    above.spines[["top", "right"]].set_visible(False)
    if federation.regression:
        samples, y = federation.train.size, federation.train.y.astype(float)
        sums = np.bincount(np.repeat(np.arange(federation.N), samples), weights=y[: samples.sum()])
        means = np.add.reduceat((sums / samples)[order], edges[:-1])
        below.stairs(means / np.diff(edges), edges, baseline=None, color=COLOURS[0])
        below.set_ylabel("mean label")
    else:
        extent = (0, federation.N, -0.5, federation.classes - 0.5)
        as_they_are = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "extent": extent}
        shares = below.imshow(shown.T / shown.sum(axis=1), cmap="Blues", vmin=0, **as_they_are)
        below.yaxis.get_major_locator().set_params(integer=True)
        below.set_ylabel("label")
        figure.colorbar(shares, ax=below, label="share of the device's samples")
    below.set_xlabel("device, from the largest to the smallest")
    title = f"{Path(federation.name).name}: {federation.N:,} devices, {size.sum():,} samples"
    return finished(figure, f"{title}, {size.mean():.1f} ± {size.std():.1f} each", federation.note, form)


def subplots(
    rows: int, columns: int, figsize: tuple[float, float], layout: Any = "constrained", **options: Any
) -> tuple[Any, Any]:
    """A figure and its axes. Not from pyplot, which keeps every figure, looks for a screen and loads slowly."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout=layout)
    return figure, figure.subplots(rows, columns, **options)


def finished(figure: Any, title: str, note: str, form: str) -> bytes:
    figure.suptitle("\n".join([title, *_lines(figure.get_figwidth(), note)]), parse_math=False, fontsize="medium")
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name may be in a script that the font lacks
        # for png a fifth faster than the usual level of compression, and hardly larger
        options = {"pil_kwargs": {"compress_level": 4}} if form == "png" else {}
        figure.savefig(content, dpi=DPI, format=form, **options)
    return content.getvalue()


def _lines(width: float, note: str) -> list[str]:
    """The note in lines that are no wider than the picture."""
    return textwrap.wrap(note.replace(" %", "\u00a0%"), int(LETTERS * width), break_on_hyphens=False)


def small(picture: bytes) -> bytes:
    """The same picture in fewer colours, because it is stored in the repository."""
    from PIL import Image  # installed with matplotlib

    content = io.BytesIO()
    # an octree keeps thin lines apart; a median cut, which counts pixels, would make orange ones red
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(FEWER, method=Image.Quantize.FASTOCTREE)
    few.save(content, format="png", optimize=True)
    return content.getvalue()


def _curve(runs: Sequence[Run], curves: Sequence[NDArray]) -> Curve:
    """The median and the range over seeds, of the rounds that all have: some may still be running."""
    length = min(map(len, curves))
    # in double precision: in single precision the mean of two large losses would overflow
    values = np.array([curve[:length] for curve in curves], float)
    finite = np.where(np.isfinite(values), values, np.nan)
    return Curve(runs[0].evaluated_rounds[:length], finite.min(axis=0), np.median(finite, axis=0), finite.max(axis=0))


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
            pale = {"alpha": 0.3, "linewidth": 0.6, "zorder": 1.5}  # behind all means
            axes.plot(curve.rounds, curve.middle, color=line["color"], **pale)
        middle = running_mean(curve.middle) if tangled else curve.middle
        axes.plot(curve.rounds, middle, label=label, linewidth=thick, **line)
    if log and any(np.any(curve.middle > 0) for curve in curves.values()):  # false if all are NaN
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_plain)
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"{heading}\n{SMOOTHED}" if tangled else heading)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _plain(value: float, _: Any) -> str:
    """1, 2, 5, 10, ...: matplotlib's powers of ten would need its parser of mathematics, which takes a while."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


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


def legend(figure: Any, panels: Iterable[Any], width: float, place: str = "outside lower center") -> None:
    """One legend for all panels, below them, with each label once."""
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    options = {"frameon": False, "fontsize": "small", "handlelength": 3}
    shown = figure.legend(lines.values(), lines.keys(), loc=place, ncols=legend_rows(lines, width)[1], **options)
    for text in shown.get_texts():
        text.set_parse_math(False)
