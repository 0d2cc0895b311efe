"""The types that all parts of folb share."""

from __future__ import annotations

from typing import Any

import numpy as np

NDArray = np.ndarray[Any, np.dtype[Any]]

Params = Any
"""A tree of arrays. A *stack* is such a tree with a leading axis, one entry for each of K devices."""
