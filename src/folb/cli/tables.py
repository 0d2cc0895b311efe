"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from folb.results.run import Run

if TYPE_CHECKING:
    from rich.table import Table

from folb.results.summary import headings, rows


def table(runs: Sequence[Run], target: float, clock: str = "simulated s") -> Table:
    """One line for each algorithm: medians and means over the seeds."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    first, *others = headings(target, clock)
    shown.add_column(first)
    for heading in others:
        shown.add_column(heading, justify="right")
    for row in rows(runs, target):
        shown.add_row(*map(escape, row))
    return shown
