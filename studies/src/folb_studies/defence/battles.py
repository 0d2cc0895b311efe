"""A battle's runs and its stored results."""

from __future__ import annotations

from typing import Any

from folb.errors import InputError
from folb.experiments.tune import by_algorithm
from folb.results import summary
from folb.results.outcomes import outcomes
from folb_studies.defence.opponents import PACE, Battle
from folb_studies.draws import Complete, machines, plan_of
from folb_studies.results import Cell, Results


def read(results: Results, battle: Battle) -> Cell | None:
    """The stored results, even of other settings; None if there are none."""
    cell = results.get(battle.name)
    if cell is None:
        return None
    try:
        n = len(cell["seeds"])
        for one in cell["attacks"].values():
            if any(len(one[key]) != n for key in ("settled", "backdoor")):
                raise ValueError("an attack has another number of runs than of seeds")
            if "weight" not in one:
                raise ValueError("an attack has no weight")
        if len(cell["accuracy"] if battle.share == PACE else cell["seeds"]) != n or not cell["identity"]:
            raise ValueError("it has another number of curves than of seeds")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise results.damaged(battle.name, error) from error
    return cell


def stored(results: Results, battle: Battle) -> Cell | None:
    """The stored results, if they are there and fit."""
    cell = read(results, battle)
    return cell if cell is not None and cell["identity"] == battle.identity else None


def check(battle: Battle) -> None:
    """Plan a battle without fighting it: a mistake is an error before any is fought. Too small a K shows later."""
    try:
        plan_of(battle.experiment)
    except InputError as error:
        if error.field != "select.K":
            raise


def fought(battle: Battle, complete: Complete) -> Cell:
    """Run a battle, and return its results as a JSON-ready document."""
    planned = plan_of(battle.experiment)
    directory = complete(planned, battle.name)
    groups = by_algorithm(planned, [directory.runs()])
    cell: dict[str, Any] = {
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
        cell["attacks"][gained.attack] = {
            "settled": [summary.short(run.settled) for run in group],
            "final": [summary.short(run.final) for run in group],
            "diverged": [bool(run.diverged) for run in group],
            "weight": summary.short(gained.share),
            "largest_weight": summary.short(gained.worst),
            "backdoor": [summary.short(float(run.records["attack"][-1, 2])) for run in group],
        }
    if battle.share == PACE:
        cell["accuracy"] = [[summary.short(float(value), 4) for value in run.test_accuracy] for run in groups[0]]
    return cell
