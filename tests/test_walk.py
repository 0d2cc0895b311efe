"""The walk of a command through the code, which a reader has to follow: how many files, how many changes of package."""

import importlib.util
from pathlib import Path

import pytest

from folb.cli.main import main
from folb.simulation import stacked

SCRIPT = Path(__file__).parents[1] / "scripts/walk.py"
COMPARE = ["compare", "synthetic_1_1", "--algorithms", "folb,fedprox,fedavg"]


def loaded():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("walk", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def walked(tmp_path, monkeypatch):
    """A compare with more options, and its walk. Its chunks do not depend on how fast the machine is."""
    for longest in ("CHUNK_SECONDS", "LONGEST_CHUNK"):
        monkeypatch.setattr(stacked, longest, 1e6)
    script = loaded()

    def compared(*options):
        with script.walked() as walk:
            assert main([*COMPARE, "--out", str(tmp_path / "run"), *options]) == 0
        return walk

    return compared


def test_the_walk_of_a_compare(walked):
    """A program that another test compiled is not traced again: then there are fewer, and never more."""
    walk = walked()
    assert len(walk.files) <= 60, walk.files
    assert walk.changes.total() <= 800, walk.pairs.most_common()
    assert {"cli/compare.py", "simulation/simulate.py", "store/round_lines.py"} <= set(walk.files)


def test_the_walk_of_a_flower_round():
    pytest.importorskip("flwr", reason="needs pip install 'folb[flower]'")
    walk = loaded().flower_round()
    assert len(walk.files) <= 15, walk.files
    assert {"flower/strategy.py", "flower/open_round.py", "core/round.py"} <= set(walk.files)
