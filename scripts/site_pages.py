"""What the site has besides docs/: README, other Markdown files, the examples that pages link to, and the notebooks.

MkDocs calls the functions whose names begin with `on_`. On the site, README is the front page, and a link to a file
outside docs/ leads to a page that shows this file. So the same Markdown files are right in the repository and on the
site.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
KINDS = {".py": "python", ".toml": "toml", ".ipynb": "json"}


class PlainText(Extension):
    """No raw HTML: <grad f, grad F_k> in a text is an inner product."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(PlainText())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ that a page links to, and for each notebook."""
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        place = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=notebook_text(notebook)))
    known = {}
    waiting = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known[path] = path
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, site_place(path), content=shown(path)))
        if path.suffix == ".md":
            waiting += [target for target in linked(path) if not target.is_relative_to(ROOT / "docs")]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that are right in the repository into links that are right on the site."""
    source = repository_place(page.file.src_uri)
    if source is None:
        return markdown
    here = Path(page.file.src_uri).parent

    def turned(match: re.Match[str]) -> str:
        target = resolved(source, match[1])
        return Path(os.path.relpath(site_place(target), here)).as_posix()

    return LINK.sub(turned, markdown)


def site_place(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(ROOT / "docs"):
        own = path.relative_to(ROOT / "docs")
        return own.with_suffix(".md").as_posix() if own.suffix == ".ipynb" else own.as_posix()
    own = path.relative_to(ROOT)
    if path.suffix == ".md":
        return own.as_posix().lower().replace("/readme.md", ".md")
    return f"source/{own.as_posix()}.md"


def repository_place(uri: str) -> Path | None:
    """The Markdown file that a page of the site comes from; None if it was made from something else."""
    if (path := ROOT / "docs" / uri).is_file():
        return path
    outside = [ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return next((path for path in outside if site_place(path) == uri), None)


def linked(path: Path) -> list[Path]:
    """The files and directories of the repository that a Markdown file links to."""
    return [resolved(path, target) for target in LINK.findall(without_code(path.read_text()))]


def resolved(source: Path, target: str) -> Path:
    """The file that a link leads to: for a directory with a README, this README."""
    path = Path(os.path.normpath(source.parent / target))
    return path / "README.md" if (path / "README.md").is_file() else path


def without_code(text: str) -> str:
    """A text without its blocks of code and without code between backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def shown(path: Path) -> str:
    """A Markdown file as it is; any other as a block of code; a directory as a block for each file."""
    if path.suffix == ".md":
        return path.read_text()
    if path.is_file():
        return f"# {path.name}\n\n{block(path)}"
    inside = [file for file in sorted(path.rglob("*")) if file.suffix in KINDS and "__pycache__" not in file.parts]
    return f"# {path.relative_to(ROOT)}\n\n" + "\n".join(
        f"## {file.relative_to(path).as_posix()}\n\n{block(file)}" for file in inside
    )


def block(path: Path) -> str:
    return f"````{KINDS.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def notebook_text(path: Path) -> str:
    """The cells of a notebook, without their results."""
    cells = json.loads(path.read_text())["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts) + "\n"
