"""What the report page shows of run directories, as one JSON-ready document."""

from __future__ import annotations

import base64
import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from folb.report import words
from folb.report.looks import looks
from folb.report.together import together
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import EXPERIMENT, RunDirectory
from folb.store.round_lines import trouble

ENTRIES = 2_000_000  # the most device entries in a report: about 35 MB
TROUBLE = 1000  # the most lines about trouble for each run: the last ones
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

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.bytes: list[int] = []
        self.up: list[int] = []  # of these bytes
        self.seconds: list[float] = []
        self.evaluated: list[int] = []  # positions in `rounds`
        self.accuracy: list[float | None] = []
        self.loss: list[float | str | None] = []
        self.counts: list[int] = []  # devices of each round
        self.devices: list[int] = []
        self.weights: list[float | None] = []
        self.gamma: list[float | None] = []
        self.flags: list[int] = []
        self.trouble: list[tuple[int, str]] = []  # on real devices: the round and what went wrong

    def add(self, line: dict[str, Any], records: bool) -> None:
        """Take a line of rounds.jsonl, with its values of devices only if `records`."""
        if "test_accuracy" in line:
            self.evaluated.append(len(self.rounds))
            self.accuracy.append(_short(line["test_accuracy"]))
            self.loss.append(_short(line["train_loss"]) if "train_loss" in line else UNMEASURED)
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
            self.flags += [
                LOST * (k in lost) | REJECTED * (k in rejected) | TIMES * min(times, 63)
                for k, times in zip(devices, line["times"], strict=True)
            ]

    def document(self, records: bool) -> dict[str, Any]:
        """The columns, JSON-ready. The values of devices are packed."""
        names = ("rounds", "bytes", "up", "seconds", "evaluated", "accuracy", "loss")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found["trouble"] = self.trouble[-TROUBLE:]
        if records:
            found["records"] = {
                "counts": _packed(self.counts, "<u4"),
                "devices": _packed(self.devices, "<u4"),
                "weights": _packed(self.weights, "<f4"),
                "gamma": _packed(self.gamma, "<f4"),
                "flags": _packed(self.flags, "u1"),
            }
        return found


def columns(stored: RunDirectory, lines: Iterable[dict[str, Any]], recorded: Container[int]) -> list[Columns]:
    """Lines of rounds.jsonl by run; with the values of devices for the runs in `recorded`."""
    found = [Columns() for _ in stored.environment["runs"]]
    for line in lines:
        found[line["run"]].add(line, line["run"] in recorded)
    return found


def _short(value: float | None) -> float | None:
    """The fewest digits that 32 bits are read from again."""
    return None if value is None else float(str(np.float32(value)))


def _packed(values: Sequence[float | None], kind: str) -> str:
    """The bytes of an array, as text; None becomes NaN."""
    array = np.array(values, float if kind == "<f4" else kind).astype(kind)  # None becomes NaN
    return base64.b64encode(array.tobytes()).decode("ascii")


def described(stored: RunDirectory) -> dict[str, Any]:
    """Everything that stays the same from round to round, and the state."""
    experiment, environment = stored.experiment, stored.environment
    dataset, model = (os.path.basename(experiment[name]) or experiment[name] for name in ("dataset", "model"))
    runs, state = environment["runs"], stored.state
    own = looks(about["algorithm"] for about in runs)
    return {
        "name": stored.name,
        "identity": f"{environment['identity']} {environment['started']}",
        "title": words.title(dataset, model),
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
            ["target", f"{100 * experiment['target']:g} %"],
        ],
        "toml": stored.experiment_text,
        "environment": [[key, str(value)] for key, value in environment.items() if key != "runs" and value != ""],
        "again": _again(stored, state),
    }


def _again(stored: RunDirectory, state: str) -> list[list[str]]:
    """How to repeat or resume a run: words and a command."""
    if stored.deployed:
        return [
            ["To resume it after its last round, submit it to Flower again with this directory:", stored.resume_command]
        ]
    found = [["To repeat the experiment from the file above:", f"folb run {EXPERIMENT}"]]
    return found + ([["To resume the interrupted run:", stored.resume_command]] if state == "interrupted" else [])


def table(stored: RunDirectory, runs: Sequence[Run]) -> dict[str, Any]:
    """The table of `folb show`."""
    experiment = stored.experiment
    headings, rows = summary.table(stored.begun(runs), experiment["target"], stored.clock, experiment["rounds"])
    return {"headings": headings, "rows": rows}
