"""Parts of a user's own, for tests that need many."""

import folb


def sampling(weigh, **promises):
    """A sampling that returns weigh(known)."""
    return type("Mine", (folb.Sampling,), {"weigh": lambda self, known: weigh(known), **promises})()
