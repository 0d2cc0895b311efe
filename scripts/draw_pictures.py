"""Draw the pictures of docs/concepts, from the library's own numbers, and those of docs/benchmarks, from their results.

`python scripts/draw_pictures.py [DIRECTORY]` writes to docs, or to the directory.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np

from folb import data, rules
from folb.report import figures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COLOURS = ("#0068b3", "#b3541e", "#1a9988", "#8a4fa3")  # of the devices
GRADIENTS = np.array([[1.0, 0.5], [0.7, 1.3], [1.3, -0.3], [-0.8, 0.2]], np.float32)


def weights_of_folb() -> bytes:
    """Four devices with one gradient step each: the gradients, what (13) makes of them, and the two updates."""
    ones = jnp.ones(len(GRADIENTS))
    moves = {"w": jnp.asarray(-GRADIENTS)}
    replies = rules.Round({"w": jnp.zeros(2)}, ones, ones, ones, moves, grad={"w": jnp.asarray(GRADIENTS)})
    mean, folb = rules.Mean().update(replies), rules.Folb().update(replies)
    figure, (left, middle, right) = figures.subplots(1, 3, figsize=(11, 3.9), width_ratios=(1, 0.9, 1))
    for k, gradient in enumerate(GRADIENTS):
        _arrow(left, gradient, COLOURS[k], str(k + 1), (5, 3))
    _arrow(left, GRADIENTS.mean(axis=0), "black", "g, their mean (10)", (-122, 0))
    left.set_title("Gradients of four devices", fontsize="medium")
    place = np.arange(len(GRADIENTS))
    middle.bar(place - 0.2, np.asarray(mean.weights), 0.38, color="0.75", label="mean (2): 1/K")
    middle.bar(place + 0.2, np.asarray(folb.weights), 0.38, color=COLOURS, label="FOLB (13)")
    middle.axhline(0, color="0.3", linewidth=0.8)
    middle.set_xticks(place, [str(k + 1) for k in place])
    middle.set_xlabel("device")
    middle.set_ylabel("weight")
    middle.legend(frameon=False, fontsize="small")
    middle.set_title("Weights of their updates", fontsize="medium")
    _arrow(right, np.asarray(mean.delta["w"]), "0.55", "mean (2)", (3, -9))
    _arrow(right, np.asarray(folb.delta["w"]), "black", "FOLB (13)", (-12, -12))
    right.set_title("Updates of the model", fontsize="medium")
    for axes, (across, up) in ((left, (1.6, 1.6)), (right, (-1.25, -1.0))):
        axes.set_xlim(*sorted((-across / 1.4, across)))
        axes.set_ylim(*sorted((-up / 2.5, up)))
        axes.axhline(0, color="0.9", linewidth=0.8, zorder=0)
        axes.axvline(0, color="0.9", linewidth=0.8, zorder=0)
        axes.set_aspect("equal")
        axes.set_xlabel("first parameter")
        axes.set_ylabel("second parameter")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def _arrow(axes: Any, vector: Any, colour: str, name: str, beside: tuple[int, int]) -> None:
    axes.annotate("", vector, (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.8})
    axes.annotate(name, vector, xytext=beside, textcoords="offset points", color=colour, fontsize="small")


def _svg(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="svg")
    return content.getvalue()


def benchmarks(out: Path) -> None:
    """Draw a picture of each stored measurement; nothing is run."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]
    import growth
    import table

    for path in sorted((DOCS / "benchmarks").rglob("*.json")):
        drawn = (out / path.relative_to(DOCS)).with_suffix(".png")
        drawn.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_bytes())
        if path.stem.startswith("peers"):
            table.draw(found, drawn)
        elif path.stem == "growth":
            growth.draw(found["ms a round and MB"], drawn)


def main() -> None:
    # the same picture is the same bytes: no random names, and no date of today
    matplotlib.rcParams["svg.hashsalt"] = "folb"
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    (out / "concepts").mkdir(parents=True, exist_ok=True)
    (out / "concepts" / "folb.svg").write_bytes(weights_of_folb())
    (out / "concepts" / "heterogeneity.svg").write_bytes(figures.portrait(data.load("synthetic_1_1"), "svg"))
    benchmarks(out)


if __name__ == "__main__":
    main()
