"""A window of a federation's samples: only those that the next step needs are on the accelerator.

Samples that do not fit there stay on the host, in memory or mapped from a file. A separate thread gathers and copies
what the next step needs while the accelerator computes the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from jax import Array
from jax.sharding import Mesh

from folb.data.federation import Federation, Split
from folb.simulation import parallel
from folb.simulation.samples import Samples, bring
from folb.typing import NDArray

BLOCK = 1 << 26  # bytes of samples in a block that is evaluated, or in a window of several rounds
LEAST = 1 << 10  # samples that a window has room for, at least

Piece = TypeVar("Piece")


def ahead(pieces: Iterable[Callable[[], Piece]]) -> Generator[Piece]:
    """Make the pieces in order: while one is in use, a thread makes the next. Closing ends the thread."""
    made: Future[Piece] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="folb-stream") as reader:
        for make in pieces:
            following = reader.submit(make)
            if made is not None:
                yield made.result()
            made = following
        if made is not None:
            yield made.result()


def nothing(federation: Federation, split: Split, table: Array | None, mesh: Mesh | None = None) -> Samples:
    """A split with all facts about its devices, but no samples on the accelerator yet."""
    known = bring(federation, replace(split, x=split.x[:0], y=split.y[:0]), table, mesh)
    return window(split, known, np.zeros(0, np.int32), mesh)


def fitting(split: Split, rounds: Sequence[NDArray]) -> int:
    """How many rounds, each given by its devices, fit into one window of `BLOCK` bytes; at least 1."""
    room, seen = BLOCK // (split.x.nbytes // len(split.y)), np.zeros(0, np.int32)
    for n, devices in enumerate(rounds):
        seen = np.union1d(seen, devices)
        if n and split.size[seen].sum(dtype=np.int64) > room:
            return n
    return len(rounds)


def window(split: Split, known: Samples, chosen: NDArray, mesh: Mesh | None = None) -> Samples:
    """The samples of the chosen devices, end to end.

    It has room for a power of two of samples, and of devices: few sizes of windows mean few programs.
    """
    device = np.unique(chosen)
    size = split.size[device]
    end = np.cumsum(size, dtype=np.int64)
    room = 1 << (max(LEAST, int(end[-1])) - 1).bit_length() if len(end) else 1
    # A new array each time: the accelerator may still be reading the last.
    x, y = (np.zeros((room, *a.shape[1:]), a.dtype) for a in (split.x, split.y))
    for first, n, to in zip(split.start[device].tolist(), size.tolist(), (end - size).tolist(), strict=True):
        x[to : to + n], y[to : to + n] = split.x[first : first + n], split.y[first : first + n]
    present = np.full(1 << (max(1, len(device)) - 1).bit_length(), np.iinfo(np.int32).max, np.int32)
    placed = np.zeros_like(present)
    present[: len(device)], placed[: len(device)] = device, end - size
    put = partial(parallel.put, mesh=mesh)
    return replace(known, x=put(x), y=put(y), present=put(present), placed=put(placed))


def blocks(split: Split) -> list[tuple[int, int, int]]:
    """All samples in blocks of one size: the first row, the size, and how many of its rows the block before had."""
    n = len(split.y)
    count = -(-split.x.nbytes // BLOCK)
    size = -(-n // max(1, min(count, n)))
    return [(min(first, n - size), size, max(0, first - (n - size))) for first in range(0, n, size)]


def block(split: Split, known: Samples, first: int, size: int, mesh: Mesh | None = None) -> Samples:
    """Some rows, whatever their devices."""
    x, y = (parallel.put(np.asarray(a[first : first + size]), mesh) for a in (split.x, split.y))
    return replace(known, x=x, y=y)
