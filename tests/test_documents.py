"""The commands and the Python that the documents show: each parses, and what needs no data is planned or run."""

import re
import shlex
from pathlib import Path

import pytest

from folb.cli.main import EXAMPLES, parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(document, language=""):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.M | re.S)
    return [block for kind, block in found if kind == language]


def commands():
    """Every line that begins with folb: in blocks, in the help, in the examples' own words."""
    texts = [block for document in DOCUMENTS for block in blocks(document)]
    texts += [EXAMPLES, *(path.read_text() for path in (ROOT / "examples").glob("*.py"))]
    lines = [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if re.match(r"folb [a-z]+( |$)", line) and "=" not in line.split()[1]})


def test_there_are_commands():
    assert len(commands()) > 40


@pytest.mark.parametrize("command", commands())
def test_a_command_parses(command, monkeypatch):
    _, *words = shlex.split(command, comments=True)
    options = parser(words[:1] == ["tune"]).parse_args(words)
    if options.command != "compare" or not options.dataset.startswith("synthetic") or "devices=1000000" in command:
        return
    monkeypatch.chdir(ROOT)
    from folb.cli import compare
    from folb.experiments.plan import plan

    planned = []
    monkeypatch.setattr(compare, "_execute", lambda experiment, options: planned.append(plan(experiment)))
    options.handle(options)
    assert planned[0].algorithms


@pytest.mark.parametrize(
    ("call", "long", "short", "printed"),
    [
        ("folb.execute(", '"rounds": 50', '"rounds": 3', "synthetic_1_1-"),
        ("search(", "rounds=50", "rounds=3", "folb K="),
    ],
)
def test_the_examples_that_execute_and_search_run(call, long, short, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("README.md", "python") if call in block]
    assert long in code
    exec(compile(code.replace(long, short), "README.md", "exec"), {})
    assert printed in capsys.readouterr().out
