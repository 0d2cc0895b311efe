"""What people call runs, and what programs are given: --name, --tags, `folb tag`, and --json."""

import json
import os

import pytest

import folb
from folb import InputError, atomic
from folb.cli import tables
from folb.cli.main import main
from folb.experiments.plan import plan
from folb.store import directory

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = [
    *("synthetic_1_1", "--algorithms", "fedavg", "--rounds", "2", "--seeds", "1"),
    *("--set", "sizes=20,30", "--set", "select.K=2", "--no-model"),
]
ODD = [
    "\x1b[31mred",
    "two\nlines",
    "bell\x07",
    "x" * 101,
    " space",
    "space ",
    "\u202eright to left",
    "\x9b31m",
    "nul\0",
    "half\ud800",
    "tab\there",
]


def said(capsys, *arguments):
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def document(capsys, *arguments):
    return json.loads(said(capsys, *arguments, "--json"))


def test_a_name_and_tags_are_recorded_shown_and_changed(capsys):
    said(capsys, "compare", *TINY, "--name", "[bold]first <try>", "--tags", "a, b,a")
    (path,) = directory.listed()
    assert directory.read(path).environment["name"] == "[bold]first <try>"
    assert "try" not in path.name, "it is no part of the path"
    for shown in (said(capsys, "runs"), said(capsys, "show", "last")):
        assert "[bold]first <try>" in shown and "a, b" in shown
    assert document(capsys, "runs")["runs"][0]["tags"] == ["a", "b"]
    # the same experiment is finished already; another name is only another name
    said(capsys, "compare", *TINY, "--name", "second")
    assert [one["name"] for one in document(capsys, "runs")["runs"]] == ["second"]
    said(capsys, "compare", *TINY, "--again")
    assert folb.read("last").given_name == "second" and folb.read("last").tags == ["a", "b"]
    assert "“third”" in said(capsys, "tag", "last", "--name", "third", "--tags", "")
    assert folb.read("last").given_name == "third" and folb.read("last").tags == []
    said(capsys, "tag", "last", "--name", "")
    assert not {"name", "tags"} & set(directory.read(path).environment)
    assert "tags" not in said(capsys, "runs")


def test_a_name_does_not_change_the_run(tmp_path, monkeypatch):
    fields = {
        "dataset": "synthetic_1_1",
        "algorithms": ["fedavg"],
        "rounds": 2,
        "seeds": 1,
        "set": {"sizes": [20, 30], "select.K": 2},
    }
    stored = folb.execute(fields, name="mine", tags=["x"], keep_model=False)
    assert stored.environment["identity"] == plan(folb.Experiment(**fields)).identity
    (stored.path / "results.json").unlink()
    assert folb.resume(stored).given_name == "mine"
    (stored.path / "results.json").unlink()
    assert folb.execute(fields, name="yours", keep_model=False).environment["name"] == "yours"
    with pytest.raises(InputError, match="tags = 'x': should be at most 20 tags"):
        folb.execute(fields, tags="x")


def test_a_tag_does_not_make_a_run_the_newest(capsys):
    said(capsys, "compare", *TINY)
    (path,) = directory.listed()
    os.utime(path, (1000, 1000))
    said(capsys, "tag", path.name, "--tags", "old")
    assert path.stat().st_mtime == 1000 and folb.read("last").tags == ["old"]
    with atomic.claimed(path):  # a process is running it
        assert main(["tag", path.name, "--tags", "new"]) == 2
    assert "is being run by process" in capsys.readouterr().err
    assert main(["tag", path.name]) == 2
    assert "should be given with --name or --tags" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [*(("--name", text) for text in ODD), *(("--tags", text) for text in ODD if "space" not in text)],
)
def test_odd_characters_are_refused_in_one_line(option, text, capsys):
    assert main(["compare", *TINY, option, text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "printable" in err
    assert not {"\x1b", "\x07", "\x9b", "\0", "\u202e"} & set(err)
    assert directory.listed() == []


def test_commas_and_many_tags_are_refused():
    for tags in (["a,b"], [str(n) for n in range(21)], [3], [""]):
        with pytest.raises(InputError, match="tags = "):
            folb.store.environment.checked_name(tags=tags)


def test_what_someone_wrote_into_the_file_reaches_no_terminal(capsys):
    said(capsys, "compare", *TINY)
    (path,) = directory.listed()
    environment = json.loads((path / "environment.json").read_text())
    for text in ODD[:9]:
        for given in ({"name": text}, {"tags": [text]}):
            (path / "environment.json").write_text(json.dumps(environment | given))
            shown = said(capsys, "runs")
            assert "unreadable" in shown and not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)


def test_the_time_has_a_zone(capsys):
    said(capsys, "compare", *TINY)
    assert "started, UTC" in said(capsys, "runs") and " UTC" in said(capsys, "show", "last")
    assert folb.read("last").started.endswith(" UTC")


def test_in_a_narrow_terminal_names_and_tags_stand_below_their_run(capsys, monkeypatch):
    said(capsys, "compare", *TINY, "--name", "the long one", "--tags", "paper,final")
    monkeypatch.setattr(tables, "console", lambda: tables.Output(width=80))
    heading, names, row, *below = said(capsys, "runs").splitlines()
    assert heading.split() == ["run", "state", "rounds", "best", "started,", "UTC"]
    assert names == "    name, tags, differs in" and "finished" in row
    assert below[0].startswith("    “the long one” (paper, final) ")


# what programs are given


def test_runs_and_show_as_json(capsys, tmp_path):
    said(capsys, "compare", *TINY)
    (one,) = document(capsys, "runs")["runs"]
    assert (one["state"], one["rounds_done"], one["rounds"], one["algorithms"]) == ("finished", 2, 2, ["fedavg"])
    shown = document(capsys, "show", "last")
    stored = json.loads((directory.listed()[0] / "results.json").read_text())
    assert shown["run"] == one["run"] and shown["environment"]["devices"] == 2 and shown["trouble"] == []
    assert shown["results"]["runs"][0]["final"] == pytest.approx(stored["runs"][0]["final"])
    (directory.listed()[0] / "environment.json").write_text("{")
    (broken,) = document(capsys, "runs")["runs"]
    assert broken["state"] == "unreadable" and "cannot be read" in broken["error"]


def test_no_runs_as_json(capsys):
    assert document(capsys, "runs") == {"runs": []}


def test_lists_as_json(capsys):
    whole = document(capsys, "list")
    assert set(whole) == {"algorithms", "datasets", "models", "systems", "common_settings"}
    only = document(capsys, "list", "cnn")
    assert list(only) == ["models"] and only["models"] == [one for one in whole["models"] if one["name"] == "cnn"]
    (init,) = (one for one in only["models"][0]["settings"] if one["name"] == "init")
    assert init["choices"] == ["glorot", "torch"] and init["default"] is None and "weights" in init["meaning"]
    assert "alie" in document(capsys, "list", "parts")["parts"]["attack"]
    assert main(["list", "nothing", "--json"]) == 2


def test_data_as_json(capsys):
    assert {"name": "mnist"}.items() <= document(capsys, "data", "list")["datasets"][3].items()
    info = document(capsys, "data", "info", "synthetic_1_1", "--set", "sizes=20,30")
    assert (info["devices"], info["training_samples"], info["test_samples"], info["shape"]) == (2, 45, 5, [60])
    assert [sum(row) for row in info["labels"]] == [20, 30]
