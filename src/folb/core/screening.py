"""A reply that a rule rejects or clips must not change the model in another way: by the server step,
a memory or the step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import Partial

from folb.core import tree
from folb.core.memory import DeviceMemory
from folb.core.rules import Round, Rule, Update
from folb.typing import Params

if TYPE_CHECKING:
    from folb.core.algorithm import Algorithm

Screen = Callable[[Round], Round]


def behind(screen: Screen, algorithm: Algorithm, rule: Rule) -> Algorithm:
    """The algorithm with another rule. Its server step, memory and step size see what `screen` makes of a round.

    A device whose reply is rejected (the screened round counts it 0 times) keeps its memory.
    """
    screen, server, size = tree.compiled(screen), algorithm.server, algorithm.step_size
    return replace(
        algorithm,
        rule=rule,
        server=server._replace(apply=Partial(_apply, apply=server.apply, screen=screen)),
        memory=_remembering(screen, algorithm.memory),
        step_size=None if size is None else size._replace(update=Partial(_size, update=size.update, screen=screen)),
    )


def _apply(memory: Any, round: Round, update: Update, *, apply: Any, screen: Screen) -> tuple[Params, Any]:
    return apply(memory, screen(round), update)


def _size(memory: Any, round: Round, *, update: Any, screen: Screen) -> Any:
    return update(memory, screen(round))


def _remembering(screen: Screen, memory: DeviceMemory | None) -> DeviceMemory | None:
    if memory is None:
        return None
    correct = None if memory.correct is None else Partial(_correct, correct=memory.correct, screen=screen)
    return replace(memory, update=Partial(_update, update=memory.update, screen=screen), correct=correct)


def _correct(round: Round, *, correct: Any, screen: Screen) -> Params:
    return correct(screen(round))


def _update(round: Round, *, update: Any, screen: Screen) -> tuple[Any, Any]:
    sound = screen(round)
    shared, own = update(sound)
    return shared, jax.vmap(tree.where)(sound.times > 0, own, round.own)
