"""The key of a mini-batch step, for a loss that draws random numbers, such as dropout's. No jax is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from folb.core.vector import namespace

OWN = 0x51ED270B  # keys differ from the words themselves, which batches and codecs are drawn from


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a loss, a gradient or a network's outputs have a parameter `key`, which has no value of its own."""
    try:
        key = inspect.signature(function).parameters.get("key")
    except (TypeError, ValueError):  # a function that is not written in Python
        return False
    return key is not None and (key.default is None or key.default is key.empty)


def called(function: Callable[..., Any], *arguments: Any, key: Any = None) -> Any:
    """function(*arguments), with the key if it takes one; None: without randomness."""
    return function(*arguments, key=key) if takes_key(function) else function(*arguments)


def step_words(words: Any, s: Any) -> Any:
    """The two words of the key of a round's mini-batch s, counted from 0, from the device's own words of that round."""
    xp = namespace(words)
    number = xp.asarray(s, dtype=xp.uint32)
    return (words ^ xp.uint32(OWN)) + xp.stack([xp.zeros_like(number), number])
