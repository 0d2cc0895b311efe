"""The devices at work in rounds that do not wait, and the models that they started from: a part of a run's state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.typing import Params

NOBODY = 2**30  # in place of a device's number: larger than any


class Queue(NamedTuple):
    """M places for devices at work, and M rows for the models that they started from, which those of a round share.

    When a round begins, some place is free, and so at most M - 1 rows are in use: one is left for the round's model.
    """

    device: Array  # [M] the device at work, or NOBODY
    number: Array  # [M] the number of its start, which its random words depend on
    left: Array  # [M] seconds until it is done, from the start of the round
    lost: Array  # [M] whether no reply will come then
    row: Array  # [M] the model that it started from
    models: Params  # [M, ...] the rows
    version: Array  # [M] how many steps had led to the model
    lr: Array  # [M] the step size that was sent with it
    started: Array  # devices that have started so far
    steps: Array  # the server's steps so far


def empty_queue(M: int, params: Params) -> Queue:
    """The queue before the first round: all places are free."""
    return Queue(
        device=jnp.full(M, NOBODY, jnp.int32),
        number=jnp.zeros(M, jnp.int32),
        left=jnp.zeros(M, jnp.float32),
        lost=jnp.zeros(M, bool),
        row=jnp.zeros(M, jnp.int32),
        models=jax.tree.map(lambda leaf: jnp.zeros((M, *jnp.shape(leaf)), leaf.dtype), params),
        version=jnp.zeros(M, jnp.int32),
        lr=jnp.zeros(M, jnp.float32),
        started=jnp.int32(0),
        steps=jnp.int32(0),
    )


def sending(queue: Queue, params: Params, lr: Array | float) -> tuple[Queue, Array]:
    """The queue with the model and the step size that devices get from now on, and the row that has them."""
    M = len(queue.row)
    used = jnp.zeros(M, bool).at[jnp.where(queue.device == NOBODY, M, queue.row)].set(True, mode="drop")
    row = jnp.argmin(used).astype(jnp.int32)
    models = jax.tree.map(lambda rows, leaf: rows.at[row].set(leaf), queue.models, params)
    version = queue.version.at[row].set(queue.steps)
    return queue._replace(models=models, version=version, lr=queue.lr.at[row].set(lr)), row
