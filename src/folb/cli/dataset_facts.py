"""What `folb data` prints: the datasets, the content of one, and the download of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from folb import atomic, data
from folb.cli import tables
from folb.data import fetch, source_files
from folb.data.federation import Federation
from folb.errors import InputError, choose, one_line
from folb.experiments.holdings import loaded
from folb.experiments.settings import first_line
from folb.typing import NDArray

PICTURES = (".png", ".pdf", ".svg", ".jpg")
BARS = " ▁▂▃▄▅▆▇█"
SOME = 10  # of the names of devices and classes that are shown
NAME = 30  # characters of such a name


def known() -> dict[str, Any]:
    """The datasets, and whether their files are there."""
    datasets = [{"name": name, "state": _state(name), "says": first_line(make)} for name, make in data.DATASETS.items()]
    return {"datasets": datasets, "directory": str(source_files.directory())}


def _state(name: str) -> str:
    if name not in data.RAW_FILES:
        return "generated"
    try:
        folders = {path.parent for path in data.RAW_FILES[name]()}
    except InputError:
        return f"absent: folb data fetch {name}"
    return f"present in {', '.join(sorted(map(str, folders)))}"


def load(name: str, given: Mapping[str, Any]) -> Federation:
    """The dataset with settings from the command line: text values for KEY or NAME.KEY."""
    own: dict[str, Any] = {}
    for key, value in sorted(given.items(), key=lambda one: "." in one[0]):  # those that name it come last, so they win
        whose, dot, setting = key.rpartition(".")
        if dot:
            choose("set", whose.lower(), [name.lower()])
        own[setting] = value
    return loaded(name, own)


def describe(name: str, federation: Federation) -> None:
    """Print a federation's counts, and its sizes and labels as histograms."""
    labels = federation.labels()
    size = labels.sum(axis=1)
    usual = data.defaults(name)
    model = "linear (name it with --model)" if federation.regression else usual.model
    answers, to_beat = _labels(federation, labels)
    train, test = len(federation.train.y), len(federation.test.y)
    held_out = ", a random tenth of each device's" if federation.held_out else ""
    rows = {
        "dataset": first_line(data.constructor(name)),
        "note": federation.note,
        "devices": f"{federation.N:,}",
        "samples": f"{train + test:,}: {train:,} to train on, {test:,} to test on{held_out}",
        "per device": f"mean {size.mean():,.1f}, sd {size.std():,.1f}, from {size.min():,} to {size.max():,}",
        "labels" if federation.regression else "classes": answers,
        "their names": _listed(federation.class_names),
        "devices' names": _listed(federation.device_names),
        "to beat" if federation.regression else "majority": to_beat,
        "input": " x ".join(map(str, federation.shape)),
        "defaults": f"model {model}, local.lr {usual.lr:g}, local.mu {usual.mu:g} for fedprox, target {usual.target:g}",
    }
    tables.show_rows([(fact, value) for fact, value in rows.items() if value])
    print("\ndevices by number of samples")
    edges = np.unique(np.geomspace(size.min(), size.max() + 1, 11).round().astype(int))
    devices, _ = np.histogram(size, edges)
    width = len(f"{edges[-1]:,}")
    for low, high, count in zip(edges, edges[1:] - 1, devices, strict=False):
        bar = "█" * int(np.ceil(40 * count / devices.max()))
        print(f"  {low:>{width},} - {high:>{width},} {bar} {count:,}")
    if federation.regression:
        return
    print(f"\nlabels 0 .. {federation.classes - 1} of all devices, then of some from the smallest to the largest")
    some = np.argsort(size, kind="stable")[np.linspace(0, federation.N - 1, min(federation.N, 5)).astype(int)]
    called = federation.device_names or [""] * federation.N
    shown = ((f"device {k} {one_line(called[k], NAME)}".rstrip(), labels[k]) for k in some)
    for who, counts in [("all", labels.sum(axis=0)), *shown]:
        # a character for each label, as high as its share; even the smallest share is visible
        heights = np.ceil((len(BARS) - 1) * counts / max(counts.max(), 1)).astype(int)
        print(f"  {who:<14}|{''.join(BARS[height] for height in heights)}| {counts.sum():,}")


def _labels(federation: Federation, labels: NDArray) -> tuple[str, str]:
    """What the labels are, and how good a model is that always gives the same answer."""
    train, test = federation.train.y, federation.test.y
    if not federation.regression:
        counts = np.bincount(test, minlength=1)
        share = counts.max() / max(counts.sum(), 1)
        return (
            f"{federation.classes}; a device has {(labels > 0).sum(axis=1).mean():.1f} of them on average",
            f"label {counts.argmax()} is {100 * share:.1f} % of the test samples",
        )
    y = np.concatenate([train, test]).astype(float)
    error = np.mean((test - train.mean(dtype=float)) ** 2)
    return (
        f"numbers to predict: mean {y.mean():.4g}, sd {y.std():.4g}, from {y.min():.4g} to {y.max():.4g}",
        f"the mean of the training labels has a mean squared error of {error:.4g} on the test samples",
    )


def _listed(names: Sequence[str] | None) -> str:
    """The first names, as a terminal can show them: those of a file may have any characters."""
    shown = [one_line(name, NAME) for name in (names or ())[:SOME]]
    return ", ".join([*shown, *(["..."] if len(names or ()) > SOME else [])])


def facts(name: str, federation: Federation) -> dict[str, Any]:
    """What `describe` prints, for a program; `labels` has a row of counts for each device."""
    return {
        "dataset": name,
        "note": federation.note,
        "devices": federation.N,
        "training_samples": len(federation.train.y),
        "test_samples": len(federation.test.y),
        "shape": list(federation.shape),
        "classes": federation.classes,
        **({"regression": True} if federation.regression else {}),
        "held_out": federation.held_out,
        "device_names": federation.device_names,
        "class_names": federation.class_names,
        "defaults": data.defaults(name)._asdict(),
        "labels": federation.labels().tolist(),
    }


def picture(name: str, out: str) -> Path:
    """Where the picture of a dataset goes: a file, or NAME.png in a directory."""
    path = Path(out)
    is_file = path.suffix.lower() in PICTURES
    if not out or (path.suffix and not is_file and not path.is_dir()):
        raise InputError("out", out, f"should be a directory, or a file that ends in {', '.join(PICTURES)}")
    return path if is_file else path / f"{Path(name).name}.png"


def draw(federation: Federation, path: Path) -> None:
    from folb.report.figures import portrait

    atomic.directory(path.parent)
    atomic.replace(path, portrait(federation, path.suffix.lstrip(".").lower()))


def get(name: str) -> list[Path]:
    """Fetch a dataset's files, under a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def advance(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=done, total=total)

        return fetch.fetch(name.lower(), advance)
