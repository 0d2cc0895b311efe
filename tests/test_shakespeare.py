"""Shakespeare: LEAF's reading of the plays, windows as offsets, the three splits, hostile files."""

from __future__ import annotations

import gzip
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from folb.data import shakespeare as module
from folb.data.shakespeare import ALPHABET, expand, parse, shakespeare
from folb.errors import InputError

NOTICE = "<<THIS ELECTRONIC VERSION OF THE COMPLETE WORKS IS COPYRIGHT>>"


def work(title: str, body: str, year: str = "1603") -> str:
    return f"\n\n{year}\n\n{title}\n\nby William Shakespeare\n\n\n{body}\n\nTHE END\n\n\n{NOTICE}\n\n\n"


def speech(name: str, *lines: str) -> str:
    return "\n".join([f"  {name}. {lines[0]}", *(f"    {line}" for line in lines[1:])])


LONG = "Under the greenwood tree who loves to lie with me, and turn his merry note"
PLAYS = [
    work(
        "THE SONNETS",
        "                     1\n  From fairest creatures we desire increase,\n    Pity the world.",
        "1609",
    ),
    work(
        "AS YOU LIKE IT",
        "\n".join(
            [
                "DRAMATIS PERSONAE.",
                "  ROSALIND, daughter to the duke",
                speech("ORLANDO", LONG, "unto   the sweet   bird's throat;", "come hither."),
                "                                        Enter ROSALIND",
                "  Rosalind. What say you?",
                speech("ROSALIND", LONG, LONG),
                speech("Orlando", "Why, nothing. [Aside] She loves me."),
                speech("ADAM", LONG + LONG, "Two lines are too few."),
                speech("TOUCHSTONE", "I", "am", "short."),
            ]
        ),
    ),
    work(
        "THE COMEDY OF ERRORS",
        "\n".join(
            [
                "ACT I. SCENE 1",
                "This heading is nobody's.",
                "AEGEON. " + LONG,
                LONG,
                "  indented too",
                "DUKE. Merchant, plead no more.",
                "I am not partial to infringe our laws.",
                LONG,
                NOTICE,
                "not spoken",
            ]
        ),
        "1593",
    ),
    work("A LOVER'S COMPLAINT", speech("NUN", LONG, LONG, LONG), "1609"),
]
LICENCE = (
    "\n\n\nEnd of the Project Gutenberg EBook of The Complete Works of William\nShakespeare, by William Shakespeare\n"
)
TEXT = "\ufeffThe Project Gutenberg EBook of The Complete Works of William Shakespeare, by\n" + "".join(PLAYS) + LICENCE


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A function that puts a text, in bytes or characters, into an empty data directory."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)

    def put(content, name="pg100.txt"):
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return put


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """The complete works, where there is a data directory, and a cache of their own."""
    if not os.environ.get("FOLB_DATA"):
        pytest.skip("FOLB_DATA is not set")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def decoded(codes) -> str:
    return "".join(ALPHABET[code] for code in codes)


def test_roles_are_read_as_leaf_reads_them():
    roles = parse(TEXT.lstrip("\ufeff"))
    assert list(roles) == [
        ("AS YOU LIKE IT", "ORLANDO"),
        ("AS YOU LIKE IT", "ROSALIND"),
        ("THE COMEDY OF ERRORS", "AEGEON"),
        ("THE COMEDY OF ERRORS", "DUKE"),
    ]
    # Names in any case are one role, a stage direction far to the right is taken for a line, runs of spaces shrink.
    assert roles["AS YOU LIKE IT", "ORLANDO"] == (
        f"{LONG} unto the sweet bird's throat; come hither. Enter ROSALIND Why, nothing. [Aside] She loves me. "
    )
    assert roles["AS YOU LIKE IT", "ROSALIND"] == f"What say you? {LONG} {LONG} "
    assert roles["THE COMEDY OF ERRORS", "AEGEON"] == f"{LONG} {LONG} indented too "
    # The play set flush left: any line goes on up to the notice; its blank lines leave one space.
    assert roles["THE COMEDY OF ERRORS", "DUKE"] == (
        f"Merchant, plead no more. I am not partial to infringe our laws. {LONG} "
    )


def test_the_alphabet_is_leafs():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert list(ALPHABET) == sorted(ALPHABET)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_samples_are_windows_and_the_next_character(store, newline, packed):
    content = TEXT.replace("\n", newline).encode()
    store(gzip.compress(content) if packed else content, "pg100.txt.gz" if packed else "pg100.txt")
    federation = shakespeare(devices="all")
    assert federation.N == 4 and federation.classes == 80 and federation.shape == (80,)
    assert federation.table.dtype == np.uint8 and federation.train.x.dtype == np.int32
    for k, said in enumerate(parse(TEXT.lstrip("\ufeff")).values()):
        windows, nexts = [], []
        for side in (federation.train, federation.test):
            rows = slice(side.start[k], side.start[k] + side.size[k])
            windows += [decoded(window) for window in expand(federation.table, side.x[rows])]
            nexts += [ALPHABET[code] for code in side.y[rows]]
        assert windows == [said[i : i + 80] for i in range(len(said) - 80)]
        assert "".join(nexts) == said[80:]
        assert federation.train.size[k] == max(int(0.8 * len(nexts)), 1)


def test_numpy_and_jax_expand_alike(store):
    store(TEXT)
    federation = shakespeare(devices="all")
    x = federation.test.x[:5]
    on_jax = expand(jnp.asarray(federation.table), jnp.asarray(x))
    assert on_jax.dtype == jnp.uint8
    np.testing.assert_array_equal(on_jax, expand(federation.table, x))


def touched(offsets, upto):
    """The places of the table that the windows at these offsets cover, their first `upto` characters."""
    return set((offsets[:, None] + np.arange(upto)).ravel().tolist())


@pytest.mark.parametrize("split", ["time", "gap", "random"])
def test_what_the_splits_share_is_what_they_say(store, split):
    text = TEXT.replace("come hither.", "come hither. " + LONG * 8)
    store(text)
    federation = shakespeare(devices="all", split=split)
    train, test = federation.train.x[: federation.train.size[0]], federation.test.x[: federation.test.size[0]]
    labels, seen = set((test + 80).tolist()), touched(train, 81)
    shared = [len(touched(test[i : i + 1], 80) & seen) for i in range(len(test))]
    if split == "random":
        windows = len(parse(text)["AS YOU LIKE IT", "ORLANDO"]) - 80
        assert sorted([*train, *test]) == list(range(windows))
        assert len(labels & seen) > 0.9 * len(labels)
    else:
        assert not labels & seen
        assert [n for n in shared if n] == (list(range(80, 0, -1)) if split == "time" else [1])
    if split == "gap":
        assert test[0] - train[-1] == 80  # 79 windows left out
        assert federation.test.size.min() == 0  # small roles train only


def test_roles_are_drawn_by_seed_or_taken_by_size(store):
    store(TEXT)
    sizes = {n for n in (shakespeare(devices="all").train.size).tolist()}
    largest = shakespeare(devices=2, roles="largest")
    assert set(largest.train.size.tolist()) == set(sorted(sizes)[-2:])
    drawn = [shakespeare(devices=2, draw=draw).train.x.tolist() for draw in range(8)]
    assert drawn[0] == shakespeare(devices=2, draw=0).train.x.tolist()
    assert len({tuple(x) for x in drawn}) > 1
    random = [shakespeare(devices="all", split="random", draw=draw).train.x for draw in (0, 0, 1)]
    assert np.array_equal(random[0], random[1]) and not np.array_equal(random[0], random[2])


def test_the_second_load_does_not_parse(store, monkeypatch):
    store(TEXT)
    first = shakespeare(devices="all")
    monkeypatch.setattr(module, "parse", None)
    np.testing.assert_array_equal(shakespeare(devices="all").train.y, first.train.y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 5}, r"devices = 5: should be a whole number from 1 to 4"),
        ({"devices": 0}, r"devices = 0"),
        ({"devices": "many"}, r"devices = 'many': should be a whole number"),
        ({"roles": "bigest"}, r"roles = 'bigest'.*largest"),
        ({"split": "tim"}, r"split = 'tim': did you mean 'time'"),
        ({"draw": -1}, r"draw = -1"),
    ],
)
def test_bad_settings_are_named(store, settings, message):
    store(TEXT)
    with pytest.raises(InputError, match=message):
        shakespeare(**settings)


def test_default_of_143_needs_as_many_roles(store):
    store(TEXT)
    with pytest.raises(InputError, match=r"devices = 143: should be a whole number from 1 to 4"):
        shakespeare()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"pg100.txt: speaking roles = 0: .*2011"),
        (b"THE SONNETS\n\nby William Shakespeare\n\n", r"speaking roles = 0"),
        (b"by William Shakespeare", r"speaking roles = 0"),
        (TEXT.replace("LIKE IT", "LIKE\xff").encode("latin-1", "replace"), r"pg100.txt: line \d+ = b'\\xff': .*utf-8"),
        (TEXT.replace("What say", "What § say"), r"AS YOU LIKE IT: ROSALIND = '§': should be one of LEAF's 80"),
        (gzip.compress(TEXT.encode())[:-300], r"ended before.*should be an undamaged gzip file"),
        (gzip.compress(TEXT.encode())[:200] + b"damage" + gzip.compress(TEXT.encode())[206:], r"undamaged gzip file"),
    ],
    ids=["empty", "no plays", "byline alone", "bad utf-8", "unknown character", "cut gzip", "damaged gzip"],
)
def test_hostile_files_are_refused(store, content, message):
    store(content)
    with pytest.raises(InputError, match=message):
        shakespeare(devices="all")


def test_the_line_of_bad_utf8_is_right(store):
    lines = TEXT.encode().split(b"\n")
    lines[41] += b"\xc3"
    store(b"\n".join(lines))
    with pytest.raises(InputError, match=r"pg100.txt: line 42 = b'\\xc3'"):
        shakespeare(devices="all")


def test_a_file_that_unpacks_without_end_is_refused(store, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 1000)
    store(gzip.compress(b" " * 100_000))
    with pytest.raises(InputError, match=r"bytes = [0-9]+: should be at most 1000 when unpacked"):
        shakespeare(devices="all")


def test_a_missing_file_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLB_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"pg100.txt.*shakespeare"):
        shakespeare()


def test_the_complete_works_have_leafs_counts(whole):
    federation = shakespeare(devices="all")
    samples = federation.train.size + federation.test.size
    assert federation.N == 1129
    assert samples.sum() == 4_226_158
    assert round(samples.mean()) == 3743 and round(samples.std()) == 6212
    assert decoded(federation.table[:40]) == "In delivering my son from me, I bury a s"

    tracemalloc.start()
    shakespeare(devices="all")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6  # the issue allows 200 MB

    default = shakespeare()
    assert default.N == 143
    assert default.test.size.min() >= 1
