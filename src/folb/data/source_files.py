"""Where the datasets' raw files are, and how they are opened: gz or plain, and archives unpacked safely."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from folb import atomic
from folb.atomic import regular
from folb.errors import InputError, check, refused
from folb.npz import check_room


def directory() -> Path:
    """The data directory: `FOLB_DATA`, else a folder in the platform's cache directory."""
    named = os.environ.get("FOLB_DATA")
    path = Path(os.path.expanduser(named)).absolute() if named else platform_cache() / "data"
    check("FOLB_DATA", str(path), not named or not path.exists() or path.is_dir(), "should be a directory")
    return path


def platform_cache() -> Path:
    """Where this platform keeps files that can be made or downloaded again."""
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "folb"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or _home() / usual) / "folb"


def _home() -> Path:
    """The user's home. A user of a container may have none; a shared folder would let others write into our cache."""
    try:
        return Path.home()
    except RuntimeError as error:
        expected = "should name a directory, as this user has no home: or set FOLB_DATA and XDG_CACHE_HOME"
        raise InputError("HOME", os.environ.get("HOME"), expected) from error


def raw(dataset: str, *names: str) -> Path:
    """The first of `names` that exists in the dataset's folder; if none does, the error asks for the first."""
    folder = directory() / dataset
    for name in names:
        if (folder / name).exists():
            return folder / name
    advice = f"put it in {folder}, or let `folb data fetch {dataset}` get it"
    raise MissingError(dataset, names[0], f"is not there: {advice}")


class MissingError(InputError):
    """A dataset's file is not there."""


def writable(folder: Path) -> bool:
    """Whether files may be put in `folder` or, if it does not exist, in the nearest folder above it."""
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    # a folder marked read-only is read-only for root too, though the system would let root write
    return folder.is_dir() and os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


@contextmanager
def opened(path: Path, limit: int | None = None) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if it is gzip. Errors while reading, as of a cut file or utf-8, name the file."""
    try:
        with open(regular(path), "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            bounded = Bounded(gzip.GzipFile(fileobj=file) if packed else file, path, limit)
            yield io.BufferedReader(bounded, 1 << 20)
    except UnicodeDecodeError as error:
        raise InputError(str(path), str(error), "should be utf-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), str(error), "should be an undamaged gzip file") from error
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "should be a readable file") from error


class Bounded(io.RawIOBase):
    """What a file holds, up to the bytes that it may unpack to."""

    def __init__(self, stream: Any, path: Path, limit: int | None) -> None:
        self.stream, self.path, self.limit, self.done = stream, path, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        self.done += count
        check_room(self.path, self.done, self.limit)
        return int(count)


def content(path: Path, *, limit: int) -> bytes:
    """All bytes of a file, unpacked; an `InputError` if they are more than `limit`."""
    with opened(path, limit) as stream:
        return stream.read()


def unpack(archive: Path, into: Path, *, limit: int, members: Mapping[str, str] | None = None) -> list[Path]:
    """Unpack a zip or tar.gz archive into a folder: all of it, or the `members` named, each under the name given.

    Nothing is written unless every member has a plain name inside the folder, and all together declare at
    most `limit` bytes. A member appears under its name only when it is whole.
    """
    # a damaged archive can fail anywhere in the reader
    with refused(str(archive), "cannot be unpacked", Exception), _members(archive) as known:
        wanted = {name: name for name in known} if members is None else members
        for name in wanted:
            check(str(archive), name, name in known, "is not in the archive")
            member = known[name]
            pure = PurePosixPath(member.name)
            odd = pure.is_absolute() or ".." in pure.parts or set("\\:\0") & set(member.name)
            good = member.plain and not odd
            check(str(archive), member.name, good, "should be a plain file inside the archive's folder")
        total = sum(known[name].size for name in wanted)
        check(str(archive), total, total <= limit, f"bytes when unpacked: should be at most {limit}")
        paths = {name: into / under for name, under in wanted.items()}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with known[name].open() as source, atomic.filled(path) as file:
                # never more than the declared bytes; a zip checks their CRC
                shutil.copyfileobj(source, file, 1 << 20)
        return list(paths.values())


class Member(NamedTuple):
    name: str  # as the archive has it
    size: int  # bytes that it declares
    plain: bool  # whether it is neither a link nor a device
    open: Callable[[], Any]


@contextmanager
def _members(archive: Path) -> Iterator[dict[str, Member]]:
    """The files of an archive, by name; of two of one name the last."""
    with open(regular(archive), "rb") as file:
        packed_as_one = file.read(2) == b"\x1f\x8b"
    if packed_as_one:
        with opened(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as packed:
            for _ in packed:  # to its end: damage, or more than it may unpack to, is an error before a file is written
                pass
        with tarfile.open(archive, "r:gz") as packed:
            yield {
                info.name: Member(info.name, info.size, info.isreg(), partial(packed.extractfile, info))
                for info in packed
                if not info.isdir()
            }
    else:
        with zipfile.ZipFile(archive) as zipped:
            files = {info.filename: info for info in zipped.infolist() if not info.is_dir()}
            plain = {name: not stat.S_ISLNK(info.external_attr >> 16) for name, info in files.items()}
            yield {
                name: Member(info.orig_filename, info.file_size, plain[name], partial(zipped.open, info))
                for name, info in files.items()
            }
