"""The system models by name: those that are formulas, and `trace`, which is read from a file."""

from __future__ import annotations

from collections.abc import Callable

from folb.core import system
from folb.core.system import System
from folb.data.device_trace import trace

SYSTEMS: dict[str, Callable[..., System]] = system.SYSTEMS | {"trace": trace}
