"""What all tests share."""


def pytest_make_parametrize_id(config, val, argname):
    """Name bytes by their argument: a gzip file holds the time it was made, and two workers would not agree on it."""
    return argname if isinstance(val, bytes) else None
