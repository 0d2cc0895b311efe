"""Rounds that do not wait: how many devices work at any time, and how much an old reply counts.

With a `concurrency` of M, M devices are at work at any time, each from the model that was the server's when it
started. As soon as one is done, another one starts. Every K replies the server takes a step. The staleness tau of a
reply is the number of steps that the server took since its device started. Its update counts s(tau) times.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Round
from folb.errors import InputError, check, check_whole, choose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asynchrony:
    """M devices at work; s(tau); and whether a device's model is mixed in, as FedAsync does, or its update added."""

    concurrency: int = field(metadata={"static": True})
    weigh: Callable[[Array], Array]
    mixing: bool = field(default=False, metadata={"static": True})

    def weights(self, staleness: Array) -> Array:
        """s(tau) of each reply."""
        tau = staleness.astype(jnp.float32)
        found = self.weigh(tau)
        tree.check_like("staleness: what it returns", found, tau)
        return found

    def seen(self, round: Round, most: float = math.inf) -> Round:
        """The round as the rule and the server step see it: with s(tau_k) Delta_k in place of Delta_k.

        With `most`, s is from 0 to that: a guard bounds the weights of updates as they came.

        With `mixing`, Delta_k is first replaced by the device's model less the server's present one. So a step of size
        alpha ends at (1 - alpha s) w + alpha s w_k.
        """
        assert round.staleness is not None and round.starts is not None
        delta = round.delta
        if self.mixing:
            delta = jax.tree.map(lambda d, start, w: d + (start - w), delta, round.starts, round.params)
        s = self.weights(round.staleness)
        s = s if math.isinf(most) else jnp.clip(s, 0.0, most)
        return round._replace(delta=jax.vmap(lambda d, s: jax.tree.map(lambda v: s * v, d))(delta, s))


def constant() -> Callable[[Array], Array]:
    """s(tau) = 1: an old reply counts like a new one."""
    return Partial(jnp.ones_like)


def polynomial(power: Any = 0.5) -> Callable[[Array], Array]:
    """s(tau) = (1 + tau)^-power. FedBuff (Nguyen et al., 2022) has a power of 1/2."""
    return Partial(_polynomial, power=power)


def _polynomial(tau: Array, *, power: Any) -> Array:
    return (1 + tau) ** -power


def hinge(slope: Any = 10.0, bound: Any = 4.0) -> Callable[[Array], Array]:
    """s(tau) = 1 up to the bound, and 1 / (1 + slope (tau - bound)) beyond."""
    return Partial(_hinge, slope=slope, bound=bound)


def _hinge(tau: Array, *, slope: Any, bound: Any) -> Array:
    return 1 / (1 + slope * jnp.maximum(tau - bound, 0.0))


STALENESS: dict[str, Callable[..., Callable[[Array], Array]]] = {
    "constant": constant,
    "polynomial": polynomial,
    "hinge": hinge,
}


def asynchrony(
    concurrency: int | None, wanted: str | Callable[[Array], Any] | None, mixing: bool = False, **numbers: Any
) -> Asynchrony | None:
    """How rounds do not wait, checked; None if they do. s(tau) is a name, or your own function."""
    given = {name: value for name, value in numbers.items() if value is not None}
    if concurrency is None:
        named = {"staleness": wanted} if wanted is not None else {}
        for name, value in (named | {f"staleness_{name}": value for name, value in given.items()}).items():
            raise InputError(name, value, "is for rounds that do not wait: set concurrency, too")
        return None
    check_whole("concurrency", concurrency, 1, 10**5)
    wanted = "polynomial" if wanted is None else wanted
    make: Any = STALENESS[choose("staleness", wanted, STALENESS)] if isinstance(wanted, str) else None
    known = inspect.signature(make).parameters if make is not None else {}
    for name, value in given.items():
        check(f"staleness_{name}", value, lambda value: (value >= 0) & (value < jnp.inf), "should be at least 0")
        if name not in known:
            owner = next(other for other, one in STALENESS.items() if name in inspect.signature(one).parameters)
            which = wanted if isinstance(wanted, str) else "your own"
            raise InputError(f"staleness_{name}", value, f"is for staleness={owner}; staleness is {which}")
    if make is None and not callable(wanted):
        raise InputError("staleness", wanted, f"should be one of {', '.join(STALENESS)}, or a function of tau")
    return Asynchrony(int(concurrency), tree.compiled(wanted) if make is None else make(**given), mixing)
