"""The results of an experiment as one JSON-ready document."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from folb.core.accountant import DELTA
from folb.measures import ACCURACY, is_regression
from folb.results.run import Run
from folb.results.summary import finite, plain, short

SOMETIMES = ("evaluate", "device_samples", "metrics", "box", "points", "box_seed")  # keys of only some experiments


def document(experiment: Mapping[str, Any], note: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The results as one JSON-ready document; a value that is not finite becomes null.

    `experiment` has the keys of an experiment file.
    """
    numbers = {judge: is_regression(judge) for judge in {run.judged_by for run in runs}}
    return {
        "dataset": experiment["dataset"],
        "note": note,
        **{key: experiment[key] for key in ("model", "system", "objective", "rounds", "target", "set")},
        **{key: experiment[key] for key in SOMETIMES if key in experiment},
        "runs": [_run(run, experiment["target"], numbers[run.judged_by]) for run in runs],
    }


def _run(run: Run, target: float, predicts_numbers: bool) -> dict[str, Any]:
    metrics = {name: finite(values.tolist()) for name, values in run.metrics.items()}
    seconds, to_target = float(run.seconds.sum()), run.seconds_to(target)
    return {
        "algorithm": run.algorithm,
        "parameters": plain(run.parameters),
        "seed": run.seed,
        "evaluated_rounds": run.evaluated_rounds.tolist(),
        **({} if predicts_numbers else {"test_accuracy": finite(run.test_accuracy.tolist())}),
        "train_loss": finite(run.train_loss.tolist()),
        **({"metrics": metrics} if metrics else {}),
        **({} if run.judged_by == ACCURACY else {"judged_by": run.judged_by}),
        "bytes_up": int(run.bytes_up.sum()),
        "bytes_down": int(run.bytes_down.sum()),
        "seconds": finite([round(seconds, 3)])[0],
        "rounds_to_target": run.rounds_to(target),
        "held_from": run.held_from(target),
        "bytes_to_target": run.bytes_to(target),
        "seconds_to_target": None if to_target is None else finite([round(to_target, 3)])[0],
        "best": finite([run.best])[0],
        "final": finite([run.final])[0],
        "drops": run.drops,
        "idle_rounds": int((~run.updated).sum()),
        **_spent(run),
        "model_sha256": _digest(run.params),
    }


def _spent(run: Run) -> dict[str, Any]:
    """The epsilon of a private run, and its delta: epsilon means nothing without delta."""
    if run.epsilon is None:
        return {}
    given = run.parameters.get("privacy.delta")
    budget = {"epsilon": short(run.epsilon, 6), "delta": DELTA if given is None else float(given)}
    return budget | ({"replay": False} if run.parameters.get("privacy.replay") is False else {})


def _digest(params: Any) -> str | None:
    """A hash that tells whether two runs ended with the same model, to the bit; None without a model."""
    if params is None:
        return None
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(leaf.tobytes())
    return digest.hexdigest()
