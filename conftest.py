"""What all tests share."""

import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile

import pytest

# Flower would report home
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

# Most of the tests' time goes to XLA, which compiles programs that run for milliseconds. So it does not optimize, and
# the workers, and the commands that the tests start, share compiled programs in one directory. It is empty when the
# tests start and removed when they end. All this is here because it must run before jax is imported.
# A program stays in one piece, too: to compile several at once costs more than it saves where every core has work.
_QUICK = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
_CACHE = None
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit all of it from the process that starts them
    # Python keeps the modules that it compiles, even where it is told not to: dozens of processes load the same ones
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    _CACHE = tempfile.mkdtemp(prefix="folb-tests-")
    os.environ |= {
        "XLA_FLAGS": f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".strip(),
        "XDG_CACHE_HOME": _CACHE,
        "JAX_COMPILATION_CACHE_DIR": os.path.join(_CACHE, "folb", "compiled"),  # where the command line looks, too
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # JAX does not write its files atomically: who reads half a file compiles again, and should not warn
        "PYTHONWARNINGS": ",".join(
            filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:Error reading persistent compilation cache entry"])
        ),
    }

# a process that was started in the background ignores Ctrl-C, and so would the processes that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


# What jax traces is many small objects that live long: to look through them for garbage takes a tenth of the time
gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # the modules stay


def pytest_unconfigure(config):
    if _CACHE is not None:
        shutil.rmtree(_CACHE, ignore_errors=True)


# The slowest files, slowest first: workers take whole files, and should end at about the same time
LONGEST = (
    *("deployment", "browser", "flower", "family", "store", "slots", "compression", "conformance", "cli", "network"),
    *("privacy", "models", "theory", "parallel", "reproduce", "robust", "metrics", "guard", "flower_replies"),
    *("kept_model", "tune", "stream", "selection", "device_trace", "execute", "documents", "flower_privacy", "system"),
    *("asynchronous", "sample", "attacks", "damage", "arena", "data", "flower_hostile", "terminal", "hostile"),
    *("shuffle", "threads", "hostile_trust", "naming", "architecture", "checkpoint", "device", "rules", "catalogue"),
    *("step_size", "mnist", "trackers", "starting"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    rank = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_make_parametrize_id(config, val, argname):
    """Name bytes by their argument: a gzip file contains the time when it was made, which differs between workers."""
    return argname if isinstance(val, bytes) else None


_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def runs(request, tmp_path_factory, monkeypatch):
    """Run directories go where the test's other files go.

    A test without files gets no directory: to make one takes longer than many a test does.
    """
    own = "tmp_path" in request.fixturenames
    where = request.getfixturevalue("tmp_path") if own else tmp_path_factory.getbasetemp() / f"test-{next(_NUMBERS)}"
    monkeypatch.setenv("FOLB_RUNS", str(where / "runs"))


@pytest.fixture
def undrawn(request, monkeypatch):
    """A run ends without its picture, which takes longer to draw than the rounds of a small run take.

    For files whose tests are about something else. Those marked `drawn` draw, and so do all tests of other files.
    """
    from folb.report import figures

    draw = figures.curves
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(
            figures,
            "curves",
            lambda runs, form="png", **about: b"\x89PNG" if form == "png" else draw(runs, form, **about),
        )


@pytest.fixture(scope="session", autouse=True)
def short_loops():
    """Two mini-batch steps and one round of the shuffle are a turn of their loop: a sixth less to compile.

    What is computed is the same. Processes that a test starts have the usual loops, and programs of their own:
    `usual_loops` gives a test the same.
    """
    from folb.core import shuffle
    from folb.simulation import solve

    usual = solve.UNROLL, shuffle.UNROLL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "UNROLL", 2)
        patch.setattr(shuffle, "UNROLL", 1)
        yield usual


@pytest.fixture(scope="module")
def usual_loops(short_loops):
    """The tests of a file share compiled programs with the processes that they start."""
    from folb.core import shuffle
    from folb.simulation import solve

    steps, rounds = short_loops
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "UNROLL", steps)
        patch.setattr(shuffle, "UNROLL", rounds)
        yield
