"""A Flower grid within the process: messages are handed to the device's app at once."""

import copy
import random

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


class InProcessGrid(Grid):
    """`apps[k]` answers for the device of partition k; node ids are random, as Flower's are.

    `tamper(partition, message, reply)` may change a reply, or return a list of replies, or None for one that is lost.
    """

    def __init__(self, apps, tamper=None, seed=0, shuffle=None):
        rng = random.Random(seed)
        self.apps = dict(enumerate(apps)) if not isinstance(apps, dict) else dict(apps)
        self.nodes = {rng.getrandbits(60): k for k in self.apps}
        self.tamper, self.shuffle = tamper, shuffle
        self.mailbox, self.sent, self.count, self.of_run = {}, [], 0, None
        self.states = {}  # what each node keeps between messages

    def node(self, partition):
        return next(node for node, k in self.nodes.items() if k == partition)

    def set_run(self, run):
        self.of_run = run

    @property
    def run(self):
        return self.of_run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            ids.append(f"m{self.count}")
            self.sent.append(message)
            for reply in self.answers(message):
                self.mailbox.setdefault(reply.metadata.reply_to_message_id, []).append(reply)
        return ids

    def answers(self, message):
        partition = self.nodes.get(message.metadata.dst_node_id)
        if partition is None:
            return [Message(Error(3, "node unavailable"), reply_to=message)]
        state = self.states.setdefault(message.metadata.dst_node_id, RecordDict())
        context = Context(1, message.metadata.dst_node_id, {"partition-id": partition}, state, {})
        try:
            reply = self.apps[partition](copy.copy(message), context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        reply = reply if self.tamper is None else self.tamper(partition, message, reply)
        return [] if reply is None else reply if isinstance(reply, list) else [reply]

    def pull_messages(self, message_ids):
        replies = [reply for id in sorted(message_ids) for reply in self.mailbox.pop(id, [])]
        if self.shuffle is not None:
            self.shuffle.shuffle(replies)
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))
