"""Results for people and programs: the table, the JSON document, the CSV, the run directory."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Any

from folb.errors import InputError
from folb.runs import Run

if TYPE_CHECKING:
    from rich.table import Table

    from folb.experiment import Experiment


UNFINISHED = ".folb-unfinished"  # within a run directory, while its runs are under way


def labelled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the same algorithm and parameters under one label, which names what tells it from the others."""
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key, value in run.parameters.items():
            values.setdefault((run.algorithm, key), set()).add(str(value))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        varied = [key for key in run.parameters if len(values[run.algorithm, key]) > 1]
        label = " ".join([run.algorithm, *(f"{key}={_short(run.parameters[key])}" for key in varied)])
        groups.setdefault(label, []).append(run)
    return groups


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(runs: Sequence[Run], target: float) -> Table:
    """One line for each algorithm: medians and means over the seeds."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("algorithm")
    for heading in (
        f"rounds to {100 * target:g} %",
        "final accuracy",
        "best",
        "MB up",
        "MB down",
        "drops > 5 points",
        "simulated s",
        "idle rounds",
    ):
        shown.add_column(heading, justify="right")
    for label, group in labelled(runs).items():
        reached = [run.rounds_to(target) for run in group]
        finals = [run.final for run in group]
        shown.add_row(
            label,
            _rounds(reached),
            f"{100 * mean(finals):.1f} ± {100 * pstdev(finals):.1f} %",
            f"{100 * mean(run.best for run in group):.1f} %",
            f"{mean(run.bytes_up.sum() for run in group) / 1e6:.2f}",
            f"{mean(run.bytes_down.sum() for run in group) / 1e6:.2f}",
            f"{mean(run.drops for run in group):.1f}",
            f"{mean(float(run.seconds.sum()) for run in group):.0f}",
            f"{mean(int((~run.updated).sum()) for run in group):.0f}",
        )
    return shown


def _rounds(reached: list[int | None]) -> str:
    """The median over the seeds; a seed that never arrives counts as later than any that does."""
    middle = median([math.inf if r is None else r for r in reached])
    text = "never" if math.isinf(middle) else f"{middle:g}"
    missed = reached.count(None)
    return f"{text} ({missed} of {len(reached)} never)" if missed and not math.isinf(middle) else text


def document(experiment: Experiment, note: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The results as one JSON-ready document; a value that is not finite becomes null."""
    return {
        "dataset": experiment.dataset,
        "note": note,
        "model": experiment.model,
        "system": experiment.system,
        "objective": experiment.objective,
        "rounds": experiment.rounds,
        "target": experiment.target,
        "set": experiment.set,
        "runs": [_run(run, experiment.target) for run in runs],
    }


def _run(run: Run, target: float) -> dict[str, Any]:
    return {
        "algorithm": run.algorithm,
        "parameters": {key: _plain(value) for key, value in run.parameters.items()},
        "seed": run.seed,
        "evaluated_rounds": run.evaluated_rounds.tolist(),
        "test_accuracy": _finite(run.test_accuracy.tolist()),
        "train_loss": _finite(run.train_loss.tolist()),
        "bytes_up": int(run.bytes_up.sum()),
        "bytes_down": int(run.bytes_down.sum()),
        "seconds": round(float(run.seconds.sum()), 3),
        "rounds_to_target": run.rounds_to(target),
        "best": _finite([run.best])[0],
        "final": _finite([run.final])[0],
        "drops": run.drops,
        "idle_rounds": int((~run.updated).sum()),
    }


def _plain(value: Any) -> Any:
    """What JSON can hold, and the text of anything else: an algorithm of one's own may have any settings."""
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def rounds_csv(runs: Sequence[Run], note: str = "") -> str:
    """A line for each round of each run.

    `devices` are those whose reply was used, one that counts m times m times; `lost` those who were chosen in vain.
    A note on the data is the last column.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures = ["test_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds", "updated", "devices", "lost"]
    last = [note] if note else []
    writer.writerow(["algorithm", "seed", "round", *measures, *(["note"] if note else [])])
    for label, group in labelled(runs).items():
        for run in group:
            measured = zip(run.test_accuracy, run.train_loss, strict=True)
            evaluated = dict(zip(run.evaluated_rounds, measured, strict=True))
            for t in range(len(run.seconds)):
                row = (run.bytes_up[t], run.bytes_down[t], run.seconds[t], bool(run.updated[t]))
                used = " ".join(map(str, run.devices[t].repeat(run.times[t])))
                lost = " ".join(map(str, run.devices[t][run.lost[t]]))
                writer.writerow([label, run.seed, t + 1, *evaluated.get(t + 1, ("", "")), *row, used, lost, *last])
    return text.getvalue()


def toml(experiment: Experiment, note: str = "") -> str:
    """The experiment as a file that `folb run` takes."""
    lines = ["# folb run this file to repeat the comparison", *([f"# the data: {note}"] if note else [])]
    for field in fields(experiment):
        if field.name != "set":
            lines.append(f"{field.name} = {_toml(getattr(experiment, field.name))}")
    nested = {key: value for key, value in experiment.set.items() if isinstance(value, dict)}
    for heading, content in [("set", {k: v for k, v in experiment.set.items() if k not in nested})] + [
        (f"set.{_toml(key)}", value) for key, value in nested.items()
    ]:
        if content:
            lines += ["", f"[{heading}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in content.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are alike in TOML and JSON


def writable(directory: str | Path) -> Path:
    """The directory, made if need be, once a file can be written into it."""
    path = Path(directory)
    if not str(directory):
        raise InputError("out", directory, "should be a directory to write to")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError("out", str(directory), f"should be a directory to write to: {error.strerror}") from error
    return path


@contextlib.contextmanager
def unfinished(directory: Path | None) -> Iterator[Path | None]:
    """A place for checkpoints in the run directory while its runs are under way."""
    if directory is None:
        yield None
        return
    path = directory / UNFINISHED
    path.mkdir(exist_ok=True)
    try:
        yield path  # an interruption leaves the checkpoints there
    except InputError:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise
    shutil.rmtree(path)


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: under another name first, then renamed into place."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_results(directory: Path, experiment: Experiment, note: str, runs: Sequence[Run]) -> None:
    """The run directory: the experiment, its results as JSON and CSV, and the picture."""
    from folb.figures import plot

    title = f"{experiment.dataset}, {experiment.model}"
    text = json.dumps(document(experiment, note, runs), indent=1, allow_nan=False) + "\n"
    save(directory / "curves.png", lambda path: plot(runs, path, target=experiment.target, title=title, note=note))
    save(directory / "experiment.toml", lambda path: path.write_text(toml(experiment, note), encoding="utf-8"))
    save(directory / "results.json", lambda path: path.write_text(text, encoding="utf-8"))
    save(directory / "rounds.csv", lambda path: path.write_text(rounds_csv(runs, note), encoding="utf-8"))
