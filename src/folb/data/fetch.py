"""`folb data fetch`: download the published raw files, check them, resume, and never leave half a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from folb.data import cifar, sent140, source_files
from folb.errors import InputError, check, choose

Progress = Callable[[str, int, int | None], None]
"""progress(file name, bytes so far, bytes in all if known)"""

TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 18
MOST = 2_000_000_000  # bytes of a file whose size is not published


class Source(NamedTuple):
    """A published file: its path in the data directory, its addresses, and its size and sha256 if published."""

    path: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    members: Mapping[str, str] = MappingProxyType({})  # all that is kept of an archive: name in it -> name next to it
    limit: int = 0  # bytes of all members together


_MNIST = {
    "train-images-idx3-ubyte.gz": (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte.gz": (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte.gz": (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte.gz": (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}
_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_HUB = "https://huggingface.co/datasets/flwrlabs/femnist/resolve/df739a2b09df2b5cc1ec93107659b9a9a8566487/data/"
_GUTENBERG = "https://www.gutenberg.org/files/100/old/"
_FEMNIST = Source(
    "femnist/train-00000-of-00001.parquet",
    (_HUB + "train-00000-of-00001.parquet",),
    sha256="cdb389c8d41d5facab79a4a8d452724c30d9c629a1c1e0b1e9ae9de2c633522b",
)
_SHAKESPEARE = Source(
    "shakespeare/1994-01-100.zip",
    (_GUTENBERG + "old/1994-01-100.zip", _GUTENBERG + "1994-01-100.zip"),
    members={"100.txt": "pg100.txt"},
    limit=20_000_000,
)
_TWEETS = Source(
    "sent140/trainingandtestdata.zip",
    ("https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",),
    81_363_704,
    "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
    {sent140.TWEETS: sent140.TWEETS},
    500_000_000,
)
_GLOVE = Source(
    "glove/glove.6B.zip",
    ("https://nlp.stanford.edu/data/glove.6B.zip", "https://downloads.cs.stanford.edu/nlp/data/glove.6B.zip"),
    862_182_613,
    "617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
    {name: name for name in (f"glove.6B.{d}d.txt" for d in (50, 100, 200, 300))},
    3_000_000_000,
)


def _cifar(size: int, sha256: str, *forms: cifar.Form) -> tuple[Source, ...]:
    form, archive = forms[0], f"{forms[0].title.lower()}-binary.tar.gz"
    members = {f"{form.unpacked}/{name}": name for name in (*form.files, *(form.names for form in forms))}
    url = f"https://www.cs.toronto.edu/~kriz/{archive}"
    return (Source(f"{form.dataset}/{archive}", (url,), size, sha256, members, 200_000_000),)


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": tuple(
        Source(f"mnist/{name}", tuple(mirror + name for mirror in _MIRRORS), size, sha256)
        for name, (size, sha256) in _MNIST.items()
    ),
    "femnist": (_FEMNIST,),
    "cifar10": _cifar(170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", cifar.CIFAR10),
    "cifar100": _cifar(
        168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec", cifar.FINE, cifar.COARSE
    ),
    "shakespeare": (_SHAKESPEARE,),
    "sent140": (_TWEETS, _GLOVE),
    "glove": (_GLOVE,),
}


def _quiet(name: str, done: int, total: int | None) -> None:
    """Progress that nobody wants to see."""


def fetch(dataset: str, progress: Progress = _quiet, sources: Mapping[str, tuple[Source, ...]] = SOURCES) -> list[Path]:
    """Download the files that the dataset needs and does not have, and return where all its files are."""
    choose("dataset", dataset, sources)
    root = source_files.directory()
    return [file for source in sources[dataset] for file in _get(source, root, progress)]


def _get(source: Source, root: Path, progress: Progress) -> list[Path]:
    path = root / source.path
    kept = [path.with_name(name) for name in source.members.values()] or [path]
    if all(file.exists() for file in kept) and (source.members or source.size in (None, path.stat().st_size)):
        return kept
    check("FOLB_DATA", str(root), source_files.writable(root), "is read-only: name another directory to fetch into")
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    try:
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
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that was made stays if it is not empty
            for folder in made:
                folder.rmdir()
        raise
    return kept


def download(
    url: str, path: Path, *, size: int | None = None, sha256: str | None = None, progress: Progress = _quiet
) -> None:
    """Download through `path`.part; an earlier one is resumed if a checksum can tell whether the two pieces fit."""
    part = path.with_name(path.name + ".part")
    begun = part.stat().st_size if sha256 is not None and part.exists() else 0
    if size is not None and begun > size:
        begun = 0
    try:
        if begun == 0 or begun != size:
            _receive(url, part, begun, size, progress)
        with open(part, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 not in (None, actual):
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
        check(url, total, size in (None, total), f"bytes: should be {size}, as published")
        most = MOST if size is None else size
        check(url, total, (total or 0) <= most, f"bytes: should be at most {most}")
        done = begun
        with open(part, "ab" if begun else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                done += len(block)
                progress(part.stem, done, total)
                if total is None:
                    check(url, done, done <= most, f"bytes: should be at most {most}")
                elif done > total:
                    break
    check(url, done, total in (None, done), f"bytes received: should be {total}")
