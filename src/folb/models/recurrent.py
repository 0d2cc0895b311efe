"""The recurrent networks."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from folb.core.whiten import Hidden
from folb.errors import check
from folb.models import dense
from folb.models.model import Model, classifier, made_once
from folb.typing import Params

# both layers of both networks; a gate is a matrix of its own
GATES = tuple(Hidden(f"{layer}.{name}", parts=4) for layer in ("first", "second") for name in ("input", "recurrent"))


@made_once
def char_lstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: Annotated[int, "numbers that stand for a character"] = 8,
    units: Annotated[int, "units of each of the two LSTM layers"] = 256,
) -> Model:
    """The next character from those before it: an embedding, two LSTM layers, and the scores after the last.

    The network of FedProx for Shakespeare: 80 characters, an alphabet of 80.
    """
    dense.at_least_one(embedding=embedding, units=units)
    check("char_lstm: shape of a sample", shape, len(shape) == 1, "should be a row of characters, as integer codes")

    def start(key: Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "embedding": jax.random.uniform(keys[0], (classes, embedding), minval=-0.1, maxval=0.1),
            "first": layer(keys[1], embedding, units),
            "second": layer(keys[2], units, units),
            "scores": dense.drawn(keys[3], (units, classes)),
        }

    def scores(params: Params, x: Array) -> Array:
        # a product with rows of 0 and 1: on a CPU the gradient of a look-up is a slow loop over the rows
        h = dense.product(jax.nn.one_hot(x.T, classes), params["embedding"])
        h = apply(params["second"], apply(params["first"], h))
        return dense.apply(params["scores"], h[-1])

    return classifier(start, scores, heavy=True, codes=classes, hidden=GATES)


@made_once
def sentiment_lstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    units: Annotated[int, "units of each of the two LSTM layers"] = 100,
    hidden: Annotated[int, "units of the dense layer"] = 30,
) -> Model:
    """Positive or negative from the words' vectors: two LSTM layers, a dense layer, and one score.

    The network of FedProx for Sent140: 25 words. Their vectors are part of the data, not parameters.
    """
    dense.at_least_one(units=units, hidden=hidden)
    check("sentiment_lstm: shape of a sample", shape, len(shape) == 2, "should be a row of words, a vector for each")
    check("sentiment_lstm: classes", classes, classes == 2, "should be 2")

    def start(key: Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "first": layer(keys[0], shape[1], units),
            "second": layer(keys[1], units, units),
            "hidden": dense.drawn(keys[2], (units, hidden)),
            "score": dense.drawn(keys[3], (hidden, 1)),
        }

    def score(params: Params, x: Array) -> Array:
        h = apply(params["second"], apply(params["first"], x.swapaxes(0, 1)))
        h = jax.nn.relu(dense.apply(params["hidden"], h[-1]))
        return dense.apply(params["score"], h)[:, 0]

    return Model(
        init=start,
        # -log sigmoid(score) for y = 1, -log sigmoid(-score) for y = 0
        loss=lambda params, x, y: jax.nn.softplus(jnp.where(y == 1, -1.0, 1.0) * score(params, x)),
        predict=lambda params, x: (score(params, x) > 0).astype(jnp.int32),
        heavy=True,
        hidden=(*GATES, Hidden("hidden.weight")),
    )


def layer(key: Array, inputs: int, units: int) -> Params:
    """The initial LSTM layer: Glorot's weights, and biases of 1 for the forget gate and 0 for the others."""
    keys = jax.random.split(key)  # columns: input gate, forget gate, candidate, output gate
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "input": glorot(keys[0], (inputs, 4 * units)),
        "recurrent": glorot(keys[1], (units, 4 * units)),
        "bias": jnp.zeros(4 * units).at[units : 2 * units].set(1.0),
    }


def apply(params: Params, x: Array) -> Array:
    """The output of an LSTM layer at every time step: [time, batch, inputs] -> [time, batch, units]."""
    return unfold(x, params["input"], params["recurrent"], params["bias"])


@jax.custom_jvp
def unfold(x: Array, into: Array, weight: Array, bias: Array) -> Array:
    """The outputs h_t of the cell, whose gates see z_t = x_t V + h_{t-1} W + b."""
    both = jnp.concatenate([into, weight])  # one product per time step: no array of x V over all steps

    def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c, _ = cell(jnp.concatenate([x, carry[0]], axis=-1) @ both + bias, carry[1])
        return (h, c), h

    zero = jnp.zeros((x.shape[1], len(weight)))
    return jax.lax.scan(step, (zero, zero), x)[1]


def cell(z: Array, c: Array) -> tuple[Array, Array, list[Array]]:
    """The output h and the memory c; and the slopes of c (last gate: h) in z, of c in c_{t-1}, of h in c."""
    units = c.shape[-1]
    half, whole = jnp.full(units, 0.5), jnp.ones(units)
    scale = jnp.concatenate([half, half, whole, half])
    shift = jnp.concatenate([half, half, 0 * whole, half])
    # sigmoid(z) = tanh(z / 2) / 2 + 1/2: all gates in one pass; the barrier keeps it from being done twice
    gates = jax.lax.optimization_barrier(jnp.tanh(z * scale) * scale + shift)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    before, c = c, f * c + i * g
    seen = jnp.tanh(c)
    of_z = jnp.concatenate([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), seen * o * (1 - o)], axis=-1)
    return o * seen, c, [of_z, f, o * (1 - seen * seen)]


@unfold.defjvp
def _unfold_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """The derivative. h_{t-1} dW is outside the loop: the gradient of W would else be added up at every time step."""
    (x, into, weight, bias), (dx, dinto, dweight, dbias) = primals, tangents

    def forward(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], list[Array]]:
        h, c, slopes = cell(x + carry[0] @ weight + bias, carry[1])
        return (h, c), [h, *slopes]

    zero = jnp.zeros((x.shape[1], len(weight)))
    h, *slopes = jax.lax.scan(forward, (zero, zero), dense.product(x, into))[1]
    dz = dense.product(dx, into) + dense.product(x, dinto) + dbias
    dz = dz + dense.product(jnp.concatenate([zero[None], h[:-1]]), dweight)
    turned = weight.T  # once, for the backward pass: at every step it would cost as much as the product

    def step(carry: tuple[Array, Array], known: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        dh, dc = carry
        dz, of_z, of_c, through = known
        dz = dz + jax.lax.dot_general(dh, turned, (((1,), (1,)), ((), ())))
        di, df, dg, do = jnp.split(dz * of_z, 4, axis=-1)
        dc = of_c * dc + di + df + dg
        dh = do + through * dc
        return (dh, dc), dh

    return h, jax.lax.scan(step, (zero, zero), (dz, *slopes))[1]
