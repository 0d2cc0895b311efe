"""The name and the tags that a user gives a run. They are for people: neither results nor paths depend on them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from folb import atomic
from folb.errors import InputError
from folb.store import lock
from folb.store.directory import ENVIRONMENT, read
from folb.store.fields import NAME, TAGS

GIVEN = ("name", "tags")


def checked(name: str | None = None, tags: Sequence[str] | None = None) -> dict[str, Any]:
    """What was given, as environment.json has it. An empty name, or no tags, removes what is there."""
    if name and not NAME.holds(name):
        raise InputError("name", name, NAME.expected)
    if isinstance(tags, str) or (tags and not TAGS.holds(list(tags))):
        raise InputError("tags", tags, TAGS.expected)
    given = {"name": name, "tags": None if tags is None else list(dict.fromkeys(tags))}
    return {key: value for key, value in given.items() if value is not None}


def named(environment: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run with the name and the tags that were `given`; the others stay."""
    whole = {**environment, **given}
    return {key: value for key, value in whole.items() if key not in GIVEN or value}


def name(path: Path, given: Mapping[str, Any]) -> None:
    """Write a name and tags into a run directory that no process is running."""
    there, changed = read(path).environment, path.stat()
    if named(there, given) == there:
        return
    with lock.claimed(path):
        write(path, named(read(path).environment, given))
    with contextlib.suppress(OSError):  # another user's; runs are listed by when they changed, and this is no change
        os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))


def write(path: Path, environment: Mapping[str, Any]) -> None:
    """Write environment.json."""
    atomic.replace(path / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())
