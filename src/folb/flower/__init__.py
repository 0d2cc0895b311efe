"""FOLB and its family on Flower: the simulator's algorithm objects on real devices.

The names below load on first use. A server uses the strategies, which need jax. A device uses the rest, without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folb.flower.device import Device, client_app, from_jax, from_torch
    from folb.flower.protocol import arrays
    from folb.flower.strategy import FederatedStrategy
    from folb.flower.two_phase import TwoPhaseStrategy

_HOME = dict.fromkeys(("Device", "client_app", "from_jax", "from_torch"), "device")
_HOME |= {"FederatedStrategy": "strategy", "TwoPhaseStrategy": "two_phase", "arrays": "protocol"}

__all__ = ["Device", "FederatedStrategy", "TwoPhaseStrategy", "arrays", "client_app", "from_jax", "from_torch"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            return getattr(import_module(f"folb.flower.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "flwr":
                raise
            raise ModuleNotFoundError("folb.flower needs Flower: pip install 'folb[flower]'", name="flwr") from error
    raise AttributeError(f"module 'folb.flower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
