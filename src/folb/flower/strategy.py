"""Any algorithm of folb as a Flower strategy on the Message API.

Draws, random words, rules and server steps are the simulator's own, from `folb.core.round`; this module carries them to
real devices. A round draws one multiset of devices, and sends a message to each distinct device. The replies that pass
the checks of `folb.flower.replies` are stacked in ascending order of identity, and one compiled step uses them. So
neither Flower's node ids nor the order of the replies can change a bit of the result.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from folb.core import privacy
from folb.core import round as core_round
from folb.core.algorithm import Algorithm
from folb.core.average import ServerModel
from folb.core.round import State
from folb.core.upload import DELTA, Upload
from folb.core.whiten import hidden_matrices
from folb.errors import check, check_whole
from folb.flower import protocol
from folb.flower.device_draw import Admission, Budget, Remembered, draw, evaluation_messages, evaluation_metrics
from folb.flower.open_round import Notes, OpenRound, close, forms, noisy, sent_model, told
from folb.flower.protocol import Arrays
from folb.flower.replies import Form
from folb.flower.roster import Mailbox, Roster, log
from folb.flower.run_directory import RunRecord, RunSettings, recording, round_line
from folb.flower.strategy_settings import SECONDS, StrategySettings

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class FederatedStrategy(Strategy):
    """An algorithm of folb, such as `folb.algorithms.folb(select={"K": 10})`, as a Flower strategy.

    Its keywords are the fields of `StrategySettings`, which says what they mean. `algorithm` is the algorithm as it
    runs; `opened` is the round under way, or the last one.
    """

    further: tuple[Upload, ...] = ()  # what a strategy asks devices for before its `uploads`

    def __init__(self, algorithm: Algorithm, **settings: Any) -> None:
        self.settings = given = StrategySettings(algorithm, **settings)
        self.algorithm, self.replay = given.algorithm, given.replay
        self.round_seconds = given.deadline  # of a round in this start: its timeout, if it has one
        self.roster = Roster(given.wait, given.min_available_nodes)
        self.budget = Budget(self.algorithm, given.min_available_nodes)
        self.admission = Admission()
        self.mailbox: Mailbox | None = None
        self.state: State | None = None  # without the model, which passes from round to round
        self.remembered = Remembered(())
        self.forms: Mapping[str, Form] = {}  # what each upload must be
        self.opened: OpenRound | None = None
        self.evaluating: list[Message] = []
        self.warned = False

    def uploads(self, algorithm: Algorithm) -> tuple[Upload, ...]:
        """What each device of S_1 sends: a round's tasks, forms and record follow from it."""
        return DELTA, *algorithm.uploads

    def summary(self) -> None:
        algorithm, settings = self.algorithm, self.settings
        chosen = {key: value for key, value in algorithm.settings.items() if value is not None}
        log.info("%s with %s", algorithm.name, ", ".join(f"{key}={value}" for key, value in chosen.items()))
        usual = "0" if algorithm.privacy is not None else "half of the" if settings.trusts_majority else "1"
        log.info("rounds of at most %g s, and at least %s replies", self.round_seconds, settings.min_replies or usual)
        if (private := algorithm.privacy) is not None:
            about = (private.name, private.scheme, settings.min_available_nodes, private.noise, private.delta)
            log.info("private (%s, %s draws from %d devices or more): noise %s, delta %g", *about)
        if settings.guard is not None and algorithm.guard is None:
            log.info("not guarded: %s does not ask its devices for gradients", algorithm.name)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run `num_rounds` rounds; `timeout` is a round's deadline, in place of the strategy's own.

        evaluate_fn(round, arrays) is called with the model before the first round and after each. Its "accuracy" and
        "loss" become the test accuracy and the training loss of the run's record. Metrics that have folb's names, such
        as "f1", "auc", "top5", "mse" or "own_worst", are recorded under these names.
        """
        check_whole("num_rounds", num_rounds, 1)
        seconds = self.settings.deadline if timeout is None else timeout
        check("timeout", seconds, SECONDS.holds, SECONDS.words)
        self.round_seconds = float(seconds)
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            expected = "should be empty: a device reads its settings from the run's config, context.run_config"
            check(name, dict(config or {}), not config, expected)
        least, model = self.settings.min_available_nodes, _checked_model(initial_arrays)
        hidden = hidden_matrices("hidden", self.settings.hidden, model)
        self.algorithm = core_round.over_rounds(self.settings.algorithm.of(hidden), num_rounds)
        self.algorithm = privacy.calibrated(self.algorithm, least, num_rounds)
        privacy.affordable(self.algorithm, least, 1)  # raises if the budget covers no round
        self.mailbox, self.roster = Mailbox(grid), Roster(self.settings.wait, least)
        self.admission, self.budget = Admission(), Budget(self.algorithm, least)
        self.summary()
        state = self._begin(model)
        if self.settings.directory is None:
            return self._rounds(state, num_rounds, evaluate_fn, None)
        about = RunSettings(self.settings, self.algorithm, num_rounds, type(self).__name__)
        with recording(Path(self.settings.directory), about, state) as record:
            self.roster.awaited, self.admission = set(record.devices), Admission(record.lines)
            self.budget = Budget(self.algorithm, least, record)
            result = self._rounds(record.state, num_rounds, evaluate_fn, record)
            record.finish(protocol.unpacked(result.arrays))
        return result

    def _rounds(self, state: State, num_rounds: int, evaluate_fn: Evaluate | None, record: RunRecord | None) -> Result:
        """The remaining rounds; each is recorded when it is finished."""
        assert self.mailbox is not None
        grid = self.mailbox.grid
        result, done, in_a_row = Result(), record.done if record else 0, 0
        self.state, arrays = state, protocol.packed(state.params)
        self.remembered.unpack(state.devices)
        if evaluate_fn is not None and done == 0 and (own := evaluate_fn(0, self._kept(arrays))) is not None:
            result.evaluate_metrics_serverapp[0] = own
        for t in range(done + 1, num_rounds + 1):
            if not self.budget.covers(t):
                break
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
            if evaluate_fn is not None and (own := evaluate_fn(t, model)) is not None:
                measured = result.evaluate_metrics_serverapp[t] = own
            shown = [f"{name} {value:g}" for part in (numbers, measured) for name, value in (part or {}).items()]
            log.info("round %d of %d, %.1f s: %s", t, num_rounds, seconds, ", ".join(shown))
            if record is not None:
                now = self.state._replace(params=protocol.unpacked(arrays), devices=self.remembered.packed())
                identities = [member.identity for member in self._round.members]
                record.add(round_line(self._round, seconds, measured), now, identities)
            in_a_row = in_a_row + 1 if self._round.abandoned else 0
            if in_a_row == self.settings.max_abandoned and t < num_rounds:
                why = f"{in_a_row} rounds in a row were abandoned (the last: {self._round.abandoned})"
                raise RuntimeError(f"{why}; submit the same run again to resume it")
        if record is not None:
            path = record.path.resolve()  # the SuperLink's working directory is rarely the reader's
            log.info("the run is in %s: folb show %s", path, shlex.quote(str(path)))
        result.arrays = self._kept(arrays)
        return result

    def _begin(self, model: Arrays) -> State:
        state, own = core_round.begin(self.algorithm, model)
        self.remembered = Remembered(own)
        # an upload that cannot be sent is an error now, and not in the first round
        self.forms = forms(self.algorithm, (*self.further, *self.uploads(self.algorithm)), model)
        return state._replace(devices=self.remembered.packed())

    def _kept(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model to evaluate and keep: the server's, or the algorithm's average of its models."""
        assert self.state is not None
        if isinstance(self.algorithm.average, ServerModel):
            return arrays
        params = protocol.unpacked(arrays)
        averaged = core_round.kept(self.algorithm, self.state._replace(params=params))
        return protocol.packed({name: np.asarray(averaged[name]) for name in params})

    @property
    def _round(self) -> OpenRound:
        if self.opened is None:
            raise RuntimeError("no round has begun: configure_train begins one")
        return self.opened

    # -- a round -------------------------------------------------------------------------------------------------------

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
        members = self.roster.present(self.mailbox)
        notes, began = Notes(self.roster.rejections(self.mailbox), epsilon=self.budget.epsilon), time.monotonic()
        algorithm = core_round.with_step_size(self.settings.sized(self.algorithm, len(members)), state, server_round)
        sent = sent_model(algorithm, state, server_round, arrays, np.uint32(self.settings.seed))
        N = len({member.identity for member in members} | set(self.remembered.met))
        asked = (self.uploads(algorithm), N, notes, *sent, self.forms, self.round_seconds, self.replay, began)
        self.opened = opened = OpenRound(server_round, algorithm, state, members, *asked)
        if len(opened.members) < (least := self.settings.min_available_nodes):
            opened.abandoned = f"{len(opened.members)} devices are there, but {least} are needed"
        else:
            draw(opened, self.settings, self.remembered, self.mailbox)
        if opened.abandoned:
            return []
        guard, distinct, K = opened.algorithm.guard, len(opened.drawn), opened.algorithm.selection.K
        if guard is not None and not self.warned and (most := distinct * float(guard.cap) / K) < 1:
            self.warned = True
            each = f"each with a weight of at most cap / K = {float(guard.cap):g} / {K}: weights add up to at most"
            steps = "steps are that much shorter; use a smaller K"
            log.warning("%d devices, %s %.2g, and %s", distinct, each, most, steps)
        return self._ask(opened)

    def _ask(self, opened: OpenRound) -> list[Message]:
        """Ask S_1 for updates and what else the rule needs, and the rest of S_2 for gradients."""
        first, algorithm, tasks = opened.first, opened.algorithm, {}
        assert first is not None
        more: dict[int, dict[str, ArrayRecord]] = {}
        sent: dict[str, Any] = {}  # by its record, stacked
        if algorithm.memory is not None and any(map(algorithm.memory.has, ("shift", "begin"))):  # or no program
            shift, begin = told(algorithm, opened.state, opened.own, first.steps, np.int32(opened.N))
            sent |= {} if shift is None else {protocol.SHIFT: shift}
            sent |= {} if begin is None else {protocol.BEGIN: protocol.joined(begin)}
        for identity, i in opened.at_work(first).items():
            tasks[identity] = opened.task(first, i, *opened.uploads)
            for record, stack in sent.items():
                own = {name: np.asarray(value[i], np.float32) for name, value in stack.items()}
                more.setdefault(identity, {})[record] = protocol.packed(own)
        if opened.second is not None:
            upload, works = algorithm.gradient.second, algorithm.gradient.works
            alone = {k: i for k, i in opened.at_work(opened.second).items() if k not in tasks}
            tasks |= {k: opened.task(opened.second, i, upload, works=works) for k, i in alone.items()}
        return opened.ask(tasks, more)

    def _enough(self, received: Iterable[Message]) -> bool:
        """Whether the round need not wait for more replies."""
        self._round.answers.take(received)
        return self.admission.enough(self._round, self.fewest)

    @property
    def fewest(self) -> int:
        """The fewest distinct devices for a round that counts."""
        settings = self.settings
        if self.algorithm.privacy is not None:
            return 0  # whether a private round is closed must not depend on what devices sent
        if settings.min_replies is not None or not settings.trusts_majority:
            return settings.min_replies or 1
        return -(-min(len(self._round.drawn), self._round.algorithm.selection.enough) // 2)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round: the new model, or None if it stays as it was."""
        opened = self._round
        opened.answers.take(replies)
        for identity, reason in (opened.before | opened.answers.refused).items():
            if reason.startswith(protocol.SIZE):  # the device may have been restarted with other data
                self.roster.forget(identity)
        self.admission.take_turns(opened, self.fewest)
        following = opened.state
        if opened.first is not None and not opened.abandoned:
            count = len(set(opened.drawn) & set(opened.answers.usable))
            if count < self.fewest:
                opened.abandoned = f"{count} usable replies, but {self.fewest} are needed"
            elif (how := self.algorithm.robust) is not None and not how.enough(count):
                opened.abandoned = f"{count} usable replies are too few for robust={how.name}: liars could decide"
            else:
                following = self._closed(opened)
        self.admission.add({k: k in opened.answers.usable for k in opened.drawn}, opened.notes.length)
        if opened.abandoned:
            log.warning("round %d is abandoned and the model unchanged: %s", server_round, opened.abandoned)
        self.state = following
        changed = None if opened.weights is None else protocol.packed(following.params)
        return changed, opened.metrics()

    def _closed(self, opened: OpenRound) -> State:
        """The state after the round's step. No update is much longer than a usual one."""
        if self.algorithm.privacy is None:
            self.admission.shorten(opened, self.settings.max_norm)
        round = noisy(opened.algorithm, opened.stacked(), self.settings.seed if self.replay else None)
        closed = jax.tree.map(np.asarray, close(opened.algorithm, opened.state, round))
        following = opened.close(closed)
        if opened.weights is not None:
            assert opened.first is not None
            self.remembered.update(opened.who(opened.first), list(np.asarray(round.times) > 0), closed.own)
        return following

    # -- evaluation on the devices -------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        given = (self.settings, self.round_seconds, arrays)
        self.evaluating = evaluation_messages(self.opened, *given) if self.opened else []
        return self.evaluating

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return evaluation_metrics(self._round, self.evaluating, replies)


def _checked_model(arrays: ArrayRecord) -> Arrays:
    check("initial_arrays", [], len(arrays) > 0, "should hold at least one array")
    expected = "should be float32: only parameters are learnt; for a module use folb.flower.arrays(module)"
    for name, array in arrays.items():
        check(f"initial_arrays: dtype of {name}", array.dtype, array.dtype == "float32", expected)
        check(f"initial_arrays: {name}", array.numpy(), np.isfinite(array.numpy()).all(), "should be finite")
    return protocol.unpacked(arrays)
