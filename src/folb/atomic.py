"""Write files so that neither a crash nor a full disk leaves half a file, and read only regular ones."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from folb.errors import InputError


def replace(path: Path, content: bytes) -> None:
    """Write `content` to the file, whole or not at all."""
    with filled(path) as handle:
        write(handle, content)


@contextlib.contextmanager
def filled(path: Path) -> Iterator[int]:
    """The handle of a file to fill. It gets the name `path` once it is flushed; after an error it is removed.

    The temporary name is always the same: the next process overwrites what a killed one left.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            yield handle
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _flush_directory(path.parent)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A directory to fill. It gets the name `path` when all its files are flushed; after an error it is removed."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    directory(part)
    try:
        yield part
        for folder, _, names in os.walk(part):
            for name in names:
                handle = os.open(os.path.join(folder, name), os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            _flush_directory(Path(folder))
        os.rename(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
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
        with tempfile.TemporaryFile(dir=path):
            pass
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
    """`path`, unless it is a pipe, a device or a socket: an OSError. To open a pipe could wait for ever.

    To read a directory fails anyway.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return path
