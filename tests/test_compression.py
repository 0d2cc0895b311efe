"""Codecs: each against a literal loop, on average right where it says so, in both carriers; bytes; what liars send."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")

from flwr.app import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from inprocess import InProcessGrid
from malformed.kinds import LIES, SHAPES, claim, device, places
from random_numbers import words
from test_asynchronous import UNEVEN, Literal
from test_asynchronous import fedbuff as buffered
from test_cli import folb as folb_command
from test_family import LR, SEED, Vector, average, full_gradient, mean, model, replies, rounds
from test_slots import FEDERATION, MODEL, begin, furthest, grid, kill_and_resume, on_flower, simulated

from folb import Codec, InputError, algorithms, system
from folb.core import sketch
from folb.core.codec import BLOCK, UP, RandomK, TopK
from folb.core.costs import costs
from folb.core.polar import polar
from folb.core.randomness import ROUND
from folb.core.round import sizes
from folb.core.shuffle import shuffled
from folb.flower import Device, FederatedStrategy, TwoPhaseStrategy, arrays, client_app
from folb.flower import sent as device_sent
from folb.flower.protocol import Task
from folb.simulation import problem as problems
from folb.simulation.play import start
from folb.store import directory

USUAL = {"select.K": 6, "local.lr": LR, "local.batch": 5}
D = sum(value.size for value in begin().values())
WORDS = np.array([123456789, 987654321], np.uint32)
SOME = {"bias": np.linspace(-1, 2, 7, dtype=np.float32), "weight": np.sin(np.arange(600.0, dtype=np.float32)) ** 3}


def codec(name, keep=0.1):
    return UP.parts[name](**({"keep": keep} if name.endswith("_k") else {}))


# A codec, number by number -------------------------------------------------------------------------------------------


def mixed(h):
    h = h * 0x7FEB352D % 2**32
    return (h ^ (h >> 15)) * 0x846CA68B % 2**32


def chance(pair, i):
    own = [int(word) ^ 0x5BD1E995 for word in pair]
    return (mixed(mixed(i ^ own[0]) ^ own[1]) >> 8) / 2**24


def lossy(name, a, pair, keep=0.1, whole=False):
    """What comes of a tree that went through a codec, in 64 bits."""
    row = np.concatenate([np.ravel(a[key]) for key in sorted(a)]).astype(float)
    d, k = len(row), max(1, math.ceil(keep * len(row) - 1e-9))
    kept = np.zeros(d)
    if name == "top_k":
        for i in sorted(range(d), key=lambda i: (-abs(row[i]), i))[:k]:
            kept[i] = row[i]
    elif name == "random_k":
        own = np.array(pair, np.uint32) ^ np.uint32(0x5BD1E995)
        for i in shuffled(own, 0, np.arange(k), d):
            kept[i] = row[i] * (1 if whole else d / k)
    else:
        for first in range(0, d, 256):
            block = row[first : first + 256]
            top = {"int8": 127, "int4": 7, "sign": 1}[name]
            scale = np.mean(np.abs(block)) if name == "sign" else np.max(np.abs(block))
            for i, value in enumerate(block):
                level = 1 if value > 0 else -1
                if name != "sign":
                    level = min(math.floor(value / scale * top + chance(pair, first + i)), top) if scale > 0 else 0
                kept[first + i] = level / top * scale
    parts, first = {}, 0
    for key in sorted(a):
        size = np.size(a[key])
        parts[key] = kept[first : first + size].reshape(np.shape(a[key]))
        first += size
    return Vector(parts)


@pytest.mark.parametrize("name", UP.parts)
def test_a_codec_is_a_literal_loop_in_numpy_and_in_jax(name):
    made = codec(name)
    sent = made.encoded(SOME, WORDS)
    assert {key: (value.shape, value.dtype.name) for key, value in sent.items()} == made.shapes(607)
    assert sum(value.nbytes for value in sent.values()) == made.nbytes(607)
    assert made.fault(sent, 607, 1e15) == ""
    expected = lossy(name, SOME, WORDS)
    compiled = jax.jit(lambda a, words: made.decoded(made.encoded(a, words), words, a))
    for back in (made.decoded(sent, WORDS, SOME), compiled(SOME, WORDS)):
        for key, value in expected.items():
            np.testing.assert_allclose(back[key], value, atol=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4", "random_k"])
def test_a_codec_without_feedback_is_right_on_average(name):
    """The mean over random words is within five standard errors, and the words matter."""
    made, a = codec(name, keep=0.3), {"w": jnp.asarray(SOME["weight"][:64])}
    many = np.random.default_rng(0).integers(0, 2**32, (3000, 2), np.uint32)
    back = np.asarray(jax.jit(jax.vmap(lambda pair: made.decoded(made.encoded(a, pair), pair, a)))(many)["w"])
    error = np.abs(back.mean(axis=0) - a["w"])
    assert np.all(error <= 5 * back.std(axis=0).max() / math.sqrt(len(many)))
    assert back.std(axis=0).max() > 1e-3


@pytest.mark.parametrize("name", UP.parts)
def test_a_vector_of_zeros_or_of_one_number(name):
    for d in (1, 2, BLOCK + 1):
        zero = {"w": np.zeros(d, np.float32)}
        assert not codec(name).decoded(codec(name).encoded(zero, WORDS), WORDS, zero)["w"].any()
    one = {"w": np.array([-2.5], np.float32)}
    assert codec(name).decoded(codec(name).encoded(one, WORDS), WORDS, one)["w"][0] == pytest.approx(-2.5)


@pytest.mark.parametrize("name", UP.parts)
@pytest.mark.parametrize("scale", [0.5, 1.5, 9e37, 3e38, np.inf, np.nan])
def test_the_largest_numbers_come_through_a_codec(name, scale):
    """What is not finite stays so."""
    made, rng = codec(name, keep=1.0), np.random.default_rng(0)
    unit = rng.choice(np.float32([1, -1, 0.25, 1e-30]), 2 * BLOCK)
    compiled = jax.jit(lambda a, words: made.decoded(made.encoded(a, words), words, a))
    with np.errstate(all="ignore"):  # where NumPy warns, the server refuses the reply
        a = {"w": np.float32(scale) * unit}
        for back in (made.decoded(made.encoded(a, WORDS), WORDS, a)["w"], np.asarray(compiled(a, WORDS)["w"])):
            if not np.isfinite(scale):
                assert not np.isfinite(back[np.abs(unit) == 1]).any()
            elif name == "sign":  # its scale is a mean: the sum may be infinite
                assert np.all(np.abs(back) > 0.25 * scale)
            else:
                assert np.abs(back / scale - unit).max() <= 1.001 / {"int8": 127, "int4": 7}.get(name, 1e6)


@pytest.mark.parametrize(
    "name", [name for name in UP.parts if name != "random_k"]
)  # which leaves out numbers by chance
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_not_finite_comes_through(name, bad):
    made, row = codec(name, keep=0.1), np.linspace(-1, 1, 1000, dtype=np.float32)
    row[500] = bad
    compiled = jax.jit(lambda a, words: made.decoded(made.encoded(a, words), words, a))
    with np.errstate(all="ignore"):
        for run in (lambda a, words: made.decoded(made.encoded(a, words), words, a), compiled):
            assert not np.isfinite(run({"w": row}, WORDS)["w"][500])


def test_long_vectors_keep_their_lengths_in_sketches_and_robust_rules():
    """Earlier, each was a vector of zeros once it was compiled."""
    long = np.full(5, 2e38, np.float32)
    for bits in (4, 8):
        back = jax.jit(lambda s, bits=bits: sketch.unpacked(sketch.packed(s, bits), 5, bits))(long)
        np.testing.assert_allclose(back, long, rtol=1e-6)
    back = jax.jit(polar)({"w": np.stack([long, long / 4])}, np.ones(2, bool))
    np.testing.assert_allclose(back.norm, [np.inf, np.sqrt(5) * 5e37], rtol=1e-6)
    np.testing.assert_allclose(back.direction["w"], np.full((2, 5), 1 / np.sqrt(5)), rtol=1e-6)


# A run, in both carriers ---------------------------------------------------------------------------------------------


def pair(t, k):
    return [int(word) for word in words(SEED, t, k, 2)]


def fedavg(run, up=None, keep=0.1, feedback=False, down=None):
    """FedAvg through codecs: a device adds what it left out before, and so does the server."""
    w, left, behind = model(), {}, model() * 0
    for t in rounds(run):
        full = w + behind
        sent = full if down is None else lossy(down, full, pair(t, ROUND))
        answers = replies(run, t, sent)
        for reply in answers if up else ():
            before = reply.delta + left.get(reply.k, model() * 0)
            reply.delta = lossy(up, before, pair(t, reply.k), keep, whole=feedback)
            if feedback:
                left[reply.k] = before - reply.delta
        w = w + average(answers)
        if feedback and down is not None:
            behind = full - sent
    return w


def folb(run, up):
    """FOLB (13), with updates and gradients through a codec."""
    w = model()
    for t in rounds(run):
        answers = replies(run, t, w)
        delta = [lossy(up, reply.delta, pair(t, reply.k)) for reply in answers]
        grad = [lossy(up, full_gradient(w, reply.k), pair(t, reply.k)) for reply in answers]
        times = np.array([reply.times for reply in answers])
        g1 = mean(grad, times)
        inner = times * np.array([g.dot(g1) for g in grad])
        for weight, d in zip(inner / np.abs(inner).sum(), delta, strict=True):
            w = w + d * weight
    return w


LOOPS = {
    "int8": ({"compress_up": "int8"}, lambda run: fedavg(run, "int8")),
    "int8 with feedback": (
        {"compress_up": "int8", "error_feedback": True},
        lambda run: fedavg(run, "int8", feedback=True),
    ),
    "int4": ({"compress_up": "int4"}, lambda run: fedavg(run, "int4")),
    "top_k": (
        {"compress_up": "top_k", "compress_up.keep": 0.05},
        lambda run: fedavg(run, "top_k", 0.05, feedback=True),
    ),
    "top_k without feedback": ({"compress_up": "top_k", "error_feedback": False}, lambda run: fedavg(run, "top_k")),
    "random_k": ({"compress_up": "random_k"}, lambda run: fedavg(run, "random_k", feedback=True)),
    "random_k without feedback": (
        {"compress_up": "random_k", "compress_up.keep": 0.5, "error_feedback": False},
        lambda run: fedavg(run, "random_k", 0.5),
    ),
    "sign": ({"compress_up": "sign"}, lambda run: fedavg(run, "sign", feedback=True)),
    "down": ({"compress_down": "int8"}, lambda run: fedavg(run, down="int8")),
    "both, with feedback": (
        {"compress_up": "int4", "compress_down": "int8", "error_feedback": True},
        lambda run: fedavg(run, "int4", feedback=True, down="int8"),
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_run_is_a_literal_loop_in_both_carriers(case):
    """Some devices are lost, and some are drawn twice."""
    settings, loop = LOOPS[case]
    made = algorithms.fedavg(**USUAL, **settings)
    run, (deployed, _) = simulated(made), on_flower(made)
    expected = loop(run)
    assert furthest(expected, run.params) < 1e-5
    assert furthest(expected, deployed) < 1e-5
    assert run.lost.any() and (run.times > 1).any()


def test_folb_sends_its_gradients_through_the_codec():
    made = algorithms.folb(**USUAL, local={"mu": 0.0}, compress_up="int4")
    run, (deployed, _) = simulated(made), on_flower(made)
    expected = folb(run, "int4")
    assert furthest(expected, run.params) < 1e-5
    assert furthest(expected, deployed) < 1e-5


class Encoded(Literal):
    """Rounds that do not wait, with an encoded model and encoded updates, and error feedback on both sides."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.left, self.behind = {}, model() * 0

    def arrived(self, delta, n, k):
        full = delta + self.left.get(k, model() * 0)
        coded = lossy("top_k", full, pair(n, k), 0.2, whole=True)
        self.left[k] = full - coded
        return coded

    def play_encoded(self, t):
        full, steps = self.w + self.behind, self.steps
        sent = lossy("int8", full, pair(t, ROUND))
        self.play(sent)
        if self.steps > steps:
            self.behind = full - sent


def test_codecs_in_rounds_that_do_not_wait_are_a_literal_loop():
    """What a device left out waits for its next reply, though it started from an older model."""
    loop = Encoded(UNEVEN, 3, 2, lambda tau: (1 + tau) ** -0.5, buffered)
    for t in range(1, 31):
        loop.play_encoded(t)
    usual = {"local.lr": LR, "local.batch": 5, "compress_up": "top_k", "compress_up.keep": 0.2, "compress_down": "int8"}
    run = simulated(algorithms.fedbuff(select={"K": 2}, concurrency=3, **usual), rounds=30, system=UNEVEN)
    for t, (buffer, lost, _, _) in enumerate(loop.rounds):
        assert run.devices[t][run.times[t] > 0].tolist() == [reply["k"] for reply in buffer]
        assert run.devices[t][run.lost[t]].tolist() == lost
    assert any(reply["tau"] for buffer, _, _, _ in loop.rounds for reply in buffer) and run.lost.any()
    assert furthest(loop.w, run.params) < 1e-5


OTHERS = {
    "two sets": algorithms.folb_two_set(**USUAL, compress_up={"name": "top_k", "keep": 0.2}),
    "guard": algorithms.folb_hetero(**USUAL, guard="on", compress_up="int8"),
    "scaffold": algorithms.scaffold(**USUAL, compress_up="int8", error_feedback=True),
    "accord": algorithms.accord(
        local={"lr": LR, "batch": 5}, select={"K": 4}, compress_up="int8", compress_down="int8", error_feedback=True
    ),
    "a survey": algorithms.fednu_direct(**USUAL, compress_up="sign", compress_down="int8"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_algorithm_is_the_same_in_both_carriers(case):
    run, (deployed, _) = simulated(OTHERS[case]), on_flower(OTHERS[case])
    assert furthest(run.params, deployed) < 1e-5


def test_a_lost_reply_takes_what_it_carried_with_it():
    """A device does not know what becomes of its reply: what it left out is as if the reply had arrived."""
    made = algorithms.fedavg(select={"K": 5, "replacement": False}, local={"lr": LR, "batch": 5}, compress_up="top_k")
    left = []

    def lose(partition, message, reply):
        return None if message.metadata.message_type == "train" and partition == 2 else reply

    for tamper in (None, lose):
        strategy = FederatedStrategy(made, system=system.fixed(work=2), wait=0.0, deadline=0.05, seed=SEED)
        carrier = grid(tamper=tamper)
        strategy.start(carrier, arrays(begin()), num_rounds=1)
        assert (2 in strategy.opened.answers.usable) == (tamper is None)
        state = carrier.states[carrier.node(2)]
        left.append({name: value.numpy() for name, value in state.array_records[device_sent.RESIDUAL].items()})
    assert all(np.array_equal(left[0][name], left[1][name]) and left[0][name].any() for name in left[0])


def test_what_another_run_left_out_is_dropped():
    """Rounds count upwards: a device that is asked for an earlier round than its last begins anew."""
    ones = {"delta": {"w": np.arange(1, 9, dtype=np.float32)}}
    task = Task(1, ("delta",), codec="top_k", numbers={"codec.keep": 0.25, "codec.feedback": 1.0})
    state = RecordDict()
    first = device_sent.encoded(task, ones, state)["delta"]
    again = device_sent.encoded(task, ones, state)["delta"]
    later = device_sent.encoded(replace(task, round=2), ones, state)["delta"]
    assert first["values"].tolist() == again["values"].tolist() == [7, 8]
    assert later["values"].tolist() == [10, 12]  # 5 and 6 were left out before
    assert device_sent.encoded(replace(task, round=1), ones, state)["delta"]["values"].tolist() == [7, 8]


def test_a_killed_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    """What devices and the server left out is in the checkpoints."""
    made = algorithms.fedavg(**USUAL, compress_up="top_k", compress_down="int4")
    whole = simulated(made)
    resumed = kill_and_resume(made, 4, tmp_path, monkeypatch)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(resumed.params[name], whole.params[name])


def test_an_update_through_a_codec_needs_no_room_for_devices_that_are_not_met():
    made = algorithms.fedavg(select={"K": 1}, local={"lr": LR}, compress_up="sign")
    problem = problems.problem(FEDERATION, MODEL)
    rows = jax.eval_shape(lambda: start(problem, made, 0, rounds=3)).residuals
    assert rows.rows["weight"].shape[0] == 3
    assert rows.place.shape == (FEDERATION.N,)


# Bytes ---------------------------------------------------------------------------------------------------------------

FRAMING = 300  # bytes that Flower adds for each array of a message: NumPy's header, names, types and shapes
REST = 600  # and for its task, numbers and records


def wide(k):
    """A device with a model of 250,000 parameters."""
    rng = np.random.default_rng(k)
    x, y = rng.normal(size=(3, 500)).astype(np.float32), rng.normal(size=(3, 500)).astype(np.float32)
    return Device(x, y, lambda params, x, y: {"w": x.T @ (x @ params["w"] - y) / len(y)})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compress_up": "int8", "compress_down": "int8"},
        {"compress_up": "int4", "compress_down": "int4"},
        {"compress_up": "top_k"},
        {"compress_up": "random_k"},
        {"compress_up": "sign"},
    ],
    ids=lambda settings: settings.get("compress_up", "none"),
)
def test_the_bytes_counted_are_those_of_the_messages(settings, tmp_path):
    """Within 3 %, and within the framing."""
    made, model = (
        algorithms.fedavg(select={"K": 2, "replacement": False}, **settings),
        {"w": np.zeros((500, 500), np.float32)},
    )
    replied = []
    app = client_app(lambda context: wide(context.node_config["partition-id"]))

    def note(partition, message, reply):
        if message.metadata.message_type == "train":
            replied.append(reply)
        return reply

    carrier = InProcessGrid([app] * 2, tamper=note)
    strategy = FederatedStrategy(made, system=system.fixed(work=1), wait=0.0, deadline=5.0, directory=tmp_path)
    strategy.start(carrier, arrays(model), num_rounds=1)
    (line,) = directory.read(tmp_path).rounds()[0]
    asked = [message for message in carrier.sent if message.metadata.message_type == "train"]
    size = sizes(made, model)
    for crossing, counted, recorded in (
        (asked, 2 * size.model, line["bytes_down"]),
        (replied, 2 * size.reply, line["bytes_up"]),
    ):
        crossed = sum(recorddict_to_proto(message.content).ByteSize() for message in crossing)
        frames = sum(FRAMING * len(record) for m in crossing for record in m.content.array_records.values()) + 2 * REST
        assert counted < crossed <= counted + frames
        assert counted <= recorded <= 1.03 * counted
        assert crossed <= 1.03 * counted


def test_the_simulator_counts_what_is_sent():
    full, small = (
        simulated(algorithms.folb(**USUAL, **settings))
        for settings in ({}, {"compress_up": "int8", "compress_down": "int4"})
    )
    up, down = D + 4 * -(-D // 256), -(-D // 2) + 4 * -(-D // 256)
    np.testing.assert_array_equal(small.bytes_up * 4 * D, full.bytes_up * up)
    np.testing.assert_array_equal(small.bytes_down * 4 * D, full.bytes_down * down)


def test_the_costs_of_a_codec():
    spent = costs(algorithms.scaffold(compress_up="int8", compress_down="int4", error_feedback=True))
    assert (spent.up, spent.down) == ("0.254 d", "0.129 d + d (shift)")
    assert costs(algorithms.folb(compress_up="top_k")).up == "0.2 d + 0.2 d (grad)"


# What liars send -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("upload", ["delta", "grad"])
def test_a_malformed_reply_is_refused_alone(lie, upload):
    name, array, value = LIES[lie]
    check_refused(name, lambda content: content[upload].__setitem__(array, value))


OTHER_LIES = {
    "not through the codec": lambda content: content.__setitem__(
        "delta", ArrayRecord({key: claim(shape) for key, shape in SHAPES.items()})
    ),
    "no scale": lambda content: content["delta"].__delitem__("scale"),
    "an array too many": lambda content: content["delta"].__setitem__("places", places(1, 2)),
}


@pytest.mark.parametrize("lie", OTHER_LIES)
def test_a_reply_that_is_not_what_the_codec_sends_is_refused_alone(lie):
    check_refused("int8", OTHER_LIES[lie])


def check_refused(name, spoil):
    def tamper(partition, message, reply):
        if message.metadata.message_type == "train" and partition == 2:
            spoil(reply.content)
        return reply

    apps = [client_app(lambda context: device(context.node_config["partition-id"]))] * 4
    made = algorithms.folb(select={"K": 4, "replacement": False}, local={"lr": 0.1}, compress_up=name)
    strategy = FederatedStrategy(made, system=system.fixed(work=2), wait=0.0, deadline=0.05)
    first = {key: np.full(shape, 0.1, np.float32) for key, shape in SHAPES.items()}
    result = strategy.start(InProcessGrid(apps, tamper=tamper), arrays(first), num_rounds=1)
    assert set(strategy.opened.answers.usable) == {0, 1, 3}
    assert [identity for identity, _ in strategy.opened.notes.rejected] == [2]
    assert "\n" not in strategy.opened.answers.refused[2]
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


# Settings ------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "an unknown codec": ({"compress_up": "zip"}, "compress_up = 'zip'"),
    "an unknown codec down": ({"compress_down": "zip"}, "compress_down = 'zip'"),
    "a part of the model": ({"compress_down": TopK()}, "devices keep no model"),
    "keep with int8": ({"compress_up": "int8", "compress_up.keep": 0.1}, "is for compress_up=top_k, random_k"),
    "keep alone": ({"compress_up.keep": 0.1}, "compress_up is not set"),
    "keep nothing": ({"compress_up": "top_k", "compress_up.keep": 0.0}, "more than 0 and at most 1"),
    "keep more than all": ({"compress_up": "random_k", "compress_up.keep": 1.5}, "more than 0 and at most 1"),
    "keep what is no number": ({"compress_up": "top_k", "compress_up.keep": float("nan")}, "keep"),
    "feedback without a codec": ({"error_feedback": True}, "needs a codec"),
    "feedback that is no yes or no": ({"compress_up": "int8", "error_feedback": 2}, "True or False"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_settings_are_named(mistake):
    settings, says = MISTAKES[mistake]
    with pytest.raises(InputError) as error:
        algorithms.fedavg(**settings)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InputError, match="S_2 has no error feedback"):
        algorithms.folb_two_set(gradient="proxy", compress_up="int8")
    for name in ("compress_up", "compress_down"):
        with pytest.raises(InputError, match=f"{name} .*do not add up"):
            TwoPhaseStrategy(algorithms.folb(select={"K": 4}, **{name: "int8"}))
    with pytest.raises(InputError, match="fewer than 16777216 parameters"):
        RandomK().shapes(2**24)


class Half(Codec):
    """Two bytes for each number."""

    whole = True

    def shapes(self, d):
        return {"values": ((d,), "float16")}

    def encode(self, row, words):
        return {"values": row.astype("float16")}

    def decode(self, sent, words, d, whole):
        return sent["values"].astype("float32")


def test_a_codec_of_one_s_own():
    made = algorithms.fedavg(**USUAL, compress_up=Half(), compress_down=Half())
    assert sizes(made, begin())[:3] == (2 * D, 0, 2 * D)
    assert 0 < furthest(simulated(made).params, simulated(algorithms.fedavg(**USUAL)).params) < 0.01
    with pytest.raises(InputError, match="compress_up = 'half': should be one of folb's"):
        FederatedStrategy(made)
    with pytest.raises(InputError, match="compress_down = 'top_k': should be int8 or int4"):
        algorithms.fedavg(compress_down=TopK())


def test_codecs_are_swept_on_the_command_line(tmp_path, capsys):
    code, out, err = folb_command(
        capsys,
        *(
            "compare",
            "synthetic_1_1",
            "--algorithms",
            "fedavg",
            "--set",
            "compress_up=none,int8",
            "--rounds",
            "2",
        ),
        *("--seeds", "1", "--set", "devices=4", "--set", "select.K=2", "--json", "--out", tmp_path / "run"),
    )
    assert code == 0, err
    runs = json.loads(out)["runs"]
    assert [run["parameters"]["compress_up"] for run in runs] == [None, "int8"]
    assert runs[1]["bytes_up"] < 0.26 * runs[0]["bytes_up"]
    code, _, err = folb_command(
        capsys, "compare", "synthetic_1_1", "--set", "compress_up=int8", "--set", "compress_up.keep=0.2"
    )
    assert code == 2
    assert err.count("\n") == 1 and "keep" in err and "0.2" in err
    assert "random_k" in folb_command(capsys, "list", "parts")[1]
