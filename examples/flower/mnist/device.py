"""A device: its images, and the gradient of a PyTorch CNN."""

import torch
from flwr.app import Context
from network import federation, images, network

from folb.flower import Device, client_app, from_torch


def make(context: Context) -> Device:
    """The device of a node."""
    shared, k = federation(context.run_config["partitions"]), context.node_config["partition-id"]
    rows = slice(shared.train.start[k], shared.train.start[k] + shared.train.size[k])
    x, y = images(shared, shared.train.x[rows]), shared.train.y[rows].astype("int64")
    return Device(x, y, from_torch(network(), torch.nn.functional.cross_entropy))


app = client_app(make)
