"""The step of a device's solver, on h_k of (3).

A step is a function (g, state, lr, *, numbers) -> (move, state). `g` is the gradient of h_k at the device's model, with
the proximal term and the server's shift. The device adds `move` to its model. `state` starts as init(params) in every
round: a device keeps nothing between rounds. A step that is written with `folb.core.vector` runs both in the simulator
and on a real device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from folb.core.vector import scaled
from folb.errors import InputError
from folb.typing import Params


def no_state(params: Params) -> tuple[()]:
    """The state of a step that has none."""
    return ()


@dataclass(frozen=True)
class LocalStep:
    """A step, its state at the start of a round, and its numbers, which can be swept."""

    apply: Callable[..., tuple[Params, Any]]
    init: Callable[[Params], Any] = no_state
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name by which a device knows it."""
        return self.apply.__name__

    def __call__(self, g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
        """The move, and the state after it."""
        return self.apply(g, state, lr, **self.numbers)


def sgd(g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
    """-lr g."""
    return scaled(g, -lr), state


LOCAL_STEPS: dict[str, LocalStep] = {"sgd": LocalStep(sgd)}


def local_step(step: str | LocalStep | Callable[..., Any]) -> LocalStep:
    """A step by its name, or your own; a plain function has no state."""
    if isinstance(step, str):
        if step not in LOCAL_STEPS:
            raise InputError("local_step", step, f"should be one of {', '.join(LOCAL_STEPS)}, or a LocalStep")
        return LOCAL_STEPS[step]
    found = step if isinstance(step, LocalStep) else LocalStep(step) if callable(step) else None
    if found is None or not callable(found.apply) or not callable(found.init):
        raise InputError("local_step", step, "should be a LocalStep, or a function (g, state, lr) -> (move, state)")
    names = list(inspect.signature(found.apply).parameters)
    if len(names) < 3 or not set(found.numbers) <= set(names[3:]):
        expected = f"should be a function (g, state, lr, *, {', '.join(found.numbers) or '...'})"
        raise InputError("local_step", found.name, expected)
    return found
