"""The same algorithms on real Flower processes, on loopback: which nodes are admitted, what a kill costs."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from folb import algorithms, data, models, simulate
from folb.cli import main
from folb.deploy import demo, superlink, warden
from folb.deploy.superlink import HOST, holds
from folb.errors import InputError
from folb.store import directory as store

needs_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="needs flwr")

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "flower"
LONG = 240.0  # seconds: a bound for a slow machine, never reached on another

# On a busy machine a node can be away for more than the usual minute. A round without it would be abandoned.
ALL_FOUR = {"min-available-nodes": 4, "wait": LONG}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A SuperLink with TLS and node keys, and four SuperNodes."""
    with pytest.MonkeyPatch.context() as patch:
        # five processes that ask five times a second take a quarter of a core
        patch.setitem(superlink.BRISK, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.8")
        with superlink.running(tmp_path_factory.mktemp("deployed"), 4) as running:
            nodes = [running.processes[f"node{i}"] for i in range(4)]
            assert holds(lambda: all(said(node, "SuperNode ID") for node in nodes), LONG)
            settle(running)
            yield running


def online(deployed):
    """How many nodes are online, from the SuperLink's database.

    `deployed.online()` says the same, but each question is a process of Flower's, and a second of its imports.
    """
    with contextlib.closing(sqlite3.connect(f"file:{deployed.home / 'superlink.db'}?mode=ro", uri=True)) as database:
        query = "SELECT count(*) FROM node WHERE status = 'online' AND online_until > ?"
        [[count]] = database.execute(query, [time.time()])
    return count


def settle(deployed):
    """All four nodes are there again, after what an earlier test did to them."""
    assert holds(lambda: online(deployed) == 4, LONG)


def ended(deployed, app, config, seconds=LONG):
    """An app that all four nodes have run to its end."""
    settle(deployed)
    submitted = deployed.run(app, config)
    assert holds(lambda: submitted.code is not None, seconds)
    return submitted


BARE = "--isolation=process"  # for a node that gets no work: without the process that would start its apps


def retire(deployed, name):
    """End a node for good."""
    process = deployed.processes[name]
    with deployed.lock:
        process.kept = False
        if process.code is None:
            process.popen.terminate()
    assert holds(lambda: process.code is not None, LONG)


def said(process, words):
    """Whether a log has these words."""
    return words in process.log.read_text(errors="replace")


def rounds(directory):
    return store.read(directory).rounds()[0] if store.is_run(directory) else []


@needs_flower
@pytest.mark.parametrize(
    "names", [("stranger", "misled"), pytest.param(("keyless", "unsure", "plain"), marks=pytest.mark.slow)]
)
def test_only_registered_keys_and_the_right_authority_are_let_in(names, deployed, monkeypatch):
    from folb.deploy.certificates import certificates, node_key

    home = deployed.home
    if "stranger" in names:
        node_key(home / "stranger.key")
        certificates(home / "elsewhere", [HOST])
    authority, key = deployed.credentials("stranger")
    other = f"--root-certificates={home / 'elsewhere' / 'ca.crt'}"
    refused = {
        "stranger": ((authority, key), "Failed to activate SuperNode"),
        "keyless": ((authority,), "All SuperNodes must be registered"),
        "misled": ((other, deployed.credentials("node0")[1]), "CERTIFICATE_VERIFY_FAILED"),
        "unsure": ((deployed.credentials("node0")[1],), "CERTIFICATE_VERIFY_FAILED"),
        "plain": (("--insecure", "--max-retries=1"), "Failed to initialize the connection to the SuperLink"),
    }
    refused = {name: refused[name] for name in names}
    monkeypatch.setattr(superlink, "PAUSE", LONG)  # each further attempt is seconds of imports
    for name, (options, _) in refused.items():
        node = deployed.node(name, "partition-id=4 num-partitions=5", BARE, *options)
        node.kept = name == "stranger"  # the others may give up
    for name, (_, reason) in refused.items():
        assert holds(lambda name=name, reason=reason: said(deployed.processes[name], reason), LONG), name
        if name != "stranger":
            retire(deployed, name)
        assert not said(deployed.processes[name], "SuperNode ID")
    assert online(deployed) == 4
    if "stranger" not in names:
        return
    # the same node, once its key is known: it goes on trying
    deployed.register([home / "stranger.key.pub"])
    deployed.processes["stranger"].due = 0.0
    assert holds(lambda: said(deployed.processes["stranger"], "SuperNode ID"), LONG)
    assert online(deployed) == deployed.online() == 5
    retire(deployed, "stranger")
    settle(deployed)


class FleetOnly(BaseHTTPRequestHandler):
    """The proxy of docs/deployment.md: devices reach /v1/fleet/, and nothing else."""

    protocol_version = "HTTP/1.1"
    upstream: superlink.Deployment

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.startswith("/v1/fleet/"):
            return self.answer(403, {}, b"")
        known = ssl.create_default_context(cafile=self.upstream.home / "ca.crt")
        beyond = http.client.HTTPSConnection(HOST, self.upstream.port, timeout=30, context=known)
        with contextlib.closing(beyond):
            beyond.request("POST", self.path, body, dict(self.headers))
            response = beyond.getresponse()
            self.answer(response.status, {"Content-Type": response.headers.get("Content-Type", "")}, response.read())

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@needs_flower
def test_a_proxy_that_passes_the_fleet_api_alone_is_all_that_a_device_needs(deployed):
    from folb.deploy.certificates import node_key

    home = deployed.home
    node_key(home / "outside.key")
    deployed.register([home / "outside.key.pub"])
    certified = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certified.load_cert_chain(home / "server.pem", home / "server.key")
    with ThreadingHTTPServer((HOST, 0), type("Handler", (FleetOnly,), {"upstream": deployed})) as proxy:
        proxy.socket = certified.wrap_socket(proxy.socket, server_side=True)
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        where = f"--superlink={HOST}:{proxy.server_port}"
        admitted = (*deployed.credentials("outside"), where)
        node = deployed.node("outside", "partition-id=4 num-partitions=5", BARE, *admitted)
        assert holds(lambda: said(node, "SuperNode ID"), LONG)
        assert online(deployed) == 5
        for path in ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
            known = ssl.create_default_context(cafile=home / "ca.crt")
            asked = http.client.HTTPSConnection(HOST, proxy.server_port, timeout=30, context=known)
            with contextlib.closing(asked):
                asked.request("POST", path, b"")
                assert asked.getresponse().status == 403, path
        retire(deployed, "outside")
        proxy.shutdown()


@needs_flower
def test_a_killed_superlink_is_resumed_and_the_result_is_the_simulators(deployed, tmp_path):
    settle(deployed)
    directory = tmp_path / "run"
    config = {"k": 2, "rounds": 2, **ALL_FOUR, "directory": str(directory)}
    first = deployed.run(EXAMPLES / "synthetic", config)
    assert holds(lambda: len(rounds(directory)) >= 1 or first.code is not None, LONG)
    assert first.code is None
    deployed.processes["superlink"].popen.kill()
    deployed.processes["superlink"].popen.wait()
    deployed.superlink()
    before = rounds(directory)
    assert len(before) == 1 and store.read(directory).state == "interrupted"

    again = deployed.run(EXAMPLES / "synthetic", config)
    assert holds(lambda: again.code is not None, LONG)
    assert rounds(directory)[:1] == before  # and not done again
    assert store.read(directory).state == "finished"
    assert_equal_to_the_simulator(directory, algorithms.folb(select={"K": 2}, local={"lr": 0.01}), 2)


def assert_equal_to_the_simulator(directory, algorithm, count):
    """The weights, and what was measured on the way, of so many rounds of four devices."""
    from folb.flower import FederatedStrategy

    federation = data.load("synthetic_1_1", devices=4)
    model = models.logistic(federation.shape, federation.classes)
    # guarded, as the strategy has it
    [run] = simulate(federation, model, [FederatedStrategy(algorithm).algorithm], rounds=count, seeds=[0])
    lines = rounds(directory)
    assert [line["round"] for line in lines] == list(range(1, count + 1))
    assert not [line["abandoned"] for line in lines if "abandoned" in line]  # the model would lack a round
    assert all(line["lost"] == 0 and not line["rejected_devices"] for line in lines)
    with np.load(directory / "model.npz") as archive:
        deployed_model = dict(archive)
    for name, value in run.params.items():
        assert np.abs(deployed_model[name] - value).max() <= 1e-5
        assert np.abs(value).max() > 0.01
    assert np.allclose([line["test_accuracy"] for line in lines], run.test_accuracy, atol=1e-6)
    assert np.allclose([line["train_loss"] for line in lines], run.train_loss, atol=1e-5)


@pytest.mark.slow
@needs_flower
@pytest.mark.parametrize("name", [name for name, make in algorithms.ALGORITHMS.items() if not make().asynchrony])
def test_ten_rounds_equal_the_simulators(name, deployed, tmp_path):
    config = {"algorithm": name, "k": 2, "rounds": 10, **ALL_FOUR, "directory": str(tmp_path / "run")}
    ended(deployed, EXAMPLES / "synthetic", config, 2 * LONG)
    assert_equal_to_the_simulator(
        tmp_path / "run", algorithms.ALGORITHMS[name](select={"K": 2}, local={"lr": 0.01}), 10
    )


@pytest.mark.slow
@needs_flower
@pytest.mark.parametrize(("codec", "least"), [("", 60), ("int8", 8), ("top_k", 8)])
def test_malformed_replies_of_every_kind_are_refused_alone(codec, least, deployed, tmp_path):
    """Three of the four nodes lie, in a different way in every round; Flower itself stops some of these replies."""
    from malformed.kinds import spoilers

    directory = tmp_path / "run"
    config = {"directory": str(directory), "codec": codec}
    submitted = ended(deployed, Path(__file__).parent / "malformed", config, 6 * LONG)
    lines = rounds(directory)
    assert len(lines) == -(-len(spoilers(codec)) // 3), submitted.tail(30)
    assert all(line["devices"] == [0, 1, 2, 3] for line in lines)
    # the places of an honest update may miss those of its gradient: the guard then rejects it
    assert all(line["updated"] for line in lines) or (codec == "top_k" and any(line["updated"] for line in lines))
    assert all(sorted(line["rejected_devices"] + line["lost_devices"]) == [1, 2, 3] for line in lines)
    assert sum(len(line["rejected_devices"]) for line in lines) >= least
    with np.load(directory / "model.npz") as archive:
        assert all(np.isfinite(value).all() for value in archive.values())


@pytest.mark.slow
@needs_flower
def test_updates_through_a_codec_with_error_feedback(deployed, tmp_path):
    """What a codec leaves out stays on the node between rounds: the model is that of the in-process grid."""
    from encoded import server
    from encoded.device import app
    from inprocess import InProcessGrid

    directory = tmp_path / "run"
    submitted = ended(deployed, Path(__file__).parent / "encoded", {"directory": str(directory)})
    assert len(rounds(directory)) == server.ROUNDS, submitted.tail(30)
    expected = server.run(InProcessGrid([app] * 4), tmp_path / "here")
    with np.load(directory / "model.npz") as archive:
        assert all(np.array_equal(archive[name], value) for name, value in expected.items())
    assert [line["bytes_up"] for line in rounds(directory)] == [line["bytes_up"] for line in rounds(tmp_path / "here")]


@pytest.mark.slow
@needs_flower
def test_a_node_killed_in_a_round_costs_its_deadline_at_most_and_comes_back(deployed, tmp_path, monkeypatch):
    settle(deployed)
    directory, deadline = tmp_path / "run", 25.0
    config = {"algorithm": "fedavg", "k": 2, "rounds": 2, "seed": 3, **ALL_FOUR, "deadline": deadline}
    node = deployed.processes["node0"]
    before = node.log.stat().st_size
    submitted = deployed.run(EXAMPLES / "synthetic", config | {"directory": str(directory)})
    assert holds(lambda: b"train message" in node.log.read_bytes()[before:], LONG)
    monkeypatch.setattr(superlink, "PAUSE", 8.0)  # it is refused at first, and each attempt takes seconds
    deployed.processes["node0"].popen.kill()
    assert holds(lambda: submitted.code is not None, LONG)
    first, second = rounds(directory)
    assert store.read(directory).state == "finished"
    assert (first["devices"], first["lost_devices"], first["updated"]) == ([0, 1], [0], True)
    assert (second["devices"], second["lost_devices"], second["updated"]) == ([2, 3], [], True)
    assert first["seconds"] <= deadline + 3 and second["seconds"] <= deadline + 3
    # its old registration has to expire first: until then it is rejected, and tries again
    settle(deployed)
    assert node.starts > 1


@contextlib.contextmanager
def demo_of_one_node(path):
    """The demo, once its node has joined."""
    environment = os.environ | {"TMPDIR": str(path / "tmp"), "FOLB_RUNS": str(path / "runs")}
    (path / "tmp").mkdir()
    command = [sys.executable, "-m", "folb", "deploy", "demo", "--nodes", "1", "--rounds", "1000"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        line = next(line for line in running.stderr if "joined" in line or "error" in line)
        assert "1 SuperNode has joined" in line
        assert len(started_in(path)) >= 4  # each with the one that starts its apps
        yield running


@pytest.mark.slow
@needs_flower
def test_the_demo_interrupted_leaves_no_process_and_no_file_behind(tmp_path):
    with demo_of_one_node(tmp_path) as running:
        running.send_signal(signal.SIGINT)
        last = running.stderr.read()
        assert running.wait(LONG) == 130
    assert "resume with: folb deploy demo --nodes 1 --rounds 1000" in last
    assert not started_in(tmp_path) and not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
@needs_flower
def test_the_demo_killed_leaves_no_process_behind(tmp_path):
    with demo_of_one_node(tmp_path) as running:
        running.kill()
    assert holds(lambda: not started_in(tmp_path), LONG)


@needs_flower
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_other_user_reaches_the_superlink(deployed):
    code = """
import encodings.idna, http.client, os, ssl, sys  # another user may not read the modules
context = ssl.create_default_context(cafile=sys.argv[1])
connection = http.client.HTTPSConnection("127.0.0.1", int(sys.argv[2]), timeout=60, context=context)
os.setuid(int(sys.argv[3]))
connection.request("POST", "/v1/control/list-runs")
print(connection.getresponse().status)
"""

    def status(user):
        """What a process of this user is answered."""
        command = [sys.executable, "-c", code, str(deployed.home / "ca.crt"), str(deployed.port), str(user)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert status(65534) == 403 and status(0) != 403


@pytest.mark.skipif(not warden.knows_users(), reason="needs the table of Linux")
def test_a_connection_is_its_user_s_while_it_lives():
    with socket.create_server((HOST, 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            ends, table = (client.getsockname(), server.getsockname()), warden.TABLE.read_text()
            assert warden.is_own(table, *ends, os.getuid()) and not warden.is_own(table, *ends, os.getuid() + 1)
        table = warden.TABLE.read_text()  # a closed connection counts for root
        assert not any(warden.is_own(table, *ends, user) for user in (0, os.getuid()))


def started_in(path):
    """The processes that have this path in their environment, as Flower's do, unless they are already ending."""
    names = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(path) in (process / "environ").read_bytes():
                names.append(process.name)
    return names


def test_a_child_that_nobody_knew_ends_with_the_deployment(tmp_path, monkeypatch):
    """It is in a session of its own, and was born after its parent was asked to end."""
    deployment = superlink.Deployment(tmp_path, 1)
    born = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    parent = deployment.start("parent", lambda: [sys.executable, "-c", born])
    assert parent.popen.wait(LONG) == 0
    assert len(started_in(tmp_path)) == 1
    monkeypatch.setattr(superlink, "STOP", 0.3)
    deployment.end()
    assert not started_in(tmp_path)


@needs_flower
def test_a_taken_port_is_named(tmp_path):
    with ThreadingHTTPServer((HOST, 0), BaseHTTPRequestHandler) as other:
        expected = f"port = {other.server_port}: should be a free port"
        with pytest.raises(InputError, match=expected), superlink.running(tmp_path, 1, other.server_port):
            pass


@needs_flower
def test_a_superlink_that_does_not_start_is_told_with_its_last_words(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("print('no database today')\nraise SystemExit(3)\n")
    monkeypatch.setattr(superlink, "program", lambda name: str(broken))
    expected = "superlink = 3: did not start; its log ends: no database today"
    with pytest.raises(InputError, match=expected), superlink.running(tmp_path / "home", 1):
        pass
    assert not started_in(tmp_path / "home")


def test_without_flower_the_demo_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(superlink, "find_spec", lambda name: None)
    assert main.main(["deploy", "demo"]) == 2
    assert capsys.readouterr().err == "folb: error: deploy = 'flwr': is not installed: pip install 'folb[flower]'\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--algorithm=fobl", "algorithm = 'fobl': did you mean 'folb'?"),
        ("--rounds=0", "rounds = 0: should be a whole number"),
        ("--nodes=0", "nodes = 0: should be a whole number"),
    ],
)
def test_the_demo_refuses_what_it_cannot_run(option, message, capsys):
    assert main.main(["deploy", "demo", option]) == 2
    assert message in capsys.readouterr().err


def test_the_demo_runs_the_example():
    names = {path.name for path in (EXAMPLES / "synthetic").glob("*.*")}
    assert names == {"device.py", "pyproject.toml", "server.py"}
    assert all((demo.APP / name).read_bytes() == (EXAMPLES / "synthetic" / name).read_bytes() for name in names)


@pytest.mark.slow
@needs_flower
def test_the_demo(tmp_path):
    begun = [sys.executable, "-m", "folb", "deploy", "demo", "--out", str(tmp_path / "run"), "--rounds", "1"]
    subprocess.run(begun, capture_output=True, text=True, timeout=2 * LONG, check=True)
    command = [*begun[:-1], "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LONG, check=True)
    assert "resuming after round 1" in done.stderr
    assert [f"round {t} of 3: " in done.stderr for t in (1, 2, 3)] == [False, True, True]
    assert "final accuracy" in done.stdout and not started_in("folb-deploy-")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {"environment.json", "experiment.toml", "rounds.jsonl", "results.json", "curves.png", "model.npz"}
    began = time.monotonic()
    again = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert "is finished already" in again.stderr and again.stdout == done.stdout
    assert time.monotonic() - began < 30
    page = tmp_path / "page.html"
    subprocess.run([sys.executable, "-m", "folb", "report", str(tmp_path / "run"), "-o", str(page)], check=True)
    assert page.stat().st_size > 10_000


@pytest.mark.slow
@needs_flower
@pytest.mark.parametrize("app", ["synthetic", "mnist"])
@pytest.mark.parametrize("simulated", [True, False], ids=["simulation", "deployment"])
def test_the_examples_run_unchanged_in_simulation_and_deployment(app, simulated, tmp_path):
    if simulated:
        pytest.importorskip("ray")
    if app == "mnist":
        pytest.importorskip("torch")
        try:
            data.mnist.raw_files()
        except InputError:
            pytest.skip("MNIST is not here")
    where = (0, 0, "--simulation") if simulated else (4,)
    options = ["--federation-config=num-supernodes=4 client-resources-num-cpus=1"] if simulated else []
    config = {"rounds": 2, **ALL_FOUR, "directory": str(tmp_path / "run")}
    with superlink.running(tmp_path / "home", *where) as running:
        submitted = running.run(EXAMPLES / app, config, *options)
        assert holds(lambda: submitted.code is not None, 2 * LONG)
    assert store.is_run(tmp_path / "run"), submitted.tail(30)
    results = json.loads((tmp_path / "run" / "results.json").read_bytes())
    [run] = results["runs"]
    assert run["evaluated_rounds"] == [1, 2] and run["train_loss"][1] < run["train_loss"][0]


def test_an_app_asks_no_index_for_packages():
    """Flower would ask at each run, and no index has folb: `flwr run` would end with exit code 608."""
    for app in ("synthetic", "mnist"):
        assert tomllib.loads((EXAMPLES / app / "pyproject.toml").read_text())["project"]["dependencies"] == []


@pytest.mark.slow
@needs_flower
def test_the_simulation_of_the_documents_runs_as_typed():
    pytest.importorskip("ray")
    documents = ["docs/deployment.md", "examples/flower/README.md"]
    command = [sys.executable, str(ROOT / "scripts/type_the_docs.py"), *documents]
    typed = subprocess.run(command, capture_output=True, text=True, timeout=4 * LONG)
    assert typed.returncode == 0, typed.stdout
    assert len(re.findall(r"ok, \d+ s: flwr run", typed.stdout)) == 2, typed.stdout


@pytest.mark.slow
@needs_flower
@pytest.mark.parametrize("document", ["docs/deployment.md", "examples/flower/README.md"])
def test_what_the_documents_submit_to_a_superlink_runs_as_typed(document, deployed, tmp_path):
    """With the connection and the command as they stand there; only address, certificate and settings differ."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.M | re.S)
    [lines] = [block for kind, block in blocks if kind == "toml"]
    lines = lines.replace("127.0.0.1:8000", f"{HOST}:{deployed.port}")
    lines = lines.replace("/etc/superlink/ca.crt", str(deployed.home / "ca.crt"))
    commands = "".join(block for kind, block in blocks if not kind)
    [command] = re.findall(r"^flwr run examples/flower/synthetic deploy --stream", commands, flags=re.M)
    settle(deployed)
    environment = deployed.environment("flwr") | {"FLWR_HOME": str(tmp_path)}
    subprocess.run(["flwr", "config", "list"], env=environment, check=True)
    with (tmp_path / "config.toml").open("a") as config:
        config.write("\n" + lines)
    command += f" -c 'rounds=1 directory=\"{tmp_path / 'run'}\"'"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG)
    assert "round 1 of 1" in done.stdout, done.stdout
    assert store.read(tmp_path / "run").state == "finished"
