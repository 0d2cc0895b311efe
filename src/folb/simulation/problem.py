"""What stays the same over a run: the data, the model, the objective and the system.

Samples that do not fit on the accelerator stay on the host, in memory or mapped from a file. Then a window has only
those that the next step needs: a separate thread gathers and copies them while the accelerator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from folb.core.algorithm import Algorithm
from folb.core.liars import count
from folb.core.system import System, asked_for, uniform
from folb.core.trace import Trace
from folb.data.federation import Expand, Federation, Split
from folb.errors import InputError, check, check_whole, choose
from folb.measures import Metric
from folb.models import Model
from folb.simulation import parallel
from folb.typing import NDArray

RECORDS = ("weights", "inner", "gamma", "work", "lr", "attack", "own")
ENDLESS = 2**31 - 1  # rounds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """What stays the same over a run: the data and model, the objective and the system."""

    train: Samples
    test: Samples
    measured: Samples | None  # the training samples that the loss is measured on; None: all of them
    share: Array  # p_k of (1)
    system: System
    model: Model = field(metadata={"static": True})
    record: tuple[str, ...] = field(metadata={"static": True})
    side_by_side: bool = field(metadata={"static": True})
    mesh: Mesh | None = field(metadata={"static": True})
    metrics: tuple[Metric, ...] = field(default=(), metadata={"static": True})  # besides the accuracy
    classes: int = field(default=0, metadata={"static": True})

    @property
    def looked_at(self) -> Samples:
        """The training samples that the loss is measured on."""
        return self.train if self.measured is None else self.measured

    @property
    def judges(self) -> bool:
        """Whether an evaluation looks at more than the training loss and the test accuracy."""
        return bool(self.metrics) or "own" in self.record

    @property
    def clocked(self) -> bool:
        """Whether a run has a clock: its system model asks for the time."""
        return "now" in asked_for(self.system)

    @property
    def streamed(self) -> bool:
        """Whether the samples stay on the host, except for a window of them."""
        return self.train.present is not None


def opening(problem: Problem, clock: Any) -> tuple[Any, Array | None]:
    """The seconds until a round opens, as soon as a device is online; and the devices online, if not all always are."""
    if not isinstance(problem.system, Trace):
        return 0.0, None
    wait = problem.system.wait(clock.now)
    wait = jnp.where(jnp.isfinite(wait), wait, 0.0)  # if no device ever will be online, it asks none at once
    return wait, problem.system.online(clock.now + wait)


def problem(
    federation: Federation,
    model: Model,
    *,
    system: System | None = None,
    objective: str = "uniform",
    record: Sequence[str] = (),
    side_by_side: bool | None = None,
    mesh: Mesh | None = None,
    streamed: bool = False,
    evaluated: int | None = None,
    metrics: tuple[Metric, ...] = (),
) -> Problem:
    """Bring a federation to the accelerator and fix the objective (1): "uniform" or "samples".

    With `streamed`, only the facts about its devices are brought. `side_by_side` says whether devices and runs are
    computed so. By default they are, unless the model is heavy and this is a CPU, where large products are faster one
    after another. `evaluated` samples of each side are evaluated; by default all.
    """
    choose("objective", objective, ("uniform", "samples"))
    if system is not None and not callable(system):
        raise InputError("system", system, "should be made by a function of folb.system, such as deadline()")
    if isinstance(system, Trace):
        system.check(federation.N)
        check("stream", True, not streamed, "should be false: the devices online decide which samples are needed")
    if model.block is not None:
        check_whole("model: block", model.block, 1)
    for name in record:
        choose("record", name, RECORDS)
    n = federation.train.size
    share = n / n.sum() if objective == "samples" else np.full(federation.N, 1 / federation.N)
    table = None if federation.table is None else parallel.put(federation.table, mesh)
    train, test = federation.train, federation.test if evaluated is None else federation.test.sample(evaluated)
    return Problem(
        train=bring(federation, train, table, mesh, streamed),
        test=bring(federation, test, table, mesh, streamed and evaluated is None),
        measured=None if evaluated is None else bring(federation, train.sample(evaluated), table, mesh),
        share=parallel.put(share.astype(np.float32), mesh),
        system=uniform() if system is None else system,
        model=model,
        record=tuple(record),
        side_by_side=not (model.heavy and jax.default_backend() == "cpu") if side_by_side is None else side_by_side,
        mesh=mesh,
        metrics=metrics,
        classes=federation.classes if metrics else 0,
    )


TARGET = 0  # the label that a backdoor is for


def changed(x: Array, y: Array, kind: Array, largest: Array) -> tuple[Array, Array]:
    """A batch whose samples are of these kinds: 0 as it is, 1 with its label reversed, 2 with a trigger and TARGET.

    The trigger: the last twentieth of the features, and at least one, are as large as the largest of the batch.
    """
    flat = x.reshape(*y.shape, -1)
    marked = jnp.arange(flat.shape[-1]) >= flat.shape[-1] - max(1, flat.shape[-1] // 20)
    stamped = jnp.where(marked, jnp.max(x), flat).reshape(x.shape)
    labels = jnp.where(kind == 1, largest - y, jnp.where(kind == 2, TARGET, y)).astype(y.dtype)
    return jnp.where((kind == 2).reshape(*y.shape, *[1] * (x.ndim - y.ndim)), stamped, x), labels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """A federation's split on the accelerator: device k owns rows start[k] : start[k] + size[k].

    A window has only the rows of the devices `present`, in ascending order; each device's rows begin at `placed`.
    """

    x: Array
    y: Array
    start: Array
    size: Array
    table: Array | None = None
    expand: Expand | None = field(default=None, metadata={"static": True})
    present: Array | None = None
    placed: Array | None = None
    largest: Array | None = None  # label: then there are changed copies, and row r + 2 n of n is row r as of kind 2

    def first(self, device: Array) -> Array:
        """The first row of each device."""
        if self.present is None or self.placed is None:
            return self.start[device]
        return self.placed[jnp.searchsorted(self.present, device)]

    def take(self, rows: Array) -> tuple[Array, Array]:
        """Inputs and labels of some rows."""
        if self.largest is None:
            return self._inputs(self.x[rows]), self.y[rows]
        kind, row = rows // len(self.y), rows % len(self.y)
        return changed(self._inputs(self.x[row]), self.y[row], kind, self.largest)

    def slice(self, first: Array, size: int) -> tuple[Array, Array]:
        """Inputs and labels of `size` rows from `first`."""
        x, y = (jax.lax.dynamic_slice_in_dim(a, first, size) for a in (self.x, self.y))
        return self._inputs(x), y

    def _inputs(self, x: Array) -> Array:
        if self.expand is None:
            return x
        flat = self.expand(self.table, x.reshape(-1, *self.x.shape[1:]))
        return flat.reshape(*x.shape[: x.ndim - self.x.ndim + 1], *flat.shape[1:])


def bring(
    federation: Federation, split: Split, table: Array | None, mesh: Mesh | None, streamed: bool = False
) -> Samples:
    """A split on the accelerator, or on each of `mesh`. If `streamed`, all facts about its devices, but no samples."""
    split = replace(split, x=split.x[:0], y=split.y[:0]) if streamed else split
    x, y, start, size = (parallel.put(a, mesh) for a in (split.x, split.y, split.start, split.size))
    known = Samples(x, y, start, size, table, federation.expand)
    return window(split, known, np.zeros(0, np.int32), mesh) if streamed else known


BLOCK = 1 << 26  # bytes of samples in a block that is evaluated, or in a window of several rounds
LEAST = 1 << 10  # samples that a window has room for, at least


def ahead(pieces: Iterable[Callable[[], Any]]) -> Generator[Any]:
    """Make the pieces in order: while one is in use, a thread makes the next. Closing ends the thread."""
    made: list[Future[Any]] = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="folb-stream") as reader:
        for make in pieces:
            made.append(reader.submit(make))
            if len(made) > 1:
                yield made.pop(0).result()
        for last in made:
            yield last.result()


def rounds_that_fit(split: Split, rounds: Sequence[NDArray]) -> int:
    """How many rounds, each given by its devices, fit into one window of `BLOCK` bytes; at least 1."""
    room, seen = BLOCK // (split.x.nbytes // len(split.y)), np.zeros(0, np.int32)
    for n, devices in enumerate(rounds):
        seen = np.union1d(seen, devices)
        if n and split.size[seen].sum(dtype=np.int64) > room:
            return n
    return len(rounds)


def window(split: Split, known: Samples, chosen: NDArray, mesh: Mesh | None = None) -> Samples:
    """The samples of the chosen devices, end to end. Few sizes of windows, powers of two, mean few programs."""
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


def poisoned(problem: Problem, algorithm: Algorithm, device: Array) -> tuple[Problem, Array]:
    """The problem with three times the devices, and the numbers in it of `device`: liars take their changed samples."""
    train, attack = problem.train, algorithm.attack
    if attack is None:
        return problem, device
    N, n = len(train.size), len(train.y)
    start = jnp.concatenate([train.start, train.start + n, train.start + 2 * n])  # rows are changed when taken
    copies = replace(train, start=start, size=jnp.tile(train.size, 3), largest=jnp.max(train.y))
    kind = jnp.where(device < count(attack, N), jnp.int32(attack.poison), 0)
    return replace(problem, train=copies), device + N * kind
