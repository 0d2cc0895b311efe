"""`folb deploy`: the same algorithms on real processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from folb.cli.options import command


def add(commands: Any) -> None:
    deploy = commands.add_parser("deploy", help="run the same algorithms on real processes, with Flower")
    actions = deploy.add_subparsers(dest="action", required=True, metavar="ACTION")
    demo = command(actions, "demo", "run a SuperLink with TLS and node keys, and SuperNodes, on this machine", _demo)
    demo.add_argument("--algorithm", default="folb", help="a name of `folb list` (folb)")
    demo.add_argument("--rounds", type=int, default=5, help="rounds (5); each takes about 10 seconds")
    demo.add_argument("--nodes", type=int, default=4, help="SuperNodes (4); each is a device of Synthetic_1_1")
    demo.add_argument("--out", metavar="DIR", help="the run directory (runs/deploy-ALGORITHM-NODES)")
    demo.add_argument("--again", action="store_true", help="run it again from the start, even if it is finished")


def _demo(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.cli.running import same_command
    from folb.deploy import demo
    from folb.pace import tell

    def on_start(path: Path, finished: bool) -> None:
        if finished:
            tell(f"{path} is finished already; --again runs it from the start")
        else:
            options.going = same_command()

    asked = (options.algorithm, options.rounds, options.nodes)
    stored = demo.execute(*asked, directory=options.out, again=options.again, on_start=on_start, tell=tell)
    options.going = None
    tables.show_in_parts(tables.results(stored.runs(), stored.experiment["target"], stored.clock))
    files = "curves.png, results.json, rounds.jsonl, model.npz"
    tables.say(f"\nin {stored.path}: {files}; folb report {stored.handle} writes the page")
