"""Where FOLB's rules get grad F_k from. FOLB needs only inner products of gradients, and these cost fewer bytes.

`exact` uploads the gradient itself: as much as an update. `sketch` uploads a few numbers that nearly keep the inner
products (`folb.core.sketch`). `proxy` uploads nothing: -Delta_k / (lr J_k), the mean gradient of the device's own
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Gradients, Round, fraction
from folb.core.sketch import sketched, unpacked
from folb.core.upload import DELTA, GRAD, Upload, sketch
from folb.core.vector import scaled
from folb.errors import InputError, choose
from folb.typing import Params

GRADIENTS = {
    "exact": "The gradient itself: as much as an update.",
    "sketch": "A few numbers that nearly keep the inner products.",
    "proxy": "-Delta_k / (lr J_k), the mean gradient of the device's own steps: nothing is sent.",
}


class Source(NamedTuple):
    """An upload of S_1 (None asks for nothing more), the upload of S_2, and the round as the rule sees it."""

    upload: Upload | None
    second: Upload  # all that a device of S_2 sends
    view: Callable[[Round], Round]

    @property
    def works(self) -> bool:
        """Whether a device of S_2 has to work for what it sends."""
        return "delta" in self.second.needs


def _as_sent(round: Round) -> Round:
    return round


def _from_updates(round: Round) -> Round:
    assert round.steps is not None and round.lr is not None
    lr = round.lr

    def slopes(delta: Params, steps: Array, times: Array) -> Params:
        rate = fraction((times > 0).astype(jnp.float32), steps * lr)
        return jax.vmap(scaled)(delta, -rate)

    second = round.second
    if second is not None:
        assert second.steps is not None
        second = Gradients(slopes(second.grad, second.steps, second.times), *second[1:])
    slope = slopes(round.delta, round.steps, round.times)
    grad = slope if round.shift is None else tree.sub(slope, round.shift)
    return round._replace(grad=grad, downhill=slope, second=second)


class _Sketches(NamedTuple):
    """A view by sketches. Equal ones are one function, so that algorithms with the same m are one program."""

    m: int
    bits: int

    def __call__(self, round: Round) -> Round:
        def decode(sent: Any) -> Array:
            return unpacked(sent, self.m, self.bits)

        second = round.second
        if second is not None:
            second = second._replace(grad=jax.vmap(decode)(second.grad))
        assert round.key is not None

        def again(stack: Params) -> Array:
            return jax.vmap(lambda a: sketched(a, round.key, self.m))(stack)

        grad = jax.vmap(decode)(round.sent["sketch"])
        downhill = None if round.shift is None else grad + again(round.shift)
        return round._replace(grad=grad, compared=again(round.delta), downhill=downhill, second=second)


def source(wanted: str, m: Any = None, bits: Any = None) -> Source:
    """Where the gradients come from, by name; `m` numbers of so many `bits` are for a sketch."""
    choose("gradient", wanted, GRADIENTS)
    for name, value in (("sketch", m), ("bits", bits)):
        if value is not None and wanted != "sketch":
            raise InputError(name, value, f"is for gradient=sketch; gradient is {wanted}")
    if wanted == "exact":
        return Source(GRAD, GRAD, Partial(_as_sent))
    if wanted == "proxy":
        return Source(None, DELTA, Partial(_from_updates))
    made = sketch(256 if m is None else m, 8 if bits is None else bits)
    return Source(made, made, Partial(_Sketches(**dict(made.sizes))))
