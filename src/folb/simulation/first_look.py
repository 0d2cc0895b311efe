"""What is known before a long first round: how good the initial model is, and about how long a round takes."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from folb.core.algorithm import Algorithm
from folb.data.federation import Federation
from folb.models.cost import operations
from folb.pace import clock
from folb.simulation.evaluate import evaluate
from folb.simulation.play import start
from folb.simulation.problem import Problem
from folb.simulation.round_cost import FORWARD

LONG = 2e12  # operations of a round that takes about half a minute on two cores


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
    if not problem.model.heavy or problem.abreast or problem.streamed or problem.mesh is not None:
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
