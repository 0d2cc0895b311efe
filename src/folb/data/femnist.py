"""FEMNIST: handwritten digits and letters by writer, 62 classes 0-9 A-Z a-z (LEAF; Caldas et al., 2018).

Read from LEAF's json (x: 784 numbers in [0, 1]), from the parquet file of the hub's `flwrlabs/femnist` (PNG
images) or from an npz file (images, labels, writer, writer_ids, split). All three become the same bytes: rows
from top to bottom, paper 255 and ink 0, and the model sees them as LEAF has them, from 0 (ink) to 1 (paper).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from folb import npz
from folb.data import leaf, source_files
from folb.data import partition as partitions
from folb.data.cache import cached
from folb.data.federation import Federation, labels
from folb.data.tabular import parquet_batches
from folb.errors import InputError, check, check_whole, choose, refused
from folb.typing import NDArray

SIDE, CLASSES, WRITERS = 28, 62, 3550
LOWER_A, LOWER_J = 36, 45
LIMIT = 4_000_000_000  # bytes of one file, unpacked: several times the largest known
UNKNOWN = 2  # in the array `split`, beside 0 for train and 1 for test


def femnist(
    *,
    partition: Annotated[
        Literal["writer", "power_law", "fedprox"], "each device a writer; sizes by a power law; or FedProx's own draw"
    ] = "writer",
    devices: Annotated[int, "number of devices; of writers, those with the most images"] = 200,
    classes: Annotated[int, "classes per device, for power_law"] = 2,
    draw: Annotated[int, "which random draw of the partition and of the test samples"] = 0,
    source: Annotated[
        Literal["any", "leaf", "parquet", "npz"], "which files to read; any: the first kind found"
    ] = "any",
) -> Federation:
    """FEMNIST: handwritten digits and letters, by writer, by a power law, or as FedProx drew them.

    - writer: LEAF's devices. The files' own split is used if they have one; otherwise a tenth is for testing.
    - power_law: another reading of the paper: `classes` of all 62 per device, and sizes by a power law, as for MNIST.
    - fedprox: FedProx's own draw: only the letters a-j, three per device, and lognormal(4, 1) + 5 images. In its script
      an inverted test makes all devices share the first images of a letter; here they share none.
    """
    check_whole("draw", draw, 0)
    choose("partition", partition, ("writer", "power_law", "fedprox"))
    form, paths = found(source)
    read = {"leaf": _read_leaf, "parquet": _read_parquet, "npz": _read_npz}[form]
    stored = cached({"dataset": "femnist", "form": form}, paths, lambda: _stacked(paths, [*read(paths)]))
    x, y, writer, split = (stored[name] for name in ("x", "y", "writer", "split"))
    most = CLASSES
    if partition == "writer":
        device = partitions.natural(writer, devices=devices)
    elif partition == "power_law":
        device = partitions.power_law(y, draw, devices=devices, classes=classes)
    else:
        letters = np.flatnonzero((y >= LOWER_A) & (y <= LOWER_J))
        check("partition", partition, len(letters), "needs images of the letters a-j; there are none")
        device = np.full(len(y), -1)
        device[letters] = partitions.lognormal(y[letters], draw, devices=devices)
        y, most = y.astype(np.int32) - LOWER_A, LOWER_J - LOWER_A + 1
    kept = device >= 0
    given = partition == "writer" and UNKNOWN not in split
    test = {"split": split[kept] == 1} if given else {"holdout_seed": draw}
    federation = Federation.from_arrays("femnist", x[kept], y[kept], device[kept], classes=most, **test)
    writers = int(writer.max()) + 1
    note = f"a sample of FEMNIST: {writers} of LEAF's {WRITERS:,} writers" if writers < WRITERS else ""
    return replace(federation, expand=scaled, note=note)


def scaled(table: Any, x: Any) -> Any:
    """Bytes to inputs between 0 and 1."""
    return x / np.float32(255)


# some images as a file has them: bytes [n, 28, 28], labels, the writers' ids, and 0 train, 1 test
Images = tuple[NDArray, NDArray, NDArray, NDArray]


def found(source: str) -> tuple[str, list[Path]]:
    """The first form that has files, and its files."""
    folder = source_files.directory() / "femnist"
    train, test, everything = (sorted((folder / side).glob("*.json*")) for side in ("train", "test", "all_data"))
    there = {
        "leaf": train + test if train and test else everything or sorted(folder.glob("*.json*")),
        "parquet": sorted(folder.glob("*.parquet")),
        "npz": sorted(folder.glob("femnist_writers.npz")),
    }
    choose("source", source, ("any", *there))
    for form, paths in there.items():
        if paths and source in ("any", form):
            return form, paths
    wanted = {"leaf": "train/*.json and test/*.json", "npz": "femnist_writers.npz"}
    return source, [source_files.raw("femnist", wanted.get(source, "train-00000-of-00001.parquet"))]  # it raises


def _stacked(paths: list[Path], parts: list[Images]) -> dict[str, NDArray]:
    check(str(paths[0]), 0, parts, "rows: should be at least 1")
    x, y, writer, split = (np.concatenate(column) for column in zip(*parts, strict=True))
    if x.mean() < 127.5:  # ink covers the smaller part of an image, so the colours of this source are inverted
        x = 255 - x
    ids, index = np.unique(writer, return_inverse=True)
    return {"x": x, "y": y.astype(np.uint8), "writer": index.astype(np.int32), "split": split, "ids": ids}


def _read_leaf(paths: list[Path]) -> Iterator[Images]:
    """LEAF's json; the folder of a file says whether its images are to train on or to test on."""
    for side in {path.parent: None for path in paths}:
        mark = {"train": 0, "test": 1}.get(side.name, UNKNOWN)
        for name, user in leaf.users(path for path in paths if path.parent == side):
            x, y, n = user.x, labels(user.where, user.y, CLASSES), len(user.y)
            check(f"{user.where}: x", x.shape, x.shape == (n, SIDE**2), f"should be {SIDE**2} numbers for each image")
            low, high = x.min().item(), x.max().item()
            check(f"{user.where}: x", [low, high], 0 <= low <= high <= 1, "should be numbers between 0 and 1")
            images = np.rint(x * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
            yield images, y, np.full(n, name), np.full(n, mark, np.uint8)


def _read_parquet(paths: list[Path]) -> Iterator[Images]:
    """The hub's columns: image (a struct with the PNG file's bytes), writer_id and character, a class number."""
    columns = ("image", "writer_id", "character")
    for path in paths:
        first = 0
        for batch in parquet_batches(path, columns):
            image, writer, character = (batch.column(name) for name in columns)
            whole = not (image.null_count or writer.null_count or character.null_count)
            check(str(path), None, whole, "should have a value in every row")
            fields = [field.name for field in getattr(image.type, "fields", [])]
            check(f"{path}: image", str(image.type), "bytes" in fields, "should be structs with the bytes of PNG files")
            where = f"{path}, rows from {first}"
            x = _decoded(where, image.field("bytes").to_pylist())
            y = labels(f"{where}: character", character.to_numpy(zero_copy_only=False), CLASSES)
            ids = np.asarray(writer.to_pylist(), dtype=np.str_)
            yield x, y, ids, np.full(len(y), UNKNOWN, np.uint8)
            first += len(y)


def _decoded(where: str, pngs: list[bytes]) -> NDArray:
    try:
        image = import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise InputError(where, "pillow", "is needed to read it: pip install 'folb[parquet]'") from error
    rows = []
    for i, png in enumerate(pngs):
        # a damaged image can fail anywhere in the decoder
        failed = refused(f"{where}: image[{i}]", "should be a PNG file", Exception)
        with failed, image.open(io.BytesIO(png), formats=("PNG",)) as opened:
            size = opened.size
            rows.append(opened.convert("L").tobytes() if size == (SIDE, SIDE) else b"")
        check(f"{where}: image[{i}]", size, size == (SIDE, SIDE), f"should be {SIDE} x {SIDE} pixels")
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, SIDE, SIDE)


def _read_npz(paths: list[Path]) -> Iterator[Images]:
    (path,) = paths
    names = ("images", "labels", "writer", "writer_ids", "split")
    x, y, writer, ids, split = npz.arrays(path, names, limit=LIMIT).values()
    good = x.dtype == np.uint8 and x.shape[1:] == (SIDE, SIDE)
    check(f"{path}: images", (str(x.dtype), x.shape), good, f"should be bytes, n x {SIDE} x {SIDE}")
    for name, values in (("labels", y), ("writer", writer), ("split", split)):
        good = values.shape == (len(x),) and values.dtype.kind in "iu"
        check(f"{path}: {name}", (str(values.dtype), values.shape), good, f"should be {len(x)} whole numbers")
    good = len(x) and writer.min() >= 0 and writer.max() < len(ids)
    check(f"{path}: writer", len(x), good, f"images: each should have a writer 0 .. {len(ids) - 1}")
    check(f"{path}: split", int(split.max()), np.isin(split, (0, 1)).all(), "should be 0 for train or 1 for test")
    yield x, labels(f"{path}: labels", y, CLASSES), ids[writer], split.astype(np.uint8)
