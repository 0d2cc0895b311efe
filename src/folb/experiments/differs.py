"""The choices of an experiment that are not the defaults, in words. They distinguish the runs in a list."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from folb import data
from folb.experiments import box
from folb.experiments.experiment import Experiment
from folb.results.summary import spelt

SHOWN = 6  # the most values of a setting; of more, the first and the last
ELSEWHERE = ("dataset", "model", "set", "box")  # the title has the dataset, and parts have their settings


class Chosen(NamedTuple):
    """A dataset, a model, a system or an algorithm: its usual settings, and those it was given."""

    name: str
    usual: Mapping[str, Any]
    given: Mapping[str, Any]


def differs(experiment: Experiment, parts: Iterable[Chosen]) -> str:
    """The experiment's own choices, as `system=network rounds=200 folb.mu=0.1`; empty if it has none.

    A setting with the same value in every part that has it stands without the part's name.
    """
    by_dataset = data.defaults(experiment.dataset)
    usual = {field.name: field.default for field in fields(Experiment)}
    usual |= {"target": by_dataset.target, "points": box.POINTS, "box_seed": 0}
    words = [f"model={_text(experiment.model)}"] if experiment.model != by_dataset.model else []
    for name, default in usual.items():
        value = getattr(experiment, name)
        if name not in ELSEWHERE and value is not None and value != default:
            words.append(f"{name}={_seeds(value) if name == 'seeds' else _text(value)}")
    own: dict[str, dict[str, str]] = {}  # for each setting, its values by part
    takers: dict[str, set[str]] = {}
    for part in parts:
        for name, default in part.usual.items():
            takers.setdefault(name, set()).add(part.name)
            if name in part.given and part.given[name] != default:
                own.setdefault(name, {})[part.name] = _text(part.given[name])
    for name, values in own.items():
        if len(set(values.values())) == 1 and set(values) == takers[name]:
            words.append(f"{name}={next(iter(values.values()))}")
        else:
            words += [f"{part}.{name}={text}" for part, text in values.items()]
    return " ".join(words)


def _seeds(seeds: tuple[int, ...]) -> str:
    """Their number if they are 0, 1, …, otherwise the seeds."""
    return str(len(seeds)) if seeds == tuple(range(len(seeds))) else _text(seeds)


def _text(value: Any) -> str:
    """A value without spaces; a path without its directories."""
    if isinstance(value, list | tuple):
        texts = list(map(_text, value))
        return ",".join(texts if len(texts) <= SHOWN else [*texts[:2], "…", texts[-1]])
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "_".join(os.path.basename(spelt(value)).split())
