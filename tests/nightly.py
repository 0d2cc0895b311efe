"""Cases of a test that `make test` leaves to the nightly set: they take time, and are nearly those that it runs."""

import pytest


def nightly(cases, chosen):
    """The cases as parameters; those for which chosen(case) is true are marked slow."""
    return [pytest.param(case, marks=pytest.mark.slow) if chosen(case) else case for case in cases]
