"""What lying devices gained, from the runs of an experiment with attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from folb.results.run import Run
from folb.results.summary import finite, labels

OF_ATTACKS = ("attack", "attack.share")  # settings that are not part of a rule


@dataclass(frozen=True)
class Outcome:
    """The effect of an attack on one rule, over the seeds."""

    rule: str
    attack: str
    attackers: float  # their share of the devices
    accuracy: Sequence[float]  # the last, for each seed
    share: float  # the liars' part of all absolute weight: the mean over the rounds
    worst: float  # the largest weight that one of them got
    backdoor: float  # the rate of the backdoor in the end: the mean over the seeds


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """An outcome for each rule, attack and share of liars, in the order of the runs."""
    rules = [{name: value for name, value in run.parameters.items() if name not in OF_ATTACKS} for run in runs]
    names = labels([(run.algorithm, own) for run, own in zip(runs, rules, strict=True)])
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for label, run in zip(names, runs, strict=True):
        share = run.parameters["attack.share"]
        key = (label, str(run.parameters["attack"]), 0.2 if share is None else float(share))
        groups.setdefault(key, []).append(run)
    gained = {key: [run.records["attack"] for run in group] for key, group in groups.items()}
    return [
        Outcome(
            *key,
            accuracy=[run.final for run in group],
            share=float(np.mean([part[:, 0] for part in gained[key]])),
            worst=float(np.max([part[:, 1] for part in gained[key]])),
            backdoor=float(np.mean([part[-1, 2] for part in gained[key]])),
        )
        for key, group in groups.items()
    ]


def plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON can hold it."""
    shares = {name: finite([getattr(outcome, name)])[0] for name in ("share", "worst", "backdoor")}
    return asdict(outcome) | {"accuracy": finite(outcome.accuracy)} | shares
