"""model.npz: the models that the runs of an experiment ended with, and what is needed to use them.

Array `3/first.weight` is the leaf `first.weight` of run 3. `about` is a JSON text: the model's name and settings, the
shape of a sample, the classes, and the runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from folb import atomic, npz
from folb.errors import InputError
from folb.store.experiment_file import SEED, TABLE, TEXT, Kind, check_fields, many, whole
from folb.typing import Params

ABOUT = "about"
DIMENSIONS = 8  # of a sample, at most
OF_A_MODEL = {
    "model": TEXT,
    "settings": TABLE,
    "shape": Kind(
        lambda value: many(whole(1, 2**31 - 1)).holds(value) and len(value) <= DIMENSIONS,
        f"should be a list of at most {DIMENSIONS} whole numbers of at least 1",
    ),
    "classes": whole(1, 2**31 - 1),  # 1: a number to predict
}
SOMETIMES = {"class_names": many(TEXT), "sha256": TEXT}
OF_A_RUN = {"algorithm": TEXT, "name": TEXT, "seed": SEED}


def save(path: Path, about: Mapping[str, Any], models: Sequence[Params]) -> None:
    """Write the models of all runs as one file, whole or not at all."""
    arrays = {f"{i}/{name}": leaf for i, model in enumerate(models) for name, leaf in leaves(model).items()}
    text: Any = np.array(json.dumps(about))
    with atomic.filled(path) as handle, os.fdopen(handle, "wb", closefd=False) as file:
        np.savez(file, **{ABOUT: text}, **arrays)


def leaves(model: Params) -> dict[str, Any]:
    """The arrays of a model by name: `first.weight` for a nested dict's, as on Flower."""
    pairs = jax.tree_util.tree_flatten_with_path(model)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) < len(pairs):
        raise InputError(
            "model: names", sorted(named), "should still differ when nested names are joined by dots, as in a.b"
        )
    return named


def digest(file: Path) -> str:
    """What tells a user's own file with a model from what it was before."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def nbytes(like: Params) -> int:
    """The bytes of a model's arrays; `like` has their shapes and types."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(like))


def is_described(path: Path) -> bool:
    """Whether a file says what its models are; a file with only a model's arrays, such as a Flower app's, does not."""
    return ABOUT in npz.arrays(path, (), optional=(ABOUT,))


def read_about(path: Path) -> dict[str, Any]:
    """What a file says about its models, checked."""
    text = npz.arrays(path, (), optional=(ABOUT,)).get(ABOUT)
    if text is None:
        expected = "is missing: it is not a model file of `folb compare`, `run` or `execute`; if it has only a"
        raise InputError(str(path), ABOUT, f"{expected} model's arrays, give the model: load_model(..., model=...)")
    try:
        about = json.loads(str(text))
        json.dumps(about, ensure_ascii=False).encode()  # fails if a text cannot be printed
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {ABOUT}", str(error), "should be JSON") from error
    if not isinstance(about, dict) or not isinstance(about.get("runs"), list):
        raise InputError(f"{path}: {ABOUT}", about, "should be a table with a list of runs")
    check_fields(f"{path}: ", about, OF_A_MODEL, SOMETIMES)
    for i, run in enumerate(about["runs"]):
        if not isinstance(run, dict):
            raise InputError(f"{path}: runs[{i}]", run, "should be a table")
        check_fields(f"{path}: runs[{i}].", run, OF_A_RUN, {})
    if "class_names" in about and len(about["class_names"]) != about["classes"]:
        raise InputError(f"{path}: class_names", len(about["class_names"]), f"should be {about['classes']} names")
    return about


def read_model(path: Path, run: int | None, like: Params) -> Params:
    """The model of run number `run`, or the only one of a file; `like` has its structure, its shapes and its types."""
    wanted = leaves(like)
    arrays = npz.arrays(path, [name if run is None else f"{run}/{name}" for name in wanted])
    for place, leaf in zip(arrays, wanted.values(), strict=True):
        array = arrays[place]
        if array.dtype.kind == "V" and array.dtype.itemsize == np.dtype(leaf.dtype).itemsize:
            array = arrays[place] = array.view(leaf.dtype)  # such as bfloat16, whose name npz does not know
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            expected = f"should be {np.dtype(leaf.dtype)} of shape {leaf.shape}, as the model has it"
            raise InputError(f"{path}: {place}", f"{array.dtype} of shape {array.shape}", expected)
    return jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))
