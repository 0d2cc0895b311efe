"""Programs that play at the same time: the same results as one by one, and one end for all of them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from folb import algorithms, data, models
from folb.simulation import simulate as simulator
from folb.simulation.settled import settled

FEDERATION = data.load("synthetic_1_1", sizes=[20, 30, 40])
MODEL = models.logistic(FEDERATION.shape, FEDERATION.classes)
THREE = [
    algorithms.fedavg(select={"K": 2}, local={"lr": 0.05}),
    algorithms.folb(select={"K": 2}),
    algorithms.fedavg(select={"K": 2}, server="fedexp"),
]


def ready(together, rounds=6):
    ready = simulator.simulation(settled(FEDERATION, MODEL, THREE, rounds=rounds, seeds=2))
    return replace(ready, together=together)


def test_programs_play_at_the_same_time_with_the_same_results():
    alone, together = ready(1).run(), ready(3).run()
    assert [run.algorithm for run in together] == ["fedavg", "fedavg", "folb", "folb", "fedavg", "fedavg"]
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.algorithm, ours.parameters, ours.seed) == (theirs.algorithm, theirs.parameters, theirs.seed)
        np.testing.assert_array_equal(ours.train_loss, theirs.train_loss)
        for own, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
            np.testing.assert_array_equal(own, other)


def test_a_few_cores_play_a_few_programs(monkeypatch):
    monkeypatch.setattr(simulator, "cores", lambda: 2)
    assert simulator.simulation(settled(FEDERATION, MODEL, THREE, rounds=1)).together == 2
    assert simulator.simulation(settled(FEDERATION, MODEL, THREE[:1], rounds=1)).together == 1
    assert simulator.simulation(settled(FEDERATION, MODEL, THREE, rounds=1, stream=True)).together == 1
    monkeypatch.setattr(simulator, "fitting", lambda *args: 1)  # two runs do not fit into memory together
    assert simulator.simulation(settled(FEDERATION, MODEL, THREE, rounds=1)).together == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_ends_all_programs_and_keeps_their_rounds(tmp_path, error):
    inside = 0

    def interrupt(i, first, part):
        nonlocal inside
        assert not inside  # calls never overlap
        inside = 1
        if i == 2 and first > 1:
            inside = 0
            raise error
        inside = 0

    with pytest.raises(error):
        ready(3, rounds=150).run([simulator.run_by_run(interrupt)], tmp_path)
    resumed = ready(3, rounds=150).run((), tmp_path)
    for ours, theirs in zip(resumed, ready(1, rounds=150).run(), strict=True):
        np.testing.assert_array_equal(ours.test_accuracy, theirs.test_accuracy)


def test_what_has_not_begun_does_not_begin_after_a_failure():
    begun = []

    def play(number, observe):
        begun.append(number)
        observe(1, {number: None})

    def fail(*args):
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        simulator.played(play, 50, 2, [fail])
    assert len(begun) < 50
