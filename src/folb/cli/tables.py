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
from rich.markup import escape, render
from rich.table import Column, Table

from folb.errors import one_line
from folb.measures import KNOWN, measure
from folb.results import summary as results_of

if TYPE_CHECKING:  # these need jax
    from folb.experiments.plan import Plan
    from folb.experiments.tune import Point
    from folb.results.outcomes import Outcome
    from folb.results.run import Run
    from folb.store.directory import RunDirectory


class Output(Console):
    """Standard output. Its reader may go away, as `head` does: `main` knows that it is not an error."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1


def console() -> Console:
    return Output(width=None if sys.stdout.isatty() else 160)


def show(table: Table) -> None:
    console().print(table, highlight=False)


def show_in_parts(table: Table, keys: int = 1) -> None:
    """Print a table that may be wider than the terminal: as `varying` has it, and `in_parts`."""
    out = console()
    table, same = varying(table, out.width, keys)
    for n, part in enumerate(in_parts(table, out.width, keys)):
        out.print(*([""] if n else []), part, sep="\n", highlight=False)
    if same:
        say(indented(f"the same in every row: {', '.join(same)}", ""))


GAP = 2  # the characters between two columns
RESULTS = {f"final {known.short}" for known in KNOWN.values()}  # they stay, though they may be the same in every row


def varying(table: Table, room: int, keys: int = 1) -> tuple[Table, list[str]]:
    """The table, without the columns that are the same in every row if it is wider than `room`; and these in words."""
    constant = [
        i
        for i, column in enumerate(table.columns)
        if i >= keys and len(set(column.cells)) == 1 < table.row_count and column.header not in RESULTS
    ]
    if _fits(table, room) or len(constant) == len(table.columns) - keys:
        return table, []
    words = [f"{table.columns[i].header}: {render(str(next(iter(table.columns[i].cells))))}" for i in constant]
    return _part(table, [i for i in range(len(table.columns)) if i not in constant]), words


def in_parts(table: Table, room: int, keys: int = 1) -> Iterator[Table]:
    """The table or, if it is wider than `room`, parts with broken headings, each with the first `keys` columns."""
    if _fits(table, room):
        yield table
        return
    widths = [_longest([*_heading(column).split(" "), *map(str, column.cells)]) for column in table.columns]
    parts: list[list[int]] = []
    for i in range(keys, len(widths)):
        if not parts or sum(widths[j] + GAP for j in (*range(keys), *parts[-1])) + widths[i] > room:
            parts.append([])
        parts[-1].append(i)
    for part in parts:
        yield _part(table, [*range(keys), *part], widths)


def _fits(table: Table, room: int) -> bool:
    return sum(_longest([_heading(column), *map(str, column.cells)]) + GAP for column in table.columns) - GAP <= room


def _heading(column: Column) -> str:
    return str(column.header).replace(" %", "\u00a0%")  # not broken there


def _part(table: Table, shown: Sequence[int], widths: Sequence[int] | None = None) -> Table:
    """Some columns of a table; with `widths`, headings are broken into lines of that many characters."""
    cut = Table(box=None, pad_edge=False, header_style="bold")
    for i in shown:
        column = table.columns[i]
        heading = str(column.header) if widths is None else textwrap.fill(_heading(column), widths[i])
        cut.add_column(heading, justify=column.justify, overflow="fold")
    for row in zip(*(table.columns[i].cells for i in shown), strict=True):
        cut.add_row(*row)
    return cut


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts))


def indented(text: str, first: str, others: str | None = None) -> str:
    """Text in lines that fit standard output: the first begins with `first`, the others with `others`."""
    others = first if others is None else others
    wrapper = textwrap.TextWrapper(console().width, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def say(text: str) -> None:
    console().print(text, highlight=False, markup=False)


def files(stored: RunDirectory) -> str:
    """The files of a finished run, the most useful first."""
    names = ("curves.png", "results.json", "rounds.jsonl", "experiment.toml", "model.npz")
    return ", ".join(name for name in names if (stored.path / name).exists())


def summary(planned: Plan) -> str:
    """What is compared in a line, what private algorithms promise, and what is evaluated if that is a sample."""
    federation, experiment = planned.federation, planned.experiment
    note = f" ({federation.note})" if federation.note else ""
    seeds = len(experiment.seeds)
    lines = [
        f"{federation.name}{note}: {federation.N} devices, {len(federation.train.y)} training and "
        f"{len(federation.test.y)} test samples; model {experiment.model}; system {experiment.system}; "
        f"{experiment.rounds} rounds; {seeds} seed{'s' * (seeds > 1)}"
    ]
    for algorithm, rounds in zip(planned.algorithms, planned.rounds, strict=True):
        if (privacy := algorithm.privacy) is not None:  # what it promises
            epsilon = privacy.rounds(federation.N).epsilon(rounds, privacy.delta)
            lines.append(
                f"private ({privacy.name}, {privacy.scheme} draws), noise {privacy.noise:g}: epsilon {epsilon:.3g} "
                f"after {rounds} round{'s' * (rounds != 1)}, with delta {privacy.delta:g}"
                + (f", and one more round would exceed {privacy.epsilon:g}" if rounds < experiment.rounds else "")
                + (f"; {results_of.SECRET}" if not privacy.replay else "")
            )
    if planned.sampling:
        lines.append(f"{planned.sampling} (--evaluate all: on everything)")
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def plain(*headings: str, left: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> Table:
    """A table without lines. All columns hold numbers, except those in `left`."""
    columns = (Column(heading, justify="left" if heading in left else "right") for heading in headings)
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def results(runs: Sequence[Run], target: float, clock: str = "simulated s", rounds: int | None = None) -> Table:
    """One line for each algorithm: medians and means over the seeds; `rounds` is given if not all are done."""
    headings, rows = results_of.table(runs, target, clock, rounds)
    return plain(*headings, left=headings[:1], rows=rows)


def points(points: Sequence[Point], target: float) -> Table:
    """The points of a line search, by rank."""
    known = measure(points[0].judged_by)
    goal = known.goal(target)
    rows = []
    for point in points:
        megabytes = [None if sent is None else sent / 1e6 for sent in point.sent]
        numbers = (
            *map(results_of.arrival, (point.reached, point.held)),
            results_of.arrival(megabytes, ".2f"),
            results_of.arrival(point.seconds, ".0f"),
            f"{point.loss:.4g}",
            known.text(point.accuracy),
        )
        cells = ("diverged", *[""] * (len(numbers) - 1)) if point.diverged else numbers
        rows.append((str(point.rank), point.label, *cells))
    measured = (f"rounds to {goal}", "held from", f"MB to {goal}", f"s to {goal}", "final training loss")
    return plain("rank", "algorithm", *measured, f"final {known.short}", left=["algorithm"], rows=rows)


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
    attacks = list(dict.fromkeys(attack for _, attack in those))
    rows = []
    for rule in dict.fromkeys(rule for rule, _ in those):
        values = [number(those[rule, attack]) for attack in attacks]
        rows.append((rule, *(f"{100 * value:.1f}" if math.isfinite(value) else "-" for value in values)))
    return plain("rule", *attacks, left=["rule"], rows=rows)


BESIDE = 30  # characters for the last column: with fewer it goes below the others


def show_rows(rows: Sequence[Sequence[str]], right: Sequence[int] = (), headed: bool = False) -> None:
    """Print rows of text, the first cell of each uncut; what does not fit stands below it. `right` are numbers."""
    out = console()
    lines = [[one_line(cell) for cell in row] for row in rows]
    widths = _widths(lines)
    taken = sum(widths) + GAP * len(widths)
    for n, (*cells, last) in enumerate(lines):
        spaces = [" " * (width - cell_len(cell)) for width, cell in zip(widths, cells, strict=True)]
        text = (" " * GAP).join(spaces[i] + cell if i in right else cell + spaces[i] for i, cell in enumerate(cells))
        below = [last]
        if taken - GAP > out.width:
            text, below = cells[0], ["  ".join(filter(None, cells[1:])), last]
        elif taken + BESIDE <= out.width and last:
            beside = textwrap.wrap(last, out.width - taken, break_on_hyphens=False)
            text, below = text + " " * GAP + beside[0], []
            text += "".join(f"\n{' ' * taken}{line}" for line in beside[1:])
        whole = "\n".join([text.rstrip(), *(indented(words, "    ") for words in below if words)])
        bold = "bold" if headed and n == 0 else None
        out.print(whole, style=bold, highlight=False, markup=False, soft_wrap=True)


def fit(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all but the last cells of such rows fit beside each other."""
    widths = _widths([[one_line(cell) for cell in row] for row in rows])
    return sum(widths) + GAP * (len(widths) - 1) <= console().width


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [_longest(cells) for cells in zip(*lines, strict=True)][:-1]


def words_of(kind: Any) -> list[str]:
    """The words that a setting may be: the choices of Literal["a", "b"] | None, too."""
    kinds = [kind, *get_args(kind)]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def settings(known: Iterable[Mapping[str, Any]]) -> Table:
    """A line for each setting, as `folb list --json` has it."""
    columns = (Column(no_wrap=True), Column(), Column())
    table = Table(*columns, box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for one in known:
        choices = f" ({', '.join(one['choices'])})" if one["choices"] else ""
        table.add_row(*map(escape, (f"      {one['name']}", f"= {one['default']}", one["meaning"] + choices)))
    return table
