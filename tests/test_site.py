"""The site builds without a warning and asks no other host for anything; the notebook runs in a real kernel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# what a browser loads by itself; a link that a reader may follow is not among them
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b[^>]*\shref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)"""
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site needs requirements-docs.txt: make test-docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_nothing_comes_from_another_host(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 60
    loaded = {path.name: LOADED.findall(path.read_text()) for path in pages}
    assert not {name: addresses for name, addresses in loaded.items() if addresses}


def test_what_would_come_from_another_host_is_found():
    for text in (
        '<script src="https://a.b/c.js">',
        '<link rel=stylesheet href="//a.b/c.css">',
        "@import 'https://a.b'",
        "url(https://a.b/c.woff2)",
        '<img alt="x" src=http://a.b/c.png>',
    ):
        assert LOADED.findall(text), text
    assert not LOADED.findall('<a href="https://flower.ai">Flower</a>')


def test_every_page_has_its_content(site):
    front = (site / "index.html").read_text()
    assert "make demo" in front and "curves.svg" in front
    assert "&lt;grad F_k, g&gt;" in (site / "concepts/folb.html").read_text()  # not taken for HTML
    reference = (site / "api/runs.html").read_text()
    assert "simulate" in reference and "seeds" in reference
    assert "figure.savefig" in (site / "notebooks/figure.html").read_text().replace("</span>", "").replace(
        '<span class="n">', ""
    ).replace('<span class="o">', "")
    assert (site / "source/examples/my_rule.py.html").is_file()


def test_the_notebook_runs_in_a_kernel(tmp_path):
    pytest.importorskip("nbclient", reason="a kernel needs requirements-docs.txt: make test-docs")
    shutil.copy(ROOT / "docs/notebooks/figure.ipynb", tmp_path)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "figure.ipynb", "--timeout=600"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
