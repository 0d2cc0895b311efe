"""The pictures of the reproduction: curves over rounds from stored quantiles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from folb.report import figures
from folb.report.figures import Curve
from folb.report.looks import MODELS, Look, looks

QUANTITIES = {"accuracy": ("test accuracy (%)", 100), "loss": ("training loss", 1)}
WIDTH, HEIGHT, LETTERS = 2.5, 2.1, 34  # of a panel: inches, and letters in a line of its title


class Panel(NamedTuple):
    """One quantity of some algorithms of an arm, with the name of each."""

    document: Mapping[str, Any]
    quantity: str
    title: str
    labels: Mapping[str, str]


def draw(documents: Sequence[Mapping[str, Any]], quantities: Sequence[str], title: str, by: str = "") -> bytes:
    """A panel for each arm, quantity and value of the setting `by`, if one is named.

    The median over runs is a line, its 10th to 90th percentile a band.
    """
    panels = [panel for quantity in quantities for document in documents for panel in _panels(document, quantity, by)]
    beside = len(panels) // len(quantities) // (len(documents) if by else 1)
    columns = next((n for n in (5, 4, 3, 2) if beside % n == 0), min(beside, 3))
    rows = -(-len(panels) // columns)
    own = looks(name for panel in panels for name in panel.labels.values())
    width = WIDTH * columns
    height = HEIGHT * rows + 0.4 + figures.ROW * figures.legend_rows(own, width)[0]
    figure, grid = figures.subplots(rows, columns, figsize=(width, height), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, own)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figures.legend(figure, grid.flat, width)
    return figures.small(figures.finished(figure, title, "", "png"))


def _panels(document: Mapping[str, Any], quantity: str, by: str) -> Iterator[Panel]:
    name, labels = document["name"], list(document["algorithms"])
    values = dict.fromkeys(word for label in labels for word in label.split() if by and word.startswith(f"{by}="))
    for value in values or ("",):
        # an algorithm without this setting is in every panel
        shown = [label for label in labels if value in label.split() or not set(values) & set(label.split())]
        names = {label: " ".join(word for word in label.split() if word != value) for label in shown}
        yield Panel(document, quantity, ", ".join(filter(None, (MODELS.get(name, name), value))), names)


def _draw(axes: Any, panel: Panel, own: Mapping[str, Look]) -> None:
    document, quantity = panel.document, panel.quantity
    heading, scale = QUANTITIES[quantity]
    curves = {
        name: _curve(document["evaluated_rounds"], document["algorithms"][label][quantity], scale)
        for label, name in panel.labels.items()
    }
    figures.draw(axes, curves, own, heading, log=quantity == "loss", thick=1.2)
    if quantity == "accuracy" and document["printed"]:
        axes.axhline(100 * document["experiment"]["target"], color="0.6", linewidth=0.8, linestyle=":")
    axes.set_title(textwrap.fill(panel.title, LETTERS), fontsize="small", parse_math=False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize("x-small")
    axes.tick_params(labelsize="x-small", which="both")


def _curve(rounds: Sequence[int], quantiles: Mapping[str, Sequence[float | None]], scale: float) -> Curve:
    # None, for a value that is not finite, becomes NaN
    return Curve(rounds, *(scale * np.array(quantiles[q], float) for q in ("10", "50", "90")))
