"""`folb deploy demo`: a deployment on loopback, a few rounds of an algorithm, and their run directory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from folb import atomic
from folb.atomic import check_free
from folb.core.algorithms import ALGORITHMS
from folb.deploy import warden
from folb.deploy.superlink import HOST, START, Deployment, check_installed, holds, running
from folb.errors import InputError, check_whole, choose
from folb.store import directory as store
from folb.store.directory import RunDirectory

APP = Path(__file__).parent / "demo_app"  # the app of examples/flower/synthetic
DEADLINE = 60.0  # seconds that a round may take
SLOW = 180.0  # seconds before the first round and after the last, on a very busy machine

Tell = Callable[[str], None]
OnStart = Callable[[Path, bool], None]


def execute(
    algorithm: str, rounds: int, nodes: int, *, directory: str | None, again: bool, on_start: OnStart, tell: Tell
) -> RunDirectory:
    """Run or resume the demo, unless its rounds are there already, and return its run directory.

    `on_start` gets the directory and whether it is finished. `tell` gets a line for each event.
    """
    choose("algorithm", algorithm, ALGORITHMS)
    check_whole("rounds", rounds, 1, 10**6)
    check_whole("nodes", nodes, 1, 64)
    check_installed()
    path = Path(directory) if directory else store.home() / f"deploy-{algorithm}-{nodes}"
    check_free(path)
    if again and store.is_run(path):
        store.remove(path)
    done = finished(path, rounds)
    if not done and not store.is_run(path):  # checked before Flower is started
        atomic.directory(path)
        store.check_own(path, again=False)
    elif not done and not store.read(path).deployed:
        raise InputError("out", str(path), "holds a run of the simulator; choose another directory")
    on_start(path, done)
    if not done:
        perform(path, algorithm, rounds, nodes, tell)
    return store.read(path)


def finished(path: Path, rounds: int) -> bool:
    run = store.read(path) if store.is_run(path) else None
    return run is not None and run.state == "finished" and len(run.rounds()[0]) >= rounds


def perform(path: Path, algorithm: str, rounds: int, nodes: int, tell: Tell) -> None:
    """Run the demo, or resume it. If it fails, Flower's files stay."""
    home = Path(tempfile.mkdtemp(prefix="folb-deploy-"))
    config = {"algorithm": algorithm, "rounds": rounds, "k": nodes, "devices": nodes, "min-available-nodes": nodes}
    if not warden.knows_users():
        tell("any user of this machine can reach the SuperLink and run code as you: use a machine of your own")
    tell(f"starting a SuperLink with TLS and node keys, and {nodes} SuperNode{'s' * (nodes > 1)}")
    try:
        with running(home, nodes) as deployment, ExitStack() as leaving:
            leaving.callback(tell, "ending the SuperLink and the SuperNodes")
            if not holds(lambda: deployment.online() >= nodes, START):
                kept = [(name, process) for name, process in deployment.processes.items() if process.kept]
                ends = "; ".join(f"{name}: {process.tail(4)}" for name, process in kept)
                raise InputError("nodes", nodes, f"did not all join; their logs end: {ends}")
            joined = f"{nodes} SuperNodes have joined" if nodes > 1 else "1 SuperNode has joined"
            tell(f"{joined} the SuperLink, at {HOST}:{deployment.port}")
            _follow(deployment, path, config | {"deadline": DEADLINE, "directory": str(path.resolve())}, tell)
    except KeyboardInterrupt:
        shutil.rmtree(home, ignore_errors=True)
        raise
    except Exception:
        tell(f"it failed; Flower's logs are in {home}")
        raise
    shutil.rmtree(home, ignore_errors=True)


def _follow(deployment: Deployment, path: Path, config: dict[str, Any], tell: Tell) -> None:
    """Submit the app, and tell each round when the run directory has it."""
    rounds = config["rounds"]
    before, offset = store.read(path).rounds() if store.is_run(path) else ([], 0)
    done = len(before)
    if done:
        tell(f"resuming after round {done}")
    until = time.monotonic() + SLOW + rounds * 2 * DEADLINE
    submitted = deployment.run(APP, config)
    while True:
        over = submitted.code is not None or time.monotonic() > until  # before the last look
        if store.is_run(path):
            lines, offset = store.read(path).rounds(offset)
            for line in lines:
                done = line["round"]
                tell(_told(line, rounds))
        if over:
            break
        time.sleep(0.2)
    if not finished(path, rounds):
        raise InputError("run", str(path), f"ended after {done} of {rounds} rounds: {submitted.tail()}")


def _told(line: dict[str, Any], rounds: int) -> str:
    count = len(line.get("devices", []))
    accuracy, loss = line.get("test_accuracy"), line.get("train_loss")
    told = f"round {line['round']} of {rounds}: {count - line['lost']} of {count} devices replied"
    told += f", {line['seconds']:.1f} s"
    told += f"; test accuracy {100 * accuracy:.1f} %" if accuracy is not None else ""
    told += f", training loss {loss:.3f}" if loss is not None else ""
    return told + (f"; abandoned: {line['abandoned']}" if "abandoned" in line else "")
