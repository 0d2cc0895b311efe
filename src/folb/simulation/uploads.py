"""What the devices of a round send besides their updates, computed for all slots at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.upload import Upload
from folb.simulation import solve
from folb.simulation.problem import Problem
from folb.typing import Params


class Sources:
    """What uploads are computed from, stacked over the slots `device`; some of them are `wanted`.

    `params` is the model that each of them was sent.
    A value is traced when it is first used. The compiler drops unused values.
    """

    def __init__(
        self,
        problem: Problem,
        params: Params,
        device: Array,
        wanted: Array,
        *,
        mu: Any,
        key: Array,
        delta: Params | None = None,
    ) -> None:
        self.problem, self.params, self.device, self.wanted = problem, params, device, wanted
        self.mu, self.key, self.delta = mu, key, delta

    def gradients(self, stack: Params) -> Params:
        """grad F_k at each slot's own parameters."""
        problem = self.problem
        return solve.gradients(
            problem.model, problem.train, stack, self.device, self.wanted, problem.abreast, problem.mesh
        )

    @cached_property
    def grad(self) -> Params:
        """grad F_k(w^t)."""
        return self.gradients(self.params)

    @cached_property
    def after(self) -> Params:
        """grad F_k(w_k)."""
        return self.gradients(jax.tree.map(jnp.add, self.params, self.delta))

    @cached_property
    def loss(self) -> Array:
        """F_k(w^t)."""
        problem = self.problem
        return solve.losses(
            problem.model, problem.train, self.params, self.device, self.wanted, problem.abreast, problem.mesh
        )


ALIKE = ("mu", "key")  # the same for all slots


def computed(uploads: Iterable[Upload], sources: Sources) -> dict[str, Any]:
    """Each upload by its name, stacked over the slots."""
    found: dict[str, Any] = {}
    for upload in uploads:
        known = {name: getattr(sources, name) for name in upload.needs}
        axes = {name: None if name in ALIKE else 0 for name in known}
        size = len(sources.device)
        found[upload.name] = jax.vmap(upload, in_axes=(axes,), axis_size=size)(known)
    return found
