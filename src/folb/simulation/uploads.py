"""What the devices of a round send, computed for all slots at once; and how it arrives, if it goes through a codec."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.codec import Codec
from folb.core.memory import Rows, empty, gathered, scattered
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
            problem.model, problem.train, stack, self.device, self.wanted, problem.side_by_side, problem.mesh
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
            problem.model, problem.train, self.params, self.device, self.wanted, problem.side_by_side, problem.mesh
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


def no_residuals(params: Params, N: int, most: int) -> Rows:
    """Nothing left out yet, for N devices of which at most `most` will be met."""
    return empty(jax.tree.map(jnp.zeros_like, params), N, most)


def arrived(codec: Codec, stack: Params, words: Array, whole: bool = False) -> Params:
    """A stack of trees as the server decodes them; `words` are two random words for each."""

    def both(a: Params, words: Array) -> Params:
        return codec.decoded(codec.encoded(a, words), words, a, whole)

    return jax.vmap(both)(stack, words)


def with_feedback(
    codec: Codec, delta: Params, words: Array, device: Array, usable: Array, residuals: Rows
) -> tuple[Params, Any]:
    """Updates as the server decodes them, each with what its device left out before; and what is left out now.

    A device does not know what becomes of its reply. So what it left out changes whenever it sends one.
    """
    full = tree.add(delta, gathered(residuals, device))
    found = arrived(codec, full, words, whole=True)
    return found, scattered(residuals, device, usable, tree.sub(full, found))
