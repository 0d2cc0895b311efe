"""Who is asked in a round, by the simulator's draw; who evaluates; and what is remembered of devices and replies."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from folb.core import privacy, selection, tree, vector
from folb.core import round as core_round
from folb.core.algorithm import Algorithm
from folb.core.randomness import Multiset
from folb.core.selection import Known, drawing
from folb.core.solver import steps_of
from folb.core.system import System
from folb.core.upload import DELTA, GRAD
from folb.flower import protocol
from folb.flower.open_round import OpenRound, Slots, stacked_upload
from folb.flower.replies import MOST_SAMPLES, Form, Refused, alone, last_words, length, number, shown
from folb.flower.roster import Mailbox, Member, log, message
from folb.flower.run_directory import RunRecord
from folb.flower.strategy_settings import StrategySettings
from folb.typing import NDArray

MOST_METRICS = 20  # of one device
NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")  # of a metric
# what the record keeps of an evaluation, and what it may be; any other metric is at most LARGEST
MEASURES = {protocol.SIZE: Form(None, 1, MOST_SAMPLES - 1)}
MEASURES |= dict.fromkeys(("accuracy", "test_accuracy"), Form(None, 0.0, 1.0))
MEASURES |= dict.fromkeys(("loss", "train_loss"), Form(None, 0.0, 1e6))

_candidates = jax.jit(selection.candidates, static_argnums=1)


@jax.jit
def plan(algorithm: Algorithm, system: System, there: Any, asked: Any, words: Any, seed: Any, t: Any) -> Any:
    """S_1, S_2 and the inner products of round t: the simulator's own draw.

    `there` are the identities of the present devices, in ascending order, their samples and their shares p_k. `asked`
    are the answers to the survey, the memory of devices, and the candidates: if there are some, answers and memory are
    theirs. `words` are the two words that only the draw depends on, by default the seed and t: devices learn words that
    depend on `seed`.
    """
    how, (who, size, share) = algorithm.selection, there
    start = jnp.cumsum(size) - size  # as if their samples lay end to end
    draw = drawing(how, Known(jnp.asarray(t, jnp.int32), how.expected, how.replacement, start, size, share, *asked))
    first, second = core_round.sets(draw, how, *words)

    def slots(chosen: Multiset) -> Slots:
        n = size[chosen.device]
        words, effort = core_round.managed(system, algorithm.solver, n, who[chosen.device], seed, t)
        steps = steps_of(algorithm.solver, effort.work, n)
        return Slots(chosen, words, effort.work, effort.lost, steps, draw.correction(chosen.device))

    inner = None if draw.inner is None else draw.inner[first.device]
    return slots(first), None if second is None else slots(second), inner


def draw(opened: OpenRound, settings: StrategySettings, remembered: Remembered, mailbox: Mailbox) -> None:
    """Draw the devices of a round, or abandon it. The sampling may ask some of them before."""
    members, how = opened.members, opened.algorithm.selection
    seed, t = np.uint32(settings.seed), np.uint32(opened.t)
    if how.first is not None and not remembered.met:
        _meet(opened, settings, remembered, mailbox)
    # where the sampling wants none, there is no program to compile
    some = None if how.candidates is None else _candidates(how, len(members), seed, t)
    asked = members if some is None else [members[i] for i in np.asarray(some)]
    survey = None if opened.abandoned else _survey(opened, settings, asked, mailbox)
    if opened.abandoned:
        return
    words = seed, t
    if opened.algorithm.privacy is not None and not settings.replay:
        words = np.uint32(secrets.randbits(32)), np.uint32(secrets.randbits(32))
    who = np.array([member.identity for member in members], np.uint32)
    size = np.array([member.size for member in members], np.int32)
    there = who, size, _share(settings.objective, members)
    memory = remembered.stacked([member.identity for member in asked]) if how.sampling.remembers else None
    if memory is not None and opened.algorithm.memory is not None:
        memory = opened.algorithm.memory.samplings(memory)
    drawn = plan(opened.algorithm, settings.system, there, (survey, memory, some), words, seed, t)
    first, opened.second, opened.inner = jax.tree.map(np.asarray, drawn)
    opened.first, opened.own = first, remembered.stacked(opened.who(first))


def _meet(opened: OpenRound, settings: StrategySettings, remembered: Remembered, mailbox: Mailbox) -> None:
    """Ask all devices once, before the first round, for what the sampling wants to remember of them."""
    how = opened.algorithm.selection
    first, K = how.first, how.K
    assert first is not None
    replies = opened.exchange(mailbox, dict.fromkeys((one.identity for one in opened.members), opened.plain(first)))
    there = sorted(replies)
    if len(there) < max(settings.min_replies or 1, K):
        opened.abandoned = f"{len(there)} devices answered before the first round, and K are needed"
        return
    answers = stacked_upload(first, opened.forms[first.name], [replies[identity] for identity in there])
    known = jax.tree.map(np.asarray, how.sampling.remember(answers, K))
    new = remembered.stacked(there)
    tree.check_like("select: first: what `remember` returns", known, new[1])
    remembered.update(there, [True] * len(there), (new[0], known))


def _survey(opened: OpenRound, settings: StrategySettings, asked: Sequence[Member], mailbox: Mailbox) -> NDArray | None:
    """The answers of devices to the sampling's survey; for gradients <grad f, grad F_k>, as in (7).

    A device that does not answer has 0: it is drawn only without replacement, if fewer than K others have more. A
    candidate that does not answer comes last.
    """
    how, least = opened.algorithm.selection, settings.min_replies or 1
    upload = how.survey
    if upload is None:
        return None
    replies = opened.exchange(mailbox, dict.fromkeys((member.identity for member in asked), opened.plain(upload)))
    if len(replies) < least:
        opened.abandoned = f"{len(replies)} devices answered the survey, but {least} are needed"
    there = [replies.get(member.identity) for member in asked]
    if upload != GRAD:
        silent = 0.0 if how.candidates is None else -np.inf
        return np.array([silent if reply is None else reply.numbers[upload.name] for reply in there], np.float32)
    grads = [None if reply is None else reply.arrays[upload.name] for reply in there]
    mean = {name: np.zeros_like(value) for name, value in opened.state.params.items()}
    for p, grad in zip(_share(settings.objective, opened.members), grads, strict=True):
        mean = mean if grad is None else {name: total + p * grad[name] for name, total in mean.items()}
    return np.array([0.0 if g is None else vector.dot(g, mean) for g in grads], np.float32)


def _share(objective: str, members: Sequence[Member]) -> NDArray:
    """p_k of (1), for the present devices."""
    size = np.array([member.size for member in members])
    share = size / size.sum() if objective == "samples" else np.full(len(size), 1 / len(size))
    return share.astype(np.float32)


class Remembered:
    """The memory of devices, by identity. `first` is the memory of a device that the server has not met."""

    def __init__(self, first: Any) -> None:
        self.first = jax.tree.map(np.asarray, first)
        self.met: dict[int, Any] = {}

    def stacked(self, identities: Sequence[int]) -> Any:
        return jax.tree.map(lambda *rows: np.stack(rows), *(self.met.get(k, self.first) for k in identities))

    def update(self, identities: Sequence[int], changed: Sequence[bool], values: Any) -> None:
        """Remember the entries of a stack that changed."""
        for i, (k, new) in enumerate(zip(identities, changed, strict=True)):
            if new:
                self.met[k] = jax.tree.map(lambda rows, i=i: np.array(rows[i]), values)

    def packed(self) -> Any:
        """The memory as arrays, for a checkpoint; nothing if there is nothing to remember."""
        if not jax.tree.leaves(self.first):
            return ()
        who = sorted(self.met)
        none = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), self.first)
        return {"who": np.array(who, np.int64), "rows": self.stacked(who) if who else none}

    def unpack(self, packed: Any) -> None:
        """The inverse of `packed`."""
        if jax.tree.leaves(self.first):
            self.met, who = {}, packed["who"].tolist()
            self.update(who, [True] * len(who), jax.tree.map(np.asarray, packed["rows"]))


class Admission:
    """What earlier rounds decide about the replies of this one.

    With over-selection, devices take turns: the fastest would otherwise be used in every round.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lengths: list[float] = []  # of a usual update, in each round
        self.used: set[int] = set()  # devices whose reply was used the last time they were asked
        self.since: tuple[int, float] = 0, 0.0  # the round that has as many replies as it wants, and since when
        for line in lines:
            self.add(dict(zip(line["devices"], line["times"], strict=True)), line.get("length", 0.0))

    def add(self, drawn: Mapping[int, float], length: float) -> None:
        """Remember a round: how often it used each device that was drawn, and the length of a usual update."""
        self.used = (self.used - set(drawn)) | {k for k, times in drawn.items() if times}
        self.lengths += [length] if length else []

    def enough(self, opened: OpenRound, fewest: int) -> bool:
        """Whether K devices have answered, if more than K were asked.

        If some of them were used the last time they were asked, the others get as much time again.
        """
        there, now = opened.answers.usable, time.monotonic()
        if opened.algorithm.selection.factor == 1 or not _suffice(opened, there, fewest):
            return False
        if _suffice(opened, set(there) - self.used, fewest):
            return True
        self.since = self.since if self.since[0] == opened.t else (opened.t, now)
        return now - self.since[1] >= self.since[1] - opened.began

    def take_turns(self, opened: OpenRound, fewest: int) -> None:
        """Set aside replies of devices that were used the last time, if the others suffice and some did not answer."""
        there, waits = opened.answers.usable, opened.algorithm.selection.factor != 1
        if waits and set(opened.drawn) & opened.silent and _suffice(opened, set(there) - self.used, fewest):
            aside = self.used & set(opened.drawn)
            opened.answers.usable = {k: reply for k, reply in there.items() if k not in aside}

    def shorten(self, opened: OpenRound, most: float) -> None:
        """Shorten updates to `most` times the usual length."""
        drawn, usable = opened.drawn, opened.answers.usable
        lengths = {k: length(reply.arrays[DELTA.name]) for k, reply in usable.items() if k in drawn}
        opened.notes.length = usual_length(lengths.values(), self.lengths)
        bound = most * opened.notes.length
        for k, value in sorted(lengths.items()):
            if value > bound > 0:
                delta = usable[k].arrays[DELTA.name]
                delta |= {name: (part * (bound / value)).astype(part.dtype) for name, part in delta.items()}
                words = f"its update of norm {value:.3g} to {bound:.3g}, {most:g} times the median"
                opened.notes.shortened.append((k, words))
                log.warning("round %d: shortened: device %d: %s", opened.t, k, words)


def _suffice(opened: OpenRound, there: Container[int], fewest: int) -> bool:
    """Whether these devices are as many as the round wants."""
    times = [times for identity, times in opened.drawn.items() if identity in there]
    return sum(times) >= opened.algorithm.selection.enough and len(times) >= fewest


def usual_length(lengths: Iterable[float], before: Sequence[float]) -> float:
    """The median of the lengths that are not 0: half of the devices would have to lie to move it far.

    Of an even number it is the lower of the two in the middle, which one of two devices cannot raise. With fewer than 3
    updates, where a liar's own could be the median, the usual lengths of the last rounds count too.
    """
    positive = [value for value in lengths if value > 0]
    return median_low([*positive, *(before[-3:] if len(positive) < 3 else ())]) if positive else 0.0


class Budget:
    """The epsilon of a private run, whose devices are drawn from `N` or more."""

    def __init__(self, algorithm: Algorithm, N: int, record: RunRecord | None = None) -> None:
        self.algorithm, self.N, self.record = algorithm, N, record
        self.asked = 0 if record is None else record.asked  # the rounds that devices were asked for

    @property
    def epsilon(self) -> float | None:
        """What all rounds so far have spent; None if the run is not private."""
        return None if self.algorithm.privacy is None else privacy.spent(self.algorithm, self.N, self.asked)

    def covers(self, t: int) -> bool:
        """Whether the budget is enough for round t. If it is, the round counts from now on."""
        if self.algorithm.privacy is None:
            return True
        self.asked += 1  # a round that was interrupted is repeated and counts twice: its devices answer twice
        if (most := self.algorithm.privacy.epsilon) is not None and (self.epsilon or 0.0) > float(most):
            log.info("the budget of epsilon %g is spent: the run ends before round %d", most, t)
            return False
        if self.record is not None:
            self.record.ask(self.asked)
        return True


def evaluation_messages(
    opened: OpenRound, settings: StrategySettings, seconds: float, arrays: ArrayRecord
) -> list[Message]:
    """Ask `fraction_evaluate` of the devices for their metrics of the model: a draw of (seed, round), too."""
    members = [member for member in opened.members if member.identity not in opened.silent]
    if settings.fraction_evaluate == 0 or not members:
        return []
    count = min(len(members), max(settings.min_evaluate_nodes, int(settings.fraction_evaluate * len(members))))
    order = np.random.default_rng([settings.seed, opened.t]).permutation(len(members))[:count]
    content = RecordDict({protocol.MODEL: arrays})
    return [message("evaluate", members[i].node, opened.t, content, seconds) for i in sorted(order)]


def evaluation_metrics(opened: OpenRound, asked: Sequence[Message], replies: Iterable[Message]) -> MetricRecord | None:
    """The devices' metrics, weighted by `num-examples`, in the order in which the devices were asked."""
    metrics, members = {}, {member.node: member for member in opened.members}
    whose = {one.metadata.message_id: members[one.metadata.dst_node_id] for one in asked}
    for reply in replies:
        id, node = reply.metadata.reply_to_message_id, f"node {reply.metadata.src_node_id}: "
        if id not in whose or id in metrics:
            opened.answers.refuse(None, f"{node}an evaluation that was not asked for")
            continue
        try:
            metrics[id] = _checked(reply, whose[id])
        except Refused as error:
            opened.answers.refuse(None, f"{node}its evaluation: {error}")
    in_order = [metrics[id] for id in whose if id in metrics]
    return MetricRecord({**_means(in_order)}) if in_order else None


@alone()
def _checked(reply: Message, member: Member) -> dict[str, float]:
    """A device's metrics, or `Refused`. They count for no more than the samples it declared."""
    if reply.metadata.src_node_id != member.node:
        raise Refused(f"it is from node {reply.metadata.src_node_id}, and {member.node} was asked")
    if reply.has_error():
        raise Refused(f"the device failed: {last_words(reply.error.reason)}")
    record = reply.content.get(protocol.METRICS)
    if not isinstance(record, MetricRecord) or protocol.SIZE not in record:
        raise Refused(f"it has no {protocol.METRICS} with {protocol.SIZE}")
    if len(record) > MOST_METRICS:
        raise Refused(f"it has {len(record)} metrics, and should have at most {MOST_METRICS}")
    for name in record:
        if not NAME.fullmatch(name):
            raise Refused(f"the name of a metric is {shown(name)}, and should be at most 40 letters, digits, . _ or -")
    metrics = {name: number(name, value, MEASURES.get(name, Form(None))) for name, value in record.items()}
    return metrics | {protocol.SIZE: min(metrics[protocol.SIZE], float(member.size))}


def _means(replies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric that at least half of the replies have, weighted by their samples."""
    counts = Counter(name for own in replies for name in own if name != protocol.SIZE)
    means = {}
    for name in sorted(name for name, count in counts.items() if 2 * count >= len(replies)):
        those = [(own[protocol.SIZE], own[name]) for own in replies if name in own]
        means[name] = sum(size * value for size, value in those) / sum(size for size, _ in those)
    return means
