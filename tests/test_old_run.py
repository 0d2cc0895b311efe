"""A run directory of an earlier version is still read, found, resumed and repeated."""

import json
import shutil
from pathlib import Path

import pytest

from folb import InputError, algorithms, data, models
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
    same_numbers(tmp_path / "again")


def test_interrupted_it_is_completed_with_the_same_numbers(old):
    (old / "results.json").unlink()
    lines = (old / "rounds.jsonl").read_text().splitlines()
    (old / "rounds.jsonl").write_text("\n".join(lines[:5]) + "\n")
    assert main(["resume", "last"]) == 0
    same_numbers(old)


def test_one_on_flower_is_read_and_not_touched(tmp_path, monkeypatch, capsys):
    """Rounds on real devices cannot be repeated: a strategy of today says that they are of another version."""
    pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")
    from inprocess import InProcessGrid
    from test_flower import apps, initial, plain

    monkeypatch.setenv("FOLB_RUNS", str(tmp_path))
    path = Path(shutil.copytree(OLD.parent / "old_flower_run", tmp_path / "deployed"))
    assert main(["show", "deployed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["rounds_done"]) == ("interrupted", 2)
    federation = data.load("synthetic", alpha=1, beta=1, devices=3, sizes=[20, 31, 45])
    model = models.logistic(federation.shape, federation.classes)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    strategy = plain(algorithms.fedavg(K=2, lr=0.05), directory=path)
    with pytest.raises(InputError, match=r"holds another run: .*another version of folb; choose another directory"):
        strategy.start(InProcessGrid(apps(federation)), initial(model), 6)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.suffix != ".lock"} == before


def same_numbers(path):
    for now, then in zip(results(path), results(OLD), strict=True):
        assert now["test_accuracy"] == pytest.approx(then["test_accuracy"], abs=1e-6)
        assert now["train_loss"] == pytest.approx(then["train_loss"], rel=1e-5)
        assert (now["bytes_up"], now["bytes_down"], now["seconds"]) == (
            then["bytes_up"],
            then["bytes_down"],
            then["seconds"],
        )
