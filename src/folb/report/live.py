"""`folb watch`: the report page of runs, live, for this machine only.

The page of a run asks for news every 0.4 s, the list of runs every 2 s. With a cursor a page says how much it has. The
cursor is checked against the file, so neither the server nor the run needs to remember who is watching, and either may
stop and start again. If the file is no longer the one that the page has seen, it is sent again from its beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import numpy as np

from folb.errors import InputError
from folb.report import page
from folb.report.payload import columns, described, measures, table
from folb.results.run import Run
from folb.store import directory
from folb.store.directory import RunDirectory
from folb.store.round_lines import as_runs

PORT = 8470
ADDRESS = "127.0.0.1"
PIECE = 2_000_000  # bytes of rounds.jsonl in one answer: about 8,000 rounds
TAIL = 4096  # bytes before a cursor that must be unchanged


def serve(name: str | None = None, port: int = PORT, *, announce: Callable[[str], object]) -> None:
    """Serve the page of one run, or of all runs, until Ctrl-C. `announce` gets its address."""
    with bound(name, port) as server, contextlib.suppress(KeyboardInterrupt):
        announce(f"http://{ADDRESS}:{server.server_port}/ shows {name or 'all runs'}; Ctrl-C ends it")
        server.serve_forever()


def bound(name: str | None, port: int) -> Server:
    only = None if name is None else directory.find(name)
    try:
        return Server(only, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError("port", port, f"should be a free port, or 0 for any: {reason}") from error


class Server(ThreadingHTTPServer):
    """The shown runs, and how far each has been read."""

    daemon_threads = True

    def __init__(self, only: Path | None, port: int) -> None:
        self.only = only
        self.following = cache(Following)  # one for each path
        super().__init__((ADDRESS, port), Handler)
        self.hosts = {f"{host}:{self.server_port}" for host in (ADDRESS, "localhost", "[::1]")}

    def runs(self) -> dict[str, Path]:
        """The run directories by name. A request can reach no other place."""
        with contextlib.suppress(InputError):  # FOLB_RUNS may be missing for a moment
            paths = directory.listed() if self.only is None else [self.only]
            return {Path(os.path.realpath(path)).name: path for path in paths}
        return {}

    def entries(self, runs: dict[str, Path]) -> list[dict[str, str]]:
        """What the list shows of each run. A run that cannot be read does not hide the others."""
        return [_entry(name, path, self.following(path)) for name, path in runs.items()]

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore a page that is closed during its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for `/`, `/list`, `/run/NAME` and `/data/NAME`, if the request names this server."""

    server: Server
    server_version, sys_version = "folb", ""
    timeout = 30
    error_content_type, error_message_format = "text/plain; charset=utf-8", "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        # a page of another site could only reach this server under another name of the machine
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return self.send_error(HTTPStatus.FORBIDDEN)
        path, _, query = self.path.partition("?")
        kind, _, rest = path.removeprefix("/").partition("/")
        name, runs = os.fsdecode(unquote_to_bytes(rest)), self.server.runs()
        home = "/" if self.server.only is None else ""
        if path == "/" and not home:
            return self.answer("text/plain", "", HTTPStatus.FOUND, Location=_address("run", next(iter(runs))))
        if path == "/":
            return self.html({"title": "Runs", "list": self.server.entries(runs)})
        if path == "/list" and home:
            return self.answer("application/json", json.dumps(self.server.entries(runs)))
        if kind == "run" and name in runs:
            return self.html({"title": name, "live": _address("data", name), "home": home})
        if kind == "data" and name in runs:
            asked = dict(parse_qsl(query))
            try:
                news = self.server.following(runs[name]).news(asked.get("after", ""), asked.get("records", ""))
            except InputError as error:  # the directory is damaged, being made or removed
                return self.answer("text/plain; charset=utf-8", f"{error}\n", HTTPStatus.NOT_FOUND)
            return self.answer("application/json", json.dumps(news, allow_nan=False))
        return self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815

    def html(self, view: dict[str, Any]) -> None:
        self.answer("text/html; charset=utf-8", page.render(view, live=True))

    def answer(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        content = text.encode(errors="backslashreplace")  # a path may hold any bytes
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def end_headers(self) -> None:
        """Every answer, also an error, tells the browser what it may do with it."""
        self.send_header("Content-Security-Policy", f"{page.policy(live=True)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the terminal stays quiet."""


def _address(kind: str, name: str) -> str:
    return f"/{kind}/{quote(os.fsencode(name), safe='')}"


def _entry(name: str, path: Path, following: Following) -> dict[str, str]:
    entry = {"name": name, "href": _address("run", name), "state": "cannot be read"}
    entry |= dict.fromkeys(("title", "progress", "differs", "started", "called", "tags"), "")
    with contextlib.suppress(InputError):
        stored = directory.read(path)
        about = described(stored)
        if about["state"] == "running":  # the rounds of all other runs together may be too much to read
            entry["progress"] = following.progress(stored)
        entry |= {key: about[key] for key in ("title", "state", "differs")} | {"started": f"{stored.started[:16]} UTC"}
        entry |= {"called": stored.given_name, "tags": ", ".join(stored.tags)}
    return entry


class Following:
    """Reads the new rounds of a directory, a long run piece by piece: a request does not cost more as the run grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.cursor = ""
        self.runs: list[Run] = []  # without the values of devices
        self.table: dict[str, Any] = {}

    def news(self, after: str, records: str) -> dict[str, Any]:
        """What came after a cursor; with the values of devices only for the run numbered `records`."""
        stored = directory.read(self.path)
        offset = _offset(stored, after)
        lines, end = stored.rounds(offset or 0, PIECE)
        wanted = {i for i in range(len(stored.environment["runs"])) if str(i) == records}
        with self.lock:
            self.advance(stored)
            about = described(stored) | {"table": self.table, "measures": measures(stored, self.runs)}
        # a metric that was not announced changes the identity, so that the page is built again
        about["identity"] += "".join(f" {known['name']}" for known in about["measures"])
        return {
            "cursor": _cursor(stored, end),
            "fresh": offset is None,
            "more": bool(lines) and b"\n" in stored.recorded(end, PIECE),
            "about": about,
            "columns": columns(stored, lines, wanted),
        }

    def progress(self, stored: RunDirectory) -> str:
        """How many of all rounds are done, as far as they have been read."""
        with self.lock:
            self.advance(stored)
            done = sum(len(run.seconds) for run in self.runs)
        return f"{done:,} of {len(self.runs) * stored.experiment['rounds']:,} rounds"

    def advance(self, stored: RunDirectory) -> None:
        about_runs = stored.environment["runs"]
        offset = _offset(stored, self.cursor) if len(self.runs) == len(about_runs) else None
        lines, end = stored.rounds(offset or 0, PIECE)
        if lines or offset is None:
            figures = ({key: value for key, value in line.items() if not isinstance(value, list)} for line in lines)
            later = as_runs(about_runs, figures)
            self.runs = later if offset is None else list(map(joined, self.runs, later))
            self.table = table(stored, self.runs)
        self.cursor = _cursor(stored, end)


def joined(run: Run, later: Run) -> Run:
    arrays = [field.name for field in fields(Run) if isinstance(getattr(run, field.name), np.ndarray)]
    both: dict[str, Any] = {name: np.concatenate([getattr(run, name), getattr(later, name)]) for name in arrays}
    both["metrics"] = _joined([(one.metrics, len(one.evaluated_rounds)) for one in (run, later)])
    both["records"] = _joined([(one.records, len(one.seconds)) for one in (run, later)])
    measured = later.loss_measured if len(later.evaluated_rounds) else run.loss_measured
    return replace(run, **both, loss_measured=measured)


def _joined(parts: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Values by name, part after part. A part has a number of values; without the name, they are all NaN."""
    names = dict.fromkeys(name for values, _ in parts for name in values)
    return {
        name: np.concatenate([values.get(name, np.full(length, np.nan, np.float32)) for values, length in parts])
        for name in names
    }


def _cursor(stored: RunDirectory, offset: int) -> str:
    """A place in rounds.jsonl, with a digest of the bytes before it; empty if the file was cut back since."""
    tail = stored.recorded(max(0, offset - TAIL), min(offset, TAIL))
    if len(tail) < min(offset, TAIL):
        return ""
    known = f"{stored.environment['identity']} {stored.environment['started']} {offset} ".encode() + tail
    return f"{offset}-{hashlib.blake2b(known, digest_size=8).hexdigest()}"


def _offset(stored: RunDirectory, cursor: str) -> int | None:
    """The place of a cursor, if the bytes before it are unchanged."""
    place = re.fullmatch(r"(\d{1,18})-[0-9a-f]{16}", cursor)
    return int(place[1]) if place and _cursor(stored, int(place[1])) == cursor else None
