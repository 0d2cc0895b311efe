"""What the report page shows of run directories, as one JSON-ready document."""

from __future__ import annotations

import base64
import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from folb.core import accountant
from folb.measures import ACCURACY, FAIRNESS, REGISTRY, is_regression, measure, measured
from folb.report.looks import looks, title
from folb.report.together import together
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import EXPERIMENT, RunDirectory
from folb.store.experiment_file import read_text
from folb.store.round_lines import by_run, is_evaluated, trouble

ENTRIES = 2_000_000  # the most device entries in a report: about 35 MB
TROUBLE = 1000  # the most lines about trouble for each run: the last ones
REPEAT = "To repeat the experiment from the file above:"
UNMEASURED = "unmeasured"  # a loss, in the page's columns
LOST, REJECTED, TIMES = 1, 2, 4  # in a flag byte: two bits, then the number of times drawn


def view(stored: Sequence[RunDirectory], holdings: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The document of a report on run directories, with what the devices of each hold, if given."""
    room = ENTRIES
    experiments, runs = [], []
    for n, one in enumerate(map(replace, stored)):  # a copy, whose lines are not kept
        runs.append(one.runs())
        lines, labels = one.rounds()[0], [about["algorithm"] for about in one.environment["runs"]]
        sizes = [sum(len(line.get("devices", ())) for line in own) for own in by_run(lines, len(labels))]
        chosen = set()
        # as long as they fit: the records of the first seed of every algorithm, then of the second seeds, and so on
        for i in sorted(range(len(sizes)), key=lambda i: labels[:i].count(labels[i])):
            if 0 < sizes[i] <= room:
                chosen.add(i)
                room -= sizes[i]
        experiments.append(
            described(one)
            | {
                "table": table(one, runs[-1]),
                "measures": measures(one, runs[-1]),
                "columns": columns(one, lines, chosen),
                "left_out": [i for i, size in enumerate(sizes) if size and i not in chosen],
                "holdings": holdings[n] if holdings else None,
            }
        )
    if len(experiments) == 1:
        return {"title": experiments[0]["title"], "experiments": experiments}
    title = f"{len(experiments)} experiments"
    return {"title": title, "experiments": experiments, "together": together(stored, runs)}


def columns(stored: RunDirectory, lines: Iterable[dict[str, Any]], recorded: Container[int]) -> list[dict[str, Any]]:
    """Lines of rounds.jsonl as the page needs them, by run; with the values of devices for the runs in `recorded`."""
    by, runs = stored.measure.name, by_run(lines, len(stored.environment["runs"]))
    return [_curves(own, by) | ({"records": _records(own)} if i in recorded else {}) for i, own in enumerate(runs)]


def _curves(lines: Sequence[dict[str, Any]], judged_by: str) -> dict[str, Any]:
    """A value per round, or per evaluation."""
    evaluated = [n for n, line in enumerate(lines) if is_evaluated(line)]
    own = [lines[n] for n in evaluated]
    figures = [
        ({ACCURACY: line["test_accuracy"]} if "test_accuracy" in line else {}) | line.get("metrics", {}) for line in own
    ]

    def curve(name: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
        return [_short(row.get(name, UNMEASURED)) for row in rows]

    names = dict.fromkeys(chain(*figures))
    metrics = {name: curve(name, figures) for name in names if name != judged_by}
    return {
        "rounds": [line["round"] for line in lines],
        "bytes": [line["bytes_up"] + line["bytes_down"] for line in lines],
        "up": [line["bytes_up"] for line in lines],  # of these bytes
        "seconds": [_short(line["seconds"]) or 0.0 for line in lines],
        "evaluated": evaluated,  # positions in `rounds`
        "judged": curve(judged_by, figures),
        "loss": curve("train_loss", own),
        **({"metrics": metrics} if metrics else {}),
        "trouble": [(line["round"], words) for line in lines for words in trouble(line)][-TROUBLE:],
    }


def _records(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values of devices, packed."""
    counts = [len(line.get("devices", ())) for line in lines]
    flags = [
        LOST * (k in lost) | REJECTED * (k in rejected) | TIMES * min(times, 63)
        for line in lines
        if line.get("devices")
        for lost, rejected in [(set(line["lost_devices"]), set(line["rejected_devices"]))]
        for k, times in zip(line["devices"], line["times"], strict=True)
    ]

    def packed(name: str, kind: str) -> str:
        parts = [line.get(name, [None] * count) for line, count in zip(lines, counts, strict=True)]
        return _packed(list(chain(*parts)), kind)

    own = any(value is not None for line in lines for value in line.get("own", ()))
    return {
        "counts": _packed(counts, "<u4"),
        "devices": packed("devices", "<u4"),
        "weights": packed("weights", "<f4"),
        "gamma": packed("gamma", "<f4"),
        "flags": _packed(flags, "u1"),
        **({"own": packed("own", "<f4")} if own else {}),
    }


def _short(value: Any) -> Any:
    """In the fewest digits from which the same 32-bit number is read again; a word or None stays."""
    return value if value is None or isinstance(value, str) else float(str(np.float32(value)))


def _packed(values: Sequence[float | None], kind: str) -> str:
    array = np.array(values, float if kind == "<f4" else kind).astype(kind)  # None becomes NaN
    return base64.b64encode(array.tobytes()).decode("ascii")


def described(stored: RunDirectory) -> dict[str, Any]:
    """Everything that stays the same from round to round, and the state."""
    experiment, environment = stored.experiment, stored.environment
    dataset, model = (os.path.basename(experiment[name]) or experiment[name] for name in ("dataset", "model"))
    runs, state, judged = environment["runs"], stored.state, stored.measure.name
    own = looks(about["algorithm"] for about in runs)
    pairs = [(about["algorithm"], about["seed"]) for about in runs]
    return {
        "name": stored.name,
        "identity": f"{environment['identity']} {environment['started']}",
        "title": title(dataset, model),
        "note": environment["note"],
        "state": state,
        "differs": stored.differs,
        "rounds": experiment["rounds"],
        "target": experiment["target"],
        "devices": environment["devices"],
        "records": experiment["records"],
        "runs": [{"algorithm": name, "seed": seed, "style": own[name].style} for name, seed in pairs],
        "facts": [
            ["dataset", dataset],
            ["devices", f"{environment['devices']:,}"],
            ["model", model],
            ["system", experiment["system"]],
            ["objective", experiment["objective"]],
            ["rounds", f"{experiment['rounds']:,}"],
            ["seeds", str(len(experiment["seeds"]))],
            ["target", stored.measure.goal(experiment["target"])],
            *([] if judged == ACCURACY else [["judged by", stored.measure.words]]),
            *([["metrics", ", ".join(experiment["metrics"])]] if experiment.get("metrics") else []),
            *([["privacy", private]] if (private := _private(runs)) else []),
        ],
        "own": _own(stored),
        "toml": read_text(stored.path / EXPERIMENT),
        "environment": [[key, str(value)] for key, value in environment.items() if key != "runs" and value != ""],
        "again": _again(stored, state),
    }


def measures(stored: RunDirectory, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The measures that the page can show besides the training loss. The one that judges the runs comes first."""
    names = [name for name in stored.experiment.get("metrics", ()) if ".py:" not in name]
    users = (known for run in runs[:1] for known in run.shown.values())
    asked = measured([*(REGISTRY.get(name) or measure(name) for name in names), *users])
    return [
        {"name": known.name, "title": known.axis[:1].upper() + known.axis[1:], "short": known.short}
        | {"factor": known.factor, "unit": known.unit, "lower": known.lower}
        for known in (stored.measure, *summary.metrics(runs, asked))
    ]


def _private(runs: Sequence[dict[str, Any]]) -> str:
    """Who adds the noise, and delta: an epsilon says nothing without delta."""
    said = {}
    for own in (about["parameters"] for about in runs if about["parameters"].get("privacy")):
        secret = f"; {summary.SECRET}" if own.get("privacy.replay") is False else ""
        said[f"{own['privacy']}, delta {own.get('privacy.delta') or accountant.DELTA}{secret}"] = True
    return "; ".join(said)


def _own(stored: RunDirectory) -> dict[str, Any] | None:
    """How the page shows each device's own figure; None if it was not recorded."""
    if not (stored.experiment["records"] and FAIRNESS in stored.experiment.get("metrics", ())):
        return None
    if is_regression(stored.measure.name):
        return {"title": "Its own mean squared error", "factor": 1.0, "name": "Own error"}
    return {"title": "Its own accuracy (%)", "factor": 100.0, "name": "Own accuracy"}


def _again(stored: RunDirectory, state: str) -> list[list[str]]:
    """How to repeat or resume a run: words and commands."""
    if stored.deployed:
        words = "To resume it after its last round, submit it to Flower again with this directory:"
        return [[words, stored.resume_command]]
    secret = any(about["parameters"].get("privacy.replay") is False for about in stored.environment["runs"])
    opening = "To run the experiment from the file above with other draws and noise:" if secret else REPEAT
    ways = [[opening, f"folb run {EXPERIMENT}"]]
    return ways + ([["To resume the interrupted run:", stored.resume_command]] if state == "interrupted" else [])


def table(stored: RunDirectory, runs: Sequence[Run]) -> dict[str, Any]:
    """The table of `folb show`."""
    experiment = stored.experiment
    headings, rows = summary.table(stored.begun(runs), experiment["target"], stored.clock, experiment["rounds"])
    return {"headings": headings, "rows": rows}
