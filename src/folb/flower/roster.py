"""The present devices, and the exchange of messages with them within a time limit: no node delays a round for longer.

Flower's node ids are new in every run, so each node is asked for its device's identity.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from folb.flower import protocol
from folb.flower.replies import MOST_SAMPLES, last_words, one_line

AGAIN = 10.0  # seconds before a node that did not give its identity is asked again
SLACK = 60.0  # seconds after its round for which a late reply is still recorded
MOST = 10**6 - 1  # a report has a row for each number up to the largest

log = logging.getLogger("flwr")  # the log that users of Flower read


class Member(NamedTuple):
    """A device: its identity, its declared number of samples, and the node it is on now."""

    identity: int
    size: int
    node: int


class Roster:
    """The nodes that gave their identity. An identity belongs to one node at a time: a second claim is rejected.

    `patience` is how many seconds a run still waits, in all, for new nodes to give it. Once it is used up, a new node
    joins in the round after its answer: a node that came back under a new id in each round, and never answered, would
    otherwise delay every round.
    """

    def __init__(self, wait: float, least: int) -> None:
        self.wait = self.patience = wait
        self.least = least  # devices, before a round begins
        self.awaited: set[int] = set()  # devices of the rounds before an interruption
        self.claims: dict[int, Member] = {}  # by node
        self.holders: dict[int, int] = {}  # by identity, its node
        self.queries: dict[str, tuple[int, float]] = {}  # queries without an answer, their nodes, and when they expire
        self.met: set[int] = set()  # nodes that were asked before: no round waits for them again
        self.refused: list[str] = []  # rejections since the last look
        self.reported: set[str] = set()  # a claim is rejected in every round, but reported once

    def present(self, mailbox: Mailbox) -> list[Member]:
        """The present devices, once there are enough of them or the waiting time is over."""
        members: list[Member] = []
        for left in looks(time.monotonic() + self.wait):
            members = self.update(mailbox, left)
            if len(members) >= self.least and self.awaited <= {member.identity for member in members}:
                break
        self.awaited = set()  # wait for them only once: a device may never come back
        return members

    def rejections(self, mailbox: Mailbox) -> list[tuple[int | None, str]]:
        """Rejections since the last round: of claims, and of replies to earlier rounds."""
        reasons, self.refused = self.refused, []
        for reply in mailbox.late():
            if reply.has_content():
                reasons.append(f"node {reply.metadata.src_node_id}: a late reply to round {reply.metadata.group_id}")
                log.warning("rejected: %s", reasons[-1])
        return [(None, reason) for reason in reasons]

    def update(self, mailbox: Mailbox, seconds: float) -> list[Member]:
        """The devices that are there now, in ascending order of identity.

        New nodes are asked, and waited for while there is patience. Nodes that did not give a good answer are asked
        again later, without waiting.
        """
        now = time.monotonic()
        nodes = set(mailbox.grid.get_node_ids())
        self.claims = {node: member for node, member in self.claims.items() if node in nodes}
        self._hear(mailbox)
        self.queries = {id: asked for id, asked in self.queries.items() if asked[0] in nodes and asked[1] > now}
        unseen = sorted(nodes - set(self.claims) - {node for node, _ in self.queries.values()})
        ttl = max(seconds, 1.0) + 3600
        messages = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=ttl) for node in unseen]
        sent = {id: message.metadata.dst_node_id for id, message in mailbox.send(messages).items()}
        self.queries |= {id: (node, now + max(seconds, AGAIN)) for id, node in sent.items()}
        new = {id for id, node in sent.items() if node not in self.met}
        self.met |= set(unseen)
        for _ in looks(now + min(seconds, self.patience)):
            self._hear(mailbox)
            if not new & set(self.queries):
                break
        if new:
            self.patience = max(0.0, self.patience - (time.monotonic() - now))
        # an identity stays with its node while that is there and claims it; else it goes to the lowest node
        held = ((k, self.claims.get(node)) for k, node in self.holders.items())
        self.holders = {k: member.node for k, member in held if member is not None and member.identity == k}
        for node, member in sorted(self.claims.items()):
            holder = self.holders.setdefault(member.identity, node)
            if holder != node:
                self._refuse(f"node {node} claims to be device {member.identity}, but node {holder} is")
        return sorted(self.claims[node] for node in self.holders.values())

    def forget(self, identity: int) -> None:
        """Ask the device again for its identity and its number of samples."""
        self.claims.pop(self.holders.get(identity, -1), None)

    def _hear(self, mailbox: Mailbox) -> None:
        asked = dict(self.queries)
        for reply in mailbox.pull(self.queries):
            node, _ = asked.pop(reply.metadata.reply_to_message_id, (None, 0.0))
            if node is None:
                continue
            try:
                self.claims[node] = _member(reply, node)
            except ValueError as error:  # it will be asked again
                self._refuse(f"node {node} does not give its identity: {error}")

    def _refuse(self, reason: str) -> None:
        if reason not in self.reported:
            self.reported.add(reason)
            self.refused.append(reason)
            log.warning("rejected: %s", reason)


def _member(reply: Message, node: int) -> Member:
    """The device that a node says it is. Anything except a plain answer raises a `ValueError`."""
    if reply.has_error():
        raise ValueError(last_words(reply.error.reason))
    record = reply.content.get(protocol.METRICS)
    if not isinstance(record, MetricRecord) or set(record) != {protocol.IDENTITY, protocol.SIZE}:
        raise ValueError(f"its answer should have only {protocol.IDENTITY} and {protocol.SIZE}")
    given: dict[str, Any] = {**record}
    for name, low, high in ((protocol.IDENTITY, 0, MOST), (protocol.SIZE, 1, MOST_SAMPLES - 1)):
        if type(given[name]) is not int or not low <= given[name] <= high:
            raise ValueError(f"{name} is {one_line(given[name])}, and should be a whole number from {low} to {high}")
    return Member(given[protocol.IDENTITY], given[protocol.SIZE], node)


def message(kind: str, node: int, t: int, content: RecordDict, seconds: float) -> Message:
    """A message of round t to a node, which has `seconds` to answer."""
    return Message(content, dst_node_id=node, message_type=kind, group_id=str(t), ttl=seconds + SLACK)


class Mailbox:
    """The messages of one grid. Messages without a reply in time are remembered, to recognise late replies."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.unanswered: dict[str, float] = {}  # by message id: when to forget it

    def send(self, messages: Sequence[Message]) -> dict[str, Message]:
        """Send messages. Return those that were sent, by their id."""
        ids = list(self.grid.push_messages(messages)) if messages else []
        # if a message is too large there are no ids at all; a malformed message has the id None
        return {id: message for id, message in zip(ids, messages, strict=False) if id}

    def exchange(
        self,
        messages: Sequence[Message],
        seconds: float,
        enough: Callable[[list[Message]], bool] = lambda replies: False,
    ) -> list[Message]:
        """The replies to `messages`. Wait until all are there, or `enough` says so, or the time is over."""
        until = time.monotonic() + seconds
        waiting = self.send(messages)
        replies: list[Message] = []
        for _ in looks(until):
            replies += self.pull(waiting)
            if not waiting or enough(replies):
                break
        self.unanswered |= dict.fromkeys(waiting, time.monotonic() + seconds + SLACK)
        return replies

    def pull(self, waiting: dict[str, Any]) -> list[Message]:
        """The replies that are there now. What they answer is no longer waiting."""
        arrived = list(self.grid.pull_messages(set(waiting))) if waiting else []
        for reply in arrived:
            waiting.pop(reply.metadata.reply_to_message_id, None)
        return arrived

    def late(self) -> list[Message]:
        now = time.monotonic()
        self.unanswered = {id: until for id, until in self.unanswered.items() if until > now}
        return self.pull(self.unanswered)


def looks(until: float) -> Iterator[float]:
    """Look for replies until the time is over, after longer and longer pauses: each time, the seconds that are left."""
    for pause in chain((0.02, 0.05, 0.1, 0.25, 0.5), repeat(1.0)):
        yield max(0.0, until - time.monotonic())
        if (left := until - time.monotonic()) <= 0:
            return
        time.sleep(min(pause, left))
