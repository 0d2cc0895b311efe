"""How far a simulation is, in lines of text: for a log, a notebook, or wherever no bar can be drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from folb.errors import one_line

EVERY = 10.0  # seconds between two lines
LONG = 60.0  # seconds: a run that takes longer is announced
MEASURED = 2.0  # seconds of rounds after which the rest can be estimated


class Lines:
    """Tells now and then how many of `total` rounds are done, and how long the rest takes; `costs` are of each run.

    The first rounds come with the compilation of the program, so the estimate is made from those that follow.
    """

    def __init__(
        self,
        total: int,
        tell: Callable[[str], None],
        every: float = EVERY,
        about: str = "rounds",
        costs: Sequence[float] = (1.0,),
    ) -> None:
        self.total, self.tell, self.every, self.about, self.costs = total, tell, every, about, costs
        self.done = 0
        self.spent = self.first = 0.0  # the cost of the rounds that are done, and of the first ones
        self.began = self.last = time.monotonic()
        self.played: float | None = None  # when the first rounds were done
        self.announced = False
        self.whole = "1 round" if (total, about) == (1, "rounds") else f"{total} {about}"
        if every < LONG:
            tell(f"compiling the program of {self.whole}")

    def advance(self, rounds: int, run: int = 0, words: str = "") -> None:
        """So many more rounds of a run are done."""
        now = time.monotonic()
        self.done += rounds
        self.spent += rounds * self.costs[run % len(self.costs)]
        if self.played is None:
            self.played, self.first = now, self.spent
        left = self.left(now)
        if not self.announced and left is not None:
            self.announced = True
            if left > LONG:
                self.tell(f"{self.whole} take about {clock(now - self.began + left)}")
                self.last = now
        if now - self.last >= self.every and self.done < self.total:
            self.last = now
            rest = "" if left is None else f", about {clock(left)} left"
            self.tell(f"{self.done} of {self.total} {self.about}{words}{rest}")
        elif self.done >= self.total and now - self.began >= self.every:
            self.tell(f"{self.whole} in {clock(now - self.began)}{words}")

    def left(self, now: float) -> float | None:
        """The seconds that the rest will take; None while nobody knows."""
        if self.played is None or self.spent == self.first or now - self.played < MEASURED:
            return None
        whole = self.total * sum(self.costs) / len(self.costs)
        return max(0.0, whole - self.spent) * (now - self.played) / (self.spent - self.first)


def clock(seconds: float) -> str:
    """A time in words: seconds, minutes, hours or days."""
    if seconds < 100:
        return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}"
    if seconds < 6000:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def tell(line: str) -> None:
    """Write a line about progress to standard error."""
    sys.stderr.write(f"folb: {one_line(line)}\n")
    sys.stderr.flush()
