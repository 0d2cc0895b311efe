"""`folb list`: every part by name, with its settings, their defaults, its costs and its paper."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from folb.cli.options import JSON, command

if TYPE_CHECKING:
    from folb.core.part import Part, Slot
    from folb.experiments.settings import Setting

KINDS = {"algorithms": "Algorithms", "datasets": "Datasets", "models": "Models", "systems": "System models"}


def add(commands: Any) -> None:
    listing = command(commands, "list", "list algorithms, their parts, datasets, models and system models", _list)
    says = "algorithms, parts, datasets, models, systems, or one name: with all settings; server: all server steps"
    listing.add_argument("what", nargs="?", help=says)
    listing.add_argument("--json", action="store_true", help=JSON)


def _list(options: argparse.Namespace) -> None:
    document = _document(options.what)
    if options.json:
        print(json.dumps(document))
    elif options.what == "parts":
        _show_parts(document["parts"])
    elif "slot" in document:
        _show_slot(document)
    else:
        _show_things(document, options.what)


def _document(wanted: str | None) -> dict[str, Any]:
    """What is listed: things of each kind, and the settings that all algorithms have; or parts; or a slot's parts."""
    from folb import data, measures, models
    from folb.core.algorithm import SLOTS
    from folb.core.algorithms import ALGORITHMS, GROUPS
    from folb.core.costs import costs
    from folb.errors import choose
    from folb.experiments.plan import SYSTEMS
    from folb.experiments.settings import common_settings, first_line, settings

    def spends(algorithm: str) -> str:  # with its usual settings
        spent = costs(ALGORITHMS[algorithm]())
        kept = [(spent.server, ""), (spent.device, " for each device")]
        words = " and ".join(size + whose for size, whose in kept if size != "nothing")
        return f"up {spent.up}; down {spent.down}; the server keeps {words or 'nothing'}"

    def usual(dataset: str) -> str:
        known = data.defaults(dataset)
        settings = f"local.lr {known.lr:g}, local.mu {known.mu:g} for fedprox"
        return f"unless set: model {known.model}, {settings}, target {known.target:g}"

    groups = {name: title for title, names in GROUPS.items() for name in names}
    things: dict[str, Mapping[str, Any]] = {
        "algorithms": {name: ALGORITHMS[name] for name in groups},
        "datasets": data.DATASETS,
        "models": models.MODELS,
        "systems": SYSTEMS,
    }
    more = {"algorithms": spends, "datasets": usual}
    if wanted is not None:
        choose("list", wanted, [*KINDS, "parts", *(name for known in things.values() for name in known), *SLOTS])
    if wanted == "parts":
        parts = {name: {part: first_line(kind) for part, kind in slot.parts.items()} for name, slot in SLOTS.items()}
        return {"parts": parts | {"metrics": measures.listed()}}
    if wanted in SLOTS:
        slot = SLOTS[wanted]
        own = [
            {"name": name, "says": first_line(kind), "settings": _settings(_fields(slot, kind))}
            for name, kind in slot.parts.items()
        ]
        return {"slot": wanted, "says": slot.meaning, "parts": own, "settings": _settings(_fields(slot, slot.record))}
    document: dict[str, Any] = {}
    for kind, known in things.items():
        for name, made in known.items():
            if wanted not in (None, kind, name):
                continue
            besides = more[kind](name) if kind in more else ""
            about = {"name": name, "group": groups.get(name, ""), "says": first_line(made), "more": besides}
            given = {key: text for key, text in about.items() if text}
            document.setdefault(kind, []).append(given | {"settings": _settings(settings(made))})
    if "algorithms" in document:
        document["common_settings"] = _settings(common_settings())
    return document


def _settings(known: Mapping[str, Setting]) -> list[dict[str, Any]]:
    from folb.cli.tables import words_of
    from folb.results.summary import plain

    defaults = plain({name: one.default for name, one in known.items()})
    return [
        {"name": name, "default": defaults[name], "meaning": one.meaning, "choices": words_of(one.type)}
        for name, one in known.items()
    ]


def _fields(slot: Slot[Any], kind: type[Part] | None) -> dict[str, Setting]:
    """The settings of a part, or of what the slot has besides, by their paths."""
    from folb.core.part import described, settings_of
    from folb.experiments.settings import setting

    if kind is None:
        return {}
    defaults, hints = settings_of(kind), described(kind)
    return {slot.spelt(name): setting(slot.spelt(name), hint, defaults[name].default) for name, hint in hints.items()}


def _show_things(document: dict[str, Any], wanted: str | None) -> None:
    """Everything with the settings of system models alone; or one kind, or one thing, with all settings."""
    from folb.cli import tables

    common = document.pop("common_settings", None)
    for kind, things in document.items():
        for group, entries in groupby(things, lambda one: one.get("group")):
            title = f"{KINDS[kind]}: {group}" if group else KINDS[kind]
            _show(title, entries, with_settings=wanted is not None or kind == "systems")
    if common is not None:
        own = {} if wanted in (None, "algorithms") else {one["name"] for one in document["algorithms"][0]["settings"]}
        _show("Settings of every algorithm", settings=[one for one in common if one["name"] not in own])
    if wanted is None:
        tables.say("`folb list NAME` shows the settings of one of these, and `folb list parts` what they are made of.")


def _show_parts(parts: Mapping[str, Mapping[str, str]]) -> None:
    from folb.core.algorithm import SLOTS

    meanings = {name: slot.meaning.partition(";")[0] for name, slot in SLOTS.items()}
    meanings["metrics"] = "what --metrics measures besides the accuracy"
    for name, own in parts.items():
        _show(f"{name}: {meanings[name]}", [{"name": part, "says": says} for part, says in own.items()])


def _show_slot(document: Mapping[str, Any]) -> None:
    """The parts of a slot with their settings, then those that it has whatever the part."""
    from folb.cli import tables
    from folb.core.algorithm import SLOTS

    name = document["slot"]
    _show(f"{name}: {document['says']}", document["parts"])
    if document["settings"]:
        _show("With each of them", settings=document["settings"])
    path = next(iter(SLOTS[name].fields), None)
    fields = f", and --set {path}=VALUE sets a field of it" if path else ""
    tables.say(f"--set {name}=NAME chooses one{fields}.")


def _show(
    title: str,
    entries: Iterable[Mapping[str, Any]] = (),
    settings: Iterable[Mapping[str, Any]] = (),
    with_settings: bool = True,
) -> None:
    """Names and what they are, each with its settings; then settings of all of them."""
    from rich.text import Text

    from folb.cli import tables

    console = tables.console()
    console.print(f"[bold underline]{title}[/bold underline]", highlight=False)
    for one in entries:
        line = Text(tables.indented(f"{one['name']}  {one['says']}", "  ", "      "))
        line.stylize("bold", 2, 2 + len(one["name"]))
        console.print(line, highlight=False)
        if "more" in one:
            tables.say(tables.indented(one["more"], "      "))
        if with_settings and one.get("settings"):
            tables.show(tables.settings(one["settings"]))
    if settings:
        tables.show(tables.settings(settings))
    console.print()
