"""How much work a device manages in a round, when its reply arrives, and whether it does.

A system model is a function (home, draws, cost) -> Effort for one device in one round. `home` and `draws` are two
random numbers each, between 0 and 1. `home` depends on (seed, device) and is for a device's lasting properties, such as
its speed; `draws` depends on (seed, round, device). Neither depends on the algorithm, so every algorithm meets the same
devices. `cost` is the number of mini-batch steps in one unit of work.

An argument `asked=None` has the units of work that an algorithm asks for (`local.epochs`), if it asks for some.

The function may have further arguments, by name (KNOWN): the bytes of the device's messages, the clock, its number. A
model that asks for bytes is also asked about exchanges without work: a survey, and the gradients of S_2. `cost` is then
0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core.clock import LONGEST
from folb.errors import InputError, check_number, choose


class Effort(NamedTuple):
    """What one device does in one round."""

    work: Array  # units of work
    seconds: Array  # when the server has its reply, or stops waiting for it
    lost: Array  # no usable reply


System = Callable[..., Effort]

KNOWN = {
    "down": "bytes that the device is sent",
    "up": "bytes that it sends",
    "now": "seconds on the clock of the run when it is asked",
    "device": "its number, 0 to N - 1",
    "more": "two more random numbers, of the kind of `home`",
}


def asked_for(system: System) -> tuple[str, ...]:
    """What a system model needs besides (home, draws, cost): its further arguments that have no value yet."""
    try:
        parameters = list(inspect.signature(system).parameters.values())[3:]
    except ValueError:  # a function without a signature
        return ()
    needed = (p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty)
    return tuple(choose("what a system model needs", p.name, KNOWN) for p in needed)


def given_work(system: System, units: Any) -> System:
    """The system model with the units of work that an algorithm asks for, if it asks for some."""
    if units is None:
        return system
    known = inspect.signature(system).parameters.values()
    if not any(one.name == "asked" or one.kind is one.VAR_KEYWORD for one in known):
        expected = "should be none with this system model: it takes no `asked`, the units of work of each device"
        raise InputError("local.epochs", "set", expected)
    return partial(system, asked=units)


def described(system: System) -> tuple[str, dict[str, Any]]:
    """The name of a system model, and the settings that it was made with."""
    made = system if isinstance(system, partial) else partial(system)
    return getattr(made.func, "__name__", "own").strip("_"), dict(made.keywords)


def times_bytes(system: System) -> bool:
    """Whether its seconds depend on the bytes of messages."""
    return not {"down", "up"}.isdisjoint(asked_for(system))


MOST = 10**6  # units of work: more would take far too long, and overflow 32 bits in mini-batch steps
RATES = (1e-9, 1e9)  # of a speed or a bandwidth: with the widest spread, those of all devices fit into 32 bits
WIDEST = 10.0  # spread

Low = Annotated[int, "least work"]
High = Annotated[int, "most work"]
Rate = Annotated[float, "chance that a device drops out of a round"]


def fixed(*, work: Annotated[int, "units of work per device and round"] = 20, dropout: Rate = 0.0) -> System:
    """Every device does the same work: a mini-batch step takes a second, messages take none."""
    _check_work("work", work, 1)
    _check_dropout(dropout)
    return Partial(_fixed, work=work, dropout=dropout)


def _fixed(home: Array, draws: Array, cost: Array, *, work: Array, dropout: Array, asked: Any = None) -> Effort:
    return _uniform(home, draws, cost, low=work, high=work, dropout=dropout, asked=asked)


def uniform(
    *,
    low: Low = 1,
    high: High = 20,
    dropout: Rate = 0.0,
) -> System:
    """Sec. VI: work uniform in low .. high for each device and round; a mini-batch step takes a second."""
    _check_work("low", low, 1)
    _check_work("high", high, low)
    _check_dropout(dropout)
    return Partial(_uniform, low=low, high=high, dropout=dropout)


def _uniform(
    home: Array, draws: Array, cost: Array, *, low: Array, high: Array, dropout: Array, asked: Any = None
) -> Effort:
    work = _work(draws, low, high) if asked is None else jnp.int32(asked)
    return Effort(work, (work * cost).astype(jnp.float32), draws[1] < dropout)


def _work(draws: Array, low: Array, high: Array) -> Array:
    return jnp.minimum(low + jnp.floor(draws[0] * (high - low + 1)).astype(jnp.int32), high)


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
    _check_rates(speed=speed)
    _check_times(tau=tau, delay=delay)
    _check_spreads(speed_spread=speed_spread, delay_spread=delay_spread)
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
    draws: Array,
    cost: Array,
    *,
    tau: Array,
    speed: Array,
    speed_spread: Array,
    delay: Array,
    delay_spread: Array,
    dropout: Array,
    asked: Any = None,
) -> Effort:
    spread = jax.scipy.special.ndtri(home)  # normal
    steps_per_second = speed * jnp.exp(speed_spread * spread[0])
    mean_delay = delay * jnp.exp(delay_spread * spread[1])
    T_c = mean_delay * jnp.log(100.0)  # the 99th percentile of an exponential of that mean
    work = jnp.minimum(jnp.maximum(tau - T_c, 0.0) * steps_per_second / cost, MOST).astype(jnp.int32)
    short = work < (1 if asked is None else asked)
    work = work if asked is None else jnp.int32(asked)
    arrival = work * cost / steps_per_second - mean_delay * jnp.log(draws[0])
    lost = (arrival > tau) | short | (draws[1] < dropout)
    return Effort(jnp.where(lost, 0, work), jnp.where(lost, tau, arrival), lost)


class Link(NamedTuple):
    """How fast a device works, and what connects it."""

    speed: Any  # mini-batch steps per second
    up: Any  # Mbit/s
    down: Any  # Mbit/s
    latency: Any  # seconds of an exchange besides its bytes and the work


Tau = Annotated[float | None, "length of a round, in seconds; by default a round waits for its devices"]


def network(
    *,
    low: Low = 1,
    high: High = 20,
    speed: Annotated[float, "median device's mini-batch steps per second"] = 10.0,
    speed_spread: Annotated[float, "sd of log speed over the devices"] = 0.5,
    up_mbit: Annotated[float, "median device's bandwidth up, in Mbit/s"] = 5.0,
    up_spread: Annotated[float, "sd of log bandwidth up over the devices"] = 1.0,
    down_mbit: Annotated[float, "median device's bandwidth down, in Mbit/s"] = 20.0,
    down_spread: Annotated[float, "sd of log bandwidth down over the devices"] = 1.0,
    latency: Annotated[float, "median device's seconds of an exchange besides its bytes and the work"] = 0.1,
    latency_spread: Annotated[float, "sd of log latency over the devices"] = 0.5,
    tau: Tau = None,
    dropout: Rate = 0.0,
) -> System:
    """Bytes cost seconds: latency + bytes down / bandwidth + work / speed + bytes up / bandwidth.

    Work is uniform in low .. high. With tau, a device stops early enough to reply in time; if that leaves less than
    one unit, its reply is lost.
    """
    _check_rates(speed=speed, up_mbit=up_mbit, down_mbit=down_mbit)
    _check_between("latency", latency, LONGEST)
    _check_spreads(
        speed_spread=speed_spread, up_spread=up_spread, down_spread=down_spread, latency_spread=latency_spread
    )
    return Partial(
        _network,
        speed=speed,
        speed_spread=speed_spread,
        up_mbit=up_mbit,
        up_spread=up_spread,
        down_mbit=down_mbit,
        down_spread=down_spread,
        latency=latency,
        latency_spread=latency_spread,
        **rounds(low, high, tau, dropout),
    )


def _network(
    home: Array,
    draws: Array,
    cost: Array,
    down: Array,
    up: Array,
    more: Array,
    *,
    speed: Array,
    speed_spread: Array,
    up_mbit: Array,
    up_spread: Array,
    down_mbit: Array,
    down_spread: Array,
    latency: Array,
    latency_spread: Array,
    **round: Array,
) -> Effort:
    own, messages = jax.scipy.special.ndtri(home), jax.scipy.special.ndtri(more)  # normal
    link = Link(
        speed * jnp.exp(speed_spread * own[0]),
        up_mbit * jnp.exp(up_spread * messages[0]),
        down_mbit * jnp.exp(down_spread * messages[1]),
        latency * jnp.exp(latency_spread * own[1]),
    )
    return exchanged(link, draws, cost, down, up, **round)


def rounds(low: int, high: int, tau: float | None, dropout: float) -> dict[str, Any]:
    """The numbers of `exchanged`, checked."""
    _check_work("low", low, 1)
    _check_work("high", high, low)
    if tau is not None:
        _check_times(tau=tau)
    _check_dropout(dropout)
    return {"low": low, "high": high, "tau": math.inf if tau is None else tau, "dropout": dropout}


def exchanged(
    link: Link,
    draws: Array,
    cost: Array,
    down: Array,
    up: Array,
    *,
    low: Array,
    high: Array,
    tau: Array,
    dropout: Array,
    asked: Any = None,
) -> Effort:
    """One exchange with a device: it is sent `down` bytes, works, and sends `up` bytes.

    It works for `asked` units, or for as many as it manages. Without tau, the server waits for a lost reply until it
    would have come. Nothing takes longer than LONGEST.
    """
    messages = jnp.minimum(link.latency + 8e-6 * (down / link.down + up / link.up), LONGEST)  # bytes over Mbit/s
    unit = jnp.minimum(cost / link.speed, LONGEST)
    late = messages + unit * (1 if asked is None else asked) > tau
    fitting = jnp.where(unit > 0, (tau - messages) / jnp.where(unit > 0, unit, 1.0), MOST)
    managed = jnp.clip(jnp.minimum(fitting, MOST).astype(jnp.int32), 1, _work(draws, low, high))
    work = managed if asked is None else jnp.int32(asked)
    arrival = jnp.minimum(messages + work * unit, jnp.minimum(tau, LONGEST))
    lost = late | (draws[1] < dropout)
    waiting = jnp.where(jnp.isfinite(tau), tau, arrival)
    return Effort(jnp.where(lost, 0, work), jnp.where(lost, waiting, arrival), lost)


def _check_work(field: str, work: Any, least: Any) -> None:
    def whole(work: Any) -> Any:
        return (work >= least) & (work <= MOST) & (work == work // 1)

    check_number(field, work, whole, f"should be a whole number from {least} to {MOST}")


def _check_rates(**rates: float) -> None:
    least, most = RATES
    for name, rate in rates.items():
        expected = f"should be more than 0: from {least:g} to {most:g}"
        check_number(name, rate, lambda rate: (rate >= least) & (rate <= most), expected)


def _check_times(**times: float) -> None:
    for name, time in times.items():
        expected = f"should be more than 0, and at most {LONGEST:g} seconds"
        check_number(name, time, lambda time: (time > 0) & (time <= LONGEST), expected)


def _check_spreads(**spreads: float) -> None:
    for name, spread in spreads.items():
        _check_between(name, spread, WIDEST)


def _check_between(name: str, value: float, most: float) -> None:
    check_number(
        name, value, lambda value: (value >= 0) & (value <= most), f"should be at least 0, and at most {most:g}"
    )


def _check_dropout(dropout: float) -> None:
    check_number("dropout", dropout, lambda rate: (rate >= 0) & (rate <= 1), "should be between 0 and 1")


SYSTEMS: dict[str, Callable[..., System]] = {
    "fixed": fixed,
    "uniform": uniform,
    "deadline": deadline,
    "network": network,
}
