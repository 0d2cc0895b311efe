"""The settings of a Flower strategy: what each means, its default, and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from folb.core import conflicts, selection
from folb.core import system as systems
from folb.core.algorithm import Algorithm, flattened
from folb.core.guard import GUARDS, Guard
from folb.core.part import FLAG, Range, setting, whole
from folb.errors import SINGLE, InputError, check, choose
from folb.measures import ACCURACY, KNOWN, is_measure, measure


def _number(holds: Callable[[float], bool], words: str) -> Range:
    """A number, which may be infinite."""
    return Range(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value),
        f"should be a number, {words}",
        number=False,
    )


SECONDS = _number(lambda value: 0 < value < math.inf, "more than 0 seconds")
WAIT = _number(lambda value: 0 <= value < math.inf, "at least 0 seconds")
MEDIANS = _number(lambda value: value >= 1, "at least 1; inf for no bound")
SHARE = _number(lambda value: 0 <= value <= 1, "from 0 to 1")
SEED, COUNT = whole(0, 2**32 - 1), whole(1, 2**32 - 1)


@dataclass(frozen=True)
class StrategySettings:
    """The keywords of a strategy, checked. The algorithm is then over-selected and guarded as they say.

    Real devices may lie, so an algorithm that sees their gradients has a `guard` by default, unless it is private: no
    device's weight exceeds cap / K, and no update is negated (folb.guard). A private algorithm is accounted for with
    N = `min_available_nodes`: no round draws from fewer. Its draws and its noise come from the operating system, unless
    it is to `replay`. By default `min_replies` is half of a round's devices if the rule is guarded or robust, 0 if it
    is private, and otherwise 1. With `over_selection` a round ends once K have answered, or a little later: a device
    whose reply was just used waits for its turn (`folb.flower.device_draw`).
    """

    algorithm: Algorithm
    _: KW_ONLY
    guard: Any = "on"  # as it is given to an algorithm; None or "none": none
    seed: int = setting("the simulator's", SEED, default=0)
    system: Any = None  # a system model, as in the simulator; None: uniform()
    hidden: Any = ()  # the paths of the hidden matrices of a network, or `folb.Hidden`s: accord whitens them
    objective: str = setting('(1) with weights "uniform" or "samples", as in the simulator', default="uniform")
    deadline: float = setting("seconds that a round may take", SECONDS, default=600.0)
    wait: float = setting("seconds that a round waits for nodes before it begins", WAIT, default=60.0)
    min_replies: int | None = setting("a round with fewer usable replies is abandoned", COUNT, default=None)
    max_abandoned: int = setting("after so many such rounds in a row the run ends; resume it", COUNT, default=10)
    over_selection: float | None = setting("in place of the algorithm's: 1.3 asks 30 % more than K", default=None)
    # honest devices that differ in data and work were seen to differ by 40 medians
    max_norm: float = setting("an update of more medians of its round is shortened to that", MEDIANS, default=100.0)
    fraction_train: float | None = setting("replaces K by this share of the present devices", SHARE, default=None)
    min_train_nodes: int = setting("at least so many train, with fraction_train", COUNT, default=1)
    fraction_evaluate: float = setting("the share that evaluates the model after a round", SHARE, default=0.0)
    min_evaluate_nodes: int = setting("at least so many evaluate, with fraction_evaluate", COUNT, default=1)
    min_available_nodes: int = setting("no round begins with fewer devices", COUNT, default=2)
    replay: bool = setting("draws and noise of a private run follow from the seed: to reproduce", FLAG, default=False)
    directory: str | Path | None = None  # the run directory, from which a run resumes, too
    dataset: str = setting("a name for the report", default="flower")
    model: str = setting("a name for the report", default="deployed")
    target: float = setting("for the report: of what it is judged by", default=0.7)
    judged_by: str = setting('the test accuracy, or another metric, such as "f1" or "mse"', default=ACCURACY)

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        expected = "should be an Algorithm, such as algorithms.folb()"
        check("algorithm", algorithm, isinstance(algorithm, Algorithm), expected)
        conflicts.check(algorithm, conflicts.on_flower)
        self._check(algorithm.selection)
        if algorithm.privacy is not None:
            self._check_private(algorithm)
        system = systems.uniform() if self.system is None else self.system
        check("system", system, callable(system), "should be a system model, such as system.uniform()")
        if needs := systems.asked_for(system):
            expected = f"should not need {', '.join(needs)}: on Flower bytes and seconds are real"
            raise InputError("system", systems.described(system)[0], expected)
        given = flattened({GUARDS.name: self.guard})
        guard = GUARDS.changed(Guard(), {path.partition(".")[2]: value for path, value in given.items()})
        if guard is not None and algorithm.guard is None and algorithm.privacy is None and algorithm.sees_gradients:
            algorithm = algorithm.replace(guard=guard)
        if self.over_selection is not None:
            algorithm = algorithm.replace(**{"select.over_selection": self.over_selection})
        # in place of what was given
        vars(self).update(algorithm=algorithm, guard=guard, system=system, seed=int(self.seed))
        vars(self).update(max_norm=float(self.max_norm))

    def _check(self, how: selection.Selection) -> None:
        """Raise an `InputError` for a setting that is wrong by itself, and for numbers that do not go together."""
        for one in fields(self):
            within, value = one.metadata.get("within"), getattr(self, one.name)
            if within is not None and not (value is None and one.default is None):
                check(one.name, value, within.holds, within.words)
        check("directory", self.directory, isinstance(self.directory, str | Path | None), "should be a path")
        choose("objective", self.objective, ("uniform", "samples"))
        choose("judged_by", self.judged_by, [ACCURACY, *([self.judged_by] if is_measure(self.judged_by) else KNOWN)])
        most, end = (1.0, " and at most 1") if measure(self.judged_by).is_share else (SINGLE, "")
        check("target", self.target, *_number(lambda value: 0 < value <= most, f"more than 0{end}")[:2])
        if self.fraction_train is None:
            K, least = how.enough, self.min_replies or 1
            check("min_replies", self.min_replies, least <= K, f"should be at most K = {K}")
            expected = "needs fraction_train; without it K devices train"
            check("min_train_nodes", self.min_train_nodes, self.min_train_nodes == 1, expected)
        elif how.mean is not None:
            expected = "should be None with select=poisson, whose K says how many join on average"
            raise InputError("fraction_train", self.fraction_train, expected)

    def _check_private(self, algorithm: Algorithm) -> None:
        """Raise an `InputError` for settings that would send values without noise, or that epsilon does not cover."""
        assert algorithm.privacy is not None
        K = algorithm.privacy.K
        expected = "should be False: the algorithm has privacy.replay=False"
        check("replay", self.replay, algorithm.privacy.replay or not self.replay, expected)
        for name in ("fraction_train", "min_replies", "over_selection"):
            value = getattr(self, name)
            if value is not None and (name == "fraction_train" or value != 1):  # a share of 1 means all devices, not K
                expected = f"should be None with privacy: every round has its K = {K}, and is closed"
                raise InputError(name, value, expected)
        expected = "should be 0 with privacy: the devices' metrics would have no noise"
        check("fraction_evaluate", self.fraction_evaluate, self.fraction_evaluate == 0, expected)
        expected = f"should be at least K = {K} with privacy: epsilon is computed for this number of devices"
        check("min_available_nodes", self.min_available_nodes, self.min_available_nodes >= K, expected)

    def sized(self, algorithm: Algorithm, N: int) -> Algorithm:
        """The algorithm with the K that it asks among N devices."""
        how = algorithm.selection
        K = how.enough if self.fraction_train is None else max(self.min_train_nodes, int(self.fraction_train * N))
        return algorithm.but(selection=selection.sized(how, K, N, "fraction_train: devices of a round"))

    @property
    def trusts_majority(self) -> bool:
        """Whether the rule relies on a majority of honest replies."""
        return self.algorithm.guard is not None or self.algorithm.robust is not None
