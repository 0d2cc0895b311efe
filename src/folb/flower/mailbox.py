"""Send messages and receive replies within a time limit: no node can delay a round for longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

SLACK = 60.0  # seconds after its round for which a late reply is still recorded
PAUSES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # seconds between two looks for replies; the last is repeated


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
        for pause in _pauses():
            arrived = self.pull(waiting)
            for reply in arrived:
                waiting.pop(reply.metadata.reply_to_message_id, None)
            replies += arrived
            left = until - time.monotonic()
            if not waiting or enough(replies) or left <= 0:
                break
            time.sleep(min(pause, left))
        forget = time.monotonic() + seconds + SLACK
        self.unanswered |= dict.fromkeys(waiting, forget)
        return replies

    def pull(self, ids: Iterable[str]) -> list[Message]:
        """The replies that are there now."""
        ids = set(ids)
        return list(self.grid.pull_messages(ids)) if ids else []

    def late(self) -> list[Message]:
        """Late replies: to messages of earlier rounds."""
        now = time.monotonic()
        self.unanswered = {id: until for id, until in self.unanswered.items() if until > now}
        arrived = self.pull(self.unanswered)
        for reply in arrived:
            self.unanswered.pop(reply.metadata.reply_to_message_id, None)
        return arrived


def _pauses() -> Iterable[float]:
    yield from PAUSES
    while True:
        yield PAUSES[-1]
