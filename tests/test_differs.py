"""What a run differs in from the defaults, in words."""

import pytest

from folb import algorithms
from folb.core.samplings import Uniform
from folb.experiments.experiment import Experiment, from_toml, to_toml
from folb.experiments.plan import plan

SMALL = {"synthetic_1_1": {"sizes": [20, 30]}}


def differs(**choices):
    own = {"algorithms": ["folb", "fedprox"], "seeds": 5} | choices
    differs = plan(Experiment("synthetic_1_1", **own | {"set": SMALL | own.get("set", {})})).differs
    assert " sizes=20,30" in f" {differs}"
    return f" {differs}".replace(" sizes=20,30", "").replace(" algorithms=folb,fedprox", "").strip()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({}, ""),
        ({"algorithms": ["folb", "fedprox", "fedavg"]}, ""),
        ({"algorithms": ["folb"], "rounds": 200, "seeds": 3}, "algorithms=folb rounds=200 seeds=3"),
        ({"seeds": [4, 5], "target": 0.85, "records": True}, "seeds=4,5 target=0.85 records=true"),
        ({"system": "deadline", "set": {"tau": 10}}, "system=deadline tau=10"),
        ({"set": {"local.lr": 0.5}}, "local.lr=0.5"),
        ({"set": {"local.lr": 0.01, "select.K": 10}}, ""),  # as by default
        ({"set": {"local.mu": [0.1, 0.2]}}, "local.mu=0.1,0.2"),
        ({"set": {"folb": {"local.mu": 0.1}}}, "folb.local.mu=0.1"),
        ({"set": {"local.mu": 1}}, "folb.local.mu=1"),  # which is fedprox's own
        ({"set": {"local.lr": [0.01 * n for n in range(1, 9)]}}, "local.lr=0.01,0.02,…,0.08"),
        ({"box": {"local.lr": "log:0.001..1"}, "points": 4}, "points=4 local.lr=log:0.001..1"),
        ({"model": "examples/my_model.py:mlp", "set": {"width": 8}}, "model=my_model.py:mlp width=8"),
    ],
)
def test_the_choices_that_are_not_the_defaults(choices, words):
    assert differs(**choices) == words


def test_a_file_with_every_setting_differs_in_the_same(tmp_path):
    first = plan(Experiment("synthetic_1_1", rounds=7, set=SMALL | {"local.lr": 0.5, "server": "adam"}))
    (tmp_path / "experiment.toml").write_text(to_toml(first.experiment))
    again = plan(from_toml(tmp_path / "experiment.toml"))
    assert again.differs == first.differs == "rounds=7 sizes=20,30 local.lr=0.5 server=adam"
    assert [one.settings for one in again.algorithms] == [one.settings for one in first.algorithms]


@pytest.mark.parametrize(
    "given",
    [
        {"server": "adam"},
        {"server": ["adam", "plain"]},
        {"server": ["adam", "yogi"], "server.lr": 1},  # not adam's, though it is plain's
        {"local": "momentum", "local.beta": 0.5},
        {"robust": "krum", "select.replacement": False},
        {"privacy": "central", "privacy.noise": 1, "select": "poisson"},
    ],
)
def test_a_file_with_every_setting_makes_the_same_algorithms(given, tmp_path):
    own = {"synthetic_1_1": {"sizes": [20] * 12}} | given
    first = plan(
        Experiment("synthetic_1_1", algorithms=["fedavg", "fedprox", "fedasync"][: 3 - (len(given) > 1)], set=own)
    )
    (tmp_path / "experiment.toml").write_text(to_toml(first.experiment))
    again = plan(from_toml(tmp_path / "experiment.toml"))
    assert [one.settings for one in again.algorithms] == [one.settings for one in first.algorithms]
    assert again.differs == first.differs and all(f"{name}=" in first.differs for name in given)


def test_on_flower_only_what_a_file_can_hold_is_told():
    pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")
    from folb.flower.run_directory import RunSettings
    from folb.flower.strategy_settings import StrategySettings

    made = algorithms.fedavg(select={"name": Uniform(), "K": 3})
    assert RunSettings(StrategySettings(made), made, 5).differs() == "algorithms=fedavg rounds=5 select.K=3"


OWN = """
import folb


class Steady(folb.ServerStep):
    most: float = folb.setting("the longest step", default=1.0)

    def init(self, params):
        return ()

    def apply(self, memory, round, update):
        return round.params, memory


mine = folb.Algorithm(server=Steady(0.5))
"""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"mine.server.most": [0.25, 2]}, " server.most=0.25,2"),  # which no other has
        ({"mine.server": "adam"}, "mine.server=adam"),
        (
            {"fedavg.server": "my_server.py:Steady", "fedavg.server.most": 3},
            "fedavg.server=my_server.py:Steady fedavg.server.most=3",
        ),
    ],
)
def test_a_file_with_parts_of_a_user_makes_the_same_algorithms(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_server.py").write_text(OWN)
    first = plan(Experiment("synthetic_1_1", algorithms=["fedavg", "my_server.py:mine"], set=SMALL | given))
    (tmp_path / "experiment.toml").write_text(to_toml(first.experiment))
    again = plan(from_toml(tmp_path / "experiment.toml"))
    assert [one.settings for one in again.algorithms] == [one.settings for one in first.algorithms]
    assert again.differs == first.differs and first.differs.endswith(words)
    assert again.identity == first.identity
