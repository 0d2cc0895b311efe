"""The command line. A command imports only what it needs, and `folb --help` little: it answers at once."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import textwrap
import traceback
from importlib import import_module
from typing import Any, NoReturn

from folb import __version__
from folb.cli.running import how_to_resume, interruptible
from folb.errors import InputError, hint

OWN = {  # the commands of each module here, in the order of --help
    "compare": ("compare", "run", "attack"),
    "search": ("tune",),
    "private": ("privacy",),
    "runs": ("runs", "show", "tag", "export", "report", "watch", "resume", "rm"),
    "deployment": ("deploy",),
    "listing": ("list",),
    "datasets": ("data",),
    "new_files": ("new",),
    "completion": ("completion",),
}
GROUP = "folb.commands"  # entry points of this group add commands: functions of the subparsers, as `add` is here
STUDIES = {
    "reproduce": "repeat the paper's figures and tables",
    "arena": "compare contenders on datasets",
    "defend": "run robust rules on datasets under all attacks",
}
INSTALL = "pip install ./studies, in a copy of folb's repository"
COLLECT = 500_000  # new objects between two garbage collections: more than a short command makes, about 50 MB

EXAMPLES = """examples:
  folb compare synthetic_1_1
  folb compare synthetic_1_1 --algorithms folb,fedavg --rounds 200 --target 0.8
  folb compare synthetic_1_1 --set local.mu=0.01,0.1 --set rule.weights=samples
  folb compare path/to/leaf/data --model logistic --system deadline --set tau=10
  folb run experiment.toml
  folb tune synthetic_1_1 --algorithm folb_hetero --local.mu 0,1 --rule.psi 1,10
  folb tune synthetic_1_1 --algorithm folb --box local.lr=log:0.01..1 --points 9
  folb reproduce table1 --quick
  folb arena --only 'synthetic_*' --contenders classic
  folb attack
  folb defend --only mnist-2 --rules median,krum --shares 0,20
  folb privacy --devices 1000 --K 50 --rounds 100 --epsilon 8
  folb data info mnist --set partition=dirichlet --set alpha=0.1 --out mnist.png
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that breaks no word, and no option at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        # without abbreviations: --seed 1 would be --seeds 1, one seed, and not the seed 1
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        print(f"folb: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message = f"{hint(value, action.choices or ())}{error.message}"
            raise


def parser(tuning: bool = False, word: str = "") -> argparse.ArgumentParser:
    """The commands and their options. With `tuning`, also the options of `folb tune` that need jax.

    If the command is `word`, and our own, no other is looked for: that takes time.
    """
    says = "Fast-convergent federated learning: simulate and compare FOLB and its family."
    top = Parser(prog="folb", description=says, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"folb {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    homes = [home for home, words in OWN.items() if word in words]
    for home in homes or OWN:
        import_module(f"folb.cli.{home}").add(commands, *((tuning,) if home == "search" else ()))
    if homes:
        return top
    from importlib import metadata

    for point in metadata.entry_points(group=GROUP):  # the commands that other distributions add
        point.load()(commands)
    for name, says in STUDIES.items():  # a line in place of each study that is not there
        if name not in commands.choices:
            commands.add_parser(name, help=f"{says} ({INSTALL})", add_help=False).set_defaults(handle=_without)
    return top


def _without(options: argparse.Namespace) -> None:
    raise InputError("command", options.command, f"is one of the studies, which are not installed: {INSTALL}")


def save_work() -> None:
    """Collect garbage rarely, and let NumPy's threads sleep while they have no work."""
    # imports and traces make many objects that stay: looking for garbage takes 10 % of a short command, and the last
    # time, at the end of the process, would take longest, just before the system frees everything
    gc.set_threshold(max(COLLECT, gc.get_threshold()[0]))
    atexit.register(gc.freeze)
    # OpenBLAS lets them spin, which would keep a core busy; it reads this when NumPy is imported
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the least


def open_closed_streams() -> None:
    """Send output nowhere if standard output or standard error was closed: otherwise the next file takes its place."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.fstat(number)
            except OSError:
                os.dup2(nowhere, number)
            setattr(sys, name, os.fdopen(nowhere, "w"))


def main(arguments: list[str] | None = None) -> int:
    """Run a command, by default that of this process. Bad input gives one line on standard error and exit code 2."""
    if arguments is not None:
        return run(arguments)
    code = None

    @atexit.register  # before the command begins, so that it runs after all that the command registers for the end
    def end_at_once() -> None:
        """Taking modules apart takes a tenth of a second with jax; and Python may give its own code after Ctrl-C."""
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    save_work()
    code = run(sys.argv[1:])
    return code


def run(arguments: list[str]) -> int:
    open_closed_streams()
    top = parser(arguments[:1] == ["tune"], *arguments[:1])
    options, unknown = top.parse_known_args(arguments)
    if unknown and options.handle is not _without:
        from folb.cli import completion

        commands = completion.table(top, {})
        command = f"{options.command} {getattr(options, 'action', '')}".strip()
        command = command if command in commands else options.command
        top.prog += f" {command}"  # its help lists the options
        word, known = unknown[0].partition("=")[0], commands[command].options
        near = [option for option in known if option.endswith(f".{word[2:]}")]
        near = near or ([f"--set {word[2:]}=..."] if "." in word and "--set" in known else [])
        meant = f"did you mean {' or '.join(near)}? " if near else hint(word, known)
        top.error(f"{meant}unrecognized arguments: {' '.join(unknown)}")
    code = 2
    try:
        with interruptible():
            options.handle(options)
            sys.stdout.flush()  # notice here, not at the end of the process, that the reader has gone away
        return 0
    except InputError as error:
        print(f"folb: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"folb: interrupted{how_to_resume(options)}", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # the reader of our output has gone away (as `head` does): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, OSError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError):
            if "RESOURCE_EXHAUSTED" not in str(error):  # jax's word for a full accelerator memory
                raise
            what = str(error).splitlines()[0]
        print(f"folb: error: {what}{how_to_resume(options)}", file=sys.stderr)
    except Exception:
        if getattr(options, "process", None) is None:
            raise
        traceback.print_exc()
        code = 1
    if getattr(options, "process", None) is not None:
        sys.stderr.flush()
        os._exit(code)  # at once, because the other processes are waiting for this one
    return code
