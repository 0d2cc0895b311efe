"""`folb arena`: contenders on datasets, everyone tuned with the same budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folb.cli import options as common
from folb.errors import InputError
from folb_studies import command
from folb_studies.results import FILE, Results

if TYPE_CHECKING:  # these take time to load
    from rich.table import Table

    from folb_studies.arena.standings import Standings


def add(commands: Any) -> None:
    """`folb arena`."""
    arena = commands.add_parser(
        "arena",
        help="compare contenders on datasets: all are tuned with the same budget, and winners are run on other seeds",
    )
    command.add_pages(arena, ("dataset", "mnist-*"), "arena")
    arena.add_argument(
        "--contenders",
        metavar="A,B",
        help="these contenders or groups, such as fedavg,folb or classic,ours (all; only fedavg with --contender)",
    )
    arena.add_argument(
        "--contender", metavar="NAME", help="one more, of your own: my_file.py:NAME, or a name of `folb list`"
    )
    common.add_box(arena, " of --contender")
    arena.add_argument("--points", type=int, metavar="N", help="points that each contender may try on a dataset (12)")
    command.add_datasets(arena, "arena/datasets.toml")
    arena.set_defaults(handle=_arena)


def _arena(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.experiments.box import POINTS
    from folb.pace import tell
    from folb_studies import arena
    from folb_studies.arena import arena_pages, entries, standings
    from folb_studies.arena.standings import Standings

    points = POINTS if options.points is None else options.points
    home = options.out or Path("arena")
    results = Results(options.results or home / FILE)
    everywhere, everyone = entries.datasets(options.datasets), entries.contenders()
    if options.contender is not None:
        everyone = entries.with_own(everyone, entries.own(options.contender, common.settings(options.box, "box")))
    elif options.box:
        raise InputError("box", options.box, "is for --contender, a contender of your own")
    datasets = entries.chosen(everywhere, options.only or ["*"], "only")
    usual_others = "*" if options.contender is None else "fedavg"  # the others' results are stored
    others = usual_others if options.contenders is None else options.contenders
    contenders = entries.chosen(everyone, others.split(","), "contenders")
    if options.contender is not None and everyone[-1] not in contenders:
        contenders.append(everyone[-1])

    def standing() -> Standings:
        return Standings(everywhere, everyone, results, points, options.datasets)

    if command.looked(options, results, lambda name: standing().outdated(name)):
        return
    for name in ("only", "contenders"):
        if options.pages_only and getattr(options, name):
            raise InputError(name, getattr(options, name), "does not go with --pages-only, which writes all pages")
    if options.pages_only:
        command.check_pages(results)
        if options.datasets is None:
            command.check_named(results, [dataset.name for dataset in everywhere])
    else:
        common.use_compilation_cache()
        arena.execute_plan(
            datasets, contenders, results, command.completing(options), tell, points, file=options.datasets
        )
    ranks = standing()
    arena_pages.write(ranks, home)
    if options.json:
        print(json.dumps(standings.document(ranks)))
        return
    tables.show_in_parts(_rounds_to_target(ranks))
    for goal in ranks.goals():
        if goal.reached == standings.NOTHING:
            continue
        tables.say(
            f"\n{goal.says}: {'not decided' if goal.met is None else 'met' if goal.met else 'not met'}. {goal.reached}"
        )
    tables.say(f"\nin {home}: README.md, measures.md, settings.md, arena.png; results in {results.path}")


def _rounds_to_target(ranks: Standings) -> Table:
    """For each contender with results and each dataset, the round from which the target is held."""
    from rich.markup import escape

    from folb.cli import tables
    from folb_studies.arena.standings import NOT_RUN

    table = tables.plain("contender", *(dataset.name for dataset in ranks.datasets), left={"contender"})
    for one in ranks.contenders:
        held = [ranks.held(dataset, one) for dataset in ranks.datasets]
        if {*held} != {NOT_RUN}:
            table.add_row(escape(one.name), *held)
    return table
