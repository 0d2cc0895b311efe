"""What the algorithms need from a model. A model of any library fits in through the same three functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import Array

from folb.typing import Params

P = ParamSpec("P")


class Model(NamedTuple):
    """Three functions, and facts about their cost and inputs.

    init(key) -> params; loss(params, x, y) -> the loss of each sample of a batch; predict(params, x) -> labels.

    `heavy` is about how a model is computed: it spends its time in large products. So its mini-batch steps are not
    unrolled, it is evaluated on fewer samples at once, and on a CPU the devices of a round run one after another. Its
    operations are counted in `folb.models.cost`. `block` is the largest number of samples that a CPU should take at
    once, so that intermediate values stay in its cache. A model with `codes` takes whole numbers from 0 to codes - 1 as
    inputs, and would ignore any others without an error. A model with `scores` knows one label for each column of
    scores(params, x); any other label would give a loss that is not finite.

    `judged_by` names the metric that the target is for: "accuracy", "f1", "auc" or "top5" of a model that tells classes
    apart; "mse" or "mae" of one that predicts numbers, whose errors should be low.

    Models are equal if their functions and facts are, and equal models share their compiled programs. A model of folb
    that is made again from the same values is the same.
    """

    init: Callable[[Array], Params]
    loss: Callable[[Params, Array, Array], Array]
    predict: Callable[[Params, Array], Array]
    heavy: bool = False
    block: int | None = None
    codes: int | None = None
    scores: Callable[[Params, Array], Array] | None = None
    judged_by: str = "accuracy"

    def __repr__(self) -> str:
        made_by = getattr(self.init, "__qualname__", type(self.init).__name__).partition(".")[0]
        return f"Model({made_by})"

    def at_once(self, most: int) -> int:
        """How many samples to take at once; `most` suits other accelerators and models."""
        return min(most, self.block) if self.block is not None and jax.default_backend() == "cpu" else most


def made_once(make: Callable[P, Model]) -> Callable[P, Model]:
    """The constructor; it returns the same model again for the same values.

    A compiled program is found again by the functions that it is made of.
    """
    known: dict[tuple[Any, ...], Model] = {}
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*arguments: P.args, **settings: P.kwargs) -> Model:
        model = make(*arguments, **settings)
        bound = signature.bind(*arguments, **settings)
        bound.apply_defaults()
        shape, *others = bound.arguments.values()
        return known.setdefault((tuple(shape), *others), model)

    return made


def params_like(model: Model) -> Params:
    """What a model's parameters are like. Nothing is computed, not even the key: that would load a program."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def classifier(
    init: Callable[[Array], Params],
    scores: Callable[[Params, Array], Array],
    heavy: bool = False,
    block: int | None = None,
    codes: int | None = None,
) -> Model:
    """The model of class scores(params, x): [batch, classes], with the cross-entropy as the loss."""
    return Model(
        init=init,
        loss=lambda params, x, y: cross_entropy(scores(params, x), y),
        predict=lambda params, x: scores(params, x).argmax(axis=1),
        heavy=heavy,
        block=block,
        codes=codes,
        scores=scores,
    )


def regressor(
    init: Callable[[Array], Params],
    value: Callable[[Params, Array], Array],
    heavy: bool = False,
    block: int | None = None,
) -> Model:
    """The model of numbers value(params, x): [batch], with the squared error as the loss, and judged by its mean."""
    return Model(
        init=init,
        loss=lambda params, x, y: (value(params, x) - y) ** 2,
        predict=value,
        heavy=heavy,
        block=block,
        judged_by="mse",
    )


def cross_entropy(logits: Array, y: Array) -> Array:
    """-log softmax(logits)[y], for each row."""
    picked = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked
