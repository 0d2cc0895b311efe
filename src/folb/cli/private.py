"""`folb privacy`: epsilon for a noise, and the noise for an epsilon."""

from __future__ import annotations

import argparse
import json
from typing import Any

from folb.cli.options import command


def add(commands: Any) -> None:
    privacy = command(commands, "privacy", "the noise for a budget of epsilon, or the epsilon of a noise", _privacy)
    privacy.add_argument("--devices", metavar="N", type=int, required=True, help="how many devices there are")
    privacy.add_argument("--K", metavar="K", type=int, default=10, help="devices of a round (10)")
    privacy.add_argument("--rounds", metavar="R", type=int, default=100, help="rounds (100)")
    privacy.add_argument("--epsilon", metavar="E", type=float, help="the budget, to find its noise")
    privacy.add_argument("--noise", metavar="Z", type=float, help="the noise of a sum, in clips, to find its epsilon")
    privacy.add_argument("--delta", metavar="D", type=float, default=1e-5, help="less than 1 / N (0.00001)")
    says = "each device by itself with the chance K/N, or K of them without replacement (poisson)"
    privacy.add_argument("--sampling", choices=("poisson", "uniform"), default="poisson", help=says)
    privacy.add_argument("--json", action="store_true", help="print JSON")


def _privacy(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.core import accountant
    from folb.errors import InputError, check, check_number, check_whole

    scheme = {"poisson": "poisson", "uniform": "fixed"}[options.sampling]
    check_whole("K", options.K, 1)
    check_whole("rounds", options.rounds, 1)
    most, epsilon, noise = options.rounds, options.epsilon, options.noise
    try:
        accountant.check_budget(epsilon, options.delta, options.K, options.devices)
        if noise is not None:
            check_number("noise", noise, *accountant.NOISE[:2])
        else:
            expected = "should be the budget, such as --epsilon 8; or give --noise, such as --noise 1"
            check("epsilon", epsilon, epsilon is not None, expected)
            noise = accountant.noise_for(epsilon, options.delta, scheme, options.K, options.devices, most)
    except InputError as error:  # it should name the option, and not the setting of a run
        raise InputError(error.field.rpartition(".")[2], error.value, error.expected) from error
    how = accountant.Rounds(scheme, options.K, options.devices, noise)
    rounds = most if epsilon is None else how.within(epsilon, options.delta, most)
    loss = {
        "devices": options.devices,
        "K": options.K,
        "sampling": options.sampling,
        "delta": options.delta,
        "noise": noise,
        "rounds": rounds,
        "epsilon": round(how.epsilon(rounds, options.delta), 4),
    }
    if options.json:
        print(json.dumps(loss))
        return
    tables.say(f"noise {noise:g}: the sum of a round has noise of standard deviation {noise:g} times the clip")
    ended = "" if rounds == most else f", and one more round would exceed {epsilon:g}"
    count = f"{rounds} round{'s' * (rounds != 1)}"
    tables.say(f"epsilon {loss['epsilon']:g} after {count}, with delta {options.delta:g}{ended}")
