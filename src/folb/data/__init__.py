"""The datasets: by name, or from a user's own files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

from folb.data import arrays, leaf, synthetic
from folb.errors import InputError, choose
from folb.federation import Federation, HoldoutSeed

DATASETS: dict[str, Callable[..., Federation]] = {
    "synthetic": synthetic.synthetic,
    "synthetic_iid": synthetic.synthetic_iid,
    "synthetic_1_1": synthetic.fixed(1, 1),
}


def load(name: str | os.PathLike[str], **settings: object) -> Federation:
    """The federation of that name or path; see `constructor`."""
    make = constructor(name)
    for setting in settings:
        choose(f"setting of {os.fspath(name)}", setting, inspect.signature(make).parameters)
    return make(**settings)


def constructor(name: str | os.PathLike[str]) -> Callable[..., Federation]:
    """What makes a federation; its keywords are the dataset's settings.

    `name` is one of DATASETS (in any case), synthetic_A_B for any alpha and beta, the path of an .npz file, or
    that of a LEAF directory or json file.
    """
    name = os.fspath(name)
    known = name.lower()
    if known in DATASETS:
        return DATASETS[known]
    if numbers := _alpha_beta(known):
        return synthetic.fixed(*numbers)
    if os.path.exists(name):
        return _from_path(name)
    if os.sep in name or "/" in name or known.endswith((".npz", *leaf.SUFFIXES)):
        raise InputError("dataset", name, "no such file or directory")
    return DATASETS[choose("dataset", known, DATASETS)]


def _alpha_beta(name: str) -> tuple[float, float] | None:
    try:
        family, alpha, beta = name.split("_")
        return (float(alpha), float(beta)) if family == "synthetic" else None
    except ValueError:
        return None


def _from_path(path: str) -> Callable[..., Federation]:
    if os.path.isdir(path) or path.lower().endswith(leaf.SUFFIXES):
        read = leaf.load
    elif path.lower().endswith(".npz"):
        read = arrays.load
    else:
        raise InputError("dataset", path, "should be an .npz, a LEAF .json or .json.gz, or a LEAF directory")

    def constructor(*, holdout_seed: HoldoutSeed = None) -> Federation:
        return read(path, holdout_seed=holdout_seed)

    constructor.__doc__ = read.__doc__
    return constructor
