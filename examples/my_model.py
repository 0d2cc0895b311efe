"""Your own model as three functions, here around an Equinox module; Flax modules work in the same way.

folb compare synthetic_1_1 --model examples/my_model.py:mlp --set width=32

It needs Equinox: pip install equinox
"""

import equinox as eqx
import jax

from folb import Hidden, Model
from folb.models import cross_entropy


def mlp(shape: tuple[int, ...], classes: int, *, width: int = 16, depth: int = 1) -> Model:
    """A multi-layer perceptron."""

    def build(key):
        return eqx.nn.MLP(shape[0], classes, width, depth, key=key)

    # an Equinox module is a tree of arrays and of other things: only the arrays are parameters
    static = eqx.partition(eqx.filter_eval_shape(build, jax.random.key(0)), eqx.is_inexact_array_like)[1]

    def scores(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return Model(
        init=lambda key: eqx.filter(build(key), eqx.is_inexact_array),
        loss=lambda params, x, y: cross_entropy(scores(params, x), y),
        predict=lambda params, x: scores(params, x).argmax(axis=1),
        hidden=tuple(Hidden(f"layers.{i}.weight", outputs=0) for i in range(depth)),  # all but the last
    )
