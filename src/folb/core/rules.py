"""Aggregation: one class for each rule of the paper.

A rule sees the whole `Round`, all replies stacked, and returns the `Update` of the server's model. A device drawn m
times into the multiset works once and counts m times; one that was lost counts 0 times. So the paper's K is the sum of
`times`, and its sums over k in S are sums weighted by `times`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import Slot, at_least, one_of, setting
from folb.core.rule import Gradients as Gradients
from folb.core.rule import Round as Round
from folb.core.rule import Rule as Rule
from folb.core.rule import Update as Update
from folb.core.rule import as_printed, never_flipped
from folb.core.upload import Upload
from folb.errors import InputError
from folb.typing import Params


def weighted(round: Round, weights: Array) -> Update:
    """The step sum_k weights_k Delta w_k; a slot that does not count has no part in it."""
    if jnp.shape(weights) != jnp.shape(round.times):
        raise InputError("weights: shape", jnp.shape(weights), f"should be {jnp.shape(round.times)}, one for each slot")
    weights = jnp.where(round.times > 0, weights, 0.0)
    return Update(tree.combine(weights, round.delta), weights)


def fraction(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: the rule then makes no update."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def gradient_estimate(grad: Params, times: Array, correction: Array) -> Params:
    """(10): grad_i f(w^t) = 1/K sum_{k in S_i} grad F_k(w^t).

    The draws are from P, but f = sum_k p_k F_k. So each gradient is weighted by p_k / P_k, which is 1 when the
    selection matches the objective (1). This is unbiased for draws with replacement, and for uniform draws without.
    """
    return tree.combine(fraction(times * correction, jnp.sum(times)), grad)


def inner_products(round: Round) -> tuple[Array, Params]:
    """<grad F_k(w^t), grad_1 f(w^t)> for each slot, and grad_1 f(w^t) of (10)."""
    if round.grad is None:
        raise InputError("uploads", (), "this rule needs the devices' gradients: should have 'grad'")
    g1 = round.reference
    if g1 is None:
        g1 = gradient_estimate(round.grad, round.times, round.correction)
    return tree.dots(round.grad, g1), g1


class ByShare(Rule):
    """Rules with the share of each device: 1/K, or p_k = n_k / n of (1) as in FedProx's public code."""

    abstract = True
    weights: Literal["equal", "samples"] = setting(
        "weights of the mean: 1/K as in (2), or n_k as in (1)", one_of("equal", "samples"), default="equal"
    )

    @property
    def by_samples(self) -> bool:
        return self.weights == "samples"

    def shares(self, round: Round) -> Array:
        count = round.times * round.size if self.by_samples else round.times
        return fraction(count, jnp.sum(count))


class Mean(ByShare):
    """(2): w^{t+1} = 1/K sum_{k in S_t} w_k, or with p_k in place of 1/K."""

    @property
    def even(self) -> bool:
        return not self.by_samples

    def update(self, round: Round) -> Update:
        return weighted(round, self.shares(round))


class FedNova(ByShare):
    """FedNova (Wang et al., 2020): (sum_k p_k a_k) sum_k p_k Delta_k / a_k, where a_k is the number of local steps.

    With local momentum a_k is larger: the total weight of the gradients in these steps. `round.steps` has it.
    """

    one_size = True

    def update(self, round: Round) -> Update:
        p, a = self.shares(round), round.steps.astype(jnp.float32)
        return weighted(round, jnp.sum(p * a) * fraction(p, a))


class Signed(Rule):
    """(5): w^{t+1} = w^t + 1/K sum_{k in S_t} sign(<grad f, grad F_k>) Delta w_k.

    The inner product comes from the survey, if there was one; otherwise it is estimated with (10).
    """

    uploads = ("grad",)
    surveyed = True

    def update(self, round: Round) -> Update:
        inner = inner_products(round)[0] if round.inner is None else round.inner
        return weighted(round, fraction(round.times, jnp.sum(round.times)) * jnp.sign(inner))


class FolbTwoSet(Rule):
    """(9): weights <grad F_k, grad_1 f> / sum_{k' in S_2} <grad F_k', grad_2 f>.

    They are not normalised: they add up to ||grad_1 f||^2 / ||grad_2 f||^2 when both sets have K members.
    """

    called = "folb_two_set"
    uploads = ("grad",)
    second = True

    def update(self, round: Round) -> Update:
        second = round.second
        assert second is not None
        inner, _ = inner_products(round)
        g2 = gradient_estimate(second.grad, second.times, second.correction)
        total = jnp.sum(jnp.where(second.times > 0, second.times * tree.dots(second.grad, g2), 0.0))
        return weighted(round, fraction(round.times * inner, total))


class ByImportance(Rule):
    """Weights I_k / sum_{k' in S_1} |I_k'|, with an I_k that follows from a device's reply and g = grad_1 f."""

    abstract = True
    uploads: ClassVar[tuple[str | Upload, ...]] = ("grad",)

    def update(self, round: Round) -> Update:
        inner, g1 = inner_products(round)
        importance = self.importance(inner, round.gamma, tree.dot(g1, g1))
        counted = jnp.where(round.times > 0, round.times * importance, 0.0)
        return weighted(round, fraction(counted, jnp.sum(jnp.abs(counted))))


class Folb(ByImportance):
    """(13): weights <grad F_k, grad_1 f> / sum_{k' in S_1} |<grad F_k', grad_1 f>|."""

    alone: ClassVar[Mapping[str, Any]] = {}

    def importance(self, inner: Array, gamma: Any, square: Array) -> Array:
        return inner


class Discounted(ByImportance):
    """Rules with a discount for inexact local work."""

    abstract = True
    uploads = ("grad", "gamma")
    flip: ClassVar[float] = 1.0  # whether a discount may reverse an update
    psi: float = setting("discount for inexact local work (18)", at_least(0), default=0.1)

    @property
    def alone(self) -> Mapping[str, Any]:
        return {"psi": self.psi, "flip": self.flip}

    def importance(self, inner: Array, gamma: Any, square: Array) -> Array:
        return (as_printed if self.flip else never_flipped)(inner, self.psi * gamma * square)


class FolbHetero(Discounted):
    """(18): weights I_k / sum |I_k'|, with I_k = <grad_1 f, grad F_k> - psi gamma_k ||grad_1 f||^2.

    Exactly as printed: a discount larger than the inner product reverses a device's update.
    """

    called = "folb_hetero"


class FolbNeverFlip(Discounted):
    """(18), but the discount shrinks |I_k| to zero at most, so that psi cannot flip a sign."""

    called = "folb_never_flip"
    flip = 0.0


RULES = Slot(
    "rule",
    Rule,
    (Mean, FedNova, Signed, Folb, FolbTwoSet, FolbHetero, FolbNeverFlip),
    "aggregation: what the server makes of a round",
    optional=False,
)
