"""Who is asked in a round: the simulator's draw, from the devices that are there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from folb.core import round as core_round
from folb.core import selection, tree, vector
from folb.core.algorithm import Algorithm
from folb.core.multiset import Multiset
from folb.core.selection import Known, drawing
from folb.core.solver import steps_of
from folb.core.system import System
from folb.core.upload import GRAD
from folb.flower.mailbox import Mailbox
from folb.flower.open_round import OpenRound, stacked_upload
from folb.flower.questions import Slots
from folb.flower.remembered import Remembered
from folb.flower.roster import Member
from folb.flower.strategy_settings import StrategySettings
from folb.typing import NDArray


@jax.jit
def plan(algorithm: Algorithm, system: System, there: Any, asked: Any, words: Any, seed: Any, t: Any) -> Any:
    """S_1, S_2 and the inner products of round t: the simulator's own draw.

    `there` are the identities of the present devices, in ascending order, their samples and their shares p_k. `asked`
    are the answers to the survey, the memory of devices, and the candidates: if there are some, answers and memory are
    theirs. `words` are the two words that only the draw depends on, by default the seed and t: devices learn words that
    depend on `seed`.
    """
    how, (who, size, share) = algorithm.selection, there
    start = jnp.cumsum(size) - size  # as if their samples lay end to end
    draw = drawing(how, Known(jnp.asarray(t, jnp.int32), how.K, how.replacement, start, size, share, *asked))
    first, second = core_round.sets(draw, how, *words)

    def slots(chosen: Multiset) -> Slots:
        n = size[chosen.device]
        words, effort = core_round.managed(system, algorithm.solver, n, who[chosen.device], seed, t)
        steps = steps_of(algorithm.solver, effort.work, n)
        return Slots(chosen, words, effort.work, effort.lost, steps, draw.correction(chosen.device))

    inner = None if draw.inner is None else draw.inner[first.device]
    return slots(first), None if second is None else slots(second), inner


_candidates = jax.jit(selection.candidates, static_argnums=1)


def draw(opened: OpenRound, settings: StrategySettings, remembered: Remembered, mailbox: Mailbox) -> None:
    """Draw the devices of a round, or abandon it. The sampling may ask some of them before."""
    members, sampling = opened.members, opened.algorithm.selection.sampling
    seed, t = np.uint32(settings.seed), np.uint32(opened.t)
    if sampling.first is not None and not remembered.met:
        _meet(opened, settings, remembered, mailbox)
    # where the sampling wants none, there is no program to compile
    some = None if sampling.candidates is None else _candidates(opened.algorithm.selection, len(members), seed, t)
    asked = members if some is None else [members[i] for i in np.asarray(some)]
    survey = None if opened.abandoned else _survey(opened, settings, asked, mailbox)
    if opened.abandoned:
        return
    words = seed, t
    if opened.algorithm.privacy is not None and not settings.replay:
        words = np.uint32(secrets.randbits(32)), np.uint32(secrets.randbits(32))
    who = np.array([member.identity for member in members], np.uint32)
    size = np.array([member.size for member in members], np.int32)
    there = who, size, _share(settings.objective, members)
    memory = remembered.stacked([member.identity for member in asked]) if sampling.memory else None
    if memory is not None and opened.algorithm.memory is not None:
        memory = opened.algorithm.memory.samplings(memory)
    drawn = plan(opened.algorithm, settings.system, there, (survey, memory, some), words, seed, t)
    first, opened.second, opened.inner = jax.tree.map(np.asarray, drawn)
    opened.first, opened.own = first, remembered.stacked(opened.who(first))


def _meet(opened: OpenRound, settings: StrategySettings, remembered: Remembered, mailbox: Mailbox) -> None:
    """Ask all devices once, before the first round, for what the sampling wants to remember of them."""
    first, K = opened.algorithm.selection.sampling.first, opened.algorithm.selection.K
    assert first is not None
    task = opened.questions.plain(first.upload)
    found = opened.exchange(mailbox, {member.identity: task for member in opened.members})
    there = sorted(found)
    if len(there) < max(settings.min_replies or 1, K):
        opened.abandoned = f"{len(there)} devices answered before the first round, and K are needed"
        return
    form = opened.questions.forms[first.upload.name]
    answers = stacked_upload(first.upload, form, [found[identity] for identity in there])
    known = jax.tree.map(np.asarray, first.remember(answers, K))
    new = remembered.stacked(there)
    tree.check_like("sampling: first: what `remember` returns", known, new[1])
    remembered.update(there, [True] * len(there), (new[0], known))


def _survey(
    opened: OpenRound, settings: StrategySettings, members: Sequence[Member], mailbox: Mailbox
) -> NDArray | None:
    """The answers of devices to the sampling's survey; for gradients <grad f, grad F_k>, as in (7).

    A device that does not answer has 0: it is drawn only without replacement, if fewer than K others have more. A
    candidate that does not answer comes last.
    """
    sampling, least = opened.algorithm.selection.sampling, settings.min_replies or 1
    upload = sampling.survey
    if upload is None:
        return None
    task = opened.questions.plain(upload)
    found = opened.exchange(mailbox, {member.identity: task for member in members})
    if len(found) < least:
        opened.abandoned = f"{len(found)} devices answered the survey, but {least} are needed"
    there = [found.get(member.identity) for member in members]
    if upload != GRAD:
        silent = 0.0 if sampling.candidates is None else -np.inf
        return np.array([silent if reply is None else reply.numbers[upload.name] for reply in there], np.float32)
    grads = [None if reply is None else reply.arrays[upload.name] for reply in there]
    mean = {name: np.zeros_like(value) for name, value in opened.state.params.items()}
    for p, grad in zip(_share(settings.objective, opened.members), grads, strict=True):
        if grad is not None:
            mean = {name: total + p * grad[name] for name, total in mean.items()}
    return np.array([0.0 if g is None else vector.dot(g, mean) for g in grads], np.float32)


def _share(objective: str, members: Sequence[Member]) -> NDArray:
    """p_k of (1), for the present devices."""
    size = np.array([member.size for member in members])
    share = size / size.sum() if objective == "samples" else np.full(len(size), 1 / len(size))
    return share.astype(np.float32)
