"""`folb reproduce`: the paper's figures and tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from folb.cli import options as common
from folb.errors import InputError


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
    out = "docs/reproduction if it exists, else reproduction; or reproduction-quick"
    common.add_pages(reproduce, ("arm", "table1-mnist-*"), out)
    reproduce.set_defaults(handle=_reproduce)


def _reproduce(options: argparse.Namespace) -> None:
    from folb import paper
    from folb.cli import tables
    from folb.cli.running import completing, tell
    from folb.paper import figure_files

    names = figure_files.chosen(options.names)
    home = options.out or paper.home(options.quick)
    common.use_compilation_cache()
    complete = completing(options)
    if options.pages_only and options.only:
        raise InputError("only", options.only, "chooses what to run, but --pages-only runs nothing")
    if options.pages_only:
        common.check_pages(Path(home))
    else:
        paper.carry_out(names, home, options.quick, complete, tell, options.only or ["*"])
    pages = paper.write(names, home, options.quick)
    if options.json:
        print(json.dumps(paper.document(pages, options.quick)))
        return
    if options.quick:
        tables.say("A quick try: few seeds and draws, fewer rounds, no line search.\n")
    tables.show(tables.verdicts(pages))
    tables.say(f"\nin {home}: README.md, results/, and a page and a picture for each")
