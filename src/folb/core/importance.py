"""I_k of (18): what a device's inner product is worth once its inexact work is discounted.

Of jax's arrays, and of numbers on a device that computes its own weight.
"""

from __future__ import annotations

from typing import Any


def as_printed(inner: Any, discount: Any) -> Any:
    """I_k = inner - discount: a discount larger than the inner product turns a device's update round."""
    return inner - discount


def never_flipped(inner: Any, discount: Any) -> Any:
    """The discount shrinks |I_k| to zero and never past it."""
    xp = inner.__array_namespace__()
    return xp.sign(inner) * xp.maximum(xp.abs(inner) - discount, 0.0)
