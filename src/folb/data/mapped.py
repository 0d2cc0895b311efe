"""Samples in a directory of numpy files that are mapped, not read: train/ and test/, each with x, y and device.npy.

The samples of a side are in the order of their devices, so that any number of them can be used in place.
`federation.json`, if there is one, has the number of classes and a note.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folb import atomic
from folb.atomic import regular
from folb.data.federation import Federation, Split, blocks, check_one_per_sample, features, labels, most_classes, starts
from folb.errors import InputError
from folb.typing import NDArray

ABOUT = "federation.json"
TYPES = ("float32", "int32", "uint8")  # what models take without a conversion


def is_mapped(path: str | os.PathLike[str]) -> bool:
    """Whether this is a directory of that layout, complete or not."""
    return any(any((Path(path) / side).glob("*.npy")) for side in ("train", "test"))


def load(path: str | os.PathLike[str]) -> Federation:
    """A directory with train/ and test/, each with x.npy, y.npy and device.npy, which are mapped, not read."""
    path = Path(path)
    about = _about(path / ABOUT)
    train, test = _side(path / "train"), _side(path / "test")
    for fact in ("dtype", "shape"):
        ours, theirs = (str(side.x.dtype) if fact == "dtype" else side.x.shape[1:] for side in (test, train))
        if ours != theirs:
            raise InputError(f"{path / 'test'}: {fact} of x", ours, f"should be {theirs}, as in train")
    if len(train.y) == 0:
        raise InputError(f"{path / 'train'}: len(x)", 0, "should be at least 1 sample")
    kinds = [side.device.dtype.kind for side in (test, train)]
    if len(test.y) and ("U" in kinds) != (kinds == ["U", "U"]):
        raise InputError(
            f"{path / 'test'}: device", str(test.device.dtype), f"should be {train.device.dtype}, as in train"
        )
    N = len(train.device)
    place = np.minimum(np.searchsorted(train.device, test.device), N - 1)
    strange = np.flatnonzero(train.device[place] != test.device)
    if len(strange):
        who = test.device[strange[0]].item()
        raise InputError(f"{path / 'test'}: device", who, "should have samples in train too")
    size = np.zeros(N, np.int32)
    size[place] = test.size
    classes = about.get("classes")
    most = most_classes(len(train.y) + len(test.y)) if classes is None else classes
    y, test_y = (labels(str(path / name), side.y, most) for name, side in (("train", train), ("test", test)))
    if classes is None:
        classes = max(2, int(y.max()) + 1, int(test_y.max(initial=0)) + 1)
    return Federation(
        os.fspath(path),
        Split(train.x, y, starts(train.size), train.size),
        Split(test.x, test_y, starts(size), size),
        classes,
        note=about.get("note", ""),
        device_names=tuple(train.device.tolist()) if train.device.dtype.kind == "U" else None,
    )


class Side(NamedTuple):
    """The files of train/ or test/."""

    x: NDArray
    y: NDArray
    device: NDArray  # the distinct ones, in ascending order
    size: NDArray  # the samples of each


def _side(path: Path) -> Side:
    x, y, device = (_array(path / f"{name}.npy") for name in ("x", "y", "device"))
    if x.dtype not in TYPES or not x.flags.c_contiguous:
        expected = f"should be {', '.join(TYPES)} in C order: a mapped array cannot be converted"
        raise InputError(f"{path}: type of x", f"{x.dtype.str}{'' if x.flags.c_contiguous else ', Fortran'}", expected)
    if x.ndim == 0:
        raise InputError(f"{path}: shape of x", x.shape, "should have samples first, and numbers in every sample")
    for first, block in blocks(x):
        features(str(path), block, first)
    for field, values in (("y", y), ("device", device)):
        check_one_per_sample(str(path), field, values, x)
    if len(x) >= 2**31:
        raise InputError(f"{path}: len(x)", len(x), "should be less than 2^31: samples are numbered in 32 bits")
    if device.dtype.kind not in "iuU":
        raise InputError(f"{path}: device", str(device.dtype), "should be whole numbers or strings")
    down = np.flatnonzero(device[1:] < device[:-1])
    if len(down):
        i = int(down[0]) + 1
        expected = f"should not come after {device[i - 1].item()!r}: samples should be in the order of their devices"
        raise InputError(f"{path}: device[{i}]", device[i].item(), expected)
    fresh = np.ones(len(device), bool)
    fresh[1:] = device[1:] != device[:-1]
    start = np.flatnonzero(fresh)
    return Side(x, y, device[start], np.diff(start, append=len(device)).astype(np.int32))


def _array(path: Path) -> NDArray:
    try:
        array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "should be a readable .npy file") from None
    except Exception as error:  # in a damaged file the parser may raise anything
        raise InputError(str(path), str(error), "should be an undamaged .npy, without Python objects") from None
    if not isinstance(array, np.ndarray):
        raise InputError(str(path), type(array).__name__, "should be a single array")
    return array


def _about(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        about = json.loads(regular(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(str(path), str(error), "should be json") from None
    if not isinstance(about, dict) or not isinstance(about.get("note", ""), str):
        raise InputError(str(path), about, "should be an object with classes, a number, and a note, a text")
    if not about.get("note", "").isprintable():
        raise InputError(f"{path}: note", about["note"], "should be one line of text")
    classes = about.get("classes", 2)
    if not isinstance(classes, int) or not 2 <= classes < 2**31:
        raise InputError(f"{path}: classes", classes, "should be a whole number from 2 to 2^31 - 1")
    return about


def save(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Write a federation as a new directory, whole or not at all; references into a table become samples."""
    path = Path(path)
    if path.exists():
        raise InputError("path", str(path), "should not exist yet")
    with atomic.whole(path) as part:
        for name, side in (("train", federation.train), ("test", federation.test)):
            (part / name).mkdir()
            np.save(part / name / "y.npy", side.y)
            device = np.repeat(np.arange(federation.N, dtype=np.int32), side.size)
            # a file has a device for every sample: the last one gets those of the server
            rest = np.full(len(side.y) - len(device), federation.N - 1, np.int32)
            np.save(part / name / "device.npy", np.concatenate([device, rest]))
            with open(part / name / "x.npy", "wb") as file:
                like = _inputs(federation, federation.train.x[:1])
                about = {"descr": like.dtype.str, "fortran_order": False, "shape": (len(side.y), *federation.shape)}
                np.lib.format.write_array_header_1_0(file, about)
                for _, block in blocks(side.x):
                    file.write(np.ascontiguousarray(_inputs(federation, block)).data)
        about = {"classes": federation.classes, "note": federation.note}
        (part / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def _inputs(federation: Federation, x: NDArray) -> NDArray:
    return x if federation.expand is None else np.asarray(federation.expand(federation.table, x))
