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
from folb.errors import InputError, check, check_whole, refused
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
    kind, shape = train.x.dtype, train.x.shape[1:]
    check(f"{path / 'test'}: dtype of x", str(test.x.dtype), test.x.dtype == kind, f"should be {kind}, as in train")
    same = test.x.shape[1:] == shape
    check(f"{path / 'test'}: shape of x", test.x.shape[1:], same, f"should be {shape}, as in train")
    check(f"{path / 'train'}: len(x)", 0, len(train.y), "should be at least 1 sample")
    ours, theirs = test.device.dtype, train.device.dtype
    good = not len(test.y) or (ours.kind == "U") == (theirs.kind == "U")
    check(f"{path / 'test'}: device", str(ours), good, f"should be {theirs}, as in train")
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
    x: NDArray
    y: NDArray
    device: NDArray  # the distinct ones, in ascending order
    size: NDArray  # the samples of each


def _side(path: Path) -> Side:
    x, y, device = (_array(path / f"{name}.npy") for name in ("x", "y", "device"))
    in_order = x.flags.c_contiguous
    expected = f"should be {', '.join(TYPES)} in C order: a mapped array cannot be converted"
    kind = f"{x.dtype.str}{'' if in_order else ', Fortran'}"
    check(f"{path}: type of x", kind, x.dtype in TYPES and in_order, expected)
    check(f"{path}: shape of x", x.shape, x.ndim, "should have samples first, and numbers in every sample")
    for first, block in blocks(x):
        features(str(path), block, first)
    for field, values in (("y", y), ("device", device)):
        check_one_per_sample(str(path), field, values, x)
    check(f"{path}: len(x)", len(x), len(x) < 2**31, "should be less than 2^31: samples are numbered in 32 bits")
    check(f"{path}: device", str(device.dtype), device.dtype.kind in "iuU", "should be whole numbers or strings")
    down = np.flatnonzero(device[1:] < device[:-1])
    if len(down):
        i = int(down[0]) + 1
        expected = f"should not come after {device[i - 1].item()!r}: samples should be in the order of their devices"
        raise InputError(f"{path}: device[{i}]", device[i].item(), expected)
    start = np.flatnonzero(np.append(True, device[1:] != device[:-1])[: len(device)])
    return Side(x, y, device[start], np.diff(start, append=len(device)).astype(np.int32))


def _array(path: Path) -> NDArray:
    try:
        array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "should be a readable .npy file") from None
    except Exception as error:  # in a damaged file the parser may raise anything
        raise InputError(str(path), str(error), "should be an undamaged .npy, without Python objects") from None
    check(str(path), type(array).__name__, isinstance(array, np.ndarray), "should be a single array")
    return array


def _about(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with refused(str(path), "should be json", OSError, ValueError, RecursionError):
        about = json.loads(regular(path).read_bytes())
    good = isinstance(about, dict) and isinstance(about.get("note", ""), str)
    check(str(path), about, good, "should be an object with classes, a number, and a note, a text")
    note, classes = about.get("note", ""), about.get("classes", 2)
    check(f"{path}: note", note, note.isprintable(), "should be one line of text")
    check_whole(f"{path}: classes", classes, 2, 2**31 - 1)
    return about


def save(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Write a federation as a new directory, whole or not at all; references into a table become samples."""
    path = Path(path)
    check("path", str(path), not path.exists(), "should not exist yet")
    with atomic.whole(path) as part:
        for name, side in (("train", federation.train), ("test", federation.test)):
            (part / name).mkdir()
            np.save(part / name / "y.npy", side.y)
            device = np.repeat(np.arange(federation.N, dtype=np.int32), side.size)
            # a file has a device for every sample: the last one gets those of the server
            rest = np.full(len(side.y) - len(device), federation.N - 1, np.int32)
            np.save(part / name / "device.npy", np.concatenate([device, rest]))
            with open(part / name / "x.npy", "wb") as file:
                shape = (len(side.y), *federation.shape)
                header = {"descr": federation.kind.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for _, block in blocks(side.x):
                    file.write(np.ascontiguousarray(federation.inputs(block)).data)
        about = {"classes": federation.classes, "note": federation.note}
        (part / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
