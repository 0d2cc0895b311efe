"""`folb attack`: an experiment with rules, attacks and shares of liars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from folb.core.robust import ROBUST

ALGORITHMS = ("fedavg", "folb", "accord")
ATTACKS = (
    *("honest", "flipped", "flipped_x1000", "inflated_back", "noise", "reversed", "alie", "ipm", "min_max", "min_sum"),
    *("labels", "backdoor", "adaptive"),
)
RULES = {"fedavg": ("none", *ROBUST.parts), "accord": ("none", "norm_bound")}  # of others: none, and norm_bound


def settings(
    algorithms: Sequence[str],
    rules: Sequence[str] | None,
    attacks: Sequence[str],
    attackers: Sequence[str],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of the experiment. FOLB is plain and guarded; all others have the robust `rules`, or the usual ones.

    A setting in `given` replaces these.
    """
    chosen: dict[str, Any] = {"attack": list(attacks), "attack.share": list(attackers)}
    for name in (name.rpartition(":")[2] for name in algorithms):
        guarded = name.startswith("folb") and rules is None
        own = {"guard": ["none", "on"]} if guarded else {"robust": list(rules or RULES.get(name, RULES["accord"]))}
        set_already = {*given, *given.get(name, {})}
        chosen[name] = {key: value for key, value in own.items() if key not in set_already}
    tables = {name: {**chosen.get(name, {}), **value} for name, value in given.items() if isinstance(value, Mapping)}
    return {**chosen, **given, **tables}
