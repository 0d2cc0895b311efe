"""`folb.execute` under a progress bar, for every command that runs an experiment."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from folb.cli import options as common
from folb.cli.progress import Begin, under_progress
from folb.errors import one_line

if TYPE_CHECKING:
    from folb.experiments.execute import OnStart, Start
    from folb.experiments.experiment import Experiment
    from folb.simulation.simulate import Observe
    from folb.store.directory import RunDirectory


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
    if found := start.first_look():
        tell(str(found))


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
