"""The pictures: accuracy and loss of a comparison over rounds, and sizes and labels of a federation."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from folb.report import curve_panel
from folb.report.curve_panel import Curve
from folb.report.looks import COLOURS, looks
from folb.results.outcomes import outcomes
from folb.results.run import Run
from folb.results.summary import judged, labelled

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
    beneath = 0.55 + curve_panel.ROW * curve_panel.legend_rows(groups, width)[0]
    above = 0.35 + 0.2 * len(_lines(width, note))
    height = 2.9 + above + beneath
    figure, (left, right) = subplots(1, 2, figsize=(width, height), layout=None)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=beneath / height, top=1 - above / height, wspace=0.3)
    lengths = {label: min(len(run.evaluated_rounds) for run in group) for label, group in groups.items()}
    rounds = {label: group[0].evaluated_rounds[: lengths[label]] for label, group in groups.items()}

    def drawn(axes: Any, values: Callable[[Run], Any], heading: str, log: bool = False) -> None:
        bands = {
            # some runs of a label may still be running
            label: _curve(rounds[label], np.stack([values(run)[: lengths[label]] for run in group]))
            for label, group in groups.items()
        }
        curve_panel.draw(axes, bands, own, heading, log)

    known = judged(runs)
    drawn(left, lambda run: known.factor * run.judged, known.axis, log=not known.is_share)
    drawn(right, lambda run: run.train_loss, "training loss", log=True)
    if target is not None:
        left.axhline(known.factor * target, color="0.6", linewidth=0.8, linestyle=":")
    curve_panel.legend(figure, curve_panel.lines([left]), width, "lower center")
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
                axes.text(
                    j,
                    i,
                    f"{value:.0f}",
                    ha="center",
                    va="center",
                    fontsize="x-small",
                    color="black" if value > 60 else "white",
                )
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize="x-small")
        axes.set_yticks(range(len(rules)), rules, fontsize="x-small")
        axes.set_ylabel("rule", fontsize="small")
        axes.set_title(f"{100 * share:g} % of the devices lie", fontsize="small")
    panels[-1, 0].set_xlabel("attack", fontsize="small")
    return finished(figure, f"{title} — final accuracy in %", note, form)


def portrait(federation: Federation, form: str = "png") -> bytes:
    """How many samples each device has, and which labels: a column for each device, the largest first.

    The bytes of a picture in that format. Devices beyond its pixels share columns.
    """
    labels = federation.labels()
    size = labels.sum(axis=1)
    edges = np.linspace(0, federation.N, min(federation.N, COLUMNS) + 1).astype(int)
    shown = np.add.reduceat(labels[np.argsort(-size, kind="stable")], edges[:-1])
    figure, (above, below) = subplots(2, 1, figsize=(11, 6), sharex=True, height_ratios=(2, 3))
    above.stairs(shown.sum(axis=1) / np.diff(edges), edges, fill=True, baseline=0.5, color=COLOURS[0])
    above.set_yscale("log")
    above.set_ylim(size.min() / 2, 1.3 * size.max())
    above.set_ylabel("samples")
    above.spines[["top", "right"]].set_visible(False)
    if federation.regression:
        means = np.add.reduceat(_mean_labels(federation)[np.argsort(-size, kind="stable")], edges[:-1])
        below.stairs(means / np.diff(edges), edges, baseline=None, color=COLOURS[0])
        below.set_ylabel("mean label")
    else:
        extent = (0, federation.N, -0.5, federation.classes - 0.5)
        shares = below.imshow(
            shown.T / shown.sum(axis=1),
            aspect="auto",
            interpolation="nearest",
            cmap="Blues",
            vmin=0,
            origin="lower",
            extent=extent,
        )
        below.yaxis.get_major_locator().set_params(integer=True)
        below.set_ylabel("label")
        figure.colorbar(shares, ax=below, label="share of the device's samples")
    below.set_xlabel("device, from the largest to the smallest")
    title = f"{Path(federation.name).name}: {federation.N:,} devices, {size.sum():,} samples"
    return finished(figure, f"{title}, {size.mean():.1f} ± {size.std():.1f} each", federation.note, form)


def _mean_labels(federation: Federation) -> Any:
    """The mean training label of each device, if labels are numbers."""
    size, y = federation.train.size, federation.train.y.astype(float)
    return np.bincount(np.repeat(np.arange(federation.N), size), weights=y[: size.sum()]) / size


def subplots(
    rows: int, columns: int, figsize: tuple[float, float], layout: Any = "constrained", **options: Any
) -> tuple[Any, Any]:
    """A figure and its axes. Not from pyplot, which keeps every figure, looks for a screen and loads slowly."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout=layout)
    return figure, figure.subplots(rows, columns, **options)


def finished(figure: Any, title: str, note: str, form: str) -> bytes:
    """The picture's bytes, under its title."""
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


def _curve(rounds: Any, values: Any) -> Curve:
    """The median and the range over seeds."""
    # in double precision: in single precision the mean of two large losses would overflow
    finite = np.where(np.isfinite(values), values, np.nan).astype(float)
    return Curve(rounds, finite.min(axis=0), np.median(finite, axis=0), finite.max(axis=0))
