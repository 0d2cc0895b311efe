"""How a device works in a round: its step size, proximal weight, mini-batches and unit of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Solver:
    """How a device minimises h_k of (3): SGD with step `lr` on mini-batches of `batch` samples."""

    lr: Any
    mu: Any
    batch: int = field(metadata={"static": True})
    unit: str = field(metadata={"static": True})


def unit_cost(solver: Solver, size: Array) -> Array:
    """Mini-batch steps in one unit of work of a device with `size` samples."""
    if solver.unit == "step":
        return jnp.ones_like(size)
    return -(-size // solver.batch)
