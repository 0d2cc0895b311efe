"""`folb compare`, `run`, `attack` and `resume`: an experiment, run and shown."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folb.cli import options as common

if TYPE_CHECKING:
    from folb.experiments.experiment import Experiment
    from folb.store.directory import RunDirectory


def add(commands: Any) -> None:
    compare = common.command(commands, "compare", "run algorithms side by side on one dataset", _compare)
    compare.add_argument("dataset", metavar="DATASET", help=common.DATASET)
    says = "names of `folb list`, or my_file.py:function (folb, and fedprox and fedavg with both averages)"
    compare.add_argument("--algorithms", metavar="A,B", help=says)
    common.add_experiment(compare)
    compare.add_argument("--quick", action="store_true", help="a minute or two: one seed, few rounds and samples")
    run = common.command(commands, "run", "run an experiment from a TOML file", _run)
    run.add_argument("experiment", metavar="EXPERIMENT.toml", type=Path)
    for command in (compare, run):
        command.add_argument("--out", metavar="DIR", help="the run directory (runs/NAME)")
        says = "keep each device's weight and gamma; with fairness, its accuracy"
        command.add_argument("--records", action="store_true", help=says)
        common.add_running(command, "DATASET" if command is compare else "EXPERIMENT.toml")
        common.add_naming(command)
        common.add_processes(command)
    attack = common.command(commands, "attack", "measure what lying devices gain, rule by rule", _attack)
    says = f"{common.DATASET} (synthetic_1_1)"
    attack.add_argument("dataset", metavar="DATASET", nargs="?", default="synthetic_1_1", help=says)
    attack.add_argument("--algorithms", metavar="A,B", help="names of `folb list` (fedavg,folb,accord)")
    says = "values of robust (for fedavg all; FOLB is plain and guarded, if not given)"
    attack.add_argument("--rules", metavar="A,B", help=says)
    attack.add_argument("--attacks", metavar="A,B", help="attacks of `folb list parts` (most of them)")
    attack.add_argument("--attackers", metavar="A,B", default="0.2", help="shares of the devices that lie (0.2)")
    common.add_experiment(attack, every="only in the end")
    attack.add_argument("--out", metavar="DIR", help="the run directory (runs/NAME; the experiment gives the name)")
    common.add_running(attack, "[DATASET]")
    common.add_naming(attack)


def add_resume(commands: Any) -> None:
    resume = common.command(commands, "resume", "resume an interrupted run", _resume)
    resume.add_argument("run", metavar="RUN", help=common.RUN)
    common.add_running(resume, "RUN")
    common.add_processes(resume)


def _compare(options: argparse.Namespace) -> None:
    settings = common.settings(options.set)
    if options.algorithms is None and not options.quick:
        settings = {"rule.weights": ["equal", "samples"], **settings}  # which average it is matters more than FOLB does
    experiment = common.experiment(options, algorithms=common.words(options.algorithms), set=settings)
    if options.quick:
        from folb.experiments.quick import quick

        experiment = quick(experiment, {name for name, value in vars(options).items() if value is not None})
    _execute(experiment, options)


def _run(options: argparse.Namespace) -> None:
    from folb.experiments.experiment import from_toml

    _execute(from_toml(options.experiment), options)


def _execute(experiment: Experiment, options: argparse.Namespace) -> None:
    from dataclasses import replace

    from folb.cli.running import executed

    common.use_compilation_cache()
    _show(*executed(options, replace(experiment, records=True) if options.records else experiment), options.json)


def _resume(options: argparse.Namespace) -> None:
    from folb.cli.running import completed
    from folb.experiments.execute import resume

    common.use_compilation_cache()
    given = {name: getattr(options, name) for name in ("again", "stream", "track", "keep_model")}
    work = partial(resume, options.run, accelerators=common.accelerators(options, None), **given)
    _show(*completed(options, work), options.json)


def _show(stored: RunDirectory, start: Any, as_json: bool) -> None:
    """Show the results of a run. Of several processes, only the first shows them."""
    from folb.cli import tables
    from folb.results.summary import told_apart
    from folb.store import directory

    if start is None:
        return
    if as_json:
        print(json.dumps(json.loads((stored.path / directory.RESULTS).read_bytes())))
        return
    runs, target = stored.runs(), start.plan.experiment.target
    tables.say(tables.summary(start.plan))
    tables.show_in_parts(tables.results(runs, target))
    if apart := told_apart(runs, target):
        tables.say(f"\n{apart}")
    tables.say(f"\nin {stored.path}: {tables.files(stored)}")


def _attack(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.cli.running import executed, same_command
    from folb.experiments import attack
    from folb.experiments.experiment import Experiment
    from folb.results.outcomes import outcomes, plain

    algorithms = common.words(options.algorithms) or list(attack.ALGORITHMS)
    rules, attacks = common.words(options.rules), common.words(options.attacks) or list(attack.ATTACKS)
    shares = common.words(options.attackers) or []
    chosen = attack.settings(algorithms, rules, attacks, shares, common.settings(options.set))
    if options.evaluate_every is None:
        options.evaluate_every = options.rounds or Experiment.rounds
    experiment = common.experiment(options, algorithms=algorithms, set=chosen)
    common.use_compilation_cache()
    stored, start = executed(options, experiment, same_command())
    ends = outcomes(stored.runs())
    if options.json:
        about = {"dataset": experiment.dataset, "rounds": experiment.rounds, "seeds": list(experiment.seeds)}
        print(json.dumps(about | {"directory": str(stored.path), "outcomes": list(map(plain, ends))}))
        return
    if start is not None:
        tables.say(tables.summary(start.plan))
    for title, table in tables.outcomes(ends):
        tables.say(f"\n{title}")
        tables.show_in_parts(table)
    tables.say(f"\nin {stored.path}: {tables.files(stored)}")
