"""Devices that lie, in the simulator: what they report in place of the truth.

The devices with the lowest numbers lie, and they collude: they know the replies of the round's honest devices before
they send their own. An attack is a record of numbers, so that many attacks run as one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import tree
from folb.core.part import Part, Slot, between, setting
from folb.core.polar import median, scaled
from folb.core.rules import Gradients, Round, fraction
from folb.errors import InputError, choose
from folb.typing import Params


class Lies(NamedTuple):
    """What liars report. By default they report the truth; a factor of 0 leaves a part out of their update."""

    share: Any = 0.0  # of all devices
    own: Any = 1.0  # factor of their own update
    mean: Any = 0.0  # factor of the honest devices' mean update
    spread: Any = 0.0  # factor of the standard deviation of each coordinate over the honest devices
    noise: Any = 0.0  # norm of Gaussian noise, in norms of their own update
    reach: Any = 0.0  # 1, 2: the mean less as much of the spread as min-max or min-sum allows
    length: Any = 0.0  # if not 0: scale the result to so many median norms of honest updates
    gradient: Any = 1.0  # factor of their gradient
    shared: Any = 0.0  # 1: that factor of the honest mean gradient instead, scaled to the norm of their own
    vouch: Any = 0.0  # 1: the gradient 1e6 (q - 0.02 u), where u is their update's direction
    grazing: Any = 0.0  # 1: turn the update until it just descends on their gradient, so that it passes the check
    gamma: Any = 0.0  # added to gamma
    loss: Any = 1.0  # factor of the loss, where a sampling asks for it
    poison: Any = 0.0  # 1: their labels are reversed; 2: they learn a backdoor


class Attack(Part):
    """What lying devices do. One of your own is a class of this base with `lies`: some numbers of `Lies`, by name."""

    lies: ClassVar[Mapping[str, float]] = {}
    share: float = setting("the share of devices that lie: those numbered from 0 on", between(0, 1), default=0.2)

    @property
    def record(self) -> Lies:
        """All that they do, as numbers: of the same form for all attacks."""
        return Lies(self.share, **self.lies)

    def check(self, spelt: Any = str) -> None:
        super().check(spelt)
        for name in self.lies:
            choose("attack: lies", name, Lies._fields[1:])


REVERSED = {"own": 0.0, "mean": -1.0, "length": 1.0, "shared": 1.0}
KNOWN: dict[str, tuple[str, Mapping[str, float]]] = {  # by name: what it says, and its numbers
    "honest": ("They tell the truth, for comparison.", {}),
    "flipped": ("The update of the other sign.", {"own": -1.0}),
    "flipped_x1000": ("The same, a thousand times as long.", {"own": -1000.0}),
    "inflated": ("The update of the other sign, with its gradient times 1e6.", {"own": -1.0, "gradient": 1e6}),
    "inflated_back": ("The update of the other sign, with its gradient times -100.", {"own": -1.0, "gradient": -100.0}),
    "not_finite": ("An update that is not a number.", {"own": np.nan}),
    "noise": ("Gaussian noise of three times the norm of the update.", {"noise": 3.0}),
    "reversed": (
        "The honest mean update and gradient of the other sign, of the usual length.",
        REVERSED | {"gradient": -1.0},
    ),
    "grazing": (
        "The honest mean update reversed, turned until it just descends on an inflated gradient.",
        REVERSED | {"gradient": 1e6, "grazing": 1.0},
    ),
    "alie": (
        "A little is enough (Baruch et al., 2019): the honest mean less 1.5 standard deviations.",
        {"own": 0.0, "mean": 1.0, "spread": -1.5},
    ),
    "ipm": (
        "Inner-product manipulation (Xie et al., 2020): -1/2 times the honest mean.",
        {"own": 0.0, "mean": -0.5, "shared": 1.0, "gradient": -1.0},
    ),
    "min_max": (
        "Min-max (Shejwalkar and Houmansadr, 2021): as far off as the honest are from each other.",
        {"reach": 1.0},
    ),
    "min_sum": ("Min-sum (the same): as far off as the honest are from each other on the whole.", {"reach": 2.0}),
    "labels": ("Honest work on reversed labels.", {"poison": 1.0}),
    "backdoor": ("Honest work on samples with a trigger, all labelled 0.", {"poison": 2.0}),
    "adaptive": (
        "Knows the guard: the honest mean reversed, of 3 median norms, with a gradient that vouches for it.",
        {"own": 0.0, "mean": -1.0, "length": 3.0, "vouch": 1.0},
    ),
    "gamma": ("The update of the other sign, with gamma + 1000.", {"own": -1.0, "gamma": 1000.0}),
    "loss": ("The update of the other sign, with a loss times 1e6, to be drawn again.", {"own": -1.0, "loss": 1e6}),
}
ATTACKS = Slot(
    "attack",
    Attack,
    tuple(
        type(name, (Attack,), {"__module__": __name__, "__doc__": says, "lies": lies})
        for name, (says, lies) in KNOWN.items()
    ),
    "what lying devices do, in the simulator (docs/attacks.md); by default all are honest",
)

_mixed = jax.vmap(tree.where)  # for each slot, the entry of a if the slot is chosen, else the entry of b


def count(attack: Lies, N: Any) -> Any:
    """How many of N devices lie."""
    return jnp.floor(attack.share * N + 1e-4).astype(jnp.int32)


def _sides(attack: Lies, replies: Round | Gradients, N: Any) -> tuple[Array, Array]:
    """The slots of liars, and the slots of honest devices that replied."""
    if replies.device is None:
        raise InputError("attack", "set", "should be none on real devices: attacks are for the simulator")
    liars = replies.device < count(attack, N)
    return liars, (replies.times > 0) & ~liars


def with_lies(attack: Lies, round: Round) -> Round:
    """The round with the liars' updates, gammas and losses."""
    liars, honest = _sides(attack, round, round.N)
    delta = _mixed(liars, _updates(attack, round, honest), round.delta)
    gamma = None if round.gamma is None else jnp.where(liars, round.gamma + attack.gamma, round.gamma)
    sent = dict(round.sent)
    if "loss" in sent:
        sent["loss"] = jnp.where(liars, attack.loss * sent["loss"], sent["loss"])
    return round._replace(delta=delta, gamma=gamma, sent=sent)


def with_false_gradients(attack: Lies, round: Round) -> Round:
    """The round with the liars' gradients, in the form in which the rule sees them, and updates that graze them."""
    if round.grad is None:
        return round
    liars, honest = _sides(attack, round, round.N)
    lies = _gradients(attack, round.grad, honest)
    moved = round.delta if round.compared is None else round.compared
    lies = _mixed(jnp.full_like(liars, attack.vouch > 0), _vouching(round, moved, _even(honest, round.grad)), lies)
    grad = _mixed(liars, lies, round.grad)
    second = round.second
    if second is not None:
        theirs, others = _sides(attack, second, round.N)
        second = second._replace(grad=_mixed(theirs, _gradients(attack, second.grad, others), second.grad))
    if round.compared is None:
        turned = jax.vmap(_grazing)(round.delta, grad)
        round = round._replace(delta=_mixed(liars & (attack.grazing > 0), turned, round.delta))
    return round._replace(grad=grad, second=second)


def _updates(attack: Lies, round: Round, honest: Array) -> Params:
    """What each slot would send if it lied."""
    together = _even(honest, round.delta)
    away = tree.sub(round.delta, together)
    spread = jax.tree.map(jnp.sqrt, _even(honest, jax.tree.map(jnp.square, away)))
    norms = tree.norms(round.delta)
    assert round.key is not None
    key = jax.random.wrap_key_data(round.key)
    noise = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), round.delta)
    loud = attack.noise * norms / jnp.sqrt(jnp.float32(tree.size(together)))
    far = tree.add(together, spread, -_farthest(attack, away, spread, honest))
    near = jax.tree.map(
        lambda a, m, s, r: attack.own * a + attack.mean * m + attack.spread * s + tree.over(loud, r) * r,
        *(round.delta, together, spread, noise),
    )
    lies = tree.where(attack.reach > 0, far, near)
    wanted = attack.length * median(norms, honest)
    return scaled(lies, jnp.where(attack.length > 0, fraction(wanted, tree.norms(lies)), 1.0))


def _farthest(attack: Lies, away: Params, spread: Params, honest: Array) -> Array:
    """The largest g for which the mean - g spread is no farther from honest updates than they are from each other."""
    products = tree.products(away)
    square = jnp.diag(products)
    among = honest[:, None] & honest
    apart = jnp.where(among, jnp.maximum(square[:, None] + square - 2 * products, 0.0), 0.0)
    n, a, b = jnp.sum(honest), tree.dot(spread, spread), tree.dots(away, spread)

    def root(b: Array, c: Array, most: Array) -> Array:
        """The larger g with a g^2 + 2 b g + c = most."""
        return fraction(jnp.sqrt(jnp.maximum(b * b - a * (c - most), 0.0)) - b, a)

    # min-max compares the largest distances, min-sum the sums of squared distances
    largest = jnp.min(jnp.where(honest, root(b, square, jnp.max(apart)), jnp.inf))
    mean_square = fraction(jnp.sum(jnp.where(honest, square, 0.0)), n)
    by_sums = root(jnp.zeros_like(a), mean_square, fraction(jnp.max(jnp.sum(apart, axis=1)), n))
    most = jnp.where(attack.reach == 1, largest, by_sums)
    return jnp.where(n > 0, jnp.maximum(most, 0.0), 0.0)


def _gradients(attack: Lies, stack: Params, honest: Array) -> Params:
    """A factor times each own gradient, or times the honest mean gradient of their norm."""
    together = _even(honest, stack)
    length = fraction(tree.norms(stack), tree.norm(together))
    shared = jax.tree.map(lambda a, m: jnp.where(attack.shared > 0, tree.over(length, a) * m, a), stack, together)
    return jax.tree.map(lambda leaf: attack.gradient * leaf, shared)


def _vouching(round: Round, moved: Params, together: Params) -> Params:
    """1e6 (q - 0.02 u): q is random, the same for all liars, and orthogonal to u and to the honest mean gradient."""
    assert round.key is not None
    key = jax.random.wrap_key_data(round.key)
    noise = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), together)

    def lie(update: Params) -> Params:
        u = _unit(update)
        rest = tree.add(together, u, -tree.dot(together, u))
        q = tree.add(noise, u, -tree.dot(noise, u))
        q = _unit(tree.add(q, _unit(rest), -tree.dot(q, _unit(rest))))
        return jax.tree.map(lambda q, u: 1e6 * (q - 0.02 * u), q, u)

    return jax.vmap(lie)(moved)


def _unit(a: Params) -> Params:
    norm = tree.norm(a)
    return jax.tree.map(lambda leaf: fraction(leaf, norm), a)


def _grazing(delta: Params, grad: Params) -> Params:
    """The update, turned until it just descends on the gradient: by a hundredth of its norm."""
    down = jax.tree.map(jnp.negative, _unit(grad))
    return tree.add(delta, down, jnp.maximum(0.01 * tree.norm(delta) - tree.dot(delta, down), 0.0))


def _even(honest: Array, stack: Params) -> Params:
    """The mean over the honest slots."""
    return tree.combine(fraction(honest.astype(jnp.float32), jnp.sum(honest)), stack)
