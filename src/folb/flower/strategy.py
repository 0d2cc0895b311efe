"""Any algorithm of folb as a Flower strategy on the Message API.

Draws, random words, rules and server steps are the simulator's own, from `folb.core.round`; this module carries them to
real devices. A round draws one multiset of devices, and sends a message to each distinct device. The replies that pass
the checks of `folb.flower.replies` are stacked in ascending order of identity, and one compiled step uses them. So
neither Flower's node ids nor the order of the replies can change a bit of the result.
"""

from __future__ import annotations

import logging
import math
import secrets
import shlex
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from folb.core import gaussian, privacy, selection, tree, vector
from folb.core import round as core_round
from folb.core import system as systems
from folb.core.algorithm import Algorithm
from folb.core.average import ServerModel
from folb.core.guard import check_around, guard
from folb.core.privacy import Noise
from folb.core.round import Closed, State, model_encoded, model_sent, shared_words
from folb.core.rules import Round
from folb.core.system import System
from folb.core.upload import DELTA, GRAD, Upload
from folb.errors import SINGLE, InputError, check, check_whole, choose
from folb.flower import protocol
from folb.flower.mailbox import SLACK, Mailbox
from folb.flower.open_round import (
    OpenRound,
    candidates,
    close,
    form,
    plan,
    recorded,
    shifts,
    stacked_upload,
    through,
    with_noise,
)
from folb.flower.protocol import Arrays, Task
from folb.flower.remembered import Remembered
from folb.flower.replies import Expected, Form, Refused, Reply, evaluation, means
from folb.flower.roster import Member, Roster
from folb.flower.run_directory import RunRecord, RunSettings, recording
from folb.measures import ACCURACY, KNOWN, is_measure, measure
from folb.typing import NDArray

MAX_NORM = 100.0  # medians: honest devices that differ in data and work were seen to differ by 40

log = logging.getLogger("flwr")  # the log that users of Flower read


class FederatedStrategy(Strategy):
    """An algorithm of folb, such as `folb.algorithms.folb(K=10)`, as a Flower strategy.

    The keywords of FedAvg: `fraction_train`, if given, replaces the algorithm's K by this share of the present devices,
    and at least `min_train_nodes`. `fraction_evaluate` of them, and at least `min_evaluate_nodes`, evaluate the model
    after each round (by default none). No round begins with fewer than `min_available_nodes`.

    Real devices may lie, so a FOLB rule is `guarded` by default: no device's weight exceeds `cap` / K, and no update is
    negated (folb.guard).
    `seed` and `system` are the simulator's; so is `objective`, (1) with weights "uniform" or "samples".
    `deadline` is how many seconds a round may take, and `wait` how many it waits for nodes before it begins. A round
    with fewer than `min_replies` usable replies is abandoned, and the model stays as it was; by default that is half of
    its devices if the rule is guarded or robust, and otherwise 1. After `max_abandoned` such rounds in a row the run
    ends, and can be resumed. `over_selection` = 1.3 asks 30 % more devices than K, and closes the round once K have
    answered, or a little later: a device whose reply was just used waits for its turn (`_enough`); by default it
    is the algorithm's, or 1. An update longer than `max_norm` times the median of its round is shortened to that, and
    the record says so.
    A private algorithm is accounted for with N = `min_available_nodes`: no round draws from fewer. Its draws and its
    noise come from the operating system; with `replay` they follow from the seed, which is for reproduction alone.
    `directory` is the run directory, like one of the simulator; a strategy that finds its run there resumes it.
    `dataset`, `model`, `target` and `judged_by` are only for its report: the target is for the test accuracy, or for
    another metric of the evaluation, such as "f1" or "mse".
    """

    further: tuple[Upload, ...] = ()  # what a strategy asks devices for before its `uploads`

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        guarded: bool = True,
        cap: float = 2.0,
        seed: int = 0,
        system: System | None = None,
        objective: str = "uniform",
        deadline: float = 600.0,
        wait: float = 60.0,
        min_replies: int | None = None,
        max_abandoned: int = 10,
        over_selection: float | None = None,
        max_norm: float = MAX_NORM,
        fraction_train: float | None = None,
        min_train_nodes: int = 1,
        fraction_evaluate: float = 0.0,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 2,
        replay: bool = False,
        directory: str | Path | None = None,
        dataset: str = "flower",
        model: str = "deployed",
        target: float = 0.7,
        judged_by: str = ACCURACY,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise InputError("algorithm", algorithm, "should be an Algorithm, such as algorithms.folb()")
        if algorithm.asynchrony is not None:
            expected = "should be None on Flower, where a round waits for its devices; the simulator has such rounds"
            raise InputError("concurrency", algorithm.asynchrony.concurrency, expected)
        if not isinstance(guarded, bool):
            raise InputError("guarded", guarded, "should be True or False")
        check_whole("seed", seed, 0)
        choose("objective", objective, ("uniform", "samples"))
        _check_number("deadline", deadline, lambda value: 0 < value < math.inf, "more than 0 seconds")
        _check_number("wait", wait, lambda value: 0 <= value < math.inf, "at least 0 seconds")
        if min_replies is not None:
            check_whole("min_replies", min_replies, 1)
        check_whole("max_abandoned", max_abandoned, 1)
        algorithm = replace(algorithm, selection=selection.over_selected(algorithm.selection, over_selection))
        for name, fraction in (("fraction_train", fraction_train), ("fraction_evaluate", fraction_evaluate)):
            if fraction is not None:
                _check_number(name, fraction, lambda value: 0 <= value <= 1, "from 0 to 1")
        choose("judged_by", judged_by, [ACCURACY, *([judged_by] if is_measure(judged_by) else KNOWN)])
        if measure(judged_by).is_share:
            _check_number("target", target, lambda value: 0 < value <= 1, "more than 0 and at most 1")
        else:
            _check_number("target", target, lambda value: 0 < value <= SINGLE, "more than 0")
        _check_number("max_norm", max_norm, lambda value: value >= 1, "at least 1; inf for no bound")
        if fraction_train is None and min_replies is not None and min_replies > algorithm.selection.enough:
            raise InputError("min_replies", min_replies, f"should be at most K = {algorithm.selection.enough}")
        for name, number in (
            ("min_train_nodes", min_train_nodes),
            ("min_evaluate_nodes", min_evaluate_nodes),
            ("min_available_nodes", min_available_nodes),
        ):
            check_whole(name, number, 1)
        if fraction_train is None and min_train_nodes != 1:
            raise InputError("min_train_nodes", min_train_nodes, "needs fraction_train; without it K devices train")
        if fraction_train is not None and algorithm.selection.sampling.expected is not None:
            expected = "should be None with sampling=poisson, whose K says how many join on average"
            raise InputError("fraction_train", fraction_train, expected)
        _check_number("cap", cap, lambda value: 1 <= value < math.inf, "at least 1")
        if algorithm.attack is not None:
            raise InputError("attack", algorithm.name, "should be none on real devices: attacks are for the simulator")
        if algorithm.root is not None:
            raise InputError("robust", "fltrust", "should be another rule: a Flower server has no samples of its own")
        if not isinstance(replay, bool):
            raise InputError("replay", replay, "should be True or False")
        if replay and algorithm.privacy is not None and algorithm.privacy.secret:
            raise InputError("replay", replay, "should be False: the algorithm has replay=False")
        if algorithm.privacy is not None:
            asked = {"fraction_train": fraction_train, "min_replies": min_replies, "over_selection": over_selection}
            _check_private(algorithm, asked, fraction_evaluate, min_available_nodes)
        if algorithm.guard is not None:
            check_around(algorithm)
        self.algorithm = self._composed = guard(algorithm, cap) if guarded and algorithm.privacy is None else algorithm
        self.replay, self.spent = replay, 0  # the rounds that a private run has asked devices for
        self.wants_guard = guarded
        self.seed, self.objective = int(seed), objective
        self.system = systems.uniform() if system is None else system
        if not callable(self.system):
            raise InputError("system", system, "should be a system model, such as system.uniform()")
        if needs := systems.asked_for(self.system):
            expected = f"should not need {', '.join(needs)}: on Flower bytes and seconds are real"
            raise InputError("system", getattr(self.system, "func", self.system), expected)
        self.deadline, self.wait = float(deadline), float(wait)
        self.round_seconds = self.deadline  # of a round in this start: its timeout, if it has one
        self.min_replies, self.max_abandoned = min_replies, max_abandoned
        self.max_norm = float(max_norm)
        self.lengths: list[float] = []  # of a usual update, in each round
        self.used: set[int] = set()  # devices whose reply was used the last time they were asked
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self.fraction_evaluate, self.min_evaluate_nodes = fraction_evaluate, min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        if directory is not None and not isinstance(directory, str | Path):
            raise InputError("directory", directory, "should be a path")
        self.directory = None if directory is None else Path(directory)
        self.dataset, self.model, self.target, self.judged_by = dataset, model, target, judged_by
        self.awaited: set[int] = set()  # devices of the rounds before an interruption
        self.roster = Roster(self.wait)
        self.mailbox: Mailbox | None = None
        self.state: State | None = None  # without the model, which passes from round to round
        self.remembered = Remembered(())
        self.opened: OpenRound | None = None
        self.evaluating: list[Message] = []
        self.warned = False

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """What each device of S_1 sends: a round's tasks, forms and record follow from it."""
        return DELTA, *self.algorithm.uploads

    def summary(self) -> None:
        """Log what will be run."""
        algorithm = self.algorithm
        chosen = {key: value for key, value in algorithm.origin.settings.items() if value is not None}
        settings = ", ".join(f"{key}={value}" for key, value in chosen.items())
        log.info("%s with %s", algorithm.name, settings)
        log.info("rounds of at most %g s, and at least %s replies", self.round_seconds, self.min_replies or self._usual)
        if (found := algorithm.privacy) is not None:
            told = (found.place, found.scheme, self.min_available_nodes, found.noise, found.delta)
            log.info("private (%s, %s draws from %d devices or more): noise %s, delta %g", *told)
        if self.wants_guard and algorithm.guard is None:
            log.info("not guarded: %s does not ask its devices for gradients", algorithm.name)

    # -- a run ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run `num_rounds` rounds; `timeout` is a round's deadline, in place of the strategy's own.

        evaluate_fn(round, arrays) is called with the model before the first round and after each. Its "accuracy" and
        "loss" become the test accuracy and the training loss of the run's record. Metrics that have folb's names, such
        as "f1", "auc", "top5", "mse" or "own_worst", are recorded under these names.
        """
        check_whole("num_rounds", num_rounds, 1)
        if timeout is not None:
            _check_number("timeout", timeout, lambda value: 0 < value < math.inf, "more than 0 seconds")
        self.round_seconds = self.deadline if timeout is None else float(timeout)
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if config:
                expected = "should be empty: a device reads its settings from the run's config, context.run_config"
                raise InputError(name, dict(config), expected)
        self.algorithm = core_round.over_rounds(self._composed, num_rounds)
        model = self._checked_model(initial_arrays)
        self.algorithm = privacy.calibrated(self.algorithm, self.min_available_nodes, num_rounds)
        privacy.affordable(self.algorithm, self.min_available_nodes, 1)  # raises if the budget covers no round
        self.mailbox, self.roster, self.lengths, self.used = Mailbox(grid), Roster(self.wait), [], set()
        self.spent = 0
        self.summary()
        state = self._begin(model)
        self._forms(model)  # an upload that cannot be sent is an error now, and not in the first round
        if self.directory is None:
            return self._rounds(grid, state, num_rounds, evaluate_fn, None)
        about = RunSettings(
            self.algorithm,
            self.system,
            self.seed,
            self.objective,
            num_rounds,
            self.dataset,
            self.model,
            self.target,
            self.judged_by,
        )
        how = f"{type(self).__name__} {self.fraction_train} {self.min_train_nodes} {self.algorithm.selection.factor}"
        how += "" if self.max_norm == MAX_NORM else f" {self.max_norm}"  # an earlier run has none in its identity
        if self.algorithm.privacy is not None:  # epsilon is computed for this number of devices in all rounds
            how += f" {self.min_available_nodes}"
        with recording(self.directory, about, state, how) as record:
            self.awaited, self.spent = set(record.devices), record.asked
            self.lengths = [line["length"] for line in record.lines if "length" in line]
            for line in record.lines:
                there = [k for k, times in zip(line["devices"], line["times"], strict=True) if times]
                self.used = used_of(self.used, line["devices"], there)
            result = self._rounds(grid, record.state, num_rounds, evaluate_fn, record)
            record.finish(protocol.unpacked(result.arrays))
        return result

    def _rounds(
        self,
        grid: Grid,
        state: State,
        num_rounds: int,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        record: RunRecord | None,
    ) -> Result:
        """The remaining rounds; each is recorded when it is finished."""
        assert self.mailbox is not None
        result, done, in_a_row = Result(), 0 if record is None else record.done, 0
        self.state, arrays = state, protocol.packed(state.params)
        self.remembered.unpack(state.devices)
        if evaluate_fn is not None and done == 0 and (found := evaluate_fn(0, self._kept(arrays))) is not None:
            result.evaluate_metrics_serverapp[0] = found
        for t in range(done + 1, num_rounds + 1):
            if self._exceeds_budget(t):
                break
            if record is not None and self.algorithm.privacy is not None:
                record.ask(self.spent)
            messages = list(self.configure_train(t, arrays, ConfigRecord(), grid))
            received = self.mailbox.exchange(messages, self._round.left, self._enough)
            changed, numbers = self.aggregate_train(t, received)
            arrays = arrays if changed is None else changed
            if numbers is not None:
                result.train_metrics_clientapp[t] = numbers
            seconds = time.monotonic() - self._round.began
            model = self._kept(arrays)
            evaluations = list(self.configure_evaluate(t, model, ConfigRecord(), grid))
            measured = self.aggregate_evaluate(t, self.mailbox.exchange(evaluations, self.round_seconds))
            if measured is not None:
                result.evaluate_metrics_clientapp[t] = measured
            if evaluate_fn is not None and (found := evaluate_fn(t, model)) is not None:
                measured = result.evaluate_metrics_serverapp[t] = found
            told = [f"{name} {value:g}" for part in (numbers, measured) for name, value in (part or {}).items()]
            log.info("round %d of %d, %.1f s: %s", t, num_rounds, seconds, ", ".join(told))
            if record is not None:
                line = recorded(self._round, seconds, measured)
                identities = [member.identity for member in self._round.members]
                now = self.state._replace(params=protocol.unpacked(arrays), devices=self.remembered.packed())
                record.add(line, now, identities)
            in_a_row = in_a_row + 1 if self._round.abandoned else 0
            if in_a_row == self.max_abandoned and t < num_rounds:
                why = f"{in_a_row} rounds in a row were abandoned (the last: {self._round.abandoned})"
                raise RuntimeError(f"{why}; submit the same run again to resume it")
        if record is not None:
            path = record.path.resolve()  # the SuperLink's working directory is rarely the reader's
            log.info("the run is in %s: folb show %s", path, shlex.quote(str(path)))
        result.arrays = self._kept(arrays)
        return result

    def _exceeds_budget(self, t: int) -> bool:
        """Whether the budget of a private run is too small for round t. If it is not, the round counts from now on.

        If the run was interrupted in a round, this round is repeated and counts twice: its devices answer twice.
        """
        found = self.algorithm.privacy
        if found is None:
            return False
        self.spent += 1
        if found.epsilon is None or self._epsilon() <= float(found.epsilon):
            return False
        log.info("the budget of epsilon %g is spent: the run ends before round %d", found.epsilon, t)
        return True

    def _epsilon(self) -> float:
        """The epsilon of all rounds so far."""
        return privacy.spent(self.algorithm, self.min_available_nodes, self.spent)

    def _begin(self, model: Arrays) -> State:
        """The state before the first round."""
        state, own = core_round.begin(self.algorithm, model)
        self.remembered = Remembered(own)
        return state._replace(devices=self.remembered.packed())

    def _kept(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model to evaluate and keep: the server's, or the algorithm's average of its models."""
        assert self.state is not None
        if isinstance(self.algorithm.average, ServerModel):
            return arrays
        params = protocol.unpacked(arrays)
        found = core_round.kept(self.algorithm, self.state._replace(params=params))
        return protocol.packed({name: np.asarray(found[name]) for name in params})

    @property
    def _round(self) -> OpenRound:
        if self.opened is None:
            raise RuntimeError("no round has begun: configure_train begins one")
        return self.opened

    def _checked_model(self, arrays: ArrayRecord) -> Arrays:
        if not len(arrays):
            raise InputError("initial_arrays", [], "should hold at least one array")
        for name, array in arrays.items():
            if array.dtype != "float32":
                expected = "should be float32: only parameters are learnt; for a module use folb.flower.arrays(module)"
                raise InputError(f"initial_arrays: dtype of {name}", array.dtype, expected)
        model = protocol.unpacked(arrays)
        for name, value in model.items():
            if not np.isfinite(value).all():
                raise InputError(f"initial_arrays: {name}", value, "should be finite")
        return model

    # -- a round: its devices, and their tasks -------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's devices, with a message for each distinct one. `config` is not used."""
        if self.mailbox is None or self.mailbox.grid is not grid:
            self.mailbox = Mailbox(grid)
        params = protocol.unpacked(arrays)
        if self.state is None:
            self.state = self._begin(params)
        state = self.state._replace(params=params, devices=())
        arrays, start = self._sent(state, server_round, arrays)
        members = self._present(self.mailbox)
        until = time.monotonic() + self.round_seconds
        self.opened = opened = OpenRound(
            server_round, state, self.algorithm, members, until, self.uploads, start=start, noted=self._refusals()
        )
        opened.epsilon = None if self.algorithm.privacy is None else self._epsilon()
        opened.N = len({member.identity for member in members} | set(self.remembered.met))
        opened.forms = self._forms(params)
        if len(members) < self.min_available_nodes:
            opened.abandoned = f"{len(members)} devices are there, but {self.min_available_nodes} are needed"
            return []
        opened.algorithm = self._sized(len(members))
        opened.algorithm = core_round.with_step_size(opened.algorithm, state, server_round)
        who, size = np.array([m.identity for m in members], np.uint32), np.array([m.size for m in members], np.int32)
        how, seed, t = opened.algorithm.selection, np.uint32(self.seed), np.uint32(server_round)
        if how.sampling.first is not None and not self.remembered.met:
            self._meet(opened, arrays)
        some = candidates(how, len(members), seed, t)
        asked = members if some is None else [members[i] for i in np.asarray(some)]
        survey = None if opened.abandoned else self._survey(opened, arrays, asked)
        if opened.abandoned:
            return []
        luck = seed, t
        if self.algorithm.privacy is not None and not self.replay:
            luck = np.uint32(secrets.randbits(32)), np.uint32(secrets.randbits(32))
        drawn = plan(
            opened.algorithm,
            self.system,
            who,
            size,
            self._share(members),
            survey,
            self._known(asked) if how.sampling.memory else None,
            some,
            luck,
            seed,
            t,
        )
        opened.plan = jax.tree.map(np.asarray, drawn)
        opened.own = self.remembered.stacked(who[opened.plan.first.device].tolist())
        self._warn(len(opened.drawn), opened.algorithm)
        return self._ask(opened, arrays)

    def _sent(self, state: State, t: int, arrays: ArrayRecord) -> tuple[ArrayRecord, Arrays | None]:
        """The model as it is sent; and as devices decode it, if it has a codec."""
        params, codec, key = state.params, self.algorithm.compression.down, self._key(t)
        if codec is not None:
            encoded = {name: np.asarray(value) for name, value in model_encoded(self.algorithm, state, key).items()}
            return protocol.packed(encoded), codec.decoded(encoded, key, params)
        if not self.algorithm.server.starts_ahead:
            return arrays, None
        ahead = model_sent(self.algorithm, state)
        return protocol.packed({name: np.asarray(ahead[name]) for name in params}), None

    def _key(self, t: int) -> NDArray:
        """Two random words that all devices of round t share."""
        return np.asarray(shared_words(np.uint32(self.seed), np.uint32(t)))

    def _known(self, members: Sequence[Member]) -> Any:
        """What the sampling sees of the memory of devices."""
        found = self.remembered.stacked([member.identity for member in members])
        memory = self.algorithm.memory
        return found if memory is None else memory.samplings(found)

    def _meet(self, opened: OpenRound, arrays: ArrayRecord) -> None:
        """Ask all devices once, before the first round, for what the sampling wants to remember of them."""
        first = opened.algorithm.selection.sampling.first
        assert first is not None
        tasks = {m.identity: self._plain(opened.t, first.upload) for m in opened.members}
        found = self._exchange(opened, tasks, arrays)
        there = sorted(found)
        if len(there) < max(self.min_replies or 1, opened.algorithm.selection.K):
            opened.abandoned = f"{len(there)} devices answered before the first round, and K are needed"
            return
        answers = stacked_upload(first.upload, opened.forms[first.upload.name], [found[identity] for identity in there])
        known = jax.tree.map(np.asarray, first.remember(answers, opened.algorithm.selection.K))
        new = self.remembered.stacked(there)
        tree.check_like("sampling: first: what `remember` returns", known, new[1])
        self.remembered.update(there, [True] * len(there), (new[0], known))

    def _warn(self, distinct: int, algorithm: Algorithm) -> None:
        """Warn once that the guard's bound shortens every step: these few devices cannot hold all of the weight."""
        if algorithm.guard is None:
            return
        cap = float(algorithm.guard.cap)
        most = distinct * cap / algorithm.selection.K
        if most < 1 and not self.warned:
            self.warned = True
            log.warning(
                "%d devices, each with a weight of at most cap / K = %g / %d: weights add up to at most %.2g, and "
                "steps are that much shorter; use a smaller K",
                distinct,
                cap,
                algorithm.selection.K,
                most,
            )

    def _present(self, mailbox: Mailbox) -> list[Member]:
        """The present devices, once there are enough of them or the waiting time is over."""
        until = time.monotonic() + self.wait
        members = self.roster.update(mailbox, self.wait)
        while self._incomplete(members) and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            members = self.roster.update(mailbox, left)
        self.awaited = set()  # wait for them only once: a device may never come back
        return members

    def _incomplete(self, members: Sequence[Member]) -> bool:
        return len(members) < self.min_available_nodes or bool(self.awaited - {m.identity for m in members})

    def _refusals(self) -> list[tuple[int | None, str]]:
        """Rejections since the last round: of the roster, and of replies to earlier rounds."""
        found: list[tuple[int | None, str]] = [(None, reason) for reason in self.roster.refused]
        self.roster.refused = []
        for reply in self.mailbox.late() if self.mailbox is not None else []:
            if reply.has_content():
                reason = f"node {reply.metadata.src_node_id}: a late reply to round {reply.metadata.group_id}"
                log.warning("rejected: %s", reason)
                found.append((None, reason))
        return found

    def _sized(self, N: int) -> Algorithm:
        """The algorithm with the K that it asks among N devices."""
        how = self.algorithm.selection
        K = how.enough if self.fraction_train is None else max(self.min_train_nodes, int(self.fraction_train * N))
        return replace(self.algorithm, selection=selection.sized(how, K, N, "fraction_train: devices of a round"))

    @property
    def fewest(self) -> int:
        """The fewest distinct devices for a round that counts."""
        if self.algorithm.privacy is not None:
            return 0  # whether a private round is closed must not depend on what devices sent
        if self.min_replies is not None or not self._trusts_majority:
            return self.min_replies or 1
        return -(-min(len(self._round.drawn), self._round.algorithm.selection.enough) // 2)

    @property
    def _trusts_majority(self) -> bool:
        """Whether the rule relies on a majority of honest replies."""
        return self.algorithm.guard is not None or self.algorithm.robust is not None

    @property
    def _usual(self) -> str:
        if self.algorithm.privacy is not None:
            return "0"
        return "half of the" if self._trusts_majority else "1"

    def _survey(self, opened: OpenRound, arrays: ArrayRecord, members: Sequence[Member]) -> NDArray | None:
        """The answers of devices to the sampling's survey; for gradients <grad f, grad F_k>, as in (7).

        A device that does not answer has 0: it is drawn only without replacement, if fewer than K others have more. A
        candidate that does not answer comes last.
        """
        upload = self.algorithm.selection.sampling.survey
        if upload is None:
            return None
        tasks = {member.identity: self._plain(opened.t, upload) for member in members}
        found = self._exchange(opened, tasks, arrays)
        if len(found) < (self.min_replies or 1):
            opened.abandoned = f"{len(found)} devices answered the survey, but {self.min_replies or 1} are needed"
        there = [found.get(member.identity) for member in members]
        if upload != GRAD:
            silent = 0.0 if self.algorithm.selection.sampling.candidates is None else -np.inf
            return np.array([silent if reply is None else reply.numbers[upload.name] for reply in there], np.float32)
        grads = [None if reply is None else reply.arrays[upload.name] for reply in there]
        mean = {name: np.zeros_like(value) for name, value in opened.state.params.items()}
        for p, grad in zip(self._share(opened.members), grads, strict=True):
            if grad is not None:
                mean = {name: total + p * grad[name] for name, total in mean.items()}
        return np.array([0.0 if g is None else vector.dot(g, mean) for g in grads], np.float32)

    def _share(self, members: Sequence[Member]) -> NDArray:
        """p_k of (1), for the present devices."""
        size = np.array([member.size for member in members])
        share = size / size.sum() if self.objective == "samples" else np.full(len(size), 1 / len(size))
        return share.astype(np.float32)

    def _exchange(self, opened: OpenRound, tasks: Mapping[int, Task], arrays: ArrayRecord) -> dict[int, Reply]:
        """The usable replies to tasks before the round's own, in at most half of its time."""
        assert self.mailbox is not None
        opened.take(self.mailbox.exchange(self._messages(opened, tasks, arrays), opened.left / 2))
        return opened.turn()

    def _messages(
        self,
        opened: OpenRound,
        tasks: Mapping[int, Task],
        arrays: ArrayRecord,
        shift: Mapping[int, ArrayRecord] | None = None,
        mean: ArrayRecord | None = None,
    ) -> list[Message]:
        """A message for each task, by the device's identity. They count as asked. Only some have a `shift`."""
        members = {member.identity: member for member in opened.members}
        for identity, task in tasks.items():
            member = members[identity]
            records: dict[str, Any] = {protocol.MODEL: arrays, protocol.TASK: task.record()}
            if shift is not None and identity in shift:
                records[protocol.SHIFT] = shift[identity]
            if mean is not None:
                records[protocol.MEAN] = mean
            message = Message(
                RecordDict(records),
                dst_node_id=member.node,
                message_type="train",
                group_id=str(opened.t),
                ttl=self.round_seconds + SLACK,
            )
            codecs, params = self.algorithm.compression, opened.state.params
            forms = {name: through(task, opened.forms[name], name, codecs, params) for name in task.uploads}
            expected = Expected(opened.t, forms, member.size, member.node)
            opened.asked[identity] = (message, expected)
            opened.down += protocol.nbytes(message.content)
        return [opened.asked[identity][0] for identity in tasks]

    def _forms(self, params: Arrays) -> dict[str, Form]:
        """The form that each upload of a round must have, for a model like `params`."""
        how = self.algorithm.selection
        survey, first = how.sampling.survey, how.sampling.first
        asked = [] if survey is None else [survey]
        asked += [] if first is None else [first.upload]
        asked += [self.algorithm.second_upload] if how.second else []
        found = {upload.name: form(upload, params) for upload in (*self.further, *asked, *self.uploads)}
        if survey is not None and survey != GRAD and found[survey.name].shapes is not None:
            raise InputError(f"survey: {survey.name}", found[survey.name].shapes, "should be a number")
        return found

    def _plain(self, t: int, *uploads: Upload) -> Task:
        """A task without local work."""
        mu, key, names = float(self.algorithm.solver.mu), self._key(t), tuple(upload.name for upload in uploads)
        task = Task(t, names, key=(int(key[0]), int(key[1])), mu=mu, numbers=_numbers(uploads))
        codec = self.algorithm.compression.down
        if codec is None:
            return task
        return replace(task, down=codec.name, shapes=protocol.shapes(self._round.state.params))

    def _through(self, task: Task, words: Any) -> Task:
        """The task with the device's random words, and the codec of what it sends."""
        codecs, words = self.algorithm.compression, (int(words[0]), int(words[1]))
        if codecs.up is None:
            return replace(task, words=words)
        numbers = {"codec.keep": codecs.up.keep, "codec.feedback": float(codecs.feedback)}
        return replace(task, words=words, codec=codecs.up.name, numbers={**task.numbers, **numbers})

    def _work(self, work: Any, words: Any, t: int, uploads: Sequence[Upload]) -> Task:
        """The task of a slot: the local work that it has drawn, and its uploads."""
        solver = self._round.algorithm.solver
        steps = {f"step.{name}": float(value) for name, value in solver.step.numbers.items()}
        task = self._through(self._plain(t, *uploads), words)
        return replace(
            task,
            work=int(work),
            lr=float(solver.lr),
            batch=solver.batch,
            unit=solver.unit,
            step=solver.step.name,
            numbers={
                **task.numbers,
                **steps,
                **self._private(),
            },
        )

    def _private(self) -> dict[str, float]:
        """What a device of a private run is told: the clip and, if it adds noise, its standard deviations."""
        found, slots = self._round.algorithm.privacy, self._round.algorithm.selection.K
        if found is None:
            return {}
        told = {"clip": float(found.clip)}
        if found.place == "distributed":
            told |= {part: float(found.deviation(part, found.clip)) / math.sqrt(slots) for part in found.parts}
            told["replay"] = float(self.replay)
        return {f"privacy.{name}": value for name, value in told.items()}

    def _ask(self, opened: OpenRound, arrays: ArrayRecord) -> list[Message]:
        """Ask S_1 for updates and what else the rule needs, and the rest of S_2 for gradients."""
        drawn = opened.plan
        assert drawn is not None
        N = np.int32(max(opened.N, len(opened.members)))
        shift = shifts(opened.algorithm, opened.state, opened.own, drawn.steps, N)
        tasks, shifted = {}, {}
        for i, k in enumerate(drawn.first.device):
            if drawn.first.times[i] > 0 and not drawn.lost[i]:
                identity = opened.members[k].identity
                tasks[identity] = self._work(drawn.work[i], drawn.words[i], opened.t, opened.uploads)
                if shift is not None:
                    own = {name: np.asarray(shift[name][i], np.float32) for name in opened.state.params}
                    shifted[identity] = protocol.packed(own)
        if drawn.second is not None and drawn.second_lost is not None:
            second = self.algorithm.second_upload
            for i, k in enumerate(drawn.second.device):
                if drawn.second.times[i] > 0 and not drawn.second_lost[i]:
                    alone = self._through(self._plain(opened.t, second), drawn.second_words[i])
                    if self.algorithm.second_works:
                        alone = self._work(drawn.second_work[i], drawn.second_words[i], opened.t, (second,))
                    tasks.setdefault(opened.members[k].identity, alone)
        return self._messages(opened, tasks, arrays, shifted)

    # -- a round: its replies ------------------------------------------------------------------------------------------

    def _enough(self, received: Sequence[Message]) -> bool:
        """Whether K devices have answered, if more than K were asked.

        If some of them were used the last time they were asked, the others get as much time again: the fastest devices
        would otherwise be used in every round.
        """
        opened = self._round
        opened.take(received)
        if opened.algorithm.selection.factor == 1 or not self._suffice(opened, opened.usable):
            return False
        if self._suffice(opened, set(opened.usable) - self.used):
            return True
        opened.enough = opened.enough or time.monotonic()
        return time.monotonic() - opened.enough >= opened.enough - opened.began

    def _suffice(self, opened: OpenRound, there: Container[int]) -> bool:
        """Whether these devices are as many as the round wants."""
        times = [times for identity, times in opened.drawn.items() if identity in there]
        return sum(times) >= opened.algorithm.selection.enough and len(times) >= self.fewest

    def _take_turns(self, opened: OpenRound) -> None:
        """Set aside replies of devices that were used the last time, if the others suffice and some did not answer."""
        if opened.algorithm.selection.factor == 1:
            return
        if set(opened.drawn) & opened.silent and self._suffice(opened, set(opened.usable) - self.used):
            opened.aside = [k for k in opened.drawn if k in opened.usable and k in self.used]
            opened.usable = {k: reply for k, reply in opened.usable.items() if k not in opened.aside}
        self.used = used_of(self.used, opened.drawn, opened.usable)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round: the new model, or None if it stays as it was."""
        opened = self._round
        opened.take(replies)
        for identity, reason in (opened.before | opened.refused).items():
            if reason.startswith(protocol.SIZE):  # the device may have been restarted with other data
                self.roster.forget(identity)
        self._take_turns(opened)
        following = opened.state
        if opened.plan is not None and not opened.abandoned:
            count = len(set(opened.drawn) & set(opened.usable))
            if count < self.fewest:
                opened.abandoned = f"{count} usable replies, but {self.fewest} are needed"
            elif (how := self.algorithm.robust) is not None and not how.enough(count):
                opened.abandoned = f"{count} usable replies are too few for robust={how.name}: liars could decide"
            else:
                following, opened.weights = self._closed(opened)
        if opened.abandoned:
            log.warning("round %d is abandoned and the model unchanged: %s", server_round, opened.abandoned)
        self.state = following
        return (None if opened.weights is None else protocol.packed(following.params)), self._metrics(opened)

    def _closed(self, opened: OpenRound) -> tuple[State, Any]:
        """The state after the round's step, unless that is not finite. No update is much longer than a usual one."""
        if self.algorithm.privacy is None and (length := opened.shorten(self.max_norm, self.lengths)):
            self.lengths.append(length)
        round = self._noisy(opened, opened.stacked())
        closed: Closed = jax.tree.map(np.asarray, close(opened.algorithm, opened.state, round))
        found = self._finite(opened, closed)
        if found[1] is not None:
            assert opened.plan is not None
            who = [opened.members[k].identity for k in opened.plan.first.device]
            self.remembered.update(who, list(np.asarray(round.times) > 0), closed.own)
        return found

    def _noisy(self, opened: OpenRound, round: Round) -> Round:
        """The round with the noise that the server adds, if the run is private."""
        if opened.algorithm.privacy is None:
            return round
        if self.replay:
            return with_noise(opened.algorithm, round, np.uint32(self.seed))
        return round._replace(noise=Noise(gaussian.like(privacy.shapes(opened.algorithm, round))))

    def _finite(self, opened: OpenRound, closed: Closed) -> tuple[State, Any]:
        step = (closed.state.params, closed.state.memory, closed.state.average, closed.state.step_size)
        remembered = (closed.state.shared, closed.own)  # here infinity may mark a device that was not met
        finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step))
        if not finite or any(np.isnan(leaf).any() for leaf in jax.tree.leaves(remembered)):
            opened.abandoned = "the step is not finite"
            return opened.state, None
        # keep the order of the arrays: jax sorts names
        params = {name: closed.state.params[name] for name in opened.state.params}
        return closed.state._replace(params=params), closed.weights if closed.updated else None

    def _metrics(self, opened: OpenRound) -> MetricRecord:
        changing = self.algorithm.step_size is not None
        return MetricRecord(
            {
                **({"lr": float(opened.algorithm.solver.lr)} if changing else {}),
                **({} if opened.epsilon is None else {"epsilon": opened.epsilon}),
                "asked": len(opened.asked),
                "replied": len(opened.usable),
                "refused": len(opened.noted),
                "lost": len(opened.lost),
                "abandoned": int(bool(opened.abandoned)),
            }
        )

    # -- evaluation on the devices -------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask `fraction_evaluate` of the devices for their metrics of the model: a draw of (seed, round), too."""
        self.evaluating = []
        if self.fraction_evaluate == 0 or self.opened is None:
            return []
        members = [m for m in self.opened.members if m.identity not in self._round.silent]
        if not members:
            return []
        count = min(len(members), max(self.min_evaluate_nodes, int(self.fraction_evaluate * len(members))))
        order = np.random.default_rng([self.seed, server_round]).permutation(len(members))[:count]
        content = RecordDict({protocol.MODEL: arrays})
        self.evaluating = [
            Message(
                content,
                dst_node_id=members[i].node,
                message_type="evaluate",
                group_id=str(server_round),
                ttl=self.round_seconds + SLACK,
            )
            for i in sorted(order)
        ]
        return self.evaluating

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The devices' metrics, weighted by `num-examples`, in the order in which the devices were asked."""
        found: dict[str, dict[str, float]] = {}
        members = {member.node: member for member in self._round.members}
        asked = {message.metadata.message_id: members[message.metadata.dst_node_id] for message in self.evaluating}
        for reply in replies:
            id = reply.metadata.reply_to_message_id
            if id not in asked or id in found:
                self._round.refuse(None, f"node {reply.metadata.src_node_id}: an evaluation that was not asked for")
                continue
            try:
                found[id] = evaluation(reply, asked[id].node, asked[id].size)
            except Refused as error:
                self._round.refuse(None, f"node {reply.metadata.src_node_id}: its evaluation: {error}")
        in_order = [found[id] for id in asked if id in found]
        return MetricRecord({**means(in_order)}) if in_order else None


def _check_private(
    algorithm: Algorithm,
    asked: Mapping[str, Any],
    fraction_evaluate: float,
    min_available_nodes: int,
) -> None:
    """Raise an `InputError` for settings that would send values without noise, or that epsilon does not cover."""
    assert algorithm.privacy is not None
    K = algorithm.privacy.K
    for name, value in asked.items():
        if value is not None and (name == "fraction_train" or value != 1):  # a share of 1 means all devices, not K
            raise InputError(name, value, f"should be None with privacy: every round has its K = {K}, and is closed")
    if fraction_evaluate:
        expected = "should be 0 with privacy: the devices' metrics would have no noise"
        raise InputError("fraction_evaluate", fraction_evaluate, expected)
    if min_available_nodes < K:
        expected = f"should be at least K = {K} with privacy: epsilon is computed for this number of devices"
        raise InputError("min_available_nodes", min_available_nodes, expected)


def used_of(before: Iterable[int], drawn: Iterable[int], there: Iterable[int]) -> set[int]:
    """The devices whose reply was used the last time they were drawn, after a round that used those `there`."""
    drawn = set(drawn)
    return (set(before) - drawn) | (drawn & set(there))


def _numbers(uploads: Sequence[Upload]) -> dict[str, float]:
    return {
        f"{upload.name}.{name}": float(value)
        for upload in uploads
        for name, value in {**upload.numbers, **dict(upload.sizes)}.items()
    }


def _check_number(field: str, value: Any, holds: Callable[[float], bool], range: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    check(field, value, number and holds(value), f"should be a number, {range}")
