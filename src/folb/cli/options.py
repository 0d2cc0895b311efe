"""The options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folb.errors import InputError, check

if TYPE_CHECKING:
    from folb.experiments.experiment import Experiment

WARNING = re.compile("Error reading persistent compilation cache entry for '([^']+)'")
DATASET = "a dataset of `folb list`, a LEAF directory, a directory of .npy files, or an .npz, .csv or .parquet file"
RUN = "a run's name, the beginning of it, its directory, or 'last' for the newest"
JSON = "print one JSON document, and nothing else"
RUNS = """Run directories are in FOLB_RUNS, else in ./runs. What they take on disk:
docs/guides/runs.md."""


def command(commands: Any, word: str, says: str, handle: Callable[[argparse.Namespace], None]) -> Any:
    """A new command, which `handle` does."""
    made = commands.add_parser(word, help=says)
    made.set_defaults(handle=handle)
    return made


def add_experiment(command: argparse.ArgumentParser, every: str = "1") -> None:
    """The experiment's choices, except the algorithms. `every` is the default of --evaluate-every, in words."""
    known = "of `folb list`, or my_file.py:function"
    for name, kind, metavar, says in (
        ("model", str, "NAME", f"{known} (by dataset)"),
        ("system", str, "NAME", f"{known} (uniform)"),
        ("objective", str, "WORD", "weights in (1): uniform, 1/N; samples, n_k/n (uniform)"),
        ("rounds", int, "N", "communication rounds (100)"),
        ("seeds", str, "N", "how many seeds (5), or a list such as 4,5,6"),
        ("target", float, "X", "the accuracy or error to reach (by dataset)"),
        ("metrics", str, "A,B", "also fairness, f1, auc, top5, mse, mae, my_file.py:function"),
        ("evaluate-every", int, "N", f"evaluate every N rounds ({every})"),
        ("evaluate", str, "all|N", "on N samples of each side (a costly model: on 1000)"),
        ("device-samples", int, "N", "at most N training samples of each device (all)"),
    ):
        command.add_argument(f"--{name}", type=kind, metavar=metavar, help=says)
    says = "a setting of `folb list`; KEY=V1,V2 sweeps an algorithm's setting; NAME.KEY=VALUE is only for NAME"
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=says)


def add_box(command: argparse.ArgumentParser, of: str = "") -> None:
    ranges = "a range (KEY=0.1..3), a range of logarithms (KEY=log:0.001..1) or values (KEY=V1,V2)"
    says = f"draw this setting{of} from {ranges}"
    command.add_argument("--box", action="append", default=[], metavar="KEY=RANGE", help=says)


def add_running(command: argparse.ArgumentParser, operand: str) -> None:
    """The options of every command that runs an experiment; `operand` is what it is given without an option."""
    command.add_argument("--json", action="store_true", help=JSON)
    command.add_argument("--again", action="store_true", help="run it again, even if it is finished")
    says = "also log each round for tensorboard, mlflow or wandb"
    command.add_argument("--track", choices=("tensorboard", "mlflow", "wandb"), metavar="TOOL", help=says)
    says = "do not keep the models that the runs end with"
    command.add_argument("--no-model", dest="keep_model", action="store_const", const=False, help=says)
    add_devices(command)
    says = "keep the samples on the host (if they take half of the memory)"
    command.add_argument("--stream", action=argparse.BooleanOptionalAction, help=says)
    command.usage, command.epilog = f"%(prog)s [options] {operand}", RUNS


def add_naming(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", metavar="TEXT", help="what you call the run; its path stays")
    command.add_argument("--tags", metavar="A,B", help="words to find the run by")


def words(text: str | None) -> list[str] | None:
    """The words of an option, as A,B; none of them if it is empty."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def add_devices(command: argparse.ArgumentParser) -> None:
    command.add_argument("--devices", metavar="auto|N", help="accelerators that share a round (1; resumed: as before)")


def add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--process", metavar="I/N", help="this is process I, from 0, of N that run the same command")
    command.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others")


def experiment(options: argparse.Namespace, **given: Any) -> Experiment:
    from folb.experiments.experiment import Experiment

    names = ("model", "system", "objective", "rounds", "target", "evaluate_every", "evaluate", "device_samples")
    given |= {name: getattr(options, name) for name in names} | {"metrics": words(options.metrics)}
    given["seeds"] = None if options.seeds is None else seeds(options.seeds)
    return Experiment(options.dataset, **{name: value for name, value in given.items() if value is not None})


def seeds(text: str, field: str = "seeds") -> int | list[int]:
    """A number of seeds, or a list of them."""
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError(field, text, "should be a number of seeds, or a list such as 4,5,6") from None
    return numbers if "," in text or not numbers else numbers[0]


def settings(pairs: list[str], field: str = "set") -> dict[str, Any]:
    """The values of --set, or of another such option: KEY=VALUE, KEY=V1,V2 or NAME.KEY=VALUE."""
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        check(field, pair, key and equals and text, "should be KEY=VALUE")
        check(field, pair, key not in given, f"{key} is given already; put commas between several values")
        given[key] = text.split(",") if "," in text else text
    return given


def accelerators(options: argparse.Namespace, usual: int | None = 1) -> Any:
    """How many accelerators share the work, or `usual`. The check comes after this process has joined the others."""
    from folb.pace import tell
    from folb.simulation import parallel

    def too_late(error: InputError) -> None:
        tell(f"error: {error}")
        os._exit(2)

    process, coordinator = getattr(options, "process", None), getattr(options, "coordinator", None)
    together = (process is None) == (coordinator is None)
    check("process", process, together or process is None, "should be given together with --coordinator")
    check("coordinator", coordinator, together, "should be given together with --process")
    if process is not None and coordinator is not None:
        own = os.dup(1)  # what JAX's collectives print goes to standard error: standard output is for results
        os.dup2(2, 1)
        sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding)
        parallel.join(coordinator, process, tell, too_late)
    if options.devices is None:
        return usual
    count = int(options.devices) if options.devices.isascii() and options.devices.isdecimal() else options.devices
    try:
        parallel.mesh(count)
    except InputError as error:
        raise InputError("devices", count, error.expected) from None
    return count


def use_compilation_cache() -> None:
    """Keep compiled programs between commands: they take seconds to compile and milliseconds to load."""
    import jax

    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "folb" / "compiled"
        home.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a full disk; a user without a home
        return  # without a cache it takes longer, with the same results
    drop_damaged(home)
    jax.config.update("jax_compilation_cache_dir", str(home))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def drop_damaged(home: Path) -> None:
    """Remove half-written entries when jax warns of them: it never replaces them, and would warn in every command."""
    usual = warnings.showwarning

    def show(message: Warning | str, *about: Any, **more: Any) -> None:
        program, damaged = WARNING.match(str(message)), False
        for path in [path for path in home.iterdir() if program and path.name.startswith(f"{program[1]}-")]:
            try:
                zlib.decompress(path.read_bytes())
            except (OSError, zlib.error):  # an entry in another format than zlib's is removed, too
                damaged = True
                path.unlink(missing_ok=True)  # jax is about to compile the program, and then writes it again
        if not damaged:
            usual(message, *about, **more)

    warnings.showwarning = show
