"""The data of each work, and the network as it starts: made once, and written for all libraries to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from work import LOGISTIC, Array

from folb import Model, data, models


def write(name: str, path: Path) -> None:
    """Make a work's federation and its initial network."""
    make = synthetic if name in LOGISTIC else {"cnn": images, "lstm": text}[name]
    arrays, model = make()
    fields: dict[str, Any] = arrays | flat(model.init(jax.random.key(0)), "initial")
    np.savez(path, **fields)


def flat(params: Any, name: str) -> dict[str, Array]:
    """The leaves of nested dictionaries by their path, such as "initial.first.weight"."""
    if not isinstance(params, dict):
        return {name: np.asarray(params)}
    return {key: leaf for part in params for key, leaf in flat(params[part], f"{name}.{part}").items()}


def synthetic() -> tuple[dict[str, Array], Model]:
    """Synthetic_1_1, and logistic regression 60 -> 10."""
    federation = data.load("synthetic_1_1")
    train, test = federation.train, federation.test
    arrays = {"x": train.x, "y": train.y, "start": train.start, "size": train.size, "x_test": test.x, "y_test": test.y}
    return arrays, models.logistic(federation.shape, federation.classes)


def images() -> tuple[dict[str, Array], Model]:
    """200 devices with about 100 images of 31 out of 62 classes each: noisy copies of one image for each class."""
    rng = np.random.default_rng(0)
    classes, N, tests = 62, 200, 1000
    size = np.clip(rng.normal(100, 20, N), 40, 200).astype(np.int32)
    own = [rng.choice(rng.choice(classes, 31, replace=False), n) for n in size]
    prototypes = rng.normal(size=(classes, 28, 28))

    def copies(y: Array) -> Array:
        return (prototypes[y] + rng.normal(size=(len(y), 28, 28))).astype(np.float32)

    y, y_test = np.concatenate(own).astype(np.int32), rng.integers(0, classes, tests).astype(np.int32)
    return _arrays(copies(y), y, size, copies(y_test), y_test), models.cnn((28, 28), classes)


def text() -> tuple[dict[str, Array], Model]:
    """100 devices with about 20 windows of 80 characters each, as unequally frequent as those of a language."""
    rng = np.random.default_rng(0)
    classes, N, tests = 80, 100, 200
    size = rng.integers(10, 31, N).astype(np.int32)
    frequency = 1 / np.arange(1, classes + 1)
    x = rng.choice(classes, (size.sum() + tests, 81), p=frequency / frequency.sum()).astype(np.int32)
    train, test = x[:-tests], x[-tests:]
    arrays = _arrays(train[:, :80], train[:, 80], size, test[:, :80], test[:, 80])
    return arrays, models.char_lstm((80,), classes)


def _arrays(x: Array, y: Array, size: Array, x_test: Array, y_test: Array) -> dict[str, Array]:
    start = (np.cumsum(size) - size).astype(np.int32)
    return {"x": x, "y": y, "start": start, "size": size, "x_test": x_test, "y_test": y_test}
