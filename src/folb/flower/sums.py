"""The work of a device if the server learns only sums: its own weight, as the server would have computed it."""

from __future__ import annotations

from typing import Any

from folb.core.rule import as_printed, never_flipped
from folb.core.upload import GAMMA, Upload
from folb.core.vector import dot, namespace, scaled
from folb.typing import Params


def scaled_grad(grad: Params, *, scale: Any) -> Params:
    """The gradient, as a term of the sum (10)."""
    return scaled(grad, scale)


def _weight(grad: Params, mean: Params, discount: Any, flip: Any, times: Any) -> Any:
    """I_k of (18) / ||mean||^2, to keep its range small: the server divides by the sum of all |I_k| anyway."""
    square = dot(mean, mean)
    xp = namespace(square)
    inner = xp.where(square > 0, dot(grad, mean) / xp.where(square > 0, square, 1.0), 0.0)
    importance = xp.where(flip > 0, as_printed(inner, discount), never_flipped(inner, discount))
    return times * xp.where(square > 0, importance, 0.0)


def weighted(delta: Params, grad: Params, mean: Params, *, times: Any) -> Params:
    """I_k Delta w_k of (13)."""
    return scaled(delta, _weight(grad, mean, 0.0, 1.0, times))


def importance(grad: Params, mean: Params, *, times: Any) -> Any:
    """|I_k| of (13)."""
    return abs(_weight(grad, mean, 0.0, 1.0, times))


def _hetero_weight(delta: Params, grad: Params, after: Params, mu: Any, mean: Params, numbers: dict[str, Any]) -> Any:
    gamma = GAMMA.compute(delta, grad, after, mu, most=numbers["most"])
    return _weight(grad, mean, numbers["psi"] * gamma, numbers["flip"], numbers["times"])


def hetero_weighted(
    delta: Params, grad: Params, after: Params, mu: Any, mean: Params, *, times: Any, psi: Any, flip: Any, most: Any
) -> Params:
    """I_k Delta w_k of (18); `most` bounds gamma_k."""
    numbers = {"times": times, "psi": psi, "flip": flip, "most": most}
    return scaled(delta, _hetero_weight(delta, grad, after, mu, mean, numbers))


def hetero_importance(
    delta: Params, grad: Params, after: Params, mu: Any, mean: Params, *, times: Any, psi: Any, flip: Any, most: Any
) -> Any:
    """|I_k| of (18)."""
    numbers = {"times": times, "psi": psi, "flip": flip, "most": most}
    return abs(_hetero_weight(delta, grad, after, mu, mean, numbers))


# a task has its own numbers: `times` in the multiset, and those of the rule
SCALED_GRAD = Upload("scaled_grad", scaled_grad, {"scale": 1.0})
WEIGHTED = Upload("weighted", weighted, {"times": 1.0})
IMPORTANCE = Upload("importance", importance, {"times": 1.0}, least=0.0)
HETERO = {"times": 1.0, "psi": 0.0, "flip": 1.0, "most": 1.0}
HETERO_WEIGHTED = Upload("hetero_weighted", hetero_weighted, HETERO)
HETERO_IMPORTANCE = Upload("hetero_importance", hetero_importance, HETERO, least=0.0)
SUMS = {one.name: one for one in (SCALED_GRAD, WEIGHTED, IMPORTANCE, HETERO_WEIGHTED, HETERO_IMPORTANCE)}
