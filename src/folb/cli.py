"""The command line. Only what a command needs is imported, so that `folb --help` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from folb import __version__
from folb.errors import InputError

if TYPE_CHECKING:
    from folb.experiment import Experiment

EXAMPLES = """examples:
  folb compare synthetic_1_1
  folb compare synthetic_iid --algorithms folb,fedavg --rounds 200 --seeds 5 --target 0.8
  folb compare synthetic_1_1 --set mu=0.001,0.01,0.1 --set averaging=simple,samples --out results
  folb compare path/to/leaf/data --model logistic --system deadline --set tau=10 --json
  folb run experiment.toml
  folb data info mnist --set partition=dirichlet --set alpha=0.1 --out mnist.png
"""


DATASET = "a dataset of `folb list`, a LEAF directory, an .npz, a .csv or a .parquet"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"folb: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
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
    compare.add_argument("--algorithms", metavar="A,B", help="names of `folb list`, or my_file.py:function")
    compare.add_argument("--model", help="a model of `folb list`, or my_file.py:function (by dataset)")
    compare.add_argument("--system", help="a system model of `folb list`")
    compare.add_argument("--objective", help="(1) with weights 'uniform' (1/N) or 'samples' (n_k/n)")
    compare.add_argument("--rounds", type=int, help="communication rounds (100)")
    compare.add_argument("--seeds", help="how many seeds (3), or a list such as 4,5,6")
    compare.add_argument("--target", type=float, help="accuracy for 'rounds to target' (0.7)")
    compare.add_argument("--evaluate-every", type=int, metavar="N", help="evaluate every N rounds (1)")
    compare.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of `folb list`; KEY=V1,V2 sweeps an algorithm's setting; NAME.KEY=VALUE is for NAME alone",
    )
    compare.set_defaults(handle=_compare)

    run = commands.add_parser("run", help="run an experiment from a TOML file")
    run.add_argument("experiment", metavar="EXPERIMENT.toml", type=Path)
    run.set_defaults(handle=_run)
    for command in (compare, run):
        command.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
        command.add_argument("--out", metavar="DIR", help="write results.json, rounds.csv and curves.png there")

    listing = commands.add_parser("list", help="algorithms, datasets, models and system models, with their settings")
    listing.set_defaults(handle=_list)
    _add_data(commands)
    return top


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
    options = parser().parse_args(arguments)
    try:
        options.handle(options)
    except InputError as error:
        print(f"folb: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; the same command goes on from here" if getattr(options, "out", None) else ""
        print(f"folb: interrupted{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone (as `head` does): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, OSError) as error:
        print(f"folb: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options: argparse.Namespace) -> None:
    from folb.experiment import Experiment

    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("model", "system", "objective", "rounds", "target", "evaluate_every")
        if getattr(options, name) is not None
    }
    if options.algorithms is not None:
        given["algorithms"] = [name for name in options.algorithms.split(",") if name]
    if options.seeds is not None:
        given["seeds"] = _seeds(options.seeds)
    _perform(Experiment(dataset=options.dataset, set=_settings(options.set), **given), options)


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError("seeds", text, "should be a number of seeds, or a list such as 4,5,6") from None
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
        home[name] = values
    return found


def _run(options: argparse.Namespace) -> None:
    from folb.experiment import from_toml

    _perform(from_toml(options.experiment), options)


def _perform(experiment: Experiment, options: argparse.Namespace) -> None:
    from rich.console import Console

    from folb import report
    from folb.experiment import plan, run

    _use_compilation_cache()
    planned = plan(experiment)
    directory = report.writable(options.out) if options.out is not None else None
    with report.unfinished(directory) as checkpoints:
        total = len(planned.algorithms) * len(experiment.seeds) * experiment.rounds
        runs = _with_progress(total, lambda progress: run(experiment, planned, progress, checkpoints))
        if directory:
            report.save_results(directory, experiment, planned.federation.note, runs)
    if options.json:
        document = report.document(experiment, planned.federation.note, runs)
        print(json.dumps(document, allow_nan=False))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_summary(experiment, planned), highlight=False, markup=False)
    console.print(report.table(runs, experiment.target), highlight=False)
    if directory:
        written = f"\nwritten to {directory}: curves.png, results.json, rounds.csv, experiment.toml"
        console.print(written, highlight=False, markup=False)


def _summary(experiment: Experiment, planned: Any) -> str:
    federation = planned.federation
    note = f" ({federation.note})" if federation.note else ""
    return (
        f"{federation.name}{note}: {federation.N} devices, {len(federation.train.y)} training and "
        f"{len(federation.test.y)} test samples; model {experiment.model}; system {experiment.system}; "
        f"{experiment.rounds} rounds; {len(experiment.seeds)} seeds\n"
    )


def _with_progress(total: int, work: Callable[[Callable[[int], None]], Any]) -> Any:
    """Do `work` under a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rounds", total=total)
        return work(lambda n: bar.advance(task, n))


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
    from folb import listing

    listing.show()


def _data_list(options: argparse.Namespace) -> None:
    from folb import catalogue

    catalogue.show()


def _data_info(options: argparse.Namespace) -> None:
    from folb import catalogue

    federation = catalogue.load(options.dataset, _settings(options.set))
    catalogue.describe(options.dataset, federation)
    if options.out:
        print(f"\nwritten to {catalogue.draw(federation, options.dataset, options.out)}")


def _data_fetch(options: argparse.Namespace) -> None:
    from folb import catalogue

    for path in catalogue.get(options.dataset):
        print(path)


def _data_path(options: argparse.Namespace) -> None:
    from folb.data import files

    print(files.directory())
