"""SCAFFOLD (Karimireddy et al., 2020) as your own file: control variates, which the server remembers.

folb compare synthetic_1_1 --algorithms fedavg,examples/scaffold.py:scaffold --set scaffold.option=1,2
"""

from typing import Annotated, Literal

import jax

import folb
from folb import tree


class ControlVariates(folb.DeviceMemory):
    """c of the server, and c_k of each device."""

    shifts = True  # devices are sent a shift of their gradients

    def init(self, params: object) -> tuple[object, object]:
        zero = folb.vector.zeros(params)
        return zero, zero

    def update(self, round: folb.Round) -> tuple[object, object]:
        """Option I: c_k+ = grad F_k(w); II: c_k+ = c_k - c - Delta_k / (J_k lr). Then c += sum_k (c_k+ - c_k) / N."""
        if round.grad is not None:
            new = round.grad
        else:
            rate = folb.rules.fraction(1.0, round.steps * round.lr)
            new = jax.vmap(lambda c_k, d, r: tree.add(tree.sub(c_k, round.shared), d, -r))(round.own, round.delta, rate)
        came = (round.times > 0) / round.N  # each device once, however often it was drawn
        return tree.add(round.shared, tree.combine(came, tree.sub(new, round.own))), new

    def shift(self, shared: object, own: object, sent: object) -> object:
        return tree.sub(shared, own)


@folb.named
def scaffold(*, option: Annotated[Literal["1", "2"], "how c_k is renewed"] = "2", **common: object) -> folb.Algorithm:
    """A device's local steps are g - c_k + c."""
    return folb.compose(folb.rules.mean, memory=ControlVariates(), uploads=("grad",) if option == "1" else (), **common)
