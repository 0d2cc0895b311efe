"""Who is there: Flower's node ids are new in every run, so each node is asked for the identity of its device."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from flwr.app import Message, MetricRecord, RecordDict

from folb.flower import wire
from folb.flower.post import Post
from folb.flower.replies import one_line

MOST = 2**31 - 2

log = logging.getLogger("flwr")


class Member(NamedTuple):
    """A device: its identity, its samples as it declared them, and the node it is on now."""

    identity: int
    size: int
    node: int


class Roster:
    """The nodes that said who they are. An identity belongs to one node at a time: a second claim is refused."""

    def __init__(self) -> None:
        self.claims: dict[int, Member] = {}  # by node
        self.holders: dict[int, int] = {}  # by identity, its node
        self.queries: dict[str, int] = {}  # queries not answered yet, and their nodes
        self.refused: list[str] = []  # what was refused since the last look
        self.told: set[str] = set()  # each claim is refused in every round, and told of once

    def update(self, post: Post, seconds: float) -> list[Member]:
        """The devices that are there now, in ascending order of identity.

        Nodes not seen before are asked, and waited for; those that did not answer then are heard if they do later.
        """
        until = time.monotonic() + seconds
        nodes = set(post.grid.get_node_ids())
        self.claims = {node: member for node, member in self.claims.items() if node in nodes}
        self._hear(post)
        asked = set(self.queries.values())
        unseen = sorted(nodes - set(self.claims) - asked)
        messages = [
            Message(RecordDict(), dst_node_id=node, message_type="query", ttl=max(seconds, 1.0) + 3600)
            for node in unseen
        ]
        sent = {id: message.metadata.dst_node_id for id, message in post.send(messages).items()}
        self.queries |= sent
        pause = 0.02
        while self._hear(post) and set(sent) & set(self.queries) and (left := until - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1.0)
        self.queries = {id: node for id, node in self.queries.items() if node in nodes}
        self._settle()
        return sorted(self.claims[node] for node in self.holders.values())

    def forget(self, identity: int) -> None:
        """Ask the device anew who it is, and what it has."""
        self.claims.pop(self.holders.get(identity, -1), None)

    def _hear(self, post: Post) -> bool:
        for reply in post.pull(self.queries):
            node = self.queries.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            try:
                self.claims[node] = _member(reply, node)
            except ValueError as error:  # it will be asked again
                self._refuse(f"node {node} does not say who it is: {error}")
        return True

    def _settle(self) -> None:
        """Give each identity to one node: the one that has it, as long as it is there, and else the lowest."""
        self.holders = {k: node for k, node in self.holders.items() if node in self.claims}
        for node, member in sorted(self.claims.items()):
            holder = self.holders.setdefault(member.identity, node)
            if holder != node:
                self._refuse(f"node {node} claims to be device {member.identity}, which node {holder} is")

    def _refuse(self, reason: str) -> None:
        if reason not in self.told:
            self.told.add(reason)
            self.refused.append(reason)
            log.warning("refused: %s", reason)


def _member(reply: Message, node: int) -> Member:
    """Who a node says it is; anything but a plain answer is a `ValueError`."""
    if reply.has_error():
        raise ValueError(one_line(reply.error.reason))
    record = reply.content.get(wire.METRICS)
    if not isinstance(record, MetricRecord) or set(record) != {wire.IDENTITY, wire.SIZE}:
        raise ValueError(f"its answer has not just {wire.IDENTITY} and {wire.SIZE}")
    identity, size = record[wire.IDENTITY], record[wire.SIZE]
    if type(identity) is not int or not 0 <= identity <= MOST:
        raise ValueError(f"{wire.IDENTITY} is {one_line(identity)}, and should be a whole number from 0 to {MOST}")
    if type(size) is not int or not 1 <= size < 2**24:
        raise ValueError(f"{wire.SIZE} is {one_line(size)}, and should be a whole number from 1 to {2**24 - 1}")
    return Member(identity, size, node)
