"""What the report page shows of run directories, as one JSON-ready document."""

from __future__ import annotations

import base64
import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from folb.core import accountant
from folb.measures import ACCURACY, FAIRNESS, REGISTRY, Metric, as_shown, is_regression, measure, measured
from folb.report.looks import looks, title
from folb.report.together import together
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import EXPERIMENT, RunDirectory
from folb.store.round_lines import is_evaluated, trouble

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
        everything = columns(one, one.rounds()[0], range(len(one.environment["runs"])))
        chosen = _fitting(everything, one.environment["runs"], room)
        room -= sum(len(everything[i].devices) for i in chosen)
        experiments.append(
            described(one)
            | {
                "table": table(one, runs[-1]),
                "measures": measures(one, runs[-1]),
                "columns": [own.document(i in chosen) for i, own in enumerate(everything)],
                "left_out": [i for i, own in enumerate(everything) if own.devices and i not in chosen],
                "holdings": holdings[n] if holdings else None,
            }
        )
    if len(experiments) == 1:
        return {"title": experiments[0]["title"], "experiments": experiments}
    title = f"{len(experiments)} experiments"
    return {"title": title, "experiments": experiments, "together": together(stored, runs)}


def _fitting(everything: Sequence[Columns], runs: Sequence[dict[str, Any]], room: int) -> set[int]:
    """The runs whose records fit: the first seed of every algorithm, then the second seeds, and so on."""
    seen: dict[str, int] = {}
    turn = []
    for i, about in enumerate(runs):
        turn.append((seen.get(about["algorithm"], 0), i))
        seen[about["algorithm"]] = turn[-1][0] + 1
    chosen = set()
    for _, i in sorted(turn):
        if 0 < len(everything[i].devices) <= room:
            chosen.add(i)
            room -= len(everything[i].devices)
    return chosen


class Columns:
    """The rounds of one run, as the page needs them: a value per round, per evaluation, or per device."""

    def __init__(self, judged_by: str) -> None:
        self.judged_by = judged_by
        self.rounds: list[int] = []
        self.bytes: list[int] = []
        self.up: list[int] = []  # of these bytes
        self.seconds: list[float] = []
        self.evaluated: list[int] = []  # positions in `rounds`
        self.judged: list[float | str | None] = []  # the accuracy, or what the run is judged by
        self.metrics: dict[str, list[float | str | None]] = {}  # the others
        self.loss: list[float | str | None] = []
        self.counts: list[int] = []  # devices of each round
        self.devices: list[int] = []
        self.weights: list[float | None] = []
        self.gamma: list[float | None] = []
        self.own: list[float | None] = []
        self.flags: list[int] = []
        self.trouble: list[tuple[int, str]] = []  # on real devices: the round and what went wrong

    def add(self, line: dict[str, Any], records: bool) -> None:
        """Take a line of rounds.jsonl, with its values of devices only if `records`."""
        if is_evaluated(line):
            accuracy = {ACCURACY: line["test_accuracy"]} if "test_accuracy" in line else {}
            figures = accuracy | line.get("metrics", {})
            for name in figures:
                self.metrics.setdefault(name, [UNMEASURED] * len(self.evaluated))
            for name, values in self.metrics.items():
                values.append(_short(figures.get(name, UNMEASURED)))
            self.judged.append(_short(figures.get(self.judged_by, UNMEASURED)))
            self.loss.append(_short(line.get("train_loss", UNMEASURED)))
            self.evaluated.append(len(self.rounds))
        self.rounds.append(line["round"])
        self.bytes.append(line["bytes_up"] + line["bytes_down"])
        self.up.append(line["bytes_up"])
        self.seconds.append(_short(line["seconds"]) or 0.0)
        self.trouble += [(line["round"], words) for words in trouble(line)]
        devices = line.get("devices", []) if records else []
        self.counts.append(len(devices))
        if devices:
            lost, rejected = set(line["lost_devices"]), set(line["rejected_devices"])
            nothing = [None] * len(devices)
            self.devices += devices
            self.weights += line.get("weights", nothing)
            self.gamma += line.get("gamma", nothing)
            self.own += line.get("own", nothing)
            self.flags += [
                LOST * (k in lost) | REJECTED * (k in rejected) | TIMES * min(times, 63)
                for k, times in zip(devices, line["times"], strict=True)
            ]

    def document(self, records: bool) -> dict[str, Any]:
        """The columns, JSON-ready. The values of devices are packed."""
        names = ("rounds", "bytes", "up", "seconds", "evaluated", "judged", "loss")
        document: dict[str, Any] = {name: getattr(self, name) for name in names}
        metrics = {name: own for name, own in self.metrics.items() if name != self.judged_by}
        document |= {"metrics": metrics} if metrics else {}
        document["trouble"] = self.trouble[-TROUBLE:]
        if records:
            document["records"] = {
                "counts": _packed(self.counts, "<u4"),
                "devices": _packed(self.devices, "<u4"),
                "weights": _packed(self.weights, "<f4"),
                "gamma": _packed(self.gamma, "<f4"),
                "flags": _packed(self.flags, "u1"),
            }
            if any(value is not None for value in self.own):
                document["records"]["own"] = _packed(self.own, "<f4")
        return document


def columns(stored: RunDirectory, lines: Iterable[dict[str, Any]], recorded: Container[int]) -> list[Columns]:
    """Lines of rounds.jsonl by run; with the values of devices for the runs in `recorded`."""
    by_run = [Columns(stored.measure.name) for _ in stored.environment["runs"]]
    for line in lines:
        by_run[line["run"]].add(line, line["run"] in recorded)
    return by_run


def _short(value: Any) -> Any:
    """The fewest digits from which the same 32-bit number is read again; a word or None stays."""
    return value if value is None or isinstance(value, str) else float(str(np.float32(value)))


def _packed(values: Sequence[float | None], kind: str) -> str:
    """The bytes of an array, as text; None becomes NaN."""
    array = np.array(values, float if kind == "<f4" else kind).astype(kind)  # None becomes NaN
    return base64.b64encode(array.tobytes()).decode("ascii")


def described(stored: RunDirectory) -> dict[str, Any]:
    """Everything that stays the same from round to round, and the state."""
    experiment, environment = stored.experiment, stored.environment
    dataset, model = (os.path.basename(experiment[name]) or experiment[name] for name in ("dataset", "model"))
    runs, state, judged = environment["runs"], stored.state, stored.measure.name
    own = looks(about["algorithm"] for about in runs)
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
        "runs": [
            {"algorithm": about["algorithm"], "seed": about["seed"], "style": own[about["algorithm"]].style}
            for about in runs
        ],
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
        "toml": stored.experiment_text,
        "environment": [[key, str(value)] for key, value in environment.items() if key != "runs" and value != ""],
        "again": _again(stored, state),
    }


def measures(stored: RunDirectory, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The measures that the page can show besides the training loss. The one that judges the runs comes first."""
    judged = stored.measure
    users = as_shown(known for run in stored.environment["runs"][:1] for known in run.get("metrics", ()))
    names = [name for name in stored.experiment.get("metrics", ()) if ".py:" not in name]
    asked = measured([*(REGISTRY.get(name) or measure(name) for name in names), *users.values()])
    always = () if is_regression(judged.name) else (ACCURACY,)
    others = dict.fromkeys([*always, *asked, *(name for run in runs for name in run.metrics)])
    known = [users.get(name) or measure(name, judged.name) for name in others if name != judged.name]
    return list(map(_shown, [judged, *known]))


def _shown(known: Metric) -> dict[str, Any]:
    shown = {"name": known.name, "title": known.axis[:1].upper() + known.axis[1:], "short": known.short}
    return shown | {"factor": known.factor, "unit": known.unit, "lower": known.lower}


def _private(runs: Sequence[dict[str, Any]]) -> str:
    """Who adds the noise, and delta: an epsilon says nothing without delta."""
    given = [about["parameters"] for about in runs if about["parameters"].get("privacy")]
    said = (
        f"{own['privacy']}, delta {own.get('privacy.delta') or accountant.DELTA}"
        + (f"; {summary.SECRET}" if own.get("privacy.replay") is False else "")
        for own in given
    )
    return "; ".join(dict.fromkeys(said))


def _own(stored: RunDirectory) -> dict[str, Any] | None:
    """How the page shows each device's own figure; None if it was not recorded."""
    if not (stored.experiment["records"] and FAIRNESS in stored.experiment.get("metrics", ())):
        return None
    numbers = is_regression(stored.measure.name)
    known = measure("mse" if numbers else ACCURACY)
    title = "Its own mean squared error" if numbers else "Its own accuracy (%)"
    return {"title": title, "factor": known.factor, "name": "Own error" if numbers else "Own accuracy"}


def _again(stored: RunDirectory, state: str) -> list[list[str]]:
    """How to repeat or resume a run: words and a command."""
    if stored.deployed:
        return [
            ["To resume it after its last round, submit it to Flower again with this directory:", stored.resume_command]
        ]
    secret = any(about["parameters"].get("privacy.replay") is False for about in stored.environment["runs"])
    opening = "To run the experiment from the file above with other draws and noise:" if secret else REPEAT
    ways = [[opening, f"folb run {EXPERIMENT}"]]
    return ways + ([["To resume the interrupted run:", stored.resume_command]] if state == "interrupted" else [])


def table(stored: RunDirectory, runs: Sequence[Run]) -> dict[str, Any]:
    """The table of `folb show`."""
    experiment = stored.experiment
    headings, rows = summary.table(stored.begun(runs), experiment["target"], stored.clock, experiment["rounds"])
    return {"headings": headings, "rows": rows}
