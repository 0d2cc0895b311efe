"""How a device works in a round: its step size, proximal weight, mini-batches and unit of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.local_step import LOCAL_STEPS, LocalStep

jax.tree_util.register_dataclass(LocalStep, data_fields=["numbers"], meta_fields=["apply", "init", "reach", "one_size"])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Solver:
    """How a device minimises h_k of (3): local steps of size `lr` on mini-batches of `batch` samples."""

    lr: Any
    mu: Any
    batch: int = field(metadata={"static": True})
    unit: str = field(metadata={"static": True})
    step: LocalStep = LOCAL_STEPS["sgd"]


def steps_of(solver: Solver, work: Array, size: Array) -> Array:
    """The local steps in `work` units of a device with `size` samples; with momentum, their total weight."""
    J = work if solver.unit == "gradient" else work * unit_cost(solver, size)
    reach = solver.step.reach
    return J if reach is None else reach(J.astype(jnp.float32), **solver.step.numbers)


def unit_cost(solver: Solver, size: Array) -> Array:
    """Mini-batch steps in one unit of work of a device with `size` samples."""
    if solver.unit == "step":
        return jnp.ones_like(size)
    return -(-size // solver.batch)
