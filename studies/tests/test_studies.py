"""What the studies share: the file of results, the options of their commands, and the experiments that they make."""

import gzip
import json
import os
import re
import subprocess
import sys

import pytest
import test_mnist
from test_reproduce import LOSS, WIN

from folb.cli.main import main
from folb.errors import InputError
from folb.experiments.experiment import Experiment
from folb.experiments.plan import plan
from folb_studies.arena import entries
from folb_studies.defence import opponents
from folb_studies.paper import figure_files
from folb_studies.results import FILE, Results
from folb_studies.typed_tables import by_path

# the file of results


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / FILE


def test_a_line_is_a_cell_and_the_same_cells_are_the_same_bytes(path):
    results = Results(path)
    assert results.cells() == {} and results.get("a") is None
    results.keep("b", {"value": 1})
    results.keep("a", {"value": None})
    whole = path.read_bytes()
    assert gzip.decompress(whole) == b'{"name":"a","cell":{"value":null}}\n{"name":"b","cell":{"value":1}}\n'
    results.keep("b", {"value": 2})
    assert Results(path).get("b") == {"value": 2} and path.read_bytes() != whole
    results.keep("b", {"value": 1})
    assert path.read_bytes() == whole
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.keep("c", {"value": float("nan")})
    assert path.read_bytes() == whole and [one.name for one in path.parent.iterdir()] == [FILE]


ADD = """
import sys
from pathlib import Path
from folb_studies.results import Results

results = Results(Path(sys.argv[1]))
for i in range(30):
    results.keep(f"{sys.argv[2]}-{i}", {"value": i})
"""


def test_two_processes_that_add_cells_lose_none(path):
    both = [subprocess.Popen([sys.executable, "-c", ADD, str(path), name]) for name in ("a", "b")]
    assert [one.wait() for one in both] == [0, 0]
    assert set(Results(path).cells()) == {f"{name}-{i}" for name in ("a", "b") for i in range(30)}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", gzip.compress(b"{"), gzip.compress(b"3\n"), gzip.compress(b'{"name": "a"}\n')),
        *(gzip.compress(b'{"name": "a", "cell": 3}\n'), gzip.compress(b'{"name": "a", "cell": {}}\n' * 9)[:-12]),
        gzip.compress(b"[" * 100_000),
    ],
    ids=range(8),
)
def test_a_damaged_file_is_named_and_kept(path, content, monkeypatch, capsys):
    path.parent.mkdir()
    path.write_bytes(content)
    monkeypatch.chdir(path.parent)
    for add in (lambda: Results(path).check(), lambda: Results(path).keep("a", {}), lambda: Results(path).drop(["a"])):
        with pytest.raises(InputError, match=r"^results = .*: cannot be read \("):
            add()
    for command in (["arena"], ["defend"], ["reproduce", "table1"]):
        assert main([*command, "--pages-only", "--results", FILE]) == 2
        error = capsys.readouterr().err
        assert f"results = '{FILE}': cannot be read" in error and error.count("\n") == 1
    assert path.read_bytes() == content


def test_a_pipe_is_no_file_of_results(path):
    """To open it would wait for somebody who writes to it."""
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        Results(path).check()


# the options of the commands

MINE = """
title = "Fig. 99: made up"
paper = "It wins."
[[arm]]
id = "a"
dataset = "synthetic_1_1"
seeds = 5
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """An experiment file with results that are up to date, and others of no arm of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_up.toml").write_text(MINE)
    results = Results(tmp_path / FILE)
    results.keep("made_up-a", WIN)
    results.keep("made_up-b", LOSS)
    return results


LOOK = ["reproduce", "made_up.toml", "--results", FILE]


def test_one_cell_is_shown_and_checked(made_up, tmp_path, capsys):
    assert main([*LOOK, "--cell", "made_up-a"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == WIN and "made_up-a is up to date" in error
    (tmp_path / "made_up.toml").write_text(MINE + "rounds = 7\n")
    assert main([*LOOK, "--cell", "made_up-a"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == WIN
    assert out.startswith('{\n  "') and "made_up-a is outdated: another rounds than 7\n" in error
    assert main([*LOOK, "--cell", "made_up-b"]) == 0
    assert "made_up-b is outdated: of no arm of made_up.toml" in capsys.readouterr().err
    assert main([*LOOK, "--cell", "made_up-c"]) == 2
    assert "cell = 'made_up-c': did you mean 'made_up-b'? choose one of made_up-a" in capsys.readouterr().err
    assert not (tmp_path / "reproduction").exists()  # and nothing was run


def test_a_damaged_cell_can_be_dropped(made_up, capsys):
    made_up.keep("made_up-a", {"figure": "made_up"})
    assert main([*LOOK, "--pages-only"]) == 2
    error = capsys.readouterr().err
    assert "results = 'made_up-a': is damaged" in error and "`--drop made_up-a`" in error
    assert main([*LOOK, "--drop", "made_up-a"]) == 0
    assert list(made_up.cells()) == ["made_up-b"]
    before = made_up.path.read_bytes()
    assert main([*LOOK, "--drop", "made_up-a"]) == 2 and "drop = 'made_up-a'" in capsys.readouterr().err
    assert made_up.path.read_bytes() == before


@pytest.mark.parametrize("command", ["arena", "defend"])
def test_a_cell_of_the_other_studies_is_looked_at_the_same_way(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Results(tmp_path / command / FILE).keep("x", {"about": {"groups": []}})
    look = [command, "--out", command]
    assert main([*look, "--cell", "x"]) == 0
    assert re.search(
        "x is outdated: of no .*; if it is of your own data, give --datasets FILE", capsys.readouterr().err
    )
    assert main([*look, "--drop", "x"]) == 0
    assert not Results(tmp_path / command / FILE).cells()


def test_results_go_where_the_user_says_even_beside_a_folder_called_docs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, home in (("arena", "arena"), ("defend", "defence"), ("reproduce", "reproduction")):
        (tmp_path / "docs" / home).mkdir(parents=True)
        words = [name, "theory"] if name == "reproduce" else [name]
        assert main([*words, "--pages-only"]) == 2
        assert f"results = '{home}/{FILE}': has no results" in capsys.readouterr().err
    assert not [*(tmp_path / "docs").rglob("*.*")]


# the experiments that they make


def test_their_runs_keep_their_names():
    battle = opponents.Battle(opponents.datasets()[0], opponents.rules()[0], 0)
    arena = [one for dataset in entries.datasets() for _, one in dataset.experiments(dataset.trials)]
    assert {one.target for one in [*arena, battle.experiment]} == {0.7}


def test_the_paper_and_the_arena_evaluate_everything():
    """Even with a model that is costly to evaluate."""
    arms = [arm for name in figure_files.names() for arm in figure_files.read(name).arms if arm.check is None]
    assert arms and all(arm.given["evaluate"] == "all" for arm in arms)
    one = entries.datasets()[0]
    assert all(experiment.evaluate == "all" for _, experiment in one.experiments(one.trials))


@pytest.mark.parametrize(
    "name", sorted({*figure_files.outside()} - {"sketch", "servers", "averages", "codecs", "waiting"})
)
def test_the_arms_about_others_numbers_plan(name, tmp_path, monkeypatch):
    """All that can go wrong before a run: names, settings, searches. Here with fewer devices."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    test_mnist.write(folder)
    for arm in figure_files.read(name).arms:
        for search in arm.searches:
            (chosen,) = {search.algorithm} & set(arm.given["algorithms"])
            assert chosen == "fedavg" and set(search.grid) == {"local.lr"}
        planned = plan(Experiment(**{**arm.given, "set": {**arm.given["set"], "devices": 10}}))
        assert planned.federation.N == 10 and planned.experiment.system == "fixed"
        assert all(not one.selection.replacement and one.selection.K == 10 for one in planned.algorithms)
        if name != "fedml":
            assert len(planned.federation.train.y) == 600 and len(planned.federation.test.y) == 100


def test_a_table_of_a_part_has_settings_by_their_paths():
    given = {"local": {"lr": 0.1}, "sizes": [1], "fedavg": {"server": {"name": "adam", "lr": 1}, "select.K": 2}}
    tables = {"local.lr": 0.1, "sizes": [1], "fedavg": {"server": "adam", "server.lr": 1, "select.K": 2}}
    assert by_path(given) == by_path(tables) == tables
    with pytest.raises(InputError, match=r"local\.lr = 0\.1: is given already, as 0\.2; give it once"):
        by_path({"local.lr": 0.2, "local": {"lr": 0.1}})
