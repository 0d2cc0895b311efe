"""What helps to begin: `folb new`, and completion in a shell."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from folb.cli import completion, new_files
from folb.cli.main import main, parser
from folb.core.algorithms import ALGORITHMS
from folb.data import DATASETS

pytestmark = pytest.mark.usefixtures("undrawn")


def started(capsys, kind, home):
    """The files that `folb new` writes, and the commands that it prints."""
    assert main(["new", kind, str(home)]) == 0
    files, _, commands = capsys.readouterr().out.partition("\ntry it:\n")
    return files.splitlines(), [line.strip() for line in commands.splitlines()]


def test_a_new_algorithm_runs_as_printed(capsys, tmp_path):
    home = tmp_path / "a b" / "mine"
    files, (command,) = started(capsys, "algorithm", home)
    assert files == [str(home / "my_rule.py")]
    assert "folb,my_rule.py:softmax" in (home / "my_rule.py").read_text()  # and not the example's path
    _, *words = shlex.split(command)
    assert main([*words, "--rounds", "2", "--seeds", "1", "--set", "sizes=20,30", "--set", "select.K=2"]) == 0
    assert "softmax" in capsys.readouterr().out


def test_a_new_dataset_runs_as_printed(capsys, tmp_path):
    files, (make, command) = started(capsys, "dataset", tmp_path / "it's")
    assert files == [str(tmp_path / "it's" / "my_data.py")]
    subprocess.run([sys.executable, *shlex.split(make)[1:]], check=True)
    _, *words = shlex.split(command)
    assert main([*words, "--rounds", "1", "--seeds", "1"]) == 0
    assert "held out" not in capsys.readouterr().err
    assert main(["data", "info", words[1]]) == 0
    assert "broken, sound" in capsys.readouterr().out


def test_a_new_flower_app_is_the_example(capsys, tmp_path):
    files, (install, command) = started(capsys, "flower", tmp_path / "app")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (flower,) = project["optional-dependencies"]["flower"]
    assert shlex.split(install) == ["pip", "install", flower.replace("flwr", "flwr[simulation]")]  # it has ray
    assert command.startswith(f"flwr run {tmp_path / 'app'} local --stream")
    names = sorted(os.listdir(tmp_path / "app"))
    assert names == ["device.py", "pyproject.toml", "server.py"] and len(files) == 3
    for name in names:
        assert (tmp_path / "app" / name).read_bytes() == (new_files.APP / name).read_bytes()
        assert not name.endswith(".py") or ast.parse((tmp_path / "app" / name).read_text())


@pytest.mark.parametrize("kind", new_files.KINDS)
def test_nothing_is_overwritten(kind, capsys, tmp_path):
    last = new_files.KINDS[kind].files[-1].name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / last).symlink_to("nowhere")
    assert main(["new", kind, str(tmp_path / "mine")]) == 2
    assert f"has {last} already; choose another directory" in capsys.readouterr().err
    assert os.listdir(tmp_path / "mine") == [last] and not (tmp_path / "mine" / "nowhere").exists()


@pytest.mark.parametrize("home", ["", "a,b", "\x1b[31m", "two\nlines", "file/within"])
def test_directories_that_cannot_be(home, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert main(["new", "algorithm", home]) == 2
    err = capsys.readouterr().err
    assert err.startswith("folb: error: directory = ") and err.count("\n") == 1 and "\x1b" not in err
    assert os.listdir(tmp_path) == ["file"]


# completion


@pytest.fixture(scope="module")
def scripts():
    commands = completion.table(parser(tuning=True), completion._names())
    values = completion._values()
    made = {
        "bash": completion.bash(commands, values),
        "zsh": completion.zsh(commands, values),
        "fish": completion.fish(commands),
    }
    return {shell: "\n".join(lines) for shell, lines in made.items()}


def completed(script, *words, **env):
    """What bash proposes for the last of these words."""
    given = " ".join(map(shlex.quote, ["folb", *words]))
    code = f"{script}\nCOMP_WORDS=({given}) COMP_CWORD={len(words)}\n_folb\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=os.environ | env, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], ["compare", "completion"]),
        (["data", ""], ["list", "info", "fetch", "path"]),
        (["compare", "mni"], ["mnist"]),
        (["compare", "mnist", "--algorithms", "folb_t"], ["folb_two_set"]),
        (["compare", "mnist", "--algorithms", "fedavg,acc"], ["fedavg,accord"]),
        (["compare", "mnist", "--model", "c"], ["cnn", "char_lstm"]),
        (["tune", "--algorithm", "accor"], ["accord"]),
        (["tune", "mnist", "--step_size.ga"], ["--step_size.gain"]),
        (["tune", "mnist", "--server", "lo"], ["lookahead"]),
        (["compare", "mnist", "--set", "server.st"], ["server.stretch="]),
        (["compare", "mnist", "--set", "parti"], ["partition="]),
        (["compare", "mnist", "--set", "server", "=", "ad"], ["adagrad", "adam"]),  # as bash splits it
        (
            ["compare", "mnist", "--set", "server", "="],
            ["plain", "momentum", "nesterov", "lookahead", "adagrad", "adam", "yogi", "fedexp", "fedexprox"],
        ),
        (
            ["compare", "mnist", "--set", "fedavg.server=yogi,ad"],
            ["fedavg.server=yogi,adagrad", "fedavg.server=yogi,adam"],
        ),
        (["compare", "mnist", "--set", "robust", "=", "none,kr"], ["none,krum"]),
        (["compare", "mnist", "--set", "local.lr", "=", ""], []),
        (["tune", "mnist", "--box", "local.un"], ["local.unit="]),
        (["data", "info", "mnist", "--set", "server.st"], []),
        (["list", "serv"], ["server"]),
        (["compare", "mnist", "--no-m"], ["--no-model"]),
        (["export", "last", "--format", "p"], ["parquet"]),
        (["data", "info", "shak"], ["shakespeare"]),
        (["list", "scaf"], ["scaffold"]),
        (["new", "fl"], ["flower"]),
        (["compare", "mnist", "--rounds", ""], []),  # nothing can be proposed; bash then proposes files
        (["nothing", ""], []),
    ],
)
def test_bash_completes(scripts, words, expected):
    assert completed(scripts["bash"], *words) == expected


def test_bash_completes_everything_there_is(scripts):
    assert set(completed(scripts["bash"], "compare", "x", "--algorithms", "")) == set(ALGORITHMS)
    assert set(completed(scripts["bash"], "compare", "")) == set(DATASETS)


def test_runs_are_completed_and_nothing_in_their_names_is_executed(scripts, tmp_path):
    for name in ("mnist-1", "mnist-2", "$(touch hurt)", "`touch hurt`", "two words", "no run", "mnist-3;touch hurt"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "no run":
            (tmp_path / "runs" / name / "environment.json").touch()
    before = sorted(os.listdir(tmp_path))
    script = f"cd {shlex.quote(str(tmp_path))}\n{scripts['bash']}"
    assert completed(script, "show", "", FOLB_RUNS="") == ["last", "mnist-1", "mnist-2"]
    assert completed(script, "resume", "mni", FOLB_RUNS=str(tmp_path / "runs")) == ["mnist-1", "mnist-2"]
    assert completed(script, "show", "", FOLB_RUNS=str(tmp_path / "none")) == ["last"]
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_can_read(shell, scripts, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell])
    subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_the_script_for_fish_has_every_command_and_option(scripts):
    lines = scripts["fish"].splitlines()
    for path, command in completion.table(parser(tuning=True), {}).items():
        seen = [line for line in lines if all(f"from {word}" in line for word in path.split(" ") if word)]
        for option in command.options:
            kind, name = ("-l", option[2:]) if option.startswith("--") else ("-s", option[1:])
            assert any(re.search(rf" {kind} {re.escape(name)}( |$)", line) for line in seen), (path, option)
    assert all(line.count("'") % 2 == 0 or "\\'" in line for line in lines)


def test_completion_is_printed(capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("complete -o default -F _folb folb")
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
