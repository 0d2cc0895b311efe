"""LEAF's json layout: files of `users`, `num_samples` and `user_data`, each user with its `x` and `y`."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folb.data import source_files
from folb.data.federation import Federation, HoldoutSeed, check_one_per_sample, features, labels, most_classes
from folb.errors import InputError, check, refused
from folb.typing import NDArray

SUFFIXES = (".json", ".json.gz")
LIMIT = 4_000_000_000  # bytes of one file, unpacked: ten times the largest that LEAF makes


def load(path: str | os.PathLike[str], *, holdout_seed: HoldoutSeed = None) -> Federation:
    """LEAF json: a directory with train/ and test/, or files without these, where a tenth is held out.

    Devices are numbered in the order of the users in the training files, which are sorted by name.
    """
    path = Path(path)
    sides = [side for side in ("train", "test") if os.path.isdir(path / side)]
    check(f"{path}: sub-directories", sides, len(sides) != 1, "should be both train and test, or neither")
    train = dict(users(_files(path / "train" if sides else path)))
    test = dict(users(_files(path / "test"))) if sides else {}
    for name, user in test.items():
        check(f"{user.where}: training samples", 0, name in train, f"should be in a file of {path / 'train'} too")
    everyone = [*train.values(), *test.values()]
    size = [len(user.y) for user in everyone]
    shape = everyone[0].x.shape[1:]
    for user in everyone:
        own, expected = user.x.shape[1:], f"should be {shape}, as in {everyone[0].where}"
        check(f"{user.where}: shape of a row of x", own, own == shape, expected)
    most = most_classes(sum(size))
    y = np.concatenate([labels(user.where, user.y, most) for user in everyone])
    x = np.concatenate([user.x for user in everyone])
    index = {name: k for k, name in enumerate(train)}
    device = np.repeat([index[name] for side in (train, test) for name in side], size)
    split = np.repeat([False] * len(train) + [True] * len(test), size) if sides else None
    federation = Federation.from_arrays(os.fspath(path), x, y, device, split, holdout_seed=holdout_seed)
    return replace(federation, device_names=tuple(train))


class User(NamedTuple):
    where: str  # file and user, for messages
    x: NDArray
    y: NDArray


def _files(path: Path) -> list[Path]:
    """The file itself, or the json files of a directory; hidden files, which archivers leave, are skipped."""
    if not os.path.isdir(path):
        return [path]
    try:
        files = [file for file in path.iterdir() if file.name.endswith(SUFFIXES) and not file.name.startswith(".")]
    except OSError as error:
        raise InputError(str(path), error.strerror, "should be a readable directory") from None
    check(f"{path}: json files", 0, files, "should be at least one .json or .json.gz")
    return sorted(files)


def users(paths: Iterable[Path]) -> Iterator[tuple[str, User]]:
    """The users of some files, by name; each should be in one file only."""
    seen: dict[str, str] = {}
    for path in paths:
        for name, user in _users(path):
            if name in seen:
                raise InputError(f"{path}: user", name, f"should be in one file only; see {seen[name]}")
            seen[name] = user.where
            yield name, user


def _users(file: Path) -> Iterator[tuple[str, User]]:
    content = _parse(file)
    expected = "should be a json object with users, num_samples and user_data"
    check(str(file), content, isinstance(content, dict), expected)
    names = _get(str(file), content, "users", list)
    num_samples = _get(str(file), content, "num_samples", list)
    user_data = _get(str(file), content, "user_data", dict)
    check(f"{file}: users", names, names, "should be at least one")
    count = len(num_samples)
    check(f"{file}: len(num_samples)", count, count == len(names), f"should be len(users) = {len(names)}")
    for name, n in zip(names, num_samples, strict=True):
        check(f"{file}: users", name, isinstance(name, str), "should be strings")
        where = f"{file}: user {name!r:.80}"
        check(f"{where}: user_data", None, name in user_data, "is missing, or the user is listed twice")
        data = user_data.pop(name)  # removed, so that users listed twice or not at all are found
        check(f"{where}: user_data", data, isinstance(data, dict), "should be a json object with x and y")
        x, y = (_numbers(where, field, data) for field in ("x", "y"))
        check_one_per_sample(where, "y", y, x)
        check(f"{where}: num_samples", n, n == len(y), f"should be the number of samples in user_data, {len(y)}")
        check(f"{where}: samples", 0, len(y), "should be at least 1")
        yield name, User(where, features(where, x), y)
    if user_data:
        raise InputError(f"{file}: users", next(iter(user_data)), "is in user_data, and should be listed in users too")


def _get(where: str, content: dict[str, Any], field: str, kind: type) -> Any:
    name = "a list" if kind is list else "an object"
    check(f"{where}: {field}", None, field in content, f"is missing; should be {name}")
    check(f"{where}: {field}", content[field], isinstance(content[field], kind), f"should be {name}")
    return content[field]


def _numbers(where: str, field: str, data: dict[str, Any]) -> NDArray:
    """A field that `_compact` made an array, or an error that says why it could not."""
    if field in data and isinstance(data[field], np.ndarray):
        return data[field]
    first = None
    for i, row in enumerate(_get(where, data, field, list)):
        numbers = _as_numbers(row)
        if numbers is None:
            raise InputError(f"{where}: {field}[{i}]", row, "should be a number, or equally long rows of numbers")
        first = numbers if first is None else first
        expected = f"should be {first.shape}, as of {field}[0]"
        check(f"{where}: shape of {field}[{i}]", numbers.shape, numbers.shape == first.shape, expected)
    raise InputError(f"{where}: {field}", data[field], "should be rows of numbers")


def _parse(file: Path) -> Any:
    with source_files.opened(file, LIMIT) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as lines:
        text = lines.read()
    with refused(str(file), "should be json", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=partial(_compact, file))


def _compact(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make x and y of a json object arrays as soon as it is read: lists take ten times the memory."""
    content = dict(pairs)
    if len(content) < len(pairs):  # Python would keep the last one without an error
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InputError(f"{file}: key", repeated, "should not be repeated in one object")
    for field in ("x", "y"):
        array = _as_numbers(content.get(field))
        if array is not None and array.ndim > 0:
            # a value that becomes infinite here fails in `features`, which can name the place
            with np.errstate(over="ignore"):
                content[field] = array.astype(np.float32) if field == "x" else array
    return content


def _as_numbers(values: Any) -> NDArray | None:
    """`values` as an array of numbers, or None if they are not numbers, such as json's strings and nulls."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, MemoryError):
        return None
    return array if array.dtype.kind in "biuf" else None
