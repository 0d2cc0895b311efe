"""How much work a device manages in a round, when its reply arrives, and whether it does.

A system model is a function (home, draws, cost) -> Effort for one device in one round. `home` and `draws` are two
random numbers each, between 0 and 1. `home` depends on (seed, device) and is for a device's lasting properties, such as
its speed; `draws` depends on (seed, round, device). Neither depends on the algorithm, so every algorithm meets the same
devices. `cost` is the number of mini-batch steps in one unit of work. An argument `asked=None` has the units of work
that an algorithm asks for (`local.epochs`), if it asks for some. Other arguments are in KNOWN. A model that asks for
bytes is also asked about exchanges without work, of cost 0: a survey, and the gradients of S_2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core.clock import LONGEST
from folb.core.part import Range
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


def _at_most(most: float) -> Range:
    return Range(lambda value: (value >= 0) & (value <= most), f"should be at least 0, and at most {most:g}")


def _units(least: Any) -> Range:
    return Range(
        lambda work: (work >= least) & (work <= MOST) & (work == work // 1),
        f"should be a whole number from {least} to {MOST}",
    )


RATE = Range(
    lambda rate: (rate >= RATES[0]) & (rate <= RATES[1]), "should be more than 0: from {:g} to {:g}".format(*RATES)
)
TIME = Range(lambda time: (time > 0) & (time <= LONGEST), f"should be more than 0, and at most {LONGEST:g} seconds")
RANGES = {
    **dict.fromkeys(("work", "low"), _units(1)),
    **dict.fromkeys(("speed", "up_mbit", "down_mbit"), RATE),
    **dict.fromkeys(("tau", "delay"), TIME),
    **dict.fromkeys(("speed_spread", "delay_spread", "up_spread", "down_spread", "latency_spread"), _at_most(WIDEST)),
    "latency": _at_most(LONGEST),
    "dropout": Range(lambda rate: (rate >= 0) & (rate <= 1), "should be between 0 and 1"),
}


def _checked(**numbers: Any) -> dict[str, Any]:
    for name, value in numbers.items():
        within = _units(numbers["low"]) if name == "high" else RANGES[name]
        check_number(name, value, within.holds, within.words)
    return numbers


def fixed(*, work: Annotated[int, "units of work per device and round"] = 20, dropout: Rate = 0.0) -> System:
    """Every device does the same work: a mini-batch step takes a second, messages take none."""
    return Partial(_fixed, **_checked(**locals()))


def _fixed(home: Array, draws: Array, cost: Array, *, work: Array, dropout: Array, asked: Any = None) -> Effort:
    return _uniform(home, draws, cost, low=work, high=work, dropout=dropout, asked=asked)


def uniform(*, low: Low = 1, high: High = 20, dropout: Rate = 0.0) -> System:
    """Sec. VI: work uniform in low .. high for each device and round; a mini-batch step takes a second."""
    return Partial(_uniform, **_checked(**locals()))


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
    return Partial(_deadline, **_checked(**locals()))


def _deadline(home: Array, draws: Array, cost: Array, *, asked: Any = None, **of: Array) -> Effort:
    spread = jax.scipy.special.ndtri(home)  # normal
    steps_per_second = of["speed"] * jnp.exp(of["speed_spread"] * spread[0])
    mean_delay = of["delay"] * jnp.exp(of["delay_spread"] * spread[1])
    T_c = mean_delay * jnp.log(100.0)  # the 99th percentile of an exponential of that mean
    work = jnp.minimum(jnp.maximum(of["tau"] - T_c, 0.0) * steps_per_second / cost, MOST).astype(jnp.int32)
    short = work < (1 if asked is None else asked)
    work = work if asked is None else jnp.int32(asked)
    arrival = work * cost / steps_per_second - mean_delay * jnp.log(draws[0])
    lost = (arrival > of["tau"]) | short | (draws[1] < of["dropout"])
    return Effort(jnp.where(lost, 0, work), jnp.where(lost, of["tau"], arrival), lost)


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
    own = locals()
    shared = rounds(*(own.pop(name) for name in ("low", "high", "tau", "dropout")))
    return Partial(_network, **_checked(**own), **shared)


def _network(
    home: Array, draws: Array, cost: Array, down: Array, up: Array, more: Array, *, asked: Any = None, **of: Array
) -> Effort:
    own, messages = jax.scipy.special.ndtri(home), jax.scipy.special.ndtri(more)  # normal
    link = Link(
        of["speed"] * jnp.exp(of["speed_spread"] * own[0]),
        of["up_mbit"] * jnp.exp(of["up_spread"] * messages[0]),
        of["down_mbit"] * jnp.exp(of["down_spread"] * messages[1]),
        of["latency"] * jnp.exp(of["latency_spread"] * own[1]),
    )
    return exchanged(link, draws, cost, down, up, of, asked)


def rounds(low: int, high: int, tau: float | None, dropout: float) -> dict[str, Any]:
    """The numbers of `exchanged`, checked."""
    _checked(low=low, high=high, dropout=dropout)
    end = math.inf if tau is None else _checked(tau=tau)["tau"]
    return {"low": low, "high": high, "tau": end, "dropout": dropout}


def exchanged(
    link: Link, draws: Array, cost: Array, down: Array, up: Array, round: Mapping[str, Any], asked: Any
) -> Effort:
    """One exchange with a device: it is sent `down` bytes, works, and sends `up` bytes.

    It works for `asked` units, or for as many as it manages. Without tau, the server waits for a lost reply until it
    would have come. Nothing takes longer than LONGEST.
    """
    low, high, tau, dropout = (round[name] for name in ("low", "high", "tau", "dropout"))
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


MADE: tuple[Callable[..., System], ...] = (fixed, uniform, deadline, network)
SYSTEMS = {one.__name__: one for one in MADE}
