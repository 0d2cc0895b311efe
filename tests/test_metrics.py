"""Metrics: the same as scikit-learn's and as their formulas, through files, kills and exports; and a regression."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import folb
from folb import Federation, InputError, algorithms, data, measures, models, simulate
from folb import metric_functions as metrics
from folb.cli.main import main
from folb.experiments.plan import plan
from folb.measures import measure
from folb.report import export
from folb.report.export import to_csv, to_latex, to_parquet
from folb.report.payload import view
from folb.results import summary
from folb.results.run import Run
from folb.simulation.settled import evaluated_on
from folb.store import directory
from folb.store.reading import COLUMNS

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = [40, 60, 50, 30]
FIELDS = {
    "dataset": "synthetic_1_1",
    "algorithms": ["fedavg"],
    "rounds": 8,
    "seeds": [3, 5],
    "target": 0.4,
    "records": True,
    "metrics": ["fairness", "f1", "auc", "top3"],
    "set": {"sizes": SIZES, "select.K": 2, "local.lr": 0.1},
}
NAMES = ["own_mean", "own_worst", "own_variance", "f1", "auc", "top3"]


@pytest.fixture(scope="module")
def federation():
    return data.load("synthetic_1_1", sizes=SIZES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with metrics."""
    return folb.execute(FIELDS, directory=tmp_path_factory.mktemp("metrics") / "run")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run without metrics."""
    fields = FIELDS | {"metrics": [], "records": False}
    return folb.execute(fields, directory=tmp_path_factory.mktemp("plain") / "run")


def lines(stored):
    return [json.loads(line) for line in stored.recorded().splitlines()]


# the formulas


def areas(y, scores):
    """The share of pairs that a score puts in the right order, for each class; equal scores count half."""
    shares = []
    for c in range(scores.shape[1]):
        inside, outside = scores[y == c, c], scores[y != c, c]
        if len(inside) and len(outside):
            pairs = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
            shares.append(pairs.mean())
    return shares


def f1_of(y, predicted):
    scores = []
    for c in set(y.tolist()) | set(predicted.tolist()):
        tp = np.sum((y == c) & (predicted == c))
        fp, fn = np.sum((y != c) & (predicted == c)), np.sum((y == c) & (predicted != c))
        scores.append(2 * tp / (2 * tp + fp + fn))
    return np.mean(scores)


def by_formula(y, scores, start, size, k):
    """Every metric of scores, typed as it is defined; `size` is that of each device."""
    predicted = scores.argmax(axis=1)
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    if scores.shape[1] == 2:
        likely = scores[:, ::-1] * -1 + scores  # as likely, and equal where the scores differ as much
    ahead = [(scores[i] > scores[i, c]).sum() + (scores[i, :c] == scores[i, c]).sum() for i, c in enumerate(y)]
    own = sorted(np.mean((predicted == y)[a : a + n]) for a, n in zip(start, size, strict=True) if n)
    return {
        "own_mean": np.mean(own),
        "own_worst": np.mean(own[: math.ceil(len(own) / 10)]),
        "own_variance": np.var(own),
        "f1": f1_of(y, predicted),
        "auc": areas(y, likely)[1] if scores.shape[1] == 2 else np.mean(areas(y, likely)),
        f"top{k}": np.mean(np.array(ahead) < k),
    }


@jax.jit
def computed(y, scores, start, size):
    predicted = scores.argmax(axis=1)
    own = metrics.by_device(predicted == y, start, size)
    values = metrics.fairness(own, lower=False)._asdict() | {"f1": metrics.f1(y, predicted, scores.shape[1])}
    return values | {"auc": metrics.auc(y, scores), "top3": metrics.top(y, scores, 3)}


CASES = {  # classes, the step of scores, and whether some classes have no samples
    "many classes": (7, 2**-20, False),
    "classes without samples": (7, 2**-20, True),
    "two classes": (2, 2**-20, False),
    "two classes, equal scores": (2, 0.5, False),
}


def generated(case):
    classes, step, absent = CASES[case]
    rng = np.random.default_rng(len(case))
    size = np.array([40, 0, 25, 60, 1, 30, 17, 44, 3, 12, 5, 0, 50])  # two devices have no test samples
    start = np.cumsum(size) - size
    y = rng.integers(0, classes - 2 if absent else classes, size.sum() + 9)  # nine are the server's
    scores = step * np.round((rng.normal(size=(len(y), classes)) + 1.5 * np.eye(classes)[y]) / step)
    return y.astype(np.int32), scores.astype(np.float32), start.astype(np.int32), size.astype(np.int32)


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_their_formulas(case):
    y, scores, start, size = generated(case)
    values = {name: float(value) for name, value in computed(y, scores, start, size).items()}
    assert values == pytest.approx(by_formula(y, scores.astype(float), start, size, 3), abs=2e-6)


def test_metrics_are_those_of_scikit_learn(whole, federation):
    """On the predictions of generated scores, and on those of the models that a run ended with."""
    reference = pytest.importorskip("sklearn.metrics")
    y, scores, start, size = generated("many classes")
    cases = [(y, scores, start, size, {name: float(value) for name, value in computed(y, scores, start, size).items()})]
    test = federation.test
    for run in whole.runs():
        kept = folb.load_model(whole, seed=run.seed)
        final = {name: float(values[-1]) for name, values in run.metrics.items()}
        cases.append((test.y, kept.scores(test.x), test.start, test.size, final))
    for y, scores, start, size, ours in cases:
        predicted, classes = scores.argmax(axis=1), range(scores.shape[1])
        assert ours["f1"] == pytest.approx(reference.f1_score(y, predicted, average="macro"), abs=1e-5)
        there = np.unique(y)  # scikit-learn refuses classes without samples
        likely = jax.nn.softmax(scores.astype(np.float64), axis=1)
        each = [reference.roc_auc_score(y == c, np.asarray(likely)[:, c]) for c in there]
        assert ours["auc"] == pytest.approx(np.mean(each), abs=1e-5)
        assert ours["top3"] == pytest.approx(reference.top_k_accuracy_score(y, scores, k=3, labels=classes), abs=1e-5)
        rows = [slice(a, a + n) for a, n in zip(start, size, strict=True) if n]
        own = sorted(reference.accuracy_score(y[own], predicted[own]) for own in rows)
        expected = np.mean(own), np.mean(own[: math.ceil(len(own) / 10)]), np.var(own)
        assert [ours[name] for name in NAMES[:3]] == pytest.approx(expected, abs=1e-5)
    x = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    assert float(metrics.mse(*x)) == pytest.approx(reference.mean_squared_error(*x), rel=1e-5)
    assert float(metrics.mae(*x)) == pytest.approx(reference.mean_absolute_error(*x), rel=1e-5)


def test_what_is_not_a_number_is_not_right():
    y, scores, start, size = generated("many classes")
    scores[:] = np.nan
    values = computed(y, scores, start, size)
    assert float(values["top3"]) == 0 and math.isnan(values["auc"])
    errors = metrics.fairness(np.array([1.0, np.nan, 4.0, 2.0] + [1.0] * 8, np.float32), lower=True)
    assert float(errors.own_worst) == 3.0  # of eleven known ones, the two highest


# a run


def test_a_run_measures_what_its_models_do(whole, federation):
    test = federation.test
    for run in whole.runs():
        kept = folb.load_model(whole, seed=run.seed)
        expected = by_formula(test.y, kept.scores(test.x).astype(float), test.start, test.size, 3)
        assert list(run.metrics) == NAMES
        assert {name: values[-1] for name, values in run.metrics.items()} == pytest.approx(expected, abs=1e-5)
        own = metrics.by_device(kept.predict(test.x) == test.y, test.start, test.size)
        there = run.times[-1] > 0
        assert run.records["own"][-1][there] == pytest.approx(np.asarray(own)[run.devices[-1][there]])
        assert run.final == pytest.approx(np.mean(kept.predict(test.x) == test.y))


def test_metrics_change_nothing_else(whole, plain):
    """The rounds are the same; what was not asked for is neither measured nor recorded nor part of the identity."""
    for run, own in zip(plain.runs(), whole.runs(), strict=True):
        assert run.metrics == {} and not run.records
        np.testing.assert_array_equal(run.test_accuracy, own.test_accuracy)
        np.testing.assert_allclose(run.train_loss, own.train_loss, rtol=1e-5)
        np.testing.assert_array_equal(run.bytes_up, own.bytes_up)
    assert not any("metrics" in line for line in lines(plain))
    without = plan(folb.Experiment(**FIELDS | {"metrics": []}))
    assert "metrics = []" in folb.experiments.experiment.to_toml(without.experiment)
    assert without.identity != whole.environment["identity"]
    asked = plan(folb.Experiment(**FIELDS | {"metrics": ["accuracy"]}))  # is measured anyway
    assert asked.identity == without.identity


def test_metrics_survive_an_interruption(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("folb.store.run_arrays.SECONDS", 0.0)
    monkeypatch.setattr("folb.store.run_arrays.SHARE", 1e9)

    def stop(i, first, part):
        if first + len(part.seconds) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folb.execute(FIELDS, directory=tmp_path / "run", observe=stop)
    begun = folb.read(tmp_path / "run")
    assert begun.state == "interrupted" and 0 < len(lines(begun)) < 16
    resumed = folb.resume(tmp_path / "run")
    assert sorted(lines(resumed), key=str) == sorted(lines(whole), key=str)


def test_metrics_where_samples_stream(whole, federation, monkeypatch):
    monkeypatch.setattr("folb.simulation.problem.BLOCK", 12 * federation.test.x[0].nbytes)  # several blocks
    model = models.logistic(federation.shape, federation.classes)
    runs = simulate(
        federation,
        model,
        algorithms.fedavg(select={"K": 2}, local={"lr": 0.1}),
        rounds=2,
        seeds=[3],
        metrics=FIELDS["metrics"],
        record=["own"],
        evaluate_every=2,
        stream=True,
    )
    run, own = runs[0], whole.runs()[0]
    assert {name: values[-1] for name, values in run.metrics.items()} == pytest.approx(
        {name: values[1] for name, values in own.metrics.items()}, abs=1e-5
    )
    assert np.isnan(run.records["own"][0]).all()
    there = run.times[1] > 0
    assert run.records["own"][1][there] == pytest.approx(own.records["own"][1][own.times[1] > 0])


def test_metrics_in_files(whole):
    results = json.loads((whole.path / directory.RESULTS).read_bytes())
    stored = whole.runs()
    assert results["metrics"] == FIELDS["metrics"]
    for run, own in zip(results["runs"], stored, strict=True):
        assert list(run["metrics"]) == NAMES
        for name in NAMES:
            np.testing.assert_allclose(run["metrics"][name], own.metrics[name], rtol=1e-6)
    rows = list(csv.DictReader(io.StringIO(to_csv(whole).decode())))
    assert [float(row["own_worst"]) for row in rows[:8]] == pytest.approx(stored[0].metrics["own_worst"].tolist())
    assert len(rows[0]["own"].split()) == len(rows[0]["devices"].split())
    table = pytest.importorskip("pyarrow.parquet").read_table(io.BytesIO(to_parquet(whole)))
    assert table["auc"].to_pylist()[:8] == pytest.approx(stored[0].metrics["auc"].tolist())
    latex = to_latex(whole).decode()
    assert "F1 & AUC & top 3" in latex and r"points²" in latex
    headings, ((*cells,),) = summary.table(stored, 0.4)
    shown = dict(zip(headings, cells, strict=True))
    worst = [100 * run.metrics["own_worst"][-1] for run in stored]
    assert shown["worst decile"] == f"{np.mean(worst):.1f} ± {np.std(worst, ddof=1):.1f} %"
    assert shown["devices' variance"].endswith(" points²")


def test_metrics_as_a_frame(whole):
    pandas = pytest.importorskip("pandas")
    other = replace(whole.runs()[0], metrics={})
    frame = folb.to_frame([*whole.runs(), other])
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns[-6:]) == NAMES
    assert frame["f1"].isna().tolist() == [False] * 16 + [True] * 8


def test_metrics_beside_a_run_without_them(whole, plain):
    """An overlay has every metric that one of the runs has."""
    shown = view([whole, plain])
    assert [[known["name"] for known in one["measures"]] for one in shown["experiments"]] == [
        ["accuracy", *NAMES],
        ["accuracy"],
    ]
    headings, rows = (shown["together"]["table"][key] for key in ("headings", "rows"))
    at = headings.index("worst decile")
    assert [row[at] == "–" for row in rows] == [False, True]
    assert shown["experiments"][0]["own"] and shown["experiments"][1]["own"] is None


def test_the_error_of_a_sample_is_said(federation):
    """Metrics are of the same sample as the accuracy: of few samples of a device its own accuracy is uncertain."""
    words = evaluated_on(federation, 8, fairness=True)
    few = federation.test.sample(8).size
    assert f"{(few > 0).sum()} of 4 devices judged, a typical one on " in words and "so the variance is larger" in words
    assert "devices" not in evaluated_on(federation, 8) and evaluated_on(federation, None, fairness=True) == ""
    numbers = evaluated_on(federation, 8, "mse")
    assert numbers.startswith("mean squared error on 8 of ") and "points" not in numbers


# bad input

REFUSED = {
    "unknown": (["f2"], "metrics = 'f2': choose one of", {}),
    "a text": ("f1", "metrics = 'f1': should be a list of names", {}),
    "twice": (["f1", "f1"], "should be different", {}),
    "no number": ([3], "metrics = 3: choose one of", {}),
    "too many of the classes": (["top10"], r"metrics = 'top10': should be less than the 10 classes", {}),
    "of numbers": (["mse"], r"metrics = 'mse': is for numbers, .*f1, auc or fairness would fit", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metrics_that_are_refused(case):
    asked, said, more = REFUSED[case]
    with pytest.raises(InputError, match=said):
        plan(folb.Experiment(**FIELDS | {"metrics": asked} | more))


def small(classes=2, regression=False, server=False):
    """A federation of four samples on each of two devices, and their test samples."""
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    y = np.linspace(0, 1, 8) if regression else np.arange(8) % classes
    small = Federation.from_arrays("small", x, y, np.repeat([0, 1], 4), np.tile([0, 0, 0, 1], 2), regression=regression)
    return small.tested_on(x[:2], y[:2]) if server else small


def without_scores(shape, classes):
    return models.logistic(shape, classes)._replace(scores=None)


FITTING = {
    "top 5 of two classes": (small(), models.logistic, ["top5"], "'top5': should be less than the 2 classes"),
    "no scores": (small(), without_scores, ["auc"], "'auc': needs the scores of classes.*f1 would fit"),
    "f1 of numbers": (small(regression=True), models.linear, ["f1"], "'f1': is for classes.*mse, mae or fairness"),
    "only the server tests": (small(server=True), models.logistic, ["fairness"], "'fairness': needs test samples of"),
    "classes for a regression": (small(), models.linear, [], "judged_by = 'mse': .*such as logistic.*regression=true"),
    "numbers for classes": (small(regression=True), models.logistic, [], "judged_by = 'accuracy'.*linear would fit"),
    "judged by nothing known": (
        small(),
        lambda *args: models.logistic(*args)._replace(judged_by="beauty"),
        [],
        "model: judged_by = 'beauty': choose one of",
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_a_metric_that_does_not_fit_the_model(case):
    federation, make, asked, said = FITTING[case]
    model = make(federation.shape, federation.classes)
    with pytest.raises(InputError, match=said):
        simulate(federation, model, algorithms.fedavg(select={"K": 1}), rounds=1, metrics=asked)


def test_numbers_to_predict_are_checked(tmp_path, capsys):
    with pytest.raises(InputError, match=r"y\[1\] = nan: should be a finite number"):
        Federation.from_arrays("d", np.ones((2, 1)), np.array([1.0, np.nan]), np.zeros(2), regression=True)
    with pytest.raises(InputError, match=r"whole number from 0 to .*set regression=true"):
        Federation.from_arrays("d", np.ones((2, 1)), np.array([1.0, 0.5]), np.zeros(2))
    (tmp_path / "a.csv").write_text("device,x,label\na,1,0.5\na,2,low\n")
    with pytest.raises(InputError, match="label = 'low': should be a number to predict"):
        data.load(tmp_path / "a.csv", regression=True)
    federation = small(regression=True)
    with pytest.raises(InputError, match="attack = 'labels': changes classes"):
        simulate(
            federation,
            models.linear(federation.shape, 1),
            algorithms.fedavg(select={"K": 1}, attack="labels"),
            rounds=1,
        )
    with pytest.raises(InputError, match=r"target = 1\.5: should be more than 0 and at most 1"):
        plan(folb.Experiment(**FIELDS | {"target": 1.5}))
    with pytest.raises(InputError, match=r"target = 1e\+39: should be more than 0, and finite in 32 bits"):
        folb.Experiment(**FIELDS | {"target": 1e39})  # its own file would not be read


# lower is better


def made(values, judged_by="mse", seed=0):
    count = len(values)
    zeros = np.zeros(count)
    values = np.array(values, np.float32)
    accuracy = np.full(count, np.nan, np.float32) if judged_by == "mse" else np.zeros(count, np.float32)
    return Run(
        "a" if seed < 10 else "b",
        {},
        seed,
        np.arange(1, count + 1),
        accuracy,
        zeros,
        zeros,
        zeros,
        zeros + 1,
        zeros[:, None],
        zeros[:, None],
        zeros[:, None],
        zeros > 0,
        metrics={judged_by: values},
        judged_by=judged_by,
    )


def test_an_error_is_better_if_it_is_lower():
    run = made([5, 3, 3.5, 1, 1, 1, 1, 1])
    assert (run.rounds_to(3), run.rounds_to(0.5), run.seconds_to(1)) == (2, None, 4)
    assert (run.best, run.final, run.settled, run.drops) == (1, 1, 1, 1)
    assert run.held_from(1.5) == 3 and run.held_from(0.9) is None
    assert repr(run) == "Run(a, seed 0: 8 rounds, final MSE 1.0000)"
    slow = [made([5, 4, 4, 4, 4, 4, 3, 3], seed=seed) for seed in (10, 11)]
    fast = [made([5, 3, 3, 3, 3, 3, 3, 3], seed=seed) for seed in (0, 1)]
    assert summary.told_apart([*slow, *fast], 3).startswith("Fewest rounds to 3: a.")
    verdict = summary.told_apart([*slow, *fast], 2)
    assert (
        verdict
        == "No algorithm reaches 2 with most of its seeds. The best MSE is 3: a higher target (--target) says more."
    )
    assert "No MSE is a finite number" in summary.told_apart([made([math.nan, math.nan])], 2)
    headings, rows = summary.table([*slow, *fast], 3)
    assert headings[1:3] == ["rounds to 3", "held from"] and "final MSE" in headings
    assert [row[1] for row in rows] == ["7", "2"]
    endless = made([1, math.inf])
    assert summary.table([endless, made([1, 2], seed=1)], 3)[1][0][-1]  # a run that diverged has a row
    with pytest.raises(InputError, match="should all be judged by the same metric"):
        summary.table([run, made([0.5], "f1")], 0.5)


def test_a_model_may_be_judged_by_another_metric():
    run = made([0.1, 0.6, 0.7], "f1")
    headings, _ = summary.table([run], 0.6)
    assert headings[1] == "rounds to 60 %" and "final F1" in headings and "accuracy" in headings
    assert (run.rounds_to(0.6), run.best, run.measure.text(run.final)) == (2, pytest.approx(0.7), "70.0 %")
    assert measure("own_variance").text(0.01) == "100 points²" and measure("own_variance", "mse").text(0.01) == "0.01"


# a regression, from a table


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """A table of towns: the price of a house is linear in what is known of it, and a little else in each town."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("houses") / "houses.csv"
    rows = ["town,rooms,area,price"]
    for town in range(6):
        for x in rng.normal(size=(20, 2)):
            rows.append(f"t{town},{x[0]:.4f},{x[1]:.4f},{3 + x @ [1, -2] + 0.1 * town + 0.1 * rng.normal():.4f}")
    path.write_text("\n".join(rows) + "\n")
    return path


TABLE = {"device": "town", "label": "price", "regression": True}


@pytest.mark.drawn
def test_a_regression_from_the_command_line(houses, tmp_path, capsys):
    asked = "--model linear --algorithms fedavg --rounds 12 --seeds 2 --target 0.5 --metrics fairness,mae --records"
    given = "--set device=town --set label=price --set regression=true --set select.K=3 --set local.lr=0.1 --out"
    command = ["compare", str(houses), *asked.split(), *given.split(), str(tmp_path / "run")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    stored = folb.read(tmp_path / "run")
    assert all(word in printed for word in ("MSE", "MAE", "0.5", "devices'"))  # headings are broken into lines
    federation = data.load(houses, **TABLE)
    model = models.linear(federation.shape, federation.classes)
    runs = simulate(federation, model, algorithms.fedavg(select={"K": 3}, local={"lr": 0.1}), rounds=12, seeds=2)
    for run, own in zip(runs, stored.runs(), strict=True):
        np.testing.assert_allclose(run.metrics["mse"], own.metrics["mse"], rtol=1e-5)
        assert np.isnan(own.test_accuracy).all() and own.judged_by == "mse"
        kept = folb.load_model(stored, seed=own.seed)
        errors = (kept.predict(federation.test.x) - federation.test.y) ** 2
        assert own.final == pytest.approx(errors.mean(), rel=1e-5) and own.final < 0.5
        assert own.metrics["mae"][-1] == pytest.approx(np.sqrt(errors).mean(), rel=1e-5)
        rows = zip(federation.test.start, federation.test.size, strict=True)
        each = sorted(errors[a : a + n].mean() for a, n in rows)
        assert own.metrics["own_worst"][-1] == pytest.approx(each[-1], rel=1e-5)
        reached = int(np.argmax(own.metrics["mse"] <= 0.5)) + 1
        assert own.rounds_to(0.5) == reached > 1
    results = json.loads((stored.path / directory.RESULTS).read_bytes())
    assert "test_accuracy" not in results["runs"][0] and results["runs"][0]["judged_by"] == "mse"
    assert (stored.path / directory.CURVES).stat().st_size > 5000
    folb.plot(stored.runs(), tmp_path / "curves.svg", target=0.5)
    shown = view([stored])["experiments"][0]
    assert shown["measures"][0] == {
        "name": "mse",
        "title": "Mean squared error",
        "short": "MSE",
        "factor": 1.0,
        "unit": "",
        "lower": True,
    }
    assert ["target", "0.5"] in shown["facts"] and shown["own"]["title"] == "Its own mean squared error"
    assert main(["data", "info", str(houses), *given.split()[:6], "--out", str(tmp_path / "portrait.png")]) == 0
    assert "numbers to predict: mean " in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run")]) == 0 and "MSE" in capsys.readouterr().out


def test_the_command_refuses_a_metric_in_one_line(houses, capsys):
    given = ["compare", str(houses), "--model", "linear", "--set", "device=town", "--set", "label=price"]
    assert main([*given, "--set", "regression=true", "--metrics", "auc"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("folb: error: metrics = 'auc': is for classes, but the model predicts numbers: mse, mae")
    assert main([*given, "--metrics", "fairnes"]) == 2
    assert "did you mean" in capsys.readouterr().err


# a user's own

OWN_FILE = "examples/my_metric.py"


def own_by_formula(test, predicted):
    each = [np.mean((predicted == test.y)[a : a + n]) for a, n in zip(test.start, test.size, strict=True) if n]
    count = np.bincount(test.y)
    rarest = np.argmin(np.where(count > 0, count, len(test.y)))
    return {"gap": max(each) - min(each), "rarest": np.mean(predicted[test.y == rarest] == rarest)}


def test_metrics_of_a_user_s_file_are_as_the_others(federation, tmp_path, capsys):
    """From the command line: computed, recorded, and shown in the table, the page and the exports, without the file."""
    mine = tmp_path / "mine.py"
    mine.write_text(Path(OWN_FILE).read_text())
    asked = f"compare synthetic_1_1 --algorithms fedavg --rounds 8 --seeds 1 --metrics f1,{mine}:gap,{mine}:rarest"
    sizes = ["--set", "select.K=2", "--set", f"sizes={','.join(map(str, SIZES))}", "--out", str(tmp_path / "run")]
    assert main([*asked.split(), *sizes]) == 0
    assert "rarest" in capsys.readouterr().out
    mine.unlink()
    stored = folb.read(tmp_path / "run")
    (run,) = stored.runs()
    final = {name: float(values[-1]) for name, values in run.metrics.items()}
    predicted = folb.load_model(stored).predict(federation.test.x)
    assert final == pytest.approx(own_by_formula(federation.test, predicted) | {"f1": final["f1"]}, abs=1e-6)
    headings, rows = summary.table([run], 0.7)
    assert {"gap", "rarest"} < set(headings) and rows[0][headings.index("rarest")] == f"{100 * final['rarest']:.1f} %"
    shown = {one["name"]: one for one in view([stored])["experiments"][0]["measures"]}
    assert shown["rarest"]["title"] == "Recall of the rarest class (%)" and shown["rarest"]["factor"] == 100
    assert shown["gap"]["title"] == "The accuracy of the best device less that of the worst"
    assert {"gap", "rarest"} < set(to_csv(stored).decode().splitlines()[0].split(","))
    assert "gap" in to_latex(stored).decode() and {"gap", "rarest"} < set(stored.to_frame().columns)


def test_metrics_of_one_s_own_in_python(federation):
    model = models.logistic(federation.shape, federation.classes)

    def wrong(y, scores):
        return jax.numpy.mean(scores.argmax(axis=1) != y)

    errors = folb.Metric("errors", wrong, unit="%", lower=True)
    given = {"rounds": 3, "metrics": ["f1", errors, wrong]}
    (run,) = simulate(federation, model, algorithms.fedavg(select={"K": 2}), **given)
    np.testing.assert_allclose(run.metrics["errors"], 1 - run.test_accuracy, atol=1e-6)
    np.testing.assert_array_equal(run.metrics["errors"], run.metrics["wrong"])
    (streamed,) = simulate(federation, model, algorithms.fedavg(select={"K": 2}), **given, stream=True)
    np.testing.assert_allclose(streamed.metrics["errors"], run.metrics["errors"], atol=1e-6)
    assert "errors" in summary.table([run], 0.5)[0]


BAD = {
    "def odd(y, colour): return 0.0": "metrics: odd: argument = 'colour'",
    "def odd(y): return y": "should return one real number",
    "def odd(y): return 'high'": "should return one real number",
    "def odd(y): raise ValueError('no')": "fails: ValueError: no",
    "def f1(y): return 0.0\nodd = f1": "should have another name",
    "def loss(y): return 0.0\nodd = loss": "should have another name",
    "odd = lambda y: 0.0": "should have a name of",
    "import folb\nodd = folb.Metric('odd', 'of')": "should be computed by a function",
    "import folb\nodd = folb.Metric('odd', len, task='words')": "should be classes or numbers",
    "import folb\nodd = folb.Metric('odd', lambda y: 0.0, task='numbers')": "is for numbers, but the model tells",
    "odd = 3": "has no function 'odd'",
}


@pytest.mark.parametrize("code", BAD)
def test_a_bad_metric_is_refused_in_one_line(code, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(code)
    asked = f"compare synthetic_1_1 --algorithms fedavg --rounds 1 --seeds 1 --metrics {tmp_path}/bad.py:odd"
    assert main([*asked.split(), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("folb: error: ") and BAD[code] in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_metric_s_record_is_checked(tmp_path):
    fine = {"name": "odd", "words": "odd", "short": "odd", "unit": "", "lower": False, "factor": 1.0}
    assert measures.are_facts([fine]) and not measures.are_facts([fine | {"factor": 0.0}])
    assert not measures.are_facts([fine | {"name": "<b>"}]) and not measures.are_facts({"odd": fine})
    assert {*export.COLUMNS, *export.SPENT, *export.OF_DEVICES, *COLUMNS} < {*measures.TAKEN}
