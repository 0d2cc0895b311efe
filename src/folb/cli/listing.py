"""`folb list`: every part by name, with its settings, their defaults and its place in the paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add(commands: Any) -> None:
    """`folb list`."""
    listing = commands.add_parser(
        "list", help="list algorithms, datasets, models and system models, with their settings"
    )
    listing.set_defaults(handle=_list)


def _list(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.core.algorithms import ALGORITHMS
    from folb.core.server_step import SERVERS
    from folb.core.system import SYSTEMS
    from folb.data import DATASETS
    from folb.experiments.plan import common_settings
    from folb.experiments.settings import first_line
    from folb.models import MODELS

    console = tables.console()
    _section(console, "Algorithms", ALGORITHMS)
    console.print("  [bold]every algorithm[/bold]", highlight=False)
    tables.show(tables.settings(common_settings()))
    console.print("  [bold]server[/bold]  the server's step", highlight=False)
    for name, make in SERVERS.items():
        tables.say(f"      {name}: {first_line(make)}")
    console.print()
    _section(console, "Datasets", DATASETS, _usual)
    _section(console, "Models", MODELS)
    _section(console, "System models", SYSTEMS)


def _usual(dataset: str) -> str:
    """The defaults of a dataset."""
    from folb.data import defaults

    usual = defaults(dataset)
    return f"      with the model {usual.model}, lr {usual.lr:g}, and mu {usual.mu:g} for fedprox, unless set\n"


def _section(
    console: Console,
    title: str,
    registry: Mapping[str, Callable[..., Any]],
    more: Callable[[str], str] = lambda name: "",
) -> None:
    from folb.cli import tables
    from folb.experiments.settings import first_line, settings

    console.print(f"[bold underline]{title}[/bold underline]", highlight=False)
    for name, constructor in registry.items():
        console.print(f"  [bold]{name}[/bold]  ", end="", highlight=False)
        tables.say(first_line(constructor))
        console.print(more(name), end="", highlight=False, markup=False)
        if known := settings(constructor):
            tables.show(tables.settings(known))
    console.print()
