"""The versions and the machine that an experiment is run with, a list of its runs, and the name that a user gives it.

Neither results nor paths depend on the name or the tags: they are for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from folb import __version__, atomic
from folb.atomic import claimed, command, now
from folb.core.algorithm import Algorithm
from folb.errors import InputError
from folb.measures import ACCURACY, Metric, facts
from folb.results import summary
from folb.store.directory import ENVIRONMENT, read
from folb.store.experiment_file import NAME, TAGS

# what may change a result's last digit
PROGRAM = ("folb", "python", "jax", "jaxlib", "numpy", "machine", "device", "accelerators", "memory", "stream")


def program(accelerators: int = 1, stream: bool = False) -> dict[str, Any]:
    """The versions, the machine, the command and the time of a run."""
    return {
        "folb": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
        "accelerators": accelerators,
        "memory": f"{memory() >> 30} GiB",  # which decides how many runs are stacked
        "stream": stream,
        "command": command(),
        "started": now(),
    }


def about_runs(
    algorithms: Sequence[Algorithm], seeds: Sequence[int], judged_by: str = ACCURACY, metrics: Sequence[Metric] = ()
) -> list[dict[str, Any]]:
    """What each run is: an algorithm, its settings, a seed, what judges it, and how users' metrics are shown."""
    known = [(algorithm.name, algorithm.settings) for algorithm in algorithms]
    shared = {"judged_by": judged_by} | ({"metrics": users} if (users := facts(metrics)) else {})
    return [
        {"algorithm": label, "name": name, "seed": seed, "parameters": own} | shared
        for label, (name, settings) in zip(summary.labels(known), known, strict=True)
        for own in [summary.plain(settings)]
        for seed in seeds
    ]


def memory() -> int:
    """The memory that the device may use, in bytes, but in whole GiB; for a CPU, the machine's.

    It decides how many runs are stacked; another stack is another program, whose results may differ in the last digit.
    """
    stats = jax.local_devices()[0].memory_stats()
    available = stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, available >> 30) << 30


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GIVEN = ("name", "tags")


def checked_name(name: str | None = None, tags: Sequence[str] | None = None) -> dict[str, Any]:
    """What was given, as environment.json has it. An empty name, or no tags, removes what is there."""
    if name and not NAME.holds(name):
        raise InputError("name", name, NAME.expected)
    if isinstance(tags, str) or (tags and not TAGS.holds(list(tags))):
        raise InputError("tags", tags, TAGS.expected)
    given = {"name": name, "tags": None if tags is None else list(dict.fromkeys(tags))}
    return {key: value for key, value in given.items() if value is not None}


def with_name(environment: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run with the name and the tags that were `given`; the others stay."""
    whole = {**environment, **given}
    return {key: value for key, value in whole.items() if key not in GIVEN or value}


def give_name(path: Path, given: Mapping[str, Any]) -> None:
    """Write a name and tags into a run directory that no process is running."""
    there, changed = read(path).environment, path.stat()
    if with_name(there, given) == there:
        return
    with claimed(path):
        write_environment(path, with_name(read(path).environment, given))
    with contextlib.suppress(OSError):  # another user's; runs are listed by when they changed, and this is no change
        os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))


def write_environment(path: Path, environment: Mapping[str, Any]) -> None:
    atomic.replace(path / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())
