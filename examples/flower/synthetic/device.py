"""A device: its partition of Synthetic_1_1, and the logistic model's gradient in plain NumPy."""

import numpy as np
from flwr.app import Context

from folb import data
from folb.flower import Device, client_app


def gradient(params, x, y):
    """The gradient of the mean cross-entropy of a batch."""
    scores = x @ params["weight"] + params["bias"]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return {"weight": x.T @ shares / len(y), "bias": shares.mean(axis=0)}


def make(context: Context) -> Device:
    """The device of a node."""
    k, devices = context.node_config["partition-id"], context.node_config["num-partitions"]
    train = data.load("synthetic_1_1", devices=devices).train
    rows = slice(train.start[k], train.start[k] + train.size[k])
    return Device(train.x[rows], train.y[rows], gradient)


app = client_app(make)
