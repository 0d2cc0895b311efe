"""Fast-convergent federated learning: FOLB and its family, in a compiled simulator.

The names below load on first use, so that `import folb` costs nothing and `folb --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folb import algorithms as algorithms
    from folb import data as data
    from folb import guard as guard
    from folb import models as models
    from folb import rules as rules
    from folb import system as system
    from folb.algorithms import Algorithm as Algorithm
    from folb.algorithms import compose as compose
    from folb.algorithms import named as named
    from folb.errors import InputError as InputError
    from folb.federation import Federation as Federation
    from folb.figures import plot as plot
    from folb.models import Model as Model
    from folb.rules import Round as Round
    from folb.rules import Update as Update
    from folb.rules import weighted as weighted
    from folb.runs import Run as Run
    from folb.simulator import simulate as simulate

    from . import theory as theory

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "algorithms",
    "Federation": "federation",
    "InputError": "errors",
    "Model": "models",
    "Round": "rules",
    "Run": "runs",
    "Update": "rules",
    "compose": "algorithms",
    "named": "algorithms",
    "plot": "figures",
    "simulate": "simulator",
    "weighted": "rules",
}
_MODULES = ("algorithms", "data", "guard", "models", "rules", "system", "theory")

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"folb.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"folb.{name}")
    raise AttributeError(f"module 'folb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
