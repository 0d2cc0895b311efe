"""The versions and the machine that an experiment is run with, and a list of its runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np

from folb import __version__
from folb.core.algorithm import Algorithm
from folb.measures import ACCURACY, Metric, facts
from folb.results import summary
from folb.store import lock

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
        "command": lock.command(),
        "started": lock.now(),
    }


def about_runs(
    algorithms: Sequence[Algorithm], seeds: Sequence[int], judged_by: str = ACCURACY, metrics: Sequence[Metric] = ()
) -> list[dict[str, Any]]:
    """What each run is: an algorithm, its settings, a seed, what judges it, and how users' metrics are shown."""
    users = facts(metrics)
    known = [(algorithm.name, algorithm.origin.settings) for algorithm in algorithms]
    return [
        {"algorithm": label, "name": name, "seed": seed, "parameters": parameters, "judged_by": judged_by}
        | ({"metrics": users} if users else {})
        for label, (name, settings) in zip(summary.labels(known), known, strict=True)
        for parameters in [summary.plain(settings)]
        for seed in seeds
    ]


def memory() -> int:
    """The memory that the device may use, in bytes; for a CPU, the machine's.

    In whole GiB: the memory decides how many runs are stacked, and another stack is another program, whose results may
    differ in the last digit. A page more or less should not matter.
    """
    stats = jax.local_devices()[0].memory_stats()
    available = stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, available >> 30) << 30


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
