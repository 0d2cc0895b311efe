"""The documents: their links, and the commands and the Python that they show. What needs no data is planned or run."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from folb.cli.main import EXAMPLES, parser
from folb.core.algorithms import ALGORITHMS
from folb_studies.arena import entries

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/flower/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def script(name):
    """A file of scripts/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


typist = script("type_the_docs")


def blocks(document, language=""):
    return [block for kind, block in typist.blocks((ROOT / document).read_text()) if kind == language]


def commands():
    """Every line that begins with folb: in blocks, in the help, in the examples' own words."""
    texts = [block for document in DOCUMENTS for block in blocks(document)]
    texts += [EXAMPLES, *(path.read_text() for path in (ROOT / "examples").glob("*.py"))]
    lines = [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if re.match(r"folb [a-z]+( |$)", line) and "=" not in line.split()[1]})


def test_there_are_commands():
    assert len(commands()) > 60


def test_readme_is_short_and_opens_with_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [line.split("#")[0].strip() for line in lines[3:5]] == ["make demo", "make test"]
    assert blocks("README.md", "python")[0] in (ROOT / "examples/ten_lines.py").read_text()


def test_the_algorithms_that_draw_with_replacement_are_those_of_the_page():
    """Unlike in most of their papers; and the arena draws without for everyone."""
    without = {name for name, make in ALGORITHMS.items() if not make().selection.replacement}
    assert (
        f"All but {', '.join(f'`{name}`' for name in sorted(without))} draw devices with replacement by default"
        in (ROOT / "docs/algorithms.md").read_text()
    )
    assert all(dataset.set["select.replacement"] is False for dataset in entries.datasets())


def headings(text):
    """The anchors of a document, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    home = (ROOT / document).parent
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S))
    for target, anchor in LINK.findall(text):
        path = (home / target) if target else ROOT / document
        assert path.exists(), target
        if anchor:
            assert anchor in headings(path.read_text()), f"{target}#{anchor}"


def test_every_page_is_on_the_site():
    def unfolded(nav):
        return [
            one
            for part in nav
            for value in part.values()
            for one in (unfolded(value) if isinstance(value, list) else [value])
        ]

    shown = set(unfolded(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    for folder in ("", "concepts", "guides", "api"):
        for path in (ROOT / "docs" / folder).glob("*.md"):
            place = path.relative_to(ROOT / "docs").as_posix()
            assert place in shown, f"mkdocs.yml: {place} needs a line under nav"


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


@pytest.mark.parametrize("document", [name for name in typist.DOCUMENTS if blocks(name, "python")])
def test_python_runs(document, tmp_path, monkeypatch, capsys):
    """Each block by itself, with few rounds; a part of a Flower app is only compiled."""
    monkeypatch.chdir(tmp_path)
    for code in blocks(document, "python"):
        ready = compile(typist.shortened(code), document, "exec")
        if "grid=grid" not in code:
            exec(ready, {})
            printed = capsys.readouterr().out
            assert printed or "print(" not in code


def test_the_notebook_draws_its_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs/notebooks/figure.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "ROUNDS = 60" in code and all(not cell.get("outputs") for cell in cells)
    exec(compile(code.replace("ROUNDS = 60", "ROUNDS = 3").replace("seeds=5", "seeds=2"), "figure.ipynb", "exec"), {})
    assert "FOLB" in capsys.readouterr().out
    assert Path("figure.pdf").read_bytes().startswith(b"%PDF") and "<svg" in Path("figure.svg").read_text()


@pytest.mark.parametrize(
    ("written", "typed"),
    [
        ("folb compare synthetic_1_1", "folb compare synthetic_1_1 --rounds 5 --seeds 1"),
        (
            "folb compare mine.npz --rounds 30 --set local.lr=0.1",
            "folb compare mine.npz --rounds 5 --set local.lr=0.1 --seeds 1",
        ),
        ("folb report RUN RUN --figures", "folb report last --figures"),
        ("folb list scaffold", "folb list scaffold"),
    ],
)
def test_commands_are_shortened_by_rules(written, typed):
    assert typist.commands(f"{written}    # why\n") == [written]
    assert typist.shortened(written) == typed


def test_what_is_not_typed_has_a_reason():
    assert "hours" in typist.reason_to_leave_out("folb arena", None)
    assert not typist.reason_to_leave_out("folb arena --pages-only --results studies/results/arena.jsonl.gz", None)
    assert "hours" in typist.reason_to_leave_out("folb compare shakespeare --evaluate all", None)
    assert "FOLB_DATA" in typist.reason_to_leave_out("folb compare shakespeare --quick", None)
    assert "FOLB_DATA" in typist.reason_to_leave_out("folb compare mnist", None)
    assert not typist.reason_to_leave_out("folb compare synthetic_1_1", None)
