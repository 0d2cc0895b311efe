"""A Flower deployment on this machine only: a SuperLink with TLS and node keys, and SuperNodes that are restarted.

A real deployment has the same processes with the same options (docs/deployment.md). All of them end with the
deployment, whatever ends it, and answer only the user who started it (`warden`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from folb.deploy import warden
from folb.errors import InputError, check

HOST = "127.0.0.1"
CONNECTION = "deploy"  # the SuperLink's name in Flower's config.toml
CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"

# keep Flower from sending telemetry and from installing anything
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
BRISK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # seconds until a message starts its process; by default 1

START = 60.0  # seconds until a process must answer
STOP = 10.0  # seconds in which processes may end by themselves
PAUSE = 2.0  # seconds until an ended node is started again


@dataclass
class Process:
    """A command that writes a log, and the process that runs it now."""

    command: Callable[[], list[str]]
    environment: dict[str, str]
    log: Path
    kept: bool = False  # restart it whenever it ends
    due: float = 0.0  # when to restart it
    starts: int = 0

    def start(self) -> None:
        """Start it so that the terminal's Ctrl-C does not reach it: it ends with the deployment."""
        with open(self.log, "ab") as log:
            streams: dict[str, Any] = {"stdin": warden.lifeline(), "stdout": log, "stderr": log}
            self.popen = subprocess.Popen(self.command(), env=self.environment, start_new_session=True, **streams)
        self.starts += 1

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.popen.poll()

    def tail(self, lines: int = 8) -> str:
        """The end of the log, on one line."""
        text = re.sub(r"\x1b\[\d*m", "", self.log.read_text(errors="replace"))  # without colours
        return " | ".join(stripped for line in text.splitlines()[-lines:] if (stripped := line.strip()))


@dataclass
class Deployment:
    """The processes of a deployment, and their files: certificates, keys, the database, a FLWR_HOME each, logs."""

    home: Path
    port: int
    processes: dict[str, Process] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, name: str, command: Callable[[], list[str]], *, role: str = "", kept: bool = False) -> Process:
        process = Process(command, self.environment(role or name), self.home / f"{name}.log", kept)
        with self.lock:
            process.start()
            self.processes[name] = process
        return process

    def environment(self, role: str) -> dict[str, str]:
        """The environment of a role: Flower finds its programs by PATH, and each role keeps its own app files."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return os.environ | QUIET | BRISK | {"PATH": path, "FLWR_HOME": str(self.home / role)}

    def superlink(self, *options: str) -> Process:
        """Start the SuperLink with the database of an earlier one, if any, and wait until it answers."""
        kill_all(self.home / "superlink")  # as systemd does: an old ServerApp would keep the run directory
        check_free(self.port)
        files = {"ssl-ca-certfile": CA, "ssl-certfile": CERTIFICATE, "ssl-keyfile": KEY, "database": "superlink.db"}
        command = [*warden.command(program("flower-superlink")), f"--host={HOST}", f"--port={self.port}"]
        command += [f"--{option}={self.home / name}" for option, name in files.items()]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation", *options]
        process = self.start("superlink", lambda: command)
        if not holds(lambda: process.code is not None or self.healthy(), START) or process.code is not None:
            raise InputError("superlink", process.code, f"did not start; its log ends: {process.tail()}")
        return process

    def healthy(self) -> bool:
        """Whether the SuperLink answers with the right certificate."""
        known = ssl.create_default_context(cafile=self.home / CA)
        connection = http.client.HTTPSConnection(HOST, self.port, timeout=5, context=known)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def register(self, keys: Sequence[Path]) -> None:
        """Register nodes' public keys with the SuperLink: it admits only these nodes."""
        with ThreadPoolExecutor() as pool:  # each command spends seconds on its imports
            list(pool.map(lambda key: self.flwr("supernode", "register", str(key), CONNECTION), keys))

    def online(self) -> int:
        """How many SuperNodes are online, as the SuperLink sees it."""
        nodes = self.flwr("supernode", "list", CONNECTION)["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def flwr(self, *arguments: str) -> dict[str, Any]:
        command, none = [program("flwr"), *arguments, "--format=json"], subprocess.DEVNULL
        env = self.environment("flwr")
        try:
            done = subprocess.run(command, env=env, stdin=none, capture_output=True, text=True, timeout=START)
        except subprocess.TimeoutExpired:
            raise InputError("flwr", " ".join(arguments[:2]), f"does not answer within {START:g} seconds") from None
        with contextlib.suppress(ValueError):
            said = json.loads(done.stdout[done.stdout.index("{") :])
            if said.get("success"):
                return dict(said)
        raise InputError("flwr", " ".join(arguments[:2]), f"fails: {' '.join((done.stdout + done.stderr).split())}")

    def node(self, name: str, config: str, *options: str) -> Process:
        """Start a SuperNode with a node config and the options that admit it, and keep it running."""

        def command() -> list[str]:
            own = [f"--host={HOST}", f"--port={free_port()}"]  # of its Runtime API, chosen again at each start
            own += [f"--superlink={HOST}:{self.port}", *options, "--node-config", config]
            return [*warden.command(program("flower-supernode")), *own]

        return self.start(name, command, kept=True)

    def credentials(self, name: str) -> tuple[str, str]:
        """The options that admit a node with a registered key."""
        return f"--root-certificates={self.home / CA}", f"--auth-supernode-private-key={self.home / name}.key"

    def run(self, app: Path, config: Mapping[str, object], *options: str) -> Process:
        """Submit an app; the process writes the run's log, and ends with the run."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = [*warden.command(program("flwr")), "run", str(app), CONNECTION, "--stream"]
        command += [f"--run-config={settings}", *options]
        return self.start(f"run{len(self.processes)}", lambda: command, role="flwr")

    def keep(self) -> None:
        """Start ended nodes again until the deployment ends, like the restart policy of a real one."""
        while not self.ending.wait(0.2):
            with self.lock:
                for name, process in {} if self.ending.is_set() else self.processes.items():
                    if process.code is None:  # asking removes the zombie: Flower's children would take it for running
                        process.due = time.monotonic() + PAUSE
                    elif process.kept and time.monotonic() >= process.due:
                        kill_all(self.home / name)
                        process.start()

    def end(self) -> None:
        """End every process and its children, the SuperLink last."""
        with self.lock:
            self.ending.set()
        here = [process for process in self.processes.values() if process.code is None]
        last = self.processes.get("superlink")
        for group in ([process for process in here if process is not last], here):
            for process in group:
                process.popen.terminate()
            holds(lambda: all(process.code is not None for process in group), STOP)  # noqa: B023  called at once
        for process in here:
            process.popen.kill()
            process.popen.wait()
        # Flower's children end when they see that their parent has ended; a child may also have started just now
        holds(lambda: not living(self.home), STOP)
        holds(lambda: not kill_all(self.home), STOP)


@contextlib.contextmanager
def running(home: Path, nodes: int = 4, port: int = 0, *options: str) -> Iterator[Deployment]:
    """In this context, a SuperLink, with further `options`, and SuperNodes node0, node1, … of partitions 0, 1, …"""
    check_installed()
    from folb.deploy.certificates import certificates, node_key

    deployment = Deployment(home, port or free_port())
    certificates(home, [HOST, "localhost"])
    (home / "flwr").mkdir()
    lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{HOST}:{deployment.port}"', f"root-certificates = {json.dumps(str(home / CA))}", ""]
    (home / "flwr" / "config.toml").write_text("\n".join(lines))
    names = [f"node{i}" for i in range(nodes)]
    for name in names:
        node_key(home / f"{name}.key")
    keeper = threading.Thread(target=deployment.keep, daemon=True)
    # SIGTERM and SIGHUP act like Ctrl-C
    with handling(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        try:
            keeper.start()
            deployment.superlink(*options)
            deployment.register([home / f"{name}.key.pub" for name in names])
            for i, name in enumerate(names):
                deployment.node(name, f"partition-id={i} num-partitions={nodes}", *deployment.credentials(name))
            yield deployment
        finally:
            with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the end takes a bounded time
                deployment.end()
                keeper.join()


def check_installed() -> None:
    """Flower must be installed next to this Python, and jax too."""
    there, how = find_spec("flwr") is not None and Path(program("flwr")).exists(), "pip install 'folb[flower]'"
    check("deploy", "flwr", there, f"is not installed: {how}")
    check("deploy", "jax", find_spec("jax") is not None, f"is not installed, and the server needs it: {how}")


def holds(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait at most `seconds` for a condition, and return whether it holds."""
    until = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return held


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_free(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError("port", port, f"should be a free port, or 0 for any: {reason}") from error


def living(home: Path) -> list[int]:
    """The processes that run, whoever started them, with a FLWR_HOME that is `home` or in it. Without /proc, none."""
    there = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = [one for one in (path / "environ").read_bytes().split(b"\0") if one.startswith(b"FLWR_HOME=")]
            if own and Path(os.fsdecode(own[0]).partition("=")[2]).is_relative_to(home):
                there.append(int(path.name))
    return there


def kill_all(home: Path) -> list[int]:
    """Kill the processes that are `living`, and return them."""
    there = living(home)
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return there


@contextlib.contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Another handler of these signals for this context. Only the main thread can set it."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if mine else {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
