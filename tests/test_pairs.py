"""Every pair of parts is refused by the table of conflicts, with a reason, or plays and keeps its promises.

The promises: finite numbers, unless liars meet no defence; no weight above c/K with a guard; no privacy without an
epsilon; and bytes: every reply costs its update and all that its algorithm asks of a device, and nothing is free.
"""

import itertools
import math
import traceback

import jax
import numpy as np
import pytest

from folb import Algorithm, InputError, models, simulate
from folb.core.algorithm import SLOTS
from folb.core.tree import size
from folb.data.federation import Federation
from folb.models.model import params_like

K, N, CLASSES, FEATURES, ROUNDS = 8, 16, 3, 4, 3
PARTS = [(name, part) for name, slot in SLOTS.items() for part in slot.parts]
PAIRS = [(one, other) for one, other in itertools.combinations(PARTS, 2) if one[0] != other[0]]
SAMPLE = 200  # pairs that every run of the tests plays; the slow test plays all
TABLE = ("conflicts.py", "guard.py", "robust.py")  # where a pair may be refused
rng = np.random.default_rng(0)
FEDERATION = Federation.from_arrays(
    "pairs",
    rng.normal(size=(10 * N, FEATURES)).astype(np.float32),
    rng.integers(0, CLASSES, 10 * N),
    np.repeat(np.arange(N), 10),
)
MODEL = models.logistic(FEDERATION.shape, FEDERATION.classes)
NETWORK = models.mlp(FEDERATION.shape, FEDERATION.classes, first=3, second=2)
OF_NETWORKS = {("whiten", "orthogonal"), ("local", "orthogonal")}  # parts that do nothing for other models


def model_of(pair):
    return NETWORK if OF_NETWORKS & set(pair) else MODEL


def coded(D):
    """The bytes of D numbers, by codec."""
    return {
        None: 4 * D,
        "int8": D + 4,
        "int4": math.ceil(D / 2) + 4,
        "sign": math.ceil(D / 8) + 4,
        "top_k": 8 * math.ceil(0.1 * D),
        "random_k": 4 * math.ceil(0.1 * D),
    }


def settings(pair):
    """The pair, and what its parts need to make sense."""
    given = dict(pair)
    needed = {"select.K": K, "select.replacement": False, "local.batch": 5}
    if "guard" in given or given.get("gradient", "exact") != "exact":
        needed["rule"] = "folb"
    if "privacy" in given:
        needed |= {"privacy.noise": 0.5, "select": "poisson"}
    if "staleness" in given:
        needed["concurrency"] = "K"
    return needed | given


def made(pair):
    """The algorithm of the pair, or None if the table of conflicts refuses it with a reason."""
    try:
        return Algorithm(**settings(pair))
    except InputError as error:
        files = {frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)}
        assert files & set(TABLE), f"{pair} is refused, but not by the table: {error}"
        assert len(error.expected) > 20, f"{pair} is refused without a reason: {error}"
        return None


def keeps_its_promises(pair, algorithm):
    """Plays three rounds."""
    (run,) = simulate(FEDERATION, model_of(pair), algorithm, rounds=ROUNDS, record=("weights",))
    weights = run.records["weights"]
    lies = algorithm.attack is not None and dict(pair)["attack"] != "honest"
    if not lies or algorithm.robust is not None or algorithm.guard is not None:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params)), pair
        assert np.isfinite(run.train_loss).all() and np.isfinite(weights).all(), pair
    if algorithm.guard is not None:
        assert weights.max() <= float(algorithm.guard.cap) / K + 1e-5 and weights.min() >= 0, pair
    if algorithm.privacy is not None:
        assert run.epsilon is not None and 0 < run.epsilon < math.inf, pair
    assert not weights[~run.updated].any(), pair
    check_bytes(pair, algorithm, run)


def check_bytes(pair, algorithm, run):
    """Nothing is free: each reply of S_1, of S_2 and to a survey is paid for, and nothing else is."""
    how, codec, source = algorithm.selection, algorithm.compression.up, dict(algorithm.gradient.settings)
    D = size(params_like(model_of(pair)))
    model = coded(D)[None if codec is None else codec.name]
    answers = {"grad": model, "sketch": source.get("m", 0) * source.get("bits", 0) // 8 + 4}
    replies = ((run.times > 0) & ~run.lost).sum(axis=1)
    least = replies * (model + sum(answers.get(one.name, 4) for one in algorithm.uploads))
    if how.survey is not None:
        least = least + (N if how.candidates is None else how.candidates) * (4 * D if how.survey.name == "grad" else 4)
    if how.first is not None:
        least = least + np.array([N * 64 * 4, *[0] * (ROUNDS - 1)])
    most = least + (K * max(model, answers["sketch"]) if how.second else 0)  # S_2 may have been in S_1
    assert (run.bytes_up >= least).all() and (run.bytes_up <= most).all(), (pair, run.bytes_up, least)


def many_together(seed):
    """Parts for as many slots as go together, in a random order: one algorithm has dozens of pairs."""
    rng, together = np.random.default_rng(seed), []
    for name in rng.permutation(list(SLOTS)):
        part = (str(name), str(rng.choice(list(SLOTS[name].parts))))
        if made([*together, part]) is not None:
            together.append(part)
    return together


def test_a_sample_of_pairs_keeps_its_promises_all_at_once():
    chosen = [many_together(seed) for seed in range(4)]
    assert len({pair for parts in chosen for pair in itertools.combinations(sorted(parts), 2)}) >= SAMPLE
    for parts in chosen:
        keeps_its_promises(parts, made(parts))
    assert any(OF_NETWORKS & set(parts) for parts in chosen)


def test_a_refused_pair_has_its_reason_in_the_table():
    refused = [pair for pair in PAIRS if made(pair) is None]
    assert len(PAIRS) - len(refused) > 2000 and len(refused) > 100


@pytest.mark.slow
@pytest.mark.parametrize("place", range(100))
def test_every_pair_is_refused_or_keeps_its_promises(place):
    for pair in PAIRS[place::100]:
        if (algorithm := made(pair)) is not None:
            keeps_its_promises(pair, algorithm)
    jax.clear_caches()  # the programs of all pairs are too many for one process
