"""Your own local step: heavy-ball momentum on the device, forgotten at the end of the round.

folb compare synthetic_1_1 --algorithms fedavg --set local=sgd,examples/my_step.py:HeavyBall

A real device needs the step, too, but no jax: Device(x, y, gradient, parts=[HeavyBall]).
"""

from typing import Any

import folb
from folb.core.vector import each, scaled, zeros


class HeavyBall(folb.LocalStep):
    """m <- decay m + g; the model moves by -lr m."""

    decay: float = folb.setting("of the momentum", within=(0, 1), default=0.9)

    def init(self, params: Any) -> Any:
        """The momentum at the start of a round."""
        return zeros(params)

    def apply(self, g: Any, state: Any, lr: Any) -> tuple[Any, Any]:
        """The move, and the momentum after it."""
        m = each(lambda m, d: self.decay * m + d, state, g)
        return scaled(m, -lr), m
