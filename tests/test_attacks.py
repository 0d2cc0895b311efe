"""What attackers report, and what `folb attack` says they gained."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from folb import algorithms, simulate
from folb.cli import tables
from folb.cli.main import main
from folb.core.rules import Gradients, Round
from folb.data.synthetic import synthetic
from folb.experiments import attack
from folb.experiments.attack import ATTACKS, Attack, Outcome
from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan
from folb.models import logistic

K, P = 6, 5
DEVICE = np.array([0, 1, 4, 5, 7, 9])


def make_round(seed=0, gradients=True):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    delta, grad, second = normal(K, P), normal(K, P), normal(K, P)
    return Round(
        params={"w": normal(P)},
        times=jnp.array([1.0, 1, 2, 0, 1, 1]),
        size=jnp.ones(K),
        correction=jnp.ones(K),
        delta={"w": delta},
        grad={"w": grad} if gradients else None,
        gamma=jnp.full(K, 0.5) if gradients else None,
        second=Gradients({"w": second}, jnp.ones(K), jnp.ones(K), jnp.asarray(DEVICE)) if gradients else None,
        device=jnp.asarray(DEVICE),
    )


seen = jax.jit(attack.seen)


def test_without_attackers_the_round_is_the_round():
    round = make_round()
    for numbers in ATTACKS.values():
        jax.tree.map(np.testing.assert_array_equal, seen(Attack(0, **numbers), round), round)


def test_attackers_alone_report_other_things():
    round = make_round()
    other = seen(Attack(2, update=-1.0, gradient=1e6, gamma=1000.0), round)
    np.testing.assert_array_equal(other.delta["w"][:2], -round.delta["w"][:2])
    np.testing.assert_allclose(other.grad["w"][:2], 1e6 * round.grad["w"][:2], rtol=1e-6)
    np.testing.assert_allclose(other.second.grad["w"][:2], 1e6 * round.second.grad["w"][:2], rtol=1e-6)
    np.testing.assert_array_equal(other.gamma, [1000.5, 1000.5, 0.5, 0.5, 0.5, 0.5])
    for a, b in ((other.delta, round.delta), (other.grad, round.grad), (other.second.grad, round.second.grad)):
        np.testing.assert_array_equal(a["w"][2:], b["w"][2:])


def test_the_reversed_mean_is_that_of_the_honest_who_replied():
    round = make_round()
    other = seen(Attack(2, **ATTACKS["mean reversed"]), round)
    for name in ("delta", "grad"):
        own, told = getattr(round, name)["w"], getattr(other, name)["w"]
        mean = np.asarray(own)[[2, 4, 5]].mean(axis=0)
        for k in (0, 1):
            expected = -mean / np.linalg.norm(mean) * np.linalg.norm(own[k])
            np.testing.assert_allclose(told[k], expected, rtol=1e-5)


def test_a_grazing_update_passes_for_descent():
    round = make_round()
    other = seen(Attack(2, **ATTACKS["mean reversed, grazing"]), round)
    for k in (0, 1):
        delta, grad = np.asarray(other.delta["w"][k], float), np.asarray(other.grad["w"][k], float)
        along = delta @ -grad / np.linalg.norm(grad) / np.linalg.norm(delta)
        assert along > 0.005


def test_an_attack_on_updates_alone_needs_no_gradients():
    round = make_round(gradients=False)
    other = seen(Attack(1, **ATTACKS["mean reversed, grazing"] | {"gamma": np.nan}), round)
    assert other.grad is None and other.gamma is None
    assert not np.array_equal(other.delta["w"][0], round.delta["w"][0])


def test_many_attacks_are_one_program():
    algorithm = algorithms.folb()
    made = [attack.attacked(algorithm, Attack(3, **numbers)) for numbers in ATTACKS.values()]
    assert len({jax.tree.structure(one) for one in made}) == 1


# The command


@pytest.fixture(scope="module")
def document():
    """A small table; the slow test has the attacks on (18), which need two more programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack, "GAMMA", {})
        printed = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(words[0]))
        sizes = ",".join(["40"] * 10)
        assert main(["attack", "--set", f"sizes={sizes}", "--rounds", "12", "--seeds", "2", "--json"]) == 0
    return json.loads(printed[-1])


def test_every_attack_on_plain_guarded_and_fedavg(document):
    outcomes = document["outcomes"]
    assert (document["K"], document["cap"], document["rounds"], document["seeds"]) == (10, 2.0, 12, [0, 1])
    names = [*ATTACKS, *(f"{name}, by 3" for name in attack.COLLUDING)]
    assert [one["attack"] for one in outcomes] == [name for name in names for _ in range(3)]
    assert [(one["algorithm"], one["guarded"]) for one in outcomes[:3]] == [
        ("folb", False),
        ("folb", True),
        ("fedavg", False),
    ]
    assert {one["attackers"] for one in outcomes} == {1, 3}


def test_guarded_holds_its_bound_and_plain_does_not(document):
    for one in document["outcomes"]:
        if one["guarded"]:
            assert one["worst"] <= 0.2 + 1e-6
            assert one["negated"] == 0
            assert None not in one["accuracy"]
    plain = {one["attack"]: one for one in document["outcomes"] if one["algorithm"] == "folb" and not one["guarded"]}
    assert plain["flipped, gradient x1e6"]["share"] > 0.99
    assert plain["flipped, gradient x-1e12"]["negated"] > 0.1
    assert plain["update NaN"]["accuracy"] == [None, None]
    means = {one["attack"]: np.mean(one["accuracy"]) for one in document["outcomes"] if one["guarded"]}
    assert means["flipped, gradient x1e6"] > np.mean(plain["flipped, gradient x1e6"]["accuracy"]) + 0.1


def test_the_table():
    def one(name, algorithm, guarded, accuracy):
        return Outcome(name, 3, algorithm, guarded, 0.456, 0.2, 0.05, accuracy)

    outcomes = [
        one("a", "folb", False, [np.nan, 0.5]),
        one("a", "folb", True, [0.5, 0.7]),
        one("a", "fedavg", False, [0]),
    ]
    console = Console(width=160)
    with console.capture() as shown:
        console.print(tables.outcomes(outcomes))
    lines = shown.get().splitlines()
    assert lines[1].split() == ["attack", *["share", "worst", "negated", "accuracy"] * 3]
    assert "not finite" in lines[2] and "60.0 ± 14.1 %" in lines[2] and "0.46" in lines[2] and "5 %" in lines[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attackers", "0"], "attackers = 0: should be a whole number from 1 to 2"),
        (["--attackers", "3"], "attackers = 3: should be a whole number from 1 to 2"),
        (["--set", "cap=0.5"], "cap = 0.5: should be at least 1"),
        (["--set", "cap=2,3"], "cap = [2.0, 3.0]: should be one value"),
        (["--set", "guarded=true"], "guarded = True: should not be set: both are measured"),
        (["--set", "caps=2"], "set = 'caps': did you mean 'cap'?"),
        (["--rounds", "0"], "rounds = 0: should be at least 1"),
    ],
)
def test_bad_input_is_a_line(options, message, capsys):
    assert main(["attack", "--set", "sizes=20,30", *options]) == 2
    assert message in capsys.readouterr().err


def test_guarded_on_the_command_line(capsys, tmp_path):
    tiny = [
        "--set",
        "sizes=20,30,40",
        "--rounds",
        "2",
        "--seeds",
        "1",
        "--algorithms",
        "folb",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["compare", "synthetic_1_1", *tiny, "--set", "guarded=true", "--set", "cap=1.5,3", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["parameters"]["guarded"], run["parameters"]["cap"]) for run in runs] == [(True, 1.5), (True, 3.0)]


@pytest.mark.slow
def test_attacks_on_gamma():
    """(18) with psi = 1: a lie about gamma takes all weight, or the model; guarded, neither."""
    experiment = Experiment("synthetic_1_1", algorithms=attack.ALGORITHMS, rounds=30, seeds=2, set=attack.SETTINGS)
    planned = plan(experiment)
    contests = [one for one in attack.contests(planned) if one.name in attack.GAMMA]
    outcomes = {
        (one.attack, one.guarded): one for one in attack.measure(planned, contests) if one.algorithm != "fedavg"
    }
    assert outcomes["(18) flipped, gamma + 1000", False].share > 0.95
    assert np.isnan(outcomes["(18) gamma NaN", False].accuracy).all()
    for name in attack.GAMMA:
        assert outcomes[name, True].worst <= 0.2 + 1e-6
        assert np.isfinite(outcomes[name, True].accuracy).all()


def test_an_algorithm_under_no_attack_is_itself():
    """Up to rounding: it is another program."""
    federation = synthetic(devices=5, sizes=30)
    model = logistic(federation.shape, federation.classes)
    algorithm = algorithms.folb(K=4)
    plain, other = (
        simulate(federation, model, one, rounds=3, record=("weights",))[0]
        for one in (algorithm, attack.attacked(algorithm, Attack()))
    )
    np.testing.assert_allclose(other.records["weights"], plain.records["weights"], rtol=1e-4, atol=1e-6)
