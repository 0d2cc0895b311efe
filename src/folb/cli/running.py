"""`folb.execute` in a thread of its own, under a progress bar, for every command that runs an experiment."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import gc
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from folb.cli import options as common
from folb.cli.ctrl_c import interrupted
from folb.errors import one_line
from folb.pace import EVERY, Lines

if TYPE_CHECKING:
    from folb.experiments.execute import OnStart, Start
    from folb.experiments.experiment import Experiment
    from folb.results.run import Run
    from folb.simulation.simulate import Observe
    from folb.store.directory import RunDirectory

T = TypeVar("T")
Begin = Callable[[int, Sequence[float]], None]  # shows the bar: the number of rounds, and what each run's cost
LARGE = 100_000_000  # bytes of model.npz that are said before the first round


def completed(
    options: argparse.Namespace,
    work: Callable[[OnStart, Observe], RunDirectory],
    *,
    about: str = "rounds",
    command: str | None = None,
    tell: bool = True,
) -> tuple[RunDirectory, Start | None]:
    """The run directory that `work` fills, and how it began. Of several processes, only the first knows how.

    If it is interrupted, `command` resumes it; by default that is `folb resume`. With `tell`, a line on standard error
    says if nothing was run.
    """
    started: list[Start] = []
    options.going = command

    def working(begin: Begin, observe: Observe) -> RunDirectory:
        def on_start(start: Start) -> None:
            started.append(start)
            if not start.finished:
                options.going = command or _resuming(options, start)
                _announce(start, vars(options).setdefault("announced", set()))
                begin(start.rounds, start.costs)
                _look(start)

        return work(on_start, observe)

    stored = under_progress(options, about, working)
    options.going = None
    if not started:
        return stored, None
    if tell and started[0].finished:
        tracked = f" and logs to {options.track}" if options.track else ""
        print(f"folb: {stored.path} is finished already; --again runs it from the start{tracked}", file=sys.stderr)
    return stored, started[0]


def _announce(start: Start, announced: set[str]) -> None:
    """Say what a user should know before the first round; of a dataset once, if a command has many runs."""
    federation = start.plan.federation
    own = os.path.isabs(start.plan.experiment.dataset)
    if federation.held_out and own and federation.name not in announced:
        announced.add(federation.name)
        tell(
            f"{federation.name} does not say what to test on: a random tenth of each device's samples is held out; "
            "a column or array `split` (0 train, 1 test) says it"
        )
    if start.model_bytes > LARGE:
        size = f"{start.model_bytes / 1e6:,.0f} MB"
        tell(f"{start.path / 'model.npz'} will take {size}; --no-model leaves it out")


def _look(start: Start) -> None:
    """Say what can be said if the first round takes long."""
    if look := start.first_look():
        tell(look)


def executed(
    options: argparse.Namespace, experiment: Experiment, command: str | None = None
) -> tuple[RunDirectory, Start | None]:
    """Run an experiment as the options say; the result is as for `completed`."""
    from folb.experiments.execute import execute

    common.use_compilation_cache()
    accelerators = common.accelerators(options)

    def work(on_start: OnStart, observe: Observe) -> RunDirectory:
        return execute(
            experiment,
            directory=options.out,
            again=options.again,
            accelerators=accelerators,
            stream=options.stream,
            track=options.track,
            keep_model=options.keep_model is not False,
            name=options.name,
            tags=common.tags(options),
            on_start=on_start,
            observe=observe,
        )

    return completed(options, work, command=command)


def tell(line: str) -> None:
    """Print a line about progress on standard error."""
    print(f"folb: {one_line(line)}", file=sys.stderr)


def _resuming(options: argparse.Namespace, start: Start) -> str:
    together = ["--coordinator", options.coordinator, "--process", options.process] if options.process else []
    return shlex.join(["folb", "resume", str(start.path), *together])


def same_command() -> str:
    """This command without --again: it then resumes what it did."""
    return shlex.join(["folb", *(word for word in sys.argv[1:] if word != "--again")])


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


AGAIN = 0.02  # seconds


def _collecting(frame: FrameType | None) -> bool:
    """Whether jax's function for garbage collection is running."""
    while frame is not None and frame.f_code.co_name != "_xla_gc_callback":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process while jax is imported: its compiled parts lose an exception, or crash.

    During garbage collection Python calls a function of jax, and functions of weak references, and drops exceptions
    that are raised there. So Ctrl-C is then sent again a moment later.
    """
    collecting = False

    def note(phase: str, about: Any) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def interrupt(number: int, frame: Any) -> None:
        if collecting or _collecting(frame):
            threading.Timer(AGAIN, _thread.interrupt_main).start()
            return
        if getattr(getattr(sys.modules.get("jax"), "__spec__", None), "_initializing", False):
            interrupted(number, frame)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    usual = before in (signal.default_int_handler, interrupted)  # not if somebody ignores it, as nohup does
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.callbacks.append(note)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        gc.callbacks.remove(note)


def leave(options: argparse.Namespace, code: int) -> int:
    """The exit code. One of several processes ends at once instead, because the others are waiting for it."""
    if getattr(options, "process", None) is not None:
        sys.stderr.flush()
        os._exit(code)
    return code


def how_to_resume(options: argparse.Namespace) -> str:
    """The last words of an interrupted command. It sets `going` while there is something to resume."""
    return f"; resume with: {options.going}" if getattr(options, "going", None) else ""
