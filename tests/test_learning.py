"""Each real dataset with its default model and lr learns within 20 rounds. `pytest -rP` prints the figures."""

import os

import numpy as np
import pytest

from folb.experiments.execute import execute
from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("FOLB_DATA" not in os.environ, reason="FOLB_DATA is not set"),
]


def learned(dataset, **settings):
    """The federation, and the accuracy and training loss of FedAvg after 20 rounds of 20 units of work."""
    experiment = Experiment(
        dataset, algorithms=["fedavg"], system="fixed", seeds=1, rounds=20, evaluate_every=20, set=settings
    )
    planned = plan(experiment)
    (result,) = execute(planned).runs()
    counts = np.bincount(planned.federation.test.y)
    majority = counts.max() / counts.sum()
    accuracy, loss = result.final, float(result.train_loss[-1])
    lr = result.parameters["local.lr"]
    print(
        f"{dataset} {settings}, {experiment.model}, lr {lr}: accuracy {100 * accuracy:.1f} %,"
        f" of the commonest label alone {100 * majority:.1f} %; training loss {loss:.3f}"
    )
    return planned.federation, accuracy, loss, majority


def test_mnist_logistic():
    _, accuracy, _, _ = learned("mnist")
    assert accuracy > 0.75


def test_femnist_logistic():
    """lr 0.003 is for FedProx's 20 epochs a round, not for as many mini-batches."""
    _, accuracy, _, _ = learned("femnist", **{"local.unit": "epoch"})
    assert accuracy > 0.3


def test_sent140_lstm():
    """The loss is less than that of any constant answer: the model tells tweets apart, not only their frequency.

    The sample has 3,865 tweets to learn from. A central logistic regression on the mean of a tweet's vectors gets 71 %
    right; 66 % are happy.
    """
    federation, accuracy, loss, majority = learned("sent140", work=10, **{"select.K": 60})
    happy = federation.train.y.mean()
    constant = -happy * np.log(happy) - (1 - happy) * np.log(1 - happy)
    assert loss < constant - 0.01
    assert accuracy > majority - 0.02


def test_shakespeare_lstm():
    """Four roles of 900 to 3,200 windows, one of them a round: 2,000 mini-batches in all, a fraction of FedProx's."""
    _, accuracy, _, majority = learned("shakespeare", devices=4, draw=20, work=100, **{"select.K": 1})
    assert majority < 0.19
    assert accuracy > 0.21
