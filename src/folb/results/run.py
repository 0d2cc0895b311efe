"""What a run leaves behind, and what is derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from folb.measures import ACCURACY, Metric, measure
from folb.typing import NDArray

HELD = 5  # a target is held if the mean of so many evaluations in a row reaches it


@dataclass(frozen=True, eq=False)
class Run:
    """One algorithm with one seed: a value per round, beginning with round 1."""

    algorithm: str
    parameters: dict[str, Any]
    seed: int
    evaluated_rounds: NDArray
    test_accuracy: NDArray  # per evaluated round; NaN if the model predicts numbers
    train_loss: NDArray  # per evaluated round
    bytes_up: NDArray
    bytes_down: NDArray
    seconds: NDArray  # simulated; on Flower, real
    devices: NDArray  # [rounds, K]
    times: NDArray  # [rounds, K]; 0: drawn again, or lost
    lost: NDArray  # [rounds, K]; chosen, but without a usable reply
    updated: NDArray  # False: no usable reply, or no weight; the model did not change
    params: Any = None
    loss_measured: bool = True  # on Flower the user may leave it out
    records: dict[str, NDArray] = field(default_factory=dict)
    metrics: dict[str, NDArray] = field(default_factory=dict)  # per evaluated round, by name
    shown: dict[str, Metric] = field(default_factory=dict)  # how those of `metrics` are shown that a user wrote
    judged_by: str = ACCURACY  # the metric that a target is for

    def __repr__(self) -> str:
        final = f"final {self.measure.short} {self.final:.4f}"
        return f"Run({self.algorithm}, seed {self.seed}: {len(self.seconds)} rounds, {final})"

    @cached_property
    def measure(self) -> Metric:
        """What is known of the metric that it is judged by: its words, and whether lower is better."""
        return measure(self.judged_by)

    @property
    def judged(self) -> NDArray:
        """The metric that a target is for, per evaluated round: the test accuracy, unless the model says otherwise."""
        return self.test_accuracy if self.judged_by == ACCURACY else self.metrics[self.judged_by]

    @property
    def diverged(self) -> bool:
        """Whether the last training loss is not finite."""
        return self.loss_measured and len(self.train_loss) > 0 and not np.isfinite(self.train_loss[-1])

    @property
    def diverged_at_once(self) -> bool:
        """Whether the training loss after the first round is not finite already."""
        return self.diverged and self.evaluated_rounds[0] == 1 and not np.isfinite(self.train_loss[0])

    def rounds_to(self, target: float) -> int | None:
        """The first round whose test accuracy is at least `target`; if lower is better, whose error is at most that."""
        return _first(self.evaluated_rounds, self.judged, target, self.measure.lower)

    def held_from(self, target: float) -> int | None:
        """The first evaluated round for which the mean over it and the next four evaluated ones reaches the target."""
        return held_from(self.evaluated_rounds, self.judged, target, self.measure.lower)

    def bytes_to(self, target: float) -> int | None:
        """The bytes up and down until the first round that reaches `target`."""
        reached = self.rounds_to(target)
        return None if reached is None else int(self.bytes_up[:reached].sum() + self.bytes_down[:reached].sum())

    def seconds_to(self, target: float) -> float | None:
        """The seconds until the end of that round."""
        reached = self.rounds_to(target)
        return None if reached is None else float(self.seconds[:reached].sum(dtype=float))

    @property
    def best(self) -> float:
        """The highest test accuracy, or the lowest error; NaN if there is none."""
        best = np.min if self.measure.lower else np.max
        return float(best(self.judged)) if len(self.judged) else float("nan")

    @property
    def final(self) -> float:
        """The last test accuracy or error; NaN if there is none."""
        return float(self.judged[-1]) if len(self.judged) else float("nan")

    @property
    def settled(self) -> float:
        """The mean test accuracy or error over the last five evaluations; NaN if there is none."""
        return float(np.mean(self.judged[-HELD:], dtype=float)) if len(self.judged) else float("nan")

    @property
    def epsilon(self) -> float | None:
        """What the rounds have spent, if the run is private."""
        spent = self.records.get("epsilon")
        return None if spent is None or not len(spent) else float(spent[-1])

    @property
    def drops(self) -> int:
        """How often it fell by more than 5 points from one evaluation to the next; an error: rose by more than 5 %."""
        if self.measure.lower:
            return int(np.sum(self.judged[1:] > 1.05 * self.judged[:-1]))
        return int(np.sum(np.diff(self.judged) < -0.05))


def _first(rounds: NDArray, values: NDArray, target: Any, lower: bool) -> int | None:
    reached = np.flatnonzero(values <= target if lower else values >= target)
    return int(rounds[reached[0]]) if len(reached) else None


def held_from(rounds: NDArray, values: NDArray, target: float, lower: bool = False) -> int | None:
    """`Run.held_from` of a curve."""
    if len(values) < HELD:
        return None
    means = np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), HELD).mean(axis=1)
    # in single precision, as accuracies are: five evaluations of exactly the target hold it
    return _first(rounds, means.astype(np.float32), np.float32(target), lower)
