"""The models by name, each made from the shape of a sample and the number of classes."""

from __future__ import annotations

from collections.abc import Callable

from folb.models.convolution import cnn, lenet
from folb.models.dense import linear, logistic, mlp
from folb.models.model import Model, classifier, cross_entropy, regressor
from folb.models.recurrent import char_lstm, sentiment_lstm
from folb.models.residual import resnet

__all__ = [
    "MODELS",
    "Model",
    "char_lstm",
    "classifier",
    "cnn",
    "cross_entropy",
    "lenet",
    "linear",
    "logistic",
    "mlp",
    "regressor",
    "resnet",
    "sentiment_lstm",
]

MODELS: dict[str, Callable[..., Model]] = {
    make.__name__: make for make in (logistic, linear, mlp, cnn, lenet, resnet, char_lstm, sentiment_lstm)
}
