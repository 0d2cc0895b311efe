"""Fast-convergent federated learning: FOLB and its family, in a compiled simulator.

The names below load on first use, so that `import folb` costs nothing and `folb --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folb import data as data
    from folb import models as models
    from folb.core import algorithms as algorithms
    from folb.core import guard as guard
    from folb.core import rules as rules
    from folb.core import system as system
    from folb.core import tree as tree
    from folb.core import vector as vector
    from folb.core.algorithm import Algorithm as Algorithm
    from folb.core.average import Average as Average
    from folb.core.codec import Codec as Codec
    from folb.core.gradient import GradientSource as GradientSource
    from folb.core.liars import Attack as Attack
    from folb.core.local_step import LocalStep as LocalStep
    from folb.core.memory import DeviceMemory as DeviceMemory
    from folb.core.part import setting as setting
    from folb.core.privacy import Privacy as Privacy
    from folb.core.robust import Robust as Robust
    from folb.core.robust import Vectors as Vectors
    from folb.core.rule import Round as Round
    from folb.core.rule import Rule as Rule
    from folb.core.rule import Update as Update
    from folb.core.rules import weighted as weighted
    from folb.core.selection import Known as Known
    from folb.core.selection import Sampling as Sampling
    from folb.core.server_step import ServerStep as ServerStep
    from folb.core.staleness import Staleness as Staleness
    from folb.core.step_size import StepSize as StepSize
    from folb.core.upload import Upload as Upload
    from folb.core.whiten import Hidden as Hidden
    from folb.core.whiten import Whitening as Whitening
    from folb.data.device_trace import trace as trace
    from folb.data.federation import Federation as Federation
    from folb.errors import InputError as InputError
    from folb.experiments.execute import execute as execute
    from folb.experiments.execute import resume as resume
    from folb.experiments.experiment import Experiment as Experiment
    from folb.experiments.kept_model import load_model as load_model
    from folb.measures import Metric as Metric
    from folb.models import Model as Model
    from folb.report.figures import plot as plot
    from folb.results.run import Run as Run
    from folb.simulation.simulate import simulate as simulate
    from folb.store.directory import RunDirectory as RunDirectory
    from folb.store.reading import read as read
    from folb.store.reading import to_frame as to_frame

__version__ = "0.1.0"

_NAMES = {
    "Algorithm": "core.algorithm",
    "Attack": "core.liars",
    "Average": "core.average",
    "Codec": "core.codec",
    "DeviceMemory": "core.memory",
    "Experiment": "experiments.experiment",
    "Federation": "data.federation",
    "Hidden": "core.whiten",
    "InputError": "errors",
    "GradientSource": "core.gradient",
    "Known": "core.selection",
    "LocalStep": "core.local_step",
    "Metric": "measures",
    "Model": "models",
    "Round": "core.rule",
    "Rule": "core.rule",
    "Privacy": "core.privacy",
    "Robust": "core.robust",
    "Run": "results.run",
    "RunDirectory": "store.directory",
    "Sampling": "core.selection",
    "ServerStep": "core.server_step",
    "Staleness": "core.staleness",
    "StepSize": "core.step_size",
    "Update": "core.rule",
    "Upload": "core.upload",
    "Vectors": "core.robust",
    "execute": "experiments.execute",
    "load_model": "experiments.kept_model",
    "plot": "report.figures",
    "read": "store.reading",
    "resume": "experiments.execute",
    "setting": "core.part",
    "simulate": "simulation.simulate",
    "to_frame": "store.reading",
    "trace": "data.device_trace",
    "Whitening": "core.whiten",
    "weighted": "core.rules",
}
_MODULES = {name: f"core.{name}" for name in ("algorithms", "guard", "rules", "system", "tree", "vector")}
_MODULES |= {name: name for name in ("data", "models")}

__all__ = sorted([*_NAMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"folb.{_NAMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"folb.{_MODULES[name]}")
    raise AttributeError(f"module 'folb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
