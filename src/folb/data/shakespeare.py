"""The complete works of Shakespeare by speaking role, parsed as LEAF does (Caldas et al.; McMahan et al.).

The characters of all roles lie end to end in one table of codes, and a sample is an offset into it: the 80
characters from there on are the input, and the one after them is the label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from folb.data import cache, source_files
from folb.data.federation import Federation, Split, starts
from folb.errors import InputError, check, check_whole, choose
from folb.typing import NDArray

WINDOW = 80
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
BYLINE = "by William Shakespeare"
LARGEST = 1 << 26  # bytes; the complete works are 5.5 million


def shakespeare(
    *,
    devices: Annotated[int | Literal["all"], "number of speaking roles, or 'all' of them"] = 143,
    roles: Annotated[Literal["random", "largest"], "which roles, if not all"] = "random",
    split: Annotated[
        Literal["time", "gap", "random"], "which four fifths of a role's windows are for training"
    ] = "time",
    draw: Annotated[int, "which random draw of roles, and of windows for split=random"] = 0,
) -> Federation:
    """Predict the next character from 80, a device for each speaking role.

    As in FedProx, the 143 roles are drawn at random from all; they keep the order of the plays. A window is a training
    sample or a test sample, 80/20 within each role:

    - time: the first four fifths train and the rest test. No character to be predicted in the test was part
      of a training window; the inputs of a role's first 80 test windows reach back into the training text.
    - gap: LEAF's layout, as `time` but without the 79 windows in between. The last label of the training text
      is the first input character of the test, and nothing else is shared. Small roles have no test windows.
    - random: FedProx's layout. Windows overlap, so nearly every character to be predicted in the test was
      seen in training windows.
    """
    choose("roles", roles, ("random", "largest"))
    choose("split", split, ("time", "gap", "random"))
    check_whole("draw", draw, 0)
    (path,) = raw_files()
    stored = cache.cached({"dataset": "shakespeare"}, [path], lambda: _corpus(path))
    text, length = stored["text"], stored["length"]
    begin = np.cumsum(length) - length

    count = len(length) if devices == "all" else devices
    check_whole("devices", count, 1, len(length))
    rank = np.argsort(-length, kind="stable")
    if roles == "random":
        rank = np.random.default_rng([draw, 0]).permutation(len(length))
    trains, tests = [], []
    for k in np.sort(rank[:count]):
        windows = np.arange(length[k] - WINDOW, dtype=np.int32)
        cut = max(len(windows) * 4 // 5, 1)
        if split == "random":
            windows = np.random.default_rng([draw, 1, k]).permutation(windows)
        trains.append(begin[k].astype(np.int32) + windows[:cut])
        tests.append(begin[k].astype(np.int32) + windows[cut + (WINDOW - 1 if split == "gap" else 0) :])
    sides = _gather(text, trains), _gather(text, tests)
    return Federation("shakespeare", *sides, len(ALPHABET), table=text, expand=expand)


def raw_files() -> list[Path]:
    """Project Gutenberg's #100, packed or plain."""
    return [source_files.raw("shakespeare", "pg100.txt", "pg100.txt.gz", "100.txt", "100.txt.gz")]


def expand(table: Any, x: Any) -> Any:
    """The windows of 80 characters that begin at the offsets x."""
    return table[x[:, None] + np.arange(WINDOW, dtype=np.int32)]


def parse(text: str) -> dict[tuple[str, str], str]:
    """What each (play, role) says, in the layout of Project Gutenberg's posting of 1994 to 2011.

    As in LEAF, roles with at most two lines, and works with at most one role (the poems), are left out. So are roles
    too short for one window.
    """
    lines = text.splitlines()
    bylines = [i for i, line in enumerate(lines) if BYLINE in line]
    said = {}
    for begin, end in pairwise([*bylines, len(lines)]):
        above = (line.strip() for line in reversed(lines[max(begin - 7, 0) : max(begin - 1, 0)]))
        title = next((line for line in above if line), "")
        play = _speeches(lines[begin + 1 : end], flush=title == "THE COMEDY OF ERRORS")
        if len(play) > 1:
            said.update({(title, role): speech for role, speech in play.items() if len(speech) > 2})
    joined = {role: re.sub(" {2,}", " ", " ".join([*speech, ""])) for role, speech in said.items()}
    return {role: speech for role, speech in joined.items() if len(speech) > WINDOW}


def _speeches(lines: Sequence[str], flush: bool) -> dict[str, list[str]]:
    """The lines of each role: `  NAME. First line`, then indented by four or, if `flush`, any up to an act's end."""
    indent = "" if flush else "  "
    opening = re.compile(indent + r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
    said: dict[str, list[str]] = {}
    speech: list[str] | None = None
    for line in lines:
        if match := opening.match(line):
            name = match[1].upper()
            speech = None if flush and name.startswith("ACT ") else said.setdefault(name, [])
            if speech is not None:
                speech.append(match[2])
        elif flush and line.startswith("<"):
            speech = None
        elif speech is not None and line.startswith(2 * indent):
            speech.append(line[len(2 * indent) :])
    return said


def _corpus(path: Path) -> dict[str, NDArray]:
    """The codes of all roles' characters, end to end, and the number of characters of each."""
    data = source_files.content(path, limit=LARGEST)
    try:
        roles = parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = error.object[error.start : error.start + 1]
        raise InputError(f"{path}: line {line}", wrong, "should be utf-8 text") from error
    layout = "should be Project Gutenberg's #100 as posted up to 2011, whose speeches begin '  NAME. '"
    check(f"{path}: speaking roles", 0, roles, layout)
    code = np.full(256, 255, dtype=np.uint8)
    code[list(ALPHABET.encode())] = np.arange(len(ALPHABET))
    for (play, role), speech in roles.items():
        unknown = min(set(speech) - set(ALPHABET), default="")
        check(f"{path}: {play}: {role}", unknown, not unknown, "should be one of LEAF's 80 characters")
    text = np.frombuffer("".join(roles.values()).encode(), dtype=np.uint8)
    return {"text": code[text], "length": np.array([len(speech) for speech in roles.values()])}


def _gather(text: NDArray, offsets: list[NDArray]) -> Split:
    size = np.array([len(rows) for rows in offsets], dtype=np.int32)
    x = np.concatenate(offsets)
    return Split(x, text[x + WINDOW].astype(np.int32), starts(size), size)
