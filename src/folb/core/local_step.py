"""The step of a device's solver, on h_k of (3).

A step is a function (g, state, lr, *, numbers) -> (move, state). `g` is the gradient of h_k at the device's model, with
the proximal term and the server's shift. The device adds `move` to its model. `state` starts as init(params) in every
round: a step keeps nothing between rounds. A step that is written with `folb.core.vector` runs both in the simulator
and on a real device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from folb.core.vector import each, namespace, norm, scaled, zeros
from folb.errors import InputError, check_number
from folb.typing import Params


def no_state(params: Params) -> tuple[()]:
    """The state of a step that has none."""
    return ()


@dataclass(frozen=True)
class LocalStep:
    """A step, its state at the start of a round, and its numbers, which can be swept.

    reach(J, *, numbers) is the total weight of the gradients in J steps, if that is not J: how far J steps go along a
    gradient that stays the same, in units of lr. `one_size` is False if its steps are not lr times a mean of gradients:
    what divides by the size of the steps rejects it.
    """

    apply: Callable[..., tuple[Params, Any]]
    init: Callable[[Params], Any] = no_state
    numbers: Mapping[str, Any] = field(default_factory=dict)
    reach: Callable[..., Any] | None = None
    one_size: bool = True

    @property
    def name(self) -> str:
        """The name by which a device knows it: that of its function."""
        function = self.apply
        while isinstance(function, partial):
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
        """The move, and the state after it."""
        return self.apply(g, state, lr, **self.numbers)


def sgd(g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
    """-lr g."""
    return scaled(g, -lr), state


def momentum(g: Params, state: Params, lr: Any, *, beta: Any) -> tuple[Params, Params]:
    """Heavy-ball momentum: v <- beta v + g, and the move -lr v."""
    v = each(lambda v, g: beta * v + g, state, g)
    return scaled(v, -lr), v


def _reach(J: Any, *, beta: Any) -> Any:
    """sum_j (1 - beta^j) / (1 - beta), for j = 1 .. J."""
    return (J - beta * (1 - beta**J) / (1 - beta)) / (1 - beta)


class Pace(NamedTuple):
    """The state of `delta_sgd`: its last gradient, and the size, the growth and the length of its last step."""

    g: Params
    lr: Any  # negative before the first step
    theta: Any
    length: Any


def _no_pace(params: Params) -> Pace:
    zero = norm(params) * 0
    return Pace(zeros(params), zero - 1, zero + 1, zero)


def delta_sgd(g: Params, state: Pace, lr: Any, *, gamma: Any, delta: Any) -> tuple[Params, Pace]:
    """Delta-SGD (Kim et al., 2024): eta_j = min(gamma ||dw|| / (2 ||dg||), sqrt(1 + delta theta) eta_(j-1)).

    theta is eta_j / eta_(j-1), and lr the size of the first step of a round.
    """
    change = norm(each(lambda new, old: new - old, g, state.g))
    xp = namespace(change)
    first = state.lr < 0
    before = xp.where(first, lr, state.lr)
    grown = xp.sqrt(1 + delta * state.theta) * before
    smooth = xp.where(change > 0, gamma * state.length / (2 * xp.where(change > 0, change, 1.0)), xp.inf)
    eta = xp.where(first, lr, xp.minimum(smooth, grown))
    theta = xp.where(before > 0, eta / xp.where(before > 0, before, 1.0), 1.0)
    return scaled(g, -eta), Pace(g, eta, theta, eta * norm(g))


class Moments(NamedTuple):
    """The state of `adam`: the means of the gradients and of their squares, and how many there were."""

    m: Params
    v: Params
    steps: Any


def _no_moments(params: Params) -> Moments:
    return Moments(zeros(params), zeros(params), norm(params) * 0)


def adam(g: Params, state: Moments, lr: Any, *, beta: Any, beta2: Any, eps: Any) -> tuple[Params, Moments]:
    """Adam (Kingma and Ba, 2015): -lr m / (sqrt(v) + eps), with corrected bias. Its means start at 0 in each round."""
    m = each(lambda m, g: beta * m + (1 - beta) * g, state.m, g)
    v = each(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.v, g)
    j = state.steps + 1
    bias, bias2 = 1 - beta**j, 1 - beta2**j
    move = each(lambda m, v: -lr * (m / bias) / (namespace(v).sqrt(v / bias2) + eps), m, v)
    return move, Moments(m, v, j)


LOCAL_STEPS: dict[str, LocalStep] = {
    "sgd": LocalStep(sgd),
    "momentum": LocalStep(momentum, zeros, {"beta": 0.9}, _reach),
    "delta_sgd": LocalStep(delta_sgd, _no_pace, {"gamma": 2.0, "delta": 0.1}, one_size=False),
    "adam": LocalStep(adam, _no_moments, {"beta": 0.9, "beta2": 0.999, "eps": 1e-8}, one_size=False),
}
NEAR_ONE, NEAR_ZERO = 1 - 2**-25, 2**-126  # beyond them a number is 1 or 0 in 32 bits, and a step divides by zero
RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "beta": (lambda beta: (beta >= 0) & (beta < NEAR_ONE), "should be at least 0 and less than 1, in 32 bits"),
    "beta2": (lambda beta2: (beta2 >= 0) & (beta2 < NEAR_ONE), "should be at least 0 and less than 1, in 32 bits"),
    "eps": (lambda eps: eps >= NEAR_ZERO, "should be more than 0, in 32 bits"),
    "gamma": (lambda gamma: gamma > 0, "should be more than 0"),
    "delta": (lambda delta: delta >= 0, "should be at least 0"),
}


def local_step(step: str | LocalStep | Callable[..., Any] | None, **numbers: Any) -> LocalStep:
    """A step by its name, with the numbers that are not None; or your own. A plain function has no state."""
    given = {name: value for name, value in numbers.items() if value is not None}
    step = "sgd" if step is None else step
    if isinstance(step, str) and step not in LOCAL_STEPS:
        raise InputError("local_step", step, f"should be one of {', '.join(LOCAL_STEPS)}, or a LocalStep")
    known = LOCAL_STEPS[step].numbers if isinstance(step, str) else {}
    for name, value in given.items():
        check_number(f"local_{name}", value, *RANGES[name])
        if name not in known:
            owners = ", ".join(other for other, one in LOCAL_STEPS.items() if name in one.numbers)
            which = step if isinstance(step, str) else "your own"
            raise InputError(f"local_{name}", value, f"is for local_step={owners}; local_step is {which}")
    if isinstance(step, str):
        return replace(LOCAL_STEPS[step], numbers={**known, **given})
    found = step if isinstance(step, LocalStep) else LocalStep(step) if callable(step) else None
    if found is None or not callable(found.apply) or not callable(found.init):
        raise InputError("local_step", step, "should be a LocalStep, or a function (g, state, lr) -> (move, state)")
    names = list(inspect.signature(found.apply).parameters)
    if len(names) < 3 or not set(found.numbers) <= set(names[3:]):
        expected = f"should be a function (g, state, lr, *, {', '.join(found.numbers) or '...'})"
        raise InputError("local_step", found.name, expected)
    known_step = LOCAL_STEPS.get(found.name)
    if known_step is None:
        return found
    if found.apply is not known_step.apply:
        expected = "should have another name: a device finds a step by its name, and folb has a step of this name"
        raise InputError("local_step", found.name, expected)
    return replace(found, one_size=known_step.one_size)
