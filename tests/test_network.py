"""Bytes that cost seconds, over-selection, and the clock, against a literal loop over devices in float64."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_numbers import words
from scipy.stats import norm

from folb import InputError, algorithms, simulate, system
from folb.core import clock, randomness
from folb.core.randomness import Multiset
from folb.core.round import first_replies, sizes
from folb.core.system import Effort
from folb.data.synthetic import synthetic
from folb.models import logistic

N, ROUNDS, SEED, MODEL_BYTES = 12, 6, 3, 4 * 610
FEDERATION = synthetic(devices=N, sizes=[20, 31, 45, 150, 12, 60] * 2)
MODEL = logistic(FEDERATION.shape, FEDERATION.classes)
SETTINGS = {
    "low": 2,
    "high": 9,
    "speed": 4.0,
    "speed_spread": 0.7,
    "up_mbit": 0.02,
    "up_spread": 0.8,
    "down_mbit": 0.1,
    "down_spread": 0.9,
    "latency": 0.3,
    "latency_spread": 0.6,
    "dropout": 0.2,
}
run = partial(simulate, FEDERATION, MODEL, seeds=[SEED])


@functools.cache
def everyone_s_draws():
    """For all devices, what they keep [N, 4], and their draws in each round [ROUNDS, N, 2], in float64."""

    @jax.jit
    def drawn():
        who, rounds = jnp.arange(N), jnp.arange(1, ROUNDS + 1)
        kept = randomness.uniform(randomness.words(SEED, randomness.HOME, who, 4))
        return kept, jax.vmap(lambda t: randomness.uniform(randomness.words(SEED, t, who, 4)[:, 2:]))(rounds)

    return tuple(np.asarray(numbers, float) for numbers in drawn())


def device_draws(t, k):
    """(home, draws, more) of a device."""
    kept, draws = everyone_s_draws()
    return kept[k, :2], draws[t - 1, k], kept[k, 2:]


def literal(t, k, down, up, works=True, tau=None, **settings):
    """(seconds, lost, work) of device k in round t, from the formula."""
    s = SETTINGS | settings
    home, draws, more = device_draws(t, k)
    speed = s["speed"] * np.exp(s["speed_spread"] * norm.ppf(home[0]))
    latency = s["latency"] * np.exp(s["latency_spread"] * norm.ppf(home[1]))
    up_rate = s["up_mbit"] * np.exp(s["up_spread"] * norm.ppf(more[0]))
    down_rate = s["down_mbit"] * np.exp(s["down_spread"] * norm.ppf(more[1]))
    messages = latency + down * 8 / (down_rate * 1e6) + up * 8 / (up_rate * 1e6)
    work = min(s["low"] + int(draws[0] * (s["high"] - s["low"] + 1)), s["high"])
    lost = draws[1] < s["dropout"]
    if tau is not None:
        fits = int((tau - messages) * speed) if works else work
        lost = lost or messages > tau or fits < 1
        work = min(work, fits)
    arrival = messages + (work / speed if works else 0)
    return (tau if lost and tau is not None else arrival), lost, 0 if lost else work


def asked(devices):
    """The distinct devices of a row, and how often each was drawn."""
    return {int(k): int(np.sum(devices == k)) for k in devices}


def first_of(efforts, drawn, wanted):
    """The devices whose replies count: the first, until `wanted` have come; and when the last of them came."""
    count, used = 0, []
    for k in sorted((k for k in efforts if not efforts[k][1]), key=lambda k: efforts[k][0]):
        if count < wanted:
            count += drawn[k]
            used.append(k)
    end = max(efforts[k][0] for k in used) if count >= wanted else max(seconds for seconds, *_ in efforts.values())
    return used, end


CASES = {
    "fedavg": (algorithms.fedavg(select={"K": 4}), MODEL_BYTES, MODEL_BYTES),
    "folb": (algorithms.folb(select={"K": 4}), MODEL_BYTES, 2 * MODEL_BYTES),
    "sketch": (
        algorithms.folb(select={"K": 4}, gradient={"name": "sketch", "m": 64, "bits": 8}),
        MODEL_BYTES,
        MODEL_BYTES + 64 + 4,
    ),
    "scaffold": (algorithms.scaffold(select={"K": 4}), 2 * MODEL_BYTES, MODEL_BYTES),
    "over": (algorithms.folb(select={"K": 4, "over_selection": 1.5}), MODEL_BYTES, 2 * MODEL_BYTES),
    "over, a set": (
        algorithms.fedavg(select={"K": 3, "over_selection": 2, "replacement": False}),
        MODEL_BYTES,
        MODEL_BYTES,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_round_is_the_literal_loop_s(name):
    algorithm, down, up = CASES[name]
    wanted = algorithm.selection.enough
    played = run(algorithm, rounds=ROUNDS, system=system.network(**SETTINGS), record=["work"])[0]
    for t in range(1, ROUNDS + 1):
        row, slots = played.devices[t - 1], played.times[t - 1]
        drawn = asked(row)
        efforts = {k: literal(t, k, down, up) for k in drawn}
        used, end = first_of(efforts, drawn, wanted)
        if algorithm.selection.wanted is None:
            used, end = [k for k in efforts if not efforts[k][1]], max(seconds for seconds, *_ in efforts.values())
        assert played.seconds[t - 1] == pytest.approx(end, rel=1e-5)
        assert {int(k): int(m) for k, m in zip(row, slots, strict=True) if m} == {k: drawn[k] for k in sorted(used)}
        assert sorted(row[played.lost[t - 1]]) == sorted(set(drawn) - set(used))
        working = zip(row, slots, played.records["work"][t - 1], strict=True)
        assert all(work == (efforts[int(k)][2] if m else 0) for k, m, work in working)
        assert played.bytes_up[t - 1] == len(used) * up  # late replies are not used, and not counted
        assert played.bytes_down[t - 1] == len(drawn) * down


def test_there_are_lost_and_late_replies_in_the_loops():
    played = run(CASES["over"][0], rounds=ROUNDS, system=system.network(**SETTINGS))[0]
    dropped = [device_draws(t, k)[1][1] < 0.2 for t in range(1, ROUNDS + 1) for k in asked(played.devices[t - 1])]
    assert 0 < sum(dropped) < played.lost.sum()


def test_with_a_deadline_a_device_does_what_it_can_send_in_time():
    tau = 3.0
    played = run(CASES["folb"][0], rounds=ROUNDS, system=system.network(tau=tau, **SETTINGS), record=["work"])[0]
    full = 0
    for t in range(1, ROUNDS + 1):
        efforts = {k: literal(t, k, MODEL_BYTES, 2 * MODEL_BYTES, tau=tau) for k in asked(played.devices[t - 1])}
        for k, m, work in zip(played.devices[t - 1], played.times[t - 1], played.records["work"][t - 1], strict=True):
            assert work == (efforts[int(k)][2] if m else 0)
            full += work == literal(t, int(k), MODEL_BYTES, 2 * MODEL_BYTES)[2]
        assert played.seconds[t - 1] == pytest.approx(max(seconds for seconds, *_ in efforts.values()), rel=1e-5)
    assert np.all(played.seconds <= tau)
    assert played.lost.any()
    assert 0 < full < np.sum(played.times > 0)  # some had time for all of their work, and some had not


@pytest.mark.parametrize("gradient, up", [("exact", MODEL_BYTES), ("proxy", MODEL_BYTES)])
def test_the_second_set_sends_its_gradients_at_the_same_time(gradient, up):
    """S_2 works only if the proxy needs it. A device of both sets is asked once, and sends once."""
    algorithm = algorithms.folb_two_set(select={"K": 4}, gradient=gradient)
    played = run(algorithm, rounds=ROUNDS, system=system.network(**SETTINGS))[0]
    size = sizes(algorithm, {"w": jax.ShapeDtypeStruct((610,), jnp.float32)})
    assert size.gradient == up
    for t in range(1, ROUNDS + 1):
        drawn = np.asarray(jax.jit(randomness.below)(N, words(SEED, t, randomness.SERVER, 8)))
        both = [set(drawn[i : i + 4].tolist()) for i in (0, 4)]
        assert both[0] == set(asked(played.devices[t - 1]))
        first = {k: literal(t, k, MODEL_BYTES, size.reply) for k in both[0]}
        second = {k: literal(t, k, MODEL_BYTES, up, works=gradient == "proxy") for k in both[1] - both[0]}
        seconds = [seconds for seconds, *_ in (*first.values(), *second.values())]
        assert played.seconds[t - 1] == pytest.approx(max(seconds), rel=1e-5)
        counted = sum(not lost for _, lost, _ in first.values()), sum(not lost for _, lost, _ in second.values())
        assert played.bytes_up[t - 1] == counted[0] * size.reply + counted[1] * up


def test_a_survey_is_an_exchange_before_the_round():
    """It brings the model, so that the work needs no further bytes down, but its own latency."""
    algorithm = algorithms.fednu_norm(select={"K": 4})
    played = run(algorithm, rounds=3, system=system.network(**SETTINGS))[0]
    for t in (1, 2, 3):
        before = max(literal(t, k, MODEL_BYTES, 4, works=False)[0] for k in range(N))
        after = max(literal(t, k, 0, MODEL_BYTES)[0] for k in asked(played.devices[t - 1]))
        assert played.seconds[t - 1] == pytest.approx(before + after, rel=1e-5)
        assert played.bytes_down[t - 1] == N * MODEL_BYTES


def test_a_survey_of_candidates_waits_for_them_alone():
    algorithm = algorithms.fedavg(select={"name": "power_of_choice", "K": 2, "candidates": 5, "replacement": False})
    played = run(algorithm, rounds=3, system=system.network(**SETTINGS))[0]
    everyone = [max(literal(t, k, MODEL_BYTES, 4, works=False)[0] for k in range(N)) for t in (1, 2, 3)]
    after = [max(literal(t, k, 0, MODEL_BYTES)[0] for k in asked(played.devices[t - 1])) for t in (1, 2, 3)]
    before = played.seconds - after
    assert np.all(before > 0.1)
    assert np.all(before <= np.array(everyone) * (1 + 1e-5))
    assert np.any(before < np.array(everyone) * 0.99)


def test_clusters_are_asked_before_the_first_round_alone():
    algorithm = algorithms.fedavg(select={"name": "clusters", "K": 3, "replacement": False})
    played = run(algorithm, rounds=2, system=system.network(**SETTINGS))[0]
    before = max(literal(1, k, MODEL_BYTES, 64 * 4, works=False)[0] for k in range(N))
    after = [
        max(literal(t, k, down, MODEL_BYTES)[0] for k in asked(played.devices[t - 1]))
        for t, down in ((1, 0), (2, MODEL_BYTES))
    ]
    np.testing.assert_allclose(played.seconds, [before + after[0], after[1]], rtol=1e-5)


# Over-selection


def test_replies_of_one_moment_are_taken_at_random():
    """With fixed work all come at once; which of them are late must not depend on the device's number."""
    algorithm = algorithms.fedavg(select={"K": 5, "over_selection": 2, "replacement": False})
    played = run(algorithm, rounds=200, system=system.fixed(work=1))[0]
    assert np.all(played.times.sum(axis=1) == 5)
    assert np.all(played.lost.sum(axis=1) == 5)
    used = np.bincount(played.devices[played.times > 0], minlength=N)
    assert np.all(np.abs(used - 1000 / N) < 5 * np.sqrt(1000 / N))


def test_a_round_with_too_few_replies_waits_for_all():
    drawn = Multiset(np.arange(4), np.float32([1.0, 2.0, 1.0, 0.0]))
    effort = Effort(np.full(4, 3), np.float32([5.0, 1.0, 9.0, 0.5]), np.array([False, False, True, False]))
    replies = jax.jit(first_replies)
    used, end = replies(drawn, effort, 4, jnp.arange(4))
    assert np.isinf(end)
    jax.tree.map(np.testing.assert_array_equal, used, effort)
    used, end = replies(drawn, effort, 2, jnp.arange(4))
    assert end == 1  # device 1 counts twice
    assert used.lost.tolist() == [True, False, True, True]
    assert used.seconds.max() == 1


def test_over_selection_works_with_a_three_argument_system_and_two_sets():
    algorithm = algorithms.folb_two_set(select={"K": 3, "over_selection": 2})
    played = run(algorithm, rounds=ROUNDS, system=system.uniform(dropout=0.2))[0]
    assert played.lost.sum() > ROUNDS  # more than drop out
    whole = run(algorithms.folb_two_set(select={"K": 6}), rounds=ROUNDS, system=system.uniform(dropout=0.2))[0]
    np.testing.assert_array_equal(played.devices, whole.devices)
    assert np.all(played.seconds <= whole.seconds)
    assert np.all(played.bytes_up <= whole.bytes_up)
    np.testing.assert_array_equal(played.bytes_down, whole.bytes_down)


@pytest.mark.parametrize("factor", [0.9, 11, float("nan"), "1.3", 10**4])
def test_over_selection_is_checked(factor):
    with pytest.raises(InputError, match=r"over_selection = .*should be from 1 to 10"):
        algorithms.fedavg(select={"over_selection": factor})


def test_over_selection_of_more_than_all_devices():
    assert algorithms.fedavg(select={"K": 10, "over_selection": 1.3}).selection.K == 13
    assert (
        algorithms.fedavg(select={"K": 10, "over_selection": 1}).selection
        == algorithms.fedavg(select={"K": 10}).selection
    )
    with pytest.raises(
        InputError, match=r"select\.K times select\.over_selection = 13: should be at most the 12 devices"
    ):
        run(algorithms.fedavg(select={"K": 10, "over_selection": 1.3, "replacement": False}), rounds=1)
    with pytest.raises(InputError, match="should be at most 10000 devices"):
        algorithms.fedavg(select={"K": 9000, "over_selection": 1.3})


# What a system model may ask for


def test_a_system_of_three_arguments_is_asked_for_no_more():
    def plain(home, draws, cost):
        return Effort(jnp.int32(1), cost * 1.0, draws[1] < 0)

    def with_numbers(home, draws, cost, device=3, *rest, now=0):
        return plain(home, draws, cost)

    for one in (plain, with_numbers, *(make() for name, make in system.SYSTEMS.items() if name != "network")):
        assert system.asked_for(one) == ()
    assert system.asked_for(jax.tree_util.Partial(with_numbers, draws=1)) == ()
    assert system.asked_for(system.network()) == ("down", "up", "more")
    with pytest.raises(InputError, match="what a system model needs = 'speed': choose one of device, down"):
        system.asked_for(lambda home, draws, cost, speed: None)


def growing(home, draws, cost, now, device):
    """A system model of one's own: rounds get longer as time passes."""
    return Effort(jnp.int32(1), 1.0 + 0.1 * now + device, draws[1] < 0.1)


def test_a_system_of_one_s_own_sees_the_clock_and_the_device():
    played = run(algorithms.fedavg(select={"K": 2}), rounds=5, system=jax.tree_util.Partial(growing))[0]
    now = 0.0
    for t in range(5):
        expected = 1 + 0.1 * now + played.devices[t].max()
        assert played.seconds[t] == pytest.approx(expected, rel=1e-5)
        now += expected


def test_a_run_with_a_clock_resumes_bit_for_bit(tmp_path):
    play = partial(run, algorithms.scaffold(select={"K": 3}), system=jax.tree_util.Partial(growing))
    whole = play(rounds=9)[0]
    first = play(rounds=4, checkpoints=tmp_path)[0]
    observed = []
    rest = play(rounds=9, checkpoints=tmp_path, observe=lambda i, first, part: observed.append(first))[0]
    assert observed[:2] == [1, 5]  # the rounds of before come as one part; then it goes on
    np.testing.assert_array_equal(first.seconds, whole.seconds[:4])
    np.testing.assert_array_equal(rest.seconds, whole.seconds)
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)


def test_the_clock_does_not_lose_short_rounds():
    long = clock.zero().after(jnp.float32(3e7))
    later = jax.lax.fori_loop(0, 1000, lambda _, at: at.after(jnp.float32(0.01)), long)
    assert int(later.whole) == int(long.whole) + 10 or float(later.rest) > 0.99
    assert int(later.whole) + float(later.rest) - int(long.whole) == pytest.approx(10, abs=1e-3)
    assert int(clock.zero().after(jnp.float32(np.inf)).whole) == clock.LONGEST


def test_the_clock_stops_after_68_years():
    late = jax.lax.fori_loop(0, 5, lambda _, at: at.after(jnp.float32(1e9)), clock.zero())
    assert int(late.whole) == clock.LAST and float(late.now) == 2**31


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"up_mbit": -1}, "up_mbit = -1: should be more than 0"),
        ({"down_mbit": 0}, "down_mbit = 0: should be more than 0"),
        ({"speed": float("nan")}, "speed = nan: should be more than 0"),
        ({"latency": -0.1}, "latency = -0.1: should be at least 0"),
        ({"up_spread": -1}, "up_spread = -1: should be at least 0"),
        ({"tau": 0}, "tau = 0: should be more than 0"),
        ({"low": 3, "high": 2}, "high = 2: should be a whole number from 3"),
        ({"dropout": 2}, "dropout = 2: should be between 0 and 1"),
        ({"up_mbit": 1e-300}, "up_mbit = 1e-300: should be more than 0: from 1e-09 to 1e\\+09"),
        ({"latency": 1e30}, "latency = 1e\\+30: should be at least 0, and at most 1e\\+09"),
        ({"speed_spread": 100}, "speed_spread = 100: should be at least 0, and at most 10"),
        ({"tau": 1e30}, "tau = 1e\\+30: should be more than 0, and at most 1e\\+09 seconds"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(InputError, match=said):
        system.network(**settings)


@pytest.mark.slow
def test_nothing_takes_longer_than_the_clock_can_say():
    """The slowest settings that are allowed; nobody's seconds are infinite, or no number."""
    slowest = {"speed": 1e-9, "up_mbit": 1e-9, "down_mbit": 1e-9, "latency": 1e9}
    widest = dict.fromkeys(("speed_spread", "up_spread", "down_spread", "latency_spread"), 10.0)
    for chosen in (algorithms.folb_two_set(select={"K": 6}), algorithms.fedbuff(select={"K": 3})):
        played = run(chosen, rounds=3, system=system.network(**slowest, **widest))[0]
        assert np.all((played.seconds >= 0) & (played.seconds <= (1 if chosen.asynchrony is None else 12) * 1e9))


@pytest.mark.parametrize("seconds", [np.nan, np.inf, 1e30])
def test_a_round_of_no_length_is_refused(seconds):
    """Otherwise the run would be written as lines that cannot be read again."""

    def odd(home, draws, cost):
        return Effort(jnp.int32(1), jnp.float32(seconds), jnp.bool_(False))

    with pytest.raises(InputError, match=r"system: seconds of a round = .*: should be from 0 to 1e\+18"):
        run(algorithms.fedavg(select={"K": 2}), rounds=2, system=jax.tree_util.Partial(odd))


def test_flower_refuses_a_system_that_times_bytes():
    strategies = pytest.importorskip("folb.flower.strategy")
    with pytest.raises(InputError, match="should not need down, up, more: on Flower bytes and seconds are real"):
        strategies.FederatedStrategy(algorithms.fedavg(), system=system.network())


def test_flower_takes_over_selection_from_the_algorithm():
    strategies = pytest.importorskip("folb.flower.strategy")
    algorithm = algorithms.fedavg(select={"K": 10, "over_selection": 1.3})

    def sized(algorithm, N=100, **settings):
        made = strategies.FederatedStrategy(algorithm, **settings)
        how = made.settings.sized(made.algorithm, N).selection
        return how.enough, how.K

    assert sized(algorithm) == (10, 13)
    assert sized(algorithm, over_selection=2.0) == (10, 20)
    assert sized(algorithms.fedavg(select={"K": 10})) == (10, 10)
    # not the factor of the rounded numbers: ceil(1.3 * 7) / 7 is 1.43
    assert sized(algorithms.fedavg(select={"K": 7, "over_selection": 1.3}), 20, fraction_train=0.5) == (10, 13)
    assert sized(algorithms.fedavg(select={"K": 30, "over_selection": 1.3, "replacement": False}), 20) == (20, 20)
    chosen = algorithms.fedavg(select={"name": "power_of_choice", "K": 7, "over_selection": 1.3, "candidates": 14})
    made = strategies.FederatedStrategy(chosen, fraction_train=0.5)
    found = made.settings.sized(made.algorithm, 100).selection
    assert (found.enough, found.K, found.candidates) == (50, 65, 130)


@pytest.mark.parametrize(
    ("K", "settings", "N", "field"),
    [
        (9000, {"over_selection": 2.0}, 4, r"select\.K times select\.over_selection = 18000"),
        (5, {"fraction_train": 0.5}, 20_002, "fraction_train: devices of a round = 10001"),
    ],
)
def test_the_most_devices_of_a_round_are_as_many_on_flower(K, settings, N, field):
    strategies = pytest.importorskip("folb.flower.strategy")
    algorithm = algorithms.fedavg(select={"K": K})
    with pytest.raises(InputError, match=f"{field}: should be at most 10000 devices"):
        strategies.FederatedStrategy(algorithm, **settings).settings.sized(algorithm, N)


def test_over_selection_is_refused_where_any_number_may_join():
    strategies = pytest.importorskip("folb.flower.strategy")
    for made in (
        lambda: algorithms.fedavg(select={"name": "poisson", "over_selection": 1.5}),
        lambda: strategies.FederatedStrategy(algorithms.fedavg(select="poisson"), over_selection=1.5),
    ):
        with pytest.raises(InputError, match=r"select\.over_selection = 1\.5: should be None with select=poisson"):
            made()
