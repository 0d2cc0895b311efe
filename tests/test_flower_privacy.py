"""Private runs on the in-process grid: the noise that devices and server add, what they are bounded by, what counts."""

import json
import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")
pytest.importorskip("dp_accounting", reason="needs pip install 'folb[privacy]'")

import jax
from inprocess import InProcessGrid
from test_flower import apps

from folb import algorithms, models, simulate, system
from folb.core import privacy
from folb.core.accountant import Rounds, noise_for
from folb.data.synthetic import synthetic
from folb.errors import InputError
from folb.flower import Device, FederatedStrategy, TwoPhaseStrategy, arrays, client_app, protocol
from folb.flower import sent as device_sent
from folb.flower.protocol import Task

pytestmark = pytest.mark.usefixtures("undrawn")

# A model of 40,000 numbers: each round is as many draws of noise. The standard deviation of 10,000 would be off by 2 %
# once in 200 times, and the system's draws are not repeated by a seed.
N, WIDTH = 6, 40_000
OWN = {"privacy": "central", "select.K": 4, "select.replacement": False, "privacy.noise": 2.0, "privacy.clip": 0.5}


def still(params, x, y):
    """A gradient of nothing: all that moves the model is noise."""
    return {name: np.zeros_like(value) for name, value in params.items()}


def pushing(params, x, y):
    """A gradient that is far too long."""
    return {name: np.full_like(value, -1e6) for name, value in params.items()}


def grid_of(gradient=still, **more):
    x, y = np.zeros((3, 1), np.float32), np.zeros(3, np.int32)
    return InProcessGrid([client_app(lambda context: Device(x, y, gradient)) for _ in range(N)], **more)


def strategy(algorithm, **settings):
    return FederatedStrategy(
        algorithm,
        **{"wait": 0.0, "deadline": 0.05, "min_available_nodes": N, "system": system.uniform(high=1)} | settings,
    )


def played(algorithm, grid=None, rounds=1, width=WIDTH, **settings):
    start = arrays({"w": np.zeros(width, np.float32)})
    made = strategy(algorithm, **settings)
    result = made.start(grid_of() if grid is None else grid, start, num_rounds=rounds)
    return result.arrays["w"].numpy(), made


@pytest.mark.parametrize("place", ["central", "distributed"])
@pytest.mark.parametrize("replay", [False, True])
def test_the_noise_of_a_round_is_as_the_accountant_assumes(place, replay):
    draws = {"select": "poisson"} if place == "distributed" else {}  # then more or fewer than 4 add their shares
    algorithm = algorithms.fedavg(**OWN | {"privacy": place, "privacy.clip_quantile": 0.5} | draws)
    model, made = played(algorithm, replay=replay)
    # the mean of 4: noise 2, clip 0.5, and 95 % of the whole for the update
    assert np.std(model) == pytest.approx(2.0 * 0.5 / np.sqrt(0.95) / 4, rel=0.02)
    assert abs(np.mean(model)) < 0.02
    again, _ = played(algorithm, replay=replay)
    assert np.array_equal(model, again) is replay
    # all were within the clip, so it shrinks, up to the noise of the count
    assert made.state.clip != 0.5 and 0.3 < made.state.clip < 0.7


def test_a_device_counts_against_the_clip_of_its_round():
    grid = grid_of()
    played(algorithms.fedavg(**OWN | {"privacy.clip_quantile": 0.5}), grid, rounds=2, replay=True)
    tasks = [message.content.config_records.get("task") for message in grid.sent]
    sent = [dict(zip(task["names"], task["values"], strict=True)) for task in tasks if task is not None]
    assert len({numbers["privacy.clip"] for numbers in sent}) == 2  # it adapts
    assert all(numbers["within.clip"] == numbers["privacy.clip"] for numbers in sent)


def test_if_devices_do_not_answer_the_server_adds_their_share():
    def silent(partition, message, reply):
        return None if message.metadata.message_type == "train" else reply

    model, made = played(algorithms.fedavg(**OWN | {"privacy": "distributed"}), grid_of(tamper=silent))
    assert np.std(model) == pytest.approx(2.0 * 0.5 / 4, rel=0.02)
    assert not made.opened.abandoned  # a private round is always closed


def test_the_noise_for_a_budget_is_told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    made = strategy(algorithms.fedavg(privacy={"name": "central", "epsilon": 8.0}, select={"name": "poisson", "K": 4}))
    made.algorithm = privacy.calibrated(made.algorithm, N, 3)
    with caplog.at_level(logging.INFO, "flwr"):
        made.summary()
    noise = noise_for(8.0, 1e-5, "poisson", 4, N, 3)
    assert f"private (central, poisson draws from 6 devices or more): noise {noise}, delta 1e-05" in caplog.text


def test_a_device_s_share_of_the_noise_is_as_asked():
    numbers = {"privacy.clip": 0.5, "privacy.delta": 0.3, "privacy.within": 0.7, "privacy.square": 0.2}
    delta = {"delta": {"w": np.full(WIDTH, 1.0, np.float32)}}
    for replay in (0.0, 1.0):
        task = Task(1, ("delta",), words=(3, 4), numbers=numbers | {"privacy.replay": replay})
        sent, _ = device_sent.private(task, delta, {"within": 0.0, "square": 1.0})
        assert np.std(sent["delta"]["w"]) == pytest.approx(0.3, rel=0.02)
        assert np.mean(sent["delta"]["w"]) == pytest.approx(0.5 / np.sqrt(WIDTH), abs=0.015)
    task = Task(1, ("delta",), numbers=numbers | {"privacy.replay": 0.0})
    short = {"delta": {"w": np.zeros(1, np.float32)}}
    numbers = [device_sent.private(task, short, {"within": 0.0, "square": 1.0})[1] for _ in range(20_000)]
    assert np.std([one["within"] for one in numbers]) == pytest.approx(0.7, rel=0.02)
    assert np.std([one["square"] for one in numbers]) == pytest.approx(0.2, rel=0.02)
    assert np.mean([one["square"] for one in numbers]) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38, -1e20])
def test_a_device_clips_whatever_it_has(bad):
    clipped = device_sent.clipped({"w": np.array([bad, 1.0], np.float32)}, 0.5)
    assert np.linalg.norm(clipped["w"]) <= 0.5 * (1 + 1e-6)
    short = device_sent.clipped({"w": np.array([0.1, 0.2], np.float32)}, 0.5)
    assert np.array_equal(short["w"], np.array([0.1, 0.2], np.float32))
    assert not device_sent.clipped({"w": np.zeros(2, np.float32)}, 0.5)["w"].any()


@pytest.mark.parametrize("place", ["central", "distributed"])
def test_a_device_that_does_not_clip_is_bounded_by_the_server(place):
    def huge(partition, message, reply):
        if "delta" in reply.content:
            reply.content["delta"] = protocol.packed({"w": np.full(4, 1e6, np.float32)})
        return reply

    algorithm = algorithms.fedavg(**OWN | {"privacy": place, "privacy.noise": 1e-3})
    model, _ = played(algorithm, grid_of(tamper=huge), width=4, replay=True)
    assert 0.45 < np.linalg.norm(model) <= 0.5 * 1.02  # four updates of length 0.5, divided by 4
    honest, _ = played(algorithm, grid_of(pushing), width=4, replay=True)
    assert 0.45 < np.linalg.norm(honest) <= 0.5 * 1.02


def test_a_budget_for_no_round_is_refused_as_in_the_simulator():
    with pytest.raises(InputError, match=r"epsilon = 0\.1: should be more: the first round spends"):
        played(algorithms.fedavg(**OWN | {"privacy.epsilon": 0.1}), width=4)


@pytest.mark.parametrize("place", ["central", "distributed"])
def test_a_length_that_a_device_makes_up_is_bounded_by_the_server(place):
    def boasting(partition, message, reply):
        for record in reply.content.metric_records.values():
            if "square" in record:
                record["square"] = 1e6
        return reply

    algorithm = algorithms.fedavg(**OWN | {"privacy": place, "privacy.noise": 1e-3}, server="fedexp")
    model, _ = played(algorithm, grid_of(tamper=boasting), width=4, rounds=2, replay=True)
    assert np.linalg.norm(model) < 1  # the step of fedexp is in proportion to the mean of what devices say


def test_both_carriers_agree_if_the_noise_follows_from_the_seed():
    federation = synthetic(devices=N, sizes=[20, 30, 12, 25, 16, 40])
    model = models.logistic(federation.shape, federation.classes)
    algorithm = algorithms.folb(
        privacy={"name": "central", "noise": 0.5, "clip_quantile": 0.5},
        select={"name": "poisson", "K": 3},
        gradient={"name": "sketch", "m": 16},
        local={"lr": 0.05},
    )
    work = system.uniform(high=2)
    [run] = simulate(federation, model, algorithm, rounds=3, system=work, evaluate_every=3)
    start = model.init(jax.random.key(0))
    made = strategy(algorithm, replay=True, system=work)
    ended = made.start(InProcessGrid(apps(federation)), arrays(start), num_rounds=3).arrays
    for name, value in ended.items():
        np.testing.assert_allclose(value.numpy(), np.asarray(run.params[name]), atol=2e-5)


def test_what_was_asked_counts_though_the_run_is_interrupted(tmp_path):
    algorithm = algorithms.fedavg(**OWN | {"select.K": 2, "privacy.epsilon": 7.8})
    spent = [Rounds("fixed", 2, N, 2.0).epsilon(t, 1e-5) for t in range(1, 7)]
    assert spent[3] < 7.8 < spent[4]  # four rounds

    class Falls(InProcessGrid):
        def push_messages(self, messages):
            messages = list(messages)
            sent = super().push_messages(messages)
            if any(message.metadata.group_id == "3" for message in messages) and not hasattr(self, "up"):
                raise ConnectionError("the server falls in round 3")
            return sent

    x, y = np.zeros((3, 1), np.float32), np.zeros(3, np.int32)
    grid = Falls([client_app(lambda context: Device(x, y, still)) for _ in range(N)])
    with pytest.raises(ConnectionError):
        played(algorithm, grid, rounds=9, width=3, directory=tmp_path / "run")
    grid.up = True
    played(algorithm, grid, rounds=9, width=3, directory=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    # round 3 was asked for twice: it counts twice, and a fourth does not fit
    assert [line["epsilon"] for line in lines] == pytest.approx([spent[0], spent[1], spent[3]], rel=1e-5)
    assert all("length" not in line and "gamma" not in line for line in lines)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["runs"][0]["epsilon"] == pytest.approx(spent[3], rel=1e-5)
    for damaged in ("{}", "[4]", "{"):  # at least one more than is recorded: still no round is left
        (tmp_path / "run" / "privacy.json").write_text(damaged)
        _, made = played(algorithm, grid, rounds=9, width=3, directory=tmp_path / "run")
        assert made.opened is None
    # the rounds so far were drawn from N devices: what they spent is not that of a draw from others
    with pytest.raises(InputError, match="holds another run"):
        played(algorithm, grid, rounds=9, width=3, directory=tmp_path / "run", min_available_nodes=N - 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fraction_train": 0.5}, "fraction_train = 0.5"),
        ({"fraction_train": 1.0}, "fraction_train = 1.0"),
        ({"fraction_evaluate": 0.5}, "fraction_evaluate = 0.5"),
        ({"min_replies": 2}, "min_replies = 2"),
        ({"over_selection": 1.5}, "over_selection = 1.5"),
        ({"min_available_nodes": 3}, "min_available_nodes = 3"),
        ({"replay": 1}, "replay = 1"),
    ],
)
def test_what_would_go_out_without_noise_is_refused(settings, says):
    with pytest.raises(InputError, match=says):
        strategy(algorithms.fedavg(**OWN), **settings)


def test_a_share_of_the_devices_is_not_for_draws_that_each_device_joins_by_itself():
    with pytest.raises(InputError, match="should be None with select=poisson"):
        strategy(algorithms.fedavg(select="poisson"), fraction_train=0.5)


def test_an_algorithm_whose_noise_is_the_system_s_is_not_replayed():
    made = algorithms.fedavg(**OWN | {"privacy.replay": False})
    assert not strategy(made).replay
    with pytest.raises(InputError, match=r"replay = True: should be False: the algorithm has privacy\.replay=False"):
        strategy(made, replay=True)


def test_sums_alone_are_refused():
    with pytest.raises(InputError, match="privacy = 'central'"):
        TwoPhaseStrategy(algorithms.folb(**OWN), min_available_nodes=N)
