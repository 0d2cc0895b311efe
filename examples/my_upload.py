"""An upload of one's own: each device tells how well its update follows its gradient, and is weighted by that.

folb compare synthetic_1_1 --algorithms fedavg,examples/my_upload.py:by_descent --set power=1,2

A real device needs the upload, too, and no jax for it: Device(x, y, gradient, parts=[DESCENT]).
"""

from typing import Annotated, Any

import folb
from folb.core.vector import dot, norm


def descent(delta: Any, grad: Any) -> Any:
    """The cosine of the update with -grad F_k(w^t): its arguments are what the device has to compute for it."""
    return -dot(delta, grad) / (norm(delta) * norm(grad) + 1e-12)


# what arrives is refused unless it is a number from -1.001 to 1.001, so that nobody buys weight with a larger one
DESCENT = folb.Upload("descent", descent, least=-1.001, most=1.001)


def weigh(round: folb.Round, power: Any) -> folb.Update:
    """Weights in proportion to the cosine's power, those below 0 being 0; `times` is 0 for a device that was lost."""
    weights = round.times * round.sent["descent"].clip(0.0, 1.0) ** power
    return folb.weighted(round, folb.rules.fraction(weights, weights.sum()))


def by_descent(*, power: Annotated[float, "of the cosine"] = 1.0, **common: Any) -> "folb.Algorithm":
    """FedAvg that trusts those who went downhill."""
    from jax.tree_util import Partial  # here, and not above: a device that imports this file needs no jax

    return folb.compose(Partial(weigh, power=power), uploads=(DESCENT,), **common)
