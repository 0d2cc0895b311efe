"""Evaluation on the devices: who is asked, the checks of what they send, and its means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from folb.flower import protocol
from folb.flower.mailbox import message
from folb.flower.open_round import OpenRound
from folb.flower.replies import MOST_SAMPLES, Form, Refused, alone, last_words, number, shown
from folb.flower.roster import Member
from folb.flower.strategy_settings import StrategySettings

MOST_METRICS = 20  # of one device
MOST_LOSS = 1e6
NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")  # of a metric


def messages(opened: OpenRound, settings: StrategySettings, seconds: float, arrays: ArrayRecord) -> list[Message]:
    """Ask `fraction_evaluate` of the devices for their metrics of the model: a draw of (seed, round), too."""
    members = [member for member in opened.members if member.identity not in opened.silent]
    if settings.fraction_evaluate == 0 or not members:
        return []
    count = min(len(members), max(settings.min_evaluate_nodes, int(settings.fraction_evaluate * len(members))))
    order = np.random.default_rng([settings.seed, opened.t]).permutation(len(members))[:count]
    content = RecordDict({protocol.MODEL: arrays})
    return [message("evaluate", members[i].node, opened.t, content, seconds) for i in sorted(order)]


def collected(opened: OpenRound, asked: Sequence[Message], replies: Iterable[Message]) -> MetricRecord | None:
    """The devices' metrics, weighted by `num-examples`, in the order in which the devices were asked."""
    metrics: dict[str, dict[str, float]] = {}
    members = {member.node: member for member in opened.members}
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


# what the record keeps of an evaluation, and what it may be; any other metric is at most LARGEST
MEASURES = {
    protocol.SIZE: Form(None, 1, MOST_SAMPLES - 1),
    "accuracy": Form(None, 0.0, 1.0),
    "test_accuracy": Form(None, 0.0, 1.0),
    "loss": Form(None, 0.0, MOST_LOSS),
    "train_loss": Form(None, 0.0, MOST_LOSS),
}


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
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if not NAME.fullmatch(name):
            raise Refused(f"the name of a metric is {shown(name)}, and should be at most 40 letters, digits, . _ or -")
        metrics[name] = number(name, value, MEASURES.get(name, Form(None)))
    return metrics | {protocol.SIZE: min(metrics[protocol.SIZE], float(member.size))}


def _means(replies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric that at least half of the replies have, weighted by their samples."""
    counts = Counter(name for own in replies for name in own if name != protocol.SIZE)
    means = {}
    for name in sorted(name for name, count in counts.items() if 2 * count >= len(replies)):
        those = [own for own in replies if name in own]
        total = sum(own[protocol.SIZE] for own in those)
        means[name] = sum(own[protocol.SIZE] * own[name] for own in those) / total
    return means
