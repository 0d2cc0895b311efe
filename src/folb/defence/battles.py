"""A battle's runs and its stored results: one small file each, so that processes do not disturb each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from folb import atomic
from folb.arena.cells import damaged
from folb.defence.opponents import PACE, Battle
from folb.experiments.draws import Complete, by_algorithm, machines
from folb.experiments.plan import plan
from folb.results import summary
from folb.results.outcomes import outcomes

Found = Mapping[str, Any]  # the results of a battle


def place(home: Path, battle: Battle) -> Path:
    """The file of a battle's results."""
    return home / "results" / f"{battle.name}.json"


def keep(home: Path, battle: Battle, found: Found) -> Path:
    """Write results, and replace earlier ones."""
    atomic.document(place(home, battle), found)
    return place(home, battle)


def read(home: Path, battle: Battle) -> Found | None:
    """The stored results, even of other settings; None if there are none."""
    path = place(home, battle)
    if not path.is_file():
        return None
    try:
        found: Found = json.loads(path.read_bytes())
        n = len(found["seeds"])
        for one in found["attacks"].values():
            if any(len(one[key]) != n for key in ("settled", "backdoor")):
                raise ValueError("an attack has another number of runs than of seeds")
            if "weight" not in one:
                raise ValueError("an attack has no weight")
        if len(found["accuracy"] if battle.share == PACE else found["seeds"]) != n or not found["identity"]:
            raise ValueError("it has another number of curves than of seeds")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
    return found


def stored(home: Path, battle: Battle) -> Found | None:
    """The stored results, if they are there and fit."""
    found = read(home, battle)
    return found if found is not None and found["identity"] == battle.identity else None


def fought(battle: Battle, complete: Complete) -> Found:
    """Run a battle, and return its results as a JSON-ready document."""
    planned = plan(battle.experiment)
    directory = complete(planned, battle.name)
    groups = by_algorithm(planned, [directory.runs()])
    found: dict[str, Any] = {
        "dataset": battle.dataset.name,
        "rule": battle.rule.name,
        "share": battle.share,
        "identity": battle.identity,
        "devices": planned.federation.N,
        "note": planned.note,
        "ran_on": machines([directory]),
        "seeds": list(planned.experiment.seeds),
        "rounds": planned.experiment.rounds,
        "attacks": {},
    }
    for group in groups:
        gained = outcomes(group)[0]
        found["attacks"][gained.attack] = {
            "settled": [summary.short(run.settled) for run in group],
            "final": [summary.short(run.final) for run in group],
            "diverged": [bool(run.diverged) for run in group],
            "weight": summary.short(gained.share),
            "largest_weight": summary.short(gained.worst),
            "backdoor": [summary.short(float(run.records["attack"][-1, 2])) for run in group],
        }
    if battle.share == PACE:
        found["accuracy"] = [[summary.short(float(value), 4) for value in run.test_accuracy] for run in groups[0]]
    return found
