"""The model that is evaluated and kept: the server's own, or an average of its models.

An average sends no extra bytes, and smooths a model that swings from round to round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from folb.core import tree
from folb.errors import InputError, check_number, choose
from folb.typing import Params


class Average(NamedTuple):
    """init(params) -> memory; update(memory, params) -> memory, after a round; model(memory, params) -> the model."""

    init: Callable[[Params], Any]
    update: Callable[[Any, Params], Any]
    model: Callable[[Any, Params], Params]


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _server_model(memory: Any, params: Params) -> Params:
    return params


def server_model() -> Average:
    """The server's model itself."""
    return Average(Partial(_nothing), Partial(_nothing), Partial(_server_model))


def is_server_model(average: Average) -> bool:
    """Whether it is the server's model as it is."""
    return getattr(average.model, "func", None) is _server_model


def _ema_init(params: Params) -> tuple[Params, Any]:
    return jax.tree.map(jnp.zeros_like, params), jnp.float32(0)


def _ema_update(memory: tuple[Params, Any], params: Params, *, rate: Any) -> tuple[Params, Any]:
    total, count = memory
    return tree.add(params, total, rate), rate * count + 1


def _ema_model(memory: tuple[Params, Any], params: Params) -> Params:
    total, count = memory
    return jax.tree.map(lambda s, w: jnp.where(count > 0, s / jnp.where(count > 0, count, 1.0), w), total, params)


def ema(rate: Any = 0.7) -> Average:
    """The exponential mean sum_s rate^(t-s) w^s / sum_s rate^(t-s) over the models s = 1 .. t that
    rounds led to; a round that changes nothing does not count."""
    check_number("average_rate", rate, lambda rate: (rate >= 0) & (rate < 1), "should be at least 0 and less than 1")
    return Average(Partial(_ema_init), Partial(_ema_update, rate=rate), Partial(_ema_model))


def _last_init(params: Params) -> tuple[Params, Params]:
    return params, params


def _last_update(memory: tuple[Params, Params], params: Params) -> tuple[Params, Params]:
    return memory[1], params


def _last_model(memory: tuple[Params, Params], params: Params) -> Params:
    return jax.tree.map(lambda a, b: (a + b) / 2, *memory)


def last_two() -> Average:
    """The mean of the last two models, as FedExP's authors evaluate theirs."""
    return Average(Partial(_last_init), Partial(_last_update), Partial(_last_model))


AVERAGES: dict[str, Callable[..., Average]] = {"none": server_model, "ema": ema, "last_two": last_two}


def average(wanted: str | Average | None, rate: Any = None) -> Average:
    """An average by its name, or your own; None is the server's model."""
    if rate is not None and wanted != "ema":
        raise InputError("average_rate", rate, f"is only for average=ema; average is {wanted}")
    if isinstance(wanted, Average):
        found: Average = tree.functions("average", wanted)
        return found
    if wanted is None:
        return server_model()
    make = AVERAGES[choose("average", wanted, AVERAGES)]
    return make() if rate is None else make(rate)
