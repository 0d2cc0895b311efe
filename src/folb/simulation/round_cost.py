"""What a round costs with a heavy model: how many samples' gradients it computes. It is for estimates of time."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from folb.core.algorithm import Algorithm
from folb.core.round import managed
from folb.core.solver import unit_cost
from folb.core.system import System, uniform
from folb.core.upload import Upload
from folb.data.federation import Federation
from folb.models import Model

FORWARD = 1 / 3  # a loss, or a prediction, in gradients
PASSES = {"grad": 1.0, "after": 1.0, "loss": FORWARD}  # through a device's samples, by what an upload needs
ASKED = 1000  # devices that are asked how much work they manage


def round_cost(
    model: Model,
    federation: Federation,
    system: System | None,
    algorithm: Algorithm,
    evaluated: int | None,
    every: int,
) -> float:
    """About how many gradients of single samples a round computes, with its share of the evaluations.

    One of `every` rounds is evaluated, on `evaluated` samples of each side or on all. Rounds of light models all cost
    the same: there it is not the samples that take the time.
    """
    if not model.heavy:
        return 1.0
    solver, size = algorithm.solver, federation.train.size
    devices = jnp.arange(min(len(size), ASKED))
    own = jnp.asarray(size[: len(devices)])
    _, effort = jax.jit(managed)(uniform() if system is None else system, solver, own, devices, 0, 1)
    each = np.asarray(effort.work * unit_cost(solver, own), float).mean() * solver.batch
    each += size.mean() * _passes(algorithm.uploads)
    survey = algorithm.selection.sampling.survey
    whole = algorithm.selection.K * each + size.sum() * _passes([] if survey is None else [survey])
    looked_at = sum(min(evaluated or len(side.y), len(side.y)) for side in (federation.train, federation.test))
    return float(whole + FORWARD * looked_at / every)


def _passes(uploads: Iterable[Upload]) -> float:
    """How often the gradients of a device's samples are computed for these uploads."""
    return sum(PASSES.get(need, 0.0) for need in {need for upload in uploads for need in upload.needs})
