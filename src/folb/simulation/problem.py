"""What stays the same over a run: the data, the model, the objective and the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from folb.core.system import System, uniform
from folb.core.trace import Trace
from folb.data.federation import Federation
from folb.errors import InputError, check_whole, choose
from folb.measures import Metric
from folb.models import Model
from folb.simulation import parallel, samples, stream
from folb.simulation.sample import sampled
from folb.simulation.samples import Samples

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
    def judges(self) -> bool:
        """Whether an evaluation looks at more than the training loss and the test accuracy."""
        return bool(self.metrics) or "own" in self.record

    @property
    def streamed(self) -> bool:
        """Whether the samples stay on the host, except for a window of them."""
        return self.train.present is not None


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

    With `streamed`, only the facts about its devices are brought, and no samples yet.

    `side_by_side` says whether devices and runs are computed so. By default they are, unless the model is heavy
    and this is a CPU, where large products are faster one after another. The accelerators of `mesh` share the devices
    of a round. `evaluated` samples of each side are evaluated; by default all. `metrics` are measured besides the
    accuracy; they fit the model.
    """
    choose("objective", objective, ("uniform", "samples"))
    if system is not None and not callable(system):
        raise InputError("system", system, "should be made by a function of folb.system, such as deadline()")
    if isinstance(system, Trace):
        system.check(federation.N)
        if streamed:
            raise InputError("stream", True, "should be false: the devices online decide which samples are needed")
    if model.block is not None:
        check_whole("model: block", model.block, 1)
    for name in record:
        choose("record", name, RECORDS)
    n = federation.train.size
    share = n / n.sum() if objective == "samples" else np.full(federation.N, 1 / federation.N)
    bring = stream.nothing if streamed else samples.bring
    table = None if federation.table is None else parallel.put(federation.table, mesh)
    few = None if evaluated is None else sampled(federation, evaluated)
    return Problem(
        train=bring(federation, federation.train, table, mesh),
        test=(bring if few is None else samples.bring)(federation, (few or federation).test, table, mesh),
        measured=None if few is None else samples.bring(federation, few.train, table, mesh),
        share=parallel.put(share.astype(np.float32), mesh),
        system=uniform() if system is None else system,
        model=model,
        record=tuple(record),
        side_by_side=not (model.heavy and jax.default_backend() == "cpu") if side_by_side is None else side_by_side,
        mesh=mesh,
        metrics=metrics,
        classes=federation.classes if metrics else 0,
    )
