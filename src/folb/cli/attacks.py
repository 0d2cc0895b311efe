"""`folb attack`: devices that lie."""

from __future__ import annotations

import argparse
import json
from typing import Any

from folb.cli import options as common


def add(commands: Any) -> None:
    """`folb attack`."""
    attack = commands.add_parser("attack", help="measure what lying devices gain, rule by rule")
    attack.add_argument(
        "dataset", metavar="DATASET", nargs="?", default="synthetic_1_1", help=f"{common.DATASET} (synthetic_1_1)"
    )
    attack.add_argument("--algorithms", metavar="A,B", help="names of `folb list` (fedavg,folb,accord)")
    attack.add_argument(
        "--rules", metavar="A,B", help="values of robust (for fedavg all; FOLB is plain and guarded, if not given)"
    )
    attack.add_argument("--attacks", metavar="A,B", help="attacks of `folb list parts` (most of them)")
    attack.add_argument("--attackers", metavar="A,B", default="0.2", help="shares of the devices that lie (0.2)")
    common.add_experiment(attack, every="only in the end")
    attack.add_argument("--out", metavar="DIR", help="the run directory (runs/NAME; the experiment gives the name)")
    common.add_running(attack, "[DATASET]")
    common.add_naming(attack)
    attack.set_defaults(handle=_attack)


def _attack(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.cli.running import executed, same_command
    from folb.experiments import attack
    from folb.experiments.experiment import Experiment
    from folb.results.outcomes import outcomes, plain

    def listed(text: str | None) -> list[str] | None:
        return None if text is None else [name for name in text.split(",") if name]

    algorithms = listed(options.algorithms) or list(attack.ALGORITHMS)
    attacks = listed(options.attacks) or list(attack.ATTACKS)
    given = common.settings(options.set)
    chosen = attack.settings(algorithms, listed(options.rules), attacks, listed(options.attackers) or [], given)
    if options.evaluate_every is None:
        options.evaluate_every = options.rounds or Experiment.rounds
    experiment = common.experiment(options, algorithms=algorithms, set=chosen)
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
