"""`folb defend`: rules against attacks on datasets, and what each rule loses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from folb.cli import options as common
from folb.errors import InputError


def add(commands: Any) -> None:
    """`folb defend`."""
    defend = commands.add_parser("defend", help="run robust rules on datasets under all attacks: which loses least")
    common.add_pages(defend, ("dataset", "mnist-*"), "docs/attacks if it exists, else defence; defence with --datasets")
    defend.add_argument("--rules", metavar="A,B", help="these rules, such as median,krum (all)")
    defend.add_argument("--shares", metavar="A,B", help="these percentages of liars; 0: the pace without liars (all)")
    defend.add_argument(
        "--datasets", metavar="FILE", type=Path, help="a file of datasets of your own, as datasets.toml is"
    )
    defend.set_defaults(handle=_defend)


def _defend(options: argparse.Namespace) -> None:
    from folb import defence
    from folb.arena.entries import chosen
    from folb.cli import tables
    from folb.cli.running import completing, tell
    from folb.defence import defence_pages, losses, opponents
    from folb.defence.losses import Losses

    home = options.out or (defence.home() if options.datasets is None else Path("defence"))
    everywhere, everyone = opponents.datasets(options.datasets), opponents.rules()
    if options.pages_only:
        for name in ("only", "rules", "shares"):
            if getattr(options, name):
                raise InputError(name, getattr(options, name), "does not go with --pages-only, which writes all pages")
        common.check_pages(home)
    else:
        datasets = chosen(everywhere, options.only or ["*"], "only")
        rules = chosen(everyone, ("*" if options.rules is None else options.rules).split(","), "rules")
        shares, known = _shares(options.shares), {0, *(share for one in datasets for share in one.shares)}
        if shares is not None and (not shares or not known.issuperset(shares)):
            raise InputError("shares", options.shares, f"should be some of {', '.join(map(str, sorted(known)))}")
        common.use_compilation_cache()
        defence.carry_out(opponents.battles(datasets, rules, shares), home, completing(options), tell)
    found = Losses(everywhere, everyone, home)
    defence_pages.write(found, home)
    if options.json:
        print(json.dumps(losses.document(found)))
        return
    tables.show_in_parts(tables.largest_losses(found))
    for dataset in everywhere:
        if dataset.goal:
            tables.say(f"\n{dataset.title}. {' '.join(defence_pages.sentences(found, dataset))}")
    tables.say(f"\nin {home}: {defence_pages.PAGE}, {defence_pages.PICTURE}, results/")


def _shares(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError("shares", text, "should be percents, such as 0,20") from None
