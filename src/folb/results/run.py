"""What a run leaves behind, and what is derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from folb.typing import NDArray

HELD = 5  # a target is held if the mean of so many evaluations in a row is at least the target


@dataclass(frozen=True, eq=False)
class Run:
    """One algorithm with one seed: a value per round, beginning with round 1."""

    algorithm: str
    parameters: dict[str, Any]
    seed: int
    evaluated_rounds: NDArray
    test_accuracy: NDArray  # per evaluated round
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

    def __repr__(self) -> str:
        return f"Run({self.algorithm}, seed {self.seed}: {len(self.seconds)} rounds, final accuracy {self.final:.4f})"

    @property
    def diverged(self) -> bool:
        """Whether the last training loss is not finite."""
        return self.loss_measured and len(self.train_loss) > 0 and not np.isfinite(self.train_loss[-1])

    def rounds_to(self, target: float) -> int | None:
        """The first round whose test accuracy is at least `target`."""
        reached = np.flatnonzero(self.test_accuracy >= target)
        return int(self.evaluated_rounds[reached[0]]) if len(reached) else None

    def held_from(self, target: float) -> int | None:
        """The first evaluated round from which the target is held: the mean test accuracy of that round and of the next
        four evaluated rounds is at least `target`.

        None if there is no such round; also if fewer than five rounds were evaluated.
        """
        return held_from(self.evaluated_rounds, self.test_accuracy, target)

    def bytes_to(self, target: float) -> int | None:
        """The bytes up and down until the first round whose test accuracy is at least `target`."""
        reached = self.rounds_to(target)
        return None if reached is None else int(self.bytes_up[:reached].sum() + self.bytes_down[:reached].sum())

    def seconds_to(self, target: float) -> float | None:
        """The seconds until the end of that round."""
        reached = self.rounds_to(target)
        return None if reached is None else float(self.seconds[:reached].sum(dtype=float))

    @property
    def best(self) -> float:
        """The highest test accuracy; NaN if there is none."""
        return float(np.max(self.test_accuracy)) if len(self.test_accuracy) else float("nan")

    @property
    def final(self) -> float:
        """The last test accuracy; NaN if there is none."""
        return float(self.test_accuracy[-1]) if len(self.test_accuracy) else float("nan")

    @property
    def settled(self) -> float:
        """The mean test accuracy over the last five evaluations; NaN if there is none."""
        return float(np.mean(self.test_accuracy[-HELD:], dtype=float)) if len(self.test_accuracy) else float("nan")

    @property
    def epsilon(self) -> float | None:
        """What the rounds have spent, if the run is private."""
        spent = self.records.get("epsilon")
        return None if spent is None or not len(spent) else float(spent[-1])

    @property
    def drops(self) -> int:
        """How often test accuracy fell by more than 5 points from one evaluation to the next."""
        return int(np.sum(np.diff(self.test_accuracy) < -0.05))


def held_from(rounds: NDArray, accuracy: NDArray, target: float) -> int | None:
    """`Run.held_from` of a curve."""
    if len(accuracy) < HELD:
        return None
    means = np.lib.stride_tricks.sliding_window_view(np.asarray(accuracy, float), HELD).mean(axis=1)
    # in single precision, as accuracies are: five evaluations of exactly the target hold it
    held = np.flatnonzero(means.astype(np.float32) >= np.float32(target))
    return int(rounds[held[0]]) if len(held) else None
