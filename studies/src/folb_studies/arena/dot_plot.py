"""The picture of the arena: for each dataset, rounds to the target relative to the best of the classic contenders."""

from __future__ import annotations

import math
from typing import Any

from folb.report import figures
from folb.report.looks import looks
from folb_studies.arena.standings import OURS, RIVALS, Overall, Standings, mean, shown

GREY, MOST = "0.72", 8.0  # ratios beyond this are drawn at the edge
EVERYWHERE = "all datasets\n(geometric mean)"


def draw(standings: Standings) -> bytes:
    """A row for each dataset: a grey dot for each published contender, a coloured one with its interval for ours."""
    datasets = standings.present
    figure, axes = figures.subplots(1, 1, figsize=(8.2, 1.7 + 0.42 * (len(datasets) + 1)))
    rows = {dataset.name: -i for i, dataset in enumerate(datasets)} | {EVERYWHERE: -len(datasets) - 0.4}
    axes.axvline(1, color="0.3", linewidth=1)
    for one in standings.members(RIVALS["all published"]):
        overall = standings.overall(one.name, RIVALS["classic"])
        if overall is not None:
            _grey(axes, overall, rows, len(datasets))
    own = looks(f"{one.algorithm} {one.name}" for one in shown(standings))
    for i, one in enumerate(shown(standings)):
        overall = standings.overall(one.name, RIVALS["classic"])
        if overall is None:
            continue
        colour = own[f"{one.algorithm} {one.name}"].ink
        effects = {ratio.dataset: ratio.effect for ratio in overall.ratios} | {EVERYWHERE: overall.effect}
        shift = 0.16 * (i - (len(shown(standings)) - 1) / 2)
        for name, effect in effects.items():
            low, middle, high = (_within(math.exp(min(x, 9.0))) for x in (effect.low, effect.value, effect.high))
            axes.plot([low, high], 2 * [rows[name] - shift], color=colour, linewidth=1.4)
            face = colour if one.tuned else "white"
            axes.plot(middle, rows[name] - shift, "o", color=colour, markerfacecolor=face, markersize=7, zorder=3)
        axes.plot([], [], "o", color=colour, markerfacecolor=colour if one.tuned else "white", label=_name(one))
    axes.plot([], [], "o", color=GREY, markersize=4, label="published contenders, tuned")
    _axes(axes, [dataset.title for dataset in datasets], list(rows.values()))
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=4)
    title = "Rounds to the target, relative to the best classic contender: further left is faster"
    return figures.small(figures.finished(figure, title, "", "png"))


def _name(one: Any) -> str:
    return f"{one.title}, {'tuned' if one.tuned else 'its defaults'}" if OURS in one.groups else one.title


def _grey(axes: Any, overall: Overall, rows: dict[str, float], datasets: int) -> None:
    for ratio in overall.ratios:
        axes.plot(_within(math.exp(ratio.effect.value)), rows[ratio.dataset], "o", color=GREY, markersize=4)
    if len(overall.ratios) == datasets:
        effect = mean([ratio.effect for ratio in overall.ratios])
        axes.plot(_within(math.exp(effect.value)), rows[EVERYWHERE], "o", color=GREY, markersize=4)


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / MOST), MOST)


def _axes(axes: Any, titles: list[str], places: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(1 / MOST * 0.95, MOST * 1.05)
    ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8]
    axes.set_xticks(ticks, ["1/8", "1/4", "1/2", "1", "2", "4", "8 or more"], minor=False)
    axes.minorticks_off()
    axes.set_yticks(places, [*titles, EVERYWHERE], fontsize="small")
    axes.set_ylim(min(places) - 0.6, 0.6)
    axes.set_ylabel("dataset", fontsize="small")
    axes.set_xlabel("times the rounds of the best classic contender", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.25)
