"""Your own aggregation rule: weights that fall softly with a gradient's angle to the mean gradient.

folb compare synthetic_1_1 --algorithms folb,examples/my_rule.py:softmax --set rule.temperature=0.1,1
"""

import jax.numpy as jnp

import folb
from folb.core import tree


class Softmax(folb.Rule):
    """Weights exp(cos_k / temperature), divided by their sum; `times` is 0 for a lost device."""

    uploads = ("grad",)  # devices upload their gradients, too
    temperature: float = folb.setting("how soft", default=0.5)

    def update(self, round: folb.Round) -> folb.Update:
        """The sum of the updates with these weights."""
        inner, g = folb.rules.inner_products(round)
        cosine = inner / (tree.norms(round.grad) * tree.norm(g) + 1e-12)
        weights = round.times * jnp.exp((cosine - 1) / self.temperature)
        return folb.weighted(round, weights / jnp.maximum(jnp.sum(weights), 1e-12))


softmax = folb.Algorithm(rule=Softmax(), local={"mu": 0.01})
