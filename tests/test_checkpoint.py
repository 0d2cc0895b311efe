"""Resuming from a checkpoint: only from one that is complete and from the same simulation."""

import jax
import numpy as np

from folb import Model, algorithms, data, models, simulate
from folb.store import run_arrays

FEDERATION = data.load("synthetic_1_1", sizes=[20, 30])


def run(path, model, rounds, **settings):
    algorithm = algorithms.fedavg(select={"K": 2}, **settings)
    return simulate(FEDERATION, model, algorithm, rounds=rounds, checkpoints=path)[0]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True))


def flipped(model):
    """The same functions by name, and the same start, but another loss."""

    def rename(f, like):
        f.__name__, f.__qualname__ = like.__name__, like.__qualname__
        return f

    loss = rename(lambda params, x, y: -model.loss(params, x, y), model.loss)
    return Model(model.init, loss, model.predict)


def test_a_checkpoint_is_for_its_own_simulation_alone(tmp_path, monkeypatch):
    zeros = models.logistic(FEDERATION.shape, FEDERATION.classes)
    taken = []
    load = run_arrays.load_checkpoint
    monkeypatch.setattr(run_arrays, "load_checkpoint", lambda *args: taken.append(load(*args)) or taken[-1])
    whole = run(tmp_path, zeros, 6)
    assert not taken  # there was none
    # more rounds of the same simulation resume; other numbers, another start or another loss do not
    assert len(run(tmp_path, zeros, 8).seconds) == 8 and taken.pop()[0] == 7
    run(tmp_path, zeros, 3)
    assert taken.pop()[0] == 9  # the checkpoint is beyond the rounds asked for: played again from the start
    run(tmp_path, zeros, 6, local={"lr": 0.5})
    assert taken.pop() is None
    run(tmp_path, models.logistic(FEDERATION.shape, FEDERATION.classes, init="glorot"), 6)
    assert taken.pop() is None
    run(tmp_path, flipped(zeros), 6)
    assert taken.pop() is None
    # damage anywhere means a start from scratch, to the same result
    run(tmp_path, zeros, 6)
    for damage in (lambda c: b"", lambda c: c[: len(c) // 2], lambda c: bytes(255 - byte for byte in c)):
        for kept in tmp_path.iterdir():
            kept.write_bytes(damage(kept.read_bytes()))
        taken.clear()
        assert same(run(tmp_path, zeros, 6), whole) and taken.pop() is None


def test_the_directory_of_checkpoints_is_made(tmp_path):
    run(tmp_path / "new" / "one", models.logistic(FEDERATION.shape, FEDERATION.classes), 2)
    assert any((tmp_path / "new" / "one").iterdir())
