"""`folb new`: a small working file or app to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from folb.cli.options import command
from folb.errors import InputError

STARTERS = Path(__file__).parent / "starters"
APP = Path(__file__).parent.parent / "deploy" / "demo_app"


class Starter(NamedTuple):
    """The files of one kind, and the commands that use them; {} stands for the directory."""

    files: tuple[Path, ...]
    commands: tuple[str, ...]


KINDS = {
    "algorithm": Starter(
        (STARTERS / "my_rule.py",),
        ("folb compare synthetic_1_1 --algorithms folb,{}/my_rule.py:softmax --rounds 20",),
    ),
    "dataset": Starter(
        (STARTERS / "my_data.py",),
        (
            "python {}/my_data.py {}/my_data.csv",
            "folb compare {}/my_data.csv --algorithms folb,fedavg --rounds 20 --set local.lr=0.1",
        ),
    ),
    "flower": Starter(
        tuple(APP / name for name in ("device.py", "server.py", "pyproject.toml")),
        (
            "pip install 'flwr[simulation]>=1.41,<1.42'",  # with ray, which folb[flower] does without
            'flwr run {} local --stream --federation-config "num-supernodes=4 client-resources-num-cpus=1"',
        ),
    ),
}


def add(commands: Any) -> None:
    new = command(commands, "new", "write a small algorithm, dataset or Flower app to start from", _new)
    new.add_argument("kind", choices=KINDS, help="what to start")
    new.add_argument("directory", metavar="DIR", help="where its files go; existing files are not overwritten")


def _new(options: argparse.Namespace) -> None:
    starter, home = KINDS[options.kind], Path(options.directory)
    if not options.directory.isprintable() or not options.directory or "," in options.directory:
        raise InputError("directory", options.directory, "should be a path of printable characters, without commas")
    for file in starter.files:  # if one of them exists already, nothing is written
        if (home / file.name).is_symlink() or (home / file.name).exists():
            raise InputError("directory", str(home), f"has {file.name} already; choose another directory")
    try:
        home.mkdir(parents=True, exist_ok=True)
        for file in starter.files:
            with open(home / file.name, "xb") as copy:
                copy.write(file.read_bytes().replace(b"examples/" + file.name.encode(), file.name.encode()))
    except OSError as error:
        raise InputError("directory", str(home), f"should be a directory to write to: {error.strerror}") from error
    print(*(home / file.name for file in starter.files), "\ntry it:", sep="\n")
    for line in starter.commands:
        print("  " + line.replace("{}", shlex.quote(str(home))))
