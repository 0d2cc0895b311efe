"""A device with a linear model."""

import numpy as np

from folb.flower import Device, client_app


def gradient(params, x, y):
    error = x @ params["weight"] + params["bias"] - y
    return {"weight": x.T @ error / len(y), "bias": error.mean(axis=0)}


def device(context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    inputs = context.run_config.get("inputs", 4)
    x, y = (rng.normal(size=(9, width)).astype(np.float32) for width in (inputs, 3))
    return Device(x, y, gradient)


app = client_app(device)
