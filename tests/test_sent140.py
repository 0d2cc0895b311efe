"""Sentiment140: users and words as the csv and GloVe files have them, samples that say so, hostile files."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from folb.data import sent140 as module
from folb.data.sent140 import SAMPLE, TWEETS, embedding, expand, sent140, tweets
from folb.errors import InputError

WORDS = ["i", "love", "hate", "you", "!", ",", "café", "it's", "the"]
VECTORS = {word: [len(word), i / 8, -i] for i, word in enumerate(WORDS)}
GLOVE = "".join(f"{word} {' '.join(map(str, vector))}\n" for word, vector in VECTORS.items())


def lines(rows) -> bytes:
    """Rows (target, user, text) as the original writes them: six quoted columns, latin-1, no header."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for number, (target, user, words) in enumerate(rows):
        writer.writerow([target, 1467810369 + number, "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, words])
    return text.getvalue().encode("latin-1")


ROWS = [
    *((4 * (i % 2), "ann", f"I LOVE you{'!' * i}") for i in range(10)),
    *((0, "bob", "I hate caf\xe9, it's rubbish") for _ in range(6)),
    *((4, "cy", "you") for _ in range(5)),
    *((4, "di", "love") for _ in range(4)),
]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A function that puts a file into a data directory that already has GloVe vectors."""
    monkeypatch.setenv("FOLB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(content, name=f"sent140/{SAMPLE}"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    put(GLOVE, "glove/glove.6B.50d.txt")
    return put


def rows_of(side, k):
    return slice(side.start[k], side.start[k] + side.size[k])


def test_users_words_and_labels(store):
    store(lines(ROWS))
    federation = sent140()
    assert federation.N == 3 and federation.classes == 2 and federation.shape == (25, 3)
    np.testing.assert_array_equal(federation.train.size, [8, 4, 4])
    np.testing.assert_array_equal(federation.test.size, [2, 2, 1])
    assert federation.train.x.dtype == np.int32 and federation.table.dtype == np.float32
    # rubbish has no vector, and the rest of the 25 words are missing
    bob = expand(federation.table, federation.train.x[rows_of(federation.train, 1)])
    expected = [VECTORS[word] for word in ("i", "hate", "café", ",", "it's")]
    np.testing.assert_allclose(bob[0, :5], expected)
    assert not bob[:, 5:].any()
    assert federation.train.y[rows_of(federation.train, 1)].tolist() == [0] * 4
    assert federation.train.y[rows_of(federation.train, 2)].tolist() == [1] * 4
    # the table has the words that occur, and zeros for the others
    assert len(federation.table) == 1 + len({"i", "love", "you", "!", "hate", "café", ",", "it's"})
    assert not federation.table[0].any()


def test_labels_stay_with_their_tweets(store):
    store(lines(ROWS))
    federation = sent140()
    seen = []
    for side in (federation.train, federation.test):
        marks = (federation.table[side.x[rows_of(side, 0)]] == VECTORS["!"]).all(axis=2).sum(axis=1)
        seen += zip(marks.tolist(), side.y[rows_of(side, 0)].tolist(), strict=True)
    assert sorted(seen) == [(i, i % 2) for i in range(10)]


def test_words_beyond_the_limit_are_dropped(store):
    store(lines([(0, user, "love " * 30 + "hate") for user in "ab" for _ in range(5)]))
    assert sent140().train.x.shape == (8, 25)
    assert sent140(words=31).train.x[0].tolist() == [1] * 30 + [2]


def test_case_may_be_kept(store):
    store(lines(ROWS))
    kept = sent140(case="keep")
    ann = expand(kept.table, kept.train.x[:1])[0]
    assert not ann[:2].any()  # I LOVE
    np.testing.assert_allclose(ann[2], VECTORS["you"])


def test_numpy_and_jax_expand_alike(store):
    store(lines(ROWS))
    federation = sent140()
    x = federation.test.x
    np.testing.assert_array_equal(expand(jnp.asarray(federation.table), jnp.asarray(x)), expand(federation.table, x))


def zipped(content: bytes, name: str = TWEETS) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("testdata.manual.2009.06.14.csv", lines([(2, "zed", "neutral")]))
        archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "pack"),
    [(TWEETS, bytes), (TWEETS + ".gz", gzip.compress), ("trainingandtestdata.zip", zipped), (SAMPLE, bytes)],
)
def test_plain_gz_and_zip_read_alike(store, name, pack):
    path = store(pack(lines(ROWS)), f"sent140/{name}")
    expected = [(target // 4, user, text) for target, user, text in ROWS]
    assert list(tweets(path)) == expected
    assert sent140().N == 3


def test_windows_line_ends_and_carriage_returns_in_tweets(store):
    path = store(lines([(0, "ann", "a\rb"), (4, "bob", 'he said "no"')]).replace(b"\n", b"\r\n"))
    assert list(tweets(path)) == [(0, "ann", "a\rb"), (1, "bob", 'he said "no"')]


def test_a_sample_says_so(store, monkeypatch):
    store(lines(ROWS))
    note = sent140().note
    assert "a sample of Sentiment140: 25 of its 1,600,000 tweets, users with at least 5" in note
    assert "GloVe vectors of 3 numbers" in note
    assert "at least 6" in sent140(min_tweets=6).note

    monkeypatch.setattr(module, "WHOLE", 25)
    store(lines(ROWS), f"sent140/{TWEETS}")
    with pytest.raises(InputError, match=r"min_tweets = 30: leaves 0 of 4 users"):
        sent140()
    assert "sample" not in sent140(min_tweets=5).note


def test_too_few_users_names_what_would_work(store):
    store(lines(ROWS))
    with pytest.raises(InputError, match=r"min_tweets = 30: leaves 0 of 4 users in .*; 5 leaves 3, 2 leaves 4$"):
        sent140(min_tweets=30)
    store(lines([(0, "ann", "love"), (4, "bob", "hate")]))
    with pytest.raises(InputError, match=r"min_tweets = 5: leaves 0 of 2 users in .*; no value leaves two$"):
        sent140()


def test_users_and_tests_are_drawn_by_seed(store):
    store(lines([(0, f"user{k}", f"love {'!' * i}") for k in range(20) for i in range(10)]))
    everyone = sent140()
    assert everyone.N == 20 and sent140(devices=7).N == 7
    np.testing.assert_array_equal(everyone.test.x, sent140().test.x)
    assert not np.array_equal(everyone.test.x, sent140(draw=1).test.x)
    # a user's test tweets do not depend on who else takes part
    some = sent140(devices=7).test.x.reshape(7, 2, 25).tolist()
    assert all(x in everyone.test.x.reshape(20, 2, 25).tolist() for x in some)


def test_the_second_load_does_not_parse_and_the_recipe_is_the_key(store, monkeypatch):
    store(lines(ROWS))
    first = sent140()
    assert sent140(words=3).train.x.shape[1] == 3
    monkeypatch.setattr(module, "tweets", None)
    np.testing.assert_array_equal(sent140().train.x, first.train.x)
    assert sent140().note == first.note
    with pytest.raises(TypeError):
        sent140(min_tweets=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tweets": 1}, r"min_tweets = 1: should be at least 2"),
        ({"devices": 4}, r"devices = 4: should be a whole number from 1 to 3"),
        ({"devices": "al"}, r"devices = 'al': should be a whole number"),
        ({"words": 0}, r"words = 0"),
        ({"case": "upper"}, r"case = 'upper'"),
        ({"glove": "nowhere.txt"}, r"glove: nowhere.txt = None: should be a file of GloVe vectors"),
        ({"draw": -1}, r"draw = -1"),
    ],
)
def test_bad_settings_are_named(store, settings, message):
    store(lines(ROWS))
    with pytest.raises(InputError, match=message):
        sent140(**settings)


GOOD = lines(ROWS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"tweets = 0: should be at least 1"),
        (GOOD + b'"4","1","date","NO_QUERY","ann"\n', r"line 26: columns = 5: should be 6: target, id, date"),
        (GOOD + b'"4","1","date","q","ann","hi","there"\n', r"line 26: columns = 7"),
        (GOOD + b"\n", r"line 26: columns = 0"),
        (
            b'"target","id","date","query","user","text"\n' + GOOD,
            r"line 1: target = 'target': should be 0 \(sad\) or 4",
        ),
        (GOOD + b'"2","1","date","q","ann","so so"\n', r"line 26: target = '2'"),
        (GOOD + b'"0","1","date","q","","anon"\n', r"line 26: user = ''"),
        (b'"0","1","date","q","ann","open\n' + GOOD, r"line 1: lines = 2: should be 1; a quotation mark"),
        (GOOD + b'"0","1","date","q","ann","' + b"x" * 200_000 + b'"\n', r"line 26 = 'field larger than"),
        (bytes(range(256)) * 8, r"line 1: "),
        (gzip.compress(GOOD)[:-20], r"should be an undamaged gzip file"),
        (gzip.compress(GOOD)[:60] + b"damage" + gzip.compress(GOOD)[66:], r"should be an undamaged gzip file"),
    ],
    ids=[
        *("empty", "five columns", "seven columns", "blank line", "header", "bad target", "no user", "open quote"),
        *("long field", "binary", "cut gzip", "damaged gzip"),
    ],
)
def test_hostile_csv_files_are_refused(store, content, message):
    store(content)
    with pytest.raises(InputError, match=message):
        sent140()


@pytest.mark.parametrize(
    "content",
    [zipped(GOOD)[:-40], zipped(GOOD, "../" + TWEETS), b"PK", b"", zipped(GOOD)[:300] + bytes(60) + zipped(GOOD)[360:]],
    ids=["cut", "other members", "not a zip", "empty", "damaged"],
)
def test_hostile_archives_are_refused(store, content):
    store(content, "sent140/trainingandtestdata.zip")
    with pytest.raises(InputError, match=r"trainingandtestdata.zip = .*: should be a complete archive"):
        sent140()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"words of the tweets = 0"),
        (b"zebra 1 2 3\n", r"words of the tweets = 0"),
        (GLOVE + "you 1 2\n", r"line 10: numbers = 2: should be 3, as on line 1"),
        (GLOVE + "you 1 2 3 4\n", r"line 10: numbers = 4: should be 3"),
        (GLOVE + "zebra 1 2\n", r"line 10: numbers = 2"),
        ("\n" + GLOVE, r"line 1: numbers = 0: should be at least 1"),
        ("you 1 x 3\n" + GLOVE, r"line 1: vector = '1 x 3': should be finite numbers"),
        (GLOVE + "you 1 nan 3\n", r"line 10: vector = '1 nan 3'"),
        (GLOVE + "you 1 1e39 3\n", r"line 10: vector = '1 1e39 3'"),
        (GLOVE.encode("latin-1"), r"line 7: word = b'caf\\xe9': should be utf-8 text"),
        (gzip.compress(GLOVE.encode())[:-12], r"should be an undamaged gzip file"),
    ],
)
def test_hostile_glove_files_are_refused(store, content, message):
    store(lines(ROWS))
    store(content, "glove/glove.6B.50d.txt")
    with pytest.raises(InputError, match=message):
        sent140()


def test_glove_of_any_length_packed_or_not_and_words_with_spaces(store):
    path = store(gzip.compress(b". . . 1 2\nat name@domain.com 3 4\n"), "glove/own.gz")
    with pytest.raises(InputError, match="numbers = 3: should be 4, as on line 1"):
        embedding(path, {"at": 1})  # the first line sets the length
    path = store(gzip.compress(b"you 1 2\n. . . 1 2\nat name@domain.com 3 4\nlove 5 6\n"), "glove/own.gz")
    present, vectors = embedding(path, {"love": 4, "at": 2, "you": 1})
    assert present.tolist() == [1, 4] and vectors.tolist() == [[1, 2], [5, 6]]
    store(lines(ROWS))
    assert sent140(glove=str(path)).shape == (25, 2)


def test_the_longest_glove_is_taken(store):
    store(lines(ROWS))
    store(gzip.compress(b"you " + b" ".join(b"%d" % i for i in range(300))), "glove/glove.6B.300d.txt.gz")
    federation = sent140()
    assert federation.shape == (25, 300) and "GloVe" not in federation.note


def test_missing_files_say_where_to_put_them(tmp_path, monkeypatch, store):
    with pytest.raises(InputError, match=TWEETS):
        sent140()
    store(lines(ROWS))
    (tmp_path / "data/glove/glove.6B.50d.txt").unlink()
    with pytest.raises(InputError, match=r"glove.6B.300d.txt"):
        sent140()


def test_the_sample_in_the_data_directory(tmp_path, monkeypatch):
    if not os.environ.get("FOLB_DATA"):
        pytest.skip("FOLB_DATA is not set")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    federation = sent140()
    samples = federation.train.size + federation.test.size
    if "sample" not in federation.note:
        assert samples.min() >= 30
        return
    assert "29,743 of its 1,600,000 tweets, users with at least 5" in federation.note
    assert federation.N == 736 and samples.min() == 5 and samples.sum() == 5140
    assert federation.test.size.min() >= 1
    assert (sent140(min_tweets=8).N, sent140(min_tweets=10).N) == (184, 94)
    with pytest.raises(InputError, match=r"min_tweets = 30: leaves 1 of 11390 users"):
        sent140(min_tweets=30)
