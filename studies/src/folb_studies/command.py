"""What the commands of the studies share: their options, and runs under a progress bar."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from folb.cli import options as common
from folb.cli.running import completed, same_command
from folb.errors import InputError, choose
from folb.pace import tell
from folb_studies.results import FILE, Results

if TYPE_CHECKING:  # these need jax
    from folb.experiments.plan import Plan
    from folb.store.directory import RunDirectory
    from folb_studies.draws import Complete


def add_pages(command: argparse.ArgumentParser, only: tuple[str, str], out: str) -> None:
    """The options of a command that makes pages: what --only chooses, and where --out is by default."""
    name, such_as = only
    command.add_argument(
        "--only", metavar=name.upper(), action="append", help=f"only these {name}s, such as {such_as} (may be repeated)"
    )
    command.add_argument(
        "--pages-only", action="store_true", help="run nothing; write the pages from the stored results"
    )
    command.add_argument("--out", metavar="DIR", type=Path, help=f"where pages and results go ({out})")
    command.add_argument("--results", metavar="FILE", type=Path, help=f"the stored results (DIR/{FILE})")
    command.add_argument(
        "--cell", metavar="NAME", help="print this one of the stored results, say whether it is up to date, and end"
    )
    command.add_argument("--drop", metavar="NAME", help="forget this one of the stored results, and end")
    command.add_argument("--json", action="store_true", help=common.JSON)
    common.add_devices(command)


def add_datasets(command: argparse.ArgumentParser, ours: str) -> None:
    """The option --datasets, of a study with a file of datasets: `ours` is where that is in the package."""
    command.add_argument(
        "--datasets", metavar="FILE", type=Path, help=f"a file of datasets of your own; ours is folb_studies/{ours}"
    )


def looked(options: argparse.Namespace, results: Results, outdated: Callable[[str], str]) -> bool:
    """Whether the command is only about one cell; then it is done. `outdated` says what is old about a cell, or ""."""
    if options.drop is not None:
        results.drop([options.drop])
        tell(f"{options.drop} is forgotten; the command that made it runs it again")
    if options.cell is not None:
        why = outdated(choose("cell", options.cell, list(results.cells())))
        tell(f"{options.cell} is {f'outdated: {why}' if why else 'up to date'}")
        print(json.dumps(results.get(options.cell), indent=2))
    return options.drop is not None or options.cell is not None


def check_pages(results: Results) -> None:
    """Raise an `InputError` if there are no results to make pages from."""
    if not results.cells():
        raise InputError("results", str(results.path), "has no results to make pages from")


def check_named(results: Results, named: Collection[str]) -> None:
    """Raise an `InputError` if results are of other datasets than our file has: pages of ours would replace theirs."""
    cells = list(results.cells().values())
    if other := [str(cell["dataset"]) for cell in cells if cell.get("dataset", "") not in {*named, ""}]:
        names = ", ".join(dict.fromkeys(other))
        raise InputError("results", str(results.path), f"{len(other)} stored cells are of {names}: add --datasets FILE")


def completing(options: argparse.Namespace) -> Complete:
    """A function that runs each of many experiments of one command. The same command resumes them."""
    from folb.experiments import execute

    accelerators = common.accelerators(options)

    def complete(planned: Plan, about: str) -> RunDirectory:
        work = partial(execute.execute, planned, accelerators=accelerators, keep_model=False)
        return completed(options, work, about=about, command=same_command(), say=False)[0]

    return complete
