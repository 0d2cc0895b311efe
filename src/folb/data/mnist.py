"""MNIST: the four idx files, all 70,000 images, shared out over devices (LeCun et al., 1998)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np

from folb.data import partition as partitions
from folb.data import source_files
from folb.data.cache import cached
from folb.data.federation import Federation
from folb.errors import InputError, check_whole, choose
from folb.typing import NDArray

PARTS = ("train", "t10k")
IMAGES, LABELS = 2051, 2049  # the magic numbers of idx3 and idx1 files of bytes
SIDE, CLASSES = 28, 10
MOST = 1_000_000  # images in one file; a header that claims more is damaged


def mnist(
    *,
    partition: Annotated[partitions.Name, "how devices get their images"] = "power_law",
    devices: Annotated[int, "number of devices"] = 1000,
    classes: Annotated[int, "digits per device, for power_law, classes and random_classes"] = 2,
    alpha: Annotated[float, "how even a device's digits are, for dirichlet: small is uneven"] = 0.5,
    draw: Annotated[int, "which random draw of the partition and of the test samples"] = 0,
    shards: Annotated[int | None, "shards per device, for shards; 2 if not set"] = None,
    capped: Annotated[bool | None, "for dirichlet: a device with its even share gets no more; no if not set"] = None,
    test: Annotated[
        Literal["server"] | None,
        "train on MNIST's 60,000 images, test on its 10,000; if not set, on a tenth of each device's",
    ] = None,
    pixels: Annotated[Literal["unit"] | None, "from 0 to 1; if not set, standardised over all images"] = None,
) -> Federation:
    """MNIST, 1,000 devices with two digits each and sizes by a power law, as in FedProx.

    Device k has the digits (k + j) mod 10: five images of each, and more in lognormal(0, 2) proportions. A tenth of
    each device's images is for testing. A device has 69 images on average. FedProx reports an sd of 106; its recipe
    gives more, depending on the draw (docs/datasets.md). Pixels are standardised over all images; pixels that never
    change are 0. The federation holds bytes, which `standardised` turns into inputs.
    """
    check_whole("draw", draw, 0)
    choose("partition", partition, get_args(partitions.Name))
    for name, word, known in (("test", test, "server"), ("pixels", pixels, "unit")):
        if word is not None:
            choose(name, word, (known,))
    sources = raw_files()
    arrays = cached({"dataset": "mnist", "parts": 2}, sources, lambda: _parse(sources))
    n = len(arrays["y"]) if test is None else int(arrays["train"])
    x, y = arrays["x"][:n], arrays["y"][:n]
    device = partitions.by_name(
        partition, y, draw, devices=devices, classes=classes, alpha=alpha, each=shards, capped=capped
    )
    kept = device >= 0
    split, seed = (None, draw) if test is None else (np.zeros(kept.sum(), bool), None)
    federation = Federation.from_arrays(
        "mnist", x[kept], y[kept], device[kept], split, classes=CLASSES, holdout_seed=seed
    )
    if test is not None:
        federation = federation.tested_on(arrays["x"][n:], arrays["y"][n:])
    if pixels is not None:
        return replace(federation, expand=unit)
    return replace(federation, table=arrays["table"], expand=standardised)


def standardised(table: Any, x: Any) -> Any:
    """Bytes to inputs: each pixel minus its mean, divided by its sd; `table` has the means and the inverse sds."""
    return (x - table[0]) * table[1]


def unit(table: None, x: Any) -> Any:
    """Bytes to inputs from 0 to 1; no table is needed."""
    return x * np.float32(1 / 255)


def raw_files() -> list[Path]:
    """The idx files: each packed or plain, under either of its two names."""
    names = [f"{part}-{kind}-ubyte" for part in PARTS for kind in ("images-idx3", "labels-idx1")]
    return [source_files.raw("mnist", f"{name}.gz", name, name.replace("-idx", ".idx")) for name in names]


def _parse(sources: list[Path]) -> dict[str, NDArray]:
    xs, ys = [], []
    for images, labels in zip(sources[::2], sources[1::2], strict=True):
        x, y = _read_idx(images, IMAGES, (SIDE, SIDE)), _read_idx(labels, LABELS, ())
        if len(x) != len(y):
            raise InputError(str(labels), len(y), f"labels: should be as many as the {len(x)} images of {images.name}")
        if y.max(initial=0) >= CLASSES:
            raise InputError(str(labels), int(y.max()), f"label: should be a digit 0 .. {CLASSES - 1}")
        xs.append(x)
        ys.append(y)
    x, y = np.concatenate(xs), np.concatenate(ys)
    mean = x.mean(axis=0)
    sd = np.sqrt(np.square(x, dtype=np.uint16).mean(axis=0) - mean**2)
    scale = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    return {"x": x, "y": y, "table": np.stack([mean, scale]).astype(np.float32), "train": np.array(len(xs[0]))}


def _read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> NDArray:
    """The bytes of an idx file as an array: a magic number and the sizes, big-endian, then the bytes."""
    with source_files.opened(path) as stream:
        header = stream.read(8 + 4 * len(shape))
        number = int.from_bytes(header[:4], "big")
        if number != magic:
            raise InputError(str(path), number, f"magic number: should be {magic}")
        sizes = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
        if len(sizes) != 1 + len(shape) or sizes[1:] != shape or not 1 <= sizes[0] <= MOST:
            raise InputError(str(path), sizes, f"sizes: should be (n, {', '.join(map(str, shape))}), n up to {MOST}")
        n = int(np.prod(sizes))
        body = stream.read(n + 1)
    if len(body) != n:
        raise InputError(
            str(path), f"{'more' if len(body) > n else len(body)} bytes", f"should be {n}, as its header says"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(sizes)
