"""What a round costs with a heavy model, and what is known before a long first one.

The cost is how many samples' gradients it computes. It is for estimates of time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

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
from folb.models.cost import operations
from folb.pace import clock
from folb.simulation.evaluate import evaluate
from folb.simulation.play import start
from folb.simulation.problem import Problem

FORWARD = 1 / 3  # a loss, or a prediction, in gradients
PASSES = {"grad": 1.0, "after": 1.0, "loss": FORWARD}  # through a device's samples, by what an upload needs
LONG = 2e12  # operations of a round that takes about half a minute on two cores
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


class FirstLook(NamedTuple):
    """The evaluation of a run's first model, and an estimate from the time that it took."""

    algorithm: str
    train_loss: float
    test_accuracy: float  # NaN if the model predicts numbers
    seconds: float  # of one of its rounds

    def __str__(self) -> str:
        """In words."""
        accuracy = "" if math.isnan(self.test_accuracy) else f"test accuracy {100 * self.test_accuracy:.1f} %, "
        measured = f"{accuracy}training loss {self.train_loss:.3g}"
        return f"before round 1: {measured}; a round of {self.algorithm} takes about {clock(self.seconds)}"


def first_look(
    problem: Problem, federation: Federation, algorithm: Algorithm, seed: int, cost: float
) -> FirstLook | None:
    """A first look at a run whose rounds cost as much as `cost` gradients of single samples.

    None if there is soon something to see anyway, or if the look itself would take long. With several accelerators
    there is none: only the first of several processes would look.
    """
    if not problem.model.heavy or problem.side_by_side or problem.streamed or problem.mesh is not None:
        return None
    train = problem.train if problem.measured is None else problem.measured
    looked_at = FORWARD * (len(train.y) + len(problem.test.y))
    each = operations(problem.model, jax.ShapeDtypeStruct(federation.shape, federation.kind)) / FORWARD
    if not each * looked_at < LONG <= each * cost:
        return None

    def look(problem: Problem, algorithm: Algorithm, seed: Any) -> Any:
        return evaluate(problem, start(problem, algorithm, seed).params)

    given = (problem, algorithm, np.uint32(seed))
    compiled = jax.jit(look).lower(*given).compile()
    began = time.perf_counter()
    found = jax.block_until_ready(compiled(*given))
    seconds = (time.perf_counter() - began) / looked_at * cost
    return FirstLook(algorithm.name, float(found.train_loss), float(found.test_accuracy), seconds)
