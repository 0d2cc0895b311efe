"""What the algorithms need from a model. A model of any library fits in through the same three functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.local_step import takes_key
from folb.core.whiten import Hidden
from folb.errors import InputError
from folb.typing import Params

P = ParamSpec("P")

draws = functools.lru_cache(takes_key)  # it is asked whenever a loss is traced


class Model(NamedTuple):
    """Three functions, and facts about their cost and inputs.

    init(key) -> params; loss(params, x, y) -> the loss of each sample of a batch; predict(params, x) -> labels.

    A loss that draws random numbers in training is loss(params, x, y, key). Each mini-batch step of a device has its
    own key, a function of (seed, round, device, step). Everywhere else, as in evaluations and full gradients, the key
    is None, and the loss is then without randomness.

    `heavy` is about how a model is computed: it spends its time in large products. So its mini-batch steps are not
    unrolled, it is evaluated on fewer samples at once, and on a CPU the devices of a round run one after another. Its
    operations are counted in `operations`. `block` is the largest number of samples that a CPU should take at
    once, so that intermediate values stay in its cache. A model with `codes` takes whole numbers from 0 to codes - 1 as
    inputs, and would ignore any others without an error. A model with `scores` knows one label for each column of
    scores(params, x); any other label would give a loss that is not finite.

    `judged_by` names the metric that the target is for: "accuracy", "f1", "auc" or "top5" of a model that tells classes
    apart; "mse" or "mae" of one that predicts numbers, whose errors should be low.

    Models are equal if their functions and facts are, and equal models share their compiled programs. A model of folb
    that is made again from the same values is the same.
    """

    init: Callable[[Array], Params]
    loss: Callable[..., Array]
    predict: Callable[[Params, Array], Array]
    heavy: bool = False
    block: int | None = None
    codes: int | None = None
    scores: Callable[[Params, Array], Array] | None = None
    judged_by: str = "accuracy"
    hidden: tuple[Hidden | str, ...] = ()  # its hidden matrices, which some algorithms whiten

    def __repr__(self) -> str:
        made_by = getattr(self.init, "__qualname__", type(self.init).__name__).partition(".")[0]
        return f"Model({made_by})"

    def losses(self, params: Params, x: Array, y: Array, key: Array | None = None) -> Array:
        """loss(params, x, y), or loss(params, x, y, key)."""
        return self.loss(params, x, y, key=key) if draws(self.loss) else self.loss(params, x, y)

    def at_once(self, most: int) -> int:
        """How many samples to take at once; `most` suits other accelerators and models."""
        return min(most, self.block) if self.block is not None and jax.default_backend() == "cpu" else most


def made_once(make: Callable[P, Model]) -> Callable[P, Model]:
    """The constructor; the same values give the same model, by whose functions compiled programs are found again."""
    known: dict[tuple[Any, ...], Model] = {}
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*arguments: P.args, **settings: P.kwargs) -> Model:
        model = make(*arguments, **settings)
        model.init.__qualname__ = make.__name__  # which the model shows
        bound = signature.bind(*arguments, **settings)
        bound.apply_defaults()
        shape, *others = bound.arguments.values()
        return known.setdefault((tuple(shape), *others), model)

    return made


def params_like(model: Model) -> Params:
    """What a model's parameters are like. Nothing is computed, not even the key: that would load a program."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


RUNNING = {"batch_stats", "running_mean", "running_var", "mean_ema", "var_ema"}  # as Flax, PyTorch and Haiku call them


def check_model(model: Model, params: Params, x: Any, y: Any) -> None:
    """Raise an `InputError` unless all its parameters are learnt, and its loss needs no more than it is given."""
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        for name in RUNNING & set(jax.tree_util.keystr(path, simple=True, separator="/").split("/")):
            expected = "are running statistics, which no gradient learns: use group or layer norm instead of batch norm"
            raise InputError("model: parameters", name, expected)
    try:
        arguments = inspect.signature(model.loss)
    except ValueError:  # a function that is not written in Python
        return
    try:
        arguments.bind("params", "x", "y", **({"key": None} if draws(model.loss) else {}))
    except TypeError:
        expected = "should be (params, x, y), or (params, x, y, key) if it draws random numbers"
        raise InputError("model: arguments of the loss", str(arguments), expected) from None
    if draws(model.loss):
        try:
            jax.eval_shape(model.losses, params, x, y)
        except Exception as error:
            expected = f"should work, without randomness, as in every evaluation: {type(error).__name__}: {error}"
            raise InputError("model: key of the loss", None, expected) from error


def classifier(
    init: Callable[[Array], Params],
    scores: Callable[..., Array],
    heavy: bool = False,
    block: int | None = None,
    codes: int | None = None,
    hidden: Sequence[Hidden | str] = (),
) -> Model:
    """The model of class scores(params, x): [batch, classes], with the cross-entropy as the loss.

    With scores(params, x, key), its loss takes a key, too.
    """
    loss, scores = _of_outputs(scores, cross_entropy)

    def predict(params: Params, x: Array) -> Array:
        return scores(params, x).argmax(axis=1)

    return Model(init, loss, predict, heavy, block, codes, scores, hidden=tuple(hidden))


def regressor(
    init: Callable[[Array], Params],
    value: Callable[..., Array],
    heavy: bool = False,
    block: int | None = None,
) -> Model:
    """The model of numbers value(params, x): [batch], with the squared error as the loss, and judged by its mean.

    With value(params, x, key), its loss takes a key, too.
    """
    loss, value = _of_outputs(value, lambda value, y: (value - y) ** 2)
    return Model(init, loss, value, heavy, block, judged_by="mse")


def _of_outputs(
    outputs: Callable[..., Array], loss: Callable[[Array, Array], Array]
) -> tuple[Callable[..., Array], Callable[[Params, Array], Array]]:
    """The model's loss, which takes a key if the outputs do; and the outputs without randomness."""
    if not takes_key(outputs):
        return lambda params, x, y: loss(outputs(params, x), y), outputs
    return (
        lambda params, x, y, key: loss(outputs(params, x, key=key), y),
        lambda params, x: outputs(params, x, key=None),
    )


def cross_entropy(logits: Array, y: Array) -> Array:
    """-log softmax(logits)[y], for each row."""
    picked = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


FEW = 32  # outputs, such as the channels of a convolution


def operations(model: Model, sample: jax.ShapeDtypeStruct, moved: int = 0) -> int:
    """Additions and multiplications in the products that the loss of one sample takes. Nothing is computed.

    A product with few outputs takes as long as `moved` operations for each number that it reads or writes.
    """
    x, y = jax.ShapeDtypeStruct((1, *sample.shape), sample.dtype), jax.ShapeDtypeStruct((1,), jnp.int32)
    program = jax.make_jaxpr(model.losses)(params_like(model), x, y)
    return sum(_of(step, moved) for step in program.eqns)


def _of(step: Any, moved: int) -> int:
    """The operations of one step of a program. A loop without a known end counts as one turn."""
    name = step.primitive.name
    if name == "dot_general":
        (contracted, _), _ = step.params["dimension_numbers"]
        left, out = step.invars[0].aval.shape, step.outvars[0].aval.shape
        products = 2 * prod(out) * prod(left[i] for i in contracted)
        return products if out[-1] >= FEW else max(products, moved * (prod(left) + prod(out)))
    if name == "conv_general_dilated":
        kernel, numbers = step.invars[1].aval.shape, step.params["dimension_numbers"]
        return 2 * prod(step.outvars[0].aval.shape) * prod(kernel) // kernel[numbers.rhs_spec[0]]
    inner = [sum(_of(one, moved) for one in program.eqns) for program in _inside(step)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (step.params["length"] if name == "scan" else 1)


def _inside(step: Any) -> Iterator[Any]:
    """The programs that a step runs: the body of a loop, the branches of a choice, a function."""
    for value in step.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            program = getattr(one, "jaxpr", one)
            if hasattr(program, "eqns"):
                yield program
