"""The step of a device's solver, on h_k of (3), and the key of a mini-batch step, for a loss that draws random numbers.

A step that is written with `folb.core.vector` runs both in the simulator and on a real device, which needs no jax.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, ClassVar

from folb.core.part import FLAG, Part, Range, at_least, below, more_than, name_of, setting
from folb.core.vector import each, namespace, norm, scaled, zeros
from folb.core.whiten import Hidden, changed, named, orthogonal, stretch, unit
from folb.typing import Params

NEAR_ONE, NEAR_ZERO = 1 - 2**-25, 2**-126  # beyond them a number is 1 or 0 in 32 bits, and a step divides by zero
OWN = 0x51ED270B  # keys differ from the words themselves, which batches and codecs are drawn from
SHARE = Range(lambda beta: (beta >= 0) & (beta < NEAR_ONE), "should be at least 0 and less than 1, in 32 bits")


class LocalStep(Part):
    """The step of a device. One of your own is a class of this base with `apply`, and with `init` if it has a state.

    Its settings reach a device with every task, which finds the class by its name.
    """

    needed = ("apply",)
    one_size: ClassVar[bool] = True  # whether its steps are lr times a mean of gradients: some parts divide by the size

    def init(self, params: Params) -> Any:
        """The state at the start of each round: a step keeps nothing between rounds."""
        return ()

    def apply(self, g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
        """What the device adds to its model, and the state afterwards.

        `g` is the gradient of h_k at the device's model, with the proximal term and the server's shift.
        """
        raise NotImplementedError

    def reach(self, J: Any) -> Any:
        """The total weight of the gradients in J steps: how far they go along one that stays, in units of lr."""
        return J

    def begin(self, sent: tuple[Params, ...]) -> Any:
        """The state at the start of a round, if it has this method, from what a memory sends."""

    def momentum(self, state: Any) -> Params:
        """Its mean of gradients after the work, if it has this method: the upload `last_momentum`."""


class Sgd(LocalStep):
    """-lr g."""

    def apply(self, g: Params, state: Any, lr: Any) -> tuple[Params, Any]:
        return scaled(g, -lr), state


class Momentum(LocalStep):
    """Heavy-ball momentum: v <- beta v + g, and the move -lr v."""

    beta: float = setting("momentum", SHARE, default=0.9)

    def init(self, params: Params) -> Params:
        return zeros(params)

    def apply(self, g: Params, state: Params, lr: Any) -> tuple[Params, Params]:
        v = each(lambda v, g: self.beta * v + g, state, g)
        return scaled(v, -lr), v

    def reach(self, J: Any) -> Any:
        """sum_j (1 - beta^j) / (1 - beta), for j = 1 .. J."""
        beta = self.beta
        return (J - beta * (1 - beta**J) / (1 - beta)) / (1 - beta)


class DeltaSgd(LocalStep):
    """Delta-SGD (Kim et al., 2024): eta_j = min(gamma ||dw|| / (2 ||dg||), sqrt(1 + delta theta) eta_(j-1)).

    theta is eta_j / eta_(j-1), and lr the size of the first step of a round.
    """

    called = "delta_sgd"
    one_size = False
    gamma: float = setting("gamma", more_than(0), default=2.0)
    delta: float = setting("delta", at_least(0), default=0.1)

    def init(self, params: Params) -> tuple[Any, ...]:
        """The last gradient, and the last step's size (negative before there was one), its growth and its length."""
        zero = norm(params) * 0
        return zeros(params), zero - 1, zero + 1, zero

    def apply(self, g: Params, state: tuple[Any, ...], lr: Any) -> tuple[Params, tuple[Any, ...]]:
        last, size, theta, length = state
        change = norm(each(lambda new, old: new - old, g, last))
        xp = namespace(change)
        first = size < 0
        before = xp.where(first, lr, size)
        grown = xp.sqrt(1 + self.delta * theta) * before
        smooth = xp.where(change > 0, self.gamma * length / (2 * xp.where(change > 0, change, 1.0)), xp.inf)
        eta = xp.where(first, lr, xp.minimum(smooth, grown))
        theta = xp.where(before > 0, eta / xp.where(before > 0, before, 1.0), 1.0)
        return scaled(g, -eta), (g, eta, theta, eta * norm(g))


class Adam(LocalStep):
    """Adam (Kingma and Ba, 2015): -lr m / (sqrt(v) + eps), with corrected bias. Its means start at 0 in each round."""

    one_size = False
    beta: float = setting("momentum", SHARE, default=0.9)
    beta2: float = setting("beta_2", SHARE, default=0.999)
    eps: float = setting("eps", Range(lambda eps: eps >= NEAR_ZERO, "should be more than 0, in 32 bits"), default=1e-8)

    def init(self, params: Params) -> tuple[Any, ...]:
        """The means of the gradients and of their squares, and how many there were."""
        return zeros(params), zeros(params), norm(params) * 0

    def apply(self, g: Params, state: tuple[Any, ...], lr: Any) -> tuple[Params, tuple[Any, ...]]:
        beta, beta2, (m, v, j) = self.beta, self.beta2, state
        m = each(lambda m, g: beta * m + (1 - beta) * g, m, g)
        v = each(lambda v, g: beta2 * v + (1 - beta2) * g * g, v, g)
        j = j + 1
        bias, bias2 = 1 - beta**j, 1 - beta2**j
        move = each(lambda m, v: -lr * (m / bias) / (namespace(v).sqrt(v / bias2) + self.eps), m, v)
        return move, (m, v, j)


class _Muon(LocalStep):
    """Orthogonal steps for a network's hidden matrices. The state is V, and what else a memory sends."""

    abstract = True
    one_size = False
    beta: float = setting("momentum", SHARE, default=0.5)
    share: float = setting("hidden layers: how long their steps are, in units of lr", more_than(0), default=0.75)
    whole: bool = setting("true: the output layer's steps are orthogonal, too, on any model", FLAG, default=False)
    matrices: tuple[Hidden, ...] = field(default=(), metadata={"static": True})  # those of the model

    def of(self, hidden: Any) -> LocalStep:
        return replace(self, matrices=hidden)

    def begin(self, sent: tuple[Params, ...]) -> tuple[Params, ...]:
        return (scaled(sent[0], 1 / (1 - self.beta)), *sent[1:])

    def momentum(self, state: tuple[Params, ...]) -> Params:
        return scaled(state[0], 1 - self.beta)  # the weights of its gradients add up to 1

    def init(self, params: Params) -> tuple[Params, ...]:
        return (zeros(params),)

    def apply(self, g: Params, state: tuple[Params, ...], lr: Any) -> tuple[Params, tuple[Params, ...]]:
        v, *others = state
        v = each(lambda v, g: self.beta * v + g, v, g)
        hidden = [Hidden(*one) for one in self.matrices]  # a device gets plain tuples
        step, gradients = -self.share * lr, named(g)[0]
        if self.whole:
            axis, known = hidden[0].outputs if hidden else -1, {one.path for one in hidden}
            more = (path for path, leaf in gradients.items() if leaf.ndim > 1 and path not in known)
            hidden += [Hidden(path, outputs=axis) for path in more]

        def other(path: str, leaf: Any) -> Any:
            if leaf.ndim > 1 or not hidden:
                return -lr * gradients[path]
            xp, square = namespace(leaf), leaf * leaf
            mean = xp.mean(square)
            return step / 2 * leaf / xp.sqrt(xp.where(mean > 0, mean, xp.ones_like(mean)))

        def scale(one: Hidden, leaf: Any) -> Any:
            return step * stretch(one, leaf)

        return changed(hidden, v, lambda stack: orthogonal(unit(stack)[0]), other, scale), (v, *others)


class Orthogonal(_Muon):
    """Muon (Jordan et al., 2024) for a network's hidden matrices; -lr g for its output layer, and for other models.

    V <- beta V + g from 0 in each round, and the move -share lr sqrt(outputs / inputs) NS5(V), where NS5 is the
    orthogonal factor of `whiten=orthogonal`. Vectors move by share lr / 2, as a root mean square.
    """


class Aligned(_Muon):
    """(1 - alpha) times a step of `orthogonal`, less alpha lr D, where D is the direction that a memory sends."""

    alpha: float = setting("weight of the direction of the last round", below(1), default=0.5)

    def init(self, params: Params) -> tuple[Params, ...]:
        return zeros(params), zeros(params)

    def apply(self, g: Params, state: tuple[Params, ...], lr: Any) -> tuple[Params, tuple[Params, ...]]:
        move, state = super().apply(g, state, lr)
        return each(lambda m, d: (1 - self.alpha) * m - self.alpha * lr * d, move, state[1]), state


LOCAL_STEPS = {name_of(kind): kind for kind in (Sgd, Momentum, DeltaSgd, Adam, Orthogonal, Aligned)}


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a loss, a gradient or a network's outputs have a parameter `key`, which has no value of its own."""
    try:
        key = inspect.signature(function).parameters.get("key")
    except (TypeError, ValueError):  # a function that is not written in Python
        return False
    return key is not None and (key.default is None or key.default is key.empty)


def called(function: Callable[..., Any], *arguments: Any, key: Any = None) -> Any:
    """function(*arguments), with the key if it takes one; None: without randomness."""
    return function(*arguments, key=key) if takes_key(function) else function(*arguments)


def step_words(words: Any, s: Any) -> Any:
    """The two words of the key of a round's mini-batch s, counted from 0, from the device's own words of that round."""
    xp = namespace(words)
    number = xp.asarray(s, dtype=xp.uint32)
    return (words ^ xp.uint32(OWN)) + xp.stack([xp.zeros_like(number), number])
