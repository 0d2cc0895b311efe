"""What all tests share."""

import os
import signal

import pytest

# Flower would report home
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

# a process that was started in the background is deaf to Ctrl-C, and so would be those that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(config, val, argname):
    """Name bytes by their argument: a gzip file holds the time it was made, and two workers would not agree on it."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Run directories go where the test's other files go."""
    monkeypatch.setenv("FOLB_RUNS", str(tmp_path / "runs"))
