"""What liars report, and what `folb attack` says they gained."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_store
from rich.console import Console

from folb import algorithms, simulate
from folb.cli import tables
from folb.cli.main import main
from folb.core import liars
from folb.core.algorithm import hints
from folb.core.liars import ATTACKS, Lies
from folb.core.rules import Gradients, Round
from folb.data.synthetic import synthetic
from folb.errors import InputError
from folb.experiments.settings import common_settings
from folb.models import logistic
from folb.results.outcomes import Outcome
from folb.store import directory, run_arrays

K, P, N = 6, 5, 10
DEVICE = np.array([0, 1, 4, 5, 7, 9])
HONEST = [2, 4, 5]  # slots of honest devices that replied


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
        sent={"loss": jnp.ones(K)},
        key=jnp.array([1, 2], jnp.uint32),
        N=N,
    )


@jax.jit
def seen(numbers, round):
    return liars.with_false_gradients(numbers, liars.with_lies(numbers, round))


def lied(name, round=None, share=0.2):
    return seen(ATTACKS.parts[name](share=share).record, make_round() if round is None else round)


def test_without_liars_the_round_is_the_round():
    round = make_round()
    for name in ATTACKS.parts:
        jax.tree.map(np.testing.assert_array_equal, lied(name, round, 0.0), round)


def test_liars_alone_report_other_things():
    round = make_round()
    other = seen(Lies(0.2, own=-1.0, gradient=1e6, gamma=1000.0, loss=5.0), round)
    np.testing.assert_array_equal(other.delta["w"][:2], -round.delta["w"][:2])
    np.testing.assert_allclose(other.grad["w"][:2], 1e6 * round.grad["w"][:2], rtol=1e-6)
    np.testing.assert_allclose(other.second.grad["w"][:2], 1e6 * round.second.grad["w"][:2], rtol=1e-6)
    np.testing.assert_array_equal(other.gamma, [1000.5, 1000.5, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(other.sent["loss"], [5, 5, 1, 1, 1, 1])
    for a, b in ((other.delta, round.delta), (other.grad, round.grad), (other.second.grad, round.second.grad)):
        np.testing.assert_array_equal(a["w"][2:], b["w"][2:])


def test_what_liars_know_is_the_honest_who_replied():
    round = make_round()
    honest = np.asarray(round.delta["w"], float)[HONEST]
    mean, spread = honest.mean(axis=0), honest.std(axis=0)
    middle = np.sort(np.linalg.norm(honest, axis=1))[1]
    expected = {
        "alie": mean - 1.5 * spread,
        "ipm": -0.5 * mean,
        "reversed": -mean / np.linalg.norm(mean) * middle,
        "adaptive": -3 * mean / np.linalg.norm(mean) * middle,
    }
    for name, update in expected.items():
        np.testing.assert_allclose(lied(name, round).delta["w"][:2], np.stack([update] * 2), rtol=1e-4, atol=1e-6)


def test_min_max_and_min_sum_go_as_far_as_the_honest_are_apart():
    round = make_round()
    honest = np.asarray(round.delta["w"], float)[HONEST]
    apart = np.sum((honest[:, None] - honest) ** 2, axis=2)
    for name, far, most in (("min_max", np.max, apart.max()), ("min_sum", np.sum, apart.sum(axis=1).max())):
        update = np.asarray(lied(name, round).delta["w"][0], float)
        assert far(np.sum((honest - update) ** 2, axis=1)) == pytest.approx(most, rel=1e-3)


def test_noise_has_its_length():
    round = make_round()
    away = np.asarray(lied("noise", round).delta["w"] - round.delta["w"])[:2]
    assert np.all(np.abs(away) > 0) and np.linalg.norm(away, axis=1).max() < 30


def test_a_grazing_update_passes_for_descent():
    other = lied("grazing")
    for k in (0, 1):
        delta, grad = np.asarray(other.delta["w"][k], float), np.asarray(other.grad["w"][k], float)
        assert delta @ -grad / np.linalg.norm(grad) / np.linalg.norm(delta) > 0.005


def test_the_adaptive_gradient_vouches_for_its_update():
    """1e6 (q - 0.02 u): it descends, and hardly meets the honest mean gradient."""
    round = make_round()
    other = lied("adaptive", round)
    mean = np.asarray(round.grad["w"], float)[HONEST].mean(axis=0)
    delta, grad = np.asarray(other.delta["w"][0], float), np.asarray(other.grad["w"][0], float)
    assert np.linalg.norm(grad) == pytest.approx(1e6, rel=1e-2)
    assert delta @ -grad / np.linalg.norm(grad) / np.linalg.norm(delta) == pytest.approx(0.02, rel=1e-2)
    assert abs(grad @ mean) / np.linalg.norm(grad) / np.linalg.norm(mean) < 0.021


def test_an_attack_on_updates_alone_needs_no_gradients():
    round = make_round(gradients=False)
    other = lied("grazing", round)
    assert other.grad is None and other.gamma is None
    assert not np.array_equal(other.delta["w"][0], round.delta["w"][0])


def test_many_attacks_are_one_program():
    made = [algorithms.folb(attack={"name": name, "share": share}) for name in ATTACKS.parts for share in (0.1, 0.4)]
    assert len({jax.tree.structure(one) for one in made}) == 1


def test_every_attack_is_listed_and_can_be_set():
    kinds = str(common_settings()["attack"].type)
    assert all(f"'{name}'" in kinds for name in ATTACKS.parts)
    assert "attack" in hints()


@pytest.fixture(scope="module")
def small():
    federation = synthetic(devices=5, sizes=30)
    return federation, logistic(federation.shape, federation.classes)


def test_poisoned_samples_and_what_is_recorded(small):
    """Reversed labels and a backdoor change what liars learn; the backdoor's rate is of the model."""
    names = ["honest", "labels", "backdoor"]
    made = [
        algorithms.fedavg(select={"K": 4}, local={"lr": 0.1}, attack={"name": name, "share": 0.6}) for name in names
    ]
    honest, labels, backdoor = simulate(*small, made, rounds=10, record=("attack", "weights"))
    assert honest.test_accuracy[-1] > labels.test_accuracy[-1]
    assert backdoor.records["attack"][-1, 2] > honest.records["attack"][-1, 2] + 0.3
    for run in (honest, labels, backdoor):
        liars, weights = run.devices < 3, np.abs(run.records["weights"])
        expected = np.sum(weights * liars, axis=1) / np.sum(weights, axis=1)
        np.testing.assert_allclose(run.records["attack"][:, 0], expected, rtol=1e-5)


def test_honest_liars_change_nothing(small):
    """Up to rounding: it is another program."""
    plain, other = (
        simulate(*small, algorithms.folb(select={"K": 4}, **more), rounds=3, record=("weights",))[0]
        for more in ({}, {"attack": "honest", "attack.share": 0.4})
    )
    np.testing.assert_allclose(other.records["weights"], plain.records["weights"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_guarded_folb_learns_beside_liars_that_know_the_guard():
    """Three of thirty took it to 2 % before a gradient no longer vouched for its own device."""
    federation = synthetic(1, 1, devices=30, sizes=40)
    model = logistic(federation.shape, federation.classes)
    made = [
        algorithms.folb(guard="on", attack={"name": name, "share": 0.1})
        for name in ("honest", "adaptive", "flipped_x1000")
    ]
    honest, adaptive, blind = (run.settled for run in simulate(federation, model, made, rounds=40))
    assert adaptive > honest - 0.3 > 0.3 and blind > honest - 0.1


def test_a_liar_is_drawn_again_for_its_loss(small):
    made = algorithms.fedavg(
        select={"name": "remembered_loss", "K": 2, "candidates": 5}, attack={"name": "loss", "share": 0.2}
    )
    run = simulate(*small, made, rounds=10)[0]
    assert np.mean(np.any((run.devices == 0) & (run.times > 0), axis=1)[5:]) == 1


@pytest.mark.slow
def test_scaffolds_memory_is_safe_behind_a_robust_rule(small):
    """A thousandfold update makes c_k, and so the local steps of all, a thousand times too long."""
    given = {"attack": "flipped_x1000", "attack.share": 0.2, "select.K": 4, "select.replacement": False}
    bare, safe = (
        simulate(*small, algorithms.scaffold(robust=robust, **given), rounds=6)[0] for robust in (None, "median")
    )
    assert not bare.train_loss[-1] < 100 and safe.train_loss[-1] < 10


def test_a_killed_run_under_attack_ends_with_the_same_bits(small, tmp_path, monkeypatch):
    made = algorithms.scaffold(
        select={"K": 4},
        robust={"name": "geometric_median", "bucket": 2, "liars": 0.0},
        attack={"name": "noise", "share": 0.4},
    )
    whole = simulate(*small, made, rounds=12)[0]
    monkeypatch.setattr(run_arrays, "SECONDS", -1.0)

    def kill(i, first, part):
        if first + len(part.seconds) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(*small, made, rounds=12, checkpoints=tmp_path, observe=kill)
    assert any(tmp_path.iterdir())
    resumed = simulate(*small, made, rounds=12, checkpoints=tmp_path)[0]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attack": "flip"}, "attack = 'flip': did you mean"),
        ({"attack.share": 0.1}, "attack.share = 0.1: is for any attack; attack is not set"),
        ({"attack": "alie", "attack.share": 1.5}, "attack.share = 1.5: should be from 0 to 1"),
        ({"attack": "alie", "attack.share": float("nan")}, "attack.share = nan: should be from 0 to 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError) as error:
        algorithms.fedavg(**settings)
    assert message in str(error.value)


# The command

TINY = ["--set", "sizes=20,30,40,20,30", "--rounds", "3", "--seeds", "2", "--algorithms", "fedavg"]
TINY += ["--rules", "none,median", "--attacks", "honest,flipped_x1000,backdoor", "--attackers", "0.2,0.4"]


def test_rule_by_attack_by_share_in_a_run_directory(capsys, tmp_path, monkeypatch):
    """It is not computed twice, and fits in 80 columns."""
    out = ["--out", str(tmp_path / "o")]
    assert main(["attack", *TINY, *out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = [(one["rule"], one["attack"], one["attackers"]) for one in document["outcomes"]]
    assert len(rows) == len(set(rows)) == 2 * 3 * 2
    by_rule = {row: np.mean(one["accuracy"]) for row, one in zip(rows, document["outcomes"], strict=True)}
    assert by_rule["fedavg robust=median", "flipped_x1000", 0.2] > by_rule["fedavg robust=None", "flipped_x1000", 0.2]
    assert (tmp_path / "o" / "curves.png").stat().st_size > 10_000
    lines = (tmp_path / "o" / "rounds.jsonl").read_bytes()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["attack", *TINY, *out]) == 0
    shown = capsys.readouterr()
    assert "is finished already" in shown.err and (tmp_path / "o" / "rounds.jsonl").read_bytes() == lines
    assert "the rate of the backdoor in %" in shown.out and "40 % of the devices lie" in shown.out
    tables_alone = [line for line in shown.out.splitlines() if line.startswith("fedavg ")]
    assert len(tables_alone) == 12 and max(map(len, tables_alone)) <= 80


def test_the_table():
    def one(rule, attack, accuracy):
        return Outcome(rule, attack, 0.1, accuracy, 0.456, 0.2, 0.05)

    made = [one("a", "honest", [0.5, 0.7]), one("a", "ipm", [np.nan]), one("b", "honest", [1.0]), one("b", "ipm", [0])]
    (title, table), (_, weights) = tables.outcomes(made)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table, weights)
    lines = [line.split() for line in shown.get().splitlines()]
    assert title.startswith("10 % of the devices lie")
    assert lines[:3] == [["rule", "honest", "ipm"], ["a", "60.0", "-"], ["b", "100.0", "0.0"]]
    assert lines[4] == ["a", "45.6", "45.6"]


@pytest.mark.slow
def test_an_attack_that_is_killed_ends_with_the_same_bits(tmp_path):
    """kill -9 of `folb attack`, with a memory and a robust rule; then `folb resume`."""
    long = ["attack", "--set", "sizes=20,30,40,20,30", "--set", "select.K=4", "--rounds", "1200", "--seeds", "1"]
    long += ["--algorithms", "scaffold", "--rules", "norm_bound", "--attacks", "noise,backdoor", "--attackers", "0.4"]
    long += ["--evaluate-every", "50"]
    whole, path = tmp_path / "whole", tmp_path / "run"
    code, err = test_store.end(test_store.folb(*long, "--out", whole))  # not here: `short_loops` has other last bits
    assert code == 0, err
    process = test_store.folb(*long, "--out", path)
    test_store.wait_for_rounds(process, path, 20 * 500)
    process.kill()
    assert test_store.end(process)[0] == -signal.SIGKILL, "the run ended before it could be killed"
    assert 0 < len(directory.read(path).rounds()[0]) < 2 * 1200
    code, err = test_store.end(test_store.folb("resume", path))
    assert code == 0, err
    assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attackers", "2"], "attack.share = 2.0: should be from 0 to 1"),
        (["--attackers", "x"], "attack.share = 'x': should be a finite number"),
        (["--attacks", "flip"], "attack = 'flip': did you mean"),
        (["--rules", "meann"], "robust = 'meann': did you mean"),
        (["--set", "guard.caps=2"], "set = 'guard.caps': did you mean 'guard.cap'?"),
        (["--rounds", "0"], "rounds = 0: should be at least 1"),
    ],
)
def test_bad_input_is_a_line(options, message, capsys):
    assert main(["attack", "--set", "sizes=20,30", *options]) == 2
    assert message in capsys.readouterr().err


def test_guarded_on_the_command_line(capsys, tmp_path):
    tiny = ["--set", "sizes=20,30,40", "--rounds", "2", "--seeds", "1", "--algorithms", "folb"]
    tiny += ["--out", str(tmp_path / "o")]
    assert main(["compare", "synthetic_1_1", *tiny, "--set", "guard=on", "--set", "guard.cap=1.5,3", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["parameters"]["guard"], run["parameters"]["guard.cap"]) for run in runs] == [("on", 1.5), ("on", 3.0)]
