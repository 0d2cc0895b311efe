"""The work of a round's devices: the proximal solve, gradients and losses.

Every function takes the devices of a round as K slots and returns stacks. With `side_by_side` slots are computed so;
one after another is faster for a large network on a CPU. The accelerators of a `mesh` share the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from folb.core import tree
from folb.core.shuffle import shuffled
from folb.core.solver import Solver, unit_cost
from folb.models import Model
from folb.simulation import parallel
from folb.simulation.samples import Samples
from folb.typing import Params

BLOCK = 128  # samples of one device taken at once by a full gradient
LANES = 64  # slots, or blocks of full gradients, that a CPU takes side by side
RUNS = "runs"  # the axis of stacked runs
UNROLL = 4  # mini-batch steps compiled as one turn of the solver's loop, unless the model is heavy


class Settings(NamedTuple):
    """The settings of each slot's local steps."""

    lr: Array
    mu: Array
    numbers: Any  # of the local step
    shift: Params | None


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
        found = jax.tree.map(lambda v: v.reshape(runs, -1, *v.shape[1:]), row)
        return found, jax.tree.map(lambda _: True, found)

    def over_all(data: Samples, *arrays: Any) -> Params:
        try:
            jax.lax.axis_size(RUNS)
        except NameError:  # this run is not stacked
            return whole(data, *arrays)
        return of_run(data, arrays, like)

    return over_all


def solve(
    model: Model,
    data: Samples,
    solver: Solver,
    here: Params,
    slots: Slots,
    side_by_side: bool,
    mesh: Mesh | None = None,
    shift: Params | None = None,
) -> Params:
    """Each slot's update Delta w_k = w_k - w^t after `work` units on h_k of (3), from w^t = `here`, stacked.

    `shift`, stacked, adds <shift_k, w> to h_k. The solver's `lr` is a number, or one for each slot.
    """
    K = len(slots.device)
    lr = jnp.broadcast_to(solver.lr, (K,))
    if solver.unit == "gradient":
        return _gradient_descent(model, data, solver, here, lr, slots, side_by_side, mesh, shift)
    mu, numbers = jax.tree.map(lambda v: jnp.broadcast_to(v, (K, *jnp.shape(v))), (solver.mu, solver.step.numbers))

    def in_groups(data: Samples, here: Params, settings: Settings, slots: Slots) -> Params:
        """Slots with about the same number of steps run side by side: no slot waits long for another."""
        count = len(slots.device)
        groups = -(-count // group_size(solver, count, side_by_side))
        size = -(-count // groups)  # as equal as possible
        order = jnp.argsort(-slots.work * unit_cost(solver, data.size[slots.device]))
        padded = jnp.concatenate([order, jnp.full(groups * size - count, order[-1])]).reshape(groups, size)

        def group(chosen: Array) -> Params:
            return _sgd(model, data, solver, *jax.tree.map(lambda v: v[chosen], (here, settings, slots)))

        delta = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), jax.lax.map(group, padded))
        return jax.tree.map(lambda v: v[jnp.argsort(order)], delta)

    return over_slots(in_groups, here, mesh)(data, here, Settings(lr, mu, numbers, shift), slots)


def group_size(solver: Solver, slots: int, side_by_side: bool) -> int:
    """How many slots are computed side by side, at most."""
    if not side_by_side:
        return 1
    if jax.default_backend() != "cpu":
        return slots
    # epochs differ like the devices' sizes: by orders of magnitude
    return min(LANES, max(1, slots // 16) if solver.unit == "epoch" else slots)


def _sgd(model: Model, data: Samples, solver: Solver, here: Params, settings: Settings, slots: Slots) -> Params:
    """Mini-batch steps over shuffled passes through each device's samples, all slots side by side.

    With unit "epoch" a pass ends with a smaller batch if `batch` does not divide the samples; with unit "step" a batch
    may span two passes.
    """
    start, size = data.first(slots.device), data.size[slots.device]
    per_epoch = -(-size // solver.batch)
    steps = slots.work * unit_cost(solver, size)
    unroll = 1 if model.heavy else UNROLL

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

    def step(
        at: tuple[Params, Any], x: Array, y: Array, weight: Array, active: Array, here: Params, settings: Settings
    ) -> tuple[Params, Any]:
        w, _ = at
        g = jax.grad(lambda w: jnp.sum(weight * model.loss(w, x, y)))(w)
        g = jax.tree.map(lambda d, v, v0: d + settings.mu * (v - v0), g, w, here)
        return _moved(solver, at, g, active, settings)

    each = jax.jit(_each(step, len(steps)), inline=True)  # traced once, and not `unroll` times

    def turn(carry: tuple[Array, Any, tuple[Array, Array]]) -> tuple[Array, Any, tuple[Array, Array]]:
        s, at, (rows, weight) = carry
        x, y = data.take(rows)
        for u in range(unroll):
            at = each(at, x[u], y[u], weight[u], s + u < steps, here, settings)
        return s + unroll, at, batches(s + unroll)

    # The next batches are part of the loop's state: otherwise the compiler would compute their rows again in every
    # operation that reads them.
    first = (jnp.int32(0), (here, jax.vmap(solver.step.init)(here)), batches(jnp.int32(0)))
    _, (w, _), _ = jax.lax.while_loop(lambda carry: carry[0] < jnp.max(steps), turn, first)
    return jax.tree.map(jnp.subtract, w, here)


def _moved(solver: Solver, at: tuple[Params, Any], g: Params, active: Array, settings: Settings) -> tuple[Params, Any]:
    """A device's model and the state of its solver after a step along g, if it is active; otherwise unchanged."""
    w, state = at
    if settings.shift is not None:
        g = jax.tree.map(jnp.add, g, settings.shift)
    found = solver.step.apply(g, state, settings.lr, **settings.numbers)
    move, following = tree.pair("local_step: what it returns", found)
    tree.check_like("local_step: the move", move, w)
    tree.check_like("local_step: the state after a step", following, state)
    w = jax.tree.map(lambda v, m: jnp.where(active, v + m, v), w, move)
    return w, jax.tree.map(lambda new, old: jnp.where(active, new, old), following, state)


def _each(f: Callable[..., Params], slots: int) -> Callable[..., Params]:
    """f over the leading axis. One slot runs without that axis, which would make products slower."""
    if slots > 1:
        return jax.vmap(f)
    return lambda *args: jax.tree.map(lambda v: v[None], f(*jax.tree.map(lambda v: v[0], args)))


def _gradient_descent(
    model: Model,
    data: Samples,
    solver: Solver,
    here: Params,
    lr: Array,
    slots: Slots,
    side_by_side: bool,
    mesh: Mesh | None,
    shift: Params | None,
) -> Params:
    """Full-gradient steps on h_k, all slots side by side."""

    def turn(s: Array, at: tuple[Params, Any]) -> tuple[Params, Any]:
        delta, _ = at
        w = jax.tree.map(jnp.add, delta, here)
        g = gradients(model, data, w, slots.device, slots.work > s, side_by_side, mesh)
        g = jax.tree.map(lambda d, g: g + solver.mu * d, delta, g)

        def moved(
            at: tuple[Params, Any], g: Params, active: Array, lr: Array, shift: Params | None
        ) -> tuple[Params, Any]:
            return _moved(solver, at, g, active, Settings(lr, solver.mu, solver.step.numbers, shift))

        return jax.vmap(moved)(at, g, slots.work > s, lr, shift)

    first = (jax.tree.map(jnp.zeros_like, here), jax.vmap(solver.step.init)(here))
    return jax.lax.fori_loop(0, jnp.max(slots.work), turn, first)[0]


def gradients(
    model: Model,
    data: Samples,
    stack: Params,
    device: Array,
    wanted: Array,
    side_by_side: bool,
    mesh: Mesh | None = None,
) -> Params:
    """grad F_k at each slot's own parameters: the mean over all samples of the slot's device."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return _means(model, jax.grad(_weighted_loss(model)), zeros, data, stack, device, wanted, side_by_side, mesh)


def losses(
    model: Model,
    data: Samples,
    stack: Params,
    device: Array,
    wanted: Array,
    side_by_side: bool,
    mesh: Mesh | None = None,
) -> Array:
    """F_k at each slot's own parameters: the mean over all samples of the slot's device."""

    def zeros(stack: Params) -> Array:
        return jnp.zeros(len(jax.tree.leaves(stack)[0]))

    return _means(model, _weighted_loss(model), zeros, data, stack, device, wanted, side_by_side, mesh)


def _weighted_loss(model: Model) -> Callable[..., Array]:
    return lambda w, x, y, weight: jnp.sum(weight * model.loss(w, x, y))


def _means(
    model: Model,
    block_sum: Callable[..., Any],
    zeros: Callable[[Params], Any],
    data: Samples,
    stack: Params,
    device: Array,
    wanted: Array,
    side_by_side: bool,
    mesh: Mesh | None,
) -> Any:
    """block_sum(w, x, y, weight) over all samples of each slot's device, each with weight 1 / n_k.

    zeros(stack) are the sums over no samples.

    Devices differ in size by orders of magnitude. So the samples are cut into blocks, and the blocks of all slots queue
    for the lanes: the cost depends on the number of samples, not on K times the largest device.
    """

    def queue(data: Samples, stack: Params, device: Array, wanted: Array) -> Params:
        slots, block = len(device), model.at_once(BLOCK)
        lanes = 1 if not side_by_side else min(slots, LANES) if jax.default_backend() == "cpu" else slots
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
            part = _each(block_sum, lanes)(w, *data.take(rows), weight)
            return jax.tree.map(lambda t, d: t.at[k].add(d), total, part)

        return jax.lax.fori_loop(0, -(-last[-1] // lanes), turn, zeros(stack))

    return over_slots(queue, zeros(stack), mesh)(data, stack, device, wanted)
