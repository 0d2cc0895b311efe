"""What is recorded of a round: its line of rounds.jsonl, and its numbers for Flower's own result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord

from folb.core.upload import GAMMA
from folb.errors import SINGLE
from folb.flower.open_round import OpenRound
from folb.measures import is_measure
from folb.results.summary import short


def metrics(opened: OpenRound) -> MetricRecord:
    """The numbers of a closed round."""
    changing = opened.algorithm.step_size is not None
    return MetricRecord(
        {
            **({"lr": float(opened.algorithm.solver.lr)} if changing else {}),
            **({} if opened.notes.epsilon is None else {"epsilon": opened.notes.epsilon}),
            "asked": len(opened.answers.asked),
            "replied": len(opened.answers.usable),
            "refused": len(opened.notes.rejected),
            "lost": len(opened.lost),
            "abandoned": int(bool(opened.abandoned)),
        }
    )


def line(opened: OpenRound, seconds: float, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """A round as a line of rounds.jsonl, with what each of its devices did in it."""
    drawn, notes, usable = opened.drawn, opened.notes, opened.answers.usable
    identities = sorted(drawn)
    rejected = sorted({identity for identity, _ in notes.rejected if identity is not None})
    lost = opened.lost
    found: dict[str, Any] = {}
    if measured is not None:
        named = {name: _number(measured, name) for name in measured if is_measure(name)}
        if measured.keys() & {"accuracy", "test_accuracy"} or not named:  # a regression has none
            found["test_accuracy"] = _number(measured, "accuracy", "test_accuracy")
        if measured.keys() & {"loss", "train_loss"}:  # null means not finite: a loss that was not measured is left out
            found["train_loss"] = _number(measured, "loss", "train_loss")
        if named:
            found["metrics"] = named
    found |= {
        "bytes_up": notes.up,
        "bytes_down": notes.down,
        "seconds": round(seconds, 3),
        "updated": opened.weights is not None,
        "lost": len(lost),
        "devices": identities,
        "times": [drawn[k] if k in usable else 0 for k in identities],
        "weights": _weights(opened, identities),
        "lost_devices": lost,
        "rejected_devices": [k for k in rejected if k in drawn],
    }
    if notes.epsilon is not None:
        found["epsilon"] = short(notes.epsilon, 6)
    elif any(upload.name == GAMMA.name for upload in opened.uploads):  # of a private round, gammas have no noise
        found["gamma"] = [usable[k].numbers[GAMMA.name] if k in usable else None for k in identities]
    if notes.length:
        found["length"] = notes.length
    troubles: dict[str, Sequence[tuple[Any, str]]] = {
        "refused": notes.rejected,
        "failed": list(notes.failed.items()),
        "shortened": notes.shortened,
    }
    for name, pairs in troubles.items():
        if pairs:
            found[name] = [list(pair) for pair in pairs]
    return found | ({"abandoned": opened.abandoned} if opened.abandoned else {})


def _weights(opened: OpenRound, identities: Sequence[int]) -> list[float | None]:
    """The weight of each device's update; unknown if the server sees only sums."""
    if opened.weights is None or opened.plan is None or len(opened.weights) != len(opened.plan.first.work):
        return [None] * len(identities)
    first, weight = opened.plan.first, dict.fromkeys(identities, 0.0)
    for k, times, value in zip(opened.who(first), first.chosen.times, opened.weights, strict=True):
        if times > 0:
            weight[k] = float(str(value))  # with only the digits of 32 bits
    return [weight[k] for k in identities]


def _number(measured: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that was measured, if it is a number that is finite in 32 bits."""
    found = [measured[name] for name in names if name in measured]
    return float(found[0]) if found and isinstance(found[0], int | float) and abs(found[0]) <= SINGLE else None
