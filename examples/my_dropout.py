"""A network with dropout: a loss with a parameter `key` gets a random key in each mini-batch step of a device.

folb compare synthetic_1_1 --model examples/my_dropout.py:net --set rate=0.3

In evaluations and full gradients the key is None, and nothing is dropped.
"""

import jax
import jax.numpy as jnp

from folb import Model
from folb.models import classifier


def net(shape: tuple[int, ...], classes: int, *, units: int = 32, rate: float = 0.2) -> Model:
    """One hidden layer with layer norm and dropout."""

    def init(key):
        first, second = jax.random.split(key)
        glorot = jax.nn.initializers.glorot_uniform()
        return {
            "first": glorot(first, (shape[0], units)),
            "norm": {"scale": jnp.ones(units), "shift": jnp.zeros(units)},
            "second": glorot(second, (units, classes)),
        }

    def scores(params, x, key):
        h = jax.nn.standardize(x @ params["first"])  # each sample by itself, as layer norm does
        h = jax.nn.relu(h * params["norm"]["scale"] + params["norm"]["shift"])
        if key is not None:
            h = h * jax.random.bernoulli(key, 1 - rate, h.shape) / (1 - rate)
        return h @ params["second"]

    return classifier(init, scores)  # loss(params, x, y, key) is the cross-entropy of scores(params, x, key)
