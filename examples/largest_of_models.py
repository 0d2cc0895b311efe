"""FedAvg if a device sends only the largest tenth of its model, and not of its update.

The server averages models in which nine of ten numbers are 0. The run of docs/reproduction/fedlab.md (two minutes):

folb compare mnist --model mlp --algorithms examples/largest_of_models.py:largest_of_models --set partition=dirichlet \
    --set alpha=0.5 --set capped=true --set devices=100 --set test=server --set pixels=unit --set second=200 \
    --set init=torch --set select.replacement=false --set select.K=10 --set local.unit=gradient --set work=5 \
    --set local.lr=0.1 --system fixed --rounds 200 --evaluate-every 20 --seeds 1
"""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import folb
from folb import rules, tree


def largest_tenth(model: object) -> object:
    """The model with 0 in place of all but its largest numbers."""
    flat, back = ravel_pytree(model)
    least = jax.lax.top_k(jnp.abs(flat), len(flat) // 10)[0][-1]
    return back(jnp.where(jnp.abs(flat) >= least, flat, 0.0))


class MeanOfModels(folb.Rule):
    """1/K sum_k largest_tenth(w_k), as a step from w."""

    def update(self, round: folb.Round) -> folb.Update:
        """The step."""
        models = jax.vmap(lambda delta: largest_tenth(tree.add(round.params, delta)))(round.delta)
        weights = rules.fraction(round.times, jnp.sum(round.times))
        return folb.Update(tree.add(tree.combine(weights, models), round.params, -1.0), weights)


largest_of_models = folb.Algorithm(rule=MeanOfModels())
