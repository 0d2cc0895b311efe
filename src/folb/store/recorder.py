"""rounds.jsonl, written as rounds happen."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from folb import atomic
from folb.measures import is_regression
from folb.regular import regular
from folb.results import summary
from folb.results.run import Run
from folb.store.directory import ROUNDS
from folb.store.round_lines import parsed
from folb.typing import NDArray

CURVES = ("test_accuracy", "train_loss")  # of evaluated rounds


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
        found: dict[str, Any] = {name: values[i] for name, values in columns.items()}
        yield found | ({"metrics": {name: values[i] for name, values in metrics.items()}} if metrics else {})


def _short(values: NDArray) -> list[float | None]:
    """Single precision in the fewest digits that tell it from all others: 0.1, and not 0.10000000149011612.

    A value that is not finite becomes null.
    """
    return [float(str(value)) if math.isfinite(value) else None for value in values]


def _of_devices(part: Run, n: int, records: dict[str, NDArray]) -> dict[str, Any]:
    """The record of each distinct device of round n."""
    chosen = (part.times[n] > 0) | part.lost[n]
    found: dict[str, Any] = {"devices": part.devices[n][chosen].tolist(), "times": part.times[n][chosen].tolist()}
    found |= {name: _short(values[n][chosen]) for name, values in records.items()}
    return found | {"lost_devices": part.devices[n][part.lost[n]].tolist(), "rejected_devices": []}
