"""Who replies next, if rounds do not wait: an event queue inside the compiled program.

Only devices and times are followed event by event. The devices whose replies came then work side by side, as in any
round. A device starts at most once at a time, and not while its reply waits in the buffer: so a buffer has at most one
reply of each device, however fast it is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from folb.core import randomness
from folb.core.event_queue import NOBODY, Queue, sending
from folb.core.round import Exchange, State, shared_words, sizes
from folb.core.system import Effort
from folb.errors import InputError
from folb.simulation.play import Begun, Info, efforts, work_and_close
from folb.simulation.solve import Slots

PATIENCE = 4  # times K: once so many devices of a round are lost, it ends with the replies that it has


class Arrivals(NamedTuple):
    """The replies of a round in the order in which they came, and what happened until then."""

    device: Array  # [K], NOBODY if the round ended before
    number: Array  # [K] the numbers of their starts
    row: Array  # [K] the models that they started from
    replied: Array  # how many replies
    gone: Array  # [PATIENCE K] the devices that were lost, or NOBODY
    lost: Array  # how many were lost
    started: Array  # devices that were sent the model
    seconds: Array


def arrivals(begun: Begun) -> tuple[Queue, Arrivals]:
    """The next K replies, which leave the queue; devices that start meanwhile start from the model of this round."""
    if begun.draw.another is None:
        raise InputError("select: a Draw", "without `another`", "should be an array of chances with concurrency")
    another, K = begun.draw.another, begun.algorithm.selection.K
    queue, row = sending(begun.state.queue, begun.model, begun.algorithm.solver.lr)
    nobody, zeros, none = jnp.full(K, NOBODY, jnp.int32), jnp.zeros(K, jnp.int32), jnp.int32(0)
    gone = jnp.full(PATIENCE * K, NOBODY, jnp.int32)
    first = Arrivals(nobody, zeros, zeros, replied=none, gone=gone, lost=none, started=none, seconds=jnp.float32(0))

    def turn(at: tuple[Queue, Arrivals]) -> tuple[Queue, Arrivals]:
        """One device starts; then, if all places are taken, the first one is done."""
        queue, came = at
        n = queue.started + 1
        word = randomness.words(begun.seed, n, randomness.SERVER, 1)[0]
        k = another(word, jnp.concatenate([queue.device, came.device]))
        _, effort = start_of(begun, k, n)
        place = jnp.argmax(queue.device == NOBODY)
        at_work = {"device": k, "number": n, "left": came.seconds + effort.seconds, "lost": effort.lost, "row": row}
        places = {name: getattr(queue, name).at[place].set(value) for name, value in at_work.items()}

        full = jnp.all(places["device"] != NOBODY)
        done = jnp.argmin(places["left"])  # of two at the same time, the one in the first place
        first = {name: values[done] for name, values in places.items()}
        reply, loss = full & ~first["lost"], full & first["lost"]
        to, to_gone = jnp.where(reply, came.replied, K), jnp.where(loss, came.lost, PATIENCE * K)
        came = Arrivals(
            **{name: getattr(came, name).at[to].set(first[name], mode="drop") for name in ("device", "number", "row")},
            replied=came.replied + reply,
            gone=came.gone.at[to_gone].set(first["device"], mode="drop"),
            lost=came.lost + loss,
            started=came.started + 1,
            seconds=jnp.where(full, first["left"], came.seconds),
        )
        places["device"] = places["device"].at[done].set(jnp.where(full, NOBODY, first["device"]))
        return queue._replace(**places, started=n), came

    small = queue._replace(models=())  # the models are not part of the loop
    after, came = jax.lax.while_loop(lambda at: (at[1].replied < K) & (at[1].lost < PATIENCE * K), turn, (small, first))
    return after._replace(models=queue.models, left=after.left - came.seconds), came


def start_of(begun: Begun, device: Array, n: Array) -> tuple[Array, Effort]:
    """For a device that is the n-th to start: two random words for its batches, and its effort."""
    size = sizes(begun.algorithm, begun.model)
    of_one = efforts(begun._replace(t=n), device[None], Exchange(size.model, size.reply))
    return jax.tree.map(lambda leaf: leaf[0], of_one)


def play_without_waiting(begun: Begun) -> tuple[State, Info]:
    """A round if devices do not wait for each other: the next K replies, each from the model that it started from."""
    queue, came = arrivals(begun)
    usable = came.device != NOBODY
    device = jnp.where(usable, came.device, 0)
    words, effort = jax.vmap(partial(start_of, begun))(device, came.number)
    slots = Slots(device, jnp.where(usable, effort.work, 0), words)
    starts, version, lr = jax.tree.map(lambda v: v[came.row], (queue.models, queue.version, queue.lr))
    staleness = jnp.where(usable, queue.steps - version, 0)
    # Sketches can be compared only if all have one key: at the start nobody knows which will meet in a buffer.
    begun, counted = begun._replace(key=shared_words(begun.seed, 1)), usable.astype(jnp.float32)
    closed, records = work_and_close(begun, slots, counted, starts, lr=lr, staleness=staleness)
    with_lost = partial(jnp.pad, pad_width=(0, len(came.gone)))  # 0 for each device that was lost
    info = Info(
        device=jnp.concatenate([device, jnp.where(came.gone == NOBODY, 0, came.gone)]),
        times=with_lost(counted),
        lost=jnp.concatenate([jnp.zeros_like(usable), came.gone != NOBODY]),
        asked=came.started,
        surveyed=jnp.int32(0),
        replied=came.replied,
        gradients_only=jnp.int32(0),
        seconds=came.seconds,
        updated=closed.updated,
        **{name: value if name == "attack" else with_lost(value) for name, value in records.items()},
    )
    queue = queue._replace(steps=queue.steps + closed.updated)
    return closed.state._replace(queue=queue), info
