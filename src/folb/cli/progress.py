"""Work in a thread of its own, under a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from folb.cli.signals import how_to_resume
from folb.pace import EVERY, Lines

if TYPE_CHECKING:
    from folb.results.run import Run
    from folb.simulation.simulate import Observe

T = TypeVar("T")
Begin = Callable[[int, Sequence[float]], None]  # shows the bar: the number of rounds, and what each run's cost


def under_progress(options: argparse.Namespace, about: str, work: Callable[[Begin, Observe], T]) -> T:
    """Do some work, and show its progress once it has begun: as a bar or, without a terminal, in lines now and then.

    The main thread receives Ctrl-C and SIGTERM even while the compiler or a long round is at work. It then ends the
    process at once; only the current round is lost.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stop, ended = threading.Event(), threading.Event()
    done: list[T] = []
    failed: list[BaseException] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    drawn = bar.console.is_terminal
    tasks: list[Any] = []
    lines: list[Lines] = []

    def begin(total: int, costs: Sequence[float]) -> None:
        # beside a bar, only a long run is announced
        lines.append(Lines(total, tell, math.inf if drawn else EVERY, about, costs))
        if drawn:
            tasks.append(bar.add_task("compiling", total=total))
            bar.start()

    def tell(line: str) -> None:
        bar.console.print(f"folb: {line}", highlight=False, markup=False, emoji=False, soft_wrap=True)

    def spent(part: Run) -> str:
        """What the run that has just played has spent, if it is private."""
        return f", epsilon {part.epsilon:.3g}" if "epsilon" in part.records else ""

    def end() -> None:
        if tasks:  # otherwise no bar was started
            bar.stop()

    def observe(i: int, first: int, part: Run) -> None:
        if drawn:
            bar.update(tasks[0], description=f"{about}{spent(part)}", advance=len(part.seconds))
        lines[0].advance(len(part.seconds), i, spent(part))
        if stop.is_set():
            raise KeyboardInterrupt

    def working() -> None:
        try:
            done.append(work(begin, observe))
        except BaseException as error:
            failed.append(error)
        ended.set()  # not join(): after an interrupt it would act as if the thread had ended

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        threading.Thread(target=working, daemon=True).start()
        while not ended.wait(0.1):
            pass
    except KeyboardInterrupt:
        stop.set()
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends the wait
            ended.wait(1.5)
        if not ended.is_set():
            end()
            print(f"folb: interrupted{how_to_resume(options)}", file=sys.stderr, flush=True)
            os._exit(130)  # an ordinary exit would wait for the round
        raise
    finally:
        end()
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise failed[0]
    return done[0]
