"""What the runs of all libraries come to: tables and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Results = dict[str, Any]
TITLES = {  # of the works
    "logistic": "FedAvg, logistic regression",
    "folb": "FOLB, logistic regression",
    "mimelite": "MimeLite, logistic regression",
    "scaffold": "SCAFFOLD, logistic regression",
    "cnn": "FedAvg, CNN",
    "lstm": "FedAvg, LSTM",
}


class Range(NamedTuple):
    """The median, the least and the greatest over the turns."""

    middle: float
    low: float
    high: float


def over_turns(values: Iterable[float]) -> Range:
    """The range of a value for each turn."""
    values = list(values)
    return Range(median(values), min(values), max(values))


class Row(NamedTuple):
    """A library's figures for a work."""

    title: str
    per_cpu_second: Range
    per_second: Range
    cpu_ratio: Range  # how many times as fast folb was in the same turn, by CPU time
    ratio: Range  # and by the clock
    share: Range  # of the time that the products alone would take at the matrix rate
    test_accuracy: Range
    train_loss: Range
    warm_up_seconds: Range


def row(results: Results, work: str, name: str) -> Row | None:
    """The figures of a library that ran."""
    runs = {run["turn"]: run for run in results["runs"] if (run["work"], run["library"]) == (work, name)}
    ours = {run["turn"]: run for run in results["runs"] if (run["work"], run["library"]) == (work, "folb")}
    if not runs or not ours.keys() & runs.keys():
        return None

    def speed(key: str) -> Range:
        return over_turns(run["rounds"] / run[key] for run in runs.values())

    def ratio(key: str) -> Range:
        return over_turns(runs[turn][key] / ours[turn][key] for turn in runs.keys() & ours.keys())

    def value(key: str) -> Range:
        return over_turns(run[key] for run in runs.values())

    timed = "seconds" if "gpu" in results else "cpu_seconds"
    least = results["operations"][work] / results["rate"]
    share = over_turns(least * run["rounds"] / run[timed] for run in runs.values())
    version = next(iter(runs.values()))["version"]
    return Row(
        f"{results['libraries'][name]} {version}",
        *(speed("cpu_seconds"), speed("seconds"), ratio("cpu_seconds"), ratio("seconds")),
        *(share, value("test_accuracy"), value("train_loss"), value("warm_up_seconds")),
    )


def table(results: Results) -> str:
    """A table for each work."""
    lines = [
        f"{results.get('gpu', results['machine'])}, {_cores(results)}. "
        f"Medians of {results['turns']} turns (least .. greatest).",
        "The ratios are folb's speed over the library's, turn by turn. The warm-up is one round, with compilation.",
        "The limit is the time that the round's matrix products would take at the rate of large ones, "
        f"{results['rate'] / 1e9:.3g} GFLOP/s.",
    ]
    heads = "{:25}{:>11}{:>24}{:>9}{:>24}{:>9}{:>24}{:>10}{:>10}"
    for work, settings in results["works"].items():
        every = "each round" if settings["every"] == 1 else f"every {settings['every']} rounds"
        lines += [
            f"\n{work}: {settings['rounds']} rounds of {settings['steps']} steps, evaluated {every}",
            heads.format("", "rounds per", "", "rounds", "", "of the", "test", "training", ""),
            heads.format("", "CPU-second", "ratio", "per s", "ratio", "limit", "accuracy", "loss", "warm-up"),
        ]
        for name, title in results["libraries"].items():
            found = row(results, work, name)
            if found is None:
                reason = results["failures"].get(name) or results["failures"].get(f"{name} {work}")
                lines.append(f"{title:25}" + (f"  failed: {reason}" if reason else f"{'-':>11}"))
                continue
            lines.append(
                heads.format(
                    found.title,
                    _speed(found.per_cpu_second),
                    _times(name, found.cpu_ratio),
                    _speed(found.per_second),
                    _times(name, found.ratio),
                    f"{100 * found.share.middle:.2g} %",
                    "{:.3f} ({:.3f} .. {:.3f})".format(*found.test_accuracy),
                    f"{found.train_loss.middle:.3f}",
                    f"{found.warm_up_seconds.middle:.1f} s",
                )
            )
    return "\n".join(lines)


def _speed(speed: Range) -> str:
    return f"{speed.middle:,.0f}" if speed.middle >= 1000 else f"{speed.middle:.3g}"


def _times(name: str, ratio: Range) -> str:
    return "" if name == "folb" else "{:.3g}x ({:.3g} .. {:.3g})".format(*ratio)


def _cores(results: Results) -> str:
    if "gpu" in results:
        return "one GPU"
    return "one core" if results["cores"] == 1 else f"{results['cores']} cores"


def draw(results: Results, path: Path) -> None:
    """Rounds per CPU-second of each library (on a GPU, per second), a panel for each work, folb's ratio beside."""
    from folb.report import figures
    from folb.report.looks import COLOURS

    on_gpu = "gpu" in results
    found = {work: [row(results, work, name) for name in results["libraries"]] for work in results["works"]}
    panels = {work: [one for one in reversed(rows) if one is not None] for work, rows in found.items()}
    heights = [1 + len(rows) for rows in panels.values()]
    size = (8, 0.6 + 0.27 * len(heights) + 0.34 * sum(heights))
    figure, axes = figures.subplots(len(panels), 1, figsize=size, height_ratios=heights, squeeze=False)
    unit = "second" if on_gpu else "CPU-second"
    for panel, (work, rows) in zip(axes[:, 0], panels.items(), strict=True):
        speeds = [one.per_second if on_gpu else one.per_cpu_second for one in rows]
        own = [one.title.startswith("folb") for one in rows]
        bars = panel.barh(
            [one.title for one in rows],
            [speed.middle for speed in speeds],
            color=[COLOURS[0] if mine else "0.75" for mine in own],
            xerr=[[speed.middle - speed.low for speed in speeds], [speed.high - speed.middle for speed in speeds]],
        )
        times = [one.ratio if on_gpu else one.cpu_ratio for one in rows]
        ratios = ["" if mine else f"  ({ratio.middle:.3g}x)" for mine, ratio in zip(own, times, strict=True)]
        texts = [f"{_speed(speed)}{ratio}" for speed, ratio in zip(speeds, ratios, strict=True)]
        panel.bar_label(bars, texts, fontsize="small", padding=6)
        panel.margins(x=0.15)
        panel.set_title(TITLES[work], loc="left", fontsize="medium")
        panel.set_xlabel(f"rounds per {unit}", fontsize="small")
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    title = f"Rounds per {unit} on {_cores(results)}, and folb's over it (median of the turns' ratios)"
    path.write_bytes(figures.small(figures.finished(figure, title, "", "png")))
