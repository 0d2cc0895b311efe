"""I_k of (18): a device's inner product, less a discount for its inexact work.

The functions take jax arrays, or numbers on a device that computes its own weight.
"""

from __future__ import annotations

from typing import Any


def as_printed(inner: Any, discount: Any) -> Any:
    """I_k = inner - discount: a discount larger than the inner product reverses a device's update."""
    return inner - discount


def never_flipped(inner: Any, discount: Any) -> Any:
    """The discount shrinks |I_k| to zero at most: the sign never changes."""
    xp = inner.__array_namespace__()
    return xp.sign(inner) * xp.maximum(xp.abs(inner) - discount, 0.0)
