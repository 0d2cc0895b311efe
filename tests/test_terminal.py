"""What commands print in terminals of 80, 100 and 120 columns, compared with the files of tests/golden.

FOLB_GOLDEN=write python -m pytest -n0 tests/test_terminal.py   # writes them again: then read the difference
"""

import argparse
import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import rundirectory

from folb import atomic
from folb.cli import main, tables
from folb.data import source_files
from folb.experiments import execute
from folb.store import environment
from folb.store.environment import about_runs
from folb.store.round_lines import as_run
from folb_studies import arena_command, reproduce_command

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 100, 120)
DIFFERS = "algorithms=folb,fedavg rounds=40 seeds=3 system=network local.mu=0.001,0.01,0.1 compress_up=int8"
LONG = "fedprox rule.weights=samples memory=scaffold"

pytestmark = pytest.mark.usefixtures("undrawn")


class Played:
    """A simulation whose results are made up: nothing is compiled."""

    costs = (1.0,)
    first_look = staticmethod(lambda: None)

    def __init__(self, planned, accelerators=1):
        self.planned = planned

    def run(self, observers, checkpoints, when_all_play):
        abouts = about_runs(self.planned.algorithms, self.planned.experiment.seeds)
        runs = [as_run(about, list(self.lines(i))) for i, about in enumerate(abouts)]
        for observe in observers:
            observe(1, dict(enumerate(runs)))
        return runs

    def lines(self, i):
        experiment = self.planned.experiment
        for t in range(1, experiment.rounds + 1):
            line = {"round": t, "bytes_up": 48800, "bytes_down": 24400, "seconds": 20.5, "updated": True, "lost": 0}
            if t % experiment.evaluate_every == 0:
                rise = 1 - math.exp(-t / (5 + i % 7))
                line |= {"test_accuracy": (0.9 - 0.03 * (i % 5)) * rise, "train_loss": 2.5 - 2 * rise}
            yield line | {"attack": [0.1 + 0.01 * (i % 9), 0.25, 0.05 * (i % 4)]}


def unequal():
    """An interrupted run: a long label, and fewer rounds of one algorithm than of the other."""
    path = rundirectory.write(
        Path("runs"), algorithms=("folb", LONG), seeds=2, done=12, finished=False, differs=DIFFERS
    )
    rows = [json.loads(row) for row in (path / "rounds.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["algorithm"] == "folb" or row["round"] <= 8 + row["seed"]]
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def standings():
    datasets = [SimpleNamespace(name=name) for name in ("synthetic-plain", "mnist-shards", "femnist", "shakespeare")]
    contenders = [SimpleNamespace(name=name) for name in ("fedavg", "folb_hetero", "fedavg + momentum, tuned by hand")]
    ranks = SimpleNamespace(
        datasets=datasets, contenders=contenders, held=lambda dataset, one: f"{len(one.name)} (9 to never)"
    )
    tables.show_in_parts(arena_command._rounds_to_target(ranks))


def verdicts():
    claim = SimpleNamespace(says="FOLB needs fewer rounds to 70 % than FedProx on the datasets of the table")
    verdict = SimpleNamespace(claim=claim, text="not reproduced", effect="0.87 [0.62, 1.21]")
    pages = [
        SimpleNamespace(figure=SimpleNamespace(name=name), verdicts=[verdict]) for name in ("table1", "niid_bench")
    ]
    tables.show(reproduce_command._verdicts(pages))


SMALL = ["synthetic_1_1", "--set", "devices=12", "--rounds", "40", "--seeds", "3"]
SHOWN = {
    "folb compare": ["compare", *SMALL, "--target", "0.75"],
    "folb tune": ["tune", *SMALL, "--algorithm", "folb_hetero", "--local.mu", "0.01,0.1", "--rule.psi", "1,10"],
    "folb attack": ["attack", *SMALL, "--algorithms", "fedavg,folb", "--rules", "none,geometric_median"],
    "folb runs": ["runs"],
    "folb show": ["show", "synthetic_1_1-0123abcd"],
    "folb data list": ["data", "list"],
    "folb data info": ["data", "info", "synthetic_1_1"],
    "folb arena": standings,
    "folb reproduce": verdicts,
    "folb list": ["list"],
    "folb list algorithms": ["list", "algorithms"],
    "folb list parts": ["list", "parts"],
    "folb list folb": ["list", "folb"],
    "folb list server": ["list", "server"],
}


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """Runs and data of its own, at paths that are the same on every machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLB_RUNS", "runs")
    monkeypatch.setattr(source_files, "directory", lambda: Path("data"))
    for module in (atomic, environment):
        monkeypatch.setattr(module, "now", lambda: "2026-01-02T03:04:05+00:00")
    monkeypatch.setattr(execute, "ready", Played)


def printed(what, width, monkeypatch, capsys):
    """What a command prints, with fixed words for digests and versions; as many characters, so that lines stay."""
    monkeypatch.setattr(tables, "console", lambda: tables.Output(width=width))
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    if callable(what):
        what()
    else:
        try:
            assert main.main(what) == 0
        except SystemExit as ended:  # after the help
            assert ended.code == 0
    lines = re.sub(r"-[0-9a-f]{8}\b", "-0123abcd", capsys.readouterr().out).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def assert_golden(name, shown):
    path = GOLDEN / name
    if os.environ.get("FOLB_GOLDEN") == "write":
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"{path} differs; FOLB_GOLDEN=write writes it again"


def in_sections(parts):
    return "".join(f"$ {title}\n{text.rstrip()}\n\n" for title, text in parts.items())


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_and_lists(width, terminal, monkeypatch, capsys):
    unequal()
    parts = {}
    for title, what in SHOWN.items():
        parts[title] = printed(what, width, monkeypatch, capsys)
    for title, text in parts.items():
        assert max(map(len, text.splitlines())) <= width, title
    assert_golden(f"terminal-{width}.txt", in_sections(parts))


def parsers(parser):
    """A parser and those of its commands, by the words that call them."""
    inner = [
        one
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for one in action.choices.values()
    ]
    return {parser.prog: parser} | {name: one for own in inner for name, one in parsers(own).items()}


@pytest.mark.parametrize("width", WIDTHS)
def test_help_breaks_no_word(width, monkeypatch, capsys):
    parts, known = {}, parsers(main.parser(tuning=True))
    for name in known:
        shown = parts[f"{name} --help"] = printed([*name.split()[1:], "--help"], width, monkeypatch, capsys)
        assert max(map(len, shown.splitlines())) <= width, name
    for name, parser in known.items():
        words = set(re.sub(r"[\[\]|]", " ", parts[f"{name} --help"]).split())
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:  # the settings, which are options of `folb tune`
                continue
            expected = {word for word in (action.help or "").replace("%%", "%").split() if "%(" not in word}
            assert expected <= set(parts[f"{name} --help"].split()), name
            assert set(action.option_strings) <= {word.rstrip(",") for word in words}, name
    for name in ("compare", "run", "tune"):
        assert 24 <= len(parts[f"folb {name} --help"].splitlines()) <= 50
    if sys.version_info < (3, 13):  # which lays out options otherwise
        assert_golden(f"help-{width}.txt", in_sections(parts))


@pytest.mark.parametrize("width", [80, 120])
def test_a_real_terminal_shows_the_same(width, terminal, monkeypatch, capsys):
    """A terminal tells its width; nothing else does."""
    unequal()
    expected = printed(["runs"], width, monkeypatch, capsys)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, width))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "folb", "runs"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment | {"TERM": "xterm"}) as running:
        os.close(theirs)
        content = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while more := os.read(ours, 65536):
                content += more
    os.close(ours)
    assert running.returncode == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", content.decode()).replace("\r\n", "\n")
    assert [line.rstrip() for line in shown.splitlines()] == expected.splitlines()


def test_the_result_stays_though_it_is_the_same_in_every_row():
    table = tables.Table("algorithm", "rounds to 70 %", "final accuracy", "MB up")
    for name, mb in (("folb", "320.61"), ("fedavg", "160.30")):
        table.add_row(name, "never", "17.7 %", mb)
    shown, same = tables.varying(table, 40)
    assert [column.header for column in shown.columns] == ["algorithm", "final accuracy", "MB up"]
    assert same == ["rounds to 70 %: never"]


def test_a_setting_of_an_algorithm_is_listed_once(capsys):
    """With the default that this algorithm has."""
    assert main.main(["list", "accord"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [words[0] for words in lines if words[1:2] == ["="]]
    assert {"local.lr", "server.beta", "select.K"} <= set(names) and len(names) == len(set(names))
    assert [words[2] for words in lines if words[:2] == ["local.lr", "="]] == ["0.04"]
