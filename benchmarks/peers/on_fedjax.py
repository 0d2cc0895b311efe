"""The work on FedJAX: its federated averaging, its MimeLite, and FOLB (13) written with its tools.

Its MimeLite weights the gradients that renew the momentum by samples; folb's does not.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

if not hasattr(jax, "tree_map"):  # gone from JAX since; FedJAX still calls it
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]

import fedjax
import haiku as hk
from work import BATCH, BETA, LOGISTIC, Array, K, Scores, Work, measure, task

GRADIENT_BLOCK = 256  # samples of a device taken at once by a full gradient


def scores(name: str, x: Any) -> Any:
    """The network in Haiku's modules."""
    if name == "cnn":
        for layer, channels in (("first", 32), ("second", 64)):
            x = hk.Conv2D(channels, 3, name=layer)(x if x.ndim == 4 else x[..., None])
            x = hk.max_pool(jax.nn.relu(x), (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(hk.Linear(128, name="hidden")(hk.Flatten()(x)))
        return hk.Linear(62, name="scores")(x)
    if name == "lstm":
        core = hk.DeepRNN([hk.LSTM(256, name="first"), hk.LSTM(256, name="second")])
        x = hk.Embed(80, 8, name="embedding")(x.T)
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(80, name="scores")(x[-1])
    return hk.Linear(10, name="scores")(x)


def initial(work: Work) -> dict[str, dict[str, Any]]:
    """The start that all libraries share, by Haiku's names."""
    values = work.initial
    if work.name in LOGISTIC:
        return {"scores": {"w": values["weight"], "b": values["bias"]}}
    if work.name == "cnn":
        layers = ("first", "second", "hidden", "scores")
        return {layer: {"w": values[f"{layer}.weight"], "b": values[f"{layer}.bias"]} for layer in layers}

    def gates(columns: Array) -> Array:
        i, f, g, o = np.split(columns, 4, axis=-1)
        return np.concatenate([i, g, f, o], axis=-1)

    def lstm(layer: str) -> dict[str, Array]:
        both = np.concatenate([values[f"{layer}.input"], values[f"{layer}.recurrent"]])
        forget = np.repeat(np.array([0, 0, 1, 0], np.float32), 256)  # Haiku adds it to the bias
        return {"w": gates(both), "b": gates(values[f"{layer}.bias"]) - forget}

    return {
        "embedding": {"embeddings": values["embedding"]},
        "first/linear": lstm("first"),
        "second/linear": lstm("second"),
        "scores": {"w": values["scores.weight"], "b": values["scores.bias"]},
    }


def folb(model: fedjax.Model, work: Work, batches: Any) -> fedjax.FederatedAlgorithm:
    """FOLB (13): the devices' full gradients, their proximal updates, and the rule on both."""
    settings = work.settings
    grad = fedjax.model_grad(model)
    blocks = fedjax.PaddedBatchHParams(batch_size=GRADIENT_BLOCK)

    def gradient_init(params: Any, rng: Any) -> Any:
        return {"params": params, "rng": rng, "sum": jax.tree.map(jnp.zeros_like, params), "samples": 0.0}

    def gradient_step(state: Any, block: Any) -> Any:
        samples = jnp.sum(block[fedjax.EXAMPLE_MASK_KEY])
        g = grad(state["params"], block, state["rng"])
        total = jax.tree.map(lambda s, d: s + samples * d, state["sum"], g)
        return {**state, "sum": total, "samples": state["samples"] + samples}

    def gradient_final(params: Any, state: Any) -> Any:
        return jax.tree.map(lambda s: s / state["samples"], state["sum"])

    def solve_init(params: Any, rng: Any) -> Any:
        return {"params": params, "start": params, "rng": rng}

    def solve_step(state: Any, batch: Any) -> Any:
        g = grad(state["params"], batch, state["rng"])

        def descend(v: Any, d: Any, v0: Any) -> Any:
            return v - settings.lr * (d + settings.mu * (v - v0))

        return {**state, "params": jax.tree.map(descend, state["params"], g, state["start"])}

    def solve_final(params: Any, state: Any) -> Any:
        return jax.tree.map(jnp.subtract, state["params"], params)

    gradients = fedjax.for_each_client(gradient_init, gradient_step, gradient_final)
    updates = fedjax.for_each_client(solve_init, solve_step, solve_final)

    @jax.jit
    def rule(params: Any, grads: list[Any], deltas: list[Any]) -> Any:
        flat = jnp.stack([ravel_pytree(g)[0] for g in grads])
        inner = flat @ jnp.mean(flat, axis=0)
        weights = inner / jnp.sum(jnp.abs(inner))
        return jax.tree.map(lambda v, *d: v + jnp.tensordot(weights, jnp.stack(d), 1), params, *deltas)

    def apply(params: Any, clients: Any) -> Any:
        grads = gradients(params, [(k, data.padded_batch(blocks), rng) for k, data, rng in clients])
        deltas = updates(params, [(k, data.shuffle_repeat_batch(batches), rng) for k, data, rng in clients])
        return rule(params, [g for _, g in grads], [d for _, d in deltas]), {}

    return fedjax.FederatedAlgorithm(lambda params: params, apply)


def main() -> None:
    """Measure it."""
    asked = task()
    work = asked.work
    network = hk.transform(lambda batch: scores(work.name, batch["x"]))
    model = fedjax.create_model_from_haiku(
        network,
        {"x": work.x[:BATCH], "y": work.y[:BATCH]},
        lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output),
        {"accuracy": fedjax.metrics.Accuracy()},
    )
    devices = {b"%04d" % k: {"x": work.x[work.rows(k)], "y": work.y[work.rows(k)]} for k in range(work.N)}
    federation = fedjax.InMemoryFederatedData(devices)
    # a seed here would give a device the same batches in every round
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=work.settings.steps)
    if work.name == "folb":
        algorithm = folb(model, work, batches)
    elif work.name == "mimelite":
        algorithm = fedjax.algorithms.mime_lite.mime_lite(
            fedjax.model_per_example_loss(model),
            # its momentum is a sum, not a mean: the steps are 1 / (1 - BETA) times as long
            fedjax.optimizers.sgd(work.settings.lr * (1 - BETA), momentum=BETA),
            batches,
            fedjax.PaddedBatchHParams(batch_size=GRADIENT_BLOCK),
            1.0,
        )
    else:
        algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            fedjax.model_grad(model), fedjax.optimizers.sgd(work.settings.lr), fedjax.optimizers.sgd(1.0), batches
        )

    def evaluation(x: Array, y: Array) -> list[Any]:
        """The blocks of an evaluation, brought to the accelerator once."""
        blocks = fedjax.ClientDataset({"x": x, "y": y}).padded_batch(batch_size=min(work.block, len(y)))
        return [jax.device_put(block) for block in blocks]

    train, test = evaluation(work.x, work.y), evaluation(work.x_test, work.y_test)
    loss, key = fedjax.model_per_example_loss(model), jax.random.PRNGKey(asked.seed)
    start = jax.device_put(initial(work))

    def run(rounds: int, every: int) -> Scores:
        sampler = fedjax.client_samplers.UniformGetClientSampler(federation, K, asked.seed)
        state = algorithm.init(start)
        for t in range(1, rounds + 1):
            state, _ = algorithm.apply(state, sampler.sample())
            if t % every == 0:
                params = state if work.name == "folb" else state.params
                found = fedjax.evaluate_average_loss(params, train, key, loss)
                measured = Scores(float(found), float(fedjax.evaluate_model(model, params, test)["accuracy"]))
        return measured

    measure(asked, run, version("fedjax"))


if __name__ == "__main__":
    main()
