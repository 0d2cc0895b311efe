"""How far a simulation is, in lines of text: for a log, a notebook, or wherever no bar can be drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY = 10.0  # seconds between two lines
LONG = 60.0  # seconds: a run that takes longer is announced
MEASURED = 2.0  # seconds of rounds after which the rest can be estimated


class Lines:
    """Tells now and then how many of `total` rounds are done, and how long the rest takes.

    The first rounds come with the compilation of the program, so the estimate is made from those that follow.
    """

    def __init__(self, total: int, tell: Callable[[str], None], every: float = EVERY, about: str = "rounds") -> None:
        self.total, self.tell, self.every, self.about = total, tell, every, about
        self.done = self.first = 0
        self.began = self.told = time.monotonic()
        self.played: float | None = None  # when the first rounds were done
        self.announced = False
        if every < LONG:
            tell(f"compiling the program of {total} {about}")

    def advance(self, rounds: int) -> None:
        """So many more rounds are done."""
        now = time.monotonic()
        self.done += rounds
        if self.played is None:
            self.played, self.first = now, self.done
        left = self.left(now)
        if not self.announced and left is not None:
            self.announced = True
            if left > LONG:
                self.tell(f"{self.total} {self.about} take about {clock(now - self.began + left)}")
                self.told = now
        if now - self.told >= self.every and self.done < self.total:
            self.told = now
            rest = "" if left is None else f", about {clock(left)} left"
            self.tell(f"{self.done} of {self.total} {self.about}{rest}")
        elif self.done >= self.total and now - self.began >= self.every:
            self.tell(f"{self.total} {self.about} in {clock(now - self.began)}")

    def left(self, now: float) -> float | None:
        """The seconds that the rest will take; None while nobody knows."""
        if self.played is None or self.done == self.first or now - self.played < MEASURED:
            return None
        return (self.total - self.done) * (now - self.played) / (self.done - self.first)


def clock(seconds: float) -> str:
    """A time in words: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(f"folb: {line}", file=sys.stderr, flush=True)
