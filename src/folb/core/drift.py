"""Memories against drift: what SCAFFOLD, FedDyn, FedVARP, FedCM, MimeLite, GHBM and AdaBest remember.

Each is a `DeviceMemory`, and so goes with any selection, local step, rule and server step. The server keeps all of it;
what a device needs is sent as a shift of its gradients, which costs one model on the way down.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.memory import DeviceMemory
from folb.core.rules import Round, fraction
from folb.core.vector import scaled, zeros
from folb.errors import InputError, check_number, check_whole, choose
from folb.typing import Params

BETA = (lambda beta: (beta >= 0) & (beta < 1), "should be at least 0 and less than 1")


def _came(round: Round) -> Array:
    """1 for each device that replied, however often it was drawn."""
    return (round.times > 0).astype(jnp.float32)


def _mean_of_all(round: Round, total: Params) -> Params:
    """The mean over all devices, from their sum. Sums are kept, and not means: on real devices N changes."""
    assert round.N is not None
    return scaled(total, 1.0 / round.N)


def _mean(round: Round, stack: Params, weights: Array | float = 1.0) -> Params:
    """The mean of weights_k a_k over the devices that replied."""
    came = _came(round)
    return tree.combine(fraction(came, jnp.sum(came)) * weights, stack)


def _two_zeros(params: Params) -> tuple[Params, Params]:
    return zeros(params), zeros(params)


# -- SCAFFOLD ----------------------------------------------------------------------------------------------------------


def _scaffold_update(round: Round, *, from_gradient: bool) -> tuple[Params, Params]:
    if from_gradient:
        if round.grad is None:
            raise InputError("uploads", (), "option 1 of SCAFFOLD needs the devices' gradients: should have 'grad'")
        new = round.grad
    else:
        assert round.steps is not None and round.lr is not None
        rate = fraction(_came(round), round.steps * round.lr)
        c = _mean_of_all(round, round.shared)
        new = jax.vmap(lambda c_k, d, r: tree.add(tree.sub(c_k, c), d, -r))(round.own, round.delta, rate)
    change = tree.combine(_came(round), tree.sub(new, round.own))
    return tree.add(round.shared, change), new


def _scaffold_shift(shared: Params, own: Params, N: Any) -> Params:
    return tree.sub(scaled(shared, 1.0 / N), own)


def scaffold(option: str = "2") -> DeviceMemory:
    """SCAFFOLD (Karimireddy et al., 2020): a local step is g - c_k + c.

    Option 1: c_k is the gradient at the model that was sent; 2: c_k - c - Delta_k / (J_k lr). c is the mean of all c_k.
    """
    choose("option", option, ("1", "2"))
    if option == "1":
        return DeviceMemory(_two_zeros, _from_gradient, _scaffold_shift, uploads=("grad",))
    return DeviceMemory(_two_zeros, _from_update, _scaffold_shift, one_size=True)


def _from_gradient(round: Round) -> tuple[Params, Params]:
    return _scaffold_update(round, from_gradient=True)


def _from_update(round: Round) -> tuple[Params, Params]:
    return _scaffold_update(round, from_gradient=False)


# -- FedDyn ------------------------------------------------------------------------------------------------------------


def _feddyn_sum(round: Round, alpha: Any) -> Params:
    """N h of the server after the round: the sum of all h_k."""
    return tree.add(round.shared, tree.combine(_came(round), round.delta), -alpha)


def _feddyn_update(round: Round, *, alpha: Any) -> tuple[Params, Params]:
    return _feddyn_sum(round, alpha), tree.add(round.own, round.delta, -alpha)


def _minus_own(shared: Any, own: Params) -> Params:
    return scaled(own, -1.0)


def _feddyn_correct(round: Round, *, alpha: Any) -> Params:
    assert round.update is not None
    return tree.add(round.update.delta, _mean_of_all(round, _feddyn_sum(round, alpha)), -1.0 / alpha)


def feddyn(memory_alpha: Any = 0.01) -> DeviceMemory:
    """FedDyn (Acar et al., 2021): a device minimises F_k(w) - <h_k, w> + alpha/2 ||w - w^t||^2.

    Then h_k -= alpha Delta_k, h -= alpha/N sum_k Delta_k, and the server's model is the mean of the w_k less h / alpha.
    """
    alpha = memory_alpha
    check_number("memory_alpha", alpha, lambda alpha: alpha > 0, "should be more than 0")
    update, correct = Partial(_feddyn_update, alpha=alpha), Partial(_feddyn_correct, alpha=alpha)
    return DeviceMemory(_two_zeros, update, _minus_own, correct, prox=alpha)


# -- FedVARP -----------------------------------------------------------------------------------------------------------


def _fedvarp_update(round: Round) -> tuple[Params, Params]:
    change = tree.combine(_came(round), tree.sub(round.delta, round.own))
    return tree.add(round.shared, change), round.delta


def _fedvarp_correct(round: Round) -> Params:
    assert round.update is not None
    known = tree.combine(round.update.weights, round.own)
    return tree.add(_mean_of_all(round, round.shared), tree.sub(round.update.delta, known))


def fedvarp() -> DeviceMemory:
    """FedVARP (Jhunjhunwala et al., 2022): the last update y_k of each device stands in for it while it is away.

    The step is ybar + sum_k a_k (Delta_k - y_k) with the rule's weights a_k; ybar is the mean of all y_k.
    """
    return DeviceMemory(_two_zeros, _fedvarp_update, correct=_fedvarp_correct)


# -- FedCM and MimeLite: one momentum for all devices ------------------------------------------------------------------


def _zero_shared(params: Params) -> tuple[Params, tuple[()]]:
    return zeros(params), ()


def _scaled_shared(shared: Params, own: Any, *, factor: Any) -> Params:
    return scaled(shared, factor)


def _fedcm_update(round: Round, *, alpha: Any) -> tuple[Params, tuple[()]]:
    assert round.steps is not None and round.lr is not None
    # round.lr is alpha times the size of a step along alpha g + (1 - alpha) m
    return _mean(round, round.delta, -fraction(_came(round), round.steps * (round.lr / alpha))), ()


def fedcm(memory_alpha: Any = 0.1) -> DeviceMemory:
    """FedCM (Xu et al., 2021): a local step is alpha g + (1 - alpha) m, with m = -mean_k Delta_k / (lr J_k)."""
    alpha = memory_alpha
    check_number("memory_alpha", alpha, lambda alpha: (alpha > 0) & (alpha <= 1), "should be more than 0 and at most 1")
    shift = Partial(_scaled_shared, factor=(1 - alpha) / alpha)
    return DeviceMemory(_zero_shared, Partial(_fedcm_update, alpha=alpha), shift, pace=alpha, one_size=True)


def _mimelite_update(round: Round, *, beta: Any) -> tuple[Params, tuple[()]]:
    if round.grad is None:
        raise InputError("uploads", (), "MimeLite needs the devices' gradients: should have 'grad'")
    return tree.add(scaled(round.shared, beta), _mean(round, round.grad), 1 - beta), ()


def mimelite(memory_beta: Any = 0.9) -> DeviceMemory:
    """MimeLite with momentum (Karimireddy et al., 2021): a local step is (1 - beta) g + beta m, with m as it was sent.

    The server then renews m with the mean of the full gradients: m <- beta m + (1 - beta) mean_k grad F_k.
    """
    check_number("memory_beta", memory_beta, *BETA)
    shift = Partial(_scaled_shared, factor=memory_beta / (1 - memory_beta))
    update = Partial(_mimelite_update, beta=memory_beta)
    return DeviceMemory(_zero_shared, update, shift, pace=1 - memory_beta, uploads=("grad",))


# -- GHBM --------------------------------------------------------------------------------------------------------------


@functools.cache  # tau fixes a shape: algorithms of one tau are one program
def _ghbm_init(tau: int) -> Callable[[Params], Any]:
    def init(params: Params) -> tuple[tuple[Params, Array], tuple[()]]:
        """The last tau models, the oldest first, and how many rounds there were."""
        queue = jax.tree.map(lambda w: jnp.broadcast_to(w, (tau, *jnp.shape(w))), params)
        return (queue, jnp.int32(0)), ()

    return init


def _ghbm_update(round: Round) -> tuple[Any, tuple[()]]:
    queue, count = round.shared
    following = jax.tree.map(lambda q, w: jnp.concatenate([q[1:], w[None]]), queue, round.params)
    return (following, count + 1), ()


def _ghbm_shift(shared: Any, own: Any, params: Params, steps: Any, lr: Any, *, beta: Any) -> Params:
    queue, count = shared
    tau = len(jax.tree.leaves(queue)[0])
    rate = jnp.where(count >= tau, beta * fraction(jnp.float32(1), steps * lr * tau), 0.0)
    return jax.tree.map(lambda q, w: rate * (q[0] - w), queue, params)


def ghbm(memory_tau: int = 10, memory_beta: Any = 0.9) -> DeviceMemory:
    """GHBM (Zaccone et al., 2025): a local step is g + beta m / (lr J_k), with m = (w^(t-tau) - w^t) / tau.

    m is 0 until there were tau rounds. tau is best about N/K.
    """
    check_whole("memory_tau", memory_tau, 1, 10**4)
    check_number("memory_beta", memory_beta, *BETA)
    return DeviceMemory(
        _ghbm_init(int(memory_tau)), _ghbm_update, Partial(_ghbm_shift, beta=memory_beta), one_size=True
    )


# -- AdaBest -----------------------------------------------------------------------------------------------------------


def _adabest_init(params: Params) -> tuple[Params, Any]:
    return params, (zeros(params), jnp.int32(0))


def _adabest_update(round: Round, *, mu: Any) -> tuple[Params, Any]:
    assert round.update is not None and round.t is not None
    h, last = round.own
    age = jnp.maximum(round.t - last, 1).astype(jnp.float32)
    new = jax.vmap(lambda h, d, age: tree.add(scaled(h, 1 / age), d, -mu))(h, round.delta, age)
    return _adabest_mean(round), (new, jnp.full_like(last, round.t))


def _adabest_mean(round: Round) -> Params:
    """The mean of the devices' models."""
    assert round.update is not None
    return tree.add(round.params if round.start is None else round.start, round.update.delta)


def _adabest_shift(shared: Any, own: Any) -> Params:
    return scaled(own[0], -1.0)


def _adabest_correct(round: Round, *, beta: Any) -> Params:
    assert round.update is not None
    return tree.add(round.update.delta, tree.sub(_adabest_mean(round), round.shared), beta)


def adabest(memory_beta: Any = 0.9, memory_mu: Any = 0.02) -> DeviceMemory:
    """AdaBest (Varno et al., 2022): a local step is g - h_k, and the server adds beta times its last move.

    h_k <- h_k / (t - t_k) + mu (w^t - w_k), where t_k is the device's last round.
    """
    check_number("memory_beta", memory_beta, *BETA)
    check_number("memory_mu", memory_mu, lambda mu: mu >= 0, "should be at least 0")
    update, correct = Partial(_adabest_update, mu=memory_mu), Partial(_adabest_correct, beta=memory_beta)
    return DeviceMemory(_adabest_init, update, _adabest_shift, correct)


MEMORIES: dict[str, Callable[..., DeviceMemory]] = {
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fedvarp": fedvarp,
    "fedcm": fedcm,
    "mimelite": mimelite,
    "ghbm": ghbm,
    "adabest": adabest,
}


def memory(wanted: str | DeviceMemory | None, **numbers: Any) -> DeviceMemory | None:
    """A memory by its name, with the numbers that are not None; or your own, which already has its numbers."""
    given = {name: value for name, value in numbers.items() if value is not None}
    make = MEMORIES[choose("memory", wanted, MEMORIES)] if isinstance(wanted, str) else None
    known = [] if make is None else list(inspect.signature(make).parameters)
    for name, value in given.items():
        if name not in known:
            owners = [other for other, one in MEMORIES.items() if name in inspect.signature(one).parameters]
            which = wanted if isinstance(wanted, str) else "your own" if wanted is not None else "none"
            raise InputError(name, value, f"is for memory={', '.join(owners)}; memory is {which}")
    return make(**given) if make is not None else wanted  # type: ignore[return-value]
