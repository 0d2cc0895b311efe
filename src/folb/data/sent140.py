"""Sentiment140 (Go et al.): the sentiment of tweets by user, their words as frozen GloVe vectors.

A sample has the numbers of its words. The words' vectors are the federation's table: they are neither trained nor sent.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np

from folb.atomic import regular
from folb.data import cache, source_files
from folb.data.federation import Federation
from folb.data.tabular import is_number
from folb.errors import InputError, check, check_whole, choose, refused
from folb.typing import NDArray

WHOLE = 1_600_000
TWEETS = "training.1600000.processed.noemoticon.csv"
SAMPLE = "training.sample.processed.noemoticon.csv"
GLOVE = [f"glove.6B.{length}d.txt{packed}" for length in (300, 200, 100, 50) for packed in ("", ".gz")]
COLUMNS = ("target", "id", "date", "query", "user", "text")
SENTIMENT = {"0": 0, "4": 1}
TOKEN = re.compile(r"[\w']+|[.,!?;]")  # LEAF's and FedProx's


def sent140(
    *,
    min_tweets: Annotated[int | None, "fewest tweets of a user; by default 30, or 5 if the file is a sample"] = None,
    devices: Annotated[int | Literal["all"], "number of users drawn at random, or 'all' of them"] = "all",
    words: Annotated[int, "words of a tweet that the model sees: the first ones"] = 25,
    case: Annotated[Literal["lower", "keep"], "case of the words; GloVe 6B knows lower case only"] = "lower",
    glove: Annotated[
        str | None, "a file of GloVe vectors; by default the glove.6B file with the longest vectors"
    ] = None,
    draw: Annotated[int, "which random draw of users, and of the fifth of each one's tweets to test on"] = 0,
) -> Federation:
    """Tell happy tweets (1) from sad ones (0), a device for each user, 80/20 at random within each.

    Words are split as in LEAF and FedProx. These keep the case, which leaves one word in five without a vector; in
    lower case it is one in eleven. Here as there, such a word is the zero vector, and zero vectors fill up a short
    tweet.
    """
    check("min_tweets", min_tweets, min_tweets is None or min_tweets >= 2, "should be at least 2: to train and to test")
    check("words", words, words >= 1, "should be at least 1")
    choose("case", case, ("lower", "keep"))
    check_whole("draw", draw, 0)
    path, vectors = raw_files(glove)
    check(f"glove: {vectors}", None, vectors.is_file(), "should be a file of GloVe vectors, plain text or gz")
    recipe = {"dataset": "sent140", "min_tweets": min_tweets, "words": words, "case": case}
    stored = cache.cached(recipe, [path, vectors], lambda: _corpus(path, vectors, min_tweets, words, case))
    user, table = stored["user"], stored["table"]

    users = int(user.max()) + 1
    count = users if devices == "all" else devices
    check_whole("devices", count, 1, users)
    drawn = np.isin(user, np.random.default_rng([draw, 0]).permutation(users)[:count])
    test = _fifth(user, draw)
    federation = Federation.from_arrays(
        "sent140", stored["x"][drawn], stored["y"][drawn], user[drawn], test[drawn], classes=2
    )
    notes, total = [], int(stored["tweets"])
    if total < WHOLE:
        least = f"users with at least {stored['least']}"
        notes.append(f"a sample of Sentiment140: {total:,} of its {WHOLE:,} tweets, {least}")
    if table.shape[1] != 300:
        notes.append(f"GloVe vectors of {table.shape[1]} numbers, not the paper's 300")
    return replace(federation, table=table, expand=expand, note="; ".join(notes))


def raw_files(glove: str | None = None) -> list[Path]:
    """The file of all tweets, or else of a sample, and the word vectors."""
    tweets = source_files.raw("sent140", TWEETS, TWEETS + ".gz", "trainingandtestdata.zip", SAMPLE, SAMPLE + ".gz")
    return [tweets, Path(glove) if glove else source_files.raw("glove", *GLOVE)]


def expand(table: Any, x: Any) -> Any:
    """The vectors of the words x."""
    return table[x]


def tweets(path: Path, keep: Iterable[Any] | None = None) -> Iterator[tuple[int, str, str]]:
    """The sentiment, user and text of each tweet, or of those on the lines that `keep` marks."""
    with _archived(path) if path.suffix == ".zip" else source_files.opened(path) as file:
        lines: Iterator[str] = io.TextIOWrapper(file, encoding="latin-1", newline="\n")
        rows = csv.reader(lines if keep is None else compress(lines, keep))
        number = 0
        try:
            for number, row in enumerate(rows, 1):
                if rows.line_num != number:
                    lines_used = rows.line_num - number + 1
                    raise _wrong(path, number, "lines", lines_used, "should be 1; a quotation mark is not closed")
                if len(row) != len(COLUMNS):
                    raise _wrong(path, number, "columns", len(row), f"should be 6: {', '.join(COLUMNS)}")
                target, _, _, _, user, text = row
                if target not in SENTIMENT:
                    raise _wrong(path, number, "target", target, "should be 0 (sad) or 4 (happy)")
                if not user:
                    raise _wrong(path, number, "user", user, "should not be empty")
                yield SENTIMENT[target], user, text
        except csv.Error as error:
            raise InputError(f"{path}: line {number + 1}", str(error), "should be a line of csv") from error


def embedding(path: Path, numbers: Mapping[str, int]) -> tuple[NDArray, NDArray]:
    """The numbers and vectors of the words that a GloVe file has; of other words, most of the file, none is parsed."""
    vectors: dict[int, NDArray] = {}
    length = 0
    with source_files.opened(path) as file:
        for line_number, line in enumerate(file, 1):
            word, _, values = line.rstrip().partition(b" ")
            count = values.count(b" ") + 1 if values else 0
            length = length or count
            if count > length and not is_number(values.partition(b" ")[0]):
                continue  # some of GloVe's words contain spaces, such as ". . ."; tokens do not
            if count != length or not count:
                expected = f"should be {length}, as on line 1" if length else "should be at least 1"
                raise _wrong(path, line_number, "numbers", count, expected)
            try:
                number = numbers.get(word.decode())
            except UnicodeDecodeError as error:
                raise _wrong(path, line_number, "word", word, "should be utf-8 text") from error
            if number is not None:
                vectors[number] = _vector(path, line_number, values)
    check(f"{path}: words of the tweets", 0, vectors, "should be at least 1")
    return np.array(list(vectors)), np.stack(list(vectors.values()))


def _vector(path: Path, line_number: int, values: bytes) -> NDArray:
    try:
        vector = np.array([float(value) for value in values.split(b" ")])
    except ValueError:
        vector = np.array([np.nan])
    if not (abs(vector) < np.finfo(np.float32).max).all():  # false for NaN too
        raise _wrong(path, line_number, "vector", values.decode(errors="replace"), "should be finite numbers")
    return vector.astype(np.float32)


def _corpus(path: Path, vectors: Path, min_tweets: int | None, words: int, case: str) -> dict[str, NDArray]:
    """The tweets of users with enough of them: x, y and user per tweet, the table, and numbers for the note."""
    numbers: dict[str, int] = {}
    owners, sentiments = array("i"), array("b")
    for sentiment, name, _ in tweets(path):
        owners.append(numbers.setdefault(name, len(numbers)))
        sentiments.append(sentiment)
    check(f"{path}: tweets", 0, owners, "should be at least 1")
    owner, y = np.array(owners), np.array(sentiments)
    size = np.bincount(owner)
    least = min_tweets or (30 if len(y) >= WHOLE else 5)
    leaves = {count: int((size >= count).sum()) for count in (least, 20, 10, 5, 2)}
    would = [f"{count} leaves {users}" for count, users in leaves.items() if count < least and users > 1]
    instead = ", ".join(would) or "no value leaves two"
    check("min_tweets", least, leaves[least] > 1, f"leaves {leaves[least]} of {len(size)} users in {path}; {instead}")
    enough = size >= least
    keep = enough[owner]

    x = np.zeros((int(keep.sum()), words), dtype=np.int32)  # the numbers of the first words; 0 where there is none
    numbers = {}
    for i, (_, _, text) in enumerate(tweets(path, keep)):
        tokens = TOKEN.findall(text.lower() if case == "lower" else text)[:words]
        x[i, : len(tokens)] = [numbers.setdefault(token, len(numbers) + 1) for token in tokens]
    present, rows = embedding(vectors, numbers)
    renumber = np.zeros(len(numbers) + 1, dtype=np.int32)
    renumber[present] = np.arange(1, len(present) + 1)
    return {
        "x": renumber[x],
        "y": y[keep],
        "user": (np.cumsum(enough) - 1)[owner[keep]],
        "table": np.concatenate([np.zeros_like(rows[:1]), rows]),
        "tweets": np.array(len(y)),
        "least": np.array(least),
    }


def _fifth(user: NDArray, draw: int) -> NDArray:
    """Mark a fifth of each user's tweets at random: n - int(0.8 n) of them, never all."""
    order = np.lexsort((np.random.default_rng([draw, 1]).random(len(user)), user))
    size = np.bincount(user)
    place = np.empty_like(order)
    place[order] = np.arange(len(user)) - np.repeat(np.cumsum(size) - size, size)
    return place >= np.maximum(size * 4 // 5, 1)[user]


def _wrong(path: Path, line: int, field: str, value: object, expected: str) -> InputError:
    return InputError(f"{path}: line {line}: {field}", value, expected)


@contextmanager
def _archived(path: Path) -> Iterator[IO[bytes]]:
    """The csv file in Stanford's archive."""
    kinds = (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)
    failed = refused(str(path), f"should be a complete archive with {TWEETS} in it", *kinds)
    with failed, zipfile.ZipFile(regular(path)) as archive, archive.open(TWEETS) as member:
        yield member
