"""The work of a round's devices: the proximal solve, gradients and losses, what they send, and how it arrives.

Every function takes the devices of a round as K slots and returns stacks. If a problem is `side_by_side`, they are
computed so; one after another is faster for a large network on a CPU. The accelerators of its `mesh` share the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from folb.core import randomness, tree
from folb.core.algorithm import Algorithm
from folb.core.codec import Codec
from folb.core.local_step import step_words
from folb.core.memory import Rows, gathered, scattered
from folb.core.polar import median
from folb.core.shuffle import shuffled
from folb.core.solver import Solver, unit_cost
from folb.core.upload import Upload
from folb.models import Model
from folb.models.model import draws
from folb.simulation import parallel
from folb.simulation.problem import Problem, Samples
from folb.typing import Params

BLOCK = 128  # samples of one device taken at once by a full gradient
LANES = 64  # slots, or blocks of full gradients, that a CPU takes side by side
RUNS = "runs"  # the axis of stacked runs
UNROLL = 4  # mini-batch steps compiled as one turn of the solver's loop, unless the model is heavy


class Settings(NamedTuple):
    """The settings of each slot's local steps."""

    lr: Any
    mu: Any
    step: Any  # a LocalStep
    shift: Params | None
    begin: tuple[Params, ...] | None  # what the local step starts from


class Slots(NamedTuple):
    """The round's distinct devices, `work` units for each, and two random words of (seed, round, device)."""

    device: Array
    work: Array
    words: Array


def over_slots(f: Callable[..., Params], like: Params, mesh: Mesh | None) -> Callable[..., Params]:
    """f(data, *arrays), whole or in parts on the accelerators of `mesh`; the arrays have an entry per slot.

    Under `vmap` over the axis RUNS, f sees the slots of all runs in one row, and they can share its lanes. What it
    returns is like `like`.
    """
    whole = parallel.over_parts(f, mesh)

    @jax.custom_batching.custom_vmap
    def of_run(data: Samples, arrays: Any, like: Params) -> Params:
        return like  # never computed, only its structure is used: f is traced once, for all runs together

    @of_run.def_vmap
    def of_all_runs(runs: int, batched: Any, data: Samples, arrays: Any, like: Params) -> tuple[Params, Any]:
        stacked = jax.tree.map(lambda v, own: v if own else jnp.broadcast_to(v, (runs, *v.shape)), arrays, batched[1])
        row = whole(data, *jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), stacked))
        by_run = jax.tree.map(lambda v: v.reshape(runs, -1, *v.shape[1:]), row)
        return by_run, jax.tree.map(lambda _: True, by_run)

    def over_all(data: Samples, *arrays: Any) -> Params:
        try:
            jax.lax.axis_size(RUNS)
        except NameError:  # this run is not stacked
            return whole(data, *arrays)
        return of_run(data, arrays, like)

    return over_all


class Solved(NamedTuple):
    """What the local work ends with, stacked."""

    delta: Params  # Delta w_k = w_k - w^t
    momentum: Any = ()  # of the local step, if it was asked for


def solve(
    problem: Problem,
    solver: Solver,
    here: Params,
    slots: Slots,
    shift: Params | None = None,
    begin: tuple[Params, ...] | None = None,
    *,
    momentum: bool = False,
) -> Solved:
    """What each slot has after `work` units on h_k of (3), from w^t = `here`, stacked.

    `shift`, stacked, adds <shift_k, w> to h_k, and the local step starts from `begin`. The solver's `lr` is a number,
    or one for each slot.
    """
    K = len(slots.device)
    settings = Settings(jnp.broadcast_to(solver.lr, (K,)), solver.mu, solver.step, shift, begin)
    if solver.unit == "gradient":
        return _gradient_descent(problem, solver, here, settings, slots, momentum)
    mu, step = jax.tree.map(lambda v: jnp.broadcast_to(v, (K, *jnp.shape(v))), (solver.mu, solver.step))

    def in_groups(data: Samples, here: Params, settings: Settings, slots: Slots) -> Params:
        """Slots with about the same number of steps run side by side: no slot waits long for another."""
        count = len(slots.device)
        # epochs differ like the devices' sizes: by orders of magnitude
        groups = -(-count // together(problem, count, 16 if solver.unit == "epoch" else 1))
        size = -(-count // groups)  # as equal as possible
        order = jnp.argsort(-slots.work * unit_cost(solver, data.size[slots.device]))
        padded = jnp.concatenate([order, jnp.full(groups * size - count, order[-1])]).reshape(groups, size)

        def group(chosen: Array) -> Solved:
            own = jax.tree.map(lambda v: v[chosen], (here, settings, slots))
            return _sgd(problem.model, data, solver, momentum, *own)

        solved = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), jax.lax.map(group, padded))
        return jax.tree.map(lambda v: v[jnp.argsort(order)], solved)

    each = settings._replace(mu=mu, step=step)
    like = Solved(here, here if momentum else ())
    return Solved(*over_slots(in_groups, like, problem.mesh)(problem.train, here, each, slots))


def together(problem: Problem, slots: int, groups: int = 1) -> int:
    """How many slots, or blocks of full gradients, are computed side by side; on a CPU in at least so many groups."""
    if not problem.side_by_side:
        return 1
    return min(LANES, max(1, slots // groups)) if jax.default_backend() == "cpu" else slots


def _sgd(
    model: Model, data: Samples, solver: Solver, momentum: bool, here: Params, settings: Settings, slots: Slots
) -> Solved:
    """Mini-batch steps over shuffled passes through each device's samples, all slots side by side.

    With unit "epoch" a pass ends with a smaller batch if `batch` does not divide the samples; with unit "step" a batch
    may span two passes.
    """
    start, size = data.first(slots.device), data.size[slots.device]
    per_epoch = -(-size // solver.batch)
    steps = slots.work * unit_cost(solver, size)
    unroll, random = 1 if model.heavy else UNROLL, draws(model.loss)

    offset = jnp.arange(solver.batch)

    def batch(s: Array) -> tuple[Array, Array]:
        """The rows of every slot's batch s, and their weights: [slots, batch]."""
        n = size[:, None]
        if solver.unit == "epoch":
            epoch, position = (s // per_epoch)[:, None], (s % per_epoch * solver.batch)[:, None] + offset
            real = position < n
        else:
            position = s * solver.batch + offset
            epoch, position = position // n, position % n
            real = jnp.ones_like(position, bool)
        rows = jax.vmap(shuffled)(slots.words, jnp.broadcast_to(epoch, real.shape), jnp.minimum(position, n - 1), size)
        return start[:, None] + rows, real / jnp.maximum(real.sum(axis=1, keepdims=True), 1)

    # Maps over maps take longer to trace than one array of [unroll, slots, batch], but XLA makes a faster loop of them.
    @partial(jax.jit, inline=True)  # like `each` below: traced once, though it is called twice
    def batches(s: Array) -> tuple[Array, Array]:
        """The rows of every slot's batches from s on, and their weights: [unroll, slots, batch]."""
        return jax.vmap(batch)(s + jnp.arange(unroll))

    def step(at: Any, batch: Any, active: Array, here: Params, settings: Settings, words: Array | None) -> Any:
        (w, _), (x, y, weight) = at, batch
        key = None if words is None else randomness.key_of(words)
        g = jax.grad(lambda w: jnp.sum(weight * model.losses(w, x, y, key)))(w)
        g = jax.tree.map(lambda d, v, v0: d + settings.mu * (v - v0), g, w, here)
        return _moved(at, g, active, settings)

    each = jax.jit(_each(step, len(steps)), inline=True)  # traced once, and not `unroll` times

    def turn(carry: tuple[Array, Any, tuple[Array, Array]]) -> tuple[Array, Any, tuple[Array, Array]]:
        s, at, (rows, weight) = carry
        x, y = data.take(rows)
        for u in range(unroll):
            words = step_words(slots.words, s + u) if random else None
            at = each(at, (x[u], y[u], weight[u]), s + u < steps, here, settings, words)
        return s + unroll, at, batches(s + unroll)

    # The next batches are part of the loop's state: otherwise the compiler would compute their rows again in every
    # operation that reads them.
    first = (jnp.int32(0), (here, _begun(solver.step, here, settings)), batches(jnp.int32(0)))
    _, (w, state), _ = jax.lax.while_loop(lambda carry: carry[0] < jnp.max(steps), turn, first)
    ends = jax.vmap(type(solver.step).momentum)(settings.step, state) if momentum else ()
    return Solved(jax.tree.map(jnp.subtract, w, here), ends)


def _begun(step: Any, here: Params, settings: Settings, axis: int | None = 0) -> Any:
    """The state that each slot's local step starts from; `axis` is that of the slots in the settings' step."""
    if settings.begin is None:
        return jax.vmap(step.init)(here)
    return jax.vmap(type(step).begin, in_axes=(axis, 0))(settings.step, settings.begin)


def _moved(at: tuple[Params, Any], g: Params, active: Array, settings: Settings) -> tuple[Params, Any]:
    """A device's model and the state of its solver after a step along g, if it is active; otherwise unchanged."""
    w, state = at
    if settings.shift is not None:
        g = jax.tree.map(jnp.add, g, settings.shift)
    stepped = settings.step.apply(g, state, settings.lr)
    move, following = tree.pair("local: what it returns", stepped)
    tree.check_like("local: the move", move, w)
    tree.check_like("local: the state after a step", following, state)
    w = jax.tree.map(lambda v, m: jnp.where(active, v + m, v), w, move)
    return w, jax.tree.map(lambda new, old: jnp.where(active, new, old), following, state)


def _each(f: Callable[..., Params], slots: int) -> Callable[..., Params]:
    """f over the leading axis. One slot runs without that axis, which would make products slower."""
    if slots > 1:
        return jax.vmap(f)
    return lambda *args: jax.tree.map(lambda v: v[None], f(*jax.tree.map(lambda v: v[0], args)))


def _gradient_descent(
    problem: Problem, solver: Solver, here: Params, settings: Settings, slots: Slots, momentum: bool
) -> Solved:
    """Full-gradient steps on h_k, all slots side by side."""

    def turn(s: Array, at: tuple[Params, Any]) -> tuple[Params, Any]:
        delta, _ = at
        w = jax.tree.map(jnp.add, delta, here)
        g = gradients(problem, w, slots.device, slots.work > s)
        g = jax.tree.map(lambda d, g: g + solver.mu * d, delta, g)
        return jax.vmap(_moved, in_axes=(0, 0, 0, Settings(0, None, None, 0, None)))(at, g, slots.work > s, settings)

    first = (jax.tree.map(jnp.zeros_like, here), _begun(solver.step, here, settings, None))
    delta, state = jax.lax.fori_loop(0, jnp.max(slots.work), turn, first)
    return Solved(delta, jax.vmap(solver.step.momentum)(state) if momentum else ())


def gradients(problem: Problem, stack: Params, device: Array, wanted: Array) -> Params:
    """grad F_k at each slot's own parameters: the mean over all samples of the slot's device."""
    return _means(problem, jax.grad, stack, stack, device, wanted)


def _means(problem: Problem, of: Callable[..., Any], like: Params, stack: Params, device: Array, wanted: Array) -> Any:
    """of(loss) over all samples of each slot's device, each with weight 1 / n_k; what it returns, stacked, is `like`.

    Devices differ in size by orders of magnitude. So the samples are cut into blocks, and the blocks of all slots queue
    for the lanes: the cost depends on the number of samples, not on K times the largest device.
    """

    def loss(w: Params, x: Array, y: Array, weight: Array) -> Array:
        return jnp.sum(weight * problem.model.losses(w, x, y))

    def queue(data: Samples, stack: Params, device: Array, wanted: Array) -> Params:
        slots, block = len(device), problem.model.at_once(BLOCK)
        lanes = together(problem, slots)
        start, size = data.first(device), jnp.where(wanted, data.size[device], 0)
        blocks = -(-size // block)
        last = jnp.cumsum(blocks)
        first = last - blocks

        def turn(i: Array, total: Params) -> Params:
            b = i * lanes + jnp.arange(lanes)
            k = jnp.minimum(jnp.searchsorted(last, b, side="right"), slots - 1)
            row = ((b - first[k]) * block)[:, None] + jnp.arange(block)
            weight = (row < size[k][:, None]) / jnp.maximum(size[k], 1)[:, None]
            rows = start[k][:, None] + jnp.minimum(row, size[k][:, None] - 1)
            w = jax.tree.map(lambda v: v[k], stack)
            part = _each(of(loss), lanes)(w, *data.take(rows), weight)
            return jax.tree.map(lambda t, d: t.at[k].add(d), total, part)

        nothing = jax.tree.map(lambda v: jnp.zeros((slots, *v.shape[1:]), v.dtype), like)
        return jax.lax.fori_loop(0, -(-last[-1] // lanes), turn, nothing)

    return over_slots(queue, like, problem.mesh)(problem.train, stack, device, wanted)


def trusted_update(problem: Problem, algorithm: Algorithm, params: Params, seed: Any, steps: Array) -> Params | None:
    """The server's own update: full-gradient steps on its `own_samples`, as many as the median of `steps`."""
    if not algorithm.own_samples:
        return None
    # drawn from the training samples of all devices, with replacement, once a run
    words = randomness.words(seed, randomness.HOME, randomness.SERVER, algorithm.own_samples)
    x, y = problem.train.take(randomness.below(len(problem.train.y), words))
    solver = algorithm.solver

    def step(_: Array, w: Params) -> Params:
        g = jax.grad(lambda w: jnp.mean(problem.model.losses(w, x, y)))(w)
        return jax.tree.map(lambda v, v0, g: v - solver.lr * (g + solver.mu * (v - v0)), w, params, g)

    return tree.sub(jax.lax.fori_loop(0, median(steps, steps > 0).astype(jnp.int32), step, params), params)


@dataclass
class Sources:
    """What uploads are computed from, stacked over the slots `device`, if `wanted`; traced when it is first used."""

    problem: Problem
    params: Params  # the model that each of them was sent
    device: Array
    wanted: Array
    mu: Any
    key: Array
    delta: Params | None = None
    momentum: Params | None = None

    @cached_property
    def grad(self) -> Params:
        """grad F_k(w^t)."""
        return gradients(self.problem, self.params, self.device, self.wanted)

    @cached_property
    def after(self) -> Params:
        """grad F_k(w_k)."""
        return gradients(self.problem, jax.tree.map(jnp.add, self.params, self.delta), self.device, self.wanted)

    @cached_property
    def loss(self) -> Array:
        """F_k(w^t)."""
        like = jnp.zeros(len(self.device))
        return _means(self.problem, lambda loss: loss, like, self.params, self.device, self.wanted)


def computed(uploads: Iterable[Upload], sources: Sources) -> dict[str, Any]:
    """Each upload by its name, stacked over the slots."""
    values: dict[str, Any] = {}
    for upload in uploads:
        known = {name: getattr(sources, name) for name in upload.needs}
        axes = {name: None if name in ("mu", "key") else 0 for name in known}  # those are the same for all slots
        values[upload.name] = jax.vmap(upload, in_axes=(axes,), axis_size=len(sources.device))(known)
    return values


def decoded(codec: Codec, stack: Params, words: Array, whole: bool = False) -> Params:
    """A stack of trees as the server decodes them; `words` are two random words for each."""
    return jax.vmap(lambda a, words: codec.decoded(codec.encoded(a, words), words, a, whole))(stack, words)


def with_feedback(
    codec: Codec, delta: Params, words: Array, device: Array, usable: Array, residuals: Rows
) -> tuple[Params, Any]:
    """Updates as the server decodes them, each with what its device left out before; and what is left out now.

    A device does not know what becomes of its reply. So what it left out changes whenever it sends one.
    """
    full = tree.add(delta, gathered(residuals, device))
    received = decoded(codec, full, words, whole=True)
    return received, scattered(residuals, device, usable, tree.sub(full, received))
