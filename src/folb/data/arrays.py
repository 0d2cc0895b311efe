"""Samples in a numpy archive: arrays `x`, `y` and `device`, and optionally `split`."""

from __future__ import annotations

import os
from pathlib import Path

from folb import npz
from folb.data.federation import Federation, HoldoutSeed, Regression


def load(
    path: str | os.PathLike[str], *, holdout_seed: HoldoutSeed = None, regression: Regression = None
) -> Federation:
    """An .npz with arrays x, y, device and optionally split, as Federation.from_arrays takes them."""
    arrays = npz.arrays(Path(path), ("x", "y", "device"), optional=("split",))
    x, y, device, split = arrays["x"], arrays["y"], arrays["device"], arrays.get("split")
    return Federation.from_arrays(
        os.fspath(path), x, y, device, split, holdout_seed=holdout_seed, regression=regression
    )
