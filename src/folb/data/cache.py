"""Processed arrays, kept so that a dataset is parsed once. An entry is an npz file: zip's CRC detects damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from folb.atomic import regular
from folb.data import source_files
from folb.errors import InputError
from folb.typing import NDArray

FORMAT = 1  # part of every key: increase it when the same recipe gives other arrays


def directories() -> list[Path]:
    """Where entries may be: next to the data directory, or else in the platform's cache directory."""
    folders = [source_files.directory()]
    with contextlib.suppress(InputError):  # a user without a home has only the first
        folders.append(source_files.platform_cache() / "data")
    return list(dict.fromkeys(folder.with_name(folder.name + ".processed") for folder in folders))


def cached(
    recipe: Mapping[str, Any], sources: Sequence[Path], build: Callable[[], dict[str, NDArray]]
) -> dict[str, NDArray]:
    """The arrays of `build()`, or of a sound entry for these sources and `recipe`: all else that matters, as JSON."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    key = hashlib.sha256(json.dumps([FORMAT, recipe, stats], sort_keys=True).encode()).hexdigest()
    name = f"{recipe.get('dataset', 'data')}-{key[:16]}.npz"
    for folder in directories():
        if (arrays := _load(folder / name)) is not None:
            return arrays
    arrays = build()
    for folder in directories():
        if source_files.writable(folder) and _store(folder / name, arrays):
            break
    return arrays


def _load(path: Path) -> dict[str, NDArray] | None:
    try:
        with open(regular(path), "rb") as file, np.load(file, allow_pickle=False) as entry:
            return {name: entry[name] for name in entry.files}
    except Exception:  # there is none, or it is damaged, which may raise anything: it is then built again
        return None


def _store(path: Path, arrays: dict[str, NDArray]) -> bool:
    """Write an entry under a temporary name and rename it. If the disk is full, only the entry is lost, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder, path.name)
            with open(part, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(part, path)
        return True
    except OSError:
        return False
