"""`folb reproduce`: the paper's figures and tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folb.cli import options as common
from folb.errors import InputError
from folb_studies import command
from folb_studies.results import FILE, Results

if TYPE_CHECKING:  # these take time to load
    from rich.table import Table

    from folb_studies.paper.pages import Page


def add(commands: Any) -> None:
    """`folb reproduce`."""
    reproduce = commands.add_parser(
        "reproduce", help="repeat the paper's figures and tables, or others' numbers, with a verdict for each claim"
    )
    reproduce.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="table1, fig2, … fig11, theory, or all of them; averages, codecs, fedlab, fedml, mcmahan, niid_bench, "
        "servers, sketch, waiting, or outside for all of these; or an experiment file of your own",
    )
    reproduce.add_argument("--quick", action="store_true", help="minutes on two cores: few seeds, fewer rounds")
    command.add_pages(reproduce, ("arm", "table1-mnist-*"), "reproduction; or reproduction-quick")
    reproduce.set_defaults(handle=_reproduce)


def _reproduce(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.pace import tell
    from folb_studies import paper
    from folb_studies.paper import figure_files

    names = figure_files.chosen(options.names)
    home = options.out or Path("reproduction-quick" if options.quick else "reproduction")
    results = Results(options.results or home / FILE)
    if command.looked(options, results, lambda name: paper.outdated(names, results, options.quick, name)):
        return
    common.use_compilation_cache()
    complete = command.completing(options)
    if options.pages_only and options.only:
        raise InputError("only", options.only, "chooses what to run, but --pages-only runs nothing")
    if options.pages_only:
        command.check_pages(results)
    else:
        paper.execute_plan(names, results, options.quick, complete, tell, options.only or ["*"])
    pages = paper.write(names, results, home, options.quick)
    if options.json:
        print(json.dumps(paper.document(pages, options.quick)))
        return
    if options.quick:
        tables.say("A quick try: few seeds and draws, fewer rounds, no line search.\n")
    tables.show(_verdicts(pages))
    tables.say(f"\nin {home}: README.md, and a page and a picture for each; results in {results.path}")


def _verdicts(pages: Sequence[Page]) -> Table:
    """The verdict of each claim."""
    from rich.markup import escape
    from rich.table import Column, Table

    where = Column("where", no_wrap=True)
    table = Table(where, "claim", "verdict", "effect [95 % interval]", pad_edge=False, show_lines=True)
    table.header_style = "bold"
    for page in pages:
        for verdict in page.verdicts:
            table.add_row(page.figure.name, *map(escape, (verdict.claim.says, verdict.text, verdict.effect)))
    return table
