"""`folb.load_model`: a model that a run ended with, ready to predict. Neither the simulator nor the data is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from folb.errors import InputError, check
from folb.experiments.settings import chosen_by_name, naming_own_files, read
from folb.measures import is_regression
from folb.models import MODELS, Model
from folb.models.model import params_like
from folb.store import directory
from folb.store.directory import RunDirectory
from folb.store.reading import read as find
from folb.store.run_arrays import digest, is_described, read_about, read_model
from folb.typing import NDArray, Params

BLOCK = 256  # samples predicted at once


@dataclass(frozen=True, eq=False)
class KeptModel:
    """A model that a run ended with.

    `params` are its parameters. `classes` are the names of the classes, or their numbers if the data has no names. A
    file with only a model's arrays, such as that of a Flower app, does not tell the classes or the `shape` of a sample:
    `classes` is then empty, and `shape` is None.
    """

    params: Params
    model: Model
    name: str
    algorithm: str
    seed: int
    shape: tuple[int, ...] | None
    classes: Sequence[Any]

    def __repr__(self) -> str:
        if self.shape is None:
            return f"KeptModel({self.name}: arrays alone)"
        kind = "numbers to predict" if is_regression(self.model.judged_by) else f"{len(self.classes)} classes"
        return f"KeptModel({self.name}, {self.algorithm}, seed {self.seed}: samples of shape {self.shape}, {kind})"

    def predict(self, x: Any) -> NDArray:
        """The class of each sample, as a number; `classes[number]` is its name. For a regression, the predicted number.

        `x` has samples first, each of the shape that the model was trained on.
        """
        return self._blocks(self.model.predict, x)

    def scores(self, x: Any) -> NDArray:
        """A score for each sample and class, before the softmax."""
        if self.model.scores is None:
            raise InputError("model", self.name, "has no scores: call predict")
        return self._blocks(self.model.scores, x)

    def _blocks(self, function: Callable[[Params, Any], Any], x: Any) -> NDArray:
        """The function's values for all samples. The last block is filled up: one program is compiled."""
        x, compiled = self._checked(x), jax.jit(function)
        block = max(1, min(BLOCK, len(x)))
        parts = []
        for first in range(0, max(len(x), 1), block):
            part = x[first : first + block]
            rest = np.zeros((block - len(part), *x.shape[1:]), x.dtype)
            parts.append(np.asarray(compiled(self.params, np.concatenate([part, rest])))[: len(part)])
        return np.concatenate(parts)

    def _checked(self, x: Any) -> NDArray:
        try:
            x = np.asarray(x)
        except ValueError:
            raise InputError("x", x, "should be an array with rows of equal length") from None
        check("x", str(x.dtype), x.dtype.kind in "biuf", "should be numbers")
        if x.ndim == 0 or (self.shape is not None and x.shape[1:] != self.shape):
            raise InputError("shape of x", x.shape, f"should be samples first, each of shape {self.shape}")
        if self.shape is None:  # the file does not say which samples the model takes
            try:
                jax.eval_shape(self.model.predict, self.params, x)
            except (TypeError, ValueError) as error:
                expected = f"should be samples that the model takes: {str(error).partition(chr(10))[0]}"
                raise InputError("shape of x", x.shape, expected) from error
        codes = self.model.codes
        if codes is not None and not (x.dtype.kind in "iu" and np.all((x >= 0) & (x < codes))):
            raise InputError("x", str(x.dtype), f"should be whole numbers from 0 to {codes - 1}, which the model takes")
        return x


def load_model(
    run: RunDirectory | str | os.PathLike[str],
    *,
    algorithm: str | None = None,
    seed: int | None = None,
    model: Model | None = None,
) -> KeptModel:
    """A model that a run ended with: the one that was evaluated, so an average if the algorithm keeps one.

    `run` is a run directory, its path, its name, the beginning of its name, "last" for the newest, or the path of a
    model.npz.
    `algorithm` is a label of the table, or an algorithm's name. It and `seed` may be left out if there is only one.
    `model` replaces the model that the file names, for example one of your own whose file is gone. By default a model
    of your own is loaded from its file, which is executed. A file with only a model's arrays, under the names that they
    have on Flower, needs `model`.
    """
    path = _file(run)
    if model is not None and not is_described(path):
        return KeptModel(read_model(path, None, params_like(model)), model, str(model), "", 0, None, ())
    about = read_about(path)
    name, number = about["model"], _chosen(about["runs"], algorithm, seed)
    with naming_own_files([name]):
        model = _built(about) if model is None else model
        like = params_like(model)
    params, run_of = read_model(path, number, like), about["runs"][number]
    classes = tuple(about["class_names"]) if "class_names" in about else range(about["classes"])
    return KeptModel(params, model, name, run_of["algorithm"], run_of["seed"], tuple(about["shape"]), classes)


def _file(run: RunDirectory | str | os.PathLike[str]) -> Path:
    if not isinstance(run, RunDirectory) and os.fspath(run).endswith(".npz"):
        return Path(run)
    stored = find(run)
    path = stored.path / directory.MODEL
    if not path.is_file():
        unfinished = f"is {stored.state}: its model is saved when it finishes"
        missing = (
            f"has no {directory.MODEL}: `folb compare --again` saves it, without --no-model; the studies save none"
        )
        raise InputError("run", stored.name, missing if stored.state == "finished" else unfinished)
    return path


def _chosen(runs: Sequence[Mapping[str, Any]], algorithm: str | None, seed: int | None) -> int:
    """The number of the only run with this algorithm and seed."""
    candidates = dict(enumerate(runs))
    if algorithm is not None:
        labelled = {i: run for i, run in candidates.items() if run["algorithm"] == algorithm}
        candidates = labelled or {i: run for i, run in candidates.items() if run["name"] == algorithm}
    labels = list(dict.fromkeys(run["algorithm"] for run in (candidates or dict(enumerate(runs))).values()))
    check("algorithm", algorithm, candidates and len(labels) == 1, f"should be one of: {'; '.join(labels)}")
    seeds = [run["seed"] for run in candidates.values()]
    matching = [i for i, run in candidates.items() if seed is None or run["seed"] == seed]
    check("seed", seed, len(matching) == 1, f"should be one of {', '.join(map(str, seeds))}")
    return matching[0]


def _built(about: Mapping[str, Any]) -> Model:
    """The model that the file names, made with the settings that it had."""
    name = about["model"]
    if ".py:" in name:  # if a user's own file has changed, its model would predict something else
        file = Path(name.rpartition(":")[0])
        instead = "restore the file as it was, or give the model itself: load_model(..., model=...)"
        check("model", name, file.is_file(), f"there is no file {file} any more; {instead}")
        if "sha256" in about and digest(file) != about["sha256"]:
            raise InputError("model", name, f"has changed since the run; {instead}")
    made = chosen_by_name("model", name, MODELS)
    known, given = made.settings, about["settings"]
    values = {key: read(key, known[key].type, value) for key, value in given.items() if key in known}
    return made.make(Model, tuple(about["shape"]), about["classes"], **values)
