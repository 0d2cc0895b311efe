"""The work on this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from work import BATCH, BETA, LOGISTIC, K, Scores, Work, measure, task

from folb import Federation, Model, __version__, algorithms, models, simulate, system

MODELS: dict[str, Callable[..., Model]] = {
    **dict.fromkeys(LOGISTIC, models.logistic),
    "cnn": models.cnn,
    "lstm": models.char_lstm,
}


def federation(work: Work) -> Federation:
    """The data; the test samples are pooled, whatever their device."""
    x, y = np.concatenate([work.x, work.x_test]), np.concatenate([work.y, work.y_test])
    device = np.concatenate([np.repeat(np.arange(work.N), work.size), np.zeros(len(work.y_test), int)])
    test = np.arange(len(y)) >= len(work.y)
    return Federation.from_arrays(work.name, x, y, device, test)


def model(work: Work, shape: tuple[int, ...], classes: int) -> Model:
    """The network, from the start that all libraries share."""
    start: dict[str, Any] = {}
    for name, value in work.initial.items():
        *layer, leaf = name.split(".")
        (start.setdefault(layer[0], {}) if layer else start)[leaf] = value
    return MODELS[work.name](shape, classes)._replace(init=lambda key: start)


def simulation(work: Work, seed: int) -> Callable[[int, int], Scores]:
    """The work as a function of the rounds, and of how often it is evaluated."""
    settings, data = work.settings, federation(work)
    network = model(work, data.shape, data.classes)
    common: dict[str, Any] = {"select.K": K, "select.replacement": False, "local.batch": BATCH, "local.lr": settings.lr}
    if work.name == "folb":
        algorithm = algorithms.folb(local={"mu": settings.mu}, **common)
    elif work.name == "mimelite":
        algorithm = algorithms.mimelite(rule={"weights": "samples"}, memory={"beta": BETA}, **common)
    elif work.name == "scaffold":
        algorithm = algorithms.scaffold(**common)
    else:
        algorithm = algorithms.fedavg(rule={"weights": "samples"}, **common)
    steps = system.fixed(work=settings.steps)

    def run(rounds: int, every: int) -> Scores:
        if work.name == "scaffold":  # the memory has rows for the devices that can be met: all, in the warm-up too
            rounds = max(rounds, -(-work.N // K))
        given = {"rounds": rounds, "evaluate_every": every, "evaluate": "all", "seeds": [seed], "system": steps}
        (found,) = simulate(data, network, algorithm, **given)
        return Scores(float(found.train_loss[-1]), found.final)

    return run


def main() -> None:
    """Measure it."""
    asked = task()
    measure(asked, simulation(asked.work, asked.seed), __version__)


if __name__ == "__main__":
    main()
