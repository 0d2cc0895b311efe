"""`folb list`: every part by name, with its settings, their defaults, its costs and its paper."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from folb.cli.options import JSON

if TYPE_CHECKING:
    from folb.core.part import Part, Slot
    from folb.experiments.settings import Setting


def add(commands: Any) -> None:
    """`folb list`."""
    listing = commands.add_parser("list", help="list algorithms, their parts, datasets, models and system models")
    listing.add_argument(
        "what",
        nargs="?",
        help="algorithms, parts, datasets, models, systems, or one name: with all settings; server: all server steps",
    )
    listing.add_argument("--json", action="store_true", help=JSON)
    listing.set_defaults(handle=_list)


class Section(NamedTuple):
    """Things of one kind, by name, and what to say of one besides its first line."""

    title: str
    things: Mapping[str, Callable[..., Any]]
    more: Callable[[str], str]


def _list(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.core.algorithm import SLOTS
    from folb.errors import choose

    sections = _sections()
    wanted = options.what
    names = {name: kind for kind, section in sections.items() for name in section.things}
    kinds = list(dict.fromkeys(kind.partition(":")[0] for kind in sections))
    if wanted is not None:
        choose("list", wanted, [*kinds, "parts", *names, *SLOTS])
    if options.json:
        print(json.dumps(_document(sections, wanted)))
    elif wanted is None:
        for kind, section in sections.items():
            _show(section, settings=kind == "systems")
        _common()
        tables.say("`folb list NAME` shows the settings of one of these, and `folb list parts` what they are made of.")
    elif wanted == "parts":
        _parts()
    elif wanted in SLOTS:
        _slot(SLOTS[wanted])
    elif wanted in kinds:
        for kind, section in sections.items():
            if kind.partition(":")[0] == wanted:
                _show(section, settings=True)
        if wanted == "algorithms":
            _common()
    else:
        section = sections[names[wanted]]
        _show(section._replace(things={wanted: section.things[wanted]}), settings=True)
        if names[wanted].startswith("algorithms"):
            _common(but=section.things[wanted])


def _document(sections: Mapping[str, Section], wanted: str | None) -> dict[str, Any]:
    """What is listed, for a program: things of each kind, and the settings that all algorithms have."""
    from folb.core.algorithm import SLOTS
    from folb.experiments.settings import common_settings, first_line

    if wanted == "parts":
        return {"parts": {title.partition(":")[0]: parts for title, parts in _kinds_of_parts().items()}}
    if wanted in SLOTS:
        slot = SLOTS[wanted]
        own = [
            {"name": name, "says": first_line(kind), "settings": _settings(_fields(slot, kind))}
            for name, kind in slot.parts.items()
        ]
        return {"slot": wanted, "says": slot.meaning, "parts": own, "settings": _settings(_fields(slot, slot.record))}
    document: dict[str, Any] = {}
    for place, section in sections.items():
        kind, _, group = place.partition(":")
        for name, constructor in section.things.items():
            if wanted in (None, kind, name):
                document.setdefault(kind, []).append(_thing(name, constructor, group, section.more(name)))
    if "algorithms" in document:
        document["common_settings"] = _settings(common_settings())
    return document


def _thing(name: str, constructor: Callable[..., Any], group: str, more: str) -> dict[str, Any]:
    from folb.experiments.settings import first_line
    from folb.experiments.settings import settings as settings_of

    about = {"name": name, "group": group, "says": first_line(constructor), "more": more}
    return {key: text for key, text in about.items() if text} | {"settings": _settings(settings_of(constructor))}


def _settings(known: Mapping[str, Setting]) -> list[dict[str, Any]]:
    from folb.cli.tables import words_of
    from folb.results.summary import plain

    defaults = plain({name: one.default for name, one in known.items()})
    return [
        {"name": name, "default": defaults[name], "meaning": one.meaning, "choices": words_of(one.type)}
        for name, one in known.items()
    ]


def _sections() -> dict[str, Section]:
    from folb.core.algorithms import ALGORITHMS, GROUPS
    from folb.data import DATASETS
    from folb.experiments.systems import SYSTEMS
    from folb.models import MODELS

    facts = {
        f"algorithms:{title}": Section(f"Algorithms: {title}", {name: ALGORITHMS[name] for name in names}, _costs)
        for title, names in GROUPS.items()
    }
    return facts | {
        "datasets": Section("Datasets", DATASETS, _usual),
        "models": Section("Models", MODELS, lambda name: ""),
        "systems": Section("System models", SYSTEMS, lambda name: ""),
    }


def _costs(name: str) -> str:
    """What an algorithm sends and remembers, with its usual settings."""
    from folb.core.algorithms import ALGORITHMS
    from folb.core.costs import costs

    spent = costs(ALGORITHMS[name]())
    kept = [(spent.server, ""), (spent.device, " for each device")]
    words = " and ".join(size + whose for size, whose in kept if size != "nothing")
    return f"up {spent.up}; down {spent.down}; the server keeps {words or 'nothing'}"


def _usual(dataset: str) -> str:
    """The defaults of a dataset."""
    from folb.data import defaults

    usual = defaults(dataset)
    settings = f"local.lr {usual.lr:g}, local.mu {usual.mu:g} for fedprox"
    return f"unless set: model {usual.model}, {settings}, target {usual.target:g}"


def _show(section: Section, *, settings: bool) -> None:
    from folb.cli import tables
    from folb.experiments.settings import first_line
    from folb.experiments.settings import settings as settings_of

    console = tables.console()
    console.print(f"[bold underline]{section.title}[/bold underline]", highlight=False)
    for name, constructor in section.things.items():
        _entry(name, first_line(constructor))
        if more := section.more(name):
            tables.say(tables.indented(more, "      "))
        if settings and (known := settings_of(constructor)):
            tables.show(tables.settings(known))
    console.print()


def _entry(name: str, says: str) -> None:
    """A name and what it is; further lines are indented below it."""
    from rich.text import Text

    from folb.cli import tables

    line = Text(tables.indented(f"{name}  {says}", "  ", "      "))
    line.stylize("bold", 2, 2 + len(name))
    tables.console().print(line, highlight=False)


def _common(but: Callable[..., Any] | None = None) -> None:
    """The settings of every algorithm, without those that one has with defaults of its own."""
    from folb.cli import tables
    from folb.experiments.settings import common_settings, settings

    own = {} if but is None else settings(but)
    tables.console().print("[bold underline]Settings of every algorithm[/bold underline]", highlight=False)
    tables.show(tables.settings({name: known for name, known in common_settings().items() if name not in own}))
    tables.say("")


def _kinds_of_parts() -> dict[str, dict[str, str]]:
    """What algorithms are made of, slot by slot."""
    from folb import measures
    from folb.core.algorithm import SLOTS
    from folb.experiments.settings import first_line

    kinds = {
        f"{name}: {slot.meaning.partition(';')[0]}": {part: first_line(kind) for part, kind in slot.parts.items()}
        for name, slot in SLOTS.items()
    }
    return kinds | {"metrics: what --metrics measures besides the accuracy": measures.listed()}


def _fields(slot: Slot[Any], kind: type[Part] | None) -> dict[str, Setting]:
    """The settings of a part, or of what the slot has besides, by their paths."""
    from folb.core.part import described, settings_of
    from folb.experiments.settings import setting

    if kind is None:
        return {}
    defaults, hints = settings_of(kind), described(kind)
    return {slot.spelt(name): setting(slot.spelt(name), hint, defaults[name].default) for name, hint in hints.items()}


def _slot(slot: Slot[Any]) -> None:
    """The parts of a slot with their settings, then those that it has whatever the part."""
    from folb.cli import tables
    from folb.experiments.settings import first_line

    console = tables.console()
    console.print(f"[bold underline]{slot.name}: {slot.meaning}[/bold underline]", highlight=False)
    for name, kind in slot.parts.items():
        _entry(name, first_line(kind))
        if known := _fields(slot, kind):
            tables.show(tables.settings(known))
    if known := _fields(slot, slot.record):
        console.print("\n[bold underline]With each of them[/bold underline]", highlight=False)
        tables.show(tables.settings(known))
    path = next(iter(slot.fields), None)
    fields = f", and --set {path}=VALUE sets a field of it" if path else ""
    tables.say(f"\n--set {slot.name}=NAME chooses one{fields}.")


def _parts() -> None:
    from folb.cli import tables

    console = tables.console()
    for title, parts in _kinds_of_parts().items():
        console.print(f"[bold underline]{title}[/bold underline]", highlight=False)
        for name, says in parts.items():
            _entry(name, says)
        console.print()
