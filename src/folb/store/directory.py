"""The run directory: what remains of an experiment, from its first round on.

    experiment.toml    the experiment with all its settings: `folb run` repeats it
    environment.json   versions, machine, command; the runs, and a hash of all that they depend on
    rounds.jsonl       a line for every round of every run, as it happens
    checkpoints/       while unfinished: `folb resume` starts from these
    model.npz          at the end: the models that the runs ended with
    results.json       once finished
    curves.png
    winner.toml        after a search: the experiment that runs the winner on other seeds
    tracking/          what `--track` wrote
    replaced/          the run that `--again` replaces, until the new one is finished
    .folb-lock         held by the process that runs it

Its name comes from the content of the experiment. No file is ever half written, except for the last line of
rounds.jsonl, which readers skip.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from folb import atomic
from folb.atomic import LOCK, claimed, holder, regular
from folb.errors import InputError
from folb.measures import ACCURACY, Metric, are_facts, is_measure, measure
from folb.results import summary
from folb.results.run import Run
from folb.store import experiment_file
from folb.store.experiment_file import COUNT, NAME, POSITIVE, SEED, TABLE, TAGS, TEXT, TRUTH, Kind, many, unreadable
from folb.store.round_lines import ROUNDS as ROUNDS
from folb.store.round_lines import as_runs, parsed

EXPERIMENT, ENVIRONMENT, RESULTS = "experiment.toml", "environment.json", "results.json"
CURVES, CHECKPOINTS, WINNER, TRACKING = "curves.png", "checkpoints", "winner.toml", "tracking"
MODEL, REPLACED = "model.npz", "replaced"

log = logging.getLogger(__name__)


def home() -> Path:
    """Where run directories are: FOLB_RUNS, else `runs` in the working directory."""
    return Path(os.environ.get("FOLB_RUNS") or "runs")


def find(name: str) -> Path:
    """A run directory by its path, its name in `home` or the beginning of that name; "last" is the newest."""
    if is_run(Path(name)):
        return Path(name)
    runs = listed()
    if name == "last" and runs:
        return runs[0]
    known = {path.name: path for path in runs}
    matches = [name] if name in known else [other for other in known if name and other.startswith(name)]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise InputError("run", name, f"could be any of {', '.join(sorted(matches))}")
    for path in (Path(name), home() / name):
        if name and os.path.isdir(path):
            read(path)  # says why it is not a run
    raise InputError("run", name, f"there is no such run in {home()}; `folb runs` lists them")


def listed() -> list[Path]:
    """The run directories in `home`, the newest first; those that cannot be read come last."""
    try:
        changed = {entry: _changed(entry) for entry in home().iterdir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError("FOLB_RUNS", str(home()), f"should be a directory: {error.strerror}") from error
    dated = [(-when, path.name, path) for path, when in changed.items() if when is not None]
    return [path for _, _, path in sorted(dated)]


def _changed(path: Path) -> float | None:
    """When a run directory was last changed; None if it is not one, or has just been removed."""
    try:
        if not _is_set_aside(path):
            (path / ENVIRONMENT).lstat()
        return path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # perhaps another user's: it is listed, and the others too
        return None if error.errno == errno.ELOOP else -math.inf


@dataclass(frozen=True)
class RunDirectory:
    """A run directory, for reading."""

    path: Path
    environment: dict[str, Any]

    def __repr__(self) -> str:
        runs = len(self.environment.get("runs", ()))
        return f"RunDirectory({self.path}: {self.state}, {runs} run{'s' * (runs != 1)})"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def given_name(self) -> str:
        """What the user calls it; empty if nothing was given."""
        return str(self.environment.get("name", ""))

    @property
    def tags(self) -> list[str]:
        return list(self.environment.get("tags", ()))

    @property
    def started(self) -> str:
        """When it began, to the second, in UTC."""
        return str(self.environment["started"]).replace("T", " ").replace("+00:00", " UTC")

    @property
    def handle(self) -> str:
        """How a command finds it: by its name if it is in `home`, otherwise by its path."""
        at_home = self.path.resolve().parent == home().resolve()
        return shlex.quote(self.path.name if at_home else str(self.path.resolve()))

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The experiment: all keys of an experiment file."""
        content = experiment_file.read(file := self.path / EXPERIMENT)
        experiment_file.check(content, f"{file}: ", self.measure)
        return content

    @property
    def deployed(self) -> bool:
        """Whether it runs on real devices, under Flower, and not in the simulator."""
        return bool(self.environment["carrier"] == "flower")

    @property
    def clock(self) -> str:
        """The unit of its seconds: real or simulated."""
        return "s" if self.deployed else "simulated s"

    @property
    def measure(self) -> Metric:
        """What its models are judged by, and its target is for."""
        return measure(next((run["judged_by"] for run in self.environment["runs"]), ACCURACY))

    @property
    def differs(self) -> str:
        return str(self.environment["differs"])

    @property
    def resume_command(self) -> str:
        return "the same flwr run, or folb deploy demo, again" if self.deployed else f"folb resume {self.handle}"

    @property
    def state(self) -> str:
        """Whether it is running, finished or interrupted."""
        if os.path.isfile(self.path / RESULTS):
            return "finished"
        return "running" if holder(self.path) else "interrupted"

    def rounds(self, offset: int = 0, size: int = -1) -> tuple[list[dict[str, Any]], int]:
        """The whole lines within `size` bytes from an offset on, but at least one, and the offset after them."""
        return _rounds(self, offset, size) if offset or size >= 0 else self._all_rounds

    @cached_property
    def _all_rounds(self) -> tuple[list[dict[str, Any]], int]:
        return _rounds(self, 0, -1)

    def recorded(self, offset: int = 0, size: int = -1) -> bytes:
        """`size` bytes of rounds.jsonl from an offset on; by default all. Beyond its end there are none."""
        try:
            with open(regular(self.path / ROUNDS), "rb") as file:
                file.seek(min(offset, os.fstat(file.fileno()).st_size))  # a file system has a largest offset
                return file.read(size)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise unreadable("run", self.path.name, self.path / ROUNDS, error) from error

    def runs(self) -> list[Run]:
        """The runs so far, without their models."""
        return list(self._runs)

    @cached_property
    def _runs(self) -> list[Run]:
        return as_runs(self.environment["runs"], self.rounds()[0])

    def to_frame(self, kind: Literal["pandas", "polars"] | None = None) -> Any:
        """What the runs measured so far, as a data frame: `folb.to_frame` says which columns it has."""
        from folb.store.reading import to_frame

        return to_frame(self, kind=kind)

    def begun(self, runs: Sequence[Run] | None = None) -> list[Run]:
        """The runs that have an evaluated round, labelled as in the whole experiment: their own labels could differ."""
        labels = [about["algorithm"] for about in self.environment["runs"]]
        return summary.begun(self.runs() if runs is None else runs, labels)


def _rounds(stored: RunDirectory, offset: int, size: int) -> tuple[list[dict[str, Any]], int]:
    content = stored.recorded(offset, size)
    if len(content) == size and b"\n" not in content:
        return _rounds(stored, offset, 2 * size)
    content = content[: content.rfind(b"\n") + 1]
    lines = [parsed(raw, len(stored.environment["runs"])) for raw in content.splitlines()]
    if damaged := lines.count(None):
        log.warning("%s: left out %d damaged line%s", stored.path / ROUNDS, damaged, "s" * (damaged > 1))
    return [line for line in lines if line is not None], offset + len(content)


JUDGED = Kind(lambda value: value == ACCURACY or is_measure(value), "should be a metric")
# the fields of environment.json, and those that only some runs have
FIELDS = dict.fromkeys(("folb", "jax", "device", "command", "started", "note", "identity", "carrier", "differs"), TEXT)
FIELDS |= {"devices": COUNT, "accelerators": POSITIVE, "stream": TRUTH, "keep_model": TRUTH}
OTHER_FIELDS = {"name": NAME, "tags": TAGS, "device_names": many(TEXT), "class_names": many(TEXT)}
OF_A_RUN = {"algorithm": TEXT, "name": TEXT, "seed": SEED, "parameters": TABLE, "judged_by": JUDGED}
OTHERS_OF_A_RUN = {"metrics": Kind(are_facts, "should be how users' own metrics are shown")}


def read(path: Path) -> RunDirectory:
    file = path / ENVIRONMENT
    try:
        content = json.loads(regular(file).read_bytes())
        json.dumps(content, ensure_ascii=False).encode()  # fails if a text cannot be printed
    except FileNotFoundError as error:
        if _is_set_aside(path):
            expected = f"is in {path / REPLACED}: its replacement was killed; folb resume {path} brings it back"
            raise InputError("run", path.name, expected) from error
        raise InputError("run", path.name, f"is not a run: there is no {file}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable("run", path.name, file, error) from error
    experiment_file.check_with_runs(str(file), content, FIELDS, OTHER_FIELDS, OF_A_RUN, OTHERS_OF_A_RUN)
    return RunDirectory(path, content)


def is_run(path: Path) -> bool:
    with contextlib.suppress(InputError):
        return bool(read(path))
    return False


def leave(path: Path, results: Mapping[str, Any], picture: bytes) -> None:
    """Write the picture first, and then the results: these mark the run as finished."""
    atomic.replace(path / CURVES, picture)
    atomic.replace(path / RESULTS, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())


DIRECTORIES = (CHECKPOINTS, TRACKING)
FILES = (RESULTS, ROUNDS, CURVES, MODEL, WINNER, EXPERIMENT, ENVIRONMENT)
PARTS = (*DIRECTORIES, *FILES)  # the environment is the last


def clear(path: Path) -> None:
    """Remove the run, and nothing else. The environment goes last: it marks the directory as a run."""
    for directory in DIRECTORIES:
        shutil.rmtree(path / directory, ignore_errors=True)
    for name in FILES:
        for file in (path / name, path / f".{name}.part"):
            file.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Make room for a new run. One with recorded rounds is kept in `replaced` until the new one is finished.

    If a finished one is there already, it stays, and not an unfinished one that was to replace it.
    """
    if (path / RESULTS).is_file() or (is_recorded(path) and not (path / REPLACED / RESULTS).is_file()):
        shutil.rmtree(path / REPLACED, ignore_errors=True)
        (path / REPLACED).mkdir()
        # the environment first: if this process is killed, a directory without one says that the run is set aside
        _move(path, path / REPLACED, PARTS[::-1])
    clear(path)


def is_recorded(path: Path) -> bool:
    return (path / ROUNDS).is_file() and (path / ROUNDS).stat().st_size > 0


def put_back(path: Path) -> bool:
    """Bring back the run that was set aside, unless the new one has rounds, and say whether there was one."""
    with contextlib.suppress(OSError):
        (path / REPLACED).rmdir()  # if nothing was moved yet
    if not (path / REPLACED).is_dir():
        return False
    if (path / ENVIRONMENT).exists():  # the new run's; without it, what is left here are parts of the old one
        if is_recorded(path):
            return False
        clear(path)
    _bring_back(path)
    return True


def restore(path: Path) -> None:
    """Bring back the run that a killed process had set aside, if its replacement did not begin."""
    if _is_set_aside(path):
        with claimed(path):
            if _is_set_aside(path):  # still
                _bring_back(path)


def _is_set_aside(path: Path) -> bool:
    with contextlib.suppress(OSError):  # there is no such directory, or it is another user's
        there = {entry.name for entry in (path / REPLACED).iterdir()}
        return ENVIRONMENT in there and there <= set(PARTS) and not (path / ENVIRONMENT).exists()
    return False


def _bring_back(path: Path) -> None:
    _move(path / REPLACED, path, PARTS)
    with contextlib.suppress(OSError):  # something else is in it
        (path / REPLACED).rmdir()


def _move(path: Path, to: Path, names: Sequence[str]) -> None:
    for name in names:
        if (path / name).exists():
            os.replace(path / name, to / name)


def check_own(path: Path, again: bool) -> None:
    """Raise if the directory is not a run, but has what looks like part of one; `again` may replace nothing else."""
    if path.resolve() == home().resolve():
        raise InputError("out", str(path), "holds the run directories; choose a directory inside it")
    present = {entry.name for entry in path.iterdir()} - {LOCK}
    names = {*PARTS, REPLACED}
    if (alike := sorted(present & names)) and (not again or present - names):
        raise InputError("out", str(path), f"has {alike[0]}, but is not a run of folb; choose another directory")


def remove(path: Path) -> None:
    """Remove a run, and its directory unless something else is in it."""
    read(path)  # raises if it is not a run
    if path.is_symlink():
        raise InputError("run", str(path), "is a link; remove what it points to")
    with claimed(path):
        shutil.rmtree(path / REPLACED, ignore_errors=True)
        clear(path)
    with contextlib.suppress(OSError):
        path.rmdir()
