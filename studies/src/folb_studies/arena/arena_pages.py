"""The pages of the arena: the front page, all measures by dataset, and the boxes and what was chosen from them.

They are made only from the files of the arena and the stored results. Every sentence about results is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from folb import atomic
from folb.atomic import claimed
from folb.results import summary
from folb.results.run import HELD
from folb_studies.arena import contest, dot_plot, standings
from folb_studies.arena.arena_advice import advice, to_know
from folb_studies.arena.cells import NEVER, passed_over
from folb_studies.arena.entries import MADE, YOURS, Contender, typed
from folb_studies.arena.standings import (
    ABLATION,
    FEW,
    FINAL,
    LIMIT,
    MEASURES,
    NOT_RUN,
    OURS,
    RIVALS,
    ROUNDS,
    Standings,
)

GROUPS = {
    "classic": "published ones, each with its own settings tuned",
    "averaged": "the same, but the model that is evaluated and kept is an exponential mean over rounds",
    "drawn": "published ones with the draw that ours has: by samples",
    "published": "with a memory or a momentum; the mean over rounds is in their boxes, too",
    OURS: "ours",
    ABLATION: "ours with a part left out",
    LIMIT: "every device in every round; nobody competes with it",
    YOURS: "given with --contender",
}


def write(ranks: Standings, home: Path) -> None:
    """Write the pages and the picture."""
    atomic.directory(home)
    pages = {"README": _front(ranks), "measures": _measures(ranks), "settings": _settings(ranks)}
    files = {f"{name}.md": ("\n".join(lines) + "\n").encode() for name, lines in pages.items()}
    if ranks.present:
        files["arena.png"] = dot_plot.draw(ranks)
    with claimed(home):  # another process may have other datasets, and write the same pages
        for name, content in files.items():
            atomic.replace(home / name, content)


def _front(ranks: Standings) -> Iterator[str]:
    known = list(to_know(ranks))
    unequal = "[What to know](#what-to-know) says what is not equal. " if known else ""
    again = f", and {len(ranks.passed_over)} of them are to be run again" * bool(ranks.passed_over)
    yield "# The arena\n"
    yield (
        f"{len(ranks.contenders)} contenders on {len(ranks.datasets)} datasets. Everyone is tuned with the same "
        f"budget, and the winners are run on draws and seeds that nobody was tuned on. {unequal}"
        f"{len(ranks.cells)} of {ranks.wanted} combinations have been run{again}.\n"
    )
    if ranks.present:
        yield "![Rounds to the target, relative to the best classic contender](arena.png)\n"
        yield (
            "Each row is a dataset. A grey dot is a published contender, tuned. 1 is the best of the classic ones. "
            "Lines are 95 % intervals.\n"
        )
    if said := advice(ranks):
        yield f"## Which algorithm should I use?\n\n{said}\n"
    if known:
        yield "## What to know\n\n" + "\n".join(known) + "\n"
    if ranks.file is None:
        yield "## Goals\n"
        yield from _goals(ranks)
    yield "## How it is compared\n"
    yield from _rules(ranks)
    yield "## Rounds to the target\n"
    yield from _rounds(ranks)
    yield "## Ratios to the best of the others\n"
    yield from _overall(ranks)
    yield from _ablation(ranks)
    yield "## What is not here\n"
    yield from _absent(ranks)
    yield "## Run it again\n"
    again = typed("arena", ranks.file)
    part = "'mnist-*'" if ranks.file is None else ranks.everything[0].name
    yield (
        f"```\n{again}\n{again} --only {part} --contenders fedavg,folb   # a part of it\n"
        f"{again} --contender my_file.py:mine --box local.lr=log:0.001..1   # with one of your own\n"
        f"{again} --pages-only   # the pages again, from the stored results{MADE * (ranks.file is None)}\n```"
    )


def _goals(ranks: Standings) -> Iterator[str]:
    goals = ranks.goals()
    if not goals:
        yield "No contender of ours is here yet.\n"
        return
    yield "| goal | reached | |\n|---|---|---|"
    words = {True: "met", False: "not met", None: "not decided: results are missing"}
    for goal in goals:
        yield f"| {goal.says}. | {goal.reached} | {words[goal.met]} |"
    yield ""


def _rules(ranks: Standings) -> Iterator[str]:
    images = " Draws of MNIST and FEMNIST are other partitions of the same images." * (ranks.file is None)
    earlier = ", except [those chosen by an earlier measure](#what-to-know)" * bool(ranks.passed_over)
    yield (
        f"- **Budget.** Every contender may try {ranks.points} points of its box on each dataset. The boxes are on "
        "[a page of their own](settings.md), with what was chosen; step sizes span at least three decades. A contender "
        "with an empty box runs with its defaults, and nothing is tuned.\n"
        "- **Target.** FedAvg is tuned first, for its final accuracy (the mean of its last "
        f"{HELD} evaluations, over all tuning runs). The target is {100 * contest.SHARE:g} % of what it then "
        "ends with. Draws of the data differ in what can be reached, so each draw has its own target. Then "
        "everyone, FedAvg too, is tuned for the round from which the target is held: the mean accuracy of that "
        f"evaluation and the next {HELD - 1} is at least the target. Points are ranked as contenders are compared, by "
        f"the geometric mean over the runs{earlier}. If points are equal in this, those with the lower median win, "
        "then those with less loss. Points that diverge lose.\n"
        "- **Reported runs.** Winners are run on other draws of the data and other seeds than anyone was tuned on. "
        "Runs are compared in pairs with the same draw and seed: the same data, and the same random numbers for "
        f"draws, work and batches.{images}\n"
        f"- **Runs that never hold the target,** or diverge, count with {NEVER} times the rounds, bytes and seconds "
        "that they had.\n"
        "- **Ratios** are geometric means over pairs; below 1 is better. The intervals are Student's, 95 %, over the "
        f"means of the draws. Where there are fewer than {FEW} draws they are over all pairs, and do not know how much "
        "draws differ. Over datasets, it is the geometric mean of their "
        "ratios, with their errors taken as independent.\n"
        "- **The best of a group** on a dataset is the one with the best mean of the measure over the reported runs. "
        "This favours the group: its best is chosen by the results that it is then compared with.\n"
    )
    for dataset in ranks.present:
        if dataset.loss_samples is not None:
            yield (
                f"- **{dataset.title}:** the training loss is of {dataset.loss_samples:,} samples in newer results, "
                "and of all in older ones. It breaks ties in a search, and tells who diverged.\n"
            )
    yield "| group | | contenders |\n|---|---|---|"
    for group, what in GROUPS.items():
        if names := [one.name for one in ranks.members([group])]:
            yield f"| {group} | {what} | {', '.join(names)} |"
    yield ""
    yield "| dataset | devices | rounds | target | tuned on | reported |\n|---|---|---|---|---|---|"
    for dataset in ranks.datasets:
        cell = next((cell for (name, _), cell in ranks.cells.items() if name == dataset.name), None)
        devices, target = (cell["devices"], _span(cell["target"]["reported"].values())) if cell else ("", NOT_RUN)
        yield (
            f"| {dataset.title} (`{dataset.name}`) | {devices} | {dataset.rounds} | {target} | {dataset.trials} | "
            f"{dataset.report} ({dataset.report.pairs} runs) |"
        )
    yield ""


def _span(targets: Collection[float]) -> str:
    """The targets of all draws, from the least to the greatest."""
    least, most = (f"{100 * bound(targets):.1f}" for bound in (min, max))
    return f"{least} %" if least == most else f"{least} to {most} %"


def _rounds(ranks: Standings) -> Iterator[str]:
    yield f"| contender | {' | '.join(dataset.title for dataset in ranks.datasets)} |"
    yield f"|---{'|---' * len(ranks.datasets)}|"
    best = {dataset.name: ranks.best(dataset.name, RIVALS["all published"])[0] for dataset in ranks.datasets}
    for one in ranks.contenders:
        cells = []
        for dataset in ranks.datasets:
            text = ranks.held(dataset, one)
            cells.append(f"**{text}**" if best[dataset.name] == one.name else text)
        yield f"| {one.title} (`{one.name}`) | {' | '.join(cells)} |"
    yield (
        "\nMedians over the reported runs of the round from which the target is held. Bold is the best of all "
        "published contenders, by the geometric mean.\n"
    )


def _overall(ranks: Standings) -> Iterator[str]:
    if not standings.shown(ranks):
        yield "No contender of ours is here yet.\n"
        return
    for one in standings.shown(ranks):
        yield f"**{_named(one)}**, over all datasets that have both:\n"
        yield f"| measure | {' | '.join(f'against the best of: {rivals}' for rivals in RIVALS)} |"
        yield f"|---{'|---' * len(RIVALS)}|"
        for measure, title in MEASURES.items():
            cells = []
            for groups in RIVALS.values():
                whole = ranks.overall(one.name, groups, measure)
                cells.append(NOT_RUN if whole is None else _with_count(whole, measure, len(ranks.datasets)))
            yield f"| {title}{' (points)' if measure == FINAL else ''} | {' | '.join(cells)} |"
        yield ""
        yield from _by_dataset(ranks, one, ROUNDS)
    yield (
        "`*`: not all contenders of the group were run there. All measures, by dataset, are on "
        "[a page of their own](measures.md).\n"
    )


def _ablation(ranks: Standings) -> Iterator[str]:
    """Ours with a part left out, compared with the whole."""
    whole = next((one for one in ranks.members([OURS]) if not one.tuned), None)
    parts = ranks.members([ABLATION])
    if whole is None or not parts:
        return
    yield f"## Which part does it\n\nRounds to the target, as a ratio to {whole.title} (`{whole.name}`):\n"
    yield f"| | all datasets | {' | '.join(dataset.title for dataset in ranks.datasets)} |"
    yield f"|---|---{'|---' * len(ranks.datasets)}|"
    for one in parts:
        effects = [ranks.ratio(dataset.name, one.name, whole.name) for dataset in ranks.datasets]
        known = [effect for effect in effects if effect is not None]
        total = standings.text(standings.mean(known)) if known else NOT_RUN
        cells = [NOT_RUN if effect is None else standings.text(effect) for effect in effects]
        yield f"| {one.title} (`{one.name}`) | {total} | {' | '.join(cells)} |"
    yield ""


def _with_count(whole: standings.Overall, measure: str, datasets: int) -> str:
    text = standings.text(whole.effect, measure)
    mark = "" if all(ratio.whole for ratio in whole.ratios) else " *"
    return f"{text}{mark}" + ("" if len(whole.ratios) == datasets else f" ({len(whole.ratios)} of {datasets} datasets)")


def _named(one: Contender) -> str:
    return f"{one.title} (`{one.name}`, {'tuned' if one.tuned else 'with its defaults'})"


def _by_dataset(ranks: Standings, one: Contender, measure: str) -> Iterator[str]:
    """A contender's ratios on each dataset, with the name of the best that it is compared with."""
    yield f"| {MEASURES[measure]} | {' | '.join(f'against the best of: {rivals}' for rivals in RIVALS)} |"
    yield f"|---{'|---' * len(RIVALS)}|"
    ratios = {
        rivals: {ratio.dataset: ratio for ratio in ranks.ratios(one.name, groups, measure)}
        for rivals, groups in RIVALS.items()
    }
    for dataset in ranks.datasets:
        cells = []
        for rivals in RIVALS:
            ratio = ratios[rivals].get(dataset.name)
            mark = "" if ratio is None or ratio.whole else " *"
            cells.append(NOT_RUN if ratio is None else f"{standings.text(ratio.effect, measure)} ({ratio.rival}){mark}")
        yield f"| {dataset.title} | {' | '.join(cells)} |"
    yield ""


def _measures(ranks: Standings) -> Iterator[str]:
    yield "# The arena: all measures\n"
    yield (
        "Made by `folb arena`, as [the front page](README.md) is, which says how they are compared. Ratios are below "
        "1, and differences of accuracy above 0, where the contender is better. `*`: not all contenders of the "
        "group were run there.\n"
    )
    for one in standings.shown(ranks):
        yield f"## {_named(one)}\n"
        for measure in MEASURES:
            yield from _by_dataset(ranks, one, measure)
    for measure, (unit, form) in FORMS.items():
        yield f"## Everyone: {MEASURES[measure]} ({unit})\n"
        yield f"| contender | {' | '.join(dataset.title for dataset in ranks.datasets)} |"
        yield f"|---{'|---' * len(ranks.datasets)}|"
        for one in ranks.contenders:
            cells = (ranks.cells.get((dataset.name, one.name)) for dataset in ranks.datasets)
            texts = [NOT_RUN if cell is None else form(cell) for cell in cells]
            yield f"| {one.title} (`{one.name}`) | {' | '.join(texts)} |"
        yield ""
    yield "Medians over the reported runs; final accuracy is the mean and the standard deviation.\n"


def _arrived(name: str, scale: float) -> Callable[[Mapping[str, Any]], str]:
    def shown(cell: Mapping[str, Any]) -> str:
        runs = cell["runs"]
        values = [None if held is None else value / scale for value, held in zip(runs[name], runs["held"], strict=True)]
        return summary.arrival(values, ".3g")

    return shown


def _accuracy(cell: Mapping[str, Any]) -> str:
    values = [value for value in cell["runs"][FINAL] if value is not None]
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * sum(values) / len(values):.1f}{spread}" if values else "diverged"


FORMS = {
    "bytes_up": ("MB", _arrived("bytes_up", 1e6)),
    "bytes_down": ("MB", _arrived("bytes_down", 1e6)),
    "seconds": ("s", _arrived("seconds", 1)),
    FINAL: ("%", _accuracy),
}


def _absent(ranks: Standings) -> Iterator[str]:
    lines = [f"- {dataset.title}: {dataset.left_out}." for dataset in ranks.everything if dataset.left_out]
    lines += [
        f"- {name} on {dataset.title}: {why}." for dataset in ranks.datasets for name, why in dataset.without.items()
    ]
    for dataset, names in standings.unfinished(ranks):
        old = [name for where, name in ranks.stale if where == dataset.name]
        everyone = len(names) + len(dataset.without) >= len(ranks.contenders)
        whose = "everyone" if everyone else ", ".join(names)
        stored = f" (stored results of {', '.join(old)} are of other settings)" if old else ""
        lines.append(f"- Not run on {dataset.title}: {whose}{stored}.")
    yield "\n".join(lines or ["Nothing is left out."]) + "\n"
    if any(dataset.left_out for dataset in ranks.everything):
        yield "A dataset that is left out is left out for everyone.\n"


def _settings(ranks: Standings) -> Iterator[str]:
    yield "# The arena: boxes and chosen settings\n"
    yield (
        f"Made by `folb arena`. Everyone may try {ranks.points} points of its box on each dataset. `log:0.001..1` is a "
        "range of logarithms, `0.5..0.95` a range; other settings have these values to choose from. The points are "
        f"drawn by the seed {contest.BOX_SEED}. Tuning runs and reported runs share no draw and no seed.\n"
    )
    for dataset in ranks.datasets:
        given = ", ".join(f"{key} = {_short(value, ', ')}" for key, value in dataset.set.items())
        yield f"- {dataset.title}: `{dataset.dataset}`, {dataset.model}, system {dataset.system}; {given}."
    yield ""
    for one in ranks.contenders:
        yield f"## {one.title} (`{one.name}`)\n"
        yield from _chosen(ranks, one)


def _chosen(ranks: Standings, one: Contender) -> Iterator[str]:
    fixed = ", ".join(f"{key} = {_short(value)}" for key, value in one.set.items())
    box = ", ".join(f"{key}: {_short(value)}" for key, value in one.box.items())
    every = "; every device in every round" if one.every_device else ""
    source = f" {one.paper}." if one.paper else ""
    note = f" Note: {one.note}." if one.note else ""
    yield (
        f"`{one.part}`{f' with {fixed}' if fixed else ''}{every}. Box: {box or 'empty, nothing is tuned'}."
        f"{source}{note}\n"
    )
    cells = {name: ranks.cells[name, one.name] for name in _names(ranks) if (name, one.name) in ranks.cells}
    if not cells:
        yield "Not run.\n"
        return
    if not one.tuned:
        return
    yield "| dataset | chosen | held from, in the tuning runs | final accuracy there | points that diverged |"
    yield "|---|---|---|---|---|"
    for name, cell in cells.items():
        best = cell["tried"][0]
        held = _listed(best["held"])
        if better := passed_over(cell):
            held += f"; but {_listed(better['held'])} with {_spelt(better['values'])}"
        lost = sum(point["diverged"] for point in cell["tried"])
        final = "" if best["final"] is None else f"{100 * best['final']:.1f} %"
        yield f"| `{name}` | {_spelt(cell['chosen'])} | {held} | {final} | {lost} of {cell['points']} |"
    yield ""


def _listed(held: Sequence[int | None]) -> str:
    return ", ".join("never" if at is None else str(at) for at in held)


def _spelt(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {summary.spelt(value)}" for key, value in values.items())


def _names(ranks: Standings) -> Sequence[str]:
    return [dataset.name for dataset in ranks.datasets]


def _short(value: Any, between: str = " or ") -> str:
    """A setting's value, or the beginning of a long list."""
    if isinstance(value, list) and len(value) > 8:
        return f"{', '.join(map(str, value[:4]))}, … ({len(value)} numbers)"
    return between.join(map(summary.spelt, value)) if isinstance(value, list) else summary.spelt(value)
