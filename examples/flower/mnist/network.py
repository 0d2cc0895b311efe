"""The CNN, and the split of the images over the devices."""

from typing import Any

from torch import nn

from folb import data


def network() -> nn.Module:
    """Two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def federation(partitions: int) -> data.Federation:
    """MNIST, with a different mixture of digits on each device; `folb data fetch mnist` downloads the files."""
    return data.load("mnist", partition="dirichlet", alpha=0.5, devices=partitions)


def images(federation: data.Federation, x: Any) -> Any:
    """Bytes in the form that the network needs: [n, 1, 28, 28], standardised."""
    assert federation.expand is not None
    return federation.expand(federation.table, x)[:, None]
