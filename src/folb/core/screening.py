"""What stands around a rule: the guard, and a robust centre in place of its mean.

A reply that they reject or shorten must not change the model in another way: by the server step, a memory or the step
size. So these see the round as it is after the same screening.
"""

from __future__ import annotations

from folb.core import robust
from folb.core.algorithm import Algorithm
from folb.core.rules import Round, Update


def update_of(algorithm: Algorithm, round: Round) -> Update:
    """What the rule makes of a round: guarded first, then robust."""
    if algorithm.guard is not None:
        made = algorithm.guard.update(algorithm.rule, round)
    else:
        made = algorithm.rule.update(round if algorithm.robust is None else robust.finite(round))
    return made if algorithm.robust is None else robust.recentred(made, algorithm.robust, round)


def shortened(algorithm: Algorithm, round: Round) -> Round:
    """The round as the server step, the memories and the step size see it: long replies cut, rejected ones left out."""
    if algorithm.guard is not None:
        round = algorithm.guard.bounded(round)
    return round if algorithm.robust is None else robust.bounded(round)
