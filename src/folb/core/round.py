"""The parts of a round that both carriers share: its draw, the effort, its close, and the bytes of its messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from folb.core import privacy, randomness, robust, tree
from folb.core.algorithm import Algorithm
from folb.core.event_queue import empty_queue
from folb.core.liars import with_false_gradients, with_lies
from folb.core.memory import Sent, started, updated
from folb.core.randomness import Multiset
from folb.core.rules import Round, Update
from folb.core.selection import Draw, Selection
from folb.core.solver import Solver, unit_cost
from folb.core.system import Effort, System, asked_for, given_work
from folb.core.tree import size
from folb.core.upload import DELTA, ENCODED, Upload
from folb.core.vector import zeros
from folb.errors import InputError
from folb.typing import Params


class State(NamedTuple):
    """All that a run needs to resume. A part that an algorithm does not have is ()."""

    params: Params
    memory: Any  # the server step's
    shared: Any = ()  # the server's part of the memory of devices
    average: Any = ()  # of the models
    step_size: Any = ()  # what the step size is set by
    devices: Any = ()  # the memory of devices, as the carrier keeps it
    queue: Any = ()  # the devices at work, if rounds do not wait
    clock: Any = ()  # when the next round begins, if the system model asks for that
    residual: Any = ()  # what the codec of the model left out, for the next model
    residuals: Any = ()  # what each device's codec left out, in the simulator: a real device keeps its own
    clip: Any = ()  # of a private run, if it adapts


def begin(algorithm: Algorithm, params: Params) -> tuple[State, Any]:
    """The state before the first round, and the first memory of a device. The carrier stores the devices' memory."""
    shared, own = started(algorithm.memory, params)
    size = () if algorithm.step_size is None else algorithm.step_size.init(params)
    codecs = algorithm.compression
    residual = zeros(params) if codecs.down is not None and codecs.feedback else ()
    average, plan = algorithm.average.init(params), algorithm.asynchrony
    queue = () if plan is None else empty_queue(plan.concurrency, params)
    memory, private = algorithm.server.init(params), algorithm.privacy
    clip = () if private is None or private.clip_quantile is None else jnp.float32(private.clip)
    return State(params, memory, shared, average, size, residual=residual, queue=queue, clip=clip), own


def over_rounds(algorithm: Algorithm, rounds: int) -> Algorithm:
    """The algorithm in a run of so many rounds, which a schedule of its step size may depend on."""
    size = algorithm.step_size
    return algorithm.but(step_size=None if size is None else size.over(rounds))


def with_step_size(algorithm: Algorithm, state: State, t: Any) -> Algorithm:
    """The algorithm with the step size, and the clip, that its devices get in round t, which begins with `state`."""
    algorithm = privacy.with_clip(algorithm, state.clip)
    if algorithm.step_size is None:
        return algorithm
    # on Flower the memory is in NumPy's arrays, whose arithmetic has other types
    factor = algorithm.step_size.factor(jax.tree.map(jnp.asarray, state.step_size), t)
    tree.check_like("step_size: what factor(memory, t) returns", factor, jnp.float32(1))
    return algorithm.but(solver=replace(algorithm.solver, lr=algorithm.solver.lr * factor))


def kept(algorithm: Algorithm, state: State) -> Params:
    """The model that is evaluated and kept."""
    return algorithm.average.model(state.average, state.params)


def _model(algorithm: Algorithm, state: State) -> Params:
    """The model that devices should start from, before any codec; with what the codec left out so far."""
    sent = state.params
    if algorithm.server.has("send"):
        sent = algorithm.server.send(state.memory, state.params)
        tree.check_like("server: what send(memory, params) returns", sent, state.params)
    return tree.add(sent, state.residual) if jax.tree.leaves(state.residual) else sent


def model_encoded(algorithm: Algorithm, state: State, key: Any) -> Any:
    """The model as it is sent; `key` are the two random words that all devices of the round share."""
    codec, model = algorithm.compression.down, _model(algorithm, state)
    return model if codec is None else codec.encoded(model, key)


def model_sent(algorithm: Algorithm, state: State, key: Any = None) -> Params:
    """The model that devices start from: as they decode it, if there is a codec."""
    codec, model = algorithm.compression.down, _model(algorithm, state)
    return model if codec is None else codec.decoded(codec.encoded(model, key), key, model)


class Closed(NamedTuple):
    """A round after its close: the state it led to, its update, and the memory of its devices, stacked."""

    state: State
    update: Update
    weights: Array  # of the replies in the server's step or, if its gain is not known, in the update
    updated: Array  # whether the model changed: some reply was usable, and some weight not zero
    own: Any


def close(algorithm: Algorithm, state: State, round: Round) -> Closed:
    """Aggregate a round of an algorithm `with_step_size`, and take the server's step.

    A round without a usable reply changes neither the model nor any memory, unless the algorithm is private.
    """
    remembers = algorithm.memory
    start = model_sent(algorithm, state, round.key) if round.start is None else round.start
    round = round._replace(shared=state.shared, start=start)
    if algorithm.sees_gradients:
        round = round._replace(shift=shifts(algorithm, state, round.own, round.steps, round.N))
    if algorithm.attack is not None:
        round = with_lies(algorithm.attack, round)
    round = algorithm.gradient.view(round)
    if algorithm.attack is not None and algorithm.gradient.upload is not None:
        round = with_false_gradients(algorithm.attack, round)
    if algorithm.asynchrony is not None:
        round = algorithm.asynchrony.seen(round, math.inf if algorithm.guard is None else 1.0)
    seen = round if remembers is None else remembers.seen(round)
    clip: Any = ()
    if algorithm.privacy is None:
        update = update_of(algorithm, seen)
        _check_update(update, state.params, algorithm.selection.K)
        weighty = jnp.any(round.times > 0) & jnp.any(update.weights != 0)
        seen = shortened(algorithm, seen._replace(update=update))
        round = shortened(algorithm, round)
    else:
        update, seen, clip = privacy.release(algorithm, round)
        weighty = jnp.bool_(True)  # a round without replies adds its noise, too
    round = round._replace(update=update)
    if remembers is not None and remembers.has("correct"):
        corrected = remembers.correct(seen)
        tree.check_like("memory: what correct(round) returns", corrected, state.params)
        update = update._replace(delta=corrected)
    shown = update if algorithm.privacy is None or seen.update is None else seen.update
    gain = algorithm.server.gain
    if algorithm.whiten is not None and algorithm.whiten.matrices:  # last: at the length that was bounded
        shown, gain = shown._replace(delta=algorithm.whiten.whitened(shown.delta)), math.inf
    params, memory = tree.pair("server: what apply returns", algorithm.server.apply(state.memory, seen, shown))
    tree.check_like("server: the model and the memory after apply", (params, memory), (state.params, state.memory))
    shared, own = updated(remembers, round)
    tree.check_like("memory: what update(round) returns", (shared, own), (state.shared, round.own))
    average = algorithm.average.update(state.average, params)
    kept_model = algorithm.average.model(average, params)
    tree.check_like("average: its memory and its model", (average, kept_model), (state.average, state.params))
    size = () if algorithm.step_size is None else algorithm.step_size.update(state.step_size, seen)
    tree.check_like("step_size: what update(memory, round) returns", size, state.step_size)
    own = jax.vmap(tree.where)(weighty & (round.times > 0), own, round.own)
    weights = update.weights * update.kept * jnp.where(jnp.isinf(gain), 1.0, gain)
    residual = tree.sub(_model(algorithm, state), start) if jax.tree.leaves(state.residual) else ()
    changed = State(params, memory, shared, average, size, residual=residual, clip=clip)
    # the carrier keeps these
    others = {name: getattr(state, name) for name in ("devices", "residuals", "queue", "clock")}
    following = tree.where(weighty, changed, state._replace(**dict.fromkeys(others, ())))
    return Closed(following._replace(**others), update, weights, weighty, own)


def _check_update(update: Update, params: Params, K: int) -> None:
    """Wrong shapes would be broadcast without an error. Shapes are known before anything runs, so check them."""
    if not isinstance(update, Update):
        raise InputError("rule", type(update).__name__, "should return a folb.Update(delta, weights)")
    delta, weights = jax.tree.map(jnp.shape, tuple(update[:2]))
    if delta != jax.tree.map(jnp.shape, params) or weights != (K,):
        expected = f"should be an update of the shapes of the model, and weights of shape ({K},)"
        raise InputError("rule: shapes", (delta, weights), expected)


Chosen = tuple[Multiset, Multiset | None]  # S_1, and S_2 of Algorithm 2


def sets(draw: Draw, selection: Selection, seed: Array | int, t: Array | int) -> Chosen:
    words = randomness.words(seed, t, randomness.SERVER, 2 * draw.words)
    second = draw.devices(words[draw.words :]) if selection.second else None
    return draw.devices(words[: draw.words]), second


def shifts(algorithm: Algorithm, state: State, own: Any, steps: Any, N: Any) -> Params | None:
    """The linear term that each device is sent, stacked like `own`, by its local `steps`; None if nothing is sent."""
    memory = algorithm.memory
    if memory is None or not memory.has("shift"):
        return None
    shared, own = memory.algorithms(state.shared), memory.algorithms(own)
    K, sent = algorithm.selection.K, Sent(state.params, steps, algorithm.solver.lr, N)
    shifts = jax.vmap(memory.shift, in_axes=(None, 0, Sent(None, 0, None, None)), axis_size=K)(shared, own, sent)
    tree.check_like("memory: what shift(shared, own, sent) returns, stacked", shifts, _stacked(state.params, K))
    return shifts


def told(algorithm: Algorithm, state: State, own: Any, steps: Any, N: Any) -> tuple[Params | None, Any]:
    """What each device is sent besides the model: a shift by its local `steps`, and what these start from; stacked."""
    memory, shift = algorithm.memory, shifts(algorithm, state, own, steps, N)
    if memory is None or not memory.has("begin"):
        return shift, None
    shared, own, K = memory.algorithms(state.shared), memory.algorithms(own), algorithm.selection.K
    sent = Sent(state.params, None, algorithm.solver.lr, N)
    begin = jax.vmap(lambda own: memory.begin(shared, own, sent), axis_size=K)(own)
    wanted = tuple(_stacked(state.params, K) for _ in begin)
    tree.check_like("memory: what begin(shared, own, sent) returns, stacked", begin, wanted)
    return shift, begin


def _stacked(params: Params, K: int) -> Params:
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct((K, *v.shape), v.dtype), params)


def upload_shape(upload: Upload, params: Params) -> Any:
    """The shape of one device's upload, for a model like `params`. Nothing is computed."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), params)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    known = {name: {"loss": number, "mu": number, "key": key}.get(name, like) for name in upload.needs}
    try:
        answer = jax.eval_shape(upload, known)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"upload {upload.name}", upload.compute, f"cannot be computed: {error}") from error
    flat = isinstance(answer, dict) and all(
        isinstance(name, str) and hasattr(part, "shape") for name, part in answer.items()
    )
    structures: Any = (jax.tree.structure(answer), jax.tree.structure(params))
    if not (hasattr(answer, "shape") or flat or structures[0] == structures[1]):
        kind = type(answer).__name__
        raise InputError(f"upload {upload.name}", kind, "should be a number, an array, or a dict of arrays")
    for leaf in jax.tree.leaves(answer):
        if leaf.dtype not in (jnp.float32, jnp.uint8):
            raise InputError(f"upload {upload.name}", str(leaf.dtype), "should be float32 or uint8, as it is sent")
    return answer


def shared_words(seed: Any, t: Any) -> Array:
    """Two random words that all devices of round t share."""
    return randomness.words(seed, t, randomness.ROUND, 2)


class Exchange(NamedTuple):
    """One exchange, as a system model may see it. Bytes and `works` are for all devices, or for each."""

    down: Any = 0.0  # bytes
    up: Any = 0.0
    now: Any = 0.0  # on the clock of the run
    works: Any = True  # whether the devices work; if not, a unit of work costs nothing


def managed(
    system: System,
    solver: Solver,
    size: Array,
    who: Array,
    seed: Array | int,
    t: Array | int,
    exchange: Exchange | None = None,
) -> tuple[Array, Effort]:
    """For devices `who` with `size` samples: random words for their batches, and their effort in round t."""
    home = randomness.uniform(randomness.words(seed, randomness.HOME, who, 2))
    words = randomness.words(seed, t, who, 4)
    batches, draws, cost = words[:, :2], randomness.uniform(words[:, 2:]), unit_cost(solver, size)
    more, system = asked_for(system), given_work(system, solver.epochs)
    if not more:
        return batches, jax.vmap(system)(home, draws, cost)
    exchange = exchange or Exchange()
    each = {name: jnp.broadcast_to(jnp.float32(getattr(exchange, name)), who.shape) for name in ("down", "up")}
    # the first two of four words are those of `home`
    kept = randomness.uniform(randomness.words(seed, randomness.HOME, who, 4)[:, 2:])
    known = {**each, "now": jnp.float32(exchange.now), "device": who, "more": kept}
    axes = (0, 0, 0, *(None if name == "now" else 0 for name in more))
    cost = jnp.where(exchange.works, cost, 0)
    return batches, jax.vmap(system, in_axes=axes)(home, draws, cost, *(known[name] for name in more))


def first_replies(drawn: Multiset, effort: Effort, wanted: int, ties: Array) -> tuple[Effort, Array]:
    """Over-selection: the round ends with the first `wanted` usable replies, each counted as often as it was drawn.

    Later replies are lost; `ties` orders those of one moment. The second result is the round's end, or infinity.
    """
    usable = (drawn.times > 0) & ~effort.lost
    order = jnp.lexsort((ties, jnp.where(usable, effort.seconds, jnp.inf)))
    counted = jnp.cumsum(jnp.where(usable, drawn.times, 0.0)[order])
    late = jnp.zeros_like(usable).at[order].set(jnp.concatenate([jnp.zeros(1), counted[:-1]]) >= wanted)
    last = jnp.max(jnp.where(usable & ~late, effort.seconds, 0.0))
    end = jnp.where(counted[-1] >= wanted, last, jnp.inf)
    return effort._replace(seconds=jnp.minimum(effort.seconds, end), lost=effort.lost | late), end


def update_of(algorithm: Algorithm, round: Round) -> Update:
    """What the rule makes of a round: guarded first, then robust."""
    if algorithm.guard is not None:
        made = algorithm.guard.update(algorithm.rule, round)
    else:
        made = algorithm.rule.update(round if algorithm.robust is None else robust.finite(round))
    return made if algorithm.robust is None else robust.recentred(made, algorithm.robust, round)


def shortened(algorithm: Algorithm, round: Round) -> Round:
    """What the guard or the robust centre rejects or shortens must not change the model in another way."""
    if algorithm.guard is not None:
        round = algorithm.guard.bounded(round)
    return round if algorithm.robust is None else robust.bounded(round)


class Sizes(NamedTuple):
    """The bytes of each kind of message."""

    model: int  # to every device that is asked
    shift: int  # to a device of S_1, besides: what its memory sends
    reply: int  # from a device of S_1: its update and the algorithm's uploads
    gradient: int  # from a device of S_2 alone
    answer: int  # to a survey


def sizes(algorithm: Algorithm, params: Params) -> Sizes:
    """The bytes of the messages of an algorithm as they are sent, for a model like `params`."""
    codecs, how, memory = algorithm.compression, algorithm.selection, algorithm.memory
    model, d = nbytes(params), size(params)
    asks = how.survey if how.first is None else how.first
    shift = model if memory is not None and memory.has("shift") else 0
    if memory is not None and memory.has("begin"):
        shared, own = jax.eval_shape(memory.init, params)
        sent = jax.eval_shape(lambda shared, own, w: memory.begin(shared, own, Sent(w, 1, 1.0, 1)), shared, own, params)
        shift += nbytes(sent)
    return Sizes(
        model=model if codecs.down is None else codecs.down.nbytes(d),
        shift=shift,
        reply=sum(upload_size(algorithm, upload, params) for upload in (DELTA, *algorithm.uploads)),
        gradient=upload_size(algorithm, algorithm.gradient.second, params),
        answer=0 if asks is None else nbytes(upload_shape(asks, params)),
    )


def upload_size(algorithm: Algorithm, upload: Upload, params: Params) -> int:
    """The bytes of one upload: through the codec, if it goes through one."""
    codec = algorithm.compression.up
    if codec is not None and upload in ENCODED:
        return codec.nbytes(size(params))
    return nbytes(upload_shape(upload, params))


def nbytes(tree: Any) -> int:
    """The bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
