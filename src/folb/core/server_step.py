"""The server's step: what becomes of the model once a rule has weighed the round.

A step is a pair of pure functions, as in optax: `init(params) -> memory` and
`apply(memory, round, update) -> (params, memory)`. Any of them goes with any rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Round, Update
from folb.typing import Params


class Server(NamedTuple):
    """A server step; both functions are `Partial`s, so that their numbers can be swept."""

    init: Callable[[Params], Any]
    apply: Callable[[Any, Round, Update], tuple[Params, Any]]


def _no_memory(params: Params) -> tuple[()]:
    return ()


def _add(memory: Any, round: Round, update: Update, *, lr: Array) -> tuple[Params, Any]:
    return tree.add(round.params, update.delta, lr), memory


def plain(lr: Any = 1.0) -> Server:
    """w^{t+1} = w^t + lr Delta: the paper's step at lr = 1."""
    return Server(Partial(_no_memory), Partial(_add, lr=lr))


def _extrapolate(memory: Any, round: Round, update: Update, *, lr: Array, eps: Array) -> tuple[Params, Any]:
    squares = jnp.where(update.weights != 0, tree.norms(round.delta) ** 2, 0.0)
    step = jnp.sum(jnp.abs(update.weights) * squares) / (2 * (tree.dot(update.delta, update.delta) + eps))
    return tree.add(round.params, update.delta, lr * jnp.maximum(1.0, step)), memory


def fedexp(lr: Any = 1.0, eps: float = 1e-3) -> Server:
    """FedExP (Jhunjhunwala et al., 2023): step max(1, sum_k |a_k| ||Delta_k||^2 / (2 ||Delta||^2 + 2 eps)).

    a_k are the rule's weights; with a_k = 1/K this is the published formula.
    """
    return Server(Partial(_no_memory), Partial(_extrapolate, lr=lr, eps=eps))


def _optax_init(params: Params, *, make: Callable[..., Any], **numbers: Any) -> Any:
    return make(**numbers).init(params)


def _optax_apply(
    memory: Any, round: Round, update: Update, *, make: Callable[..., Any], **numbers: Any
) -> tuple[Params, Any]:
    downhill = jax.tree.map(jnp.negative, update.delta)
    step, memory = make(**numbers).update(downhill, memory, round.params)
    return optax.apply_updates(round.params, step), memory


def _from_optax(make: Callable[..., Any], **numbers: Any) -> Server:
    """An optax optimiser fed with -Delta, the server's pseudo-gradient."""
    make = Partial(make)  # a function inside a Partial must be a pytree: a Partial without arguments is one
    return Server(Partial(_optax_init, make=make, **numbers), Partial(_optax_apply, make=make, **numbers))


def momentum(lr: Any = 1.0, beta: float = 0.9) -> Server:
    """FedAvgM (Hsu et al., 2019): heavy-ball momentum on Delta."""
    return _from_optax(optax.sgd, learning_rate=lr, momentum=beta)


def adam(lr: Any = 0.1, eps: float = 1e-3) -> Server:
    """FedAdam (Reddi et al., 2021), with its beta_1 = 0.9, beta_2 = 0.99."""
    return _from_optax(optax.adam, learning_rate=lr, b1=0.9, b2=0.99, eps=eps)


def yogi(lr: Any = 0.1, eps: float = 1e-3) -> Server:
    """FedYogi (Reddi et al., 2021), with its beta_1 = 0.9, beta_2 = 0.99."""
    return _from_optax(optax.yogi, learning_rate=lr, b1=0.9, b2=0.99, eps=eps)


SERVERS: dict[str, Callable[..., Server]] = {
    "plain": plain,
    "momentum": momentum,
    "adam": adam,
    "yogi": yogi,
    "fedexp": fedexp,
}
