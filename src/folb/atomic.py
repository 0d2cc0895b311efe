"""Write files whole or not at all, read only regular ones, and claim a directory for one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from folb.errors import InputError


def replace(path: Path, content: bytes) -> None:
    """Write `content` to the file, whole or not at all."""
    with filled(path) as file:
        file.write(content)


@contextlib.contextmanager
def filled(path: Path) -> Iterator[IO[bytes]]:
    """A file to fill. It gets the name `path` once it is flushed; after an error it is removed."""
    with _renamed(path, os.unlink) as part, open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A directory to fill. It gets the name `path` when all its files are flushed; after an error it is removed."""
    with _renamed(path, shutil.rmtree) as part:
        shutil.rmtree(part, ignore_errors=True)
        directory(part)
        yield part
        for folder, _, names in os.walk(part):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            _flush_directory(Path(folder))


@contextlib.contextmanager
def _renamed(path: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    """A temporary name, always the same: the next process overwrites what a killed one left."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(part)
        raise
    _flush_directory(path.parent)


def write(handle: int, content: bytes) -> None:
    """Write all of `content`: the system may take it in pieces."""
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


def _flush_directory(path: Path) -> None:
    """Make a rename permanent. Systems that cannot open a directory do this by themselves."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def directory(path: Path) -> None:
    """Create the directory if it is missing, and check that a file can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise InputError("out", str(path), f"should be a directory to write to: {error.strerror}") from error


def output(path: Path, content: bytes) -> None:
    """Write a file that a user named: whole or not at all, unless it is a pipe, a device or a link."""
    if not path.name or path.is_dir():
        raise InputError("output", str(path), "should be a file to write to")
    directory(path.parent)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        replace(path, content)


def regular(path: Path) -> Path:
    """`path`, or an OSError for a pipe, a device or a socket: opening could take for ever. A directory fails anyway."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return path


LOCK = ".folb-lock"


def holder(path: Path) -> dict[str, Any] | None:
    """The process that now runs the experiment of this directory, read from its lock; None if there is none."""
    with contextlib.suppress(OSError), open(path / LOCK, "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _parsed_lock(file.read(4096))
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
        write(handle, json.dumps(who).encode())
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
    """The command line, as a user would type it; of another program the name, for Flower's has a token in it."""
    program = Path(sys.argv[0])
    own = program.name == "folb" or program.parts[-2:] == ("folb", "__main__.py")
    return shlex.join(["folb", *sys.argv[1:]]) if own else program.name
