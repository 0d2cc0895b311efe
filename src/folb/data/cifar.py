"""CIFAR-10 and CIFAR-100 from their binary files, shared out over devices (Krizhevsky, 2009).

A record is one label byte (CIFAR-100: two, the coarse label and the fine one) and 3,072 bytes of pixels: all red ones
row by row, then the green and the blue ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np

from folb.data import partition as partitions
from folb.data import source_files
from folb.data.cache import cached
from folb.data.federation import Federation
from folb.data.mnist import standardised
from folb.errors import InputError, check_whole, choose
from folb.typing import NDArray

SIDE, CHANNELS, IMAGES = 32, 3, 60_000
PIXELS = SIDE * SIDE * CHANNELS
MOST = 100_000  # images in one file: the published ones have 10,000 or 50,000
LONGEST = 10_000  # bytes of a file of names


class Form(NamedTuple):
    """One of the three readings: its folder, its files (the last one to test on), and where a record has its label."""

    dataset: str
    title: str
    unpacked: str  # the folder that the archive unpacks to
    files: tuple[str, ...]
    labels: int  # label bytes of a record
    at: int  # which of them is the label
    classes: int
    names: str  # the file with the names of the classes


CIFAR10 = Form(
    dataset="cifar10",
    title="CIFAR-10",
    unpacked="cifar-10-batches-bin",
    files=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    labels=1,
    at=0,
    classes=10,
    names="batches.meta.txt",
)
FINE = Form(
    dataset="cifar100",
    title="CIFAR-100",
    unpacked="cifar-100-binary",
    files=("train.bin", "test.bin"),
    labels=2,
    at=1,
    classes=100,
    names="fine_label_names.txt",
)
COARSE = FINE._replace(at=0, classes=20, names="coarse_label_names.txt")

How = Annotated[partitions.Name, "how devices get their images"]
Devices = Annotated[int, "number of devices"]
Alpha = Annotated[float, "how even a device's classes are, for dirichlet: small is uneven"]
Draw = Annotated[int, "which random draw of the partition and of the test samples"]
Shards = Annotated[int | None, "shards per device, for shards; 2 if not set"]
Capped = Annotated[bool | None, "for dirichlet: a device with its even share gets no more; no if not set"]
Test = Annotated[
    Literal["server", "devices"],
    "test on the published test images; or share out all images, and test on a tenth of each device's",
]


def cifar10(
    *,
    partition: How = "dirichlet",
    devices: Devices = 100,
    classes: Annotated[int, "classes per device, for classes, random_classes and power_law"] = 2,
    alpha: Alpha = 0.3,
    draw: Draw = 0,
    shards: Shards = None,
    capped: Capped = None,
    test: Test = "server",
) -> Federation:
    """CIFAR-10: colour photographs of 10 kinds of things, 100 devices by Dirichlet(0.3) draws.

    The 50,000 training images are shared out, and the server tests on the other 10,000. Images are 32 x 32 pixels with
    three channels last. Each channel is standardised over the training images. The federation holds bytes.
    """
    return _shared_out(CIFAR10, partition, devices, classes, alpha, draw, shards, capped, test)


def cifar100(
    *,
    partition: How = "dirichlet",
    devices: Devices = 100,
    classes: Annotated[int, "classes per device, for classes, random_classes and power_law"] = 10,
    alpha: Alpha = 0.3,
    draw: Draw = 0,
    shards: Shards = None,
    capped: Capped = None,
    test: Test = "server",
    labels: Annotated[Literal["fine", "coarse"], "the 100 classes, or the 20 groups of five classes"] = "fine",
) -> Federation:
    """CIFAR-100: colour photographs of 100 kinds of things in 20 groups, 100 devices by Dirichlet(0.3) draws.

    All else is as for CIFAR-10.
    """
    form = {"fine": FINE, "coarse": COARSE}[choose("labels", labels, ("fine", "coarse"))]
    return _shared_out(form, partition, devices, classes, alpha, draw, shards, capped, test)


def _shared_out(
    form: Form,
    partition: partitions.Name,
    devices: int,
    classes: int,
    alpha: float,
    draw: int,
    shards: int | None,
    capped: bool | None,
    test: str,
) -> Federation:
    check_whole("draw", draw, 0)
    choose("partition", partition, get_args(partitions.Name))
    choose("test", test, ("server", "devices"))
    sources = _files(form)
    stored = cached({"dataset": form.dataset}, sources, lambda: _parse(form, sources))
    x, y, trained_on = stored["x"], stored["y"][:, form.at], int(stored["train"])
    n = trained_on if test == "server" else len(y)
    device = partitions.by_name(
        partition, y[:n], draw, devices=devices, classes=classes, alpha=alpha, each=shards, capped=capped
    )
    kept = np.flatnonzero(device >= 0)
    split, seed = (np.zeros(len(kept), bool), None) if test == "server" else (None, draw)
    federation = Federation.from_arrays(
        form.dataset, x[kept], y[kept], device[kept], split, classes=form.classes, holdout_seed=seed
    )
    if test == "server":
        federation = federation.tested_on(x[n:], y[n:])
    note = f"a sample of {form.title}: {len(y):,} of {IMAGES:,} images" if len(y) < IMAGES else ""
    return replace(
        federation, table=stored["table"], expand=standardised, note=note, class_names=_names(sources[0].parent, form)
    )


def cifar10_files() -> list[Path]:
    """The files of CIFAR-10."""
    return _files(CIFAR10)


def cifar100_files() -> list[Path]:
    """The files of CIFAR-100."""
    return _files(FINE)


def _files(form: Form) -> list[Path]:
    """The files: in the dataset's folder, or in the folder that the archive unpacks to there; each plain or packed."""
    return [
        source_files.raw(
            form.dataset, *(f"{folder}{name}{end}" for folder in ("", f"{form.unpacked}/") for end in ("", ".gz"))
        )
        for name in form.files
    ]


def _parse(form: Form, sources: list[Path]) -> dict[str, NDArray]:
    parts = [_read(path, form) for path in sources]
    y = np.concatenate([records[:, : form.labels] for records in parts])
    pixels = np.concatenate([records[:, form.labels :] for records in parts])
    x = np.ascontiguousarray(pixels.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1))
    trained_on = len(x) - len(parts[-1])
    mean, sd = _moments(x[:trained_on])
    scale = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    return {"x": x, "y": y, "table": np.stack([mean, scale]).astype(np.float32), "train": np.array(trained_on)}


def _moments(x: NDArray) -> tuple[NDArray, NDArray]:
    """The mean and the sd of each channel, from how often each of the 256 values occurs."""
    counts = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(CHANNELS)])
    share, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256)
    mean = share @ values
    return mean, np.sqrt(share @ values**2 - mean**2)


def _read(path: Path, form: Form) -> NDArray:
    """The records of a file: [n, label bytes + pixels]."""
    record = form.labels + PIXELS
    with source_files.opened(path) as stream:
        body = stream.read(MOST * record + 1)
    if not body or len(body) % record or len(body) > MOST * record:
        size = "more" if len(body) > MOST * record else f"{len(body):,}"
        raise InputError(str(path), f"{size} bytes", f"should be 1 to {MOST:,} records of {record:,} bytes")
    records = np.frombuffer(body, np.uint8).reshape(-1, record)
    for at, most in ((0, COARSE.classes), (1, FINE.classes)) if form.labels == 2 else ((0, form.classes),):
        if records[:, at].max() >= most:
            where = int(records[:, at].argmax())
            raise InputError(f"{path}: label of image {where}", int(records[where, at]), f"should be 0 .. {most - 1}")
    return records


def _names(folder: Path, form: Form) -> tuple[str, ...] | None:
    """The names of the classes, if their file is next to the images."""
    path = folder / form.names
    if not path.exists():
        return None
    text = source_files.content(path, limit=LONGEST).decode("utf-8", "replace")
    names = tuple(name for line in text.splitlines() if (name := line.strip()))
    if len(names) != form.classes:
        raise InputError(str(path), f"{len(names)} names", f"should be {form.classes}, a line for each")
    return names
