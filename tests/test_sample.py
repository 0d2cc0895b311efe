"""A costly model is evaluated on a fixed sample, whose error is stated; and a quick try is quick."""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folb
from folb import Experiment, InputError, models
from folb.cli.main import main
from folb.core import algorithms
from folb.data.federation import Federation, Split
from folb.data.synthetic import synthetic
from folb.experiments import quick as quick_try
from folb.experiments.execute import resume
from folb.experiments.experiment import from_toml
from folb.experiments.plan import plan
from folb.models.model import operations
from folb.simulation import settled as evaluation
from folb.simulation import simulate as simulator
from folb.simulation.settled import settled
from folb.simulation.simulate import simulation

FEDERATION = synthetic(devices=6)
LOGISTIC = models.logistic(FEDERATION.shape, FEDERATION.classes)
FIELDS = {
    "dataset": "synthetic_1_1",
    "algorithms": ["fedavg"],
    "rounds": 3,
    "seeds": 1,
    "set": {"sizes": [40, 60], "select.K": 2},
}
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def costly(monkeypatch):
    """Every model counts as costly, and a sample has 5 samples."""
    monkeypatch.setattr(evaluation, "COSTLY", 0)
    monkeypatch.setattr(evaluation, "LONG", 0)
    monkeypatch.setattr(evaluation, "SAMPLE", 5)


def cost(model, shape, kind=jnp.float32):
    return operations(model, jax.ShapeDtypeStruct(shape, kind))


def test_the_operations_of_a_model_are_counted_in_its_program():
    assert cost(models.logistic((60,), 10), (60,)) == 2 * 60 * 10
    assert cost(models.mlp((8,), 3, first=5, second=4), (8,)) == 2 * (8 * 5 + 5 * 4 + 4 * 3)
    lstm = models.char_lstm((7,), 9, embedding=2, units=3)  # every time step counts
    layers = 7 * 2 * ((2 + 3) * 12 + (3 + 3) * 12)
    assert cost(lstm, (7,), jnp.int32) == layers + 2 * (7 * 9 * 2 + 3 * 9)
    image, kernel = (1, 8, 8, 2), (3, 3, 2, 5)

    def scores(params, x):
        convolved = jax.lax.conv_general_dilated(x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: y @ jnp.ones((5, 5)), convolved).mean((1, 2))

    own = models.classifier(lambda key: jnp.zeros(kernel), scores)
    assert cost(own, image[1:]) == 2 * 64 * 5 * (9 * 2) + 2 * 64 * 5 * 5


def large(shape, samples=60_000):
    """A federation of many samples that take no memory."""
    x, y = np.broadcast_to(np.float32(0), (samples, *shape)), np.broadcast_to(np.int32(0), samples)
    side = Split(x, y, np.zeros(1, np.int32), np.full(1, samples, np.int32))
    return Federation("large", side, side, 10)


def test_the_sample_is_for_models_that_take_long_and_not_for_light_ones():
    images = large((28, 28))
    assert evaluation.usual(images, models.logistic((28, 28), 10)) is None
    assert evaluation.usual(images, models.mlp((28, 28), 10)) is None
    assert evaluation.usual(images, models.cnn((28, 28), 10)) == evaluation.SAMPLE == 1000
    assert evaluation.usual(large((28, 28), 1001), models.cnn((28, 28), 10)) is None  # it takes no time
    words = replace(large((80,)), train=large((80,)).train, classes=80)
    lstm = models.char_lstm((80,), 80)
    whole = replace(words, train=replace(words.train, x=words.train.x.astype(np.int32)))
    assert evaluation.usual(whole, lstm) == 1000
    assert evaluation.how_many("all", whole, lstm) is None and evaluation.how_many(7, whole, lstm) == 7
    assert evaluation.how_many(60_000, whole, lstm) is None


def test_a_sample_is_fixed_and_comes_from_all_devices_by_their_samples():
    side = FEDERATION.train
    few = side.sample(60)
    assert len(few.y) == few.size.sum() == 60 and np.array_equal(few.x, side.sample(60).x)
    assert np.all(few.size > 0) and np.all(np.abs(few.size - 60 * side.size / len(side.y)) < 12)
    for k in range(FEDERATION.N):
        mine = side.x[side.start[k] : side.start[k] + side.size[k]]
        assert all((row == mine).all(axis=1).any() for row in few.x[few.start[k] : few.start[k] + few.size[k]])
    assert len(np.unique(few.x, axis=0)) == 60 and side.sample(len(side.y)) is side
    nowhere = FEDERATION.tested_on(side.x, side.y).test.sample(5)
    assert len(nowhere.y) == 5 and not nowhere.size.any()


@pytest.mark.parametrize(("stream", "unit"), [(False, "epoch"), (True, "step")])
def test_loss_and_accuracy_are_those_of_the_sample(stream, unit):
    algorithm = algorithms.folb(select={"K": 3}, local={"unit": unit})
    given = {"rounds": 3, "evaluate_every": 3, "stream": stream}
    (run,) = folb.simulate(FEDERATION, LOGISTIC, algorithm, evaluate=30, **given)
    train, test = FEDERATION.train.sample(30), FEDERATION.test.sample(30)
    assert run.train_loss[-1] == pytest.approx(float(LOGISTIC.loss(run.params, train.x, train.y).mean()), rel=1e-5)
    hits = np.asarray(LOGISTIC.predict(run.params, test.x)) == test.y
    assert run.test_accuracy[-1] == pytest.approx(hits.mean())
    (whole,) = folb.simulate(FEDERATION, LOGISTIC, algorithm, evaluate="all", **given)
    assert whole.train_loss[-1] != run.train_loss[-1]  # and the rounds are the same
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run.params, whole.params)


def test_the_error_is_that_of_a_share_near_one_half():
    said = evaluation.evaluated_on(replace(FEDERATION, test=FEDERATION.train), 100)
    n = len(FEDERATION.train.y)
    error = 196 * math.sqrt((n - 100) / (n - 1) / 400)
    assert f"accuracy on 100 of {n:,} test samples: within ±{error:.1f} points (95 %)" in said
    assert f"training loss on 100 of {n:,} training samples" in said and evaluation.evaluated_on(FEDERATION, None) == ""
    draws = np.random.default_rng(1)
    truth = np.arange(n) < n // 2
    errors = [100 * abs(draws.choice(truth, 100, replace=False).mean() - truth.mean()) for _ in range(2000)]
    assert 0.9 < np.mean(np.array(errors) <= error) < 0.99


@pytest.mark.parametrize("bad", [0, -3, "some", 1.5, True, "0", [5], float("inf")])
def test_bad_values_are_named(bad, capsys):
    with pytest.raises(InputError, match=r"^evaluate = "):
        Experiment("synthetic_1_1", evaluate=bad)
    if not isinstance(bad, str):
        with pytest.raises(InputError, match=r"^evaluate = .* should be all, a number of samples"):
            folb.simulate(FEDERATION, LOGISTIC, algorithms.fedavg(select={"K": 2}), rounds=1, evaluate=bad)
    assert main(["compare", "synthetic_1_1", f"--evaluate={bad}"]) == 2
    assert capsys.readouterr().err.startswith("folb: error: evaluate = ")
    with pytest.raises(InputError, match=r"^device_samples = "):
        Experiment("synthetic_1_1", device_samples=bad)


def test_experiments_with_light_models_and_with_everything_keep_their_names(costly, monkeypatch):
    sampled, everything = plan(Experiment(**FIELDS)), plan(Experiment(**FIELDS, evaluate="all"))
    assert sampled.experiment.evaluate == 5 and everything.experiment.evaluate == "all"
    monkeypatch.setattr(evaluation, "COSTLY", math.inf)
    light = plan(Experiment(**FIELDS))
    assert light.experiment.evaluate == "all" and light.note == ""
    assert light.identity == everything.identity != sampled.identity
    for evaluate in ("all", 10_000, "ALL", None):
        again = plan(Experiment(**FIELDS, evaluate=evaluate))
        assert (again.identity, again.experiment) == (light.identity, light.experiment)


def test_the_sample_is_recorded_repeated_and_resumed(costly, tmp_path):
    stored = folb.execute(FIELDS)
    said = evaluation.evaluated_on(plan(Experiment(**FIELDS)).federation, 5)
    assert "within ±" in said
    results = json.loads((stored.path / "results.json").read_text())
    assert results["note"] == stored.environment["note"] == said and results["evaluate"] == 5
    file = stored.path / "experiment.toml"
    assert from_toml(file).evaluate == 5 and said in file.read_text()
    assert folb.execute(file).path == stored.path and resume(stored.path).path == stored.path
    whole = folb.execute(FIELDS | {"evaluate": "all"})
    file = whole.path / "experiment.toml"
    assert 'evaluate = "all"' in file.read_text() and folb.execute(file).path == whole.path
    assert resume(whole.path).path == whole.path


def test_the_table_says_it(costly, capsys):
    few = ["--rounds", "2", "--seeds", "1", "--algorithms", "fedavg", "--set", "sizes=40,60", "--set", "select.K=2"]
    assert main(["compare", "synthetic_1_1", *few]) == 0
    said = capsys.readouterr().out
    assert "accuracy on 5 of 10 test samples: within ±32.7 points (95 %); training loss on 5 of 90" in said
    assert "--evaluate all" in said
    assert main(["compare", "synthetic_1_1", *few, "--evaluate", "all"]) == 0
    assert "training loss on" not in capsys.readouterr().out


def test_runs_of_a_heavy_model_take_turns_and_the_cheap_ones_are_first():
    chosen = [algorithms.folb(select={"K": 2}), algorithms.fedprox(select={"K": 2}), algorithms.fedavg(select={"K": 2})]
    ready = simulation(
        settled(FEDERATION, LOGISTIC._replace(heavy=True), chosen, rounds=2, seeds=2), side_by_side=False
    )
    assert [[job.place for job in batch] for batch in ready.batches] == [[2], [4], [0], [3], [5], [1]]
    folb_, _, fedprox, *_ = ready.costs
    mean = FEDERATION.train.size.mean()
    assert folb_ - fedprox == pytest.approx(2 * mean)  # a gradient of each sample of two devices
    looked_at = (len(FEDERATION.train.y) + len(FEDERATION.test.y)) / 3
    assert 2 * 10 < fedprox - looked_at < 2 * 10 * 20  # 1 to 20 steps of 10 samples
    assert simulation(settled(FEDERATION, LOGISTIC, chosen, rounds=2)).costs == [1.0, 1.0, 1.0]


HEAVY = """
from folb import models

def heavy(shape, classes):
    return models.logistic(shape, classes)._replace(heavy=True)
"""


def test_before_a_long_first_round_a_line_says_how_good_the_first_model_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(HEAVY)
    command = [
        "compare",
        "synthetic_1_1",
        "--algorithms",
        "folb",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--set",
        "select.K=2",
    ]
    command += ["--set", "sizes=40,60", "--model", f"{tmp_path / 'own.py'}:heavy", "--evaluate", "5"]
    monkeypatch.setattr(simulator, "LONG", 1e5)
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    look = re.search(
        r"folb: before round 1: test accuracy (\S+) %, training loss 2\.3; a round of folb takes about", said
    )
    assert look and 0 <= float(look[1]) <= 100  # zeros: log 10 for each of ten classes
    assert main([*command, "--out", str(tmp_path / "run")]) == 0 and "round 1" not in capsys.readouterr().err
    ready = simulation(
        settled(FEDERATION, LOGISTIC._replace(heavy=True), algorithms.folb(select={"K": 2}), rounds=1),
        side_by_side=False,
    )
    for soon in (0.0, math.inf):  # the look would take as long, or the round is short
        monkeypatch.setattr(simulator, "LONG", soon)
        assert ready.first_look() is None


def test_a_federation_can_be_made_smaller():
    small = FEDERATION.smaller(20)
    assert np.array_equal(small.train.size, np.minimum(FEDERATION.train.size, 20)) and small.test is FEDERATION.test
    assert small.note == "at most 20 training samples of each device" and FEDERATION.smaller(10**6) is FEDERATION
    side = FEDERATION.train
    for k in range(FEDERATION.N):
        mine = side.x[side.start[k] : side.start[k] + side.size[k]]
        rows = small.train.x[small.train.start[k] : small.train.start[k] + small.train.size[k]]
        assert len(np.unique(rows, axis=0)) == len(rows) and all((row == mine).all(axis=1).any() for row in rows)
    planned = plan(Experiment(**FIELDS, device_samples=20))
    assert planned.federation.train.size.max() == 20 and "at most 20" in planned.note
    assert plan(planned.experiment).identity == planned.identity != plan(Experiment(**FIELDS)).identity


def test_a_quick_try_has_one_seed_and_few_rounds(tmp_path, monkeypatch):
    light = quick_try.quick(Experiment("synthetic_1_1"), ())
    assert light.seeds == (0,) and light.rounds == quick_try.MOST and light.device_samples is None
    asked = quick_try.quick(Experiment("synthetic_1_1", rounds=7, seeds=2), ("rounds", "seeds"))
    assert asked.rounds == 7 and len(asked.seeds) == 2
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(900, 8, 8)).astype(np.float32), draws.integers(0, 3, 900)
    np.savez(tmp_path / "mine.npz", x=x, y=y, device=np.arange(900) % 3)
    monkeypatch.setattr(evaluation, "COSTLY", 0)
    monkeypatch.setattr(evaluation, "LONG", 0)
    monkeypatch.setattr(evaluation, "SAMPLE", 500)
    mine = Experiment(str(tmp_path / "mine.npz"), model="cnn", set={"select.K": 2})
    smaller = quick_try.quick(mine, ())
    assert (smaller.device_samples, smaller.evaluate) == (quick_try.SAMPLES, quick_try.EVALUATED)
    assert smaller.rounds == quick_try.MOST
    monkeypatch.setattr(quick_try, "BUDGET", 1.0)
    assert quick_try.quick(mine, ()).rounds == quick_try.LEAST
    assert quick_try.quick(mine, ("device_samples",)).device_samples is None
    everything = quick_try.quick(replace(mine, evaluate="all"), ("evaluate",))
    assert (everything.evaluate, everything.device_samples) == ("all", quick_try.SAMPLES)


def test_quick_on_the_command_line(capsys):
    assert (
        main(["compare", "synthetic_1_1", "--quick", "--rounds", "2", "--set", "sizes=40,60", "--set", "select.K=2"])
        == 0
    )
    said = capsys.readouterr().out
    assert "2 rounds; 1 seed" in said and "averaging" not in said
    assert all(name in said for name in ("folb", "fedprox", "fedavg"))
