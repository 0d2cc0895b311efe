"""The pages: a front page with the table of verdicts, and one for each figure and table of the paper.

They are made only from the texts of the experiment files and the stored results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folb import atomic
from folb.results import summary
from folb_studies.paper import advice, arms, figure_files, pictures, verdicts
from folb_studies.paper.figure_files import Arm, Figure
from folb_studies.paper.verdicts import Verdict
from folb_studies.results import Results

QUICK = (
    "**A quick try, not the reproduction: few seeds and draws, fewer rounds, no line search. "
    "Its verdicts only show how the command works.**"
)
MEASURES = {"rounds": "rounds to the target"} | verdicts.ACCURACIES
UNDERS = ("rule.weights=equal", "rule.weights=samples")
Documents = Mapping[str, Mapping[str, Any] | None]  # by id


class Page(NamedTuple):
    """A figure with the results of its arms, its own and those it uses, and its verdicts."""

    figure: Figure
    arms: Sequence[Arm]
    documents: Documents
    verdicts: Sequence[Verdict]
    earlier: Mapping[str, str]  # by id: how the results differ from the arm's file

    @property
    def present(self) -> list[Mapping[str, Any]]:
        """The results that exist."""
        return [document for document in self.documents.values() if document is not None]


def page(name: str, results: Results, quick: bool) -> Page:
    """The page of a figure, from the stored results."""
    figure = figure_files.read(name, quick)
    everything = [*figure.arms, *figure_files.used(figure, quick)]
    documents = {arm.id: arms.stored(results, arm) for arm in everything}
    judged = [verdicts.judge(claim, figure.matching(claim.arms, everything), documents) for claim in figure.claims]
    earlier = {arm.id: arms.earlier(results, arm) for arm in everything if documents[arm.id] is None}
    return Page(figure, everything, documents, judged, earlier)


def write(names: Sequence[str], results: Results, home: Path, quick: bool) -> list[Page]:
    """Write the pages of `names`, and the front page about every figure that has a page."""
    atomic.directory(home)
    made = [page(name, results, quick) for name in names]
    for one in made:
        figure = one.figure
        shown = [
            document
            for document in (one.documents[arm.id] for arm in figure.matching(figure.shows, one.arms))
            if document
        ]
        drawn = [document for document in shown if "algorithms" in document]
        if drawn and figure.quantities:
            atomic.replace(
                home / f"{figure.name}.png", pictures.draw(drawn, figure.quantities, figure.title, figure.by)
            )
        text = "\n".join(_page(one, bool(drawn and figure.quantities), quick)) + "\n"
        atomic.replace(home / f"{figure.name}.md", text.encode())
    known = [*dict.fromkeys([*figure_files.names(), *figure_files.outside(), *names])]
    others = {one.figure.name: one for one in made}
    listed = [
        others.get(Path(name).stem) or page(name, results, quick)
        for name in known
        if Path(name).stem in others or (home / f"{name}.md").is_file()
    ]
    atomic.replace(home / "README.md", ("\n".join(_front(listed, quick)) + "\n").encode())
    return made


def _front(everything: Sequence[Page], quick: bool) -> Iterator[str]:
    texts = figure_files.front()
    elsewhere = figure_files.outside()
    pages = [one for one in everything if one.figure.name not in elsewhere]
    beside = [one for one in everything if one.figure.name in elsewhere]
    yield f"# {texts.title}\n"
    if quick:
        yield f"{QUICK}\n"
    yield f"{texts.introduction.strip()}\n"
    judged = [verdict for one in pages for verdict in one.verdicts]
    count = Counter(verdict.word for verdict in judged)
    words = (verdicts.HOLDS, verdicts.PARTLY, verdicts.FAILS, verdicts.UNTESTED)
    yield f"{len(judged)} claims: {', '.join(f'{word}: {count[word]}' for word in words if count[word])}.\n"
    if not quick and len(pages) >= len(figure_files.names()):
        yield f"## Should I use FOLB, and when?\n\n{advised(everything)}\n"
    for one in pages:
        yield from _nearest(one, heading="## Which reading of the paper comes nearest to its numbers")
    yield "## Verdicts\n"
    yield from _table(pages)
    yield f"\n{texts.reading.strip()}\n"
    if beside:
        yield f"## Beyond the paper\n\n{texts.outside.strip()}\n"
        yield from _table(beside)
        yield ""
    command = f"folb reproduce all{' --quick' if quick else ''}"
    again = f"{command} --pages-only   # the pages again, from the stored results (ours: make pages)"
    yield f"## Run it again\n\n```\n{command}\n{again}\n```"


def _table(pages: Sequence[Page]) -> Iterator[str]:
    yield "| where | claim | verdict | effect [95 % interval] |\n|---|---|---|---|"
    for one in pages:
        for verdict in one.verdicts:
            where = f"[{one.figure.title.partition(':')[0]}]({one.figure.name}.md)"
            yield f"| {where} | {verdict.claim.says} | {verdict.text} | {verdict.effect} |"


def advised(pages: Sequence[Page]) -> str:
    """The advice of the front page."""
    beyond = figure_files.outside()
    paper, beside = (
        [verdict for one in pages if (one.figure.name in beyond) is outside for verdict in one.verdicts]
        for outside in (False, True)
    )
    documents = {f"{one['figure']}:{one['arm']}": one for page in pages for one in page.present}
    return advice.text(figure_files.front(), paper, beside, documents)


def _nearest(one: Page, heading: str) -> Iterator[str]:
    near = verdicts.nearest([document for document in one.present if document["figure"] == one.figure.name], UNDERS)
    if not near:
        return
    best = near[0]
    yield f"{heading}\n"
    yield (
        f"We compare our median rounds to the target with the printed number, on the {best.rows} rows of the table "
        f"that were run in every reading (the LSTMs were not). The nearest reading is **{best.combination}**: it is "
        f"off by a factor of {_factor(best)}, and {best.ordered} of {best.pairs} pairs of algorithms are in the "
        "printed order.\n"
    )
    yield "| reading | off by a factor of [95 % interval] | pairs in the printed order |\n|---|---|---|"
    for row in near:
        yield f"| {row.combination} | {_factor(row)} | {row.ordered} of {row.pairs} |"
    yield (
        "\nFactors are geometric means over rows and algorithms; their intervals are bootstraps. A run that never "
        f"arrives counts as twice the rounds it had. {_implied(near)} The paper's text has steps and a simple average; "
        "the code that it builds on has epochs and weights by samples.\n"
    )


def _implied(near: Sequence[verdicts.Nearness]) -> str:
    """What intervals that do not overlap say about the unit of work and the average."""
    said = []
    for what, part in (("unit of work", 0), ("average", 1)):
        best: dict[str, verdicts.Nearness] = {}
        for row in near:  # the nearest come first
            best.setdefault(row.combination.split(", ")[part], row)
        (first, nearer), *others = best.items()
        if others and all(nearer.high < row.low for _, row in others):
            said.append(f"For the {what}, {first} comes nearest to the printed numbers.")
        elif others:
            rest = ", ".join(f"{name} {_factor(row)}" for name, row in others)
            said.append(f"Which {what} comes nearest is not settled: {first} {_factor(nearer)}, {rest}.")
    return " ".join(said)


def _factor(row: verdicts.Nearness) -> str:
    return f"{row.factor:.2f} [{row.low:.2f}, {row.high:.2f}]"


def _page(one: Page, pictured: bool, quick: bool) -> Iterator[str]:
    figure = one.figure
    yield f"# {figure.title}\n"
    if quick:
        yield f"{QUICK}\n"
    if pictured:
        yield f"![{figure.title}]({figure.name}.png)\n"
        yield "Lines are medians over all runs; bands are their 10th to 90th percentile.\n"
    yield f"**{figure.source}:** {figure.paper.strip()}\n"
    yield "## Verdicts\n"
    yield from _published([verdict for verdict in one.verdicts if verdict.claim.published is not None])
    for verdict in one.verdicts:
        if verdict.claim.published is None:
            yield from _verdict(verdict)
    yield from _nearest(one, heading="## Which reading comes nearest to the printed numbers")
    measured = [document for document in one.present if "algorithms" in document]
    if measured:
        yield "## Measured\n"
        timed = any(claim.metric == "seconds" for claim in figure.claims)
        yield from _measured(measured, figure.name not in figure_files.outside(), timed)
    if one.present:
        yield "## Settings\n"
        yield from _settings(one.present)
    missing = [
        f"{arm.name} (there are results, with {why})" if (why := one.earlier[arm.id]) else arm.name
        for arm in one.arms
        if one.documents[arm.id] is None
    ]
    if missing:
        yield f"Not run here: {'; '.join(missing)}.\n"
    if figure.caveats:
        yield "## What to know\n"
        yield "\n".join(f"- {caveat.strip()}" for caveat in figure.caveats) + "\n"
    yield f"## Run it again\n\n```\nfolb reproduce {figure.name}{' --quick' if quick else ''}\n```"


def _published(compared: Sequence[Verdict]) -> Iterator[str]:
    """Our numbers next to theirs, and what is not run."""
    if not compared:
        return
    for verdict in compared:
        yield f"**{verdict.claim.says}** — {verdict.text}\n"
    for what, names in (
        ("No run arrives at the target", [name for verdict in compared for name in verdict.unreached]),
        ("Not run", [name for verdict in compared for name in verdict.untested]),
    ):
        if names:
            yield f"{what}: {'; '.join(dict.fromkeys(names))}.\n"
    if not any(verdict.conditions for verdict in compared):
        return
    yield "| condition | algorithm | measure | theirs | ours | difference [95 % interval] | runs | |"
    yield "|---|---|---|---|---|---|---|---|"
    for verdict in compared:
        claim = verdict.claim
        for condition in verdict.conditions:
            word = "holds" if condition.holds else "does not hold"
            for theirs, effect in condition.effects.items():
                cells = (
                    condition.name,
                    claim.better,
                    MEASURES[claim.metric],
                    theirs,
                    condition.ours,
                    verdicts.effect_text(claim, effect),
                    str(effect.runs),
                    ": ".join(filter(None, (word, condition.note))),
                )
                yield f"| {' | '.join(cells)} |"
    yield (
        "\nOurs is the mean over runs, their standard deviation and range; of rounds, the median and the range. The "
        "difference is ours - theirs in points, or their rounds over ours. Its interval has the uncertainty of both "
        "numbers: theirs is their ±, or else the spread of our own runs. A claim holds if the interval includes no "
        "difference, and the difference is smaller than the claim says.\n"
    )


def _verdict(verdict: Verdict) -> Iterator[str]:
    """The verdict, its conditions, and below each condition's name its comparisons, which may differ from it."""
    yield f"**{verdict.claim.says}** — {verdict.text}\n"
    if verdict.conditions:
        yield "| condition | there the claim | against | effect [95 % interval] | runs | this comparison |"
        yield "|---|---|---|---|---|---|"
        for condition in verdict.conditions:
            word = verdicts.HOLDS if condition.holds else verdicts.FAILS
            first = [condition.name, ": ".join(filter(None, (word, condition.note)))]
            for against, effect in condition.effects.items():
                shown = verdicts.effect_text(verdict.claim, effect)
                alone = verdicts.comparison(verdict.claim, effect) if against else ""
                yield f"| {' | '.join([*first, against, shown, str(effect.runs), alone])} |"
                first = ["", ""]  # the verdict is the condition's, not that of its other rows
        yield ""
    if verdict.unreached:
        yield f"No run arrives at the target: {'; '.join(verdict.unreached)}.\n"
    if verdict.untested:
        yield f"Not run: {'; '.join(verdict.untested)}.\n"


def _measured(documents: Sequence[Mapping[str, Any]], printed: bool, timed: bool) -> Iterator[str]:
    """All arms; with the paper's rounds, if it printed any, and with seconds, if a claim is about them."""
    headings = ["arm", "algorithm", "rounds to target", "paper", *(["simulated s to target"] if timed else [])]
    headings += ["final accuracy (%)", "final loss", "drops > 5 points", "MB up"]
    if not printed:
        headings.remove("paper")
    yield f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|"
    for document in documents:
        target, rounds = document["experiment"]["target"], document["experiment"]["rounds"]
        for label, algorithm in document["algorithms"].items():
            runs = algorithm["runs"]
            cells = (
                f"{document['name']} ({100 * target:g} %)",
                label,
                _arrival(runs["rounds"], rounds),
                *([str(document["printed"].get(label.split()[0], ""))] if printed else []),
                *([_middle(runs["seconds"], 1).replace("inf", "never")] if timed else []),
                _middle(runs["final"], 100),
                _middle(runs["loss"], 1),
                f"{np.mean(runs['drops']):.1f}",
                f"{np.mean(runs['bytes_up']) / 1e6:.2f}",
            )
            yield f"| {' | '.join(cells)} |"
    yield "\nMedians over runs with their 10th to 90th percentile; drops and megabytes are means.\n"
    diverged = [
        f"{document['name']}, {label}: {lost} of {len(algorithm['runs']['loss'])}"
        for document in documents
        for label, algorithm in document["algorithms"].items()
        if (lost := algorithm["runs"]["loss"].count(None))
    ]
    if diverged:
        yield (
            f"Runs that diverged (their loss was not finite at the end): {'; '.join(diverged)}. Such a run counts with "
            f"a loss of {verdicts.WORST_LOSS:g} and with its own accuracy.\n"
        )


def _arrival(reached: Sequence[int | None], rounds: int) -> str:
    """The median of the rounds to the target and its range. A run that never arrives comes after all others."""
    low, middle, high = (verdicts.rounds_text(value, rounds) for value in _spread(reached))
    missed = list(reached).count(None)
    never = f"; {missed} of {len(reached)} never" if missed else ""
    return f"{middle} ({low} to {high}{never})"


def _middle(values: Sequence[float | None], scale: float) -> str:
    low, middle, high = (scale * value for value in _spread(values))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _spread(values: Sequence[float | None]) -> list[float]:
    """The 10th percentile, the median and the 90th. A missing or not finite value counts as larger than any number."""
    ordered = sorted(math.inf if value is None else value for value in values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return [low, summary.median_round(values), high]


def _settings(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for document in documents:
        if "check" in document:
            given = ", ".join(f"{key} = {value}" for key, value in document["settings"].items())
            yield f"- {document['name']}: `{document['check']}`{f' with {given}' if given else ''}."
            continue
        experiment = document["experiment"]
        ran = " and ".join(f"{ran['device']} (folb {ran['folb']}, jax {ran['jax']})" for ran in document["ran_on"])
        note = f" ({document['note']})" if document["note"] else ""
        draws = f"{document['draws']} draws of the data × " if document["draws"] else ""
        count = len(experiment["seeds"])
        common = {"select.replacement", "select.K", "local.lr", "local.batch", "local.unit", "server"}
        algorithm = experiment["algorithms"][0].rpartition(":")[2]
        own = experiment["set"].get(algorithm, {})
        search = ""
        for chosen in document["chosen"]:
            values = ", ".join(f"{key} = {value:g}" for key, value in chosen["values"].items())
            on = f"draws {_listed(chosen['draws'])} and seeds " if chosen["draws"] else "seeds "
            search += f" Line search for {chosen['algorithm']} on {on}{_listed(chosen['seeds'])}: {values}."
        yield (
            f"- {document['name']}: {experiment['dataset']}{note}, {document['devices']} devices; "
            f"{experiment['model']}; {draws}{count} seeds × {experiment['rounds']} rounds; work {experiment['system']} "
            f"({', '.join(f'{key}={own[key]}' for key in sorted(common & own.keys()))}); mu: {_mus(experiment)}."
            f"{search} Ran on {ran}."
        )
    yield ""


def _mus(experiment: Mapping[str, Any]) -> str:
    known = {
        name.rpartition(":")[2]: experiment["set"].get(name.rpartition(":")[2], {}) for name in experiment["algorithms"]
    }
    return ", ".join(f"{name} {own['local.mu']}" for name, own in known.items() if "local.mu" in own) or "none"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
