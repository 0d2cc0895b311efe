"""rounds.jsonl: a line for each round of each run, written as rounds happen, and read as the runs they describe.

A damaged line is skipped, and the others are used.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from folb import atomic
from folb.atomic import regular
from folb.errors import SINGLE
from folb.measures import ACCURACY, PLAIN, as_shown, is_measure, is_regression
from folb.results import summary
from folb.results.run import Run
from folb.store.experiment_file import COUNT, POSITIVE, SIZE, TEXT, TRUTH, Kind, many, number, optional
from folb.typing import NDArray

ROUNDS = "rounds.jsonl"
LONGEST_ROUND = 1e18  # simulated seconds: longer than any run; a sum of them is finite
FINITE = optional(number(-SINGLE, SINGLE))
TROUBLE = Kind(
    lambda value: (
        isinstance(value, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        and all(optional(COUNT).holds(device) and TEXT.holds(reason) for device, reason in value)
    ),
    "should be a list of devices and reasons",
)
# what every line has
ALWAYS = {
    "run": COUNT,
    "round": POSITIVE,
    "bytes_up": SIZE,
    "bytes_down": SIZE,
    "seconds": optional(number(0, LONGEST_ROUND)),
    "updated": TRUTH,
    "lost": COUNT,
}
# what the line of some rounds has: evaluated ones, those with recorded devices, those with failures
SOMETIMES = {
    "test_accuracy": optional(number(-1e30, 1e30)),
    "train_loss": FINITE,
    "metrics": Kind(
        lambda value: (
            isinstance(value, dict) and all(map(PLAIN.fullmatch, value)) and all(map(FINITE.holds, value.values()))
        ),
        "should be metrics and their values",
    ),
    "devices": many(COUNT),
    "times": many(COUNT),
    "weights": many(FINITE),
    "gamma": many(FINITE),
    "own": many(FINITE),
    "attack": Kind(
        lambda value: isinstance(value, list) and len(value) == 3 and all(map(FINITE.holds, value)),
        "should be three numbers",
    ),
    "epsilon": number(0, SINGLE),
    "lost_devices": many(COUNT),
    "rejected_devices": many(COUNT),
    "refused": TROUBLE,
    "failed": TROUBLE,
    "shortened": TROUBLE,
    "length": number(0, SINGLE),
    "abandoned": TEXT,
}
CURVES = ("test_accuracy", "train_loss")  # of evaluated rounds
PER_DEVICE = ("times", "weights", "gamma", "own")
AMONG_DEVICES = ("lost_devices", "rejected_devices")


def parsed(raw: bytes, runs: int) -> dict[str, Any] | None:
    """A line of a directory that has `runs` runs; None if it is damaged."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _is_sound(line, runs) else None


def _is_sound(line: dict[str, Any], runs: int) -> bool:
    return (
        all(name in line and kind.holds(line[name]) for name, kind in ALWAYS.items())
        and line["run"] < runs
        and all(kind.holds(line[name]) for name, kind in SOMETIMES.items() if name in line)
        and _devices_match(line)
    )


def _devices_match(line: dict[str, Any]) -> bool:
    """Whether the fields about devices have a value for each of `devices`, and for no others."""
    if "devices" not in line:
        return not any(name in line for name in (*PER_DEVICE, *AMONG_DEVICES))
    devices = line["devices"]
    return (
        all(name in line for name in ("times", *AMONG_DEVICES))
        and all(len(line[name]) == len(devices) for name in PER_DEVICE if name in line)
        and all(set(line[name]) <= set(devices) for name in AMONG_DEVICES)
    )


def trouble(line: dict[str, Any]) -> Iterator[str]:
    """What went wrong in a round on real devices, in words."""
    for name, verb in (("refused", "rejected"), ("failed", "lost"), ("shortened", "shortened")):
        for device, reason in line.get(name, []):
            yield f"{verb}: {reason}" if device is None else f"device {device} {verb}: {reason}"
    if line.get("abandoned"):
        yield f"abandoned: {line['abandoned']}"


def is_evaluated(line: dict[str, Any]) -> bool:
    """Whether the model was evaluated after this round."""
    return "test_accuracy" in line or "metrics" in line


def judged(line: dict[str, Any], by: str) -> float | None:
    """What the run is judged by, after this round; None if it was not measured, or is not finite."""
    value = line.get("test_accuracy") if by == ACCURACY else line.get("metrics", {}).get(by)
    return None if value is None else float(value)


def as_run(about: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    """The lines of one run, without its model."""
    evaluated = [line for line in lines if is_evaluated(line)]
    measured = [line.get("metrics", {}) for line in evaluated]
    judged_by = about["judged_by"]
    users = as_shown(about.get("metrics", ()))
    given = [name for own in measured for name in own if name in users or is_measure(name)]
    names = dict.fromkeys([*([judged_by] if judged_by != ACCURACY else []), *given])

    def column(name: str, rows: list[dict[str, Any]], kind: type) -> Any:
        return np.array([math.nan if row[name] is None else row[name] for row in rows], kind)

    def with_none(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: None} | row for row in rows]

    def per_device(name: str, kind: type) -> Any:
        """[rounds, K]; zeros fill up a round with fewer distinct devices, NaN a round without this value."""
        rows = [line.get(name, []) for line in lines]
        filled: Any = np.zeros((len(rows), max(map(len, rows), default=0)), kind)
        if name == "own":
            filled[[name not in line for line in lines]] = np.nan
        for row, values in zip(filled, rows, strict=True):
            row[: len(values)] = [math.nan if value is None else value for value in values]
        return filled

    recorded: list[str] = [name for name in ("weights", "gamma", "attack") if lines and name in lines[0]]
    recorded += ["own"] if any("own" in line for line in lines) else []
    records: dict[str, Any] = {name: per_device(name, np.float32) for name in recorded}
    if any("epsilon" in line for line in lines):
        records["epsilon"] = column("epsilon", with_none("epsilon", lines), float)
    devices, times = per_device("devices", np.int32), per_device("times", np.int32)
    lost = np.zeros(devices.shape, bool)
    for row, line in zip(lost, lines, strict=True):
        for k in line.get("lost_devices", []):
            row[line["devices"].index(k)] = True
    return Run(
        algorithm=about["name"],
        parameters=about["parameters"],
        seed=about["seed"],
        evaluated_rounds=column("round", evaluated, int),
        test_accuracy=column("test_accuracy", with_none("test_accuracy", evaluated), np.float32),
        train_loss=column("train_loss", with_none("train_loss", evaluated), np.float32),
        loss_measured=not evaluated or "train_loss" in evaluated[-1],
        bytes_up=column("bytes_up", lines, np.int64),
        bytes_down=column("bytes_down", lines, np.int64),
        seconds=column("seconds", lines, np.float32),
        devices=devices,
        times=times,
        lost=lost,
        updated=column("updated", lines, bool),
        records=records,
        metrics={name: column(name, with_none(name, measured), np.float32) for name in names},
        shown=users,
        judged_by=judged_by,
    )


class Recorder:
    """Writes rounds.jsonl as rounds happen. Rounds recorded before an interruption are not written twice."""

    def __init__(self, path: Path, runs: Sequence[dict[str, Any]]) -> None:
        self.path, self.runs = path, runs
        self.known: list[list[int]] = [[] for _ in runs]  # for each run, a hash of each recorded line
        # a model that predicts numbers has no accuracy
        self.curves = [("train_loss",) if is_regression(run["judged_by"]) else CURVES for run in runs]
        self.altered = False  # whether a recorded line differs from what the round gave
        file = path / ROUNDS
        content = regular(file).read_bytes() if file.exists() else b""
        sound = b"".join(self._sound(content))
        if sound != content:  # torn or damaged
            atomic.replace(file, sound)
        self.handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _sound(self, content: bytes) -> Iterator[bytes]:
        """The lines that continue their run."""
        for raw in content.splitlines(keepends=True):
            line = parsed(raw, len(self.known)) if raw.endswith(b"\n") else None
            if line and line["round"] == len(self.known[line["run"]]) + 1:
                self.known[line["run"]].append(hash(raw))
                yield raw

    def add(self, first: int, parts: Mapping[int, Run]) -> None:
        """Record the rounds of some runs, which begin with round `first`."""
        whole = {i: self._lines(i, first, part) for i, part in parts.items()}
        new = {i: lines[max(0, len(self.known[i]) + 1 - first) :] for i, lines in whole.items()}
        for i, lines in whole.items():
            self.altered |= any(map(operator.ne, self.known[i][first - 1 :], map(hash, lines)))
        atomic.write(self.handle, b"".join(line for lines in new.values() for line in lines))
        for i, lines in new.items():
            self.known[i].extend(map(hash, lines))

    def _lines(self, i: int, first: int, part: Run) -> list[bytes]:
        about, seconds, lines = self.runs[i], _short(part.seconds), []
        evaluated = dict(zip(part.evaluated_rounds.tolist(), _evaluations(part, self.curves[i]), strict=True))
        for n in range(len(seconds)):
            line = {"run": i, "algorithm": about["algorithm"], "seed": about["seed"], "round": first + n}
            if first + n in evaluated:
                line |= evaluated[first + n]
            line |= {
                "bytes_up": int(part.bytes_up[n]),
                "bytes_down": int(part.bytes_down[n]),
                "seconds": seconds[n],
                "updated": bool(part.updated[n]),
                "lost": int(part.lost[n].sum()),
            }
            records = dict(part.records)
            if first + n not in evaluated:
                records.pop("own", None)
            if (gained := records.pop("attack", None)) is not None:
                line["attack"] = _short(gained[n])
            if (spent := records.pop("epsilon", None)) is not None:
                line["epsilon"] = summary.short(float(spent[n]), 6)
            if records:
                line |= _of_devices(part, n, records)
            lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")
        return lines

    def finish(self, runs: Sequence[Run]) -> None:
        """Rewrite the file if a line was altered after it was recorded."""
        if self.altered:
            whole = [line for i, run in enumerate(runs) for line in self._lines(i, 1, run)]
            atomic.replace(self.path / ROUNDS, b"".join(whole))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            os.fsync(self.handle)
        finally:
            os.close(self.handle)


def _evaluations(part: Run, curves: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each evaluated round measured."""
    columns = {name: _short(getattr(part, name)) for name in curves}
    metrics = {name: _short(values) for name, values in part.metrics.items()}
    for i in range(len(part.evaluated_rounds)):
        measured: dict[str, Any] = {name: values[i] for name, values in columns.items()}
        yield measured | ({"metrics": {name: values[i] for name, values in metrics.items()}} if metrics else {})


def _short(values: NDArray) -> list[float | None]:
    """Single precision in the fewest digits that tell it from all others: 0.1, and not 0.10000000149011612.

    A value that is not finite becomes null.
    """
    return [float(str(value)) if math.isfinite(value) else None for value in values]


def _of_devices(part: Run, n: int, records: dict[str, NDArray]) -> dict[str, Any]:
    """The record of each distinct device of round n."""
    chosen = (part.times[n] > 0) | part.lost[n]
    fields: dict[str, Any] = {"devices": part.devices[n][chosen].tolist(), "times": part.times[n][chosen].tolist()}
    fields |= {name: _short(values[n][chosen]) for name, values in records.items()}
    return fields | {"lost_devices": part.devices[n][part.lost[n]].tolist(), "rejected_devices": []}
