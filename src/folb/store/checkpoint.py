"""Where a simulation left off: files NUMBER-ROUND.checkpoint for each program of stacked runs.

A checkpoint is an npz followed by its SHA-256. The last few are kept: a damaged one is skipped, and the one before it
is used. A checkpoint of another simulation is never used.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from folb import atomic
from folb.atomic import regular

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


def save(directory: Path, number: int, mark: str, t: int, tree: Any) -> None:
    """Save `tree`, the state of program `number` before round t, and keep only the last few checkpoints."""
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    content = io.BytesIO()
    np.savez(content, mark=np.array(mark), t=np.array(t), **arrays)
    body = content.getvalue()
    atomic.replace(directory / f"{number}-{t:09d}.checkpoint", body + hashlib.sha256(body).digest())
    for path in kept(directory, number)[KEPT:]:
        path.unlink(missing_ok=True)


def kept(directory: Path, number: int) -> list[Path]:
    """The checkpoints of a program, the latest first."""
    return sorted(directory.glob(f"{number}-*.checkpoint"), reverse=True)


def load(directory: Path, number: int, mark: str, like: Any) -> tuple[int, Any] | None:
    """The t and the tree of the latest sound checkpoint, in the structure of `like`; None if there is none."""
    count, others = len(jax.tree.leaves(like)), 0
    for path in kept(directory, number):
        try:
            content = regular(path).read_bytes()
        except OSError as error:
            log.warning("%s cannot be read (%s); trying the one before", path, error.strerror)
            continue
        body, digest = content[:-32], content[-32:]
        if hashlib.sha256(body).digest() != digest:
            log.warning("%s is damaged; trying the one before", path)
            continue
        arrays = np.load(io.BytesIO(body), allow_pickle=False)
        if str(arrays["mark"]) != mark:
            others += 1
            continue
        names = [name for name in arrays if name.startswith("leaf")]
        if len(names) != count:  # another version of folb saved a different state
            log.warning("%s has %d arrays, but should have %d; trying the one before", path, len(names), count)
            continue
        leaves = [_typed(arrays[f"leaf{i}"], leaf) for i, leaf in enumerate(jax.tree.leaves(like))]
        return int(arrays["t"]), jax.tree.unflatten(jax.tree.structure(like), leaves)
    if others:
        log.warning(
            "%s: not resumed from, because another program wrote it: the code of a part may have changed", directory
        )
    return None


def _typed(array: Any, like: Any) -> Any:
    """The array with the type of `like`, if NumPy's format does not know it, such as bfloat16."""
    return array.view(like.dtype) if array.dtype.kind == "V" else array
