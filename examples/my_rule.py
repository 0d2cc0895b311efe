"""Your own aggregation rule: weights that fall softly with a gradient's angle to the mean gradient.

folb compare synthetic_1_1 --algorithms folb,examples/my_rule.py:softmax --set temperature=0.1,1
"""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

import folb
from folb.core import tree


def softmax_weights(round: folb.Round, temperature: Array) -> folb.Update:
    """Weights exp(cos_k / temperature), divided by their sum; `times` is 0 for a lost device."""
    inner, g = folb.rules.inner_products(round)
    cosine = inner / (tree.norms(round.grad) * tree.norm(g) + 1e-12)
    weights = round.times * jnp.exp((cosine - 1) / temperature)
    return folb.weighted(round, weights / jnp.maximum(jnp.sum(weights), 1e-12))


@folb.named
def softmax(*, mu: float = 0.01, temperature: Annotated[float, "how soft"] = 0.5, **common: object) -> folb.Algorithm:
    """FOLB with soft weights: devices also upload their gradients."""
    return folb.compose(Partial(softmax_weights, temperature=temperature), mu=mu, uploads=("grad",), **common)
