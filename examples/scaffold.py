"""SCAFFOLD (Karimireddy et al., 2020) as your own file: control variates, which the server remembers.

folb compare synthetic_1_1 --algorithms fedavg,examples/scaffold.py:scaffold --set scaffold.memory.option=1,2
"""

import jax

import folb
from folb import tree


class ControlVariates(folb.DeviceMemory):
    """c of the server, and c_k of each device. Option 1: c_k+ = grad F_k(w); 2: c_k+ = c_k - c - Delta_k / (J_k lr)."""

    option: str = folb.setting("how c_k is renewed", default="2", static=True)
    uploads = property(lambda self: ("grad",) if self.option == "1" else ())
    one_size = property(lambda self: self.option == "2")  # it divides by the size of a step

    def init(self, params: object) -> tuple[object, object]:
        return folb.vector.zeros(params), folb.vector.zeros(params)

    def update(self, round: folb.Round) -> tuple[object, object]:
        new = round.grad
        if self.option == "2":
            rate = folb.rules.fraction(1.0, round.steps * round.lr)
            new = jax.vmap(lambda c_k, d, r: tree.add(tree.sub(c_k, round.shared), d, -r))(round.own, round.delta, rate)
        came = (round.times > 0) / round.N  # each device once, however often it was drawn
        return tree.add(round.shared, tree.combine(came, tree.sub(new, round.own))), new

    def shift(self, shared: object, own: object, sent: object) -> object:
        return tree.sub(shared, own)


scaffold = folb.Algorithm(memory=ControlVariates())  # a device's local steps are g - c_k + c
