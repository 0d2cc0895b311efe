"""The parts of a round that both carriers share: the draw of its devices, their effort, and its close.

All randomness is a pure function of (seed, round, device), so any round can be replayed alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness, tree
from folb.core.algorithm import Algorithm
from folb.core.liars import told, told_gradients
from folb.core.memory import shifted_by, started, updated
from folb.core.rules import Round, Update
from folb.core.selection import Draw, Multiset, Selection
from folb.core.solver import Solver, unit_cost
from folb.core.system import Effort, System
from folb.core.upload import Upload
from folb.errors import InputError
from folb.typing import Params

UPDATE = "memory: what update(round) returns"


class State(NamedTuple):
    """All that a run needs to resume. A part that an algorithm does not have is ()."""

    params: Params
    memory: Any  # the server step's
    shared: Any = ()  # the server's part of the memory of devices
    average: Any = ()  # of the models
    step_size: Any = ()  # what the step size is set by
    devices: Any = ()  # the memory of devices, as the carrier keeps it


def begin(algorithm: Algorithm, params: Params) -> tuple[State, Any]:
    """The state before the first round, and the first memory of a device. The carrier stores the devices' memory."""
    shared, own = started(algorithm.memory, params)
    size = () if algorithm.step_size is None else algorithm.step_size.init(params)
    return State(params, algorithm.server.init(params), shared, algorithm.average.init(params), size), own


def with_step_size(algorithm: Algorithm, state: State) -> Algorithm:
    """The algorithm with the step size that its devices get in the round after `state`."""
    if algorithm.step_size is None:
        return algorithm
    factor = algorithm.step_size.factor(state.step_size)
    tree.check_like("step_size: what factor(memory) returns", factor, jnp.float32(1))
    return replace(algorithm, solver=replace(algorithm.solver, lr=algorithm.solver.lr * factor))


def kept(algorithm: Algorithm, state: State) -> Params:
    """The model that is evaluated and kept."""
    return algorithm.average.model(state.average, state.params)


def model_sent(algorithm: Algorithm, state: State) -> Params:
    """The model that devices start from."""
    send = algorithm.server.send
    if send is None:
        return state.params
    found = send(state.memory, state.params)
    tree.check_like("server: what send(memory, params) returns", found, state.params)
    return found


class Closed(NamedTuple):
    """A round after its close: the state it led to, its step, and the memory of its devices, stacked."""

    state: State
    update: Update
    updated: Array  # whether the model changed: some reply was usable, and some weight not zero
    own: Any


def close(algorithm: Algorithm, state: State, round: Round) -> Closed:
    """Aggregate a round of an algorithm `with_step_size`, and take the server's step.

    A round without a usable reply changes neither the model nor any memory.
    """
    remembers = algorithm.memory
    round = round._replace(shared=state.shared, start=model_sent(algorithm, state))
    if (
        remembers is not None
        and remembers.shift is not None
        and (algorithm.gradient is not None or algorithm.sends("grad"))
    ):
        round = round._replace(shift=shifts(algorithm, state, round.own, round.steps, round.N))
    if algorithm.attack is not None:
        round = told(algorithm.attack, round)
    if algorithm.gradient is not None:
        round = algorithm.gradient.view(round)
    if algorithm.attack is not None and (algorithm.gradient is None or algorithm.gradient.upload is not None):
        round = told_gradients(algorithm.attack, round)
    seen = round if remembers is None else remembers.seen(round)
    update = algorithm.rule(seen)
    _check_update(update, state.params, algorithm.selection.K)
    weighty = jnp.any(round.times > 0) & jnp.any(update.weights != 0)
    seen, round = seen._replace(update=update), round._replace(update=update)
    if remembers is not None and remembers.correct is not None:
        corrected = remembers.correct(seen)
        tree.check_like("memory: what correct(round) returns", corrected, state.params)
        update = update._replace(delta=corrected)
    params, memory = tree.pair("server: what apply returns", algorithm.server.apply(state.memory, seen, update))
    tree.check_like("server: the model and the memory after apply", (params, memory), (state.params, state.memory))
    shared, own = updated(remembers, round)
    tree.check_like(UPDATE, (shared, own), (state.shared, round.own))
    average = algorithm.average.update(state.average, params)
    kept_model = algorithm.average.model(average, params)
    tree.check_like("average: its memory and its model", (average, kept_model), (state.average, state.params))
    size = () if algorithm.step_size is None else algorithm.step_size.update(state.step_size, seen)
    tree.check_like("step_size: what update(memory, round) returns", size, state.step_size)
    own = jax.vmap(tree.where)(weighty & (round.times > 0), own, round.own)
    following = tree.where(weighty, State(params, memory, shared, average, size), state._replace(devices=()))
    return Closed(following._replace(devices=state.devices), update, weighty, own)


def _check_update(update: Update, params: Params, K: int) -> None:
    """Wrong shapes would be broadcast without an error. Shapes are known before anything runs, so check them."""
    if not isinstance(update, Update):
        raise InputError("rule", type(update).__name__, "should return a folb.Update(delta, weights)")
    delta, weights = jax.tree.map(jnp.shape, tuple(update))
    if delta != jax.tree.map(jnp.shape, params) or weights != (K,):
        expected = f"should be an update of the shapes of the model, and weights of shape ({K},)"
        raise InputError("rule: shapes", (delta, weights), expected)


Chosen = tuple[Multiset, Multiset | None]  # S_1, and S_2 of Algorithm 2


def sets(draw: Draw, selection: Selection, seed: Array | int, t: Array | int) -> Chosen:
    """The devices of round t."""
    luck = randomness.words(seed, t, randomness.SERVER, 2 * draw.words)
    second = draw.devices(luck[draw.words :]) if selection.second else None
    return draw.devices(luck[: draw.words]), second


def shifts(algorithm: Algorithm, state: State, own: Any, steps: Any, N: Any) -> Params | None:
    """The linear term that each device is sent, stacked like `own`; None if nothing is sent.

    `steps` are the local steps of each device, and N is the number of devices.
    """
    memory = algorithm.memory
    if memory is None or memory.shift is None:
        return None
    shared, own = (state.shared, own) if memory.sampling is None else (state.shared[0], own[0])
    known = {"params": state.params, "steps": steps, "lr": algorithm.solver.lr, "N": N}
    more = shifted_by(memory)
    axes = (None, 0, *(0 if name == "steps" else None for name in more))
    given = (shared, own, *(known[name] for name in more))
    found = jax.vmap(memory.shift, in_axes=axes, axis_size=algorithm.selection.K)(*given)
    wanted = jax.tree.map(lambda v: jax.ShapeDtypeStruct((algorithm.selection.K, *v.shape), v.dtype), state.params)
    tree.check_like("memory: what shift(shared, own) returns, stacked", found, wanted)
    return found


def upload_shape(upload: Upload, params: Params) -> Any:
    """The shape of one device's upload, for a model like `params`. Nothing is computed."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), params)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    known = {name: {"loss": number, "mu": number, "key": key}.get(name, like) for name in upload.needs}
    try:
        found = jax.eval_shape(upload, known)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"upload {upload.name}", upload.compute, f"cannot be computed: {error}") from error
    flat = isinstance(found, dict) and all(hasattr(part, "shape") for part in found.values())
    structures: Any = (jax.tree.structure(found), jax.tree.structure(params))
    if not (hasattr(found, "shape") or flat or structures[0] == structures[1]):
        kind = type(found).__name__
        raise InputError(f"upload {upload.name}", kind, "should be a number, an array, or a dict of arrays")
    for leaf in jax.tree.leaves(found):
        if leaf.dtype not in (jnp.float32, jnp.uint8):
            raise InputError(f"upload {upload.name}", str(leaf.dtype), "should be float32 or uint8, as it is sent")
    return found


def shared_words(seed: Any, t: Any) -> Array:
    """Two random words that all devices of round t share."""
    return randomness.words(seed, t, randomness.ROUND, 2)


def managed(
    system: System, solver: Solver, size: Array, who: Array, seed: Array | int, t: Array | int
) -> tuple[Array, Effort]:
    """For devices `who` with `size` samples: random words for their batches, and their effort in round t."""
    home = randomness.uniform(randomness.words(seed, randomness.HOME, who, 2))
    words = randomness.words(seed, t, who, 4)
    return words[:, :2], jax.vmap(system)(home, randomness.uniform(words[:, 2:]), unit_cost(solver, size))
