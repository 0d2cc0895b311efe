"""A run directory of an earlier version is still read, found and repeated."""

import json
import shutil
from pathlib import Path

import pytest

from folb.cli.main import main
from folb.experiments.experiment import from_toml
from folb.experiments.plan import plan

OLD = Path(__file__).parent / "old_run"  # 3 rounds, written when folb was one flat folder; without its picture
COMMAND = "compare synthetic_1_1 --algorithms fedavg,folb --set sizes=20,31,45 --set K=2 --rounds 3 --seeds 2"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The directory, among a user's runs."""
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path))
    identity = json.loads((OLD / "environment.json").read_text())["identity"]
    return Path(shutil.copytree(OLD, tmp_path / f"synthetic_1_1-{identity[:8]}"))


def results(path):
    return json.loads((path / "results.json").read_text())["runs"]


def test_it_is_listed_shown_exported_and_reported(old, tmp_path, capsys):
    assert main(["runs"]) == 0
    assert old.name in capsys.readouterr().out
    assert main(["show", "last", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["rounds_done"]) == ("finished", 2 * 2 * 3)
    assert shown["best"] == pytest.approx(max(run["best"] for run in results(OLD)))
    assert main(["export", "last", "--format", "csv", "-o", str(tmp_path / "old.csv")]) == 0
    assert len((tmp_path / "old.csv").read_text().splitlines()) == 1 + 2 * 2 * 3
    assert main(["report", "last", "-o", str(tmp_path / "old.html")]) == 0
    assert old.name in (tmp_path / "old.html").read_text()


def test_the_same_command_finds_it_and_draws_the_picture(old, capsys):
    assert plan(from_toml(old / "experiment.toml")).identity[:8] == old.name[-8:]
    assert main(COMMAND.split()) == 0
    assert "finished already" in capsys.readouterr().err
    assert (old / "curves.png").is_file()
    assert results(old) == results(OLD)


def test_its_experiment_file_gives_the_same_numbers_from_the_start(old, tmp_path):
    assert main(["run", str(old / "experiment.toml"), "--again", "--out", str(tmp_path / "again")]) == 0
    for now, then in zip(results(tmp_path / "again"), results(OLD), strict=True):
        assert now["test_accuracy"] == pytest.approx(then["test_accuracy"], abs=1e-6)
        assert now["train_loss"] == pytest.approx(then["train_loss"], rel=1e-5)
        assert (now["bytes_up"], now["bytes_down"], now["seconds"]) == (
            then["bytes_up"],
            then["bytes_down"],
            then["seconds"],
        )
