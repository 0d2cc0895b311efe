"""A quick try of an experiment: it takes a minute or two on two cores, whatever the dataset."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import jax

from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan
from folb.models.model import operations
from folb.simulation.settled import usual
from folb.simulation.simulate import FORWARD, round_cost

LEAST, MOST = 5, 50  # rounds
BUDGET = 1e13  # operations of all runs: about a minute and a half on two cores
MOVED = 300  # operations that take as long as reading or writing one number, in a product with few outputs
SAMPLES = 100  # of each device, if the model is costly
EVALUATED = 300  # of each side, if the model is costly


def quick(experiment: Experiment, given: Container[str]) -> Experiment:
    """The experiment with one seed and few rounds; with a costly model, also with few samples of each device.

    Fields whose names are in `given` stay as they are.
    """

    def changed(experiment: Experiment, **values: Any) -> Experiment:
        return replace(experiment, **{name: value for name, value in values.items() if name not in given})

    tried = changed(experiment, seeds=1, rounds=max(MOST, experiment.evaluate_every))
    planned = plan(tried)
    if usual(planned.federation, planned.model) is None or not planned.model.heavy:
        return tried
    tried = changed(tried, device_samples=SAMPLES, evaluate=EVALUATED)
    planned = plan(tried)
    federation, every = planned.federation, experiment.evaluate_every
    of_a_seed = sum(round_cost(planned, planned.system, algorithm) for algorithm in planned.algorithms)
    each = operations(planned.model, jax.ShapeDtypeStruct(federation.shape, federation.kind), MOVED) / FORWARD
    rounds = max(LEAST, every, min(MOST, int(BUDGET / (each * (len(tried.seeds) * of_a_seed)))))
    return changed(tried, rounds=rounds)
