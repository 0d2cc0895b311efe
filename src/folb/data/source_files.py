"""Where the datasets' raw files are, and how they are opened: gz or plain, and archives unpacked safely."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from folb.errors import InputError
from folb.npz import check_room


def directory() -> Path:
    """The data directory: `FOLB_DATA`, else a folder in the platform's cache directory."""
    named = os.environ.get("FOLB_DATA")
    path = Path(os.path.expanduser(named)).absolute() if named else platform_cache() / "data"
    if named and path.exists() and not path.is_dir():
        raise InputError("FOLB_DATA", str(path), "should be a directory")
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
    """The first of `names` that exists in the dataset's folder."""
    folder = directory() / dataset
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise missing(dataset, names[0])


class MissingError(InputError):
    """A dataset's file is not there."""


def missing(dataset: str, name: str) -> MissingError:
    """The error that says which file to put where."""
    folder = directory() / dataset
    return MissingError(dataset, name, f"is not there: put it in {folder}, or let `folb data fetch {dataset}` get it")


def writable(folder: Path) -> bool:
    """Whether files may be put in `folder` or, if it does not exist, in the nearest folder above it.

    A folder marked read-only is read-only for root too, though the system would let root write.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if it is gzip, whatever its name.

    An error while reading (a cut or damaged file, text that is not utf-8) becomes an `InputError` that names the file.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not packed:
                yield file
                return
            with gzip.open(file) as stream:
                yield io.BufferedReader(Bounded(stream, path), 1 << 20)  # type: ignore[arg-type]
    except UnicodeDecodeError as error:
        raise InputError(str(path), str(error), "should be utf-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), str(error), "should be an undamaged gzip file") from error
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "should be a readable file") from error


class Bounded(io.RawIOBase):
    """What a packed file holds, up to the bytes that it may unpack to."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self.stream, self.path, self.done = stream, path, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, until there are too many."""
        found = self.stream.readinto(buffer)  # type: ignore[attr-defined]
        self.done += found
        check_room(self.path, self.done)
        return int(found)


def content(path: Path, *, limit: int) -> bytearray:
    """All bytes of a file, unpacked; an `InputError` if they are more than `limit`."""
    found = bytearray()
    with opened(path) as stream:
        while block := stream.read(1 << 20):
            found += block
            check_room(path, len(found), limit)
    return found


def unpack(archive: Path, into: Path, *, limit: int, members: Mapping[str, str] | None = None) -> list[Path]:
    """Unpack a zip archive into a folder: all of it, or the `members` named, each under the name given for it.

    Nothing is written unless every member has a plain name inside the folder, and all together declare at
    most `limit` bytes. A member appears under its name only when it is whole.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            known = {info.filename: info for info in packed.infolist() if not info.is_dir()}
            wanted = {name: name for name in known} if members is None else members
            for name in wanted:
                if name not in known:
                    raise InputError(str(archive), name, "is not in the archive")
                _check_member(archive, known[name])
            total = sum(known[name].file_size for name in wanted)
            if total > limit:
                raise InputError(str(archive), total, f"bytes when unpacked: should be at most {limit}")
            return [_extract(packed, known[name], into / under) for name, under in wanted.items()]
    except InputError:
        raise
    except Exception as error:  # a damaged archive can fail anywhere in the reader
        raise InputError(str(archive), str(error), "cannot be unpacked") from error


def _check_member(archive: Path, info: zipfile.ZipInfo) -> None:
    name = PurePosixPath(info.filename)
    odd = name.is_absolute() or ".." in name.parts or "\\" in info.orig_filename or ":" in info.filename
    if odd or "\0" in info.orig_filename or stat.S_ISLNK(info.external_attr >> 16):
        raise InputError(str(archive), info.orig_filename, "should be a plain file inside the archive's folder")


def _extract(packed: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with packed.open(info) as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)  # never more than the declared bytes, and checks their CRC
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path
