"""Replies of every malformed kind, in every field: only that reply is rejected, the round ends, the model is finite."""

import copy
import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from inprocess import InProcessGrid
from malformed.kinds import KINDS, SHAPES, device

from folb import algorithms, system
from folb.core.robust import ROBUST
from folb.flower import FederatedStrategy, arrays, client_app, protocol
from folb.flower.replies import Expected, Form, Refused, checked, length
from folb.store import directory

N, LIAR = 5, 2


@pytest.fixture(autouse=True)
def quiet():
    """A rejected reply is a line in the log; nobody reads ten thousand."""
    logger = logging.getLogger("flwr")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


APPS = [client_app(lambda context: device(context.node_config["partition-id"]))] * N
START = {name: np.full(shape, 0.1, np.float32) for name, shape in SHAPES.items()}


def round_with(spoil, **settings):
    """A round in which one device's reply is spoilt, and its result."""

    def tamper(partition, message, reply):
        if message.metadata.message_type == "train" and partition == LIAR:
            spoil(reply.content)
        return reply

    strategy = FederatedStrategy(
        algorithms.folb_hetero(select={"K": 40}, local={"lr": 0.1}),
        system=system.fixed(work=2),
        wait=0.0,
        deadline=0.05,
        **settings,
    )
    result = strategy.start(InProcessGrid(APPS, tamper=tamper), arrays(START), num_rounds=1)
    return strategy, {name: array.numpy() for name, array in result.arrays.items()}


def test_an_honest_round_uses_everybody():
    strategy, params = round_with(lambda content: None)
    assert set(strategy.opened.answers.usable) == set(range(N))
    assert not strategy.opened.notes.rejected
    assert any((params[name] != START[name]).any() for name in START)


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_reply_is_refused_alone(kind):
    strategy, params = round_with(KINDS[kind])
    assert set(strategy.opened.answers.usable) == set(range(N)) - {LIAR}
    assert [identity for identity, _ in strategy.opened.notes.rejected] == [LIAR]
    assert "\n" not in strategy.opened.answers.refused[LIAR]
    assert len(strategy.opened.answers.refused[LIAR]) < 500
    assert all(np.isfinite(value).all() for value in params.values())
    assert any((params[name] != START[name]).any() for name in START)


def test_there_are_kinds_enough():
    for field in ("delta", "grad", "round", "num-examples", "gamma"):
        assert sum(kind.startswith(f"{field}:") for kind in KINDS) >= 20


def test_the_model_is_what_it_would_be_without_the_liar():
    """A rejected device has the same effect as one that was not asked, bit for bit."""
    _, refused = round_with(KINDS["delta: not a number"], guard="none")
    strategy = FederatedStrategy(
        algorithms.folb_hetero(select={"K": 40}, local={"lr": 0.1}),
        system=system.fixed(work=2),
        guard="none",
        wait=0.0,
        deadline=0.01,
    )
    grid = InProcessGrid(APPS, tamper=lambda k, m, r: None if k == LIAR and m.metadata.message_type == "train" else r)
    silent = strategy.start(grid, arrays(START), num_rounds=1).arrays
    assert all(np.array_equal(refused[name], array.numpy()) for name, array in silent.items())


def test_a_reason_goes_to_the_log_and_the_record(tmp_path, caplog):
    logger = logging.getLogger("flwr")
    logger.disabled = False
    logger.addHandler(caplog.handler)
    try:
        round_with(KINDS["grad: infinite"], directory=tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "round 1: rejected: device 2: grad: weight is not finite" in caplog.text
    (line,) = directory.read(tmp_path).rounds()[0]
    assert line["refused"] == [[LIAR, "grad: weight is not finite"]]
    assert line["rejected_devices"] == [LIAR]
    assert line["lost_devices"] == []


def test_a_survey_is_checked_as_well():
    def tamper(partition, message, reply):
        if message.metadata.message_type == "train" and partition == LIAR and "norm" in reply.content["metrics"]:
            reply.content["metrics"]["norm"] = float("inf")
        return reply

    strategy = FederatedStrategy(
        algorithms.fednu_norm(select={"K": 20}), system=system.fixed(work=2), wait=0.0, deadline=0.05
    )
    strategy.start(InProcessGrid(APPS, tamper=tamper), arrays(START), num_rounds=1)
    assert LIAR not in strategy.opened.drawn
    assert [identity for identity, _ in strategy.opened.notes.rejected] == [LIAR]


def test_an_answer_from_another_node_is_refused():
    expected = Expected(1, {"delta": Form(SHAPES)}, 9, node=5)
    message = Message(RecordDict({"metrics": MetricRecord({})}), dst_node_id=5, message_type="train")
    reply = Message(message.content, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 6
    with pytest.raises(Refused, match="from node 6"):
        checked(reply, expected)


# ten thousand ---------------------------------------------------------------------------------------------------------


class Spoiler:
    """Replies made up by a seeded generator: an honest one with one to three things done to it."""

    def __init__(self, seed, honest):
        self.rng, self.honest = np.random.default_rng(seed), honest

    def choice(self, options):
        return options[self.rng.integers(len(options))]

    def number(self):
        return self.choice(
            [
                0,
                1,
                -1,
                9,
                2**40,
                0.0,
                0.5,
                -0.5,
                1e-45,
                1e30,
                1e308,
                float("nan"),
                float("inf"),
                [1.0],
                [],
                float(self.rng.normal()) * 10.0 ** self.rng.integers(-40, 40),
            ]
        )

    def array(self, name):
        shape = tuple(self.rng.integers(0, 5, self.rng.integers(0, 4)).tolist())
        shape = self.choice([SHAPES.get(name, shape)] * 4 + [(4, 3), (3,), shape])
        scale = 10.0 ** self.rng.integers(-45, 39)
        kind = self.choice(["f4", "f4", "f4", "f4", "f8", "i4", "f2", ">f4", "?"])
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(self.rng.normal(size=shape) * scale).astype(kind)
        if values.size and kind == "f4" and self.rng.random() < 0.2:
            values.flat[self.rng.integers(values.size)] = self.choice([np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1e-45])
        array = Array(np.asfortranarray(values) if self.rng.random() < 0.2 else values)
        if self.rng.random() < 0.2:
            array.shape = self.choice([(4, 3), (3,), (12,), (2**31,), ()])
        if self.rng.random() < 0.1:
            array.dtype = self.choice(["float32", "float64", "", "object"])
        if self.rng.random() < 0.2:
            data = bytearray(array.data)
            for _ in range(self.rng.integers(1, 4)):
                data[self.rng.integers(len(data))] = self.rng.integers(256)
            array.data = bytes(data[: self.rng.integers(len(data) + 1)] if self.rng.random() < 0.3 else data)
        return array

    def content(self):
        content = RecordDict(
            {upload: type(record)(dict(record.items())) for upload, record in sorted(self.honest.items())}
        )
        for _ in range(self.rng.integers(1, 4)):
            upload = self.choice(sorted(self.honest))
            if self.rng.random() < 0.05:
                content.pop(upload, None)
            elif upload not in content:
                content[upload] = ArrayRecord()
            elif upload == "metrics":
                name = self.choice(["round", "num-examples", "gamma", "more"])
                if isinstance(content[upload], MetricRecord):
                    content[upload][name] = self.number()
            else:
                name = self.choice(["weight"] * 4 + ["bias"] * 4 + ["other"])
                content[upload][name] = self.array(name)
        return content


def generated(algorithm, count, seed, guard="none", repeated=False):
    """So many times, a generated reply beside honest ones, then the step: how often it was used, and the longest step.

    With `repeated`, it comes twice.
    """
    strategy = FederatedStrategy(algorithm, guard=guard, system=system.fixed(work=2), wait=0.0, deadline=0.05)
    grid = InProcessGrid(APPS)
    messages = list(strategy.configure_train(1, arrays(START), ConfigRecord(), grid))
    received = list(grid.send_and_receive(messages))
    liar = next(reply for reply in received if reply.metadata.src_node_id == grid.node(LIAR))
    asked = set(liar.content["metrics"])
    liar.content["metrics"].setdefault("gamma", 0.5)
    others = [reply for reply in received if reply is not liar]
    opened, spoiler = strategy.opened, Spoiler(seed, liar.content)
    opened.answers.take(others)
    honest, used, longest = dict(opened.answers.usable), 0, 0.0
    for _ in range(count):
        content = spoiler.content()
        if "gamma" not in asked and isinstance(content.get("metrics"), MetricRecord):
            content["metrics"].pop("gamma", None)
        lies = [copy.copy(liar) for _ in range(1 + repeated)]
        for lie in lies:
            lie.__dict__["_content"] = content
        answers = opened.answers
        answers.usable, answers.refused, answers.looked_at, opened.notes.rejected = dict(honest), {}, [], []
        opened.abandoned, opened.weights, strategy.memory = "", None, ()
        changed, numbers = strategy.aggregate_train(1, lies)
        if "too few for robust" in opened.abandoned:  # without the liar's reply
            assert changed is None
            continue
        assert numbers["abandoned"] == 0, opened.abandoned
        assert numbers["replied"] >= N - 1 and len(opened.notes.rejected) == repeated + (numbers["replied"] < N)
        assert all(reason.isprintable() and len(reason) < 500 for _, reason in opened.notes.rejected)
        moved = {name: array.numpy() - START[name] for name, array in changed.items()}
        assert all(np.isfinite(value).all() for value in moved.values())
        longest = max(longest, np.sqrt(sum(float(np.square(value, dtype=float).sum()) for value in moved.values())))
        used += numbers["replied"] == N
    assert 0.04 * count < used < 0.9 * count  # some are harmless, and most are not
    return longest


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["folb_hetero", "folb"])
def test_no_generated_reply_spoils_the_model(name, count):
    """One of the rules is guarded, and one is not."""
    algorithm = {"folb_hetero": algorithms.folb_hetero, "folb": algorithms.folb}[name](
        select={"K": 40}, local={"lr": 0.1}
    )
    generated(algorithm, count, len(name), guard="on" if name == "folb" else "none")


ON_FLOWER = [name for name in ROBUST.parts if name != "fltrust"]  # which needs samples of the server


@pytest.mark.parametrize("name", ON_FLOWER)
def test_no_generated_reply_moves_a_robust_rule_far(name):
    """It comes twice, and only one counts. The step stays as long as those of honest devices."""
    made = algorithms.fedavg(select={"K": N, "replacement": False}, local={"lr": 0.1}, robust=name)
    longest = generated(made, 1000, len(name), repeated=True)
    strategy = FederatedStrategy(
        algorithms.fedavg(select={"K": N, "replacement": False}, local={"lr": 0.1}),
        system=system.fixed(work=2),
        wait=0.0,
        deadline=0.05,
    )
    strategy.start(InProcessGrid(APPS), arrays(START), num_rounds=1)
    lengths = [length(reply.arrays["delta"]) for reply in strategy.opened.answers.usable.values()]
    assert 0 < longest <= 2 * max(lengths)


def test_numbers_of_any_size_that_are_let_in_leave_the_step_finite():
    """At the largest norm accepted, every rule and server step stays within 32 bits."""
    for server in ("plain", "adam", "fedexp"):
        strategy = FederatedStrategy(
            algorithms.folb(select={"K": 5}, server=server),
            guard="none",
            system=system.fixed(work=1),
            wait=0.0,
            deadline=0.05,
        )

        def inflate(partition, message, reply):
            if message.metadata.message_type == "train":
                for upload in ("delta", "grad"):
                    reply.content[upload] = protocol.packed(
                        {name: np.full(shape, (-1) ** partition * 1e14, np.float32) for name, shape in SHAPES.items()}
                    )
            return reply

        result = strategy.start(InProcessGrid(APPS, tamper=inflate), arrays(START), num_rounds=1)
        assert not strategy.opened.notes.rejected
        assert not strategy.opened.abandoned
        assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
