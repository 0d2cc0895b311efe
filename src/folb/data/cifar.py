"""CIFAR-10 and CIFAR-100 from their binary files, shared out over devices (Krizhevsky, 2009).

A record is one label byte (CIFAR-100: two, the coarse label and the fine one) and 3,072 bytes of pixels: all red ones
row by row, then the green and the blue ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np

from folb.data import partition as partitions
from folb.data import source_files
from folb.data.cache import cached
from folb.data.federation import Federation
from folb.data.mnist import means_and_scales, shared_out
from folb.errors import check, check_whole, choose
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
    names: str  # the file with the names of the classes
    labels: tuple[int, ...]  # of each label byte of a record: its classes
    at: int  # which of them is the label


TEN = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR10 = Form("cifar10", "CIFAR-10", "cifar-10-batches-bin", TEN, "batches.meta.txt", (10,), 0)
HUNDRED = ("train.bin", "test.bin")
FINE = Form("cifar100", "CIFAR-100", "cifar-100-binary", HUNDRED, "fine_label_names.txt", (20, 100), 1)
COARSE = FINE._replace(names="coarse_label_names.txt", at=0)

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
    how = dict(name=partition, devices=devices, classes=classes, alpha=alpha, each=shards, capped=capped)
    return _federation(CIFAR10, test, draw, how)


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
    how = dict(name=partition, devices=devices, classes=classes, alpha=alpha, each=shards, capped=capped)
    return _federation(form, test, draw, how)


def _federation(form: Form, test: str, draw: int, how: dict[str, Any]) -> Federation:
    check_whole("draw", draw, 0)
    choose("partition", how["name"], get_args(partitions.Name))
    choose("test", test, ("server", "devices"))
    sources = raw_files(form)
    stored = cached({"dataset": form.dataset}, sources, lambda: _parse(form, sources))
    y, classes = stored["y"][:, form.at], form.labels[form.at]
    federation = shared_out(form.dataset, stored, y, classes, test == "server", draw, how)
    note = f"a sample of {form.title}: {len(y):,} of {IMAGES:,} images" if len(y) < IMAGES else ""
    return replace(federation, note=note, class_names=_names(sources[0].parent / form.names, classes))


def raw_files(form: Form) -> list[Path]:
    """The files: in the dataset's folder, or in the folder that the archive unpacks to there; each plain or packed."""
    folders = ("", f"{form.unpacked}/")
    return [
        source_files.raw(form.dataset, *(f"{folder}{name}{end}" for folder in folders for end in ("", ".gz")))
        for name in form.files
    ]


def _parse(form: Form, sources: list[Path]) -> dict[str, NDArray]:
    parts = [_read(path, form.labels) for path in sources]
    y, pixels = np.split(np.concatenate(parts), [len(form.labels)], axis=1)
    x = np.ascontiguousarray(pixels.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1))
    trained_on = len(x) - len(parts[-1])
    # how often each channel has each of the 256 values
    counts = np.stack([np.bincount(x[:trained_on, ..., c].ravel(), minlength=256) for c in range(CHANNELS)])
    share, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256)
    table = means_and_scales(share @ values, share @ values**2)
    return {"x": x, "y": y, "table": table, "train": np.array(trained_on)}


def _read(path: Path, labels: tuple[int, ...]) -> NDArray:
    """The records of a file: [n, label bytes + pixels]."""
    record = len(labels) + PIXELS
    with source_files.opened(path) as stream:
        body = stream.read(MOST * record + 1)
    size = "more" if len(body) > MOST * record else f"{len(body):,}"
    good = body and len(body) % record == 0 and len(body) <= MOST * record
    check(str(path), f"{size} bytes", good, f"should be 1 to {MOST:,} records of {record:,} bytes")
    records = np.frombuffer(body, np.uint8).reshape(-1, record)
    for at, classes in enumerate(labels):
        i = int(records[:, at].argmax())
        label = int(records[i, at])
        check(f"{path}: label of image {i}", label, label < classes, f"should be 0 .. {classes - 1}")
    return records


def _names(path: Path, classes: int) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    text = source_files.content(path, limit=LONGEST).decode("utf-8", "replace")
    names = tuple(name for line in text.splitlines() if (name := line.strip()))
    check(str(path), f"{len(names)} names", len(names) == classes, f"should be {classes}, a line for each")
    return names
