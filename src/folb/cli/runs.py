"""`folb runs` and `folb show`: what runs there are, and one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folb.cli import tables
from folb.errors import InputError
from folb.store import directory, lock
from folb.store.directory import RunDirectory
from folb.store.round_lines import trouble as _trouble

if TYPE_CHECKING:
    from rich.console import Console


TROUBLE = 20  # lines of it that are shown


def runs(console: Console) -> None:
    """Print a line for each run directory."""
    from rich.table import Table

    found = directory.listed()
    if not found:
        console.print(f"no runs in {directory.home()}", highlight=False, markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "state", "rounds", "best", "started", "algorithms"):
        table.add_column(heading, justify="right" if heading in ("rounds", "best") else "left", overflow="fold")
    for path in found:
        try:
            table.add_row(*map(_escaped, _row(directory.read(path))))
        except InputError as error:  # one that cannot be read does not hide the others
            table.add_row(_escaped(path.name), "unreadable", "", "", "", _escaped(error))
    console.print(table, highlight=False)


def _escaped(text: object) -> str:
    from rich.markup import escape

    return escape(str(text))


def _row(stored: RunDirectory) -> tuple[str, ...]:
    done, total, best = progress(stored)
    return (
        stored.name,
        stored.state,
        f"{done:,} of {total:,}",
        "" if best is None else f"{100 * best:.1f} %",
        stored.environment["started"].replace("T", " ")[:16],
        ", ".join(dict.fromkeys(run["name"] for run in stored.environment["runs"])),
    )


def progress(stored: RunDirectory) -> tuple[int, int, float | None]:
    """Rounds done of all runs, rounds in all, and the best test accuracy so far."""
    lines, _ = stored.rounds()
    accuracies = [line["test_accuracy"] for line in lines if line.get("test_accuracy") is not None]
    return len(lines), len(stored.environment["runs"]) * stored.experiment["rounds"], max(accuracies, default=None)


def show(stored: RunDirectory, console: Console) -> None:
    """Print a run: its state, its results so far, the experiment, and how to go on."""
    done, total, _ = progress(stored)
    environment = stored.environment
    lines = [
        f"{stored.name}: {stored.state}, {done:,} of {total:,} rounds; {environment['device']}, "
        f"folb {environment['folb']}, jax {environment['jax']}, started {environment['started']}",
        environment["note"] and f"the data: {environment['note']}",
    ]
    if stored.state == "running" and (holder := lock.holder(stored.path)):
        lines.append(f"run by process {holder.get('pid')} on {holder.get('host')}: {holder.get('command')}")
    if stored.state == "interrupted":
        lines.append(f"go on with: {stored.resume_command}")
    console.print("\n".join(filter(None, lines)) + "\n", highlight=False, markup=False)
    begun = stored.begun()
    if begun:
        console.print(tables.table(begun, stored.experiment["target"], stored.clock), highlight=False)
    trouble = [f"round {line['round']}: {words}" for line in stored.rounds()[0] for words in _trouble(line)]
    if trouble:
        console.print(f"\n{len(trouble):,} refused, failed or abandoned, the last:", highlight=False, markup=False)
        console.print("\n".join(f"  {words}" for words in trouble[-TROUBLE:]), highlight=False, markup=False)
    console.print("\n" + stored.experiment_text, highlight=False, markup=False)
