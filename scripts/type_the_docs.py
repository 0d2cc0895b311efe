"""Type every command of README, the tutorial, the concepts, the guides, and the pages on privacy and Flower.

python scripts/type_the_docs.py [DOCUMENT ...]

It types in a fresh clone. Each command must end with exit code 0 and print its key line, and each block of Python must
run. The documents are typed one after the other in one directory, as a reader would. `SHORTER` says what is shortened,
`LEFT_OUT` what is not typed and why; each is printed. Ctrl-C ends it, and a line says how to continue with
the document that was interrupted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from folb.deploy.superlink import free_port, kill_all

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    "README.md",
    "docs/tutorial.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for kind in ("concepts", "guides")
        for path in (ROOT / "docs" / kind).glob("*.md")
    ),
    "docs/privacy.md",
    "docs/flower.md",
    "docs/deployment.md",
    "examples/flower/README.md",
]
LIMIT = 1800  # seconds for a command, on a busy machine
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:folb [a-z]|flwr [a-z]|make [a-z]|pip |python3? |source |\.venv/bin/\w+ )")

LEFT_OUT = {
    r"^make ": "it sets up an environment of its own, and is a command of the Makefile",
    r"pip install|-m venv|^source ": "the environment of this script is used",
    r"devices=1000000": "it needs 10 GB of memory",
    r"--coordinator": "it needs two machines; tests/test_parallel.py runs two processes",
    r"^folb (arena|defend|reproduce)(?!.*studies/results)": "it takes hours, or looks at what took them",
    r"benchmarks/privacy.py": "it takes minutes, and needs MNIST and FEMNIST",
    r"compare shakespeare(?!.*--quick)": "it takes hours",
    r"^folb deploy": "it takes minutes; make test-examples runs it",
    r"^flwr .*\bdeploy\b": "it needs a SuperLink; tests/test_deployment.py types it",
    r"path/to/|/var/lib/": "the path stands for one of yours",
}
REAL_DATA = r"\b(mnist|femnist|shakespeare|sent140|cifar10|cifar100)\b"  # left out if its files are missing

SHORTER = (  # in this order
    (r"\bRUN RUN\b|\bRUN\b", "last"),
    (r"--rounds \d+", "--rounds 5"),
    (r"--seeds \d+", "--seeds 1"),
    (r"--points \d+", "--points 3"),
    (r"^((?:\S+=\S+ )*folb (?:compare|tune|attack)\b(?!.*--rounds).*)$", r"\1 --rounds 5"),
    (r"^((?:\S+=\S+ )*folb (?:compare|tune|attack)\b(?!.*--seeds).*)$", r"\1 --seeds 1"),
    (r"\brounds ?= ?\d+|\bROUNDS = \d+", "rounds = 5"),  # in Python and in experiment files
    (r'"rounds": \d+', '"rounds": 5'),
    (r"\bseeds ?= ?(\d+|range\(\d+\))", "seeds = 1"),
    (r'"seeds": \d+', '"seeds": 1'),
)

KEY_LINES = {  # what a command must print
    r"folb compare|folb run|folb show|folb resume": r"final (accuracy|MSE)|finished",
    r"folb tune": r"rounds to",
    r"folb attack": r"^in .*: curves.png, results.json",
    r"folb list$": r"System models",
    r"folb list \w": r"\w",
    r"folb runs": r"finished",
    r"folb report": r"\.html",
    r"folb export .*latex": r"\\begin\{tabular\}",
    r"folb export .*csv": r"algorithm",
    r"folb data info": r"devices +[\d,]+",
    r"folb (arena|reproduce).*--pages-only": r"README\.md",
    r"folb (arena|reproduce).*--cell": r"up to date",
    r"folb defend.*--pages-only": r"study\.md",
    r"folb watch": r"127\.0\.0\.1",
    r"flwr run": r"round 5 of 5|resuming after round 5",  # its exit code is 0, even if the run fails
}


def blocks(text: str) -> list[tuple[str, str]]:
    """The blocks of a document: the language of each, and its lines."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)


def commands(block: str) -> list[str]:
    """The commands of a block, each on one line, without comments."""
    lines = [re.sub(r"(^| +)# .*$", "", line).strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if COMMAND.match(line)]


def shortened(text: str) -> str:
    for pattern, instead in SHORTER:
        text = re.sub(pattern, instead, text, flags=re.M)
    return text


def reason_to_leave_out(command: str, data: str | None) -> str:
    for pattern, reason in LEFT_OUT.items():
        if re.search(pattern, command):
            return reason
    if (name := re.search(REAL_DATA, command)) and not (data and (Path(data) / name[1]).is_dir()):
        return f"the files of {name[1]} are not in FOLB_DATA"
    if command.startswith("flwr run") and find_spec("ray") is None:
        return "it needs Ray; make test-examples types it"
    return ""


def key_line(command: str) -> str:
    if "--json" in command:
        return r"^\{"
    return next((line for pattern, line in KEY_LINES.items() if re.search(pattern, command)), "")


def typed(command: str, home: Path, env: dict[str, str]) -> tuple[int, str]:
    """The exit code and the output of a command; one that never ends is stopped with Ctrl-C once it answers."""
    if command.startswith("folb watch"):
        return watched(command, home, env)
    with keyboard() as terminal:
        for _ in range(3):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=home,
                env=env,
                stdin=terminal,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
            )
            # Flower waits 15 seconds for it: too few on a busy machine
            if "Failed to start local SuperLink" not in done.stdout:
                break
    return done.returncode, done.stdout


@contextlib.contextmanager
def keyboard() -> Iterator[int]:
    """A terminal at which someone types y: some commands ask first, and only a terminal."""
    hand, terminal = os.openpty()
    try:
        os.write(hand, b"y\n")
        yield terminal
    finally:
        os.close(terminal)
        os.close(hand)


def watched(command: str, home: Path, env: dict[str, str]) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as output:
        page = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=home, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        said, end = "", time.monotonic() + 60
        while "127.0.0.1" not in said and page.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            output.seek(0)
            said = output.read()
        page.send_signal(signal.SIGINT)
        code = page.wait(timeout=30)
    return (0 if code in (0, 130, -signal.SIGINT) else code), said


def type_document(name: str, home: Path, env: dict[str, str]) -> list[str]:
    """Type a document; return what failed."""
    failed, found = [], blocks((home / name).read_text())
    for language, block in found:  # first, because a command may stand before the file that it needs
        if language == "toml" and "dataset =" in block:
            (home / "experiment.toml").write_text(shortened(block))
    for language, block in found:
        if language == "python":
            if "grid=grid" in block:
                print(
                    f"  left out: {block.splitlines()[-1]} (it is a part of a Flower app; make test-examples runs two)"
                )
                continue
            (home / "typed.py").write_text(shortened(block))
            steps = [("python typed.py", f"python: {block.splitlines()[-1]}")]
        elif not language:
            steps = [(shortened(command), command) for command in commands(block)]
        else:
            continue
        for command, shown in steps:
            if reason := reason_to_leave_out(command, env.get("FOLB_DATA")):
                print(f"  left out: {shown} ({reason})", flush=True)
                continue
            began = time.monotonic()
            try:
                code, output = typed(command, home, env)
            except subprocess.TimeoutExpired as late:
                code, output = 124, f"not finished after {late.timeout:.0f} seconds"
            right = code == 0 and bool(re.search(key_line(command), output, flags=re.M))
            said = shown if command == shown or shown.startswith("python: ") else f"{shown}  as  {command}"
            print(f"  {'ok' if right else 'FAILED'}, {time.monotonic() - began:.0f} s: {said}", flush=True)
            if not right:
                print(f"    exit code {code}\n    " + output.strip().replace("\n", "\n    "))
                failed.append(f"{name}: {shown}")
    return failed


@contextlib.contextmanager
def flower(home: Path) -> Iterator[dict[str, str]]:
    """The environment of a Flower of this script alone. `flwr run` leaves a SuperLink behind, which ends here."""
    try:
        yield {
            "FLWR_HOME": str(home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
    finally:
        while kill_all(home):
            time.sleep(0.2)


def main(documents: list[str]) -> int:
    failed, left = [], documents or DOCUMENTS
    with tempfile.TemporaryDirectory() as folder, flower(Path(folder) / "flwr") as apart:
        home = Path(folder) / "folb"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home)], check=True)
        own = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{home}/src{os.pathsep}{home}/studies/src",
        }
        env = {key: value for key, value in os.environ.items() if key != "FOLB_RUNS"} | own | apart
        while left:
            print(left[0], flush=True)
            try:
                failed += type_document(left[0], home, env)
            except KeyboardInterrupt:
                failed.append(f"interrupted; the rest: python scripts/type_the_docs.py {' '.join(left)}")
                break
            left = left[1:]
    print("\n".join(["failed:", *failed]) if failed else "all commands ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
