"""Several accelerators, and several processes, share the devices of a round."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from folb.cli.main import main
from folb.errors import InputError
from folb.simulation import parallel

# one program for each number of accelerators: a run each of what is stacked, and a survey of all devices
SCRIPT = """
import json, sys
import jax, numpy as np
from folb import algorithms, data, models, simulate, system
from folb.core import shuffle
from folb.simulation import solve

solve.UNROLL, shuffle.UNROLL = 2, 1  # less to compile, as in conftest.py
federation = data.load("synthetic_1_1", sizes=[20, 50, 200, 30, 90])
model = models.logistic(federation.shape, federation.classes)
three = {"select.K": 3}
tried = [algorithms.folb(**three, local={"mu": mu}) for mu in (0.0, 1.0)] + [algorithms.fednu_direct(**three)]
document = {}
cases = {"one": (1, False), "two": (2, False), "eight": (8, False), "two, streamed": (2, True)}
for case in sys.argv[1:]:
    count, stream = cases[case]
    runs = simulate(
        federation,
        model,
        tried if count < 8 and not stream else tried[:2],
        rounds=4,
        seeds=2,
        system=system.fixed(work=5),
        accelerators=count,
        stream=stream,
        record=["gamma"],
    )
    document[case] = [
        {
            "model": [float(v) for leaf in jax.tree.leaves(run.params) for v in leaf.reshape(-1)],
            "train_loss": run.train_loss.tolist(),
            "test_accuracy": run.test_accuracy.tolist(),
            "devices": run.devices.tolist(),
            "gamma": run.records["gamma"].tolist(),
        }
        for run in runs
    ]
print(json.dumps(document))
"""
EXPERIMENT = """
dataset = "synthetic_1_1"
algorithms = ["folb"]
rounds = 12
seeds = 2
[set]
sizes = [20, 50, 200, 30, 90]
select.K = 3
"""
TOLERANCE = 1e-6  # of what is of the order of 1


def environment(accelerators):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={accelerators}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def folb(*arguments, accelerators=1):
    return subprocess.Popen(
        [sys.executable, "-m", "folb", *arguments],
        env=environment(accelerators),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize(
    "others", [("two",), pytest.param(("eight", "two, streamed"), marks=pytest.mark.slow)], ids=str
)
def test_several_accelerators_give_the_result_of_one(others):
    command = [sys.executable, "-c", SCRIPT, "one", *others]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [len(runs) for runs in document.values()] == [6] + [6 if other == "two" else 4 for other in others]
    for runs in document.values():
        for alone, together in zip(document["one"], runs, strict=False):  # some belong to the first only
            assert together["devices"] == alone["devices"]
            for key in ("model", "train_loss", "test_accuracy"):
                np.testing.assert_allclose(together[key], alone[key], rtol=0, atol=TOLERANCE)
            # a ratio of gradients, and some are nearly 0
            np.testing.assert_allclose(together["gamma"], alone["gamma"], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    path = tmp_path_factory.mktemp("experiment") / "experiment.toml"
    path.write_text(EXPERIMENT)
    return str(path)


@pytest.mark.slow
def test_two_processes_give_the_same_result_as_one(tmp_path, experiment, capsys):
    assert main(["run", experiment, "--out", str(tmp_path / "alone"), "--json"]) == 0
    expected = capsys.readouterr().out

    shared = ("--devices", "auto", "--coordinator", f"127.0.0.1:{free_port()}")

    def both(*more):
        """Both processes to their end: what the first prints."""
        processes = [folb("run", experiment, "--json", *shared, "--process", f"{i}/2", *more) for i in range(2)]
        ended = [process.communicate(timeout=600) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ended
        assert ended[1][0] == ""  # the first alone tells
        return ended[0]

    out = str(tmp_path / "together")
    together = json.loads(both("--out", out)[0])
    for one, other in zip(json.loads(expected)["runs"], together["runs"], strict=True):
        for key in ("train_loss", "test_accuracy"):
            np.testing.assert_allclose(other[key], one[key], rtol=0, atol=TOLERANCE)
    with open(os.path.join(out, "environment.json")) as file:
        assert json.load(file)["accelerators"] == 2
    assert "finished already" in both("--out", out)[1]


def test_if_the_first_process_fails_the_other_ends(tmp_path, experiment):
    taken = tmp_path / "a file"
    taken.write_text("")
    shared = ("--devices", "auto", "--coordinator", f"127.0.0.1:{free_port()}")
    first = folb("run", experiment, *shared, "--process", "0/2", "--out", str(taken))
    second = folb("run", experiment, *shared, "--process", "1/2")
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 2
    assert "out" in errors
    assert "Traceback" not in errors
    second.communicate(timeout=120)
    assert second.returncode != 0


@pytest.mark.parametrize("count", [0, 2, True, "many", 1.0])
def test_a_number_of_accelerators_that_are_not_there_is_refused(count):
    with pytest.raises(InputError, match=r"^accelerators = .*should be auto, or a number from 1 to the 1 "):
        parallel.mesh(count)


@pytest.mark.parametrize(
    ("coordinator", "process", "named"),
    [
        ("somewhere", "0/2", "coordinator"),
        (":1234", "0/2", "coordinator"),
        ("localhost:port", "0/2", "coordinator"),
        ("localhost:1234", "2/2", "process"),
        ("localhost:1234", "2", "process"),
        ("localhost:1234", "a/b", "process"),
        ("localhost:1234", "-1/2", "process"),
    ],
)
def test_processes_that_cannot_be_joined_are_refused(coordinator, process, named):
    with pytest.raises(InputError, match=f"^{named} = "):
        parallel.join(coordinator, process)


def test_a_process_needs_a_coordinator(tmp_path, experiment):
    process = folb("run", experiment, "--process", "0/2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--coordinator" in errors
