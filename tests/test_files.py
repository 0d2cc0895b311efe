"""Finding, opening, unpacking, fetching and caching files; a hostile or damaged file gives one error."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from folb import npz
from folb.data import cache, fetch, source_files
from folb.data.fetch import Source
from folb.errors import InputError


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# where files are


def test_a_data_directory_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"FOLB_DATA = .*file': should be a directory"):
        source_files.directory()


def test_the_data_directory_is_folb_data_or_the_platform_s_cache(data, tmp_path, monkeypatch):
    assert source_files.directory() == data
    monkeypatch.setenv("FOLB_DATA", "~/somewhere")
    assert source_files.directory() == Path.home() / "somewhere"
    monkeypatch.delenv("FOLB_DATA")
    monkeypatch.setattr("sys.platform", "linux")
    assert source_files.directory() == tmp_path / "home" / "folb" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source_files.directory() == Path.home() / ".cache" / "folb" / "data"
    monkeypatch.setattr("sys.platform", "darwin")
    assert source_files.directory() == Path.home() / "Library" / "Caches" / "folb" / "data"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert source_files.directory() == tmp_path / "local" / "folb" / "data"


def test_raw_takes_the_first_name_there_is(data):
    (data / "words").mkdir()
    (data / "words" / "b.txt").write_text("b")
    assert source_files.raw("words", "a.txt", "b.txt") == data / "words" / "b.txt"
    with pytest.raises(InputError) as error:
        source_files.raw("words", "a.txt", "c.txt")
    assert str(error.value) == (
        f"words = 'a.txt': is not there: put it in {data / 'words'}, or let `folb data fetch words` get it"
    )


def test_a_folder_marked_read_only_is_not_written_even_by_root(data):
    assert source_files.writable(data / "not" / "there" / "yet")
    data.chmod(0o555)
    try:
        assert not source_files.writable(data)
        assert not source_files.writable(data / "not" / "there" / "yet")
    finally:
        data.chmod(0o755)


# opening


def test_opened_unpacks_gzip_by_content_and_not_by_name(data):
    (data / "packed.txt").write_bytes(gzip.compress(b"text"))
    (data / "plain.gz").write_bytes(b"text")
    for name in ("packed.txt", "plain.gz"):
        with source_files.opened(data / name) as stream:
            assert stream.read() == b"text"


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(os.urandom(4000))[:-100],  # cut
        gzip.compress(bytes(4000))[:-8] + bytes(8),  # another checksum
        b"\x1f\x8b",
        b"\x1f\x8b\x08\x00" + b"\xff" * 50,
    ],
    ids=["cut", "checksum", "header", "noise"],
)
def test_a_damaged_gzip_file_is_an_input_error(data, content):
    (data / "x.gz").write_bytes(content)
    with (
        pytest.raises(InputError, match=r"x\.gz = .*undamaged gzip file"),
        source_files.opened(data / "x.gz") as stream,
    ):
        stream.read()


def test_bad_utf_8_is_an_input_error(data):
    (data / "x.txt").write_bytes(b"fine\n\xff\xfe\n")
    with (
        pytest.raises(InputError, match=r"x\.txt = .*utf-8"),
        source_files.opened(data / "x.txt") as stream,
        io.TextIOWrapper(stream, encoding="utf-8") as lines,
    ):
        lines.read()


def test_a_missing_file_is_an_input_error(data):
    with pytest.raises(InputError, match=r"No such file"), source_files.opened(data / "none"):
        pass


def test_arrays_reads_what_is_named(data):
    np.savez(data / "x.npz", a=np.arange(3), b=np.eye(2))
    arrays = npz.arrays(data / "x.npz", ("b", "a"), limit=10_000)
    assert list(arrays) == ["b", "a"] and arrays["a"].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r"x.npz: c = None: is missing"):
        npz.arrays(data / "x.npz", ("a", "c"), limit=10_000)
    with pytest.raises(InputError, match=r"bytes = \d+: should be at most 100"):
        npz.arrays(data / "x.npz", ("a",), limit=100)


def test_arrays_never_unpickles(data):
    np.savez(data / "x.npz", a=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="allow_pickle"):
        npz.arrays(data / "x.npz", ("a",), limit=10_000)


@pytest.mark.parametrize("cut", [0, 10, 100, 300])
def test_a_cut_npz_is_an_input_error(data, cut):
    np.savez(data / "x.npz", a=np.arange(30))
    (data / "x.npz").write_bytes((data / "x.npz").read_bytes()[:cut])
    with pytest.raises(InputError, match=r"x\.npz"):
        npz.arrays(data / "x.npz", ("a",), limit=10_000)


def test_an_npz_whose_header_does_not_end(data):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (3,".ljust(63) + b"\n"
    with zipfile.ZipFile(data / "x.npz", "w") as packed:
        packed.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(24))
    with pytest.raises(InputError, match=r"a = .*should be an undamaged .npz"):
        npz.arrays(data / "x.npz", ("a",), limit=10_000)


# archives


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


def test_unpack_all_or_some_under_other_names(data, tmp_path):
    path = archive(tmp_path / "a.zip", **{"one.txt": "1", "sub/two.txt": "22"})
    assert source_files.unpack(path, data, limit=3) == [data / "one.txt", data / "sub" / "two.txt"]
    assert (data / "sub" / "two.txt").read_text() == "22"
    assert source_files.unpack(path, data / "some", limit=3, members={"sub/two.txt": "2.txt"}) == [
        data / "some" / "2.txt"
    ]
    assert everything(data) == ["one.txt", "some/2.txt", "sub/two.txt"]
    with pytest.raises(InputError, match=r"'three.txt': is not in the archive"):
        source_files.unpack(path, data, limit=3, members={"three.txt": "3"})


@pytest.mark.parametrize("name", ["../evil", "sub/../../evil", "/evil", "..\\evil", "C:evil", "a\\..\\..\\evil"])
def test_an_archive_cannot_write_outside_its_folder(data, tmp_path, name):
    path = archive(tmp_path / "a.zip", **{"good.txt": "1", name: "2"})
    with pytest.raises(InputError, match="should be a plain file inside"):
        source_files.unpack(path, data, limit=100)
    assert everything(tmp_path) == ["a.zip"]  # the good member is not written either


def test_an_archive_cannot_make_links(data, tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr(link, "/etc")
    with pytest.raises(InputError, match="should be a plain file"):
        source_files.unpack(tmp_path / "a.zip", data, limit=100)
    assert everything(data) == []


def test_a_zip_bomb_is_refused_by_its_declared_size(data, tmp_path):
    path = archive(tmp_path / "a.zip", bomb=bytes(50_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"50000000: bytes when unpacked: should be at most 1000000"):
        source_files.unpack(path, data, limit=1_000_000)
    assert everything(data) == []


def test_a_zip_bomb_that_lies_about_its_size_is_cut_at_what_it_declares(data, tmp_path):
    path = archive(tmp_path / "a.zip", bomb=bytes(5_000_000))
    size = (5_000_000).to_bytes(4, "little")
    content = path.read_bytes()
    assert content.count(size) == 2  # the member's own header and the directory's
    path.write_bytes(content.replace(size, (1000).to_bytes(4, "little")))
    with pytest.raises(InputError, match="cannot be unpacked"):
        source_files.unpack(path, data, limit=1_000_000)
    assert everything(data) == []


def tarred(path, **members):
    """An archive like zip's above, as tar.gz; a member that is a TarInfo is written as it is."""
    with tarfile.open(path, "w:gz") as packed:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info is not content:
                info.size = len(content)
            packed.addfile(info, None if info is content else io.BytesIO(content))
    return path


def test_unpack_a_tar_gz(data, tmp_path):
    path = tarred(tmp_path / "a.tar.gz", **{"one.txt": b"1", "sub/two.txt": b"22"})
    assert source_files.unpack(path, data, limit=2, members={"sub/two.txt": "2.txt"}) == [data / "2.txt"]
    assert everything(data) == ["2.txt"] and (data / "2.txt").read_bytes() == b"22"
    with pytest.raises(InputError, match=r"'three.txt': is not in the archive"):
        source_files.unpack(path, data, limit=3, members={"three.txt": "3"})


def odd(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        *(odd(name) for name in ("../evil", "/evil", "sub/../../evil", "..\\evil", "C:evil")),
        odd("link", tarfile.SYMTYPE, "/etc/passwd"),
        odd("link", tarfile.LNKTYPE, "/etc/passwd"),
        odd("device", tarfile.CHRTYPE),
        odd("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_a_tar_cannot_write_outside_its_folder_or_make_links(data, tmp_path, member):
    path = tarred(tmp_path / "a.tar.gz", good=b"1", member=member)
    with pytest.raises(InputError, match="should be a plain file inside"):
        source_files.unpack(path, data, limit=100)
    assert everything(tmp_path) == ["a.tar.gz"]


def test_a_tar_bomb_is_refused(data, tmp_path, monkeypatch):
    path = tarred(tmp_path / "a.tar.gz", bomb=bytes(3_000_000))
    with pytest.raises(InputError, match=r"3000000: bytes when unpacked: should be at most 1000000"):
        source_files.unpack(path, data, limit=1_000_000)
    monkeypatch.setattr(npz, "UNPACKED", 1_000_000)  # of any file, whatever its members declare
    monkeypatch.setattr(npz, "TIMES", 1)
    with pytest.raises(InputError, match=r"a\.tar\.gz: bytes = \d+: should be at most 1000000 when unpacked"):
        source_files.unpack(path, data, limit=10_000_000, members={"bomb": "bomb"})
    assert everything(data) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "no tar", "empty"])
def test_a_damaged_tar_leaves_nothing_behind(data, tmp_path, damage):
    path = tarred(tmp_path / "a.tar.gz", x=os.urandom(1000), y=os.urandom(1000))
    content = bytearray(path.read_bytes())
    content[len(content) - 500] ^= 1
    path.write_bytes(
        {
            "cut": path.read_bytes()[:-700],
            "flipped": bytes(content),
            "no tar": gzip.compress(b"GIF89a"),
            "empty": gzip.compress(b""),
        }[damage]
    )
    with pytest.raises(InputError, match=r"a\.tar\.gz"):
        source_files.unpack(path, data, limit=10_000, members={"x": "x", "y": "y"})
    assert everything(data) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "not a zip", "empty"])
def test_a_damaged_archive_leaves_nothing_behind(data, tmp_path, damage):
    path = archive(tmp_path / "a.zip", x=os.urandom(1000))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(
        {"cut": path.read_bytes()[:700], "flipped": bytes(content), "not a zip": b"GIF89a", "empty": b""}[damage]
    )
    with pytest.raises(InputError, match="cannot be unpacked"):
        source_files.unpack(path, data, limit=10_000)
    assert everything(data) == []


def test_a_member_whose_name_is_not_utf_8(data, tmp_path):
    path = archive(tmp_path / "a.zip", **{"\u00e9": b"x"})
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    with pytest.raises(InputError, match="utf-8"):
        source_files.unpack(path, data, limit=100)


def test_an_encrypted_archive(data, tmp_path):
    path = archive(tmp_path / "a.zip", x=b"secret")
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag, in the member's header and in the directory's
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match="encrypted"):
        source_files.unpack(path, data, limit=100)


# fetching

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content` on every path; the path says how it behaves. Keeps the Range headers it was sent."""

    content = CONTENT

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges = []

    def handle_error(self, request, client_address):
        """In some tests the client hangs up early."""

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        wanted, content = self.headers.get("Range"), self.server.content
        self.server.ranges.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.path != "/whole" else 0
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            shift = 1 if self.path == "/wrong-range" else 0
            self.send_header("Content-Range", f"bytes {first + shift}-{len(content) - 1}/{len(content)}")
        if self.path != "/unsized":
            self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        last = 400_000 if self.path == "/cut" else len(content)
        self.wfile.write(content[first:last])


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["fine", "unsized"])
def test_download_with_progress(data, server, path):
    seen = []
    fetch.download(server.url(path), data / "x.bin", sha256=SHA256, progress=lambda *report: seen.append(report))
    assert (data / "x.bin").read_bytes() == CONTENT
    assert everything(data) == ["x.bin"]
    total = None if path == "unsized" else len(CONTENT)
    assert seen[-1] == ("x.bin", len(CONTENT), total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_cut_download_is_resumed_where_it_stopped(data, server):
    with pytest.raises(InputError, match=r"/cut = 400000: bytes received: should be 1000000"):
        fetch.download(server.url("cut"), data / "x.bin", sha256=SHA256)
    assert everything(data) == ["x.bin.part"]
    fetch.download(server.url("fine"), data / "x.bin", sha256=SHA256)
    assert server.ranges == [None, "bytes=400000-"]
    assert (data / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("path", ["whole", "wrong-range"])
def test_a_server_that_does_not_resume_starts_again(data, server, path):
    (data / "x.bin.part").write_bytes(CONTENT[:400_000])
    if path == "whole":
        fetch.download(server.url(path), data / "x.bin", size=len(CONTENT), sha256=SHA256)
        assert (data / "x.bin").read_bytes() == CONTENT
    else:
        with pytest.raises(InputError, match=r"600000: bytes: should be 1000000"):
            fetch.download(server.url(path), data / "x.bin", size=len(CONTENT), sha256=SHA256)
        assert not (data / "x.bin").exists()


def test_a_whole_part_needs_no_download(data, server):
    for size in (len(CONTENT), None):  # without a size, the server answers that nothing is left
        (data / "x.bin.part").write_bytes(CONTENT)
        fetch.download(server.url("fine"), data / "x.bin", size=size, sha256=SHA256)
        assert (data / "x.bin").read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000000-"]


def test_without_a_checksum_nothing_is_resumed_or_left(data, server):
    (data / "x.bin.part").write_bytes(b"something else")
    with pytest.raises(InputError):
        fetch.download(server.url("cut"), data / "x.bin")
    assert everything(data) == []
    assert server.ranges == [None]


def test_other_bytes_than_published_are_not_kept(data, server):
    with pytest.raises(InputError, match=f"sha256: should be {'0' * 64}"):
        fetch.download(server.url("fine"), data / "x.bin", sha256="0" * 64)
    with pytest.raises(InputError, match=r"1000000: bytes: should be 7, as published"):
        fetch.download(server.url("fine"), data / "x.bin", size=7)
    assert everything(data) == []


def test_fetch_tries_the_mirrors_and_skips_what_is_there(data, server):
    source = Source("set/x.bin", (server.url("missing"), server.url("fine")), len(CONTENT), SHA256)
    for _ in range(2):
        assert fetch.fetch("set", sources={"set": (source,)}) == [data / "set" / "x.bin"]
    assert len(server.ranges) == 2
    (data / "set" / "x.bin").write_bytes(b"cut")
    fetch.fetch("set", sources={"set": (source,)})
    assert (data / "set" / "x.bin").read_bytes() == CONTENT


def test_fetch_unpacks_archives(data, server, tmp_path):
    server.content = archive(tmp_path / "a.zip", **{"100.txt": "to be", "junk": "x"}).read_bytes()
    source = Source("set/a.zip", (server.url("fine"),), members={"100.txt": "text.txt"}, limit=10)
    assert fetch.fetch("set", sources={"set": (source,)}) == [data / "set" / "text.txt"]
    assert everything(data) == ["set/text.txt"]
    fetch.fetch("set", sources={"set": (source,)})
    assert len(server.ranges) == 1


def test_without_a_network_fetch_says_which_file_to_put_where(data, server):
    server.server_close()
    packed = Source("set/a.zip", (server.url("a.zip"),), members={"100.txt": "text.txt"}, limit=10)
    for source, wanted in (
        (Source("set/x.bin", (server.url("fine"),)), f"fetch = 'x.bin': put it in {data / 'set'} yourself: "),
        (packed, f"fetch = 'a.zip': put text.txt from it in {data / 'set'} yourself: "),
    ):
        with pytest.raises(InputError) as error:
            fetch.fetch("set", sources={"set": (source,)})
        assert str(error.value).startswith(wanted + source.urls[0])
        assert "cannot be downloaded" in str(error.value)


@pytest.mark.parametrize("address", ["missing", "cut", "fine"])
def test_a_failed_fetch_leaves_no_empty_folder(data, server, monkeypatch, address):
    monkeypatch.setenv("FOLB_DATA", str(data / "new"))
    content = {"size": 7} if address == "fine" else {}
    source = Source("set/x.bin", (server.url(address),), **content)
    with pytest.raises(InputError, match="put it in"):
        fetch.fetch("set", sources={"set": (source,)})
    assert not list(data.iterdir())
    (data / "new" / "set").mkdir(parents=True)
    with pytest.raises(InputError, match="put it in"):
        fetch.fetch("set", sources={"set": (source,)})
    assert (data / "new" / "set").is_dir()  # it was there before


def test_what_a_failed_fetch_received_is_kept(data, server):
    source = Source("set/x.bin", (server.url("cut"),), len(CONTENT), SHA256)
    with pytest.raises(InputError, match="put it in"):
        fetch.fetch("set", sources={"set": (source,)})
    assert everything(data) == ["set/x.bin.part"]


def test_fetch_refuses_a_read_only_directory_and_unknown_names(data):
    with pytest.raises(InputError, match="did you mean 'mnist'"):
        fetch.fetch("mnst")
    data.chmod(0o555)
    try:
        with pytest.raises(InputError, match="is read-only"):
            fetch.fetch("mnist")
    finally:
        data.chmod(0o755)


def test_every_source_is_https_with_a_place_of_its_own():
    for name, sources in fetch.SOURCES.items():
        for source in sources:
            assert source.path.split("/")[0] in (name, "glove")
            assert all(url.startswith("https://") for url in source.urls)
            assert source.sha256 is None or len(source.sha256) == 64
            assert bool(source.members) == source.path.endswith((".zip", ".tar.gz")) == (source.limit > 0)


# the cache

RECIPE = {"dataset": "toy", "option": 1}


class Build:
    """A build that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"x": np.arange(1000, dtype=np.uint8), "text": np.array(["ab", "c"])}


@pytest.fixture
def source(data):
    path = data / "raw.txt"
    path.write_text("raw")
    return path


def entries(data):
    return sorted(data.with_name("data.processed").glob("*"))


def test_the_second_time_is_from_the_cache(data, source):
    build = Build()
    first, second = (cache.cached(RECIPE, [source], build) for _ in range(2))
    assert build.calls == 1
    assert len(entries(data)) == 1 and entries(data)[0].name.startswith("toy-")
    for name, values in first.items():
        assert np.array_equal(second[name], values) and second[name].dtype == values.dtype


def test_another_recipe_or_source_is_another_entry(data, source):
    build = Build()
    cache.cached(RECIPE, [source], build)
    cache.cached(RECIPE | {"memory.option": 2}, [source], build)
    source.write_text("other")
    cache.cached(RECIPE, [source], build)
    os.utime(source, ns=(1, 1))
    cache.cached(RECIPE, [source], build)
    assert build.calls == 4 and len(entries(data)) == 4


def test_another_format_is_another_entry(data, source, monkeypatch):
    build = Build()
    cache.cached(RECIPE, [source], build)
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    cache.cached(RECIPE, [source], build)
    assert build.calls == 2


def test_a_damaged_entry_is_built_again(data, source):
    """Cut at many places, and one bit flipped at many: the right arrays come back every time."""
    build = Build()
    expected = cache.cached(RECIPE, [source], build)
    (entry,) = entries(data)
    whole = entry.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[:n] for n in rng.integers(0, len(whole), 30)]
    for place, bit in zip(rng.integers(0, len(whole), 150), rng.integers(0, 8, 150), strict=True):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        damaged.append(bytes(flipped))
    for content in damaged:
        entry.write_bytes(content)
        arrays = cache.cached(RECIPE, [source], build)
        assert all(np.array_equal(arrays[name], values) for name, values in expected.items())
    assert build.calls > 100
    entry.write_bytes(whole[:100])
    cache.cached(RECIPE, [source], build)
    calls = build.calls
    cache.cached(RECIPE, [source], build)
    assert build.calls == calls  # mended


def test_entries_go_to_the_platform_s_cache_where_the_data_is_read_only(data, source, tmp_path):
    build = Build()
    (tmp_path / "home").mkdir()
    tmp_path.chmod(0o555)
    try:
        for _ in range(2):
            cache.cached(RECIPE, [source], build)
    finally:
        tmp_path.chmod(0o755)
    assert build.calls == 1
    assert entries(data) == []
    assert len(list((tmp_path / "home" / "folb" / "data.processed").glob("toy-*.npz"))) == 1


def test_where_nothing_can_be_written_the_arrays_are_just_built(data, source, monkeypatch):
    build = Build()
    monkeypatch.setattr(source_files, "writable", lambda folder: False)
    for _ in range(2):
        assert cache.cached(RECIPE, [source], build)["x"].sum() > 0
    assert build.calls == 2


def test_a_full_disk_costs_the_entry_and_leaves_nothing(data, source, monkeypatch):
    def full(file, **arguments):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert cache.cached(RECIPE, [source], Build())["x"].sum() > 0
    assert entries(data) == []
