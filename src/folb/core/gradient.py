"""Where FOLB's rules get grad F_k from. FOLB needs only inner products of gradients, and these cost fewer bytes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import Part, Range, Slot, setting, whole
from folb.core.rules import Gradients, Round, fraction
from folb.core.sketch import BITS, MOST, sketched, unpacked
from folb.core.upload import DELTA, GRAD, Upload, sketch
from folb.core.vector import scaled
from folb.typing import Params

BITS_RANGE = Range(lambda bits: bits in BITS, f"should be one of {', '.join(map(str, BITS))}", number=False)


class GradientSource(Part):
    """What stands for grad F_k in a rule: what devices send for it, and how the server reads that."""

    upload: ClassVar[Any] = GRAD  # what a device of S_1 sends for it; None: nothing more than its update

    @property
    def second(self) -> Upload:
        """All that a device of S_2 sends: the same, or else its update."""
        return self.upload or DELTA

    @property
    def works(self) -> bool:
        """Whether a device of S_2 has to work for what it sends."""
        return "delta" in self.second.needs

    def view(self, round: Round) -> Round:
        """The round as the rule sees it."""
        return round


class Exact(GradientSource):
    """The gradient itself: as much as an update."""


class Sketch(GradientSource):
    """A few numbers that nearly keep the inner products."""

    m: int = setting("how many numbers it sends, m", whole(1, MOST), default=256)
    bits: int = setting("bits of each of these numbers: 1, 2, 4, 8 or 32", BITS_RANGE, default=8)

    @property
    def upload(self) -> Upload:
        return sketch(self.m, self.bits)

    def view(self, round: Round) -> Round:
        """Sketches in place of gradients, and sketches of what they are compared with."""
        decoded: Any = jax.vmap(lambda sent: unpacked(sent, self.m, self.bits))
        again: Any = jax.vmap(lambda a: sketched(a, round.key, self.m))
        second = None if round.second is None else round.second._replace(grad=decoded(round.second.grad))
        grad = decoded(round.sent["sketch"])
        downhill = None if round.shift is None else grad + again(round.shift)
        return round._replace(grad=grad, compared=again(round.delta), downhill=downhill, second=second)


class Proxy(GradientSource):
    """-Delta_k / (lr J_k), the mean gradient of the device's own steps: nothing is sent."""

    upload = None

    def view(self, round: Round) -> Round:
        """The mean gradients of the steps, without what a memory added to them."""

        def slopes(delta: Params, steps: Array, times: Array) -> Params:
            rate = fraction((times > 0).astype(jnp.float32), steps * round.lr)
            return jax.vmap(scaled)(delta, -rate)

        second = round.second
        if second is not None:
            second = Gradients(slopes(second.grad, second.steps, second.times), *second[1:])
        slope = slopes(round.delta, round.steps, round.times)
        grad = slope if round.shift is None else tree.sub(slope, round.shift)
        return round._replace(grad=grad, downhill=slope, second=second)


GRADIENTS = Slot(
    "gradient",
    GradientSource,
    (Exact, Sketch, Proxy),
    "what stands for grad F_k: itself, a sketch of it, or -Delta_k / (lr J_k)",
    optional=False,
)
