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
from folb.errors import check, check_whole, choose
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
    choose("test", "server" if test is None else test, ("server",))
    choose("pixels", "unit" if pixels is None else pixels, ("unit",))
    sources = raw_files()
    arrays = cached({"dataset": "mnist", "parts": 2}, sources, lambda: _parse(sources))
    how = dict(name=partition, devices=devices, classes=classes, alpha=alpha, each=shards, capped=capped)
    federation = shared_out("mnist", arrays, arrays["y"], CLASSES, test == "server", draw, how)
    return replace(federation, table=None, expand=unit) if pixels else federation


def shared_out(
    name: str, arrays: dict[str, NDArray], y: NDArray, classes: int, published: bool, draw: int, how: dict[str, Any]
) -> Federation:
    """Standardised images on devices, with a random tenth to test on; or tested on the `published` test images."""
    x, n = arrays["x"], int(arrays["train"]) if published else len(y)
    device = partitions.by_name(labels=y[:n], seed=draw, **how)
    kept = np.flatnonzero(device >= 0)
    given = {"split": np.zeros(len(kept), bool)} if published else {"holdout_seed": draw}
    federation = Federation.from_arrays(name, x[kept], y[kept], device[kept], classes=classes, **given)
    federation = federation.tested_on(x[n:], y[n:]) if published else federation
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
        expected = f"labels: should be as many as the {len(x)} images of {images.name}"
        check(str(labels), len(y), len(x) == len(y), expected)
        check(str(labels), int(y.max()), y.max() < CLASSES, f"label: should be a digit 0 .. {CLASSES - 1}")
        xs.append(x)
        ys.append(y)
    x, y = np.concatenate(xs), np.concatenate(ys)
    table = means_and_scales(x.mean(axis=0), np.square(x, dtype=np.uint16).mean(axis=0))
    return {"x": x, "y": y, "table": table, "train": np.array(len(xs[0]))}


def means_and_scales(mean: NDArray, square: NDArray) -> NDArray:
    """The table of `standardised`, from the means of the values and of their squares."""
    sd = np.sqrt(square - mean**2)
    return np.stack([mean, np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)]).astype(np.float32)


def _read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> NDArray:
    """The bytes of an idx file as an array: a magic number and the sizes, big-endian, then the bytes."""
    with source_files.opened(path) as stream:
        header = stream.read(8 + 4 * len(shape))
        number = int.from_bytes(header[:4], "big")
        check(str(path), number, number == magic, f"magic number: should be {magic}")
        sizes = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
        good = len(sizes) == 1 + len(shape) and sizes[1:] == shape and 1 <= sizes[0] <= MOST
        check(str(path), sizes, good, f"sizes: should be (n, {', '.join(map(str, shape))}), n up to {MOST}")
        n = int(np.prod(sizes))
        body = stream.read(n + 1)
    size = f"{'more' if len(body) > n else len(body)} bytes"
    check(str(path), size, len(body) == n, f"should be {n}, as its header says")
    return np.frombuffer(body, dtype=np.uint8).reshape(sizes)
