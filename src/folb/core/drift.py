"""Memories against drift: what SCAFFOLD, FedDyn, FedVARP, FedCM, MimeLite, GHBM, AdaBest, FedMuon and FedPAC remember.

Each is a `DeviceMemory`, and so goes with any selection, local step, rule and server step. The server keeps all of it;
what a device needs is sent as a shift of its gradients, or as what its local step starts from. Each model of this costs
one on the way down.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.memory import DeviceMemory, Sent
from folb.core.part import Slot, at_least, below, more_than, one_of, setting, up_to, whole
from folb.core.rules import Round, fraction
from folb.core.vector import scaled, zeros
from folb.typing import Params


def _came(round: Round) -> Array:
    """1 for each device that replied, however often it was drawn."""
    return (round.times > 0).astype(jnp.float32)


def _mean_of_all(round: Round, total: Params) -> Params:
    """The mean over all devices, from their sum. Sums are kept, and not means: on real devices N changes."""
    return scaled(total, 1.0 / round.N)


def _mean(round: Round, stack: Params, weights: Array | float = 1.0) -> Params:
    """The mean of weights_k a_k over the devices that replied."""
    came = _came(round)
    return tree.combine(fraction(came, jnp.sum(came)) * weights, stack)


def _slope(round: Round, lr: Any) -> Params:
    """-mean_k Delta_k / (lr J_k), over the devices that replied."""
    return _mean(round, round.delta, -fraction(_came(round), round.steps * lr))


class _Summed(DeviceMemory):
    """The sum of all devices' vectors, and a vector of each device, 0 at first."""

    abstract = True

    def init(self, params: Params) -> tuple[Params, Params]:
        return zeros(params), zeros(params)

    def renewed(self, round: Round) -> Params:
        """The vectors of the devices that replied, stacked."""

    def update(self, round: Round) -> tuple[Params, Params]:
        new = self.renewed(round)
        return tree.add(round.shared, tree.combine(_came(round), tree.sub(new, round.own))), new


class _Common(DeviceMemory):
    """One vector for all devices, 0 at first."""

    def init(self, params: Params) -> tuple[Params, tuple[()]]:
        return zeros(params), ()


class _Variates(_Summed):
    """Control variates: a local step is along g - c_k + c, where c is the mean of all c_k."""

    abstract = True

    def shift(self, shared: Params, own: Params, sent: Sent) -> Params:
        return tree.sub(scaled(shared, 1.0 / sent.N), own)


class Scaffold(_Variates):
    """SCAFFOLD (Karimireddy et al., 2020): a local step is g - c_k + c.

    Option 1: c_k is the gradient at the model that was sent; 2: c_k - c - Delta_k / (J_k lr). c is the mean of all c_k.
    """

    option: Literal["1", "2"] = setting(
        "how c_k is renewed: 1, by a gradient; 2, by the update", one_of("1", "2"), default="2"
    )

    @property
    def uploads(self) -> tuple[str, ...]:
        return ("grad",) if self.option == "1" else ()

    @property
    def one_size(self) -> bool:
        return self.option == "2"

    def renewed(self, round: Round) -> Params:
        if self.option == "1":
            return round.grad
        rate = fraction(_came(round), round.steps * round.lr)
        c = _mean_of_all(round, round.shared)
        return jax.vmap(lambda c_k, d, r: tree.add(tree.sub(c_k, c), d, -r))(round.own, round.delta, rate)


class FedMuon(_Variates):
    """FedMuon (Takezawa et al., 2026): c_k is the device's last momentum, of which its local step takes M - c_k + c.

    M starts from c_k. M - c_k + c is itself a momentum, of g - c_k + c, which starts from c; a device is sent both.
    """

    uploads = ("last_momentum",)

    def begin(self, shared: Params, own: Params, sent: Sent) -> tuple[Params, ...]:
        return (scaled(shared, 1.0 / sent.N),)

    def renewed(self, round: Round) -> Params:
        c = _mean_of_all(round, round.shared)
        return jax.vmap(lambda m, c_k: tree.add(m, tree.sub(c_k, c)))(round.sent["last_momentum"], round.own)


class FedDyn(_Summed):
    """FedDyn (Acar et al., 2021): a device minimises F_k(w) - <h_k, w> + alpha/2 ||w - w^t||^2.

    Then h_k -= alpha Delta_k, h -= alpha/N sum_k Delta_k, and the server's model is the mean of the w_k less h / alpha.
    """

    alpha: float = setting("alpha", more_than(0), default=0.01)

    @property
    def prox(self) -> Any:
        return self.alpha

    def update(self, round: Round) -> tuple[Params, Params]:
        return self._sum(round), tree.add(round.own, round.delta, -self.alpha)

    def shift(self, shared: Any, own: Params, sent: Sent) -> Params:
        return scaled(own, -1.0)

    def correct(self, round: Round) -> Params:
        return tree.add(round.update.delta, _mean_of_all(round, self._sum(round)), -1.0 / self.alpha)

    def _sum(self, round: Round) -> Params:
        """N h of the server after the round."""
        return tree.add(round.shared, tree.combine(_came(round), round.delta), -self.alpha)


class FedVARP(_Summed):
    """FedVARP (Jhunjhunwala et al., 2022): the last update y_k of each device stands in for it while it is away.

    The step is ybar + sum_k a_k (Delta_k - y_k) with the rule's weights a_k; ybar is the mean of all y_k.
    """

    def renewed(self, round: Round) -> Params:
        return round.delta

    def correct(self, round: Round) -> Params:
        known = tree.combine(round.update.weights, round.own)
        return tree.add(_mean_of_all(round, round.shared), tree.sub(round.update.delta, known))


class FedCM(_Common):
    """FedCM (Xu et al., 2021): a local step is alpha g + (1 - alpha) m, with m = -mean_k Delta_k / (lr J_k)."""

    one_size = True
    alpha: float = setting("alpha", up_to(1), default=0.1)

    @property
    def pace(self) -> Any:
        return self.alpha  # of alpha (g + (1 - alpha) / alpha m)

    def update(self, round: Round) -> tuple[Params, tuple[()]]:
        # round.lr is alpha times the size of a step along alpha g + (1 - alpha) m
        return _slope(round, round.lr / self.alpha), ()

    def shift(self, shared: Params, own: Any, sent: Sent) -> Params:
        return scaled(shared, (1 - self.alpha) / self.alpha)


class MimeLite(_Common):
    """MimeLite with momentum (Karimireddy et al., 2021): a local step is (1 - beta) g + beta m, with m as it was sent.

    The server then renews m with the mean of the full gradients: m <- beta m + (1 - beta) mean_k grad F_k.
    """

    uploads = ("grad",)
    beta: float = setting("beta", below(1), default=0.9)

    @property
    def pace(self) -> Any:
        return 1 - self.beta  # of (1 - beta) (g + beta / (1 - beta) m)

    def update(self, round: Round) -> tuple[Params, tuple[()]]:
        return tree.add(scaled(round.shared, self.beta), _mean(round, round.grad), 1 - self.beta), ()

    def shift(self, shared: Params, own: Any, sent: Sent) -> Params:
        return scaled(shared, self.beta / (1 - self.beta))


class GHBM(DeviceMemory):
    """GHBM (Zaccone et al., 2025): a local step is g + beta m / (lr J_k), with m = (w^(t-tau) - w^t) / tau.

    m is 0 until there were tau rounds. tau is best about N/K.
    """

    one_size = True
    tau: int = setting("how many rounds it looks back; best about N/K", whole(1, 10**4), default=10)
    beta: float = setting("beta", below(1), default=0.9)

    def init(self, params: Params) -> tuple[tuple[Params, Array], tuple[()]]:
        """The last tau models, the oldest first, and how many rounds there were."""
        queue = jax.tree.map(lambda w: jnp.broadcast_to(w, (self.tau, *jnp.shape(w))), params)
        return (queue, jnp.int32(0)), ()

    def update(self, round: Round) -> tuple[Any, tuple[()]]:
        queue, count = round.shared
        return (jax.tree.map(lambda q, w: jnp.concatenate([q[1:], w[None]]), queue, round.params), count + 1), ()

    def shift(self, shared: Any, own: Any, sent: Sent) -> Params:
        queue, count = shared
        rate = self.beta * fraction(jnp.float32(1), sent.steps * sent.lr * self.tau)
        rate = jnp.where(count >= self.tau, rate, 0.0)
        return jax.tree.map(lambda q, w: rate * (q[0] - w), queue, sent.params)


class AdaBest(DeviceMemory):
    """AdaBest (Varno et al., 2022): a local step is g - h_k, and the server adds beta times its last move.

    h_k <- h_k / (t - t_k) + mu (w^t - w_k), where t_k is the device's last round.
    """

    beta: float = setting("beta", below(1), default=0.9)
    mu: float = setting("mu: how much an update counts", at_least(0), default=0.02)

    def init(self, params: Params) -> tuple[Params, Any]:
        """The mean of the devices' models in the last round; h_k and t_k."""
        return params, (zeros(params), jnp.int32(0))

    def update(self, round: Round) -> tuple[Params, Any]:
        h, last = round.own
        age = jnp.maximum(round.t - last, 1).astype(jnp.float32)
        new = jax.vmap(lambda h, d, age: tree.add(scaled(h, 1 / age), d, -self.mu))(h, round.delta, age)
        return _mean_model(round), (new, jnp.full_like(last, round.t))

    def shift(self, shared: Any, own: Any, sent: Sent) -> Params:
        return scaled(own[0], -1.0)

    def correct(self, round: Round) -> Params:
        return tree.add(round.update.delta, tree.sub(_mean_model(round), round.shared), self.beta)


class FedPAC(DeviceMemory):
    """FedPAC in its Muon form (Liu et al., 2026), which is FedMuon with averaged momentum (Liu et al., 2025).

    A device's momentum starts from the mean of the devices' last ones, and its steps are mixed with the direction
    D = -mean_k Delta_k / (lr J_k) of the last round (`local=aligned`).
    """

    uploads = ("last_momentum",)

    def init(self, params: Params) -> tuple[tuple[Params, Params], tuple[()]]:
        """The mean momentum and D, the same for all devices."""
        return (zeros(params), zeros(params)), ()

    def update(self, round: Round) -> tuple[tuple[Params, Params], tuple[()]]:
        return (_mean(round, round.sent["last_momentum"]), _slope(round, round.lr)), ()

    def begin(self, shared: tuple[Params, ...], own: Any, sent: Sent) -> tuple[Params, ...]:
        return shared


def _mean_model(round: Round) -> Params:
    """The mean of the devices' models."""
    return tree.add(round.params if round.start is None else round.start, round.update.delta)


MEMORIES = Slot(
    "memory",
    DeviceMemory,
    (Scaffold, FedDyn, FedVARP, FedCM, MimeLite, GHBM, AdaBest, FedMuon, FedPAC),
    "what the server remembers of devices; by default nothing",
)
