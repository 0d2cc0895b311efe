"""How a device works in a round: its step size, proximal weight, mini-batches, unit of work and local step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from folb.core.local_step import LOCAL_STEPS, LocalStep, Sgd
from folb.core.part import Part, Slot, at_least, more_than, one_of, setting, whole


class Solver(Part):
    """How a device minimises h_k of (3): local steps of size `lr` on mini-batches of `batch` samples."""

    lr: float = setting("step size of the local solver", more_than(0), default=0.01)
    mu: float = setting("weight of the proximal term (3)", at_least(0), default=0.0)
    batch: int = setting("samples per mini-batch", whole(1, 10**6), default=10)
    unit: Literal["step", "epoch", "gradient"] = setting(
        "a unit of work: a mini-batch step, an epoch, a full-gradient step",
        one_of("step", "epoch", "gradient"),
        default="step",
    )
    epochs: int | None = setting(
        "epochs of each device in each round; by default the system model says how much work it manages",
        whole(1, 10**4, number=True),
        default=None,
    )
    step: LocalStep = Sgd()

    def of(self, hidden: Any) -> Solver:
        return replace(self, step=self.step.of(hidden))


LOCAL = Slot(
    "local", LocalStep, tuple(LOCAL_STEPS.values()), "a device's step", optional=False, record=Solver, inside="step"
)


def steps_of(solver: Solver, work: Array, size: Array) -> Array:
    """The local steps in `work` units of a device with `size` samples; with momentum, their total weight."""
    J = work if solver.unit == "gradient" else work * unit_cost(solver, size)
    return solver.step.reach(J.astype(jnp.float32)) if solver.step.has("reach") else J


def unit_cost(solver: Solver, size: Array) -> Array:
    """Mini-batch steps in one unit of work of a device with `size` samples."""
    return jnp.ones_like(size) if solver.unit == "step" else -(-size // solver.batch)
