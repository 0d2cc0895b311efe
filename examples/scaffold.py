"""SCAFFOLD (Karimireddy et al., 2020) as your own file: control variates, which the server remembers.

folb compare synthetic_1_1 --algorithms fedavg,examples/scaffold.py:scaffold --set scaffold.option=1,2
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

import folb
from folb import tree


def start(params: object) -> tuple[object, object]:
    """c of the server, and c_k of a new device: both 0."""
    zero = jax.tree.map(jnp.zeros_like, params)
    return zero, zero


def update(round: folb.Round) -> tuple[object, object]:
    """Option I: c_k+ = grad F_k(w); II: c_k+ = c_k - c - Delta_k / (J_k lr). Then c += sum_k (c_k+ - c_k) / N."""
    if round.grad is not None:
        new = round.grad
    else:
        rate = folb.rules.fraction(1.0, round.steps * round.lr)
        new = jax.vmap(lambda c_k, d, r: tree.add(tree.sub(c_k, round.shared), d, -r))(round.own, round.delta, rate)
    came = (round.times > 0) / round.N  # each device once, however often it was drawn
    return tree.add(round.shared, tree.combine(came, tree.sub(new, round.own))), new


@folb.named
def scaffold(*, option: Annotated[Literal["1", "2"], "how c_k is renewed"] = "2", **common: object) -> folb.Algorithm:
    """A device's local steps are g - c_k + c."""
    memory = folb.DeviceMemory(start, update, shift=tree.sub)
    return folb.compose(folb.rules.mean, memory=memory, uploads=("grad",) if option == "1" else (), **common)
