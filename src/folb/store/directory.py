"""The run directory: what remains of an experiment, from its first round on.

    experiment.toml    the experiment, every setting spelt out: `folb run` repeats it
    environment.json   versions, machine, command; the runs, and the identity of all they depend on
    rounds.jsonl       a line for every round of every run, as it happens
    checkpoints/       while unfinished: what `folb resume` goes on from
    results.json       once finished
    curves.png
    winner.toml        of a search, the experiment that runs the winner on other seeds
    tracking/          what `--track` wrote
    .folb-lock         held by the process that runs it

Its name comes from the content of the experiment. Nothing here is ever half written but the last line of
rounds.jsonl, which readers leave out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from folb.errors import InputError
from folb.results.run import Run
from folb.store.lock import LOCK, claimed, holder

EXPERIMENT, ENVIRONMENT, ROUNDS, RESULTS = "experiment.toml", "environment.json", "rounds.jsonl", "results.json"


CURVES, CHECKPOINTS = "curves.png", "checkpoints"


WINNER, TRACKING = "winner.toml", "tracking"


def home() -> Path:
    """Where run directories are: FOLB_RUNS, else `runs` in the working directory."""
    return Path(os.environ.get("FOLB_RUNS") or "runs")


def find(name: str) -> Path:
    """A run directory by its path, its name in `home` or the beginning of it; "last" is the newest."""
    if is_run(Path(name)):
        return Path(name)
    found = listed()
    if name == "last" and found:
        return found[0]
    known = {path.name: path for path in found}
    matches = [name] if name in known else [other for other in known if name and other.startswith(name)]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise InputError("run", name, f"could be any of {', '.join(sorted(matches))}")
    raise InputError("run", name, f"there is no such run in {home()}; `folb runs` lists them")


def listed() -> list[Path]:
    """The run directories in `home`, the newest first."""
    if not home().exists():
        return []
    try:
        found = [entry for entry in home().iterdir() if (entry / ENVIRONMENT).is_file()]
    except OSError as error:
        raise InputError("FOLB_RUNS", str(home()), f"should be a directory: {error.strerror}") from error
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))


@dataclass(frozen=True)
class Stored:
    """A run directory as it is read."""

    path: Path
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def handle(self) -> str:
        """What a command finds it by: its name, if it is in `home`."""
        at_home = self.path.resolve().parent == home().resolve()
        return shlex.quote(self.path.name if at_home else str(self.path.resolve()))

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """What is run: the keys of an experiment file, all of them."""
        try:
            with open(self.path / EXPERIMENT, "rb") as file:
                found = tomllib.load(file)
        except (OSError, ValueError) as error:
            raise InputError("run", str(self.path), f"{EXPERIMENT} cannot be read: {error}") from error
        kinds = {"dataset": str, "model": str, "rounds": int, "seeds": list, "target": int | float, "records": bool}
        for key, kind in kinds.items():
            if not isinstance(found.get(key), kind):
                raise InputError(f"{self.path / EXPERIMENT}: {key}", found.get(key), "is not what folb wrote")
        return found

    @property
    def deployed(self) -> bool:
        """Whether it runs on real devices, under Flower, and not in the simulator."""
        return self.environment.get("carrier") == "flower"

    @property
    def clock(self) -> str:
        """What its seconds are."""
        return "s" if self.deployed else "simulated s"

    @property
    def going(self) -> str:
        """The command that goes on with it."""
        return "the same flwr run, or folb deploy demo, again" if self.deployed else f"folb resume {self.handle}"

    @property
    def state(self) -> str:
        """Whether it is running, finished or interrupted."""
        if (self.path / RESULTS).is_file():
            return "finished"
        return "running" if holder(self.path) else "interrupted"

    def rounds(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The whole lines of rounds.jsonl from a byte offset on, and the offset after them."""
        try:
            with open(self.path / ROUNDS, "rb") as file:
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:
            return [], offset
        content = content[: content.rfind(b"\n") + 1]
        runs = len(self.environment["runs"])
        return [line for raw in content.splitlines() if (line := _parsed(raw, runs))], offset + len(content)

    def runs(self) -> list[Run]:
        """The runs as far as they have come, without their models."""
        lines: list[list[dict[str, Any]]] = [[] for _ in self.environment["runs"]]
        for line in self.rounds()[0]:
            lines[line["run"]].append(line)
        return [as_run(about, own) for about, own in zip(self.environment["runs"], lines, strict=True)]

    def begun(self, runs: Sequence[Run] | None = None) -> list[Run]:
        """Those of the runs that have an evaluated round, for a table.

        By the labels of the whole experiment: those of the runs begun so far may not tell them apart the same way.
        """
        return [
            replace(run, algorithm=about["algorithm"], parameters={})
            for about, run in zip(self.environment["runs"], self.runs() if runs is None else runs, strict=True)
            if len(run.evaluated_rounds)
        ]


def read(path: Path) -> Stored:
    """The run directory at `path`."""
    try:
        environment = json.loads((path / ENVIRONMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError("run", str(path), f"cannot be read: {error}") from error
    if not _is_environment(environment):
        raise InputError("run", str(path), f"is no run: folb did not write its {ENVIRONMENT}")
    return Stored(path, environment)


def is_run(path: Path) -> bool:
    """Whether folb made this directory."""
    with contextlib.suppress(InputError):
        return bool(read(path))
    return False


def _is_environment(found: Any) -> bool:
    texts = ("folb", "jax", "device", "command", "started", "note", "identity")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in texts):
        return False
    runs = found.get("runs")
    return isinstance(found.get("devices"), int) and isinstance(runs, list) and all(map(_is_about, runs))


def _is_about(run: Any) -> bool:
    kinds = {"algorithm": str, "name": str, "seed": int, "parameters": dict}
    return isinstance(run, dict) and all(isinstance(run.get(key), kind) for key, kind in kinds.items())


NUMBERS = ("round", "bytes_up", "bytes_down", "seconds", "updated", "lost")


def _parsed(raw: bytes, runs: int) -> dict[str, Any] | None:
    """A line of rounds.jsonl, unless it is damaged."""
    try:
        line = json.loads(raw)
        sound = line["run"] in range(runs) and all(isinstance(line[key], int | float) for key in NUMBERS)
    except (ValueError, TypeError, KeyError):
        return None
    return line if sound else None


def trouble(line: dict[str, Any]) -> Iterator[str]:
    """What went wrong in a round on real devices, in words."""
    for name, verb in (("refused", "refused"), ("failed", "lost")):
        for device, reason in line.get(name, []):
            yield f"{verb}: {reason}" if device is None else f"device {device} {verb}: {reason}"
    if line.get("abandoned"):
        yield f"abandoned: {line['abandoned']}"


def as_run(about: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    """The lines of one run, without its model."""
    evaluated = [line for line in lines if "test_accuracy" in line]

    def column(name: str, rows: list[dict[str, Any]], kind: type) -> Any:
        return np.array([math.nan if row[name] is None else row[name] for row in rows], kind)

    def per_device(name: str, kind: type) -> Any:
        """[rounds, K], a round with fewer distinct devices filled up with zeros."""
        rows = [line.get(name, []) for line in lines]
        filled: Any = np.zeros((len(rows), max(map(len, rows), default=0)), kind)
        for row, values in zip(filled, rows, strict=True):
            row[: len(values)] = [math.nan if value is None else value for value in values]
        return filled

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
        test_accuracy=column("test_accuracy", evaluated, np.float32),
        train_loss=column("train_loss", [{"train_loss": None} | line for line in evaluated], np.float32),
        loss_measured=not evaluated or "train_loss" in evaluated[-1],
        bytes_up=column("bytes_up", lines, np.int64),
        bytes_down=column("bytes_down", lines, np.int64),
        seconds=column("seconds", lines, np.float32),
        devices=devices,
        times=times,
        lost=lost,
        updated=column("updated", lines, bool),
        records={name: per_device(name, np.float32) for name in ("weights", "gamma") if lines and name in lines[0]},
    )


DIRECTORIES = (CHECKPOINTS, TRACKING)
FILES = (RESULTS, ROUNDS, CURVES, WINNER, EXPERIMENT, ENVIRONMENT)


def clear(path: Path) -> None:
    """Remove what folb wrote into the directory, and nothing else; the environment last, which makes it a run."""
    for directory in DIRECTORIES:
        shutil.rmtree(path / directory, ignore_errors=True)
    for name in FILES:
        for file in (path / name, path / f".{name}.part"):
            file.unlink(missing_ok=True)


def check_own(path: Path, again: bool) -> None:
    """Raise an `InputError` if the directory is no run, but has what could be taken for a part of one.

    With `again` a damaged run may be replaced: one that is nothing but parts of a run.
    """
    if path.resolve() == home().resolve():
        raise InputError("out", str(path), "is where run directories are; choose one within it")
    present = {entry.name for entry in path.iterdir()} - {LOCK}
    names = {*DIRECTORIES, *FILES}
    if (alike := sorted(present & names)) and (not again or present - names):
        raise InputError("out", str(path), f"has {alike[0]}, and is no run of folb's; choose another directory")


def remove(path: Path) -> None:
    """Remove a run; the directory goes with it unless something else lies there."""
    read(path)  # or it is none
    if path.is_symlink():
        raise InputError("run", str(path), "is a link; remove what it points to")
    with claimed(path):
        clear(path)
    with contextlib.suppress(OSError):
        path.rmdir()
