"""`folb defend`: rules against attacks on datasets, and what each rule loses."""

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

    from folb_studies.defence.losses import Losses


def add(commands: Any) -> None:
    """`folb defend`."""
    defend = commands.add_parser("defend", help="run robust rules on datasets under all attacks: which loses least")
    command.add_pages(defend, ("dataset", "mnist-*"), "defence")
    defend.add_argument("--rules", metavar="A,B", help="these rules, such as median,krum (all)")
    defend.add_argument("--shares", metavar="A,B", help="these percentages of liars; 0: the pace without liars (all)")
    command.add_datasets(defend, "defence/datasets.toml")
    defend.set_defaults(handle=_defend)


def _defend(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.pace import tell
    from folb_studies import defence
    from folb_studies.arena.entries import chosen
    from folb_studies.defence import defence_pages, losses, opponents
    from folb_studies.defence.losses import Losses

    home = options.out or Path("defence")
    results = Results(options.results or home / FILE)
    everywhere, everyone = opponents.datasets(options.datasets), opponents.rules()

    def standing() -> Losses:
        return Losses(everywhere, everyone, results, options.datasets)

    if command.looked(options, results, lambda name: standing().outdated(name)):
        return
    if options.pages_only:
        for name in ("only", "rules", "shares"):
            if getattr(options, name):
                raise InputError(name, getattr(options, name), "does not go with --pages-only, which writes all pages")
        command.check_pages(results)
        if options.datasets is None:
            command.check_named(results, [dataset.name for dataset in everywhere])
    else:
        datasets = chosen(everywhere, options.only or ["*"], "only")
        rules = chosen(everyone, ("*" if options.rules is None else options.rules).split(","), "rules")
        shares, known = _shares(options.shares), {0, *(share for one in datasets for share in one.shares)}
        if shares is not None and (not shares or not known.issuperset(shares)):
            raise InputError("shares", options.shares, f"should be some of {', '.join(map(str, sorted(known)))}")
        common.use_compilation_cache()
        battles = opponents.battles(datasets, rules, shares)
        defence.execute_plan(battles, results, command.completing(options), tell, options.datasets)
    outcome = standing()
    defence_pages.write(outcome, home)
    if options.json:
        print(json.dumps(losses.document(outcome)))
        return
    tables.show_in_parts(_largest_losses(outcome))
    for dataset in everywhere:
        if dataset.goal:
            tables.say(f"\n{dataset.title}. {' '.join(defence_pages.sentences(outcome, dataset))}")
    tables.say(f"\nin {home}: {defence_pages.PAGE}, {defence_pages.PICTURE}; results in {results.path}")


def _shares(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError("shares", text, "should be percents, such as 0,20") from None


def _largest_losses(losses: Losses) -> Table:
    """For each rule and each dataset, the largest loss with each share of liars, in points."""
    from rich.markup import escape

    from folb.cli import tables

    columns = [(dataset, share) for dataset in losses.datasets for share in dataset.shares]
    table = tables.plain("rule", *(f"{dataset.name} {share} %" for dataset, share in columns), left={"rule"})
    for rule in losses.rules:
        worst = [losses.largest(dataset, rule, share) for dataset, share in columns]
        table.add_row(escape(rule.name), *("-" if one is None else f"{100 * one[1].value:.1f}" for one in worst))
    return table
