"""Messages out, replies in, within a time: no node can hold a round up for longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

SLACK = 60.0  # seconds that a reply is worth hearing of after its round, for the record alone
PAUSES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # between two looks for replies; the last is repeated


class Post:
    """One grid's messages; those not answered in time are remembered, so that a late reply is known as such."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.unanswered: dict[str, float] = {}  # by message id: when to forget it

    def send(self, messages: Sequence[Message]) -> dict[str, Message]:
        """Send messages; those that went out, by their id."""
        ids = list(self.grid.push_messages(messages)) if messages else []
        # too large a message is answered with no ids at all, a malformed one with None
        return {id: message for id, message in zip(ids, messages, strict=False) if id}

    def exchange(
        self,
        messages: Sequence[Message],
        seconds: float,
        enough: Callable[[list[Message]], bool] = lambda replies: False,
    ) -> list[Message]:
        """Replies to `messages`, until all are there, or `enough`, or the time is over."""
        until = time.monotonic() + seconds
        waiting = self.send(messages)
        replies: list[Message] = []
        for pause in _pauses():
            found = self.pull(waiting)
            for reply in found:
                waiting.pop(reply.metadata.reply_to_message_id, None)
            replies += found
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
        """Replies to messages of earlier rounds, which nobody waits for any more."""
        now = time.monotonic()
        self.unanswered = {id: until for id, until in self.unanswered.items() if until > now}
        found = self.pull(self.unanswered)
        for reply in found:
            self.unanswered.pop(reply.metadata.reply_to_message_id, None)
        return found


def _pauses() -> Iterable[float]:
    yield from PAUSES
    while True:
        yield PAUSES[-1]
