"""A part is a value: what its class promises, and what a user's own class may be."""

import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folb
from folb import InputError, algorithms
from folb.core.algorithm import SLOTS
from folb.core.drift import MEMORIES, FedVARP
from folb.core.server_step import SERVERS, Adam, FedExP, Plain

KINDS = list(dict.fromkeys(kind for slot in SLOTS.values() for kind in slot.known))  # a codec may be in two slots


class Halved(folb.ServerStep):
    share: float = folb.setting("the share of an update", within=(0, 1), default=0.5)
    kind: str = folb.setting("a word", default="plain", static=True)

    def apply(self, memory, round, update):
        return folb.tree.add(round.params, update.delta, self.share), memory


def test_a_part_is_a_value():
    step = Halved(share=0.25)
    assert step == Halved(share=0.25) != Halved() and step.settings == {"share": 0.25, "kind": "plain"}
    assert jax.tree.leaves(step) == [0.25] and jax.tree.map(lambda v: 2 * v, step) == Halved(share=0.5)
    assert replace(step, share=1.0).share == 1.0 and pickle.loads(pickle.dumps(step)) == step
    assert Adam(lr=0.1) == replace(Adam(), lr=0.1) and hash(Adam(lr=0.1)) == hash(Adam(lr=0.1))


def test_the_structures_of_two_parts_are_never_equal():
    # jax looks for a compiled program by its structure: it would play one part's program for another
    structures = [jax.tree.structure(kind()) for kind in KINDS]
    assert all(one != other for i, one in enumerate(structures) for other in structures[:i])
    assert jax.tree.structure(Adam(lr=1.0)) == jax.tree.structure(Adam(lr=0.5))
    assert jax.tree.structure(Halved()) != jax.tree.structure(Halved(kind="another"))


@pytest.mark.parametrize("slot", SLOTS.values(), ids=lambda slot: slot.name)
def test_every_setting_of_every_part_has_help_a_range_and_a_default_within_it(slot):
    for name, kind in slot.parts.items():
        made = kind()
        made.check(slot.spelt)
        assert made.name == name and kind.__doc__
        for setting in made.settings:
            assert slot.spelt(setting) in slot.fields


def test_two_parts_with_the_same_fields_are_two_programs():
    """jax compares structures: were they equal, it could run the program of the other part."""
    parts = [kind() for kind in KINDS]
    for i, one in enumerate(parts):
        assert all(jax.tree.structure(one) != jax.tree.structure(other) for other in parts[:i])
        assert jax.tree.structure(one) == jax.tree.structure(type(one)())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 2.0}, r"^server\.share = 2.0: should be from 0 to 1"),
        ({"share": "a"}, r"^server\.share = 'a': should be from 0 to 1"),
        ({"share": float("nan")}, r"^server\.share = nan: should be from 0 to 1"),
        ({"share": [0.1, 0.2]}, r"^server\.share = "),
    ],
)
def test_a_setting_of_one_s_own_is_checked(settings, said):
    with pytest.raises(InputError, match=said):
        algorithms.fedavg(server=Halved(**settings))


def test_what_a_class_may_not_be():
    with pytest.raises(TypeError, match="should have the base of Plain, and not Plain"):

        class Longer(Plain):
            def apply(self, memory, round, update):
                return folb.tree.add(round.params, update.delta, 3.0), memory

    with pytest.raises(TypeError, match="every part has `check`"):

        class Shadow(folb.ServerStep):
            check: float = 1.0

    with pytest.raises(TypeError, match=r"Word.kind = 'a': should be a number, or folb.setting\(..., static=True\)"):

        class Word(folb.ServerStep):
            kind: str = "a"


def test_a_method_is_used_if_there_is_one():
    class Ahead(Halved.__base__):
        def send(self, memory, params):
            return jax.tree.map(jnp.zeros_like, params)

        def apply(self, memory, round, update):
            return round.params, memory

    assert Ahead().has("send") and not Halved().has("send")
    memories = MEMORIES.parts
    assert {name for name, kind in memories.items() if not kind().has("shift")} == {"fedvarp", "fedpac"}
    assert {name for name, kind in memories.items() if kind().has("correct")} == {"feddyn", "fedvarp", "adabest"}


def test_a_value_and_a_name_are_the_same_algorithm():
    by_name = algorithms.fedavg(server={"name": "fedexp", "lr": 0.5, "eps": 0.01})
    by_value = algorithms.fedavg(server=FedExP(lr=0.5, eps=0.01))
    assert by_name.server == by_value.server and by_name.average == by_value.average
    for name in ("server", "server.lr", "server.eps"):
        assert by_name.settings[name] == by_value.settings[name]
    assert repr(algorithms.fedavg(server=Plain(lr=0.5))) != repr(algorithms.fedavg(server=Plain(lr=0.25)))
    np.testing.assert_equal(set(SERVERS.parts), {kind().name for kind in SERVERS.known})


class Adaptive(folb.ServerStep):
    called = "adam"

    def apply(self, memory, round, update):
        return round.params, memory


class Crowd(folb.Sampling):
    K: float = folb.setting("a number of its own", default=0.5)

    def weigh(self, known):
        return known.size


WRONG = {
    "a fixed part by None": (lambda: algorithms.scaffold(memory=None), "memory = 'none': is fixed"),
    "a fixed part by its class": (lambda: algorithms.scaffold(memory=FedVARP), "memory = 'fedvarp': is fixed"),
    "a fixed rule by its value": (lambda: algorithms.folb(rule=folb.rules.Mean()), "rule = 'mean': is fixed"),
    "a proximal term that is none": (
        lambda: algorithms.fedavg(local=algorithms.fedprox().solver),
        "local.mu = 1.0: is",
    ),
    "a field that is none": (lambda: folb.Algorithm(**{"server.typo": None}), "setting = 'server.typo'"),
    "what others say": (lambda: folb.Algorithm(batch_size=3), "setting = 'batch_size': folb calls this local.batch"),
    "an empty name": (lambda: folb.Algorithm(server={"": "plain"}), "should be the path of a setting"),
    "a name of folb's": (lambda: folb.Algorithm(server=Adaptive()), "server = 'adam': should have another name"),
    "a field of the record": (lambda: folb.Algorithm(select=Crowd()), "select.K = 'crowd': should have another name"),
    "draws that are settled": (
        lambda: folb.Algorithm(select=folb.Algorithm(select={"name": "poisson", "K": 5}).selection),
        "select = 'selection': should be a new part",
    ),
    "what jax alone gives": (lambda: folb.Algorithm(origin=1), "setting = 'origin'"),
    "a setting twice": (lambda: folb.Algorithm(server={"lr": 1.0}, **{"server.lr": 2.0}), "server.lr = 2.0: is given"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_the_parts_is_named(mistake):
    make, said = WRONG[mistake]
    with pytest.raises(InputError, match=said):
        make()


def test_settings_record_single_numbers_of_numpy_and_jax():
    made = folb.Algorithm(local={"lr": np.float64(0.5)}, server={"lr": jnp.float32(0.25)}, select={"K": np.int64(5)})
    assert [made.settings[path] for path in ("local.lr", "server.lr", "select.K")] == [0.5, 0.25, 5]
