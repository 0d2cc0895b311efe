"""A study's stored results: one compressed file of cells. A line is a cell: its name, and what it measured.

    zcat results.jsonl.gz | head -1

Several processes may add cells to one file: each reads it again and writes it whole, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from folb import atomic
from folb.atomic import regular
from folb.errors import InputError, choose

FILE = "results.jsonl.gz"
Cell = Mapping[str, Any]  # JSON-ready


class Results:
    """The cells of one file, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_at: Any = None
        self._cells: dict[str, Cell] = {}

    def check(self) -> None:
        """Raise unless results can be read and written."""
        atomic.directory(self.path.parent)
        self.cells()

    def cells(self) -> Mapping[str, Cell]:
        """All cells as they are now in the file."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return {}
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._read_at:
            self._cells, self._read_at = dict(self._lines()), version
        return self._cells

    def _lines(self) -> Iterator[tuple[str, Cell]]:
        try:
            content = regular(self.path).read_bytes()
            if not content:  # gzip would take it for a file without cells
                raise EOFError("it is empty")
            for line in gzip.decompress(content).splitlines():
                one = json.loads(line)
                yield str(one["name"]), dict(one["cell"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
            expected = f"cannot be read ({type(error).__name__}: {error}): should be a file that this command wrote"
            raise InputError("results", str(self.path), expected) from error

    def get(self, name: str) -> Cell | None:
        """The cell of that name; None if there is none."""
        return self.cells().get(name)

    def damaged(self, name: str, why: object) -> InputError:
        """The error for a cell that is not what its study writes."""
        what = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
        return InputError(
            "results", name, f"is damaged in {self.path} ({what}): `--drop {name}` forgets it, and run it again"
        )

    def keep(self, name: str, cell: Cell) -> None:
        """Add a cell, in place of an earlier one of that name."""
        with self._alone():
            self._write({**self.cells(), name: cell})

    def drop(self, names: Sequence[str]) -> None:
        """Remove cells."""
        with self._alone():
            for name in names:
                choose("drop", name, list(self.cells()))
            self._write({name: cell for name, cell in self.cells().items() if name not in names})

    def _write(self, cells: Mapping[str, Cell]) -> None:
        lines = (
            json.dumps({"name": name, "cell": cells[name]}, allow_nan=False, separators=(",", ":")) + "\n"
            for name in sorted(cells)
        )
        atomic.replace(self.path, gzip.compress("".join(lines).encode(), mtime=0))  # the same cells, the same bytes

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only process that writes to the file's directory; wait for another."""
        atomic.directory(self.path.parent)
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
