"""Your own local step: heavy-ball momentum on the device, forgotten at the end of the round.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_step.py:local_momentum --set local_momentum.decay=0.5,0.9

A real device needs the step, too, but no jax: Device(x, y, gradient, parts=[heavy_ball(0.9)]).
"""

from typing import Annotated, Any

import folb
from folb.core.vector import each, scaled, zeros


def step(g: Any, state: Any, lr: Any, *, decay: Any) -> tuple[Any, Any]:
    """m <- decay m + g; the model moves by -lr m."""
    m = each(lambda m, d: decay * m + d, state, g)
    return scaled(m, -lr), m


def heavy_ball(decay: float) -> folb.LocalStep:
    """The step with its number, and the momentum at the start of a round."""
    return folb.LocalStep(step, init=zeros, numbers={"decay": decay})


def local_momentum(*, decay: Annotated[float, "of the momentum"] = 0.9, **common: Any) -> "folb.Algorithm":
    """FedAvg with momentum on its devices."""
    return folb.compose(folb.rules.Mean(), local_step=heavy_ball(decay), **common)
