"""Your own upload: each device reports how well its update follows its gradient, and is weighted by this.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_upload.py:by_descent --set rule.power=1,2

A real device needs the upload, too, but no jax: Device(x, y, gradient, parts=[DESCENT]).
"""

from typing import Any

import folb
from folb.core.vector import dot, norm


def descent(delta: Any, grad: Any) -> Any:
    """The cosine of the update with -grad F_k(w^t). The device computes the arguments."""
    return -dot(delta, grad) / (norm(delta) * norm(grad) + 1e-12)


# a reply is rejected unless this is a number from -1.001 to 1.001: a larger one would gain weight
DESCENT = folb.Upload("descent", descent, least=-1.001, most=1.001)


class ByDescent(folb.Rule):
    """Weights in proportion to a power of the cosine, or 0 if it is negative; `times` is 0 for a lost device."""

    uploads = (DESCENT,)
    power: float = folb.setting("of the cosine", default=1.0)

    def update(self, round: folb.Round) -> folb.Update:
        """The sum of the updates with these weights."""
        weights = round.times * round.sent["descent"].clip(0.0, 1.0) ** self.power
        return folb.weighted(round, folb.rules.fraction(weights, weights.sum()))


by_descent = folb.Algorithm(rule=ByDescent())
