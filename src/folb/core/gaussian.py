"""Normal numbers without jax: from the operating system's randomness, or from random words that can be drawn again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from folb.core.vector import each
from folb.typing import NDArray, Params


def like(tree: Params, words: Sequence[int] | None = None) -> Params:
    """Standard normal numbers in the shapes of a tree's arrays: from `words` alone, or else the operating system's."""
    generator = None if words is None else np.random.Generator(np.random.Philox(np.random.SeedSequence(list(words))))

    def drawn(leaf: Any) -> NDArray:
        size = int(np.prod(leaf.shape, dtype=np.int64))
        numbers = _from_system(size) if generator is None else generator.standard_normal(size)
        return numbers.astype(np.float32).reshape(leaf.shape)

    return each(drawn, tree)


def _from_system(n: int) -> NDArray:
    """n normal numbers, by Box and Muller's formula in 64 bits."""
    half = -(-n // 2)
    words = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half)
    first, second = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
