"""`folb data fetch`: download the published raw files, check them, resume, and never leave half a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from folb.data import cifar, source_files
from folb.errors import InputError, choose

Progress = Callable[[str, int, int | None], None]
"""progress(file name, bytes so far, bytes in all if known)"""

TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 18
MOST = 2_000_000_000  # bytes of a file whose size is not published


class Source(NamedTuple):
    """A published file: its path in the data directory, its addresses, and its size and sha256 if published.

    Of a zip or tar.gz archive with `members` (name in the archive -> name next to it), only these members are kept.
    """

    path: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    members: Mapping[str, str] = MappingProxyType({})
    limit: int = 0  # bytes of all members together


def _mnist(name: str, size: int, sha256: str) -> Source:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    return Source(f"mnist/{name}", tuple(mirror + name for mirror in mirrors), size, sha256)


_GLOVE = Source(
    "glove/glove.6B.zip",
    ("https://nlp.stanford.edu/data/glove.6B.zip", "https://downloads.cs.stanford.edu/nlp/data/glove.6B.zip"),
    862_182_613,
    "617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
    {name: name for name in (f"glove.6B.{d}d.txt" for d in (50, 100, 200, 300))},
    3_000_000_000,
)


def _cifar(name: str, archive: str, size: int, sha256: str, members: dict[str, str]) -> tuple[Source, ...]:
    return (
        Source(
            f"{name}/{archive}", (f"https://www.cs.toronto.edu/~kriz/{archive}",), size, sha256, members, 200_000_000
        ),
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        _mnist(
            "train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        _mnist("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "femnist": (
        Source(
            "femnist/train-00000-of-00001.parquet",
            (
                "https://huggingface.co/datasets/flwrlabs/femnist/resolve/"
                "df739a2b09df2b5cc1ec93107659b9a9a8566487/data/train-00000-of-00001.parquet",
            ),
            None,
            "cdb389c8d41d5facab79a4a8d452724c30d9c629a1c1e0b1e9ae9de2c633522b",
        ),
    ),
    "cifar10": _cifar(
        "cifar10",
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        {f"cifar-10-batches-bin/{name}": name for name in (*cifar.CIFAR10.files, cifar.CIFAR10.names)},
    ),
    "cifar100": _cifar(
        "cifar100",
        "cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        {f"cifar-100-binary/{name}": name for name in (*cifar.FINE.files, cifar.FINE.names, cifar.COARSE.names)},
    ),
    "shakespeare": (
        Source(
            "shakespeare/1994-01-100.zip",
            (
                "https://www.gutenberg.org/files/100/old/old/1994-01-100.zip",
                "https://www.gutenberg.org/files/100/old/1994-01-100.zip",
            ),
            members={"100.txt": "pg100.txt"},
            limit=20_000_000,
        ),
    ),
    "sent140": (
        Source(
            "sent140/trainingandtestdata.zip",
            ("https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",),
            81_363_704,
            "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
            {name: name for name in ("training.1600000.processed.noemoticon.csv",)},
            500_000_000,
        ),
        _GLOVE,
    ),
    "glove": (_GLOVE,),
}


def fetch(
    dataset: str, progress: Progress | None = None, sources: Mapping[str, tuple[Source, ...]] = SOURCES
) -> list[Path]:
    """Download the files that the dataset needs and does not have, and return where all its files are."""
    choose("dataset", dataset, sources)
    root = source_files.directory()
    files: list[Path] = []
    for source in sources[dataset]:
        files += _get(source, root / source.path, progress or (lambda name, done, total: None))
    return files


def _get(source: Source, path: Path, progress: Progress) -> list[Path]:
    kept = [path.with_name(name) for name in source.members.values()] or [path]
    if all(file.exists() for file in kept) and (source.members or source.size in (None, path.stat().st_size)):
        return kept
    if not source_files.writable(source_files.directory()):
        raise InputError(
            "FOLB_DATA", str(source_files.directory()), "is read-only: name another directory to fetch into"
        )
    with _folder(path.parent):
        failures: list[str] = []
        for url in source.urls:
            try:
                download(url, path, size=source.size, sha256=source.sha256, progress=progress)
                break
            except InputError as error:
                failures.append(str(error))
        else:
            names = ", ".join(file.name for file in kept)
            what = f"{names} from it" if source.members else "it"
            raise InputError("fetch", path.name, f"put {what} in {path.parent} yourself: {'; '.join(failures)}")
        if source.members:
            source_files.unpack(path, path.parent, limit=source.limit, members=source.members)
            path.unlink()
    return kept


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder to download into. After an error, what was made of it and of those above goes away if it is empty."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()
        raise


def download(
    url: str, path: Path, *, size: int | None = None, sha256: str | None = None, progress: Progress | None = None
) -> None:
    """Download to `path`, through `path`.part, which is renamed when its size and checksum are right.

    An earlier .part is resumed if there is a checksum to tell whether the two pieces fit.
    """
    part = path.with_name(path.name + ".part")
    begun = part.stat().st_size if sha256 is not None and part.exists() else 0
    if size is not None and begun > size:
        begun = 0
    try:
        if begun == 0 or begun != size:
            _receive(url, part, begun, size, progress or (lambda name, done, total: None))
        if sha256 is not None and (actual := _sha256(part)) != sha256:
            part.unlink()
            raise InputError(url, actual, f"sha256: should be {sha256}, as published")
        os.replace(part, path)
    except (OSError, HTTPException) as error:
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise InputError(url, reason or type(error).__name__, "cannot be downloaded") from error
    finally:
        if sha256 is None:
            part.unlink(missing_ok=True)


def _receive(url: str, part: Path, begun: int, size: int | None, progress: Progress) -> None:
    """Complete `part`, which has `begun` bytes; a server that cannot resume sends all bytes again."""
    headers = {"User-Agent": "folb"} | ({"Range": f"bytes={begun}-"} if begun else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if begun and error.code == 416:  # there are no further bytes: the checksum will decide
            return
        raise
    with response:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {begun}-"):
            begun = 0
        length = response.headers.get("Content-Length", "")
        total = begun + int(length) if length.isdigit() else size
        if size is not None and total != size:
            raise InputError(url, total, f"bytes: should be {size}, as published")
        if size is None:
            _check_most(url, total or 0)
        done = begun
        with open(part, "ab" if begun else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                done += len(block)
                progress(part.stem, done, total)
                if total is None:
                    _check_most(url, done)
                elif done > total:
                    break
    if total is not None and done != total:
        raise InputError(url, done, f"bytes received: should be {total}")


def _check_most(url: str, size: int) -> None:
    if size > MOST:
        raise InputError(url, size, f"bytes: should be at most {MOST}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
