"""What devices and nodes can do to a run on Flower, found by trying to break it: each costs little, and is recorded."""

import math
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

import test_flower
from flwr.app import MetricRecord
from inprocess import InProcessGrid
from test_flower import apps, initial, quick

from folb import algorithms
from folb.errors import InputError
from folb.flower import protocol
from folb.flower.device_draw import usual_length
from folb.store import directory
from folb.store.round_lines import trouble

pytestmark = pytest.mark.usefixtures("undrawn")
federation, model = test_flower.federation, test_flower.model


def scaled(factor, liar=4):
    """One device's updates, `factor` times as long."""

    def tamper(partition, message, reply):
        if message.metadata.message_type == "train" and partition == liar:
            named = protocol.unpacked(reply.content["delta"])
            reply.content["delta"] = protocol.packed({name: np.float32(factor) * v for name, v in named.items()})
        return reply

    return tamper


def change(result, model):
    """How far a run moved the model."""
    after, before = protocol.unpacked(result.arrays), protocol.unpacked(initial(model))
    return math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in after))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "folb", "scaffold"])
def test_no_update_is_much_longer_than_the_others(name, federation, model, tmp_path):
    algorithm = getattr(algorithms, name)(select={"K": 8, "replacement": False})
    honest = quick(algorithm).start(InProcessGrid(apps(federation)), initial(model), 2)
    strategy = quick(algorithm, directory=tmp_path, guard="none")
    attacked = strategy.start(InProcessGrid(apps(federation), tamper=scaled(1e14)), initial(model), 2)
    assert change(attacked, model) < 200 * change(honest, model)
    line = directory.read(tmp_path).rounds()[0][0]
    ((device, words),) = line["shortened"]
    assert device == 4 and "100 times the median" in words
    assert f"device 4 shortened: {words}" in trouble(line) and 0 < line["length"] < 100


def test_without_a_liar_nothing_is_shortened(federation, model):
    results = [
        quick(algorithms.fedavg(select={"K": 8}), max_norm=most)
        .start(InProcessGrid(apps(federation)), initial(model), 3)
        .arrays
        for most in (100.0, math.inf)
    ]
    for one, other in zip(*(protocol.unpacked(arrays).values() for arrays in results), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_usual_length_is_one_that_few_liars_cannot_move():
    assert usual_length([1, 1, 1e9], []) == 1
    assert usual_length([1, 1e9], []) == 1  # the lower of the two in the middle
    assert usual_length([1e9], [1.0, 2.0, 3.0]) == 2  # a round with one reply: the last rounds count
    assert usual_length([1e9], []) == 1e9  # there is nothing to compare it with
    assert usual_length([0, 0, 0, 5], []) == 5  # devices that do nothing do not shorten others
    assert usual_length([0, 0], [1.0]) == 0


@pytest.mark.parametrize("value", [0.5, math.nan, True, "10"])
def test_max_norm_is_checked(value):
    with pytest.raises(InputError, match=r"max_norm = .*: should be a number, at least 1"):
        quick(algorithms.fedavg(select={"K": 2}), max_norm=value)


@pytest.mark.parametrize(
    ("settings", "enough"), [({}, 4), ({"robust": "norm_bound"}, 4), ({"guard": "none"}, 1), ({"min_replies": 2}, 2)]
)
def test_half_of_the_replies_are_needed_behind_a_guard(settings, enough, federation, model):
    """Where one of two replies is a liar's, no bound on its weight helps."""
    robust = {name: settings[name] for name in settings if name == "robust"}
    strategy = quick(
        algorithms.folb(select={"K": 8, "replacement": False}, **robust),
        **{k: v for k, v in settings.items() if k not in robust},
    )
    for there in (enough - 1, enough):
        grid = InProcessGrid(
            apps(federation),
            tamper=lambda k, message, reply, there=there: (
                None if message.metadata.message_type == "train" and k >= there else reply
            ),
        )
        moved = change(strategy.start(grid, initial(model), 1), model)
        assert bool(strategy.opened.abandoned) is (there < enough) is (moved == 0)


# -- evaluation --------------------------------------------------------------------------------------------------------

LIES = {
    "accuracy of 1e15": ({"accuracy": 1e15}, "accuracy is 1000000000000000.0"),
    "test accuracy of 2": ({"test_accuracy": 2.0}, "test_accuracy is 2.0"),
    "loss of -1e15": ({"loss": -1e15}, "loss is -1000000000000000.0"),
    "loss of 1e15": ({"loss": 1e15}, "loss is 1000000000000000.0"),
    "loss of nan": ({"loss": math.nan}, "loss is nan"),
    "a list": ({"loss": [1.0, 2.0]}, "loss is [1.0, 2.0]"),
    "a name with an escape sequence": ({"\x1b[31mred": 1.0}, "the name of a metric is ?[31mred"),
    "a name of two lines": ({"a\nb": 1.0}, "the name of a metric is a?b"),
    "a long name": ({"x" * 10**6: 1.0}, "the name of a metric is xxx"),
    "many metrics": ({f"m{i}": 1.0 for i in range(10**4)}, "it has 10003 metrics, and should have at most 20"),
    "no samples": ({"num-examples": 0}, "num-examples is 0"),
}


def evaluated(lie, federation, model, rounds=1):
    def tamper(partition, message, reply):
        if message.metadata.message_type == "evaluate" and partition == 1:
            reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | lie)
        return reply

    honest = apps(federation, evaluate=lambda params: {"accuracy": 0.5, "loss": 2.0, "num-examples": 10})
    strategy = quick(algorithms.fedavg(select={"K": 3}), fraction_evaluate=1.0)
    result = strategy.start(InProcessGrid(honest, tamper=tamper), initial(model), num_rounds=rounds)
    return result.evaluate_metrics_clientapp[rounds], [reason for _, reason in strategy.opened.notes.rejected]


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
def test_an_evaluation_is_checked(lie, reason, federation, model):
    measured, noted = evaluated(lie, federation, model)
    assert measured == MetricRecord({"accuracy": 0.5, "loss": 2.0})
    assert len(noted) == 1 and f"its evaluation: {reason}" in noted[0]
    assert noted[0].isprintable() and len(noted[0]) < 300


def test_an_evaluation_counts_for_no_more_samples_than_were_declared(federation, model):
    measured, _ = evaluated({"num-examples": 10**7, "accuracy": 1.0}, federation, model)
    size = int(federation.train.size[1])
    assert measured["accuracy"] == pytest.approx((7 * 10 * 0.5 + size * 1.0) / (7 * 10 + size))


def test_a_metric_that_few_devices_report_is_left_out(federation, model):
    measured, _ = evaluated({f"own{i}": 1.0 for i in range(10)}, federation, model)
    assert sorted(measured) == ["accuracy", "loss"]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_node_with_a_new_id_in_each_round_costs_its_wait_once(federation, model):
    class Restless(InProcessGrid):
        """Device 3 has a new node whenever it is looked at, and never answers."""

        def get_node_ids(self):
            self.nodes = {node: k for node, k in self.nodes.items() if k != 3} | {10**6 + len(self.sent): 3}
            return super().get_node_ids()

    grid = Restless(apps(federation), tamper=lambda k, message, reply: None if k == 3 else reply)
    began = time.monotonic()
    strategy = quick(algorithms.fedavg(select={"K": 4}), wait=0.5)
    strategy.start(grid, initial(model), num_rounds=6)
    assert time.monotonic() - began < 6 * 0.5 and strategy.roster.patience == 0
    assert len(strategy.opened.members) == federation.N - 1


def test_over_selection_does_not_use_the_fastest_device_in_every_round(federation, model, tmp_path):
    class Paced(InProcessGrid):
        """Device 0 answers at once, the others one by one, the last two never."""

        def push_messages(self, messages):
            ids = super().push_messages(messages)
            now = time.monotonic()
            for id, message in zip(ids, messages, strict=True):
                k = self.nodes[message.metadata.dst_node_id]
                due[id] = now if message.metadata.message_type != "train" else now + (math.inf if k > 5 else 0.02 * k)
            return ids

        def pull_messages(self, message_ids):
            return super().pull_messages([id for id in message_ids if due[id] <= time.monotonic()])

    due = {}
    strategy = quick(
        algorithms.fedavg(select={"K": 2, "replacement": False}), over_selection=4.0, deadline=2.0, directory=tmp_path
    )
    began = time.monotonic()
    strategy.start(Paced(apps(federation)), initial(model), num_rounds=20)
    lines = directory.read(tmp_path).rounds()[0]
    asked = [line for line in lines if 0 in line["devices"]]
    used = [line for line in asked if line["times"][line["devices"].index(0)]]
    assert len(asked) == 20 and 5 <= len(used) <= 12
    assert all(sum(line["times"]) >= 2 for line in lines)
    assert time.monotonic() - began < 20
