"""Programs that play at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

import jax

if TYPE_CHECKING:
    from folb.results.run import Run

# told of rounds as they complete: the first of them, and the part of each run that a program plays
Observer = Callable[[int, Mapping[int, "Run"]], None]
T = TypeVar("T")


class Stopped(BaseException):
    """Another program failed, or the user interrupted them all."""


def played(play: Callable[[int, Observer], T], programs: int, together: int, observers: Sequence[Observer]) -> list[T]:
    """play(number, tell) for each program, some of them `together`. Calls of tell(), for all observers, never overlap.

    If one fails or is interrupted, the others stop after the rounds that they are at.
    """
    stop, alone = threading.Event(), threading.Lock()
    place = jax.config.jax_default_device  # type: ignore[attr-defined]  # it may hold for this thread only

    def tell(first: int, parts: Mapping[int, Run]) -> None:
        with alone:
            if stop.is_set():
                raise Stopped
            for observe in observers:
                observe(first, parts)

    def work(number: int) -> T:
        if stop.is_set():
            raise Stopped
        try:
            with jax.default_device(place):
                return play(number, tell)
        except BaseException:
            stop.set()
            raise

    if together == 1:
        return [play(number, tell) for number in range(programs)]
    with ThreadPoolExecutor(together, thread_name_prefix="folb-play") as pool:
        futures = [pool.submit(work, number) for number in range(programs)]
        try:
            wait(futures)
        finally:
            stop.set()  # Ctrl-C ends the wait
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, Stopped)):
        raise error
    return [future.result() for future in futures]
