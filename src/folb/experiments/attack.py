"""Devices that lie: what they report, and `folb attack`, which measures what they gain.

An attack is a record of numbers, so that many attacks with many seeds run as one program. The attackers know the
replies of the round's honest devices before they send their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from folb.core import tree
from folb.core.algorithm import Algorithm
from folb.core.guard import guard, is_guarded
from folb.core.rules import Round, Rule, Update, fraction
from folb.errors import InputError, check_whole
from folb.experiments.plan import Plan
from folb.results.run import Run
from folb.results.summary import finite
from folb.simulation.simulate import Observe, simulate
from folb.typing import Params


class Attack(NamedTuple):
    """What the devices with numbers below `attackers` report. By default they report the truth."""

    attackers: Any = 0
    update: Any = 1.0  # factor of the update
    gradient: Any = 1.0  # factor of the gradient
    shared: Any = 0.0  # 1: send the honest mean, scaled to the norm of their own, instead of their own
    grazing: Any = 0.0  # 1: turn the update until it just descends on their gradient, so that it passes the check
    gamma: Any = 0.0  # added to gamma


FLIPPED = {"update": -1.0}
REVERSED = {"update": -1.0, "shared": 1.0}

ATTACKS: dict[str, dict[str, float]] = {
    "none": {},
    "flipped, gradient x1": FLIPPED,
    "flipped, gradient x10": FLIPPED | {"gradient": 10.0},
    "flipped, gradient x1e6": FLIPPED | {"gradient": 1e6},
    "flipped, gradient x1e12": FLIPPED | {"gradient": 1e12},
    "flipped, gradient x1e-6": FLIPPED | {"gradient": 1e-6},
    "flipped, gradient x-100": FLIPPED | {"gradient": -100.0},
    "flipped, gradient x-1e12": FLIPPED | {"gradient": -1e12},
    "update NaN": {"update": np.nan},
    "update x1e12": {"update": 1e12},
    "mean reversed": REVERSED | {"gradient": -1.0},
    "mean reversed, grazing": REVERSED | {"gradient": 1e6, "grazing": 1.0},
}
COLLUDING = ("flipped, gradient x-100", "mean reversed", "mean reversed, grazing")
GAMMA: dict[str, dict[str, float]] = {  # on (18): only this rule uses gamma
    "(18) none": {},
    "(18) flipped, gamma + 1000": FLIPPED | {"gamma": 1000.0},
    "(18) gamma NaN": {"gamma": np.nan},
}


def attacked(algorithm: Algorithm, attack: Attack) -> Algorithm:
    """The algorithm with a server that sees every round as `attack` changes it."""
    server, size = algorithm.server, algorithm.step_size
    return replace(
        algorithm,
        rule=Partial(_deceived, rule=algorithm.rule, attack=attack),
        server=server._replace(apply=Partial(_apply_deceived, apply=server.apply, attack=attack)),
        step_size=None
        if size is None
        else size._replace(update=Partial(_sized_deceived, update=size.update, attack=attack)),
        memory=None
        if algorithm.memory is None
        else replace(algorithm.memory, update=Partial(_update_deceived, update=algorithm.memory.update, attack=attack)),
    )


def _deceived(round: Round, *, rule: Rule, attack: Attack) -> Update:
    return rule(seen(attack, round))


def _apply_deceived(memory: Any, round: Round, update: Update, *, apply: Any, attack: Attack) -> tuple[Params, Any]:
    return apply(memory, seen(attack, round), update)


def _sized_deceived(memory: Any, round: Round, *, update: Any, attack: Attack) -> Any:
    return update(memory, seen(attack, round))


def _update_deceived(round: Round, *, update: Any, attack: Attack) -> tuple[Any, Any]:
    return update(seen(attack, round))


def seen(attack: Attack, round: Round) -> Round:
    """The round as the server sees it."""
    if round.device is None:
        raise InputError("device", None, "an attack needs to know whose replies these are")
    liars, honest = _sides(attack, round.device, round.times)
    grad, second = None, round.second
    if round.grad is not None:
        grad = _told(attack, round.grad, attack.gradient, liars, honest)
    delta = _told(attack, round.delta, attack.update, liars, honest)
    if grad is not None:
        delta = _mixed(liars & (attack.grazing > 0), jax.vmap(_grazing)(delta, grad), delta)
    if second is not None and second.device is not None:
        second = second._replace(
            grad=_told(attack, second.grad, attack.gradient, *_sides(attack, second.device, second.times))
        )
    gamma = None if round.gamma is None else jnp.where(liars, round.gamma + attack.gamma, round.gamma)
    return round._replace(delta=delta, grad=grad, gamma=gamma, second=second)


def _sides(attack: Attack, device: Array, times: Array) -> tuple[Array, Array]:
    """The slots of attackers, and the slots of honest devices that replied."""
    liars = device < attack.attackers
    return liars, (times > 0) & ~liars


def _told(attack: Attack, stack: Params, factor: Any, liars: Array, honest: Array) -> Params:
    """The stack with the liars' entries replaced: `factor` times their own, or times the honest mean of their norm."""
    together = tree.combine(fraction(honest.astype(jnp.float32), jnp.sum(honest)), stack)
    length = jnp.where(attack.shared > 0, fraction(tree.norms(stack), tree.norm(together)), 0.0)

    def entry(own: Params, length: Array) -> Params:
        return jax.tree.map(lambda a, b: factor * jnp.where(attack.shared > 0, length * b, a), own, together)

    return _mixed(liars, jax.vmap(entry)(stack, length), stack)


def _grazing(delta: Params, grad: Params) -> Params:
    """The update, turned until it just descends on the gradient: by a hundredth of its norm."""
    norm = tree.norm(grad)
    down = jax.tree.map(lambda leaf: -fraction(leaf, norm), grad)
    along = tree.dot(delta, down)
    return tree.add(delta, down, jnp.maximum(0.01 * tree.norm(delta) - along, 0.0))


def _mixed(chosen: Array, a: Params, b: Params) -> Params:
    """For each slot, the entry of a if the slot is chosen, else the entry of b."""
    return jax.vmap(tree.where)(chosen, a, b)


class Contest(NamedTuple):
    """An attack by name, on one algorithm."""

    name: str
    attack: Attack
    algorithm: Algorithm
    guarded: bool


ALGORITHMS = ("folb", "folb_hetero", "fedavg")
SETTINGS = {"psi": 1.0}  # with a smaller psi, a lie about gamma gains little


def contests(planned: Plan, attackers: int | None = None) -> list[Contest]:
    """Every attack on plain FOLB, guarded FOLB and FedAvg in turn. By default one device in ten attacks.

    Attacks that gain from more attackers are repeated with three times as many.
    """
    found = {algorithm.name: algorithm for algorithm in planned.algorithms}
    for name in found:
        for key, value in planned.experiment.set[name].items():
            if isinstance(value, list | tuple):
                raise InputError(key, value, "should be one value")
    if any(map(is_guarded, planned.algorithms)):
        raise InputError("guarded", True, "should not be set: both are measured")
    N = planned.federation.N
    count = max(1, N // 10) if attackers is None else attackers
    check_whole("attackers", count, 1, N)
    colluders = min(3 * count, N)
    named = [(name, "folb", Attack(count, **numbers)) for name, numbers in ATTACKS.items()]
    named += [(f"{name}, by {colluders}", "folb", Attack(colluders, **ATTACKS[name])) for name in COLLUDING]
    named += [(name, "folb_hetero", Attack(count, **numbers)) for name, numbers in GAMMA.items()]
    return [
        Contest(name, attack, algorithm, is_guarded(algorithm))
        for name, on, attack in named
        for algorithm in (found[on], guard(found[on], cap(planned)), found["fedavg"])
    ]


def cap(planned: Plan) -> float:
    """c of the bound c/K."""
    return float(planned.algorithms[0].origin.settings["cap"])


@dataclass(frozen=True)
class Outcome:
    """The effect of an attack on one algorithm, over the rounds of all seeds."""

    attack: str
    attackers: int
    algorithm: str
    guarded: bool
    share: float  # the attackers' part of all absolute weight: the mean over rounds with attackers
    worst: float  # the largest absolute weight that one attacking device got
    negated: float  # the part of honest updates with a negative weight
    accuracy: Sequence[float]  # the last, for each seed; NaN where the model is not finite


def measure(planned: Plan, contests: Sequence[Contest], observe: Observe | None = None) -> list[Outcome]:
    """Run all contests. Those on one algorithm run as one program."""
    experiment = planned.experiment
    runs = simulate(
        planned.federation,
        planned.model,
        [attacked(contest.algorithm, contest.attack) for contest in contests],
        rounds=experiment.rounds,
        seeds=experiment.seeds,
        system=planned.system,
        objective=experiment.objective,
        evaluate_every=experiment.rounds,
        record=("weights",),
        observe=observe,
    )
    seeds = len(experiment.seeds)
    return [outcome(contest, runs[i * seeds : (i + 1) * seeds]) for i, contest in enumerate(contests)]


def outcome(contest: Contest, runs: Sequence[Run]) -> Outcome:
    """The outcome of a contest, from the recorded weights."""
    devices, times, weights = (
        np.concatenate(parts) for parts in zip(*((r.devices, r.times, r.records["weights"]) for r in runs), strict=True)
    )
    liars = (devices < contest.attack.attackers) & (times > 0)
    honest = (times > 0) & ~liars
    all_weight, theirs = (np.sum(np.abs(weights), axis=1, where=some) for some in (times > 0, liars))
    present = liars.any(axis=1)
    shares = np.divide(theirs, all_weight, out=np.zeros_like(theirs), where=all_weight != 0)[present]
    sound = [all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params)) for run in runs]
    return Outcome(
        attack=contest.name,
        attackers=int(contest.attack.attackers),
        algorithm=contest.algorithm.name,
        guarded=contest.guarded,
        share=float(np.mean(shares)) if len(shares) else 0.0,
        worst=float(np.max(np.abs(weights), where=liars, initial=0.0)),
        negated=float(np.sum(weights[honest] < 0) / max(honest.sum(), 1)),
        accuracy=[run.final if fine else np.nan for run, fine in zip(runs, sound, strict=True)],
    )


def document(planned: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The outcomes as one JSON-ready document. Values that are not finite become null."""
    experiment, K = planned.experiment, planned.algorithms[0].selection.K
    return {
        "dataset": experiment.dataset,
        "note": planned.federation.note,
        "rounds": experiment.rounds,
        "seeds": list(experiment.seeds),
        "K": K,
        "cap": cap(planned),
        "outcomes": [
            {
                "attack": one.attack,
                "attackers": one.attackers,
                "algorithm": one.algorithm,
                "guarded": one.guarded,
                "share": finite([one.share])[0],
                "worst": finite([one.worst])[0],
                "negated": one.negated,
                "accuracy": finite(one.accuracy),
            }
            for one in outcomes
        ],
    }
