"""A round as both carriers have it: the draw of its devices, what they manage, and its close.

All randomness is a pure function of (seed, round, device), so any round can be replayed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, selection, tree
from folb.core.algorithm import Algorithm
from folb.core.rules import Round, Update
from folb.core.selection import Multiset
from folb.core.solver import Solver, unit_cost
from folb.core.system import Effort, System
from folb.errors import InputError
from folb.typing import Params


class State(NamedTuple):
    """All that a run needs to go on: the model and the server's memory."""

    params: Params
    memory: Any


def close(algorithm: Algorithm, state: State, round: Round) -> tuple[State, Update, Array]:
    """The state after a round, its update, and whether the model changed.

    A round without a usable reply leaves the model, and the server's memory, as they were.
    """
    update = algorithm.rule(round)
    _check_update(update, state.params, algorithm.selection.K)
    updated = jnp.any(round.times > 0) & jnp.any(update.weights != 0)
    params, memory = algorithm.server.apply(state.memory, round, update)
    return tree.where(updated, State(params, memory), state), update, updated


def _check_update(update: Update, params: Params, K: int) -> None:
    """Shapes are known before anything runs: a rule that got them wrong is told so, rather than broadcast."""
    delta, weights = jax.tree.map(jnp.shape, tuple(update))
    if delta != jax.tree.map(jnp.shape, params) or weights != (K,):
        expected = f"should be an update of the shapes of the model, and weights of shape ({K},)"
        raise InputError("rule: shapes", (delta, weights), expected)


Chosen = tuple[Multiset, Multiset | None]  # S_1, and S_2 of Algorithm 2


class Draw(NamedTuple):
    """How devices are drawn in a round."""

    words: int  # random words that a draw takes
    devices: Callable[[Array], Multiset]
    correction: Callable[[Array], Array]  # p_k / P_k of devices: what makes a mean over the draw one of (1)
    survey: Array | None = None  # the exact inner products of all N devices, where the selection (7) needed them

    def sets(self, algorithm: Algorithm, seed: Array | int, t: Array | int) -> Chosen:
        """The devices of round t."""
        luck = randomness.words(seed, t, randomness.SERVER, 2 * self.words)
        second = self.devices(luck[self.words :]) if "second" in algorithm.uploads else None
        return self.devices(luck[: self.words]), second


def drawing(how: selection.Selection, start: Array, size: Array, share: Array, survey: Array | None = None) -> Draw:
    """The distribution P_k^t. Where no survey makes it, it is not written down: N may be a million.

    `survey` is what (7) or its stand-in are made of: inner products, or norms.
    """
    K, replacement, sampling = how.K, how.replacement, how.sampling
    samples = start[-1] + size[-1]  # of all devices, even where y is a window
    N = len(size)
    if sampling == "uniform":
        return Draw(
            K if replacement else 2,
            lambda words: selection.draw_uniform(words, N, K, replacement),
            lambda device: share[device] * N,
        )
    if sampling == "samples" and replacement:
        return Draw(
            K,
            lambda words: selection.draw_by_samples(words, start, samples),
            lambda device: share[device] * samples / size[device],
        )
    if survey is None:
        P = size / samples
    elif sampling == "direct":
        P = selection.lb_near_optimal(survey)
    else:
        P = selection.norm_proxy(survey)
    return Draw(
        K if replacement else N,
        lambda words: selection.draw(randomness.uniform(words), P, K, replacement),
        lambda device: share[device] / jnp.where(P[device] > 0, P[device], 1.0),
        survey if sampling == "direct" else None,
    )


def managed(
    system: System, solver: Solver, size: Array, who: Array, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """Of devices `who` with `size` samples, the random words for their batches, and what they manage in round t."""
    home = randomness.uniform(randomness.words(seed, randomness.HOME, who, 2))
    words = randomness.words(seed, t, who, 4)
    return words[:, :2], jax.vmap(system)(home, randomness.uniform(words[:, 2:]), unit_cost(solver, size))
