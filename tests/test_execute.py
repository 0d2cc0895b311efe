"""`folb.execute`: from Python, an experiment becomes a run directory, and no work is ever lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import folb
from folb import Experiment, InputError, atomic
from folb.experiments import execute
from folb.experiments.experiment import to_toml
from folb.experiments.plan import Plan, plan
from folb.report import figures
from folb.simulation import program, stacked
from folb.store import directory, run_arrays

FIELDS = {
    "dataset": "synthetic_1_1",
    "algorithms": ["folb"],
    "rounds": 12,
    "seeds": 1,
    "set": {"sizes": [20, 30], "select.K": 2},
}
BAD = """
import jax.numpy as jnp
from folb import Algorithm, Rule, Update

class Bad(Rule):
    def update(self, round):
        return Update(jnp.zeros(3), {"w": jnp.zeros(2)})

bad = Algorithm(rule=Bad())
"""
FILES = ["curves.png", "environment.json", "experiment.toml", "model.npz", "results.json", "rounds.jsonl"]


@pytest.fixture(scope="module")
def planned():
    """A plan for all tests: its programs are compiled once."""
    return plan(Experiment(**FIELDS))


@pytest.fixture(scope="module")
def whole(planned, tmp_path_factory):
    """The directory of a run that was left alone."""
    return execute.execute(planned, directory=tmp_path_factory.mktemp("whole") / "run").path


@pytest.fixture
def often(monkeypatch):
    """A checkpoint after every chunk, and chunks whose lengths do not depend on the machine: 1, 4, 7."""
    monkeypatch.setattr(run_arrays, "SECONDS", -1.0)
    monkeypatch.setattr(run_arrays, "SHARE", 1e9)
    monkeypatch.setattr(stacked, "CHUNK_SECONDS", 1e6)


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def content(path):
    """The files of a run, without the times in them."""
    return {name: (path / name).read_bytes() for name in FILES if name != "environment.json"}


def interrupted(planned, path, error):
    """A run that is stopped by an error, once five rounds are done."""

    def stop(i, first, part):
        if first + len(part.seconds) > 5:
            raise error

    with pytest.raises(type(error)):
        execute.execute(planned, directory=path, observe=stop)


def heard(planned, **options):
    """The run directory, and what was observed: the first round and the number of rounds."""
    seen, starts = [], []
    stored = execute.execute(
        planned,
        observe=lambda i, first, part: seen.append((first, len(part.seconds))),
        on_start=starts.append,
        **options,
    )
    (start,) = starts
    assert start.path == stored.path and start.rounds == 12 and start.plan.experiment.rounds == 12
    return stored, start.finished, seen


# what a Python user gets


def test_it_gives_a_run_directory_and_prints_nothing(planned, capfd):
    stored, finished, seen = heard(planned)
    assert capfd.readouterr() == ("", "")
    assert stored.state == "finished" and stored.path.parent == directory.home() and not finished
    assert names(stored.path) == FILES
    (run,) = stored.runs()
    assert run.algorithm == "folb" and len(run.test_accuracy) == 12
    assert seen[0][0] == 1 and sum(length for _, length in seen) == 12


def test_what_is_finished_is_returned_at_once(planned, whole, monkeypatch):
    before = {entry: entry.stat().st_mtime_ns for entry in whole.iterdir()}
    monkeypatch.setattr(execute, "ready", None)  # nothing can be run
    stored, finished, seen = heard(planned, directory=whole)
    assert finished and not seen and stored.runs()[0].final == directory.read(whole).runs()[0].final
    assert folb.resume(whole).path == whole
    assert {entry: entry.stat().st_mtime_ns for entry in whole.iterdir()} == before


def test_again_runs_it_from_the_start(planned, whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "run")
    (path / "results.json").write_text("{}")
    _, finished, seen = heard(planned, directory=path, again=True)
    assert not finished and seen[0][0] == 1 and sum(length for _, length in seen) == 12
    assert content(path) == content(whole)


def test_an_experiment_is_an_object_a_dict_or_a_file(whole, tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(Experiment(**FIELDS)))
    for given in (Experiment(**FIELDS), FIELDS, file, str(file)):
        assert folb.execute(given, directory=str(whole)).path == whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "experiment = 3: should be an Experiment, a dict of its fields, or the path of a file"),
        ("no such file", "experiment = 'no such file': no such file cannot be read"),
        ({}, "dataset = None: should name a dataset"),
        ({"dataset": "synthetic_1_1", "round": 3}, "key = 'round': did you mean 'rounds'"),
        ({"dataset": "synthetic_1_1", "set": 3}, "set = 3: should be a table"),
        ({**FIELDS, "rounds": 0}, "rounds = 0: should be at least 1"),
        ({**FIELDS, "algorithms": ["fold"]}, "algorithms = 'fold': did you mean 'folb'"),
    ],
)
def test_bad_input_is_an_input_error_and_leaves_nothing(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        folb.execute(given, directory=tmp_path / "run")
    assert names(tmp_path) == []


@pytest.mark.parametrize("option", [{"accelerators": 99}, {"track": "paper"}, {"stream": 3}, {"directory": ""}])
def test_bad_options_leave_nothing(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        folb.execute(FIELDS, **option)
    assert names(tmp_path) == [] or not any((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_it_runs_without_the_command_line(tmp_path):
    """Nothing of `folb.cli`, nor rich, is loaded by it."""
    code = (
        f"import sys, folb\nfolb.execute({FIELDS}, directory={str(tmp_path / 'run')!r})\n"
        "print([name for name in sys.modules if name == 'rich' or name.startswith('folb.cli')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""


# nothing is lost


def test_an_interrupted_run_is_resumed_to_the_same_bytes(planned, whole, often, tmp_path):
    by_execute, by_resume = tmp_path / "one", tmp_path / "other"
    for path in (by_execute, by_resume):
        interrupted(planned, path, KeyboardInterrupt())
        assert directory.read(path).state == "interrupted"
    assert heard(planned, directory=by_execute)[2][:2] == [(1, 5), (6, 1)]
    folb.resume(by_resume)
    for path in (by_execute, by_resume):
        assert content(path) == content(whole) and names(path) == FILES


def test_an_error_takes_away_no_round(planned, whole, often, tmp_path):
    """An InputError may come late, as from a disk that is full: what was recorded stays, and is resumed."""
    path = tmp_path / "run"
    for _ in ("at first", "while resumed"):
        interrupted(planned, path, InputError("out", "a disk", "has no space left"))
        assert len(directory.read(path).rounds()[0]) == 5
    assert heard(planned, directory=path)[2][:2] == [(1, 5), (6, 1)]
    assert content(path) == content(whole)


def test_a_directory_without_a_round_is_cleaned_up_after_bad_input(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(execute.Simulation, "run", lambda *_: (_ for _ in ()).throw(InputError("x", 1, "no")))
    with pytest.raises(InputError, match="x = 1"):
        execute.execute(planned, directory=tmp_path / "run")
    assert names(tmp_path) == []


def test_the_results_that_again_replaces_stay_until_the_new_ones_are_there(planned, whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(whole, path)

    def fails(*args):
        raise MemoryError

    for place, name, fault in ((execute.Simulation, "run", fails), (Plan, "about_models", property(fails))):
        with monkeypatch.context() as patch:  # before the first round: nothing has happened
            patch.setattr(place, name, fault)
            with pytest.raises(MemoryError):
                execute.execute(planned, directory=path, again=True)
        assert content(path) == content(whole)
    with pytest.raises(MemoryError):  # after some rounds: both are there
        execute.execute(planned, directory=path, again=True, observe=fails)
    assert content(path / "replaced") == content(whole) and (path / "rounds.jsonl").stat().st_size
    execute.execute(planned, directory=path)
    assert not (path / "replaced").exists()
    assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_the_rounds_of_an_unfinished_run_survive_an_again_that_fails(planned, whole, often, tmp_path, monkeypatch):
    path = tmp_path / "run"
    interrupted(planned, path, MemoryError())
    before = (path / "rounds.jsonl").read_bytes()
    with monkeypatch.context() as patch:  # before its first round
        patch.setattr(execute.Simulation, "run", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            execute.execute(planned, directory=path, again=True)
    assert (path / "rounds.jsonl").read_bytes() == before and not (path / "replaced").exists()
    assert heard(planned, directory=path)[2][0] == (1, 5)  # resumed from its checkpoint
    assert content(path) == content(whole)


@pytest.mark.parametrize("write", range(8))
def test_killed_while_a_run_is_set_aside(planned, whole, tmp_path, monkeypatch, write):
    """Wherever it was killed, the next command brings the finished run back; until then, the list says where it is."""
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    left, replace = write, os.replace

    def mortal(a, b):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return replace(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", mortal)
        patch.setattr(directory, "put_back", lambda path: None)  # nothing is done after a kill
        with pytest.raises(Killed):
            execute.execute(planned, directory=path, again=True)
    if write in range(1, 7):  # of the six moves and the new environment
        monkeypatch.setenv("FOLB_RUNS", str(tmp_path))
        assert not directory.is_run(path) and directory.listed() == [path]
        with pytest.raises(InputError, match=f"is in {path / 'replaced'}: .*folb resume {path} brings it back"):
            directory.read(path)
        assert folb.resume(path).state == "finished"
        assert content(path) == content(whole) and names(path) == FILES
    else:
        execute.execute(planned, directory=path)
        assert (path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


@pytest.mark.parametrize("write", range(8))
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_while_a_run_is_set_aside(planned, whole, tmp_path, write, error):
    """Not killed: the error brings back what was set aside, and deletes nothing of what was not yet."""
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    left, replace = write, os.replace

    def mortal(a, b):
        nonlocal left
        left -= 1
        if left == -1:
            raise error
        return replace(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", mortal)
        with pytest.raises(error):
            execute.execute(planned, directory=path, again=True)
    assert content(path) == content(whole) and names(path) == FILES


def test_a_damaged_run_survives_an_again_that_fails(planned, whole, tmp_path):
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    (path / "environment.json").write_text("{")

    def fails(start):
        raise InputError("x", 1, "no")

    with pytest.raises(InputError, match="x = 1"):
        execute.execute(planned, directory=path, again=True, on_start=fails)
    assert content(path) == content(whole)


def test_a_folder_of_that_name_in_another_directory_is_left_alone(planned, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "mine" / "replaced")
    (tmp_path / "mine" / "replaced" / "notes.txt").write_text("of somebody else")
    before = names(tmp_path / "mine" / "replaced")
    with pytest.raises(InputError, match=r"is not a run|has replaced"):
        folb.resume(tmp_path / "mine")
    with pytest.raises(InputError, match=r"has replaced, but is not a run of folb"):
        execute.execute(planned, directory=tmp_path / "mine")
    assert names(tmp_path / "mine" / "replaced") == before


def test_an_error_while_a_run_is_set_aside_brings_it_back(planned, whole, tmp_path, monkeypatch):
    """A full disk, for instance."""
    path = Path(shutil.copytree(whole, tmp_path / "run"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_environment", full)
        with pytest.raises(OSError, match="No space left"):
            execute.execute(planned, directory=path, again=True)
    assert content(path) == content(whole) and names(path) == FILES


def test_a_run_that_cannot_be_resumed_says_why_it_starts_again(planned, whole, often, tmp_path, caplog):
    path = tmp_path / "run"
    interrupted(planned, path, MemoryError())
    shutil.rmtree(path / "checkpoints")
    execute.execute(planned, directory=path)
    assert "starting again from the first round, because it has no checkpoint" in caplog.text
    assert content(path) == content(whole)


@pytest.mark.parametrize("again", [False, True])
def test_all_algorithms_are_checked_before_the_first_round_of_any(whole, tmp_path, again):
    (tmp_path / "own.py").write_text(BAD)
    path, seen = tmp_path / "run", []
    if again:  # an existing run is not replaced by one that cannot be run
        shutil.copytree(whole, path)
    bad = FIELDS | {"algorithms": ["folb", f"{tmp_path / 'own.py'}:bad"]}
    with pytest.raises(InputError, match="should be an update of the shapes of the model"):
        folb.execute(bad, directory=path, again=again, observe=lambda *part: seen.append(part))
    assert seen == []
    # Python may keep the compiled file beside it
    assert [name for name in names(tmp_path) if name != "__pycache__"] == (["own.py", "run"] if again else ["own.py"])
    assert not again or content(path) == content(whole)


class Killed(BaseException):
    """A process that ends here and now."""


def killed_before(patch, action):
    """A process that is killed just before it does what `action` names."""

    def die(*arguments, **options):
        raise Killed

    if action == "checkpoints":
        patch.setattr(
            shutil, "rmtree", lambda path, **_: die() if path.name == "checkpoints" and path.exists() else None
        )
    elif action == "picture":
        patch.setattr(figures, "curves", die)
    else:
        replace = os.replace
        patch.setattr(os, "replace", lambda a, b: die() if os.fspath(b).endswith(action) else replace(a, b))


@pytest.mark.parametrize("action", ["model.npz", "results.json", "picture", "curves.png", "checkpoints"])
def test_killed_between_the_last_writes(planned, whole, often, tmp_path, action):
    """What is missing comes with the next call, and no round is run again."""
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        killed_before(patch, action)
        with pytest.raises(Killed):
            execute.execute(planned, directory=path)
    assert (path / "checkpoints").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "advance", None)  # no round can be run
        seen = heard(planned, directory=path)[2]
    assert seen == ([] if action == "checkpoints" else [(1, 12)])  # those of the checkpoint
    assert content(path) == content(whole) and names(path) == FILES


def test_a_finished_run_without_its_picture_gets_it(planned, whole, tmp_path):
    """What older versions, which wrote the results first, left when killed: 32 MB of checkpoints stayed, too."""
    path = shutil.copytree(whole, tmp_path / "run")
    (path / "curves.png").unlink()
    (path / "checkpoints").mkdir()
    assert heard(planned, directory=path)[2] == []
    assert content(path) == content(whole) and names(path) == FILES


def test_one_process_at_a_time(planned, whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "run")
    with atomic.claimed(path), pytest.raises(InputError, match=f"is being run by process {os.getpid()}"):
        execute.execute(planned, directory=path, again=True)
    assert content(path) == content(whole)


def test_resume_says_what_it_cannot_resume(whole, tmp_path):
    with pytest.raises(InputError, match="there is no such run"):
        folb.resume("nothing")
    path = shutil.copytree(whole, tmp_path / "run")
    text = (path / "experiment.toml").read_text().replace("rounds = 12", "rounds = 13")
    (path / "experiment.toml").write_text(text)
    with pytest.raises(InputError, match="files have changed"):
        folb.resume(path)
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps(environment | {"carrier": "flower"}))
    with pytest.raises(InputError, match="is a run on Flower"):
        folb.resume(directory.read(path))
