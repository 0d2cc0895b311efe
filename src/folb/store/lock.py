"""One process at a time writes to a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from folb import atomic
from folb.errors import InputError

LOCK = ".folb-lock"


def holder(path: Path) -> dict[str, Any] | None:
    """The process that now runs the experiment of this directory, read from its lock; None if there is none."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _parsed_lock(os.read(handle, 4096))
    finally:
        os.close(handle)
    return None


def _parsed_lock(content: bytes) -> dict[str, Any]:
    try:
        who = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return who if isinstance(who, dict) else {}


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Be the only process that writes to the directory. The system releases the lock of a killed process."""
    handle = _locked(path)
    try:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now(), "command": command()}
        os.ftruncate(handle, 0)
        atomic.write(handle, json.dumps(who).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path / LOCK)
        os.close(handle)


def _locked(path: Path) -> int:
    """Take the lock and return it. If another process holds it, an `InputError` names that process."""
    for _ in range(20):  # a reader that checks the lock may hold it for a moment
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # its last holder may have removed the file after we opened it and before we locked it
            if os.fstat(handle).st_ino == os.stat(path / LOCK).st_ino:
                return handle
        other = _parsed_lock(os.read(handle, 4096))
        os.close(handle)
        time.sleep(0.02)
    raise _held(path, other)


def _held(path: Path, other: dict[str, Any]) -> InputError:
    who = f"process {other.get('pid')} on {other.get('host')} since {other.get('since')}"
    return InputError("run", path.name, f"is being run by {who}: {other.get('command')}")


def check_free(path: Path) -> None:
    """Raise an `InputError` if another process runs the experiment of this directory."""
    if (other := holder(path)) is not None:
        raise _held(path, other)


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """The command line, as a user would type it.

    Of another program, only the name: Flower passes a token to the server's process on the command line.
    """
    program = Path(sys.argv[0])
    own = program.name == "folb" or program.parts[-2:] == ("folb", "__main__.py")
    return shlex.join(["folb", *sys.argv[1:]]) if own else program.name
