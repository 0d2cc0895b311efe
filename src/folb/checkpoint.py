"""Where a simulation left off: one .npz for each program of stacked runs, so that it can go on from there.

A checkpoint is written under another name, flushed and renamed into place, so that a crash leaves the one
before it. It is used only if it is whole (npz carries checksums) and was left by the same simulation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

SECONDS = 5.0  # between two checkpoints


def fingerprint(program: str, *trees: Any) -> str:
    """What tells one simulation from another: the program of a round, and the values that go into it."""
    # a function's address is new in every process
    digest = hashlib.sha256(re.sub("0x[0-9a-f]+", "", program).encode())
    for leaf in jax.tree.leaves(trees):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save(path: Path, mark: str, t: int, tree: Any) -> None:
    """Keep `tree`, reached before round t."""
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as file:
        np.savez(file, mark=np.array(mark), t=np.array(t), **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path, mark: str, like: Any) -> tuple[int, Any] | None:
    """The t and the tree that `save` kept, in the structure of `like`; None if there is nothing to go on from."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), open(path, "rb") as file:
        kept = np.load(file, allow_pickle=False)
        if str(kept["mark"]) == mark:
            count = len(jax.tree.leaves(like))
            return int(kept["t"]), jax.tree.unflatten(
                jax.tree.structure(like), [kept[f"leaf{i}"] for i in range(count)]
            )
    return None
