"""Titles in words, for pictures and the page."""

from __future__ import annotations

import os

MODELS = {
    "logistic": "logistic regression",
    "linear": "linear regression",
    "mlp": "perceptron",
    "cnn": "CNN",
    "lenet": "LeNet-5",
    "resnet": "ResNet",
    "char_lstm": "LSTM on characters",
    "sentiment_lstm": "LSTM on words",
}


def title(dataset: str, model: str) -> str:
    """The dataset and the model of an experiment; the user's own by their files' names."""
    dataset, model = (os.path.basename(name) or name for name in (dataset, model))
    return f"{dataset}, {MODELS.get(model, model)}"
