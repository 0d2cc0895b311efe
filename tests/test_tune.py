"""The search: how points rank, what the winner is reported on, and that a grid may be cut to fit into memory."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from folb import algorithms, data, models
from folb.cli import tables
from folb.cli.main import main
from folb.errors import InputError
from folb.experiments import box as boxes
from folb.experiments import execute, tune
from folb.experiments.experiment import Experiment, from_toml, to_toml
from folb.experiments.plan import plan
from folb.results.run import Run
from folb.simulation import problem as problems
from folb.simulation import program, stacked
from folb.simulation import simulate as simulator
from folb.store import directory, run_arrays
from folb.store.environment import memory

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = ["--set", "sizes=20,30,40", "--set", "select.K=2", "--rounds", "6", "--seeds", "2"]
OWN = f"{Path(__file__).parents[1] / 'examples' / 'my_rule.py'}:softmax"
SEARCH = ["tune", "synthetic_1_1", "--algorithm", "folb", "--local.lr", "0.001,0.1,1e30", *TINY]


# ranking


def run(accuracy, loss):
    """A run of which only accuracy and loss matter."""
    n = len(accuracy)
    measured = np.array(accuracy, np.float32), np.array(loss, np.float32)
    return Run("folb", {}, 0, np.arange(1, n + 1), *measured, *(np.zeros(n) for _ in range(7)))


def arriving(t, loss):
    """A run of 5 rounds that reaches the target in round t, or never, with that loss all along."""
    return run([0.9 if t and r >= t else 0.1 for r in range(1, 6)], 5 * [loss])


def search(*points, by="first"):
    """A grid with these runs at its points, three seeds each."""
    variants = [algorithms.folb(local={"mu": float(i)}) for i in range(len(points))]
    experiment = SimpleNamespace(seeds=(0, 1, 2), target=0.7, box={}, points=None, box_seed=None)
    planned = SimpleNamespace(experiment=experiment, algorithms=variants)
    return planned, tune.ranked(planned, [one for point in points for one in point], by)


def test_points_rank_by_the_median_round_of_arrival_then_by_loss():
    _, points = search(
        [arriving(None, 0.5), arriving(None, 0.5), arriving(1, 0.5)],  # mu = 0: the median never arrives
        [arriving(3, 2.0), arriving(None, 2.0), arriving(4, 2.0)],  # 1: in 4; "never" comes last
        [arriving(3, 9.0), arriving(3, 9.0), arriving(5, 9.0)],  # 2: in 3, whatever the loss
        [arriving(4, 1.0), arriving(4, 2.0), arriving(4, 2.0)],  # 3: in 4, and with less loss than 1
        [arriving(None, 0.4), arriving(None, 0.4), arriving(None, 0.4)],  # 4: not even with one seed, as 0 does
    )
    assert [(point.rank, point.algorithm.settings["local.mu"]) for point in points] == [
        (1, 2.0),
        (2, 3.0),
        (3, 1.0),
        (4, 0.0),
        (5, 4.0),
    ]


def test_equal_points_share_a_rank_and_the_first_of_them_wins():
    same, digit = [arriving(2, 0.5)] * 3, [arriving(2, 0.5 + 1e-6)] * 3
    planned, points = search([arriving(3, 0.1)] * 3, digit, same, [arriving(4, 0.1)] * 3)
    assert [point.rank for point in points] == [1, 1, 3, 4]
    assert points[0].algorithm.settings["local.mu"] == 1.0
    assert tune.verdict(planned, points, [3, 4]) == (
        "folb local.mu=1, the first of 2 that are equal: chosen on seeds 0, 1, 2; results on seeds 3, 4:"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_divergence_in_any_seed_is_last_whatever_came_before_it(bad):
    diverged = [arriving(1, 0.1), arriving(1, 0.1), run(5 * [0.9], [0.1, 0.1, bad, 0.1, 0.1])]
    planned, points = search(diverged, [arriving(None, 9.0)] * 3, diverged)
    assert [(point.rank, point.diverged) for point in points] == [(1, False), (2, True), (2, True)]
    rows = [list(column.cells) for column in tables.points(points, 0.7).columns]
    assert list(zip(*rows, strict=True))[1] == ("2", "folb local.mu=0", "diverged", "", "", "", "", "")
    json.dumps(tune.document(planned_with_rounds(planned), points, [3], None), allow_nan=False)
    with pytest.raises(InputError, match="diverged at every point"):
        tune.winner(planned, search(diverged)[1], [3])


def test_points_rank_by_seconds_or_by_bytes():
    few, slow = arriving(2, 0.5), arriving(3, 0.5)
    dear = replace(few, seconds=np.full(5, 9.0), bytes_up=np.full(5, 4), bytes_down=np.full(5, 1))  # 18 s, 10 bytes
    quick = replace(slow, seconds=np.full(5, 1.0), bytes_up=np.full(5, 4), bytes_down=np.full(5, 2))  # 3 s, 18 bytes
    for by, order in (("first", [0.0, 1.0]), ("seconds", [1.0, 0.0]), ("bytes", [0.0, 1.0])):
        planned, points = search(3 * [dear], 3 * [quick], by=by)
        assert [point.algorithm.settings["local.mu"] for point in points] == order
    best = tune.document(planned_with_rounds(planned), points, [3], None, "bytes")["points"][0]
    assert (best["seconds_to_target"], best["bytes_to_target"]) == (3 * [18.0], 3 * [10])
    assert "chosen by the bytes to the target on seeds 0, 1, 2;" in tune.verdict(planned, points, [3], "bytes")


def test_a_point_that_only_touches_the_target_loses_by_the_sustained_one():
    touches = 3 * [run([0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 8 * [0.1])]
    holds = 3 * [run([0.1, 0.1, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], 8 * [2.0])]
    later = 3 * [run([0.1, 0.75, 0.1, 0.8, 0.8, 0.8, 0.8, 0.8], 8 * [1.0])]

    def order(by):
        return [(point.rank, point.algorithm.settings["local.mu"]) for point in search(touches, holds, later, by=by)[1]]

    assert order("first") == [(1, 0.0), (2, 2.0), (3, 1.0)]
    assert order("sustained") == [(1, 1.0), (2, 2.0), (3, 0.0)]
    planned, points = search(touches, holds, later, by="sustained")
    assert [list(point.held) for point in points] == [3 * [3], 3 * [4], 3 * [None]]
    cells = [list(column.cells) for column in tables.points(points, 0.7).columns]
    assert list(zip(*cells, strict=True))[2][2:4] == ("1", "never")
    document = tune.document(planned_with_rounds(planned), points, [3], None, "sustained")
    assert (document["by"], document["points"][0]["median_held_from"], document["points"][2]["held_from"]) == (
        "sustained",
        3,
        3 * [None],
    )
    assert "chosen by the sustained target on seeds 0, 1, 2;" in tune.verdict(planned, points, [3], "sustained")


def planned_with_rounds(planned):
    planned.experiment.rounds = 5
    return planned


# seeds and grids


def test_the_winner_is_reported_on_other_seeds():
    assert tune.other_seeds((0, 1, 2), None) == [3, 4, 5]
    assert tune.other_seeds((7, 3), 3) == [8, 9, 10]
    assert tune.other_seeds((0, 1), [9, 4]) == [9, 4]
    for wanted in ([5, 1], 0, [], [4, 4], [-1]):
        with pytest.raises(InputError, match="report_seeds"):
            tune.other_seeds((0, 1), wanted)


def test_the_winner_has_the_best_values_and_all_else_as_it_was():
    settings = {"sizes": [20, 30], "server.lr": ["none", 0.5], "server": "adam", "rule.temperature": [1, 2]}
    planned = plan(Experiment("synthetic_1_1", algorithms=[OWN], set=settings))
    points = tune.ranked(planned, [arriving(t, 1.0) for t in (3, 2, 4, 5) for _ in range(3)])
    chosen = plan(tune.winner(planned, points, [7, 8]))
    (only,) = chosen.algorithms
    assert only.settings == planned.algorithms[1].settings
    assert chosen.experiment.seeds == (7, 8) and chosen.experiment.set["synthetic_1_1"]["sizes"] == [20, 30]
    assert chosen.experiment.algorithms == planned.experiment.algorithms
    # a list with none among its values is part of what an experiment is
    other = plan(Experiment("synthetic_1_1", algorithms=[OWN], set=settings | {"server.lr": ["none", 0.6]}))
    assert other.identity != planned.identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "folb", "--rule.psi", "1,2"], "rule.psi = ['1', '2']: is a setting of folb_hetero"),
        (["--algorithm", "folb"], "grid = {}: should be several values of a setting"),
        (["--algorithm", "folb", "--local.mu", "1,1.0"], "local.mu = ['1', '1.0']: should be different"),
        (["--algorithm", "folb", "--local.mu", "1,x"], "local.mu = 'x': should be a finite number"),
        (
            ["--algorithm", "folb", "--local.mu", "1,2", "--report-seeds", "1,5"],
            "report_seeds = [1, 5]: should not have seeds",
        ),
        (["--algorithm", "folb", "--local.mu", "1,2", "--report-seeds", "x"], "report_seeds = 'x'"),
        (["--algorithm", "flob", "--local.mu", "1,2"], "algorithms = 'flob': did you mean 'folb'"),
        (["--algorithm", "folb", "--local.nu", "1,2"], "unrecognized arguments: --local.nu 1,2 (see folb tune --help)"),
        (["--algorithm", "folb", "--lr", "1,2"], "did you mean --local.lr or --server.lr? unrecognized arguments"),
        (["--local.mu", "1,2"], "required: --algorithm"),
    ],
)
def test_mistakes_are_named_before_anything_runs(options, message, capsys):
    try:
        code = main(["tune", "synthetic_1_1", *options])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1
    assert directory.listed() == []


# the box


def decades(numbers):
    return sorted(math.floor(math.log10(number)) for number in numbers)


def test_each_part_of_a_range_has_one_point():
    box = {"local.lr": boxes.Range(0.001, 1, log=True), "server.lr": boxes.Range(0.1, 3), "select.K": [5, 10]}
    points = boxes.draw(box, 12, 0)
    assert decades(point["local.lr"] for point in points) == 4 * [-3] + 4 * [-2] + 4 * [-1]
    parts = [math.floor(12 * math.log(point["local.lr"] / 0.001) / math.log(1000)) for point in points]
    assert sorted(parts) == list(range(12))
    assert sorted(math.floor(12 * (point["server.lr"] - 0.1) / 2.9) for point in points) == list(range(12))
    assert sorted(point["select.K"] for point in points) == 6 * [5] + 6 * [10]


@pytest.mark.parametrize("seed", range(20))
def test_settings_are_drawn_apart(seed):
    box = {"local.lr": boxes.Range(0.001, 1, log=True), "server.lr": boxes.Range(0.1, 3), "local.mu": boxes.Range(0, 1)}
    points = boxes.draw(box, 12, seed)
    columns = np.array([[math.log(point["local.lr"]), point["server.lr"], point["local.mu"]] for point in points])
    ranks = np.argsort(np.argsort(columns, axis=0), axis=0)
    assert np.abs(np.corrcoef(ranks.T) - np.eye(3)).max() < 0.3


def test_a_draw_depends_on_the_seed_alone():
    box = {"local.lr": boxes.Range(0.001, 1, log=True), "local.mu": boxes.Range(0, 1)}
    assert boxes.draw(box, 5, 0) == boxes.draw(dict(box), 5, 0)
    assert boxes.draw(box, 5, 0) != boxes.draw(box, 5, 1)
    # for good: the points of a run that is resumed years later are these
    assert boxes.draw(box, 3, 0) == [
        {"local.lr": 0.315, "local.mu": 0.873},
        {"local.lr": 0.00533, "local.mu": 0.617},
        {"local.lr": 0.0221, "local.mu": 0.0828},
    ]


def test_points_are_within_the_box_and_different():
    for n in (1, 2, 7, 100):
        narrow = boxes.draw({"server.beta": boxes.Range(0.9999, 0.99999)}, n, 0)
        assert len({point["server.beta"] for point in narrow}) == n
        assert all(0.9999 <= point["server.beta"] < 0.99999 for point in narrow)
    whole = boxes.draw({"select.K": boxes.Range(1, 9, whole=True)}, 9, 0)
    assert sorted(point["select.K"] for point in whole) == list(range(1, 10)) and type(whole[0]["select.K"]) is int
    ten = boxes.draw({"select.K": [5, 10], "local.batch": [1, 2, 3, 4, 5]}, 10, 3)
    assert len({(point["select.K"], point["local.batch"]) for point in ten}) == 10
    with pytest.raises(InputError, match="points = 11: should be at most 10"):
        boxes.draw({"select.K": [5, 10], "local.batch": [1, 2, 3, 4, 5]}, 11, 3)
    log = boxes.draw({"select.K": boxes.Range(10, 9999, log=True, whole=True)}, 12, 0)
    assert decades(point["select.K"] for point in log) == 4 * [1] + 4 * [2] + 4 * [3]


BOX = {"local.lr": "log:1e-3..1.0", "server.lr": "0.1..3"}
CHOICES = {"algorithms": ["folb"], "set": {"sizes": [20, 30, 40], "select.K": 2}, "rounds": 6, "seeds": 2}


def test_an_experiment_keeps_its_box_and_draws_the_same_points_again(tmp_path):
    planned = plan(Experiment("synthetic_1_1", box=BOX, points=4, box_seed=7, **CHOICES))
    whole = planned.experiment
    assert whole.box == {"folb": {"local.lr": "log:0.001..1", "server.lr": "0.1..3"}}
    assert (whole.points, whole.box_seed) == (4, 7) and "local.lr" not in whole.set["folb"]
    (tmp_path / "e.toml").write_text(to_toml(whole))
    again = plan(from_toml(tmp_path / "e.toml"))
    assert again.identity == planned.identity
    settings = [[one.settings for one in planned_one.algorithms] for planned_one in (planned, again)]
    assert settings[0] == settings[1] and len({(one["local.lr"], one["server.lr"]) for one in settings[0]}) == 4
    for other in ({"points": 5, "box_seed": 7}, {"points": 4, "box_seed": 8}):
        assert plan(Experiment("synthetic_1_1", box=BOX, **other, **CHOICES)).identity != planned.identity


def test_an_experiment_without_a_box_is_written_as_before():
    text = to_toml(plan(Experiment("synthetic_1_1", **CHOICES)).experiment)
    assert "box" not in text and "points" not in text


def test_numbers_are_one_program_and_each_point_meets_every_swept_value():
    def batches(**given):
        planned = plan(Experiment("synthetic_1_1", **CHOICES | given))
        return [len(batch) for batch in execute.ready(planned).batches]

    assert batches(box=BOX, points=5) == [5 * 2]
    assert batches(box=BOX | {"local.mu": [0, 1]}, points=5, set={"sizes": [20, 30, 40]}) == [5 * 2]
    swept = CHOICES["set"] | {"server": ["plain", "momentum"]}
    assert batches(box=BOX, points=5, set=swept) == [5 * 2, 5 * 2]


def test_a_box_for_one_algorithm_leaves_the_others_alone():
    choices = CHOICES | {"algorithms": ["folb", "fedavg"]}
    planned = plan(
        Experiment("synthetic_1_1", box={"local.lr": "0.1..1", "folb": {"local.mu": "0..1"}}, points=3, **choices)
    )
    assert [one.name for one in planned.algorithms] == 3 * ["folb"] + 3 * ["fedavg"]
    planned = plan(Experiment("synthetic_1_1", box={"folb": {"local.mu": "0..1"}}, points=3, **choices))
    assert [one.name for one in planned.algorithms] == 3 * ["folb"] + ["fedavg"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--points", "3"], "box = {}: should have a range or values for a setting, such as local.lr=log:0.001..1"),
        (["--box", "local.lr=1..0.1"], "local.lr = '1..0.1': should be LOW..HIGH with LOW less than HIGH"),
        (["--box", "local.lr=1..1"], "local.lr = '1..1': should be LOW..HIGH with LOW less than HIGH"),
        (["--box", "local.lr=log:0..1"], "local.lr = 'log:0..1': should begin above 0"),
        (["--box", "local.lr=log:3"], "local.lr = 'log:3': should be a range of numbers"),
        (["--box", "local.lr=0.1..inf"], "local.lr = '0.1..inf': should be a range of numbers"),
        (["--box", "local.lr=0.1-1"], "local.lr = '0.1-1': should be a finite number, or a range: 0.1..1"),
        (["--box", "local.lr=1e-3-0.5"], "local.lr = '1e-3-0.5': should be a finite number, or a range: 1e-3..0.5"),
        (["--box", "select.K=5,8-9"], "select.K = '8-9': should be a whole number, or a range: 8..9"),
        (["--box", "select.K=5,many"], "select.K = 'many': should be a whole number\n"),
        (["--box", "lr"], "box = 'lr': should be KEY=VALUE"),
        (["--box", "local.lrr=1..2"], "box = 'local.lrr': did you mean 'local.lr'?"),
        (
            ["--box", "rule.psi=1..2"],
            "rule.psi = '1..2': is a setting of folb_hetero, folb_never_flip, and not of folb",
        ),
        (["--box", "fedavg.local.lr=1..2"], "box = 'fedavg': choose one of folb"),
        (
            ["--set", "local.lr=1", "--box", "local.lr=1..2"],
            "local.lr = '1..2': is in the box and also set; give it once",
        ),
        (
            ["--set", "folb.local.lr=1", "--box", "local.lr=1..2"],
            "local.lr = '1..2': is in the box and also set; give it once",
        ),
        (
            ["--local.lr", "1,2", "--box", "local.lr=1..2"],
            "local.lr = '1..2': is in the box and also set; give it once",
        ),
        (["--box", "local.lr=1..2", "--points", "0"], "points = 0: should be a whole number from 1"),
        (["--box", "local.lr=1..2", "--box-seed", "-1"], "box_seed = -1: should be a whole number from 0"),
        (["--box", "server=1..2"], "server = '1..2': is a range, but the setting is not a number"),
        (["--box", "guard=0..1"], "guard = '0..1': is a range, but the setting is not a number"),
        (["--box", "select.K=1.5..3"], "select.K = 1.5: should be a whole number"),
        (["--box", "select.K=5,10"], "points = 12: should be at most 2"),
        (["--box", "local.lr=-1..1"], "should be more than 0"),
        (["--box", "local.lr=1..2", "--by", "last"], "argument --by: invalid choice: 'last'"),
    ],
)
def test_mistakes_in_a_box_are_named(options, message, capsys):
    test_mistakes_are_named_before_anything_runs(["--algorithm", "folb", *options], message, capsys)


def test_a_search_in_a_box_resumes_and_repeats_and_its_winner_is_a_point(capsys, monkeypatch):
    command = [
        "tune",
        "synthetic_1_1",
        "--algorithm",
        "folb",
        "--box",
        "local.lr=log:0.001..1",
        "--box",
        "server.lr=none,2",
    ]
    command += ["--points", "4", "--box-seed", "3", "--by", "sustained", "--target", "0.2", *TINY]
    first = document_of(capsys, *command)
    assert (first["by"], first["budget"], first["box_seed"]) == ("sustained", 4, 3)
    assert first["box"] == {"folb": {"local.lr": "log:0.001..1", "server.lr": ["none", 2.0]}}
    points = [(point["parameters"]["local.lr"], point["parameters"]["server.lr"]) for point in first["points"]]
    assert len(set(points)) == 4 and decades(lr for lr, _ in points)[0] == -3
    best = first["winner"]["runs"][0]
    assert (best["parameters"]["local.lr"], best["parameters"]["server.lr"]) == points[0] and best["seed"] == 2
    held = [point["median_held_from"] or math.inf for point in first["points"]]
    assert held == sorted(held) and "held_from" in best

    (grid,) = [path for path in directory.listed() if (path / directory.WINNER).exists()]
    stored = directory.read(grid)
    assert stored.experiment["box"] == first["box"]
    assert (stored.experiment["points"], stored.experiment["box_seed"]) == (4, 3)
    recorded = [
        (about["parameters"]["local.lr"], about["parameters"]["server.lr"]) for about in stored.environment["runs"]
    ]
    assert set(recorded) == set(points)
    assert json.loads((grid / directory.RESULTS).read_bytes())["box"] == first["box"]
    assert "box" not in from_toml(grid / directory.WINNER).set and not from_toml(grid / directory.WINNER).box
    assert main(["resume", str(grid)]) == 0 and "finished already" in capsys.readouterr().err
    assert main(["show", str(grid)]) == 0 and "[box.folb]" in capsys.readouterr().out

    monkeypatch.setattr(execute, "ready", None)  # nothing is run again
    assert document_of(capsys, *command) == first
    assert main(command) == 0
    assert "4 points drawn from local.lr=log:0.001..1 server.lr=none,2 by the seed 3" in capsys.readouterr().out


def test_python_takes_the_same():
    experiment = Experiment("synthetic_1_1", box=BOX, points=3, target=0.2, **CHOICES)
    search = tune.search(experiment, by="sustained")
    assert len(search.points) == 3 and search.planned.experiment.points == 3
    best = [point.merit("sustained") for point in search.points]
    assert best == sorted(best) and [run.seed for run in search.winner.runs()] == [2, 3]
    assert (search.winner.path / directory.MODEL).exists() and not (search.grid.path / directory.MODEL).exists()
    with pytest.raises(InputError, match="by = 'last'"):
        tune.search(experiment, by="last")
    with pytest.raises(InputError, match="should be one: the algorithm to tune"):
        tune.search(Experiment("synthetic_1_1", algorithms=["folb", "fedavg"], box=BOX, points=3))


# from end to end


def document_of(capsys, *arguments):
    """The JSON document that a command prints."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A search that was left alone: where its runs are, and its document."""
    home = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLB_RUNS", str(home))
        patch.setattr(sys, "stdout", io.StringIO())
        assert main([*SEARCH, "--json"]) == 0
        return home, json.loads(sys.stdout.getvalue())


def test_the_search_ranks_its_grid_and_reports_the_winner_elsewhere(whole, capsys, monkeypatch):
    home, document = whole
    assert (document["seeds"], document["report_seeds"]) == ([0, 1], [2, 3])
    ranks = {point["parameters"]["local.lr"]: point["rank"] for point in document["points"]}
    assert ranks == {0.1: 1, 0.001: 2, 1e30: 3}
    assert [point["diverged"] for point in document["points"]] == [False, False, True]
    assert [(one["seed"], one["parameters"]["local.lr"]) for one in document["winner"]["runs"]] == [(2, 0.1), (3, 0.1)]
    # there are two run directories, and asked again, nothing runs
    monkeypatch.setenv("FOLB_RUNS", str(home))
    assert len(directory.listed()) == 2
    monkeypatch.setattr(execute, "ready", None)
    assert document_of(capsys, *SEARCH) == document
    assert main(SEARCH) == 0
    out = capsys.readouterr().out
    assert "folb local.lr=0.1: chosen on seeds 0, 1; results on seeds 2, 3:" in out and "diverged" in out


def test_the_winner_file_repeats_its_runs_to_the_bit(whole, capsys):
    home, document = whole
    (file,) = home.glob(f"*/{directory.WINNER}")
    assert from_toml(file).seeds == (2, 3)
    assert document_of(capsys, "run", file) == document["winner"]  # in a home of its own: it is run


def test_an_interrupted_search_goes_on_with_the_same_command(whole, capsys, monkeypatch):
    run = execute.execute

    def interrupted(planned, *, observe, **options):
        def stop(i, first, part):
            observe(i, first, part)
            if i == 5:  # the last of the stacked runs
                raise KeyboardInterrupt

        return run(planned, observe=stop, **options)

    monkeypatch.setattr(execute, "execute", interrupted)
    monkeypatch.setattr(sys, "argv", ["folb", *SEARCH, "--again"])
    assert main([*SEARCH, "--again"]) == 130
    assert f"resume with: folb {' '.join(SEARCH)}\n" in capsys.readouterr().err
    monkeypatch.setattr(execute, "execute", run)
    loaded, load = [], run_arrays.load_checkpoint
    monkeypatch.setattr(run_arrays, "load_checkpoint", lambda *args: loaded.append(load(*args)) or loaded[-1])
    assert document_of(capsys, *SEARCH) == whole[1]
    assert [one is not None for one in loaded] == [True]  # of the grid; the winner had not begun


# memory

FEDERATION = data.load("synthetic_1_1", sizes=[20, 30, 40])


def leaves(runs):
    return [leaf for run in runs for leaf in (*jax.tree.leaves(run.params), run.train_loss, run.devices)]


def test_a_grid_cut_to_fit_gives_the_bits_of_its_parts(monkeypatch, tmp_path):
    model = models.logistic(FEDERATION.shape, FEDERATION.classes)
    grid = [algorithms.folb(local={"mu": mu}, select={"K": 2}) for mu in (0.01, 0.1, 1.0)]

    def simulated(algorithms, **options):
        return simulator.simulate(FEDERATION, model, algorithms, rounds=5, seeds=2, **options)

    whole = simulated(grid)
    monkeypatch.setattr(simulator, "fitting", lambda *args: 2)
    observed = []
    parts = simulated(grid, observe=lambda i, first, part: observed.append(i), checkpoints=tmp_path)
    assert sorted(set(observed)) == list(range(6))
    assert {path.name[0] for path in tmp_path.iterdir()} == {"0", "1", "2"}
    for ours, alone in zip(leaves(parts), leaves([run for one in grid for run in simulated(one)]), strict=True):
        np.testing.assert_array_equal(ours, alone)
    # and, in another order of addition, those of the whole
    for ours, together in zip(leaves(parts), leaves(whole), strict=True):
        np.testing.assert_allclose(ours, together, rtol=1e-4, atol=1e-6)


def test_parts_are_few_and_even():
    batches = stacked.batched([stacked.Job(i, None, 0, 1) for i in range(10)], 4)
    assert [[job.place for job in batch] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_how_many_runs_fit_goes_with_memory_devices_and_model():
    def fitting(make, K=10, memory=2**33, **options):
        model = make(FEDERATION.shape, FEDERATION.classes)
        return stacked.fitting(problems.problem(FEDERATION, model, **options), algorithms.folb(select={"K": K}), memory)

    small, large = models.logistic, models.mlp
    assert fitting(small) > 1000 and fitting(small, memory=2**34) in range(2 * fitting(small), 2 * fitting(small) + 2)
    assert fitting(large) < fitting(small) and fitting(large, K=100) < fitting(large)
    assert fitting(large) < fitting(large, side_by_side=False)  # one after another they need little but their states
    assert fitting(large, memory=1) == 1
    assert memory() >= 2**30 and memory() % 2**30 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "kind"),
    [(models.mlp, (60,), float), (models.cnn, (28, 28), float), (models.char_lstm, (80,), int)],
)
def test_runs_that_fit_take_no_more_than_all_the_memory(make, shape, kind):
    """The estimate is for half of the memory; the compiler says how much each further run really takes."""
    n = 60
    x = np.zeros((n, *shape), kind)
    federation = data.Federation.from_arrays("zeros", x, np.arange(n) % 10, np.arange(n) % 3, classes=10)
    problem = problems.problem(federation, make(shape, 10), side_by_side=True)
    algorithm = algorithms.folb_hetero(select={"K": 3})

    def temporary(count):
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *count * [algorithm])
        seeds = np.arange(count, dtype=np.uint32)
        states = jax.eval_shape(program.begin, problem, stacked, seeds)
        lowered = program.advance.lower(problem, stacked, states, seeds, *map(np.int32, (1, 2, 1)))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    each = (temporary(4) - temporary(2)) / 2
    assert stacked.fitting(problem, algorithm, 2**36) * each <= 2**36


def test_a_seed_that_never_arrives_counts_before_the_loss():
    def point(reached, loss):
        return tune.Point("", None, reached, [], loss, 0.5, False).merit()

    assert point([10, 13, 16], 1.3) < point([10, 13, None], 1.2) < point([10, 14, 15], 1.0)
