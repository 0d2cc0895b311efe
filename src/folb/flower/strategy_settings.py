"""The settings of a Flower strategy: what each means, its default, and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from folb.core import conflicts, selection
from folb.core import system as systems
from folb.core.algorithm import Algorithm, flattened
from folb.core.guard import GUARDS, Guard
from folb.errors import SINGLE, InputError, check, check_whole, choose
from folb.measures import ACCURACY, KNOWN, is_measure, measure

MAX_NORM = 100.0  # medians: honest devices that differ in data and work were seen to differ by 40


@dataclass(frozen=True)
class StrategySettings:
    """The keywords of a strategy, checked. The algorithm is then over-selected and guarded as they say.

    The keywords of FedAvg: `fraction_train`, if given, replaces the algorithm's K by this share of the present devices,
    and at least `min_train_nodes`. `fraction_evaluate` of them, and at least `min_evaluate_nodes`, evaluate the model
    after each round (by default none). No round begins with fewer than `min_available_nodes`.

    Real devices may lie, so an algorithm that sees their gradients has a `guard` by default, unless it is private: no
    device's weight exceeds cap / K, and no update is negated (folb.guard). It is given as to an algorithm; None or
    "none" means none.
    `seed` and `system` are the simulator's; so is `objective`, (1) with weights "uniform" or "samples".
    `deadline` is how many seconds a round may take, and `wait` how many it waits for nodes before it begins. A round
    with fewer than `min_replies` usable replies is abandoned, and the model stays as it was; by default that is half of
    its devices if the rule is guarded or robust, none if it is private, and otherwise 1. After `max_abandoned` such
    rounds in a row the run ends, and can be resumed. `over_selection` = 1.3 asks 30 % more devices than K, and closes
    the round once K have answered, or a little later: a device whose reply was just used waits for its turn
    (`folb.flower.device_draw`); by default it is the algorithm's, or 1. An update longer than `max_norm` times the
    median of its round is shortened to that, and the record says so.
    A private algorithm is accounted for with N = `min_available_nodes`: no round draws from fewer. Its draws and its
    noise come from the operating system; with `replay` they follow from the seed, which is for reproduction alone.
    `directory` is the run directory, like one of the simulator; a strategy that finds its run there resumes it.
    `dataset`, `model`, `target` and `judged_by` are only for its report: the target is for the test accuracy, or for
    another metric of the evaluation, such as "f1" or "mse".
    """

    algorithm: Algorithm
    _: KW_ONLY
    guard: Any = "on"
    seed: int = 0
    system: Any = None  # a system model; None: uniform()
    objective: str = "uniform"
    deadline: float = 600.0
    wait: float = 60.0
    min_replies: int | None = None
    max_abandoned: int = 10
    over_selection: float | None = None
    max_norm: float = MAX_NORM
    fraction_train: float | None = None
    min_train_nodes: int = 1
    fraction_evaluate: float = 0.0
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 2
    replay: bool = False
    directory: str | Path | None = None
    dataset: str = "flower"
    model: str = "deployed"
    target: float = 0.7
    judged_by: str = ACCURACY

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        if not isinstance(algorithm, Algorithm):
            raise InputError("algorithm", algorithm, "should be an Algorithm, such as algorithms.folb()")
        conflicts.check(algorithm, conflicts.on_flower)
        self._check_each()
        self._check_counts(algorithm)
        if algorithm.privacy is not None:
            self._check_private(algorithm)
        system = systems.uniform() if self.system is None else self.system
        check("system", system, callable(system), "should be a system model, such as system.uniform()")
        if needs := systems.asked_for(system):
            expected = f"should not need {', '.join(needs)}: on Flower bytes and seconds are real"
            raise InputError("system", systems.described(system)[0], expected)
        guard = self._guard()
        changed: dict[str, Any] = {}
        if guard is not None and algorithm.guard is None and algorithm.privacy is None and algorithm.sees_gradients:
            changed["guard"] = guard
        if self.over_selection is not None:
            changed["select.over_selection"] = self.over_selection
        if changed:
            algorithm = algorithm.replace(**changed)
        given = {"algorithm": algorithm, "guard": guard, "system": system}
        vars(self).update(given, seed=int(self.seed), max_norm=float(self.max_norm))  # in place of what was given

    def _guard(self) -> Guard | None:
        """The guard that is asked for, as an algorithm would have it."""
        none = isinstance(self.guard, str) and self.guard == "none"
        given = flattened({GUARDS.name: None if none else self.guard})
        made: Guard | None = GUARDS.changed(Guard(), {path.partition(".")[2]: value for path, value in given.items()})
        return made

    def _check_each(self) -> None:
        """Raise an `InputError` for a setting that is wrong by itself."""
        check("replay", self.replay, isinstance(self.replay, bool), "should be True or False")
        for name in ("seed", "max_abandoned", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            check_whole(name, getattr(self, name), 0 if name == "seed" else 1)
        if self.min_replies is not None:
            check_whole("min_replies", self.min_replies, 1)
        choose("objective", self.objective, ("uniform", "samples"))
        check_in("deadline", self.deadline, lambda value: 0 < value < math.inf, "more than 0 seconds")
        check_in("wait", self.wait, lambda value: 0 <= value < math.inf, "at least 0 seconds")
        check_in("max_norm", self.max_norm, lambda value: value >= 1, "at least 1; inf for no bound")
        if self.fraction_train is not None:
            check_in("fraction_train", self.fraction_train, lambda value: 0 <= value <= 1, "from 0 to 1")
        check_in("fraction_evaluate", self.fraction_evaluate, lambda value: 0 <= value <= 1, "from 0 to 1")
        choose("judged_by", self.judged_by, [ACCURACY, *([self.judged_by] if is_measure(self.judged_by) else KNOWN)])
        most, range = (1.0, " and at most 1") if measure(self.judged_by).is_share else (SINGLE, "")
        check_in("target", self.target, lambda value: 0 < value <= most, f"more than 0{range}")
        check("directory", self.directory, isinstance(self.directory, str | Path | None), "should be a path")

    def _check_counts(self, algorithm: Algorithm) -> None:
        """Raise an `InputError` for numbers of devices that do not go together."""
        how, share = algorithm.selection, self.fraction_train
        if share is None:
            fits = (self.min_replies or 1) <= how.enough
            check("min_replies", self.min_replies, fits, f"should be at most K = {how.enough}")
            expected = "needs fraction_train; without it K devices train"
            check("min_train_nodes", self.min_train_nodes, self.min_train_nodes == 1, expected)
        elif how.mean is not None:
            expected = "should be None with select=poisson, whose K says how many join on average"
            raise InputError("fraction_train", share, expected)

    def _check_private(self, algorithm: Algorithm) -> None:
        """Raise an `InputError` for settings that would send values without noise, or that epsilon does not cover."""
        assert algorithm.privacy is not None
        K = algorithm.privacy.K
        if self.replay and not algorithm.privacy.replay:
            raise InputError("replay", self.replay, "should be False: the algorithm has privacy.replay=False")
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


def check_in(field: str, value: Any, holds: Callable[[float], bool], range: str) -> None:
    """Raise an `InputError` unless `value` is a number in this range, which may have no end."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    check(field, value, number and holds(value), f"should be a number, {range}")
