"""`folb list`: every part by name, with its settings, their defaults and its place in the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from rich.console import Console
from rich.table import Table

from folb.core.algorithms import ALGORITHMS
from folb.core.server_step import SERVERS
from folb.core.system import SYSTEMS
from folb.data import DATASETS, defaults
from folb.experiments.plan import common_settings
from folb.experiments.settings import Setting, first_line, settings
from folb.models import MODELS


def show(console: Console) -> None:
    """Print all of them."""
    for title, registry in (
        ("Algorithms", ALGORITHMS),
        ("Datasets", DATASETS),
        ("Models", MODELS),
        ("System models", SYSTEMS),
    ):
        _section(console, title, registry)
        if registry is ALGORITHMS:
            console.print("  [bold]every algorithm[/bold]", highlight=False)
            _settings(console, common_settings())
            console.print("  [bold]server[/bold]  the server's step", highlight=False)
            for name, make in SERVERS.items():
                console.print(f"      {name}: {first_line(make)}", highlight=False, markup=False)
            console.print()


def _section(console: Console, title: str, registry: Mapping[str, Callable[..., Any]]) -> None:
    console.print(f"[bold underline]{title}[/bold underline]", highlight=False)
    for name, constructor in registry.items():
        console.print(f"  [bold]{name}[/bold]  ", end="", highlight=False)
        console.print(first_line(constructor), highlight=False, markup=False)
        if registry is DATASETS:
            usual = defaults(name)
            line = f"      with the model {usual.model}, lr {usual.lr:g}, and mu {usual.mu:g} for fedprox, unless set"
            console.print(line, highlight=False)
        _settings(console, settings(constructor))
    console.print()


def _settings(console: Console, known: Mapping[str, Setting]) -> None:
    if not known:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, setting in known.items():
        choices = f" ({', '.join(get_args(setting.type))})" if get_origin(setting.type) is Literal else ""
        table.add_row(f"      {name}", f"= {setting.default}", setting.meaning + choices)
    console.print(table, highlight=False, markup=False)
