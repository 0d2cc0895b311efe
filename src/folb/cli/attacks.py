"""`folb attack`: devices that lie."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from folb.cli import options as common

if TYPE_CHECKING:
    from folb.experiments.attack import Outcome
    from folb.simulation.simulate import Observe


def add(commands: Any) -> None:
    """`folb attack`."""
    attack = commands.add_parser("attack", help="measure what lying devices gain in FOLB, guarded FOLB and FedAvg")
    attack.add_argument(
        "dataset", metavar="DATASET", nargs="?", default="synthetic_1_1", help=f"{common.DATASET} (synthetic_1_1)"
    )
    attack.add_argument(
        "--attackers", type=int, help="how many devices lie (one in ten); colluding, three times as many"
    )
    attack.add_argument("--model", help="a model of `folb list`, or my_file.py:function (by dataset)")
    attack.add_argument("--system", help="a system model of `folb list` (uniform)")
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


def _attack(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.cli.progress import under_progress
    from folb.experiments import attack
    from folb.experiments.plan import plan

    given = attack.SETTINGS | common.settings(options.set)
    experiment = common.experiment(options, algorithms=list(attack.ALGORITHMS), set=given)
    common.use_compilation_cache()
    planned = plan(experiment)
    contests = attack.contests(planned, options.attackers)

    def work(begin: Callable[[int], None], observe: Observe) -> list[Outcome]:
        begin(len(contests) * len(experiment.seeds) * experiment.rounds)
        return attack.measure(planned, contests, observe)

    outcomes = under_progress(options, "rounds", work)
    if options.json:
        print(json.dumps(attack.document(planned, outcomes)))
        return
    K, cap = planned.algorithms[0].selection.K, attack.cap(planned)
    tables.say(tables.summary(planned))
    tables.show(tables.outcomes(outcomes))
    tables.say(
        f"\nshare: the attackers' part of all weight; worst: the largest weight of one attacker\n(guarded, at most "
        f"{cap:g}/{K} = {cap / K:g} if all {K} reply); negated: the part of honest updates that count backwards"
    )
