"""The report page: one HTML file that needs neither a network nor a server.

`page.html` is the frame. It gets the style, the scripts, and the data as JSON.
A content-security policy names style and script by their hashes: nothing else runs, whatever is in the data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

# each uses what comes before it
SCRIPTS = ("elements", "address", "downloads", "runs", "results", "curves", "device", "devices", "page")
INTERPRETED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})  # by HTML, also within JSON


def render(view: dict[str, Any], live: bool = False) -> str:
    """The page that shows a `folb.report.payload.view`. A live page may ask its own server for more."""
    parts = {
        "policy": policy(live),
        # a directory's name may hold bytes that are not text
        "title": escape(str(view["title"]).encode("utf-8", "replace").decode()),
        "style": _read("page.css"),
        "script": _script(),
        "view": json.dumps(view, allow_nan=False, separators=(",", ":")).translate(INTERPRETED),
    }
    # in one pass, so that inserted text is not searched again
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def policy(live: bool) -> str:
    """The content-security policy: this script, this style, pictures it made itself, and for a live page its server."""
    rules = ["default-src 'none'", f"script-src {_sha256(_script())}", f"style-src {_sha256(_read('page.css'))}"]
    rules.append("img-src blob:")  # to make a png of an svg
    return "; ".join([*rules, *(["connect-src 'self'"] if live else []), "base-uri 'none'", "form-action 'none'"])


def _script() -> str:
    return "\n".join(_read(f"{name}.js") for name in SCRIPTS)


def _sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    return files("folb.report.page").joinpath(name).read_text(encoding="utf-8")
