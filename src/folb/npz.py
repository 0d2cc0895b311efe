"""Arrays from npz files that anyone may have made: bounded, and without Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from folb.atomic import regular
from folb.errors import InputError, check
from folb.typing import NDArray

UNPACKED = 1_000_000_000  # bytes that any file may unpack to
TIMES = 100  # or this many times its own bytes, if that is more: data rarely shrinks so much


def check_room(path: Path, size: int, limit: int | None = None) -> None:
    """Raise an `InputError` if a file unpacks to more bytes than it may: a few megabytes could fill the memory."""
    most = max(UNPACKED, TIMES * path.stat().st_size) if limit is None else limit
    check(f"{path}: bytes", size, size <= most, f"should be at most {most} when unpacked")


def arrays(
    path: Path, names: Sequence[str], *, optional: Sequence[str] = (), limit: int | None = None
) -> dict[str, NDArray]:
    """Arrays of an npz file of at most `limit` bytes, by default as `check_room` says. Python objects are not read."""
    part = str(path)
    arrays: dict[str, NDArray] = {}
    # In a damaged file the parsers of zip, deflate and npy may raise errors of a dozen types.
    try:
        with open(regular(path), "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("a single array")
            check_room(path, sum(info.file_size for info in archive.zip.infolist()), limit)
            for name in (*names, *optional):
                part = f"{path}: {name}"
                if name in archive.files:
                    arrays[name] = archive[name]
                elif name in names:
                    raise InputError(part, None, f"is missing; the file should hold arrays {', '.join(names)}")
    except InputError:
        raise
    except OSError as error:
        raise InputError(part, error.strerror or str(error), "should be a readable .npz file") from None
    except Exception as error:
        raise InputError(part, str(error), "should be an undamaged .npz, its arrays without Python objects") from None
    return arrays
