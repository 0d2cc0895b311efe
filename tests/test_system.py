"""The system models: how much a device works, when its reply arrives, and which replies are lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_numbers import uniform
from scipy.stats import norm

from folb import algorithms, models, simulate, system
from folb.core import randomness
from folb.core.round import managed
from folb.data.synthetic import synthetic
from folb.errors import InputError
from folb.models import logistic
from folb.simulation import play as rounds
from folb.simulation import problem as problems
from folb.simulation import simulate as simulator

LOG100 = np.log(100)


NUMBER = 20000
HOME, DRAWS = (uniform(5, t, np.arange(NUMBER), 2) for t in (randomness.HOME, 1))


@jax.jit
def efforts(model, home, draws, cost):
    more = [{"down": 0.0, "up": 0.0, "more": home[0]}[name] for name in system.asked_for(model)]
    return jax.vmap(lambda home, draws: model(home, draws, cost, *more))(home, draws)


def many(model, cost=1, same_device=False):
    """The efforts of 20,000 devices in one round, or of one device in as many rounds."""
    home = np.broadcast_to(HOME[0], HOME.shape) if same_device else HOME
    return jax.tree.map(np.asarray, efforts(model, home, DRAWS, np.int32(cost)))


def within(observed, chance, number=NUMBER):
    """Four standard deviations of a frequency."""
    return abs(observed - chance) < 4 * np.sqrt(chance * (1 - chance) / number)


# Fixed and uniform work


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (system.fixed, {"work": 2.5}, "work = 2.5: should be a whole number from 1"),
        (system.fixed, {"work": 0}, "work = 0: should be a whole number from 1"),
        (system.fixed, {"work": "20"}, "work = '20': should be a whole number from 1"),
        (system.deadline, {"tau": None}, "tau = None: should be more than 0"),
        (system.uniform, {"dropout": [0.1]}, "should be between 0 and 1"),
        (system.uniform, {"low": 1.5, "high": 2.5}, "low = 1.5"),
        (system.uniform, {"low": 5, "high": 4}, "high = 4: should be a whole number from 5"),
    ],
)
def test_work_is_a_whole_number(make, settings, said):
    with pytest.raises(InputError, match=said):
        make(**settings)


def test_fixed_work_is_fixed():
    effort = many(system.fixed(work=7), cost=3)
    assert np.all(effort.work == 7)
    assert np.all(effort.seconds == 21)
    assert not effort.lost.any()


def test_uniform_work_is_uniform():
    effort = many(system.uniform(low=3, high=6))
    values, counts = np.unique(effort.work, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert all(within(count / NUMBER, 1 / 4) for count in counts)
    assert np.all(effort.seconds == effort.work)
    assert not effort.lost.any()


def test_uniform_defaults_to_the_papers_1_to_20():
    work = many(system.uniform()).work
    assert (work.min(), work.max()) == (1, 20)


MODELS = {
    "fixed": system.fixed,
    "uniform": system.uniform,
    "deadline": system.deadline,
    "network": system.network,
}


def test_every_system_model_is_tested():
    assert system.SYSTEMS == MODELS


@pytest.mark.parametrize("name", ["fixed", "uniform"])
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_its_rate(name, dropout):
    lost = many(MODELS[name](dropout=dropout)).lost
    assert within(np.mean(lost), dropout)


def test_dropout_ends():
    for make in MODELS.values():
        assert many(make(dropout=1.0)).lost.all()
    assert not many(system.uniform(dropout=0.0)).lost.any()


def test_dropout_leaves_the_work_as_it_was():
    """The draws of work do not move with the rate of drop-out."""
    np.testing.assert_array_equal(many(system.uniform()).work, many(system.uniform(dropout=0.5)).work)


# The deadline of Section V. At 1,000 steps a second the floor of the work hardly matters.


def test_T_c_is_the_99th_percentile_of_the_delay():
    """work = (tau - T_c) x speed with T_c = 2 log 100, and a hundredth of 2-second exponentials is longer."""
    tau = 30.0
    effort = many(system.deadline(tau=tau, speed=1000, speed_spread=0, delay=2.0, delay_spread=0), same_device=True)
    T_c = 2 * LOG100
    usable = ~effort.lost
    assert np.all(effort.work[usable] == np.floor((tau - T_c) * 1000))
    delays = effort.seconds[usable] - effort.work[usable] / 1000
    assert delays.max() <= T_c + 1e-2
    assert within(np.mean(effort.lost), 0.01)
    # what arrives is an exponential of mean 2, cut at its 99th percentile
    assert np.mean(delays) == pytest.approx(2 - T_c * 0.01 / 0.99, rel=0.03)


def test_about_one_reply_in_a_hundred_is_late_on_any_device():
    effort = many(system.deadline(tau=100.0, speed=1000, speed_spread=1.0, delay=1.0, delay_spread=1.0))
    T_c = LOG100 * np.exp(norm.ppf(HOME[:, 1]))  # log-normal over the devices, as the spread says
    in_time = T_c < 99
    assert 0.9 < np.mean(in_time) < 1  # some devices' delay alone exceeds the round
    assert np.all(effort.lost[T_c > 100])
    assert within(np.mean(effort.lost[in_time]), 0.01, in_time.sum())


def test_slow_devices_are_lost():
    """If T_c leaves no time, or less time than one unit of work takes."""
    slow_delay = many(system.deadline(tau=10.0, delay=3.0, delay_spread=0))  # T_c = 13.8
    assert slow_delay.lost.all()
    # T_c = 4.6 leaves 5.4 seconds; a unit of 6 steps at 1 a second does not fit, one of 5 does
    system_model = system.deadline(tau=10.0, speed=1.0, speed_spread=0, delay=1.0, delay_spread=0)
    assert many(system_model, cost=6).lost.all()
    assert np.mean(many(system_model, cost=5).lost) < 0.05
    for effort in (slow_delay, many(system_model, cost=6)):
        assert not effort.work.any()
        assert np.all(effort.seconds == 10)  # the server waits to the end


def test_a_unit_that_costs_more_is_done_less_often():
    model = system.deadline(tau=30.0, speed=2.0, speed_spread=0, delay=1.0, delay_spread=0)
    for cost in (1, 2, 7):
        effort = many(model, cost=cost)
        assert np.all(effort.work[~effort.lost] == np.floor((30 - LOG100) * 2 / cost))


def test_deadline_dropout_adds_to_lateness():
    lost = many(system.deadline(tau=50.0, speed=1000, speed_spread=0, delay_spread=0, dropout=0.3)).lost
    assert within(np.mean(lost), 1 - 0.7 * 0.99)


def test_speed_belongs_to_the_device():
    """One device does the same work in every round; different devices do not."""
    model = system.deadline(tau=30.0)
    one, all = many(model, same_device=True), many(model)
    assert len(set(one.work[~one.lost])) == 1
    assert len(set(all.work[~all.lost])) > 10


def test_no_reply_arrives_after_the_round():
    effort = many(system.deadline(tau=12.0))
    assert np.all(effort.seconds <= 12)
    assert np.all(effort.seconds > 0)
    assert np.all(effort.seconds[effort.lost] == 12)


# In the simulator

FEDERATION = synthetic(devices=6, sizes=[20, 31, 45, 150, 12, 60])
MODEL = logistic(FEDERATION.shape, FEDERATION.classes)


def met(problem, algorithm, device):
    """The devices' random words and effort."""
    return managed(problem.system, algorithm.solver, problem.train.size[device], device, 3, 4)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_algorithm_meets_the_same_draws(make):
    problem = problems.problem(FEDERATION, MODEL, system=make(dropout=0.3))
    made = [constructor() for constructor in algorithms.ALGORITHMS.values()]
    drawn = jax.jit(lambda: [met(problem, algorithm, np.arange(6)) for algorithm in made])()
    for effort in drawn[1:]:
        jax.tree.map(np.testing.assert_array_equal, effort, drawn[0])


def test_a_device_s_draw_does_not_depend_on_the_others_chosen():
    problem = problems.problem(FEDERATION, MODEL, system=system.deadline(dropout=0.3))

    def effort(*device):
        return jax.tree.map(np.asarray, jax.jit(met)(problem, algorithms.folb(), np.array(device)))

    few, everyone = effort(1, 4), effort(*range(6))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[[1, 4]], rtol=1e-6), few, everyone)


@pytest.fixture(scope="module")
def play():
    """One compilation of a round of FOLB under Adam, whatever the rate of drop-out."""
    compiled = jax.jit(rounds.play)
    algorithm = algorithms.folb(select={"K": 4}, server="adam", local={"lr": 0.1})

    def play(state, t, dropout):
        problem = problems.problem(FEDERATION, MODEL, system=system.uniform(high=5, dropout=dropout))
        return compiled(problem, algorithm, state, 0, t)

    start = rounds.start(problems.problem(FEDERATION, MODEL), algorithm, 0)
    state, info = play(start, 1, 0.0)
    assert info.updated
    return play, start, state


def test_a_round_without_a_reply_changes_nothing(play):
    """Neither the model nor the memory of the server's step changes, and the next round is not affected."""
    play, start, state = play
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True))
    after, info = play(state, 2, 1.0)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert not info.updated
    assert info.replied == 0
    assert not np.any(info.times)
    assert info.seconds > 0
    again, info = play(after, 3, 0.0)
    assert info.updated
    jax.tree.map(np.testing.assert_array_equal, again, play(state, 3, 0.0)[0])


@pytest.fixture(scope="module")
def played():
    """A few rounds under four systems; fixed and none are one program."""

    def run(chosen):
        algorithm = algorithms.fedavg(select={"K": 4, "replacement": False}, local={"unit": "epoch"})
        return simulator.simulate(FEDERATION, MODEL, algorithm, rounds=5, system=chosen, record=["work"])[0]

    return {
        "fixed": run(system.fixed(work=2)),
        "uniform": run(system.uniform(low=1, high=4)),
        "none": run(system.fixed(work=2, dropout=1.0)),
        "deadline": run(system.deadline(tau=40.0, dropout=0.2)),
    }


def test_a_run_records_rounds_without_a_reply(played):
    run = played["none"]
    assert not run.updated.any()
    assert not run.times.any()
    assert not run.records["work"].any()
    assert len(set(run.test_accuracy)) == len(set(run.train_loss)) == 1
    assert not run.bytes_up.any()
    assert np.all(run.bytes_down == 4 * 610 * 4)  # the model went out all the same
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(run.params))  # zeros, as it started


@pytest.mark.parametrize("name", ["fixed", "uniform"])
def test_a_round_lasts_as_long_as_its_slowest_device(played, name):
    """A mini-batch step takes a second; an epoch of n samples is ceil(n / 10) of them."""
    run = played[name]
    assert run.updated.all()
    epoch = -(-FEDERATION.train.size // 10)
    np.testing.assert_array_equal(run.seconds, np.max(run.records["work"] * epoch[run.devices], axis=1))
    if name == "fixed":
        assert np.all(run.records["work"] == 2)


def test_a_round_lasts_no_longer_than_its_deadline(played):
    run = played["deadline"]
    lost = run.times == 0  # without replacement, every slot is a device of its own
    assert lost.any()
    assert np.all(run.seconds <= 40)
    assert np.all(run.seconds[lost.any(axis=1)] == 40)
    assert not run.records["work"][lost].any()
    assert np.all(run.records["work"][~lost] > 0)


def test_no_deadline_is_too_long():
    """More work than a million units would overflow 32 bits, and never end."""
    assert many(system.deadline(tau=1e9)).work.max() == system.MOST


@pytest.mark.parametrize(
    "model",
    [system.uniform(dropout=0.0), system.fixed(work=7), system.deadline(tau=1e6), system.network()],
    ids=["uniform", "fixed", "deadline", "network"],
)
def test_epochs_are_what_every_device_does_whatever_the_system_says(model):
    federation = synthetic(devices=6, draw=1)
    asked = algorithms.fedavg(select={"K": 4}, local={"epochs": 3})
    whole = algorithms.fedavg(select={"K": 4}, local={"unit": "epoch"})
    network = models.logistic(federation.shape, federation.classes)
    (run,) = simulate(federation, network, asked, rounds=3, system=model, record=("work",))
    (same,) = simulate(federation, network, whole, rounds=3, system=system.fixed(work=3))
    assert set(np.unique(run.records["work"][run.times > 0])) == {3}
    np.testing.assert_array_equal(run.params["weight"], same.params["weight"])


def test_epochs_need_a_system_model_that_takes_them():
    federation = synthetic(devices=6, draw=1)
    network = models.logistic(federation.shape, federation.classes)

    def mine(home, draws, cost):
        return system.Effort(jnp.int32(2), jnp.float32(1), draws[0] < 0)

    with pytest.raises(InputError, match=r"local.epochs = 'set': should be none with this system model"):
        simulate(
            federation, network, algorithms.fedavg(local={"epochs": 2}), rounds=1, system=jax.tree_util.Partial(mine)
        )
    with pytest.raises(InputError, match=r"local.epochs = 2: should be none with local.unit=gradient"):
        algorithms.fedavg(local={"epochs": 2, "unit": "gradient"})
