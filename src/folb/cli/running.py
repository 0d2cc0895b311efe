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
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from folb.cli import options as common
from folb.cli.ctrl_c import interrupted
from folb.pace import EVERY, Lines, tell

if TYPE_CHECKING:
    from folb.experiments.execute import Start
    from folb.experiments.experiment import Experiment
    from folb.experiments.plan import Plan
    from folb.results.run import Run
    from folb.store.directory import RunDirectory

LARGE = 100_000_000  # bytes of model.npz that are said before the first round


def completed(
    options: argparse.Namespace,
    work: Callable[..., RunDirectory],
    *,
    about: str = "rounds",
    command: str | None = None,
    say: bool = True,
) -> tuple[RunDirectory, Start | None]:
    """The run directory that `work(on_start=..., observe=...)` fills, and how it began: only the first process knows.

    `command` resumes it, by default `folb resume`. With `say`, a line on standard error says if nothing was run.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    drawn = bar.console.is_terminal
    started: list[Start] = []
    lines: list[Lines] = []
    stop = threading.Event()
    shown = contextlib.ExitStack()  # closed, it takes the bar away

    def tell_beside(line: str) -> None:
        bar.console.print(f"folb: {line}", highlight=False, markup=False, emoji=False, soft_wrap=True)

    def on_start(start: Start) -> None:
        started.append(start)
        if start.finished:
            return
        together = []
        if getattr(options, "process", None):
            together = ["--coordinator", options.coordinator, "--process", options.process]
        options.going = command or shlex.join(["folb", "resume", str(start.path), *together])
        _announce(start, vars(options).setdefault("announced", set()))
        # beside a bar, only a long run is announced
        lines.append(Lines(start.rounds, tell_beside, math.inf if drawn else EVERY, about, start.costs))
        if drawn:
            bar.add_task("compiling", total=start.rounds)
            shown.enter_context(bar)
        if look := start.first_look():  # what can be said if the first round takes long
            tell(str(look))

    def observe(i: int, first: int, part: Run) -> None:
        spent = f", epsilon {part.epsilon:.3g}" if "epsilon" in part.records else ""
        if drawn:
            bar.update(bar.task_ids[0], description=f"{about}{spent}", advance=len(part.seconds))
        lines[0].advance(len(part.seconds), i, spent)
        if stop.is_set():
            raise KeyboardInterrupt

    options.going = command
    stored = _in_a_thread(options, lambda: work(on_start=on_start, observe=observe), stop, shown.close)
    options.going = None
    if not started:
        return stored, None
    if say and started[0].finished:
        tracked = f" and logs to {options.track}" if options.track else ""
        print(f"folb: {stored.path} is finished already; --again runs it from the start{tracked}", file=sys.stderr)
    return stored, started[0]


def _in_a_thread(
    options: argparse.Namespace, work: Callable[[], RunDirectory], stop: threading.Event, end: Callable[[], None]
) -> RunDirectory:
    """Do some work in a thread of its own, which ends soon after `stop`; then call `end`.

    So Ctrl-C and SIGTERM end the process even while the compiler or a long round is at work.
    """
    ended = threading.Event()
    done: list[RunDirectory] = []
    failed: list[BaseException] = []

    def working() -> None:
        try:
            done.append(work())
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
    if matrices := start.plan.unnamed_matrices:
        tell(
            f"{start.plan.experiment.model} names none of its {matrices} matrices as hidden, so accord treats it as a "
            "model without hidden layers; Model(hidden=[...]) names them"
        )
    if start.model_bytes > LARGE:
        tell(f"{start.path / 'model.npz'} will take {start.model_bytes / 1e6:,.0f} MB; --no-model leaves it out")


def executed(
    options: argparse.Namespace, experiment: Experiment | Plan, command: str | None = None, keep_model: bool = True
) -> tuple[RunDirectory, Start | None]:
    """Run an experiment as the options say; the result is as for `completed`."""
    from folb.experiments.execute import execute

    work = partial(
        execute,
        experiment,
        directory=options.out,
        again=options.again,
        accelerators=common.accelerators(options),
        stream=options.stream,
        track=options.track,
        keep_model=keep_model and options.keep_model is not False,
        name=options.name,
        tags=common.words(options.tags),
    )
    return completed(options, work, command=command)


def same_command() -> str:
    """This command without --again: it then resumes what it did."""
    return shlex.join(["folb", *(word for word in sys.argv[1:] if word != "--again")])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process while jax is imported: its compiled parts lose an exception, or crash.

    Python drops exceptions that are raised during garbage collection, so Ctrl-C is then sent again a moment later.
    """
    collecting = False

    def note(phase: str, about: Any) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def interrupt(number: int, frame: Any) -> None:
        if collecting or any(one.f_code.co_name == "_xla_gc_callback" for one, _ in traceback.walk_stack(frame)):
            threading.Timer(0.02, _thread.interrupt_main).start()
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


def how_to_resume(options: argparse.Namespace) -> str:
    """The last words of an interrupted command. It sets `going` while there is something to resume."""
    return f"; resume with: {options.going}" if getattr(options, "going", None) else ""
