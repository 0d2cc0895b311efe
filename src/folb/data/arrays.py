"""Samples in a numpy archive: arrays `x`, `y` and `device`, and optionally `split`."""

from __future__ import annotations

import os

import numpy as np

from folb.errors import InputError
from folb.federation import Federation, HoldoutSeed, NDArray


def load(path: str | os.PathLike[str], *, holdout_seed: HoldoutSeed = None) -> Federation:
    """An .npz with arrays x, y, device and optionally split, as Federation.from_arrays takes them."""
    name = os.fspath(path)
    arrays = _read(name)
    for field in ("x", "y", "device"):
        if field not in arrays:
            raise InputError(f"{name}: {field}", None, "is missing; the file should hold arrays x, y and device")
    x, y, device, split = arrays["x"], arrays["y"], arrays["device"], arrays.get("split")
    return Federation.from_arrays(name, x, y, device, split, holdout_seed=holdout_seed)


def _read(name: str) -> dict[str, NDArray]:
    arrays: dict[str, NDArray] = {}
    part = name
    # The parsers of zip, deflate and npy raise whatever they stumble on in a damaged file: any of a dozen types.
    try:
        with open(name, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("a single array")
            for field in ("x", "y", "device", "split"):
                part = f"{name}: {field}"
                if field in archive.files:
                    arrays[field] = archive[field]
    except OSError as error:
        raise InputError(part, error.strerror or str(error), "should be a readable .npz file") from None
    except Exception as error:
        raise InputError(part, str(error), "should be an undamaged .npz, its arrays without Python objects") from None
    return arrays
