"""`folb tune`: the line search."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from folb.cli import options as common

if TYPE_CHECKING:
    from folb.experiments.plan import Plan
    from folb.experiments.tune import Point
    from folb.store.directory import RunDirectory


def add(commands: Any, whole: bool) -> None:
    """`folb tune`. The options for the algorithms' settings need jax, and are added only if `whole`."""
    says = "the line search: find an algorithm's best settings in a grid or a box"
    tune = common.command(commands, "tune", says, _tune)
    tune.add_argument("dataset", metavar="DATASET", help=common.DATASET)
    tune.add_argument("--algorithm", required=True, metavar="NAME", help="of `folb list`, or my_file.py:NAME")
    if whole:
        from folb.experiments.tune import sweepable

        for name in sweepable():
            spelt = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            tune.add_argument(*spelt, dest=f"sweep_{name}", metavar="V1,V2", help=argparse.SUPPRESS)
    common.add_experiment(tune)
    common.add_box(tune)
    tune.add_argument("--points", type=int, metavar="N", help="how many points to draw from the box (12)")
    tune.add_argument("--box-seed", type=int, metavar="S", help="the seed of this draw (0)")
    ranks = ("first", "sustained", "seconds", "bytes")
    rounds = "the first round at the target (first), the first round from which five evaluations have a mean of it"
    says = f"rank by {rounds} (sustained), the seconds or the bytes until the target"
    tune.add_argument("--by", choices=ranks, default="first", metavar="WORD", help=says)
    tune.add_argument("--report-seeds", metavar="N", help="of the winner: how many seeds after the others, or a list")
    common.add_running(tune, "--algorithm NAME DATASET")
    tune.epilog = f"""Every setting of the algorithm is an option, too, which takes the values to try:
--select.K 5,10 --local.mu 0,1. `folb list NAME` shows an algorithm's settings.

{common.RUNS}"""
    common.add_naming(tune)
    tune.set_defaults(out=None)


def _tune(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.cli.running import executed, same_command
    from folb.experiments import tune
    from folb.store import directory

    named = [f"{name}={value}" for name in tune.sweepable() if (value := getattr(options, f"sweep_{name}")) is not None]
    settings = common.settings([*options.set, *named])
    box = {"box": common.settings(options.box, "box"), "points": options.points, "box_seed": options.box_seed}
    experiment = common.experiment(options, algorithms=[options.algorithm], set=settings, **box)
    wanted = None if options.report_seeds is None else common.seeds(options.report_seeds, "report_seeds")
    seeds = tune.other_seeds(experiment.seeds, wanted)
    common.use_compilation_cache()

    def complete(planned: Plan, keep_model: bool = True) -> RunDirectory:
        # `folb resume` would finish the grid, but not run the winner
        return executed(options, planned, same_command(), keep_model)[0]

    def show(planned: Plan, points: Sequence[Point]) -> None:
        if not options.json:
            tables.say(tables.summary(planned))
            if drawn := tune.drawn(planned.experiment):
                tables.say(f"{drawn}\n")
            tables.show_in_parts(tables.points(points, planned.experiment.target), keys=2)

    search = tune.search(experiment, seeds, options.stream, complete, show, options.by)
    if options.json:
        reported = json.loads((search.winner.path / directory.RESULTS).read_bytes())
        print(json.dumps(tune.document(search.planned, search.points, seeds, reported, options.by)))
        return
    tables.say("\n" + tune.verdict(search.planned, search.points, seeds, options.by) + "\n")
    tables.show_in_parts(tables.results(search.winner.runs(), experiment.target))
    tables.say(f"\nin {search.grid.path}: the grid, and winner.toml; in {search.winner.path}: the winner")
