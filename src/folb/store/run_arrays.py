"""The arrays that a run leaves in files: where it left off, and the models that it ended with.

Files NUMBER-ROUND.checkpoint say where each program of stacked runs left off: an npz followed by its SHA-256. The last
few are kept: a damaged one is skipped, and the one before it is used. One of another simulation is never used.

model.npz has the models, and what is needed to use them. Array `3/first.weight` is the leaf `first.weight` of run 3.
`about` is a JSON text: the model's name and settings, the shape of a sample, the classes, and the runs.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from folb import atomic, npz
from folb.atomic import regular
from folb.errors import InputError, refused
from folb.store.experiment_file import POSITIVE, SEED, TABLE, TEXT, Kind, check_with_runs, many
from folb.typing import Params

KEPT = 3
SECONDS = 1.0  # between two checkpoints
SHARE = 0.05  # largest part of the time spent on them

log = logging.getLogger(__name__)


def fingerprint(program: str, *trees: Any) -> str:
    """A hash that tells one simulation from another: of the program of a round, and of its input values."""
    # a function's address is new in every process
    digest = hashlib.sha256(re.sub("0x[0-9a-f]+", "", program).encode())
    for leaf in jax.tree.leaves(trees):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save_checkpoint(directory: Path, number: int, mark: str, t: int, tree: Any) -> None:
    """Save `tree`, the state of program `number` before round t, and keep only the last few checkpoints."""
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    content = io.BytesIO()
    np.savez(content, mark=np.array(mark), t=np.array(t), **arrays)
    body = content.getvalue()
    atomic.replace(directory / f"{number}-{t:09d}.checkpoint", body + hashlib.sha256(body).digest())
    for path in checkpoints(directory, number)[KEPT:]:
        path.unlink(missing_ok=True)


def checkpoints(directory: Path, number: int) -> list[Path]:
    """The checkpoints of a program, the latest first."""
    return sorted(directory.glob(f"{number}-*.checkpoint"), reverse=True)


def load_checkpoint(directory: Path, number: int, mark: str, like: Any) -> tuple[int, Any] | None:
    """The t and the tree of the latest sound checkpoint, in the structure of `like`; None if there is none."""
    wanted, structure = jax.tree.flatten(like)
    others = False
    for path in checkpoints(directory, number):
        try:
            content = regular(path).read_bytes()
        except OSError as error:
            log.warning("%s cannot be read (%s); trying the one before", path, error.strerror)
            continue
        body = content[:-32]
        if hashlib.sha256(body).digest() != content[-32:]:
            log.warning("%s is damaged; trying the one before", path)
            continue
        arrays = np.load(io.BytesIO(body), allow_pickle=False)
        count = len(arrays.files) - 2  # besides mark and t
        if str(arrays["mark"]) != mark:
            others = True
        elif count != len(wanted):  # another version of folb saved a different state
            log.warning("%s has %d arrays, but should have %d; trying the one before", path, count, len(wanted))
        else:
            leaves = [_typed(arrays[f"leaf{i}"], leaf) for i, leaf in enumerate(wanted)]
            return int(arrays["t"]), jax.tree.unflatten(structure, leaves)
    if others:
        why = "because another program wrote it: the code of a part may have changed"
        log.warning("%s: not resumed from, %s", directory, why)
    return None


def _typed(array: Any, like: Any) -> Any:
    """The array with the type of `like`, if NumPy's format does not know it, such as bfloat16."""
    unknown = array.dtype.kind == "V" and array.dtype.itemsize == np.dtype(like.dtype).itemsize
    return array.view(like.dtype) if unknown else array


ABOUT = "about"
DIMENSIONS = 8  # of a sample, at most
OF_A_MODEL = {
    "model": TEXT,
    "settings": TABLE,
    "shape": Kind(
        lambda value: many(POSITIVE).holds(value) and len(value) <= DIMENSIONS,
        f"should be a list of at most {DIMENSIONS} whole numbers of at least 1",
    ),
    "classes": POSITIVE,  # 1: a number to predict
}
SOMETIMES = {"class_names": many(TEXT), "sha256": TEXT}
OF_A_RUN = {"algorithm": TEXT, "name": TEXT, "seed": SEED}


def save_models(path: Path, about: Mapping[str, Any], models: Sequence[Params]) -> None:
    """Write the models of all runs as one file, whole or not at all."""
    arrays = {f"{i}/{name}": leaf for i, model in enumerate(models) for name, leaf in leaves(model).items()}
    text: Any = np.array(json.dumps(about))
    with atomic.filled(path) as file:
        np.savez(file, **{ABOUT: text}, **arrays)


def leaves(model: Params) -> dict[str, Any]:
    """The arrays of a model by name: `first.weight` for a nested dict's, as on Flower."""
    pairs = jax.tree_util.tree_flatten_with_path(model)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) < len(pairs):
        expected = "should still differ when nested names are joined by dots, as in a.b"
        raise InputError("model: names", sorted(named), expected)
    return named


def digest(file: Path) -> str:
    """What tells a user's own file with a model from what it was before."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def is_described(path: Path) -> bool:
    """Whether a file says what its models are; a file with only a model's arrays, such as a Flower app's, does not."""
    return ABOUT in npz.arrays(path, (), optional=(ABOUT,))


def read_about(path: Path) -> dict[str, Any]:
    """What a file says about its models, checked."""
    text = npz.arrays(path, (), optional=(ABOUT,)).get(ABOUT)
    if text is None:
        expected = "is missing: it is not a model file of `folb compare`, `run` or `execute`; if it has only a"
        raise InputError(str(path), ABOUT, f"{expected} model's arrays, give the model: load_model(..., model=...)")
    with refused(f"{path}: {ABOUT}", "should be JSON", ValueError, RecursionError):
        about = json.loads(str(text))
        json.dumps(about, ensure_ascii=False).encode()  # fails if a text cannot be printed
    check_with_runs(str(path), about, OF_A_MODEL, SOMETIMES, OF_A_RUN, {})
    if "class_names" in about and len(about["class_names"]) != about["classes"]:
        raise InputError(f"{path}: class_names", len(about["class_names"]), f"should be {about['classes']} names")
    return about


def read_model(path: Path, run: int | None, like: Params) -> Params:
    """The model of run number `run`, or the only one of a file; `like` has its structure, its shapes and its types."""
    wanted = leaves(like)
    arrays = npz.arrays(path, [name if run is None else f"{run}/{name}" for name in wanted])
    for place, leaf in zip(arrays, wanted.values(), strict=True):
        array = arrays[place] = _typed(arrays[place], leaf)
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            expected = f"should be {np.dtype(leaf.dtype)} of shape {leaf.shape}, as the model has it"
            raise InputError(f"{path}: {place}", f"{array.dtype} of shape {array.shape}", expected)
    return jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))
