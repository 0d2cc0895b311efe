"""The server's step: how the model changes after a rule has weighed the round.

A step is a pair of pure functions, as in optax: `init(params) -> memory` and
`apply(memory, round, update) -> (params, memory)`. Any step works with any rule.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.rules import Round, Update, fraction
from folb.errors import InputError, check, check_number, choose
from folb.typing import Params


class ServerStep(NamedTuple):
    """A server step; its functions are `Partial`s, so that their numbers can be swept.

    send(memory, params) gives the model that devices start from, if that is not the server's own.
    A step is at most `gain` times the round's update, plus what earlier rounds left; infinity says that it is another
    function of the update, or that nobody knows. The guard needs to know, and weights are recorded times the gain.
    """

    init: Callable[[Params], Any]
    apply: Callable[[Any, Round, Update], tuple[Params, Any]]
    send: Callable[[Any, Params], Params] | None = None
    gain: Any = math.inf


def _no_memory(params: Params) -> tuple[()]:
    return ()


def _add(memory: Any, round: Round, update: Update, *, lr: Array) -> tuple[Params, Any]:
    return tree.add(round.params, update.delta, lr), memory


def plain(lr: Any = 1.0) -> ServerStep:
    """w^{t+1} = w^t + lr Delta: the paper's step at lr = 1."""
    return ServerStep(Partial(_no_memory), Partial(_add, lr=lr), gain=lr)


def _extrapolate(
    memory: Any, round: Round, update: Update, *, lr: Array, eps: Array, eps_decay: Array
) -> tuple[Params, Any]:
    if round.mean_square is None:
        squares = jnp.where(update.weights != 0, tree.norms(round.delta) ** 2, 0.0)
    left = eps * eps_decay ** jnp.float32(0 if round.t is None else round.t - 1)
    total = jnp.sum(jnp.abs(update.weights) * squares) if round.mean_square is None else round.mean_square
    step = total / (2 * (tree.dot(update.delta, update.delta) + left))
    return tree.add(round.params, update.delta, lr * jnp.maximum(1.0, step)), memory


def fedexp(lr: Any = 1.0, eps: Any = 1e-3, eps_decay: Any = 0.998**2) -> ServerStep:
    """FedExP (Jhunjhunwala et al., 2023): step max(1, sum_k |a_k| ||Delta_k||^2 / (2 ||Delta||^2 + 2 eps)).

    a_k are the rule's weights; with a_k = 1/K this is the published formula. As in its authors' experiments, eps is
    multiplied by eps_decay after each round, and the mean of the last two models is evaluated.
    """
    return ServerStep(Partial(_no_memory), Partial(_extrapolate, lr=lr, eps=eps, eps_decay=eps_decay))


def _zeros(params: Params) -> Params:
    return jax.tree.map(jnp.zeros_like, params)


def _accelerate(
    memory: Params, round: Round, update: Update, *, lr: Array, beta: Array, stretch: Array | None
) -> tuple[Params, Params]:
    if stretch is not None:
        lr = lr * _shortening(round, update)[0] ** stretch
    m = tree.add(jax.tree.map(lambda d: lr * d, update.delta), memory, beta)
    return tree.add(round.params, m), m


def _shortening(round: Round, update: Update) -> tuple[Array, Array]:
    """sum_k p_k ||Delta_k||^2 / ||sum_k p_k Delta_k||^2, where p_k = |a_k| / sum_j |a_j|, and its largest value.

    It is 1 if all updates are the same, and K if K of them are orthogonal and weigh the same. It is clipped to these
    bounds, so that no device can stretch the step further.
    """
    a = jnp.abs(update.weights)
    if round.mean_square is not None:
        ratio = fraction(round.mean_square, tree.dot(update.delta, update.delta))
        most = jnp.maximum(1.0, fraction(jnp.float32(1), jnp.max(a)))
    else:
        p = fraction(a, jnp.sum(a))
        mean = tree.combine(p, round.delta)
        ratio = fraction(jnp.sum(jnp.where(p > 0, p * tree.norms(round.delta) ** 2, 0.0)), tree.dot(mean, mean))
        most = jnp.maximum(1.0, fraction(jnp.float32(1), jnp.sum(p * p)))
    return jnp.clip(ratio, 1.0, most), most


def disagreement(round: Round, update: Update) -> Array:
    """How far the updates of a round disagree: 0 if all are the same, 1 if they are orthogonal, or more opposed.

    It estimates what part of the mean update's squared length comes from differences between devices, rather than from
    what they share: (s - 1) / (K - 1), where s is the ratio above and K its largest value. It is 1 where it
    cannot be known: for one update, or for updates so long that their squares overflow. The noise of a private round
    does not count as shared.
    """
    ratio, most = _shortening(round, update)
    square = tree.dot(update.delta, update.delta)
    if round.noise_square is not None:
        assert round.mean_square is not None
        shared = without_noise(square, round.noise_square, tree.size(update.delta))
        ratio = jnp.clip(fraction(round.mean_square, shared), 1.0, most)
    known = (most > 1) & jnp.isfinite(ratio) & (square > 0)
    return jnp.where(known, fraction(ratio - 1, most - 1), 1.0)


def without_noise(square: Array, noise: Array, size: int) -> Array:
    """A squared length of `size` numbers without that of its noise; at least what may be due to chance."""
    return jnp.maximum(square - noise, noise / math.sqrt(size))


def _ahead(memory: Params, params: Params, *, beta: Array) -> Params:
    return tree.add(params, memory, beta)


def lookahead(lr: Any = 1.0, beta: Any = 0.85, stretch: Any = None) -> ServerStep:
    """FedACG's step (Kim et al., 2024): devices start from w + beta m; m <- beta m + Delta, and w <- w + m.

    The mean of updates that disagree is shorter than they are. With `stretch`, Delta is multiplied by
    (sum_k p_k ||Delta_k||^2 / ||sum_k p_k Delta_k||^2)^stretch, where p_k is |a_k| over their sum: with 1/2, it is as
    long as a device's update.
    """
    apply = Partial(_accelerate, lr=lr, beta=beta, stretch=stretch)
    return ServerStep(Partial(_zeros), apply, Partial(_ahead, beta=beta), lr if stretch is None else math.inf)


def _optax_init(params: Params, *, make: Callable[..., Any], **numbers: Any) -> Any:
    return make(**numbers).init(params)


def _optax_apply(
    memory: Any, round: Round, update: Update, *, make: Callable[..., Any], **numbers: Any
) -> tuple[Params, Any]:
    downhill = jax.tree.map(jnp.negative, update.delta)
    step, memory = make(**numbers).update(downhill, memory, round.params)
    return tree.add(round.params, step), memory


def _from_optax(name: str, **numbers: Any) -> ServerStep:
    """An optax optimiser fed with -Delta, the server's pseudo-gradient."""
    import optax  # here, since it takes time to load and few algorithms need it

    make = Partial(
        getattr(optax, name)
    )  # a function inside a Partial must be a pytree: a Partial without arguments is one
    return ServerStep(Partial(_optax_init, make=make, **numbers), Partial(_optax_apply, make=make, **numbers))


def momentum(lr: Any = 1.0, beta: Any = 0.9) -> ServerStep:
    """FedAvgM (Hsu et al., 2019): heavy-ball momentum on Delta."""
    return _from_optax("sgd", learning_rate=lr, momentum=beta)._replace(gain=lr)


def nesterov(lr: Any = 1.0, beta: Any = 0.9) -> ServerStep:
    """Nesterov momentum on Delta: m <- beta m + Delta, and the step Delta + beta m."""
    return ServerStep(Partial(_zeros), Partial(_nesterov, lr=lr, beta=beta), gain=lr * (1 + beta))


def _nesterov(memory: Params, round: Round, update: Update, *, lr: Array, beta: Array) -> tuple[Params, Params]:
    m = tree.add(update.delta, memory, beta)
    return tree.add(round.params, tree.add(update.delta, m, beta), lr), m


def adagrad(lr: Any = 0.1, eps: Any = 1e-3) -> ServerStep:
    """FedAdagrad (Reddi et al., 2021): v <- v + Delta^2 from v = eps^2, and the step Delta / (sqrt(v) + eps)."""
    return ServerStep(Partial(_squares, eps=eps), Partial(_adagrad, lr=lr, eps=eps))


def _squares(params: Params, *, eps: Any) -> Params:
    return jax.tree.map(lambda w: jnp.zeros_like(w) + eps**2, params)


def _adagrad(memory: Params, round: Round, update: Update, *, lr: Array, eps: Array) -> tuple[Params, Params]:
    v = jax.tree.map(lambda v, d: v + d**2, memory, update.delta)
    step = jax.tree.map(lambda d, v: d / (jnp.sqrt(v) + eps), update.delta, v)
    return tree.add(round.params, step, lr), v


def adam(
    lr: Any = 0.01, beta: Any = 0.9, beta2: Any = 0.99, eps: Any = 1e-3, bias_correction: bool = True
) -> ServerStep:
    """FedAdam (Reddi et al., 2021) as optax has it, with bias correction; without, it is their Algorithm 2."""
    if bias_correction:
        return _from_optax("adam", learning_rate=lr, b1=beta, b2=beta2, eps=eps)
    return _algorithm_2(_recent, lr, beta, beta2, eps)


def yogi(
    lr: Any = 0.01, beta: Any = 0.9, beta2: Any = 0.99, eps: Any = 1e-3, bias_correction: bool = True
) -> ServerStep:
    """FedYogi (Reddi et al., 2021) as optax has it, with bias correction; without, it is their Algorithm 2."""
    if bias_correction:
        return _from_optax("yogi", learning_rate=lr, b1=beta, b2=beta2, eps=eps)
    return _algorithm_2(_towards, lr, beta, beta2, eps)


def _algorithm_2(squares: Callable[..., Array], lr: Any, beta: Any, beta2: Any, eps: Any) -> ServerStep:
    """Reddi et al.'s Algorithm 2: m <- beta m + (1 - beta) Delta from 0, v from eps^2, the step m / (sqrt(v) + eps)."""
    numbers = {"lr": lr, "beta": beta, "beta2": beta2, "eps": eps}
    return ServerStep(Partial(_moments, eps=eps), Partial(_adapt, squares=Partial(squares), **numbers))


def _moments(params: Params, *, eps: Any) -> tuple[Params, Params]:
    return _zeros(params), _squares(params, eps=eps)


def _adapt(
    memory: tuple[Params, Params],
    round: Round,
    update: Update,
    *,
    squares: Callable[..., Array],
    lr: Array,
    beta: Array,
    beta2: Array,
    eps: Array,
) -> tuple[Params, tuple[Params, Params]]:
    m = jax.tree.map(lambda m, d: beta * m + (1 - beta) * d, memory[0], update.delta)
    v = jax.tree.map(lambda v, d: squares(v, d**2, beta2), memory[1], update.delta)
    step = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
    return tree.add(round.params, step, lr), (m, v)


def _recent(v: Array, square: Array, beta2: Array) -> Array:
    return beta2 * v + (1 - beta2) * square


def _towards(v: Array, square: Array, beta2: Array) -> Array:
    return v - (1 - beta2) * square * jnp.sign(v - square)


LENGTHS = (_extrapolate, _accelerate)  # what looks at the lengths of single updates
SERVERS: dict[str, Callable[..., ServerStep]] = {
    "plain": plain,
    "momentum": momentum,
    "nesterov": nesterov,
    "lookahead": lookahead,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
    "fedexp": fedexp,
}
SETTINGS = {"lr": "server_lr"}  # the name as a setting: `lr` is the devices' step size
RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lr": (lambda lr: lr > 0, "should be more than 0"),
    "beta": (lambda beta: (beta >= 0) & (beta < 1), "should be at least 0 and less than 1"),
    "beta2": (lambda beta: (beta >= 0) & (beta < 1), "should be at least 0 and less than 1"),
    "stretch": (lambda stretch: (stretch >= 0) & (stretch <= 1), "should be from 0 to 1"),
    "eps": (lambda eps: eps > 0, "should be more than 0"),
    "eps_decay": (lambda decay: (decay > 0) & (decay <= 1), "should be more than 0 and at most 1"),
    "bias_correction": (lambda flag: isinstance(flag, bool), "should be True or False"),
}


AVERAGES = {"fedexp": "last_two"}  # the model that a step's authors evaluate, if it is not the last one


def server_step(wanted: str | ServerStep, **numbers: Any) -> ServerStep:
    """A step by its name, with the numbers that are not None; or your own, which already has its numbers."""
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        (check if name == "bias_correction" else check_number)(SETTINGS.get(name, name), value, *RANGES[name])
    if isinstance(wanted, str):
        make = SERVERS[choose("server", wanted, SERVERS)]
        known = list(inspect.signature(make).parameters)
    else:
        if not isinstance(wanted, ServerStep):
            expected = f"should be one of {', '.join(SERVERS)}, or a ServerStep(init, apply)"
            raise InputError("server", wanted, expected)
        check("server: gain", wanted.gain, lambda gain: gain >= 0, "should be a number of at least 0, or infinity")
        make, known = functools.partial(tree.functions, "server", wanted, "gain"), []
    for name, value in given.items():
        if name not in known:
            owners = [other for other, step in SERVERS.items() if name in inspect.signature(step).parameters]
            which = wanted if isinstance(wanted, str) else "your own"
            raise InputError(SETTINGS.get(name, name), value, f"is for server={', '.join(owners)}; server is {which}")
    return make(**given)
