"""The command line. Only what a command needs is imported, so that `folb --help` answers at once."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from folb import __version__
from folb.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from folb.experiments.experiment import Experiment
    from folb.experiments.plan import Plan
    from folb.results.run import Run
    from folb.simulation.simulate import Observe

EXAMPLES = """examples:
  folb compare synthetic_1_1
  folb compare synthetic_1_1 --algorithms folb,fedavg --rounds 200 --seeds 5 --target 0.8
  folb compare synthetic_1_1 --set mu=0.001,0.01,0.1 --set averaging=simple,samples
  folb compare path/to/leaf/data --model logistic --system deadline --set tau=10 --json
  folb run experiment.toml
  folb tune synthetic_1_1 --algorithm folb_hetero --mu 0.01,0.1,1 --psi 0.1,1,10 --seeds 5
  folb reproduce table1 --quick
  folb attack
  folb data info mnist --set partition=dirichlet --set alpha=0.1 --out mnist.png
"""


DATASET = "a dataset of `folb list`, a LEAF directory, one of .npy files, an .npz, a .csv or a .parquet"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"folb: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parser(tuning: bool = False) -> argparse.ArgumentParser:
    """The commands and their options; those of `tune` that are the algorithms' settings need jax, and wait for it."""
    top = Parser(
        prog="folb",
        description="Fast-convergent federated learning: simulate and compare FOLB and its family.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"folb {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    compare = commands.add_parser("compare", help="run algorithms side by side on one dataset")
    compare.add_argument("dataset", metavar="DATASET", help=DATASET)
    compare.add_argument(
        "--algorithms", metavar="A,B", help="names of `folb list`, or my_file.py:function (folb,fedprox,fedavg)"
    )
    _add_experiment(compare)
    compare.set_defaults(handle=_compare)

    run = commands.add_parser("run", help="run an experiment from a TOML file")
    run.add_argument("experiment", metavar="EXPERIMENT.toml", type=Path)
    run.set_defaults(handle=_run)
    for command in (compare, run):
        command.add_argument("--out", metavar="DIR", help="the run directory (runs/NAME, by the experiment's content)")
        command.add_argument("--records", action="store_true", help="keep every device's weight and gamma, too")
        _add_running(command)
        _add_processes(command)
    _add_tune(commands, tuning)
    _add_reproduce(commands)
    _add_attack(commands)
    _add_runs(commands)
    _add_deploy(commands)

    listing = commands.add_parser("list", help="algorithms, datasets, models and system models, with their settings")
    listing.set_defaults(handle=_list)
    _add_data(commands)
    return top


def _add_experiment(command: argparse.ArgumentParser) -> None:
    """The experiment's choices but for the algorithms."""
    command.add_argument("--model", help="a model of `folb list`, or my_file.py:function (by dataset)")
    command.add_argument("--system", help="a system model of `folb list`, or my_file.py:function (uniform)")
    command.add_argument("--objective", help="(1) with weights 'uniform' (1/N) or 'samples' (n_k/n) (uniform)")
    command.add_argument("--rounds", type=int, help="communication rounds (100)")
    command.add_argument("--seeds", help="how many seeds (3), or a list such as 4,5,6")
    command.add_argument("--target", type=float, help="accuracy for 'rounds to target' (0.7)")
    command.add_argument("--evaluate-every", type=int, metavar="N", help="evaluate every N rounds (1)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of `folb list`; KEY=V1,V2 sweeps an algorithm's setting; NAME.KEY=VALUE is for NAME alone",
    )


def _add_tune(commands: Any, tuning: bool) -> None:
    tune = commands.add_parser("tune", help="the line search: the best of a grid of an algorithm's settings")
    tune.add_argument("dataset", metavar="DATASET", help=DATASET)
    tune.add_argument("--algorithm", required=True, help="a name of `folb list`, or my_file.py:function")
    if tuning:
        from folb.experiments.tune import sweepable

        for name, meaning in sweepable().items():
            spelt = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            tune.add_argument(*spelt, dest=f"sweep_{name}", metavar="V1,V2", help=meaning.replace("%", "%%"))
    _add_experiment(tune)
    tune.add_argument(
        "--report-seeds",
        help="the seeds the winner is reported on, none of --seeds: how many, from the next one on, or a list",
    )
    _add_running(tune)
    tune.set_defaults(handle=_tune)


def _add_reproduce(commands: Any) -> None:
    reproduce = commands.add_parser("reproduce", help="the paper's figures and tables again, a verdict for each claim")
    reproduce.add_argument(
        "names", metavar="NAME", nargs="+", help="table1, fig2, … fig11, theory, all, or an experiment file of your own"
    )
    reproduce.add_argument("--quick", action="store_true", help="minutes on two cores: few seeds, fewer rounds")
    reproduce.add_argument(
        "--only", metavar="ARM", action="append", help="run these arms alone, such as table1-mnist-* (may be repeated)"
    )
    reproduce.add_argument("--pages-only", action="store_true", help="run nothing: the pages from the stored results")
    reproduce.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="results and pages (docs/reproduction if there is one, else reproduction; reproduction-quick)",
    )
    reproduce.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    _add_devices(reproduce)
    reproduce.set_defaults(handle=_reproduce, again=False, track=None)


def _add_attack(commands: Any) -> None:
    attack = commands.add_parser("attack", help="devices that lie: what it buys them in FOLB, guarded FOLB and FedAvg")
    attack.add_argument(
        "dataset", metavar="DATASET", nargs="?", default="synthetic_1_1", help=f"{DATASET} (synthetic_1_1)"
    )
    attack.add_argument(
        "--attackers", type=int, help="how many devices lie (one in ten); as colluders three times as many"
    )
    attack.add_argument("--model", help="a model of `folb list`, or my_file.py:function (by dataset)")
    attack.add_argument("--system", help="a system model of `folb list`, or my_file.py:function (uniform)")
    attack.add_argument("--rounds", type=int, help="communication rounds (100)")
    attack.add_argument("--seeds", help="how many seeds (3), or a list such as 4,5,6")
    attack.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of `folb list`, such as cap=3; psi is 1 unless set",
    )
    attack.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    attack.set_defaults(handle=_attack, objective=None, target=None, evaluate_every=None)


DISK = """
On disk a run takes at most 250 bytes and the algorithm's label for each of its rounds (with --records 100 more, and 60
for each device chosen), and 1 MB for settings, results and the picture; results.json has another 50 bytes for each
evaluation. While it runs there are three checkpoints: for each run, the model, the server's memory, and for each round
so far 50 bytes and 9 for each device chosen (with --records 17). What --track leaves comes on top. Run directories are
in FOLB_RUNS, else in ./runs.
"""


def _add_running(command: argparse.ArgumentParser) -> None:
    """What all commands have that run an experiment."""
    command.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    command.add_argument("--again", action="store_true", help="run it anew, if it is there already")
    command.add_argument(
        "--track",
        choices=("tensorboard", "mlflow", "wandb"),
        help="log the rounds as they happen, too, in the run directory",
    )
    _add_devices(command)
    command.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="keep the samples on the host, a round's devices travel (if they take half of the accelerator's memory)",
    )
    command.epilog, command.formatter_class = DISK, argparse.RawDescriptionHelpFormatter


def _add_devices(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--devices",
        metavar="auto|N",
        help="accelerators that share a round: all there are, or how many (1; for a resumed run, as it began)",
    )


def _add_processes(command: argparse.ArgumentParser) -> None:
    """For accelerators that several processes have."""
    command.add_argument(
        "--process",
        metavar="I/N",
        help="this is process I (from 0) of N that run the same command; process 0 keeps the run directory",
    )
    command.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others")


RUN = "a run's name, the beginning of it, its directory, or 'last' for the newest"


def _add_runs(commands: Any) -> None:
    listing = commands.add_parser("runs", help="list the runs: state, progress, best accuracy, when")
    listing.set_defaults(handle=_runs)
    show = commands.add_parser("show", help="a run's results so far, its settings, and how to go on")
    show.add_argument("run", metavar="RUN", help=RUN)
    show.set_defaults(handle=_show)
    export = commands.add_parser("export", help="a run's rounds as csv or parquet, or its table as latex")
    export.add_argument("run", metavar="RUN", help=RUN)
    export.add_argument("--format", required=True, choices=("csv", "parquet", "latex"))
    export.add_argument("-o", "--output", metavar="FILE", help="the file to write (csv and latex: standard output)")
    export.set_defaults(handle=_export)
    page = commands.add_parser("report", help="runs as one self-contained page to open in a browser")
    page.add_argument("run", metavar="RUN", nargs="+", help=RUN)
    page.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the file to write (report.html)")
    page.add_argument("--figures", action="store_true", help="beside it, the curves of each run as png, svg and pdf")
    page.set_defaults(handle=_report)
    watch = commands.add_parser("watch", help="the same page, live, on this machine alone")
    watch.add_argument("run", metavar="RUN", nargs="?", help=f"{RUN} (all runs)")
    watch.add_argument("--port", type=int, help="the port on 127.0.0.1 (8470); 0 for any that is free")
    watch.set_defaults(handle=_watch)
    resume = commands.add_parser("resume", help="go on with a run that was interrupted")
    resume.add_argument("run", metavar="RUN", help=RUN)
    _add_running(resume)
    _add_processes(resume)
    resume.set_defaults(handle=_resume)
    remove = commands.add_parser("rm", help="remove runs")
    remove.add_argument("run", metavar="RUN", nargs="+", help=RUN)
    remove.set_defaults(handle=_remove)


def _add_deploy(commands: Any) -> None:
    deploy = commands.add_parser("deploy", help="the same algorithms on real processes, with Flower")
    actions = deploy.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    demo = actions.add_parser("demo", help="a SuperLink with TLS and node keys, and SuperNodes, on this machine alone")
    demo.add_argument("--algorithm", default="folb", help="a name of `folb list` (folb)")
    demo.add_argument("--rounds", type=int, default=5, help="rounds (5), of about 10 seconds each")
    demo.add_argument("--nodes", type=int, default=4, help="SuperNodes, each of them a device of Synthetic_1_1 (4)")
    demo.add_argument("--out", metavar="DIR", help="the run directory (runs/deploy-ALGORITHM-NODES)")
    demo.add_argument("--again", action="store_true", help="run it anew, if it is there already")
    demo.set_defaults(handle=_deploy_demo)


def _add_data(commands: Any) -> None:
    about = commands.add_parser("data", help="the datasets: which are here, what is in one, and getting one")
    actions = about.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    actions.add_parser("list", help="the datasets, and whether their files are here").set_defaults(handle=_data_list)
    info = actions.add_parser("info", help="devices, samples, sizes and labels of a dataset")
    info.add_argument("dataset", metavar="NAME", help=DATASET)
    info.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of `folb list`")
    info.add_argument("--out", metavar="PATH", help="draw sizes and labels by device into this file or directory")
    info.set_defaults(handle=_data_info)
    fetch = actions.add_parser("fetch", help="download a dataset's files")
    fetch.add_argument("dataset", metavar="NAME", help="mnist, femnist, shakespeare, sent140 or glove")
    fetch.set_defaults(handle=_data_fetch)
    actions.add_parser("path", help="print the data directory").set_defaults(handle=_data_path)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; bad input is a line on standard error and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(arguments[:1] == ["tune"]).parse_args(arguments)
    try:
        with _interruptible():
            options.handle(options)
    except InputError as error:
        print(f"folb: error: {error}", file=sys.stderr)
        return _leave(options, 2)
    except KeyboardInterrupt:
        print(f"folb: interrupted{_how_to_go_on(options)}", file=sys.stderr)
        return _leave(options, 130)
    except BrokenPipeError:
        # the reader of our output has gone (as `head` does): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # as jax says that the accelerator's memory is
            raise
        print(f"folb: error: {str(error).splitlines()[0]}{_how_to_go_on(options)}", file=sys.stderr)
        return _leave(options, 2)
    except (MemoryError, OSError) as error:
        print(f"folb: error: {type(error).__name__}: {error}{_how_to_go_on(options)}", file=sys.stderr)
        return _leave(options, 2)
    except Exception:
        if getattr(options, "process", None) is None:
            raise
        traceback.print_exc()
        return _leave(options, 1)
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C while jax is imported ends the process: an exception is lost in its compiled parts, or crashes them."""

    def interrupt(number: int, frame: Any) -> None:
        if getattr(getattr(sys.modules.get("jax"), "__spec__", None), "_initializing", False):
            print("folb: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(options: argparse.Namespace, code: int) -> int:
    """The exit code; but one of several processes ends at once, for the others wait for it in vain."""
    if getattr(options, "process", None) is not None:
        sys.stderr.flush()
        os._exit(code)
    return code


def _how_to_go_on(options: argparse.Namespace) -> str:
    return f"; go on with: {options.going}" if getattr(options, "going", None) else ""


def _compare(options: argparse.Namespace) -> None:
    given: dict[str, Any] = {}
    if options.algorithms is not None:
        given["algorithms"] = [name for name in options.algorithms.split(",") if name]
    _perform(_experiment(options, set=_settings(options.set), **given), options)


def _experiment(options: argparse.Namespace, **given: Any) -> Experiment:
    from folb.experiments.experiment import Experiment

    for name in ("model", "system", "objective", "rounds", "target", "evaluate_every"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.seeds is not None:
        given["seeds"] = _seeds(options.seeds)
    return Experiment(dataset=options.dataset, **given)


def _tune(options: argparse.Namespace) -> None:
    from folb import atomic
    from folb.cli import tables
    from folb.experiments import execute, tune
    from folb.experiments.experiment import to_toml
    from folb.experiments.plan import plan
    from folb.store import directory

    named = [f"{name}={value}" for name in tune.sweepable() if (value := getattr(options, f"sweep_{name}")) is not None]
    experiment = _experiment(options, algorithms=[options.algorithm], set=_settings([*options.set, *named]))
    wanted = None if options.report_seeds is None else _seeds(options.report_seeds, "report_seeds")
    seeds = tune.other_seeds(experiment.seeds, wanted)
    _use_compilation_cache()
    options.accelerators = _accelerators(options)
    planned = plan(experiment, options.stream)
    tune.check(planned)
    path, console = execute.place(planned), _console()
    # `folb resume` would finish the grid, and stop short of the winner
    going = shlex.join(["folb", *(word for word in sys.argv[1:] if word != "--again")])
    _complete(planned, path, options, going)
    points = tune.ranked(planned, directory.read(path).runs())
    if not options.json:
        console.print(_summary(planned), highlight=False, markup=False)
        console.print(tune.table(points, planned.experiment.target), highlight=False)
    chosen = plan(tune.winner(planned, points, seeds), options.stream)
    atomic.replace(path / directory.WINNER, to_toml(chosen.experiment, chosen.federation.note).encode())
    home = execute.place(chosen)
    _complete(chosen, home, options, going)
    if options.json:
        print(json.dumps(tune.document(planned, points, seeds, json.loads((home / directory.RESULTS).read_bytes()))))
        return
    console.print("\n" + tune.verdict(planned, points, seeds) + "\n", highlight=False, markup=False)
    console.print(tables.table(directory.read(home).runs(), planned.experiment.target), highlight=False)
    console.print(f"\nin {path}: the grid, and winner.toml; in {home}: the winner", highlight=False, markup=False)


def _reproduce(options: argparse.Namespace) -> None:
    from folb import paper
    from folb.experiments import execute
    from folb.paper import figure_files
    from folb.store import directory

    names = figure_files.chosen(options.names)
    home = options.out or paper.home(options.quick)
    _use_compilation_cache()
    options.accelerators = _accelerators(options)
    going = shlex.join(["folb", *sys.argv[1:]])

    def complete(planned: Plan, about: str) -> directory.RunDirectory:
        path = execute.place(planned)
        if not execute.finished(path, planned):
            options.about = about
            _complete(planned, path, options, going)
        return directory.read(path)

    def tell(line: str) -> None:
        print(f"folb: {line}", file=sys.stderr)

    if options.pages_only and options.only:
        raise InputError("only", options.only, "chooses what is run, and --pages-only runs nothing")
    if options.pages_only and not any(Path(home, "results").glob("*.json")):
        raise InputError("out", str(home), "has no results to make pages from")
    if not options.pages_only:
        paper.carry_out(names, home, options.quick, complete, tell, options.only or ["*"])
    pages = paper.write(names, home, options.quick)
    if options.json:
        print(json.dumps(paper.document(pages, options.quick)))
        return
    console = _console()
    if options.quick:
        console.print("A quick try: few seeds and draws, fewer rounds, no line search.\n", highlight=False)
    console.print(paper.table(pages), highlight=False)
    console.print(f"\nin {home}: README.md, a page and a picture each, results/", highlight=False, markup=False)


def _attack(options: argparse.Namespace) -> None:
    from folb.experiments import attack
    from folb.experiments.plan import plan

    given = attack.SETTINGS | _settings(options.set)
    experiment = _experiment(options, algorithms=list(attack.ALGORITHMS), set=given)
    _use_compilation_cache()
    planned = plan(experiment)
    contests = attack.contests(planned, options.attackers)
    outcomes: list[attack.Outcome] = []

    def work(observe: Observe) -> None:
        outcomes.extend(attack.measure(planned, contests, observe))

    _with_progress("rounds", len(contests) * len(experiment.seeds) * experiment.rounds, work)
    if options.json:
        print(json.dumps(attack.document(planned, outcomes)))
        return
    K, cap = planned.algorithms[0].selection.K, attack.cap(planned)
    console = _console()
    console.print(_summary(planned), highlight=False, markup=False)
    console.print(attack.table(outcomes), highlight=False)
    console.print(
        f"\nshare: of all weight, the attackers'; worst: the largest weight of one attacker, which is at most "
        f"{cap:g}/{K} = {cap / K:g} guarded,\nif all {K} reply; negated: of honest updates, those that count backwards",
        highlight=False,
        markup=False,
    )


def _seeds(text: str, field: str = "seeds") -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError(field, text, "should be a number of seeds, or a list such as 4,5,6") from None
    return numbers if "," in text or not numbers else numbers[0]


def _settings(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals and text):
            raise InputError("set", pair, "should be KEY=VALUE")
        part, dot, name = key.rpartition(".")
        values = text.split(",") if "," in text else text
        home = found.setdefault(part, {}) if dot else found
        if not isinstance(home, dict):
            raise InputError("set", key, f"{part} is set to a value already")
        if name in home:
            raise InputError("set", pair, f"{key} is given already; several values of one go with commas between them")
        home[name] = values
    return found


def _run(options: argparse.Namespace) -> None:
    from folb.experiments.experiment import from_toml

    _perform(from_toml(options.experiment), options)


def _resume(options: argparse.Namespace) -> None:
    from folb.experiments.experiment import from_toml
    from folb.experiments.plan import plan
    from folb.store import directory

    path = directory.find(options.run)
    stored = directory.read(path)
    if stored.deployed:
        raise InputError(
            "run", path.name, f"is a run on Flower: submit it again, {stored.resume_command}, and it goes on"
        )
    _use_compilation_cache()
    there = stored.environment
    options.accelerators = _accelerators(options, there.get("accelerators", 1))
    planned = plan(
        from_toml(path / directory.EXPERIMENT), there.get("stream") if options.stream is None else options.stream
    )
    if planned.identity != there["identity"] and not options.again:
        changed = f"its {directory.EXPERIMENT}, its data or the user's own files are not what they were"
        raise InputError("run", path.name, f"{changed}; --again runs it anew")
    _carry_out(planned, path, options)


def _perform(experiment: Experiment, options: argparse.Namespace) -> None:
    from folb.experiments import execute
    from folb.experiments.plan import plan

    _use_compilation_cache()
    options.accelerators = _accelerators(options)
    planned = plan(replace(experiment, records=True) if options.records else experiment, options.stream)
    if options.out is not None and not options.out:
        raise InputError("out", options.out, "should be a directory to write to")
    _carry_out(planned, Path(options.out) if options.out else execute.place(planned), options)


def _carry_out(planned: Plan, path: Path, options: argparse.Namespace) -> None:
    """Run a planned experiment in its directory unless its results are there, and show them."""
    from folb.cli import tables
    from folb.experiments.execute import run
    from folb.simulation import parallel
    from folb.store import directory

    if not parallel.alike(planned.identity):
        raise InputError("process", options.process, "should run the same experiment, on the same data, as the others")
    if not parallel.leads():  # the first process alone keeps the directory
        if parallel.shared(None):
            run(planned, accelerators=options.accelerators)
        return
    together = ["--coordinator", options.coordinator, "--process", options.process] if options.process else []
    _complete(planned, path, options, shlex.join(["folb", "resume", str(path), *together]))
    if options.json:
        print(json.dumps(json.loads((path / directory.RESULTS).read_bytes())))
        return
    console = _console()
    console.print(_summary(planned), highlight=False, markup=False)
    console.print(tables.table(directory.read(path).runs(), planned.experiment.target), highlight=False)
    console.print(
        f"\nin {path}: curves.png, results.json, rounds.jsonl, experiment.toml", highlight=False, markup=False
    )


def _complete(planned: Plan, path: Path, options: argparse.Namespace, going: str) -> None:
    """Run a planned experiment in its directory unless its results are there; if interrupted, `going` goes on."""
    from folb.experiments import execute
    from folb.report import trackers
    from folb.simulation import parallel
    from folb.store import lock

    if execute.finished(path, planned) and not options.again:
        tracked = f" and tells {options.track}" if options.track else ""
        print(f"folb: {path} is finished already; --again runs it anew{tracked}", file=sys.stderr)
        parallel.shared(False)
        return
    trackers.check(options.track)
    lock.check_free(path)  # before the progress bar
    parallel.shared(True)
    options.going = going
    _run_with_progress(planned, path, options)
    options.going = None


def _console() -> Console:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # which `main` knows not to be an error; rich would exit with 1

    return Output(width=None if sys.stdout.isatty() else 160)


def _summary(planned: Plan) -> str:
    federation, experiment = planned.federation, planned.experiment
    note = f" ({federation.note})" if federation.note else ""
    return (
        f"{federation.name}{note}: {federation.N} devices, {len(federation.train.y)} training and "
        f"{len(federation.test.y)} test samples; model {experiment.model}; system {experiment.system}; "
        f"{experiment.rounds} rounds; {_count(experiment.seeds)}\n"
    )


def _count(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"


def _run_with_progress(planned: Plan, path: Path, options: argparse.Namespace) -> None:
    """Run an experiment under a progress bar."""
    from folb.experiments import execute
    from folb.report import trackers

    def work(observe: Observe) -> None:
        with trackers.tracking(options.track, path, execute.environment(planned, options.accelerators)["runs"]) as log:

            def both(i: int, first: int, part: Run) -> None:
                log(i, first, part)
                observe(i, first, part)

            execute.perform(path, planned, options.again, both, options.accelerators)

    total = len(planned.algorithms) * len(planned.experiment.seeds) * planned.experiment.rounds
    _with_progress(getattr(options, "about", "rounds"), total, work, _how_to_go_on(options))


def _with_progress(about: str, total: int, work: Callable[[Observe], None], going: str = "") -> None:
    """Do some work under a progress bar, in a thread of its own.

    The main thread hears Ctrl-C and SIGTERM even while the compiler or a long round is at work, and then ends the
    process at once: what is lost is the round in flight.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stop, ended = threading.Event(), threading.Event()
    failed: list[BaseException] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=_errors())
    task = bar.add_task(about, total=total)

    def observe(i: int, first: int, part: Run) -> None:
        bar.advance(task, len(part.seconds))
        if stop.is_set():
            raise KeyboardInterrupt

    def working() -> None:
        try:
            work(observe)
        except BaseException as error:
            failed.append(error)
        ended.set()  # join() is not for waiting here: interrupted, it takes the thread for dead

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with bar:
            threading.Thread(target=working, daemon=True).start()
            while not ended.wait(0.1):
                pass
    except KeyboardInterrupt:
        stop.set()
        with contextlib.suppress(KeyboardInterrupt):  # again: at once
            ended.wait(1.5)
        if not ended.is_set():
            print(f"folb: interrupted{going}", file=sys.stderr, flush=True)
            os._exit(130)  # an ordinary exit would wait for the round
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise failed[0]


def _errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _runs(options: argparse.Namespace) -> None:
    from folb.cli import runs

    runs.runs(_console())


def _show(options: argparse.Namespace) -> None:
    from folb.cli import runs
    from folb.store import directory

    stored = directory.read(directory.find(options.run))
    console = _console()
    runs.show(stored, console)


def _export(options: argparse.Namespace) -> None:
    from folb.report import export
    from folb.store import directory

    export.write(directory.read(directory.find(options.run)), options.format, options.output)


def _report(options: argparse.Namespace) -> None:
    from folb import atomic
    from folb.report import page, payload
    from folb.store import directory

    stored = [directory.read(directory.find(name)) for name in dict.fromkeys(options.run)]
    path = Path(options.output)
    atomic.output(path, page.render(payload.view(stored)).encode())
    print(path)
    if options.figures:
        from folb.report.figures import curves

        for n, one in enumerate(stored, start=1):
            runs = [run for run in one.runs() if len(run.evaluated_rounds)]
            about = payload.described(one)
            stem = one.name if [other.name for other in stored].count(one.name) == 1 else f"{one.name}-{n}"
            for form in ("png", "svg", "pdf") if runs else ():
                picture = path.parent / f"{stem}.{form}"
                drawn = curves(runs, form, target=about["target"], title=about["title"], note=about["note"])
                atomic.output(picture, drawn)
                print(picture)


def _watch(options: argparse.Namespace) -> None:
    from folb.report import live

    live.serve(options.run, live.PORT if options.port is None else options.port)


def _remove(options: argparse.Namespace) -> None:
    from folb.store import directory

    for path in dict.fromkeys(directory.find(name) for name in options.run):
        directory.remove(path)
        print(f"removed {path}")


def _deploy_demo(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.deploy import demo
    from folb.store import directory, lock

    demo.check(options.algorithm, options.rounds, options.nodes)
    path = Path(options.out) if options.out else demo.place(options.algorithm, options.nodes)
    lock.check_free(path)
    if options.again and directory.is_run(path):
        directory.remove(path)

    def tell(line: str) -> None:
        print(f"folb: {line}", file=sys.stderr, flush=True)

    if demo.finished(path, options.rounds):
        tell(f"{path} is finished already; --again runs it anew")
    else:
        demo.check_place(path)
        options.going = shlex.join(["folb", *(word for word in sys.argv[1:] if word != "--again")])
        demo.perform(path, options.algorithm, options.rounds, options.nodes, tell)
        options.going = None
    stored, console = directory.read(path), _console()
    console.print(tables.table(stored.runs(), stored.experiment["target"], stored.clock), highlight=False)
    console.print(
        f"\nin {path}: curves.png, results.json, rounds.jsonl, model.npz; folb report {stored.handle} has the page",
        highlight=False,
        markup=False,
    )


def _accelerators(options: argparse.Namespace, began: int = 1) -> int | str:
    """How many are to share the work, `began` unless told: checked, once this process has joined any others."""
    from folb.simulation import parallel

    process, coordinator = getattr(options, "process", None), getattr(options, "coordinator", None)
    if process is not None and coordinator is not None:
        _keep_output_apart()
        parallel.join(coordinator, process)
    elif process is not None:
        raise InputError("process", process, "should be given together with --coordinator")
    elif coordinator is not None:
        raise InputError("coordinator", coordinator, "should be given together with --process")
    given = began if options.devices is None else options.devices
    count = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given
    try:
        parallel.mesh(count)
    except InputError as error:
        raise InputError("devices", count, error.expected) from None
    return count


def _keep_output_apart() -> None:
    """What JAX's collectives print on standard output goes to standard error: the former is for results."""
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding)


def _use_compilation_cache() -> None:
    """Keep compiled programs between commands: they take seconds to compile and milliseconds to load."""
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "folb" / "compiled"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to costs time, not results
    jax.config.update("jax_compilation_cache_dir", str(home))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _list(options: argparse.Namespace) -> None:
    from folb.cli import listing

    listing.show(_console())


def _data_list(options: argparse.Namespace) -> None:
    from folb.cli import datasets

    datasets.show()


def _data_info(options: argparse.Namespace) -> None:
    from folb.cli import datasets

    path = None if options.out is None else datasets.picture(options.dataset, options.out)
    federation = datasets.load(options.dataset, _settings(options.set))
    datasets.describe(options.dataset, federation)
    if path is not None:
        datasets.draw(federation, path)
        print(f"\nwritten to {path}")


def _data_fetch(options: argparse.Namespace) -> None:
    from folb.cli import datasets

    for path in datasets.get(options.dataset):
        print(path)


def _data_path(options: argparse.Namespace) -> None:
    from folb.data import source_files

    print(source_files.directory())
