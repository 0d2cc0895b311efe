"""The server's step: how the model changes after a rule has weighed the round. Any step works with any rule.

It is two pure functions, as in optax: `init(params) -> memory`, `apply(memory, round, update) -> (params, memory)`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import tree
from folb.core.part import FLAG, Part, Slot, below, between, more_than, setting, up_to
from folb.core.rules import Round, Update, fraction
from folb.core.vector import zeros
from folb.errors import check
from folb.typing import Params

LR = "step size of the server"


class ServerStep(Part):
    """What the server does with the update of a round. A step of your own is a class of this base with `apply`."""

    needed = ("apply",)
    average: ClassVar[str] = "none"  # the model that its authors evaluate
    sum_alone: ClassVar[bool] = False  # whether it needs the update, and nothing of single replies unless `by_lengths`
    by_lengths: ClassVar[Any] = False  # whether it looks at the lengths of single updates
    # A step is at most this many times the update, plus what earlier rounds left. Infinity says that it is another
    # function of the update, or that nobody knows. The guard needs to know, and weights are recorded times the gain.
    gain: ClassVar[Any] = math.inf

    def init(self, params: Params) -> Any:
        """The memory before the first round."""
        return ()

    def send(self, memory: Any, params: Params) -> Params:
        """The model that devices start from, if it has this method; otherwise the server's own."""
        return params

    def apply(self, memory: Any, round: Round, update: Update) -> tuple[Params, Any]:
        """The model and the memory after a round."""
        raise NotImplementedError

    def check(self, spelt: Any = str) -> None:
        super().check(spelt)
        check("server: gain", self.gain, lambda gain: gain >= 0, "should be a number of at least 0, or infinity")


class Plain(ServerStep):
    """w^{t+1} = w^t + lr Delta: the paper's step at lr = 1."""

    sum_alone = True
    lr: float = setting(LR, more_than(0), default=1.0)

    @property
    def gain(self) -> Any:
        return self.lr

    def apply(self, memory: Any, round: Round, update: Update) -> tuple[Params, Any]:
        return tree.add(round.params, update.delta, self.lr), memory


class _Momentum(ServerStep):
    """Steps with a momentum m, which is 0 at first."""

    abstract = True
    sum_alone = True
    lr: float = setting(LR, more_than(0), default=1.0)
    beta: float = setting("momentum", below(1), default=0.9)

    @property
    def gain(self) -> Any:
        return self.lr

    def init(self, params: Params) -> Params:
        return zeros(params)


class Momentum(_Momentum):
    """FedAvgM (Hsu et al., 2019): heavy-ball momentum on Delta."""

    def apply(self, memory: Params, round: Round, update: Update) -> tuple[Params, Params]:
        m = tree.add(update.delta, memory, self.beta)
        return tree.add(round.params, m, self.lr), m


class Nesterov(_Momentum):
    """Nesterov momentum on Delta: m <- beta m + Delta, and the step Delta + beta m."""

    @property
    def gain(self) -> Any:
        return self.lr * (1 + self.beta)  # the update is in the step, and in m

    def apply(self, memory: Params, round: Round, update: Update) -> tuple[Params, Params]:
        m = tree.add(update.delta, memory, self.beta)
        return tree.add(round.params, tree.add(update.delta, m, self.beta), self.lr), m


class Lookahead(_Momentum):
    """FedACG's step (Kim et al., 2024): devices start from w + beta m; m <- beta m + lr Delta, and w <- w + m.

    The mean of updates that disagree is shorter than they are. With `stretch`, Delta is multiplied by
    (sum_k p_k ||Delta_k||^2 / ||sum_k p_k Delta_k||^2)^stretch, where p_k is |a_k| over their sum: with 1/2, it is as
    long as a device's update.
    """

    beta: float = setting("momentum", below(1), default=0.85)
    stretch: float | None = setting(
        "how far the update is stretched; 0.5: as long as a device's", between(0, 1), default=None
    )

    @property
    def gain(self) -> Any:
        return self.lr if self.stretch is None else math.inf

    @property
    def by_lengths(self) -> bool:
        return self.stretch is not None

    def send(self, memory: Params, params: Params) -> Params:
        return tree.add(params, memory, self.beta)

    def apply(self, memory: Params, round: Round, update: Update) -> tuple[Params, Params]:
        lr = self.lr if self.stretch is None else self.lr * _shortening(round, update)[0] ** self.stretch
        m = tree.add(jax.tree.map(lambda d: lr * d, update.delta), memory, self.beta)
        return tree.add(round.params, m), m


class _Extrapolation(ServerStep):
    """Steps along Delta that are longer if the updates disagree."""

    abstract = True
    by_lengths = True
    lr: float = setting(LR, more_than(0), default=1.0)

    def times(self, round: Round, update: Update) -> Array:
        """How many times as long."""
        raise NotImplementedError

    def apply(self, memory: Any, round: Round, update: Update) -> tuple[Params, Any]:
        return tree.add(round.params, update.delta, self.lr * self.times(round, update)), memory


class FedExP(_Extrapolation):
    """FedExP (Jhunjhunwala et al., 2023): step max(1, sum_k |a_k| ||Delta_k||^2 / (2 ||Delta||^2 + 2 eps)).

    a_k are the rule's weights; with a_k = 1/K this is the published formula. As in its authors' experiments, eps is
    multiplied by eps_decay after each round, and the mean of the last two models is evaluated.
    """

    average = "last_two"
    eps: float = setting("eps", more_than(0), default=1e-3)
    eps_decay: float = setting("what eps is multiplied by in each round", up_to(1), default=0.998**2)

    def times(self, round: Round, update: Update) -> Array:
        total = round.mean_square
        if total is None:
            squares = jnp.where(update.weights != 0, tree.norms(round.delta) ** 2, 0.0)
            total = jnp.sum(jnp.abs(update.weights) * squares)
        left = self.eps * self.eps_decay ** jnp.float32(0 if round.t is None else round.t - 1)
        return jnp.maximum(1.0, total / (2 * (tree.dot(update.delta, update.delta) + left)))


class FedExProx(_Extrapolation):
    """FedExProx-GraDS (Li et al., 2024): step sum_k p_k ||Delta_k||^2 / ||sum_k p_k Delta_k||^2, the diversity.

    p_k is |a_k| over their sum. It is at least 1, and has no bound where updates are opposed.
    """

    def times(self, round: Round, update: Update) -> Array:
        return _diversity(round, update)[0]


class Adagrad(ServerStep):
    """FedAdagrad (Reddi et al., 2021): v <- v + Delta^2 from v = eps^2, and the step Delta / (sqrt(v) + eps)."""

    sum_alone = True
    lr: float = setting(LR, more_than(0), default=0.1)
    eps: float = setting("eps", more_than(0), default=1e-3)

    def init(self, params: Params) -> Params:
        return jax.tree.map(lambda w: jnp.full_like(w, self.eps**2), params)

    def apply(self, memory: Params, round: Round, update: Update) -> tuple[Params, Params]:
        v = jax.tree.map(lambda v, d: v + d**2, memory, update.delta)
        step = jax.tree.map(lambda d, v: d / (jnp.sqrt(v) + self.eps), update.delta, v)
        return tree.add(round.params, step, self.lr), v


class Moments(ServerStep):
    """What FedAdam and FedYogi share: optax's step, or without bias correction Algorithm 2 of Reddi et al. (2021).

    Algorithm 2: m <- beta m + (1 - beta) Delta from 0, v from eps^2, and the step m / (sqrt(v) + eps).
    """

    abstract = True
    sum_alone = True
    lr: float = setting(LR, more_than(0), default=0.01)
    beta: float = setting("beta_1", below(1), default=0.9)
    beta2: float = setting("beta_2", below(1), default=0.99)
    eps: float = setting("eps", more_than(0), default=1e-3)
    bias_correction: bool = setting("true: as in optax; false: as in the paper of Reddi et al.", FLAG, default=True)

    def _of_optax(self) -> Any:
        """Optax's step of this name, fed with -Delta, the server's pseudo-gradient."""
        import optax  # here, since it takes time to load and few algorithms need it

        return getattr(optax, self.name)(self.lr, b1=self.beta, b2=self.beta2, eps=self.eps)

    def init(self, params: Params) -> Any:
        if self.bias_correction:
            return self._of_optax().init(params)
        return zeros(params), jax.tree.map(lambda w: jnp.full_like(w, self.eps**2), params)

    def apply(self, memory: Any, round: Round, update: Update) -> tuple[Params, Any]:
        if self.bias_correction:
            downhill = jax.tree.map(jnp.negative, update.delta)
            step, memory = self._of_optax().update(downhill, memory, round.params)
            return tree.add(round.params, step), memory
        m = jax.tree.map(lambda m, d: self.beta * m + (1 - self.beta) * d, memory[0], update.delta)
        v = jax.tree.map(lambda v, d: self.squares(v, d**2), memory[1], update.delta)
        step = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.eps), m, v)
        return tree.add(round.params, step, self.lr), (m, v)

    def squares(self, v: Array, square: Array) -> Array:
        """The next v."""
        raise NotImplementedError


class Adam(Moments):
    """FedAdam (Reddi et al., 2021) as optax has it, with bias correction; without, it is their Algorithm 2.

    v <- beta_2 v + (1 - beta_2) Delta^2.
    """

    def squares(self, v: Array, square: Array) -> Array:
        return self.beta2 * v + (1 - self.beta2) * square


class Yogi(Moments):
    """FedYogi (Reddi et al., 2021) as optax has it, with bias correction; without, it is their Algorithm 2.

    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2).
    """

    def squares(self, v: Array, square: Array) -> Array:
        return v - (1 - self.beta2) * square * jnp.sign(v - square)


def mean_square(round: Round, update: Update) -> Array:
    """sum_k p_k ||Delta_k||^2, where p_k = |a_k| / sum_j |a_j|."""
    if round.mean_square is not None:
        return jnp.asarray(round.mean_square)
    a = jnp.abs(update.weights)
    return jnp.sum(jnp.where(a > 0, fraction(a, jnp.sum(a)) * tree.norms(round.delta) ** 2, 0.0))


def _diversity(round: Round, update: Update) -> tuple[Array, Array]:
    """sum_k p_k ||Delta_k||^2 / ||sum_k p_k Delta_k||^2, where p_k = |a_k| / sum_j |a_j|; and that of orthogonal ones.

    It is 1 if all updates are the same, and K if K of them are orthogonal and weigh the same.
    """
    a = jnp.abs(update.weights)
    if round.mean_square is not None:
        mean, largest = update.delta, jnp.max(a)
    else:
        p = fraction(a, jnp.sum(a))
        mean, largest = tree.combine(p, round.delta), jnp.sum(p * p)
    ratio = fraction(mean_square(round, update), tree.dot(mean, mean))
    return ratio, jnp.maximum(1.0, fraction(jnp.float32(1), largest))


def _shortening(round: Round, update: Update) -> tuple[Array, Array]:
    """`_diversity`, clipped to its bounds for orthogonal updates: no device can stretch the step further."""
    ratio, most = _diversity(round, update)
    return jnp.clip(ratio, 1.0, most), most


def disagreement(round: Round, update: Update) -> Array:
    """How far the updates of a round disagree: 0 if all are the same, 1 if they are orthogonal, or more opposed.

    It is (s - 1) / (K - 1), where s is the ratio above and K its largest value: an estimate of what part of the mean
    update's squared length comes from differences between devices. It is 1 where it cannot be known: for one update, or
    if squares overflow. The noise of a private round does not count as shared.
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


SERVERS = Slot(
    "server",
    ServerStep,
    (Plain, Momentum, Nesterov, Lookahead, Adagrad, Adam, Yogi, FedExP, FedExProx),
    "the server's step",
    optional=False,
)
