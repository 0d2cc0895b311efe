"""The walk of a command through the code: the files of folb that it runs, and its changes of package.

    python scripts/walk.py compare synthetic_1_1 --algorithms folb,fedprox,fedavg --rounds 100 --out walked

A package is a folder of folb, and a change of package is a call of a function from a function of another package, also
through another library. What jax traces counts, and what threads do; what is run by an import does not. Each chunk of
rounds adds a few changes, and a slow machine plays more chunks. The command's own output goes to standard error.

    python scripts/walk.py flower

is the walk of one round of FOLB on Flower, on the server's side: the second one, whose programs are compiled. The
devices answer in the same process, and what they run does not count.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import folb
from folb.cli.main import main, save_work

ROOT = f"{Path(folb.__file__).parent}/"
TESTS = Path(__file__).parents[1] / "tests"
SHOWN = 25  # pairs of packages


class Walk:
    """The calls of each function of folb, and the changes of package, by caller and function called."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # of a function in a file
        self.changes: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
        self.counts = True  # what runs now

    def step(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of a call, as `sys.setprofile` asks for."""
        if not self.counts or event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        caller, above = None, frame.f_back
        while above is not None:
            if above.f_code.co_filename.startswith(ROOT):
                caller = caller or above
                if above.f_code.co_name == "<module>":
                    return
            above = above.f_back
        here = _place(frame)
        if here[1] == "<module>":
            return
        self.calls[here] += 1
        if caller is not None and package(_place(caller)[0]) != package(here[0]):
            self.changes[_place(caller), here] += 1

    @property
    def files(self) -> list[str]:
        """The files whose functions were called."""
        return sorted({file for file, _ in self.calls})

    @property
    def pairs(self) -> Counter[tuple[str, str]]:
        """The changes by pair of packages."""
        found: Counter[tuple[str, str]] = Counter()
        for (before, after), count in self.changes.items():
            found[package(before[0]), package(after[0])] += count
        return found


def _place(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname


def package(file: str) -> str:
    """The folder of a file, or its name if it is in none."""
    return file.partition("/")[0].removesuffix(".py")


@contextlib.contextmanager
def walked(walk: Walk | None = None) -> Iterator[Walk]:
    """The walk of what is done inside."""
    walk = walk or Walk()
    threading.setprofile(walk.step)
    sys.setprofile(walk.step)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def flower_round(rounds: int = 2) -> Walk:
    """The walk of the last of some rounds of FOLB on Flower, on the server's side."""
    sys.path.insert(0, str(TESTS))
    import numpy as np
    from inprocess import InProcessGrid

    from folb import algorithms
    from folb.flower import Device, FederatedStrategy, arrays, client_app

    def gradient(params: Any, x: Any, y: Any) -> Any:
        return {"weight": x.T @ (x @ params["weight"] - y) / np.float32(len(y))}

    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=20).astype(np.float32)) for _ in range(4)]
    walk = Walk()

    class Grid(InProcessGrid):  # type: ignore[misc]
        def answers(self, message: Any) -> Any:
            before, walk.counts = walk.counts, False
            try:
                return super().answers(message)
            finally:
                walk.counts = before

    class Counted(FederatedStrategy):
        def configure_train(self, server_round: int, *given: Any) -> Any:
            walk.counts = server_round == rounds
            return super().configure_train(server_round, *given)

        def aggregate_evaluate(self, *given: Any) -> Any:
            measured = super().aggregate_evaluate(*given)
            walk.counts = False
            return measured

    apps = [client_app(lambda context, own=own: Device(*own, gradient)) for own in data]
    strategy = Counted(algorithms.folb(select={"K": 3}), wait=0.0, fraction_evaluate=0.0)
    walk.counts = False
    with walked(walk):
        strategy.start(Grid(apps), arrays({"weight": np.zeros(3, np.float32)}), num_rounds=rounds)
    return walk


def show(walk: Walk, say: Callable[[str], object] = print) -> None:
    """The files, and the changes by pair of packages and by function."""
    for file in walk.files:
        say(f"{sum(count for (other, _), count in walk.calls.items() if other == file):7,}  {file}")
    say("")
    for (before, after), count in walk.pairs.most_common():
        say(f"{count:7,}  {before} -> {after}")
    say("")
    for (before, after), count in walk.changes.most_common(SHOWN):
        say(f"{count:7,}  {':'.join(before)} -> {':'.join(after)}")
    say(f"\n{len(walk.files)} files, {walk.changes.total():,} changes of package")


if __name__ == "__main__":
    if sys.argv[1:] == ["flower"]:
        show(flower_round())
        raise SystemExit(0)
    save_work()  # as a command does: its callbacks are no part of the walk
    with walked() as walk, contextlib.redirect_stdout(sys.stderr):
        code = main(sys.argv[1:])
    show(walk)
    raise SystemExit(code)
