"""The pictures of the reproduction: curves over rounds from stored quantiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from folb.report import figures

QUANTITIES = {"accuracy": ("test accuracy (%)", 100), "loss": ("training loss", 1)}


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
    size = (3.4 * columns, 2.9 * rows)
    figure, grid = figures.subplots(rows, columns, figsize=size, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    return figures.small(figures.finished(figure, title, "", "png", dpi=80 if len(panels) <= 8 else 64))


def _panels(document: Mapping[str, Any], quantity: str, by: str) -> Iterator[Panel]:
    labels = list(document["algorithms"])
    values = dict.fromkeys(word for label in labels for word in label.split() if by and word.startswith(f"{by}="))
    for value in values or ("",):
        # an algorithm without this setting is in every panel
        shown = [label for label in labels if value in label.split() or not set(values) & set(label.split())]
        names = {label: " ".join(word for word in label.split() if word != value) for label in shown}
        yield Panel(document, quantity, ", ".join(filter(None, (document["name"], value))), names)


def _draw(axes: Any, panel: Panel) -> None:
    document, quantity = panel.document, panel.quantity
    heading, scale = QUANTITIES[quantity]
    rounds = document["evaluated_rounds"]
    for label, name in panel.labels.items():
        curves = document["algorithms"][label][quantity]
        low, middle, high = ([scale * _number(value) for value in curves[q]] for q in ("10", "50", "90"))
        (line,) = axes.plot(rounds, middle, label=name, linewidth=1.3)
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    if quantity == "accuracy" and document["printed"]:
        axes.axhline(100 * document["experiment"]["target"], color="0.6", linewidth=0.8, linestyle=":")
    if quantity == "loss":
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize="small", parse_math=False)
    axes.set_xlabel("round", fontsize="small")
    axes.set_ylabel(heading, fontsize="small")
    axes.tick_params(labelsize="x-small", which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    for text in axes.legend(frameon=False, fontsize="x-small").get_texts():
        text.set_parse_math(False)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
