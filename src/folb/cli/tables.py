"""What commands show on standard output: tables, and lines of text."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from folb.results import summary as results_of

if TYPE_CHECKING:  # these need jax
    from folb.arena.standings import Standings
    from folb.experiments.plan import Plan
    from folb.experiments.settings import Setting
    from folb.experiments.tune import Point
    from folb.paper.pages import Page
    from folb.results.outcomes import Outcome
    from folb.results.run import Run
    from folb.store.directory import RunDirectory


class Output(Console):
    """Standard output. Its reader may go away, as `head` does."""

    def on_broken_pipe(self) -> None:
        """Tell `main`, which knows that it is not an error; rich would exit with 1."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output as it is now."""
    return Output(width=None if sys.stdout.isatty() else 160)


def show(table: Table) -> None:
    """Print a table."""
    console().print(table, highlight=False)


def show_in_parts(table: Table, keys: int = 1) -> None:
    """Print a table that may be wider than the terminal: then in parts, each with the first `keys` columns."""
    out = console()
    for n, part in enumerate(in_parts(table, out.width, keys)):
        out.print(*([""] if n else []), part, sep="\n", highlight=False)


GAP = 2  # the characters between two columns


def in_parts(table: Table, room: int, keys: int = 1) -> Iterator[Table]:
    """The table if it fits into `room` characters. Otherwise its headings are broken into lines, and if it still does
    not fit, it is cut into several tables, each with the first `keys` columns.
    """
    heads = [str(column.header).replace(" %", "\u00a0%") for column in table.columns]  # not broken there
    cells = [list(map(str, column.cells)) for column in table.columns]
    if sum(_longest([head, *own]) + GAP for head, own in zip(heads, cells, strict=True)) - GAP <= room:
        yield table
        return
    widths = [_longest([*head.split(" "), *own]) for head, own in zip(heads, cells, strict=True)]
    parts: list[list[int]] = []
    for i in range(keys, len(heads)):
        if not parts or sum(widths[j] + GAP for j in (*range(keys), *parts[-1])) + widths[i] > room:
            parts.append([])
        parts[-1].append(i)
    for part in parts:
        shown = [*range(keys), *part]
        cut = Table(box=None, pad_edge=False, header_style="bold")
        for i in shown:
            cut.add_column(textwrap.fill(heads[i], widths[i]), justify=table.columns[i].justify, overflow="fold")
        for row in zip(*(cells[i] for i in shown), strict=True):
            cut.add_row(*row)
        yield cut


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts))


def indented(text: str, first: str, others: str | None = None) -> str:
    """Text in lines that fit standard output: the first begins with `first`, the others with `others`."""
    indent = first if others is None else others
    return textwrap.fill(text, console().width, initial_indent=first, subsequent_indent=indent, break_long_words=False)


def say(text: str) -> None:
    """Print text as it is."""
    console().print(text, highlight=False, markup=False)


def files(stored: RunDirectory) -> str:
    """The files of a finished run, those first that a reader wants first."""
    names = ("curves.png", "results.json", "rounds.jsonl", "experiment.toml", "model.npz")
    return ", ".join(name for name in names if (stored.path / name).exists())


def summary(planned: Plan) -> str:
    """What is compared, in a line."""
    federation, experiment = planned.federation, planned.experiment
    note = f" ({federation.note})" if federation.note else ""
    seeds = len(experiment.seeds)
    return (
        f"{federation.name}{note}: {federation.N} devices, {len(federation.train.y)} training and "
        f"{len(federation.test.y)} test samples; model {experiment.model}; system {experiment.system}; "
        f"{experiment.rounds} rounds; {seeds} seed{'s' * (seeds > 1)}\n"
    )


def _plain(*headings: str, left: Iterable[str]) -> Table:
    """A table without lines. All columns hold numbers, except those in `left`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def results(runs: Sequence[Run], target: float, clock: str = "simulated s") -> Table:
    """One line for each algorithm: medians and means over the seeds."""
    headings, rows = results_of.table(runs, target, clock)
    table = _plain(*headings, left=headings[:1])
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def points(points: Sequence[Point], target: float) -> Table:
    """The points of a line search, by rank."""
    share = f"{100 * target:g} %"
    measured = (f"rounds to {share}", "held from", f"MB to {share}", f"s to {share}")
    table = _plain("rank", "algorithm", *measured, "final training loss", "final accuracy", left=["algorithm"])
    for point in points:
        megabytes = [None if sent is None else sent / 1e6 for sent in point.sent]
        found = (
            *map(results_of.arrival, (point.reached, point.held)),
            results_of.arrival(megabytes, ".2f"),
            results_of.arrival(point.seconds, ".0f"),
            f"{point.loss:.4g}",
            f"{100 * point.accuracy:.1f} %",
        )
        cells = ("diverged", *[""] * (len(found) - 1)) if point.diverged else found
        table.add_row(str(point.rank), escape(point.label), *cells)
    return table


def outcomes(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Table]]:
    """For each share of liars: what each rule is worth under each attack, the liars' weight, the backdoor's rate."""
    for attackers in dict.fromkeys(one.attackers for one in outcomes):
        those = {(one.rule, one.attack): one for one in outcomes if one.attackers == attackers}
        who = f"{100 * attackers:g} % of the devices lie"
        yield f"{who}: final accuracy in %, the mean over the seeds", _by_attack(those, lambda one: mean(one.accuracy))
        yield "the liars' part of all weight in %", _by_attack(those, lambda one: one.share)
        if any(attack == "backdoor" for _, attack in those):
            only = {key: one for key, one in those.items() if key[1] in ("honest", "backdoor")}
            yield "the rate of the backdoor in %", _by_attack(only, lambda one: one.backdoor)


def _by_attack(those: Mapping[tuple[str, str], Outcome], number: Callable[[Outcome], float]) -> Table:
    """A line for each rule, a column for each attack."""
    attacks = list(dict.fromkeys(attack for _, attack in those))
    table = _plain("rule", *attacks, left=["rule"])
    for rule in dict.fromkeys(rule for rule, _ in those):
        found = [number(those[rule, attack]) for attack in attacks]
        table.add_row(escape(rule), *(f"{100 * value:.1f}" if math.isfinite(value) else "-" for value in found))
    return table


def verdicts(pages: Sequence[Page]) -> Table:
    """The verdict of each claim of the paper."""
    table = Table("where", "claim", "verdict", "effect [95 % interval]", pad_edge=False, show_lines=True)
    table.header_style = "bold"
    for page in pages:
        for verdict in page.verdicts:
            table.add_row(page.figure.name, *map(escape, (verdict.claim.says, verdict.text, verdict.effect)))
    return table


def rounds_to_target(found: Standings) -> Table:
    """For each contender of the arena and each dataset, the round from which the target is held."""
    table = _plain("contender", *(dataset.name for dataset in found.datasets), left={"contender"})
    for one in found.contenders:
        table.add_row(escape(one.name), *(found.held(dataset, one) for dataset in found.datasets))
    return table


def run_directories(rows: Iterable[Sequence[str]]) -> Table:
    """A line for each run directory."""
    headings = ("run", "name", "tags", "state", "rounds", "best", "started (UTC)", "algorithms")
    found = list(rows)
    told = [i for i, name in enumerate(headings) if name not in ("name", "tags") or any(row[i] for row in found)]
    table = _plain(*(headings[i] for i in told), left=set(headings) - {"rounds", "best"})
    for column in table.columns:
        column.overflow = "fold"  # a cut name is useless
    for row in found:
        table.add_row(*(escape(row[i]) for i in told))
    names = table.columns[0]  # a name in pieces cannot be copied
    names.no_wrap = _longest(["run", *map(str, names.cells)]) <= console().width // 2
    return table


def words_of(kind: Any) -> list[str]:
    """The words that a setting may be: the choices of Literal["a", "b"] | None, too."""
    kinds = [kind, *get_args(kind)]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def settings(known: Mapping[str, Setting]) -> Table:
    """A line for each setting."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, setting in known.items():
        words = words_of(setting.type)
        choices = f" ({', '.join(words)})" if words else ""
        table.add_row(*map(escape, (f"      {name}", f"= {setting.default}", setting.meaning + choices)))
    return table
