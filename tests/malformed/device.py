"""A device that spoils its replies, in every round and on every node in another way; that of partition 0 is honest."""

from kinds import device, spoilers

from folb.flower import client_app


def spoil(message, context, answer):
    """A Flower mod: what is wrong with the reply of liar k in round t is the kind of that number."""
    reply = answer(message, context)
    k, liars = context.node_config["partition-id"], context.node_config["num-partitions"] - 1
    if message.metadata.message_type == "train" and k > 0:
        number = liars * (message.content["task"]["round"] - 1) + k - 1
        kinds = spoilers(context.run_config["codec"])
        kinds[number % len(kinds)](reply.content)
    return reply


app = client_app(lambda context: device(context.node_config["partition-id"]), mods=[spoil])
