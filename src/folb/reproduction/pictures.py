"""The pictures of the reproduction: curves over rounds from stored quantiles."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from folb import figures

COLOURS = 64
QUANTITIES = {"accuracy": ("test accuracy (%)", 100), "loss": ("training loss", 1)}


def draw(documents: Sequence[Mapping[str, Any]], quantities: Sequence[str], title: str) -> bytes:
    """A panel for each arm and quantity: the median over runs as a line, its 10th to 90th percentile as a band."""
    plt = figures.pyplot()
    panels = [(document, quantity) for quantity in quantities for document in documents]
    columns = min(len(panels), 4 if len(documents) % 4 == 0 else 3 if len(documents) % 3 == 0 else 2)
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.6 * columns, 3 * rows), layout="constrained", squeeze=False)
    for axes, (document, quantity) in zip(grid.flat, panels, strict=False):
        heading, scale = QUANTITIES[quantity]
        rounds = document["evaluated_rounds"]
        for label, algorithm in document["algorithms"].items():
            low, middle, high = ([scale * _number(v) for v in algorithm[quantity][q]] for q in ("10", "50", "90"))
            (line,) = axes.plot(rounds, middle, label=label, linewidth=1.3)
            axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        if quantity == "accuracy" and "printed" in document and document["printed"]:
            axes.axhline(100 * document["experiment"]["target"], color="0.6", linewidth=0.8, linestyle=":")
        if quantity == "loss":
            axes.set_yscale("log")
        axes.set_title(document["name"], fontsize="small", parse_math=False)
        axes.set_xlabel("round", fontsize="small")
        axes.set_ylabel(heading, fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        for text in axes.legend(frameon=False, fontsize="xx-small").get_texts():
            text.set_parse_math(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    return _small(figures.finished(figure, title, "", "png", dpi=80))


def _small(picture: bytes) -> bytes:
    """The same picture in fewer colours: it lies in the repository."""
    from PIL import Image  # which matplotlib brings along

    content = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS).save(content, format="png", optimize=True)
    return content.getvalue()


def _number(value: float | None) -> float:
    return math.nan if value is None else value
