"""The run directory of a deployed run: the simulator's layout, written round by round, and resumed.

A checkpoint after every round holds the model, the server's memory, the devices and the rounds so far. A run resumes
from it; rounds.jsonl is a copy that can be read at any time. Rounds on real devices cannot be repeated, so a record
without a checkpoint is never replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from folb import atomic
from folb.atomic import claimed, regular
from folb.core.algorithm import Algorithm
from folb.core.algorithms import ALGORITHMS
from folb.core.round import State
from folb.core.system import described
from folb.core.upload import GAMMA
from folb.core.user_code import user_code
from folb.errors import SINGLE, InputError
from folb.flower.open_round import OpenRound
from folb.flower.roster import log
from folb.flower.strategy_settings import StrategySettings
from folb.measures import is_measure, measure
from folb.report import figures, looks
from folb.results import summary
from folb.results.document import document
from folb.store import directory, environment, experiment_file, run_arrays
from folb.store.round_lines import as_run

ABOUT = "a run on Flower: the strategy was made with these settings"
ONLY = 0  # the number of the only run in a directory
ASKED = "privacy.json"  # how many rounds a private run has asked devices for


class RunSettings(NamedTuple):
    """The settings of a run, for the record and to tell it from another run."""

    settings: StrategySettings
    algorithm: Algorithm  # in a run of so many rounds
    rounds: int
    strategy: str = ""  # its name

    def experiment(self) -> dict[str, Any]:
        """The keys of an experiment file, as the simulator writes them."""
        asked = self.settings
        system, given = described(asked.system)
        parts = {self.algorithm.name: _written(self.algorithm.settings), system: _written(given)}
        content = {
            "dataset": asked.dataset,
            "model": asked.model,
            "system": system,
            "objective": asked.objective,
            "algorithms": [self.algorithm.name],
            "rounds": int(self.rounds),
            "seeds": [asked.seed],
            "target": float(asked.target),
            "evaluate_every": 1,
            "records": True,
            "set": {name: known for name, known in parts.items() if known},
        }
        experiment_file.check(content, "", measure(asked.judged_by))
        return content

    def differs(self) -> str:
        """The algorithm, the rounds, and the settings that the algorithm does not have by default."""
        name = self.algorithm.name
        settings = _written(self.settings.algorithm.settings)
        usual = _written(ALGORITHMS[name]().settings) if name in ALGORITHMS else settings
        own = {key: value for key, value in settings.items() if value != usual.get(key)}
        seed = {"seed": self.settings.seed} if self.settings.seed else {}
        known = {"algorithms": name, "rounds": self.rounds} | seed | own
        return " ".join(f"{key}={summary.spelt(value)}" for key, value in known.items())

    def mark(self, state: State) -> str:
        """What tells this run from another. Not its first model: a resubmitted run may draw another one."""
        shapes = [(name, value.shape) for name, value in state.params.items()]
        asked, system = self.settings, self.settings.system
        how = f"{self.strategy} {asked.fraction_train} {asked.min_train_nodes} {self.algorithm.selection.factor}"
        how += f" {asked.max_norm}"
        if self.algorithm.privacy is not None:  # epsilon is computed for this number of devices in all rounds
            how += f" {asked.min_available_nodes}"
        trees = f"{jax.tree.structure(self.algorithm)} {jax.tree.structure(system)}"
        program = f"{trees} {asked.objective} {shapes} {how}{user_code((self.algorithm, system))}"
        return run_arrays.fingerprint(program, self.algorithm, system, np.uint32(asked.seed))


class RunRecord:
    """A claimed run directory, begun or resumed: the `lines` of its rounds, the `state` and `devices` they led to."""

    def __init__(self, path: Path, about: RunSettings, state: State) -> None:
        self.path, self.about, self.state = path, about, state
        self.identity = about.mark(state)
        self.lines: list[dict[str, Any]] = []
        self.devices: list[int] = []
        text = experiment_file.to_text(about.experiment(), about=ABOUT)
        # a damaged environment is an error that says so: the checkpoints may still be sound
        there = directory.read(path) if (path / directory.ENVIRONMENT).exists() else None
        if there is None:
            directory.check_own(path, again=False)
            asked = about.settings
            own = {"carrier": "flower", "keep_model": False, "flwr": version("flwr"), "note": "", "devices": 0}
            own |= {"identity": self.identity, "differs": about.differs()}
            own["runs"] = environment.about_runs([about.algorithm], [asked.seed], asked.judged_by)
            # this comes first: it makes the directory a run that can be resumed
            environment.write_environment(path, environment.program() | own)
        elif there.environment["identity"] != self.identity:
            expected = "holds another run: other settings, other code in a part of your own, a model of other arrays,"
            expected += " or another version of folb; choose another directory"
            raise InputError("directory", str(path), expected)
        saved = run_arrays.load_checkpoint(path / directory.CHECKPOINTS, ONLY, self.identity, (state, "", ""))
        if saved is not None:
            _, (after, lines, devices) = saved
            # keep the order of the arrays: jax sorts names
            params = {name: np.asarray(after.params[name]) for name in state.params}
            self.state = jax.tree.map(np.asarray, after)._replace(params=params)
            self.lines, self.devices = json.loads(lines.tobytes()), json.loads(devices.tobytes())
            if self.done > about.rounds:
                raise InputError("num_rounds", about.rounds, f"should be at least {self.done}, the rounds done")
            log.info("%s: resuming after round %d", path, self.done)
        elif there is not None and there.recorded():
            kept = f"has {len(there.rounds()[0])} recorded rounds, but no sound checkpoint to resume from"
            advice = f"put one back into {directory.CHECKPOINTS}/, or move the directory away to start over"
            raise InputError("directory", str(path), f"{kept}: {advice}")
        (path / directory.CHECKPOINTS).mkdir(exist_ok=True)
        atomic.replace(path / directory.ROUNDS, b"".join(map(_line, self.lines)))
        (path / directory.RESULTS).unlink(missing_ok=True)
        atomic.replace(path / directory.EXPERIMENT, text.encode())

    @property
    def asked(self) -> int:
        """The rounds that a private run has asked devices for, the one that was interrupted included."""
        file = self.path / ASKED
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return max(self.done, int(json.loads(regular(file).read_bytes())["rounds"]))
        return self.done + file.exists()  # damaged: at least one more

    def ask(self, rounds: int) -> None:
        """Keep, before devices are asked, that this many rounds count."""
        atomic.replace(self.path / ASKED, (json.dumps({"rounds": rounds}, indent=1) + "\n").encode())

    @property
    def done(self) -> int:
        return len(self.lines)

    def add(self, line: dict[str, Any], state: State, devices: Sequence[int]) -> None:
        """Keep a finished round and its state before anything else is done, so that at most one round can be lost."""
        about = directory.read(self.path).environment
        known = max(about["devices"], 1 + max(devices, default=-1))
        if known != about["devices"]:  # the page counts from 0 to the largest identity
            environment.write_environment(self.path, about | {"devices": known})
        run = about["runs"][ONLY]
        line = {"run": ONLY, "algorithm": run["algorithm"], "seed": run["seed"], "round": self.done + 1} | line
        self.lines.append(line)
        self.state, self.devices = state, sorted({*self.devices, *devices})
        # the checkpoint comes first, so that a round in rounds.jsonl is never repeated
        texts = (np.frombuffer(json.dumps(what).encode(), np.uint8) for what in (self.lines, self.devices))
        kept = self.path / directory.CHECKPOINTS
        run_arrays.save_checkpoint(kept, ONLY, self.identity, self.done + 1, (state, *texts))
        with open(self.path / directory.ROUNDS, "ab", buffering=0) as file:
            atomic.write(file.fileno(), _line(line))
            os.fsync(file.fileno())

    def finish(self, model: Mapping[str, Any]) -> None:
        """Write the results of a run that ended with `model`, and the picture. The last checkpoint stays."""
        run = as_run(directory.read(self.path).environment["runs"][ONLY], self.lines)
        runs, asked = [replace(run, params=model)], self.about.settings
        picture = figures.curves(runs, target=asked.target, title=looks.title(asked.dataset, asked.model))
        directory.leave(self.path, document(self.about.experiment(), "", runs), picture)


def round_line(opened: OpenRound, seconds: float, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """A round as a line of rounds.jsonl, with what each of its devices did in it."""
    drawn, notes, usable, lost = opened.drawn, opened.notes, opened.answers.usable, opened.lost
    identities, rejected = sorted(drawn), {identity for identity, _ in notes.rejected}
    line: dict[str, Any] = {}
    if measured is not None:
        named = {name: _number(measured, name) for name in measured if is_measure(name)}
        if measured.keys() & {"accuracy", "test_accuracy"} or not named:  # a regression has none
            line["test_accuracy"] = _number(measured, "accuracy", "test_accuracy")
        if measured.keys() & {"loss", "train_loss"}:  # null means not finite: a loss that was not measured is left out
            line["train_loss"] = _number(measured, "loss", "train_loss")
        if named:
            line["metrics"] = named
    line |= {
        "bytes_up": notes.up,
        "bytes_down": notes.down,
        "seconds": round(seconds, 3),
        "updated": opened.weights is not None,
        "lost": len(lost),
        "devices": identities,
        "times": [drawn[k] if k in usable else 0 for k in identities],
        "weights": _weights(opened, identities),
        "lost_devices": lost,
        "rejected_devices": [k for k in identities if k in rejected],
    }
    if notes.epsilon is not None:
        line["epsilon"] = summary.short(notes.epsilon, 6)
    elif any(upload.name == GAMMA.name for upload in opened.uploads):  # of a private round, gammas have no noise
        line["gamma"] = [usable[k].numbers[GAMMA.name] if k in usable else None for k in identities]
    if notes.length:
        line["length"] = notes.length
    troubles = {"refused": notes.rejected, "failed": notes.failed.items(), "shortened": notes.shortened}
    line |= {name: [list(pair) for pair in pairs] for name, pairs in troubles.items() if pairs}
    return line | ({"abandoned": opened.abandoned} if opened.abandoned else {})


def _weights(opened: OpenRound, identities: Sequence[int]) -> list[float | None]:
    """The weight of each device's update; unknown if the server sees only sums."""
    first = opened.first
    if opened.weights is None or first is None or len(opened.weights) != len(first.work):
        return [None] * len(identities)
    slots = zip(opened.who(first), first.chosen.times, opened.weights, strict=True)
    weight = {k: float(str(value)) for k, times, value in slots if times > 0}  # with only the digits of 32 bits
    return [weight[k] for k in identities]


@contextlib.contextmanager
def recording(path: Path, about: RunSettings, state: State) -> Iterator[RunRecord]:
    """The run directory, claimed until the run ends."""
    atomic.directory(path)
    with claimed(path):
        try:
            record = RunRecord(path, about, state)
        except OSError as error:
            raise InputError("directory", str(path), f"cannot be used: {error}") from error
        yield record


def _written(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a file can hold."""
    return {
        key: "none" if value is None else value
        for key, value in settings.items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def _line(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _number(measured: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that was measured, if it is a number that is finite in 32 bits."""
    values = [measured[name] for name in names if name in measured]
    return float(values[0]) if values and isinstance(values[0], int | float) and abs(values[0]) <= SINGLE else None
