"""FedNova as an early version of Flower's niid_bench had it: the server adds up models, not updates.

The factors of the models add up to 1 only if all devices take the same number of steps; otherwise the model grows.
The run of docs/reproduction/niid_bench.md (draw=1 and draw=2, too; a minute each on a GPU):

folb compare mnist --model lenet --algorithms examples/fednova_of_models.py:fednova_of_models --set rule.momentum=0.9 \
    --set local=momentum --set local.beta=0.9 --set partition=dirichlet --set alpha=0.5 --set capped=true \
    --set devices=10 --set select.K=10 --set select.replacement=false --set test=server --set pixels=unit \
    --set init=torch --set local.unit=epoch --set work=10 --set local.batch=64 --set local.lr=0.01 \
    --system fixed --rounds 50 --seeds 1 --evaluate all
"""

import jax.numpy as jnp

import folb
from folb import rules, tree


class SumOfModels(folb.Rule):
    """(sum_k p_k tau_k) sum_k (p_k / tau_k) w_k, with p_k = n_k / n and tau_k local steps."""

    momentum: float = folb.setting("that of the local steps", default=0.0)

    def update(self, round: folb.Round) -> folb.Update:
        """The sum, as a step from w."""
        n = round.times * round.size
        p = rules.fraction(n, jnp.sum(n))
        # `steps` is what they weigh, if there is momentum
        tau = (1 - self.momentum) * round.steps + self.momentum / (1 - self.momentum)
        update = folb.weighted(round, jnp.sum(p * tau) * rules.fraction(p, tau))
        return update._replace(delta=tree.add(update.delta, round.params, jnp.sum(update.weights) - 1))


fednova_of_models = folb.Algorithm(rule=SumOfModels())
