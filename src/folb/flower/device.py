"""The device's side: one function turns local data and a gradient into a Flower `ClientApp`.

This module imports only numpy and flwr: each message may start a new process, and waits for its imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from folb.core.local_step import LOCAL_STEPS, LocalStep, called, takes_key
from folb.core.part import name_of
from folb.core.upload import BOUNDED, DELTA, UPLOADS, Upload
from folb.errors import InputError, check
from folb.flower import local_work, protocol, sent
from folb.flower.protocol import Arrays, Task
from folb.typing import NDArray

KNOWN_UPLOADS: Mapping[str, Upload] = {**UPLOADS, **local_work.SUMS, **BOUNDED, DELTA.name: DELTA}
OwnPart = type[LocalStep] | Upload


@dataclass(frozen=True, eq=False)
class Device:
    """A device's training samples and the gradient of its loss.

    `gradient(params, x, y)` gives the gradient of the mean loss of a batch. It is a plain NumPy function,
    `from_torch(...)` or `from_jax(...)`. A plain function gets the model as a dict of arrays, or as a list if its
    arrays have no names, and answers in the same form. `x` and `y` are indexed by arrays of row numbers.

    A `gradient(params, x, y, key)` gets two random words for each mini-batch step, an array of uint32, where the
    simulator's loss gets a key. For a full gradient the key is None, and nothing should be random.

    `identity` is the device's own number, the same in every run; by default the node's `partition-id`.
    `evaluate(params)` gives metrics of a model, such as {"accuracy": 0.9, "loss": 0.3, "num-examples": 100}.
    `loss(params, x, y)` is the mean loss of a batch; only algorithms that ask for the device's loss need it.
    `parts` are the user's own classes of `LocalStep`, and `Upload`s, for the algorithms that this device runs.
    """

    x: Any
    y: Any
    gradient: Callable[..., Any]
    identity: int | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    loss: Callable[..., Any] | None = None
    parts: Sequence[OwnPart] = ()
    own: Mapping[str, OwnPart] = field(init=False, repr=False)  # the parts by name

    def __post_init__(self) -> None:
        """Turn lists into arrays, which rows can index."""
        for name in ("x", "y"):
            if isinstance(getattr(self, name), list | tuple):
                object.__setattr__(self, name, np.asarray(getattr(self, name)))
        known: dict[str, OwnPart] = {**LOCAL_STEPS, **KNOWN_UPLOADS}
        own: dict[str, OwnPart] = {}
        for part in self.parts:
            fits = isinstance(part, Upload) or (isinstance(part, type) and issubclass(part, LocalStep))
            check("parts", part, fits, "should be classes of folb.LocalStep, and folb.Uploads")
            name = name_of(part) if isinstance(part, type) else part.name
            expected = "should be a name that no other part has: a device finds its parts by their names"
            check("parts", name, name not in own and known.get(name, part) == part, expected)
            own[name] = part
        object.__setattr__(self, "own", own)

    def answer(
        self,
        task: Task,
        params: Arrays,
        shift: Arrays | None = None,
        mean: Arrays | None = None,
        begin: Arrays | None = None,
    ) -> tuple[dict[str, Arrays], dict[str, Any]]:
        data = (self.checked_gradient, self.x, self.y)
        sent = None if begin is None else protocol.parted(begin, list(params))
        model, loss = _as_given(params), self.loss or (lambda params, x, y: None)
        known = Known(
            params=lambda: params,
            work=lambda: local_work.solve(*data, task, self.step(task), params, shift, sent),
            delta=lambda: known["work"][0],  # w_k - w^t
            momentum=lambda: self.step(task).momentum(known["work"][1]),
            grad=lambda: local_work.full_gradient(*data, params),  # grad F_k(w^t)
            after=lambda: local_work.full_gradient(*data, local_work.plus(params, known["delta"])),  # grad F_k(w_k)
            loss=lambda: np.float32(local_work.full_loss(partial(called, loss, model), self.x, self.y)),  # F_k(w^t)
            mu=lambda: np.float32(task.mu),
            key=lambda: np.array(task.key, np.uint32),
            mean=lambda: mean,
        )
        arrays: dict[str, Arrays] = {}
        numbers: dict[str, Any] = {protocol.ROUND: task.round, protocol.SIZE: len(self.y)}
        for name in task.uploads:
            upload = self._part("uploads", name, KNOWN_UPLOADS)
            if self.loss is None and "loss" in upload.needs:
                raise InputError("loss", None, "should be a function (params, x, y): the algorithm asks for the loss")
            absent = mean is None and "mean" in upload.needs
            check("message", protocol.MEAN, not absent, "is missing: the mean of the gradients")
            given = task.numbers_of(name)
            sizes = tuple((key, int(given.pop(key, number))) for key, number in upload.sizes)
            value = replace(upload, numbers={key: np.float32(v) for key, v in given.items()}, sizes=sizes)(known)
            if isinstance(value, Mapping):
                arrays[name] = {key: _as_sent(part) for key, part in value.items()}
            elif np.ndim(value):
                arrays[name] = {protocol.VALUE: _as_sent(value)}
            else:
                numbers[name] = float(value)
        return arrays, numbers

    def _part(self, field: str, name: str, known: Mapping[str, Any]) -> Any:
        """A part by its name: folb's, or the user's own of the same kind."""
        uploads = field == "uploads"
        known = {**known, **{key: part for key, part in self.own.items() if isinstance(part, Upload) == uploads}}
        if name not in known:
            expected = f"this device knows {', '.join(known)}; give it others with Device(parts=[...])"
            raise InputError(field, name, expected)
        return known[name]

    def step(self, task: Task) -> LocalStep:
        kind = self._part("local", task.step, LOCAL_STEPS)
        fixed = {name: _hashable(value) for name, value in json.loads(task.fixed).items()}
        return kind(**fixed, **{name: np.float32(value) for name, value in task.numbers_of("step").items()})

    def checked_gradient(self, params: Arrays, x: Any, y: Any, key: NDArray | None) -> Arrays:
        """The user's gradient as named arrays, checked: NumPy would silently broadcast other shapes."""
        given = called(self.gradient, _as_given(params), x, y, key=key)
        named = given if isinstance(given, Mapping) else {str(i): value for i, value in enumerate(given)}
        if set(named) != set(params):
            raise InputError("gradient: names", sorted(named), f"should be {sorted(params)}, like the model's arrays")
        grad = {name: np.asarray(named[name], np.float32) for name in params}
        for name, value in params.items():
            if grad[name].shape != value.shape:
                raise InputError(f"gradient: shape of {name}", grad[name].shape, f"should be {value.shape}")
        return grad


def _hashable(value: Any) -> Any:
    """A setting as it was before it was JSON, which has no tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _as_sent(value: Any) -> NDArray:
    """Numbers in 32 bits; bytes as they are."""
    array = np.asarray(value)
    return array if array.dtype == np.uint8 else array.astype(np.float32, copy=False)


class Known(dict[str, Any]):
    """Values by name, each computed on first use."""

    def __init__(self, **compute: Callable[[], Any]) -> None:
        self.compute = compute

    def __missing__(self, name: str) -> Any:
        self[name] = value = self.compute[name]()
        return value


def _as_given(params: Arrays) -> Any:
    """The model as the user's gradient function takes it. Arrays without names, which Flower numbers, become a list."""
    counted = [str(i) for i in range(len(params))]
    return [params[name] for name in counted] if set(params) == set(counted) else dict(params)


def client_app(make: Callable[[Context], Device], **settings: Any) -> ClientApp:
    """A `ClientApp` that answers the strategies of folb for the device make(context).

    `make` is called for every message; functools.cache can keep its expensive parts. `settings` go to `ClientApp`,
    such as `mods`.
    """
    app = ClientApp(**settings)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        device = make(context)
        return _reply(message, {}, {protocol.IDENTITY: identity(device, context), protocol.SIZE: len(device.y)})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        records = dict(message.content.array_records)
        task = protocol.task(message.content.config_records[protocol.TASK])
        params = sent.model(task, records.pop(protocol.MODEL))
        more = {name: protocol.unpacked(record) for name, record in records.items()}  # SHIFT, MEAN or BEGIN
        arrays, numbers = sent.private(task, *make(context).answer(task, params, **more))
        return _reply(message, sent.encoded(task, arrays, context.state), numbers)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        device = make(context)
        if device.evaluate is None:
            raise InputError("evaluate", None, "should be a function of the model: this device has none")
        metrics = device.evaluate(_as_given(protocol.unpacked(message.content.array_records[protocol.MODEL])))
        return _reply(message, {}, {protocol.SIZE: len(device.y)} | dict(metrics))

    return app


def identity(device: Device, context: Context) -> int:
    number: Any = context.node_config.get("partition-id") if device.identity is None else device.identity
    expected = "should be in the node's config, or `identity` in its Device: a number that never changes"
    check("partition-id", number, number is not None, expected)
    check("identity", number, not isinstance(number, bool) and int(number) == number, "should be a whole number")
    return int(number)


def _reply(message: Message, arrays: Mapping[str, Arrays], numbers: Mapping[str, Any]) -> Message:
    plain: Any = {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}
    records: dict[str, Any] = {name: protocol.packed(value) for name, value in arrays.items()}
    return Message(RecordDict(records | {protocol.METRICS: MetricRecord(plain)}), reply_to=message)


def from_torch(module: Any, loss: Callable[[Any, Any], Any]) -> Callable[..., dict[str, NDArray]]:
    """The gradient of loss(module(x), y) for a PyTorch module's parameters. A loss per sample is averaged.

    The model's arrays are those of `module.named_parameters()`. Each mini-batch step seeds PyTorch's generator
    from its key: in training mode, the same task gives the same dropout. A full gradient is that of
    evaluation mode. A module with running statistics, such as batch norm's, is refused: they would not be averaged.
    """
    import torch

    known = dict(module.named_parameters())
    for name, _ in module.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):  # they follow the batches that it has seen
            expected = "is a running statistic, which the server does not learn: use GroupNorm or LayerNorm instead, or"
            raise InputError("module", name, f"{expected} track_running_stats=False")

    def of_batch(x: Any, y: Any, place: Any) -> None:
        labels = torch.as_tensor(y, device=place)
        if not (labels.is_floating_point() or labels.dtype == torch.bool):
            labels = labels.long()  # as PyTorch's losses need them
        loss(module(torch.as_tensor(x, device=place)), labels).mean().backward()

    def gradient(params: dict[str, NDArray], x: Any, y: Any, key: NDArray | None = None) -> dict[str, NDArray]:
        if set(params) != set(known):
            raise InputError("arrays", sorted(params), f"should be the module's parameters: {sorted(known)}")
        with torch.no_grad():
            for name, parameter in known.items():
                parameter.copy_(torch.from_numpy(np.asarray(params[name], order="C")))
        place = next(iter(known.values())).device
        module.zero_grad()
        if key is None:
            training = [part for part in module.modules() if part.training]
            for part in training:
                # a recurrent layer without dropout has only one mode, and cuDNN has no gradient for evaluation
                part.training = isinstance(part, torch.nn.RNNBase) and not part.dropout
            try:
                of_batch(x, y, place)
            finally:
                for part in training:
                    part.training = True
        else:
            with torch.random.fork_rng([place] if place.type == "cuda" else []):  # the user's own draws do not change
                torch.manual_seed(int(key[0]) << 32 | int(key[1]))
                of_batch(x, y, place)
        return {
            name: np.zeros_like(params[name]) if p.grad is None else p.grad.detach().cpu().numpy().copy()
            for name, p in known.items()
        }

    return gradient


def from_jax(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a JAX function loss(params, x, y). A loss per sample is averaged.

    A loss(params, x, y, key) draws in each mini-batch step what it would draw in the simulator. Arrays named
    `first.weight` are the leaves of a nested dict, as in the models of folb.
    """
    import jax
    import jax.numpy as jnp

    from folb.core.randomness import key_of

    def mean(params: Any, x: Any, y: Any, words: Any) -> Any:
        return jnp.mean(called(loss, params, x, y, key=None if words is None else key_of(words)))

    compiled, draws = jax.jit(jax.grad(mean)), takes_key(loss)

    def gradient(params: Any, x: Any, y: Any, key: NDArray | None = None) -> Any:
        words = key if draws else None
        if isinstance(params, list):
            return [np.asarray(value) for value in compiled(params, x, y, words)]
        return protocol.flat(compiled(protocol.nested(params), x, y, words))

    return gradient
