"""The picture of the defence: what each rule loses at most, a panel for each dataset, a dot for each share of liars."""

from __future__ import annotations

import textwrap

from folb.report import figures
from folb.report.looks import COLOURS
from folb_studies.defence.losses import MOST, Losses

SHADES = {10: "0.75", 20: COLOURS[0], 30: "0.5", 40: "0.2"}  # 20 % is the goal's


def draw(losses: Losses) -> bytes:
    """Further left is better; the line is the goal."""
    datasets, rules = losses.datasets, losses.rules
    size = (2.2 + 2.6 * len(datasets), 1.6 + 0.28 * len(rules))
    figure, panels = figures.subplots(1, len(datasets), figsize=size, squeeze=False, sharey=True)
    for dataset, axes in zip(datasets, panels[0], strict=True):
        axes.axvline(100 * MOST, color="0.3", linewidth=1)
        for share in dataset.shares:
            worsts = [(losses.largest(dataset, rule, share), -i) for i, rule in enumerate(rules)]
            dots = [(100 * worst[1].value, place) for worst, place in worsts if worst is not None]
            colour = SHADES.get(share, "0.6")
            axes.plot([x for x, _ in dots], [y for _, y in dots], "o", color=colour, markersize=6, label=f"{share} %")
        axes.set_title(textwrap.fill(dataset.title, 30), fontsize="small")
        axes.set_xlim(-5, 100)
        axes.set_xlabel("largest loss (points)", fontsize="small")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(alpha=0.25)
    panels[0][0].set_yticks([-i for i in range(len(rules))], [rule.title for rule in rules], fontsize="small")
    panels[0][0].set_ylabel("rule", fontsize="small")
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels[0]), key=lambda worsts: len(worsts[1]))
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower center", ncols=5, title="liars")
    title = "The largest loss over all attacks: further left is better, the line is the goal"
    return figures.small(figures.finished(figure, title, "", "png"))
