"""How much work a device manages in a round, when its reply arrives, and whether it does.

A system model is a function (home, luck, cost) -> Effort for one device in one round. `home` and `luck` are two random
numbers each, between 0 and 1. `home` depends on (seed, device) and is for what a device keeps for good, such as its
speed; `luck` depends on (seed, round, device). Neither depends on the algorithm, so every algorithm gets the same
draws. `cost` is the number of mini-batch steps in one unit of work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.errors import check_number


class Effort(NamedTuple):
    """What one device does in one round."""

    work: Array  # units of work
    seconds: Array  # when the server has its reply, or stops waiting for it
    lost: Array  # no usable reply


System = Callable[[Array, Array, Array], Effort]

MOST = 10**6  # units of work: more would take far too long, and overflow 32 bits in mini-batch steps

Rate = Annotated[float, "chance that a device drops out of a round"]


def fixed(*, work: Annotated[int, "units of work per device and round"] = 20, dropout: Rate = 0.0) -> System:
    """Every device does the same work: a mini-batch step takes a second, messages take none."""
    _check_work("work", work, 1)
    _check_dropout(dropout)
    return Partial(_fixed, work=work, dropout=dropout)


def _fixed(home: Array, luck: Array, cost: Array, *, work: Array, dropout: Array) -> Effort:
    return _uniform(home, luck, cost, low=work, high=work, dropout=dropout)


def uniform(
    *,
    low: Annotated[int, "least work"] = 1,
    high: Annotated[int, "most work"] = 20,
    dropout: Rate = 0.0,
) -> System:
    """Sec. VI: work uniform in low .. high for each device and round; a mini-batch step takes a second."""
    _check_work("low", low, 1)
    _check_work("high", high, low)
    _check_dropout(dropout)
    return Partial(_uniform, low=low, high=high, dropout=dropout)


def _uniform(home: Array, luck: Array, cost: Array, *, low: Array, high: Array, dropout: Array) -> Effort:
    work = jnp.minimum(low + jnp.floor(luck[0] * (high - low + 1)).astype(jnp.int32), high)
    return Effort(work, (work * cost).astype(jnp.float32), luck[1] < dropout)


def deadline(
    *,
    tau: Annotated[float, "length of a round, in seconds"] = 20.0,
    speed: Annotated[float, "median device's mini-batch steps per second"] = 1.0,
    speed_spread: Annotated[float, "sd of log speed over the devices"] = 0.5,
    delay: Annotated[float, "median device's mean communication delay, in seconds"] = 1.0,
    delay_spread: Annotated[float, "sd of log mean delay over the devices"] = 0.5,
    dropout: Rate = 0.0,
) -> System:
    """Sec. V: a device works for tau - T_k^c, where T_k^c is the 99th percentile of its exponential delay.

    Its reply is lost if it arrives after tau, or if the time is too short for one unit of work.
    """
    for name, value in (("tau", tau), ("speed", speed), ("delay", delay)):
        check_number(name, value, lambda value: value > 0, "should be more than 0")
    for name, value in (("speed_spread", speed_spread), ("delay_spread", delay_spread)):
        check_number(name, value, lambda value: value >= 0, "should be at least 0")
    _check_dropout(dropout)
    return Partial(
        _deadline,
        tau=tau,
        speed=speed,
        speed_spread=speed_spread,
        delay=delay,
        delay_spread=delay_spread,
        dropout=dropout,
    )


def _deadline(
    home: Array,
    luck: Array,
    cost: Array,
    *,
    tau: Array,
    speed: Array,
    speed_spread: Array,
    delay: Array,
    delay_spread: Array,
    dropout: Array,
) -> Effort:
    spread = jax.scipy.special.ndtri(home)  # normal
    steps_per_second = speed * jnp.exp(speed_spread * spread[0])
    mean_delay = delay * jnp.exp(delay_spread * spread[1])
    T_c = mean_delay * jnp.log(100.0)  # the 99th percentile of an exponential of that mean
    work = jnp.minimum(jnp.maximum(tau - T_c, 0.0) * steps_per_second / cost, MOST).astype(jnp.int32)
    arrival = work * cost / steps_per_second - mean_delay * jnp.log(luck[0])
    lost = (arrival > tau) | (work < 1) | (luck[1] < dropout)
    return Effort(jnp.where(lost, 0, work), jnp.where(lost, tau, arrival), lost)


def _check_work(field: str, work: Any, least: Any) -> None:
    def whole(work: Any) -> Any:
        return (work >= least) & (work <= MOST) & (work == work // 1)

    check_number(field, work, whole, f"should be a whole number from {least} to {MOST}")


def _check_dropout(dropout: float) -> None:
    check_number("dropout", dropout, lambda rate: (rate >= 0) & (rate <= 1), "should be between 0 and 1")


SYSTEMS: dict[str, Callable[..., System]] = {"fixed": fixed, "uniform": uniform, "deadline": deadline}
