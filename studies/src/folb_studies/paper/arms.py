"""The run of an arm: its line search, its draws, and its results.

Every draw is an experiment of its own in the run store. So an interrupted arm resumes where it was, and arms with the
same experiments share their runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from folb.data import source_files as data_files
from folb.errors import InputError
from folb.experiments import tune
from folb.experiments.experiment import Experiment
from folb.experiments.plan import Plan
from folb.experiments.tune import by_algorithm
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import RunDirectory
from folb.typing import NDArray
from folb_studies.draws import Complete, draws_of, machines, plan_of
from folb_studies.paper.checks import CHECKS
from folb_studies.paper.figure_files import Arm, Search
from folb_studies.results import Cell, Results

QUANTILES = (10, 50, 90)


def execute_plan(arm: Arm, complete: Complete) -> dict[str, Any]:
    """Run the arm, or the rest of it, and return its results as a JSON-ready document."""
    about = {"figure": arm.figure, "arm": arm.id, "name": arm.name, "quick": arm.quick}
    if arm.check is not None:
        checked = CHECKS[arm.check](**arm.settings)
        text = json.dumps([arm.check, dict(arm.settings), checked], sort_keys=True)
        identity = hashlib.sha256(text.encode()).hexdigest()
        return about | {"identity": identity, "check": arm.check, "settings": dict(arm.settings), **checked}
    given, chosen = _searched(arm, complete)
    identities: list[str] = []
    directories: list[RunDirectory] = []
    runs: list[tuple[int, Run]] = []
    for draw, experiment in draws_of(given, range(arm.draws), arm.drawn):
        planned = plan_of(experiment)
        where = f"{arm.slug}, draw {draw + 1} of {arm.draws}" if arm.draws > 1 else arm.slug
        there = complete(planned, where)
        runs += [(draw, run) for run in there.runs()]
        identities.append(planned.identity)
        directories.append(there)
    identity = hashlib.sha256("".join(identities).encode()).hexdigest()
    return about | {
        "identity": identity,
        "experiment": _experiment(planned, arm),
        "draws": arm.draws,
        "note": planned.note,
        "devices": planned.federation.N,
        "ran_on": machines(directories),
        "chosen": chosen,
        "printed": dict(arm.printed),
        "varied": dict(arm.varied),
        "evaluated_rounds": runs[0][1].evaluated_rounds.tolist(),
        "algorithms": _algorithms(runs, planned.experiment),
    }


def _searched(arm: Arm, complete: Complete) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of the arm's experiments, with the values that its searches chose, and a record of each search."""
    given = dict(arm.given)
    if given.get("dataset", "").endswith(".json.gz") and not Path(given["dataset"]).is_absolute():
        given["dataset"] = str(_located(given["dataset"]))
    reported, records = Experiment(**given).seeds, []
    settings = dict(given.get("set", {}))
    for search in arm.searches:
        _check_apart(arm, search, reported, settings.get(arm.drawn, 0))
        points = _ranked(arm, search, given, complete)
        values = {key: points[0].algorithm.settings[key] for key in search.grid}
        for name in (search.algorithm, *search.also):
            settings[name] = dict(settings.get(name, {})) | values
        records.append(_record(search, values, points))
    return given | {"set": settings}, records


def _check_apart(arm: Arm, search: Search, seeds: Sequence[int], own: int) -> None:
    """Raise if a search uses a reported draw of the data, or a reported seed if there is only one draw."""
    reported, tried = set(range(arm.draws)) or {own}, set(search.draws) or {own}
    shared = reported & tried if arm.draws else set(search.seeds) & set(seeds) if reported & tried else set()
    if shared:
        expected = f"should be none of the {'draws' if arm.draws else 'seeds'} that are reported"
        raise InputError(f"{arm.slug}: search", sorted(shared), expected)


def _record(search: Search, values: Mapping[str, Any], points: Sequence[tune.Point]) -> dict[str, Any]:
    return {
        "algorithm": search.algorithm,
        "also": list(search.also),
        "values": dict(values),
        "grid": {key: list(options) for key, options in search.grid.items()},
        "seeds": list(search.seeds),
        "draws": list(search.draws),
        "points": [
            {"label": point.label, "rounds_to_target": _rounds(point), "loss": summary.short(point.loss)}
            for point in points
        ],
    }


def _rounds(point: tune.Point) -> float | None:
    return summary.finite([summary.median_round(point.reached)])[0]


def _ranked(arm: Arm, search: Search, given: Mapping[str, Any], complete: Complete) -> list[tune.Point]:
    """The points of the grid from the best to the worst, over all the search's draws and seeds."""
    name = search.algorithm
    # the search runs without the other algorithms, so their settings are left out
    others = {other for other in given.get("algorithms", ()) if other != name} | {"rule.weights"}
    settings = {key: value for key, value in given.get("set", {}).items() if key not in others}
    settings[name] = dict(settings.get(name, {})) | dict(search.grid)
    trying = {**given, "algorithms": [name], "seeds": list(search.seeds), "set": settings}
    trying["rounds"] = search.rounds or given.get("rounds", 100)
    tried: list[Sequence[Run]] = []
    for draw, experiment in draws_of(trying, search.draws, arm.drawn):
        planned = plan_of(experiment)
        tried.append(complete(planned, f"{arm.slug}, line search" + (f", draw {draw}" if search.draws else "")).runs())
    return tune.ranked(planned, [run for group in by_algorithm(planned, tried) for run in group])


def _located(name: str) -> Path:
    path = data_files.directory() / name
    if not path.is_file():
        raise data_files.MissingError("dataset", name, f"is not there: put it in {path.parent}")
    return path


def _experiment(planned: Plan, arm: Arm) -> dict[str, Any]:
    """The experiment of the last draw with all its settings; the dataset has its name from the file."""
    whole = planned.experiment
    settings = {key: value for key, value in whole.set.items() if key != whole.dataset}
    return {
        "dataset": arm.given["dataset"],
        "model": whole.model,
        "system": whole.system,
        "objective": whole.objective,
        "algorithms": list(whole.algorithms),
        "rounds": whole.rounds,
        "seeds": list(whole.seeds),
        "target": whole.target,
        "evaluate_every": whole.evaluate_every,
        "set": {arm.given["dataset"]: whole.set.get(whole.dataset, {})} | settings,
    }


def _algorithms(runs: Sequence[tuple[int, Run]], experiment: Experiment) -> dict[str, Any]:
    """For each algorithm, the quantiles of its curves over runs, and the measures of each run."""
    by_label: dict[str, list[tuple[int, Run]]] = {}
    labels = summary.labels([(run.algorithm, run.parameters) for _, run in runs])
    for label, (draw, run) in zip(labels, runs, strict=True):
        by_label.setdefault(label, []).append((draw, run))
    return {
        label: {
            "accuracy": _quantiles(np.stack([run.test_accuracy for _, run in group])),
            "loss": _quantiles(np.stack([run.train_loss for _, run in group])),
            "runs": {
                "draw": [draw for draw, _ in group],
                "seed": [run.seed for _, run in group],
                "rounds": [run.rounds_to(experiment.target) for _, run in group],
                "final": [summary.short(run.final) for _, run in group],
                "best": [summary.short(run.best) for _, run in group],
                "mean": [summary.short(float(np.mean(run.test_accuracy))) for _, run in group],
                "loss": [summary.short(float(run.train_loss[-1])) for _, run in group],
                "drops": [run.drops for _, run in group],
                "bytes_up": [int(run.bytes_up.sum()) for _, run in group],
                "bytes_down": [int(run.bytes_down.sum()) for _, run in group],
                "seconds": [_short(run.seconds_to(experiment.target)) for _, run in group],
                "lasted": [_short(float(run.seconds.sum())) for _, run in group],
            },
        }
        for label, group in by_label.items()
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else summary.short(seconds)


def _quantiles(curves: NDArray) -> dict[str, list[float | None]]:
    """Quantiles of curves. A loss that is not finite counts as larger than any finite loss."""
    ordered = np.sort(np.where(np.isfinite(curves), curves, np.inf), axis=0)
    places = {q: round(q / 100 * (len(ordered) - 1)) for q in QUANTILES}  # a measured value, not a mixture of two
    return {str(q): [summary.short(value) for value in ordered[place].tolist()] for q, place in places.items()}


def check(results: Results, quick: bool) -> None:
    """Quick tries and full runs do not share a file: their results would replace each other."""
    results.check()
    if any(document.get("quick") is not quick for document in results.cells().values()):
        what = "results of the full setting" if quick else "results of a quick try"
        raise InputError("results", str(results.path), f"holds {what}; should be another file")


def stored(results: Results, arm: Arm) -> Cell | None:
    """The results of an arm, if there are any. Those of an earlier experiment file do not count."""
    document = _read(results, arm)
    return None if document is None or _earlier(document, arm) else document


def earlier(results: Results, arm: Arm) -> str:
    """How the experiment of an arm's results differs from its file, or "". If it differs, the arm must be run again."""
    document = _read(results, arm)
    return "" if document is None else _earlier(document, arm)


def _read(results: Results, arm: Arm) -> Cell | None:
    document = results.get(arm.slug)
    if document is None:
        return None
    try:
        damage = _damage(document, arm)
        _earlier(document, arm)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise results.damaged(arm.slug, error) from error
    if damage:
        raise results.damaged(arm.slug, damage)
    return document


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _spelt_out(key: str, value: Any, spelt: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a setting of an experiment file, or of one of its parts, was used in the run."""
    if isinstance(value, Mapping):
        return all(name in spelt.get(key, {}) and spelt[key][name] == value[name] for name in value)
    taken = [settings[key] for settings in spelt.values() if key in settings]
    return bool(taken) and all(one == value for one in taken)


def _damage(document: Mapping[str, Any], arm: Arm) -> str:
    """What is wrong with stored results by themselves, or "". Results of another form raise an error."""
    if (document["figure"], document["arm"], document["quick"]) != (arm.figure, arm.id, arm.quick):
        return "is of another arm"
    if "check" in document:
        return "" if all(map(len, document["values"].values())) else "has no values"
    runs = len(document["experiment"]["seeds"]) * max(document["draws"], 1)
    evaluated = len(document["evaluated_rounds"])
    for name, algorithm in document["algorithms"].items():
        lengths = {len(values) for values in algorithm["runs"].values()}
        curves = {len(curve) for what in ("accuracy", "loss") for curve in algorithm[what].values()}
        if lengths != {runs} or curves != {evaluated}:
            return f"has incomplete runs of {name}"
    return ""


def _earlier(document: Mapping[str, Any], arm: Arm) -> str:
    """How the experiment of stored results differs from the arm's file, or ""."""
    if arm.check is not None or "check" in document:
        same = document.get("check") == arm.check and document.get("settings") == dict(arm.settings)
        return "" if same else "another check"
    stored, wanted = document["experiment"], Experiment(**arm.given)
    given = {"rounds", "target", "evaluate_every"} | (arm.given.keys() - {"seeds", "set", "evaluate"})
    differing = {key: getattr(wanted, key) for key in given if stored[key] != _listed(getattr(wanted, key))}
    differing |= {key: value for key, value in wanted.set.items() if not _spelt_out(key, value, stored["set"])}
    if differing:
        key = min(differing)
        return f"another {key} than {differing[key]}"
    if document["draws"] != arm.draws or list(stored["seeds"]) != list(wanted.seeds):
        return "other draws or seeds"
    if [_searched_on(one) for one in document["chosen"]] != [_searched_on(vars(one)) for one in arm.searches]:
        return "another line search"
    return ""


def _searched_on(search: Mapping[str, Any]) -> list[Any]:
    """What a line search tried, and on which draws and seeds."""
    grid = {key: list(values) for key, values in search["grid"].items()}
    return [search["algorithm"], list(search["also"]), grid, list(search["draws"]), list(search["seeds"])]
