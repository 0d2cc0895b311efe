"""rounds.jsonl: a line for each round of each run, written as rounds happen, and read as the runs they describe.

A damaged line is skipped, and the others are used.
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from folb import atomic
from folb.atomic import regular
from folb.errors import SINGLE
from folb.measures import ACCURACY, PLAIN, as_shown, is_measure, is_regression
from folb.results import summary
from folb.results.run import Run
from folb.store.experiment_file import COUNT, POSITIVE, TEXT, TRUTH, many, number, optional, whole
from folb.typing import NDArray

ROUNDS = "rounds.jsonl"
LONGEST_ROUND = 1e18  # simulated seconds: longer than any run; a sum of them is finite
FINITE = optional(number(-SINGLE, SINGLE))
AMONG_DEVICES = ("lost_devices", "rejected_devices")
PER_DEVICE = ("times", "weights", "gamma", "own")


def _is_trouble(value: Any) -> bool:  # devices and reasons
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(optional(COUNT).holds(device) and TEXT.holds(reason) for device, reason in value)


# what every line has, and checks of it
ALWAYS = {
    **dict.fromkeys(("run", "lost"), COUNT.holds),
    **dict.fromkeys(("bytes_up", "bytes_down"), whole(0, sys.maxsize).holds),
    "round": POSITIVE.holds,
    "seconds": optional(number(0, LONGEST_ROUND)).holds,
    "updated": TRUTH.holds,
}
# what some lines have: those of evaluated rounds, with recorded devices, with failures
SOMETIMES: dict[str, Callable[[Any], bool]] = {
    "test_accuracy": optional(number(-1e30, 1e30)).holds,
    "train_loss": FINITE.holds,
    "metrics": lambda value: (
        isinstance(value, dict) and all(map(PLAIN.fullmatch, value)) and all(map(FINITE.holds, value.values()))
    ),
    **dict.fromkeys(("devices", "times", *AMONG_DEVICES), many(COUNT).holds),
    **dict.fromkeys(("weights", "gamma", "own"), many(FINITE).holds),
    "attack": lambda value: many(FINITE).holds(value) and len(value) == 3,
    **dict.fromkeys(("epsilon", "length"), number(0, SINGLE).holds),
    **dict.fromkeys(("refused", "failed", "shortened"), _is_trouble),
    "abandoned": TEXT.holds,
}


def parsed(raw: bytes, runs: int) -> dict[str, Any] | None:
    """A line of a directory that has `runs` runs; None if it is damaged."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    sound = (
        isinstance(line, dict)
        and all(name in line and holds(line[name]) for name, holds in ALWAYS.items())
        and line["run"] < runs
        and all(holds(line[name]) for name, holds in SOMETIMES.items() if name in line)
        and _devices_match(line)
    )
    return line if sound else None


def _devices_match(line: dict[str, Any]) -> bool:
    """Whether the fields about devices have a value for each of `devices`, and for no others."""
    if (devices := line.get("devices")) is None:
        return not any(name in line for name in (*PER_DEVICE, *AMONG_DEVICES))
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
    return "test_accuracy" in line or "metrics" in line


def judged(line: dict[str, Any], by: str) -> float | None:
    """What the run is judged by, after this round; None if it was not measured, or is not finite."""
    value = line.get("test_accuracy") if by == ACCURACY else line.get("metrics", {}).get(by)
    return None if value is None else float(value)


def by_run(lines: Iterable[dict[str, Any]], runs: int) -> list[list[dict[str, Any]]]:
    """The lines of each of so many runs."""
    own: list[list[dict[str, Any]]] = [[] for _ in range(runs)]
    for line in lines:
        own[line["run"]].append(line)
    return own


def as_runs(about_runs: Sequence[dict[str, Any]], lines: Iterable[dict[str, Any]]) -> list[Run]:
    """The runs that environment.json lists, from the lines of all of them."""
    return list(map(as_run, about_runs, by_run(lines, len(about_runs))))


def as_run(about: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    """The lines of one run, without its model."""
    evaluated = [line for line in lines if is_evaluated(line)]
    measured = [line.get("metrics", {}) for line in evaluated]
    judged_by, users = about["judged_by"], as_shown(about.get("metrics", ()))
    given = (name for name in chain(*measured) if name in users or is_measure(name))
    names = dict.fromkeys([*([judged_by] if judged_by != ACCURACY else []), *given])

    def column(name: str, rows: list[dict[str, Any]], kind: type) -> Any:
        return np.array([math.nan if row.get(name) is None else row[name] for row in rows], kind)

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
        records["epsilon"] = column("epsilon", lines, float)
    devices = per_device("devices", np.int32)
    lost = np.zeros(devices.shape, bool)
    for n, line in enumerate(lines):
        lost[n, [line["devices"].index(k) for k in line.get("lost_devices", [])]] = True
    return Run(
        algorithm=about["name"],
        parameters=about["parameters"],
        seed=about["seed"],
        evaluated_rounds=column("round", evaluated, int),
        **{name: column(name, evaluated, np.float32) for name in ("test_accuracy", "train_loss")},
        loss_measured=not evaluated or "train_loss" in evaluated[-1],
        **{name: column(name, lines, np.int64) for name in ("bytes_up", "bytes_down")},
        seconds=column("seconds", lines, np.float32),
        devices=devices,
        times=per_device("times", np.int32),
        lost=lost,
        updated=column("updated", lines, bool),
        records=records,
        metrics={name: column(name, measured, np.float32) for name in names},
        shown=users,
        judged_by=judged_by,
    )


class Recorder:
    """Writes rounds.jsonl as rounds happen. Rounds recorded before an interruption are not written twice."""

    def __init__(self, path: Path, runs: Sequence[dict[str, Any]]) -> None:
        self.path, self.runs = path, runs
        # a model that predicts numbers has no accuracy
        numbers = {judge: is_regression(judge) for judge in {run["judged_by"] for run in runs}}
        self.curves = [
            ("train_loss",) if numbers[run["judged_by"]] else ("test_accuracy", "train_loss") for run in runs
        ]
        self.known: list[list[int]] = [[] for _ in runs]  # for each run, a hash of each recorded line
        self.altered = False  # whether a recorded line differs from what the round gave
        file, kept = path / ROUNDS, []
        content = regular(file).read_bytes() if file.exists() else b""
        for raw in content.splitlines(keepends=True):
            line = parsed(raw, len(runs)) if raw.endswith(b"\n") else None
            if line and line["round"] == len(self.known[line["run"]]) + 1:  # it continues its run
                self.known[line["run"]].append(hash(raw))
                kept.append(raw)
        if (sound := b"".join(kept)) != content:  # torn or damaged
            atomic.replace(file, sound)
        self.handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, first: int, parts: Mapping[int, Run]) -> None:
        """Record the rounds of some runs, which begin with round `first`."""
        whole = {i: list(self._lines(i, first, part)) for i, part in parts.items()}
        new = {i: lines[max(0, len(self.known[i]) + 1 - first) :] for i, lines in whole.items()}
        for i, lines in whole.items():
            self.altered |= any(map(operator.ne, self.known[i][first - 1 :], map(hash, lines)))
        atomic.write(self.handle, b"".join(chain(*new.values())))
        for i, lines in new.items():
            self.known[i].extend(map(hash, lines))

    def _lines(self, i: int, first: int, part: Run) -> Iterator[bytes]:
        about, seconds = self.runs[i], _short(part.seconds)
        curves = {name: _short(getattr(part, name)) for name in self.curves[i]}
        metrics = {name: _short(values) for name, values in part.metrics.items()}
        places = {t: at for at, t in enumerate(part.evaluated_rounds.tolist())}
        for n in range(len(seconds)):
            line = {"run": i, "algorithm": about["algorithm"], "seed": about["seed"], "round": first + n}
            records = dict(part.records)
            if (at := places.get(first + n)) is None:
                records.pop("own", None)
            else:
                line |= {name: values[at] for name, values in curves.items()}
                line |= {"metrics": {name: values[at] for name, values in metrics.items()}} if metrics else {}
            line |= {
                "bytes_up": int(part.bytes_up[n]),
                "bytes_down": int(part.bytes_down[n]),
                "seconds": seconds[n],
                "updated": bool(part.updated[n]),
                "lost": int(part.lost[n].sum()),
            }
            if (gained := records.pop("attack", None)) is not None:
                line["attack"] = _short(gained[n])
            if (spent := records.pop("epsilon", None)) is not None:
                line["epsilon"] = summary.short(float(spent[n]), 6)
            if records:  # of each distinct device
                chosen = (part.times[n] > 0) | part.lost[n]
                line |= {"devices": part.devices[n][chosen].tolist(), "times": part.times[n][chosen].tolist()}
                line |= {name: _short(values[n][chosen]) for name, values in records.items()}
                line |= {"lost_devices": part.devices[n][part.lost[n]].tolist(), "rejected_devices": []}
            yield json.dumps(line, allow_nan=False).encode() + b"\n"

    def finish(self, runs: Sequence[Run]) -> None:
        """Rewrite the file if a line was altered after it was recorded."""
        if self.altered:
            whole = chain.from_iterable(self._lines(i, 1, run) for i, run in enumerate(runs))
            atomic.replace(self.path / ROUNDS, b"".join(whole))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            os.fsync(self.handle)
        finally:
            os.close(self.handle)


def _short(values: NDArray) -> list[float | None]:
    """Single precision in the fewest digits that tell it from all others: 0.1, not 0.10000000149011612; or null."""
    return [float(str(value)) if math.isfinite(value) else None for value in values]
