"""Which devices a round asks: a multiset of K drawn from P_k^t (Algorithm 1), or a set without replacement.

A sampling is a function of what the server knows: it returns the distribution P_k^t, or draws the devices itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from folb.core import randomness
from folb.core.randomness import below
from folb.core.shuffle import shuffled
from folb.core.tree import compiled
from folb.core.upload import BEFORE_WORK, GRAD, NORM, Upload, upload
from folb.errors import InputError, choose

jax.tree_util.register_dataclass(Upload, data_fields=["numbers"], meta_fields=["name", "compute", "least", "most"])


class Known(NamedTuple):
    """What the server knows about all N devices when it draws those of round t."""

    t: Array | int
    K: int
    replacement: bool
    start: Array  # device k owns rows start[k] : start[k] + size[k]
    size: Array  # n_k
    share: Array  # p_k of (1)
    survey: Array | None = None  # the answers to the survey; for gradients, <grad f, grad F_k>
    memory: Any = None  # of the devices, [N, ...] each, if the sampling asks for it


class Draw(NamedTuple):
    """How devices are drawn in a round."""

    words: int  # random words that a draw takes
    devices: Callable[[Array], Multiset]
    correction: Callable[[Array], Array]  # p_k / P_k of devices: corrects a mean over the draw to (1)
    inner: Array | None = None  # <grad f, grad F_k> of all N devices, if the selection (7) needed them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """weigh(known) returns a chance for each of the N devices, in any scale, or a `Draw`.

    `survey` is an upload that all N devices are asked for before the draw. With `memory`, the sampling sees what the
    server remembers about each device.
    """

    weigh: Callable[[Known], Array | Draw]
    survey: Upload | None = None  # or its name
    memory: bool = field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """How devices are drawn: K of them by `sampling`, and with `second` another K, S_2 of Algorithm 2."""

    K: int = field(metadata={"static": True})
    replacement: bool = field(metadata={"static": True})
    sampling: Sampling
    second: bool = field(default=False, metadata={"static": True})

    @property
    def ahead(self) -> bool:
        """Whether the devices of a round can be drawn before earlier rounds are played."""
        return self.sampling.survey is None and not self.sampling.memory


class Multiset(NamedTuple):
    """K slots: distinct devices in ascending order, each with its multiplicity; repeats have times 0."""

    device: Array
    times: Array


def lb_near_optimal(inner: Array) -> Array:
    """(7): P_k proportional to |<grad f, grad F_k>|, and uniform if all are 0."""
    return _proportional(jnp.abs(inner))


def norm_proxy(norms: Array) -> Array:
    """P_k proportional to ||grad F_k||, the Cauchy-Schwarz approximation of (7) in Sec. III-D."""
    return _proportional(norms)


def lb_near_optimal_hetero(inner: Array, gamma: Array, psi: Array | float, squared_norm: Array) -> Array:
    """(16): P_k proportional to |I_k|, I_k = <grad f, grad F_k> - psi gamma_k ||grad f||^2."""
    return _proportional(jnp.abs(inner - psi * gamma * squared_norm))


def _proportional(importance: Array) -> Array:
    total = jnp.sum(importance)
    return jnp.where(total > 0, importance / jnp.where(total > 0, total, 1.0), 1.0 / importance.size)


def drawing(how: Selection, known: Known) -> Draw:
    """How the devices of a round are drawn."""
    found = how.sampling.weigh(known)
    if isinstance(found, Draw):
        return found
    N = len(known.size)
    if not isinstance(found, Array | np.ndarray) or jnp.iscomplexobj(found):
        raise InputError("sampling: what it returns", type(found).__name__, "should be an array of chances, or a Draw")
    if found.shape != (N,):
        raise InputError("sampling: shape", found.shape, f"should be ({N},): a chance for each device")
    # a chance that is negative or not finite counts as 0; the largest chance keeps the sum of all finite
    chances = jnp.where(jnp.isfinite(found) & (found > 0), jnp.minimum(found, 1e30), 0.0)
    return from_distribution(_proportional(chances), known)


def from_distribution(P: Array, known: Known, inner: Array | None = None) -> Draw:
    """A draw from P [N]."""
    K, replacement = known.K, known.replacement
    return Draw(
        K if replacement else len(P),
        lambda words: draw(randomness.uniform(words), P, K, replacement),
        lambda device: known.share[device] / jnp.where(P[device] > 0, P[device], 1.0),
        inner,
    )


def _uniform(known: Known) -> Draw:
    """P_k = 1/N, without an array of N chances: N may be a million."""
    N, K, replacement = len(known.size), known.K, known.replacement
    return Draw(
        K if replacement else 2,
        lambda words: draw_uniform(words, N, K, replacement),
        lambda device: known.share[device] * N,
    )


def _by_samples(known: Known) -> Draw:
    """P_k = n_k / n."""
    samples = known.start[-1] + known.size[-1]  # of all devices, even if y holds only a window
    if not known.replacement:
        return from_distribution(known.size / samples, known)
    return Draw(
        known.K,
        lambda words: draw_by_samples(words, known.start, samples),
        lambda device: known.share[device] * samples / known.size[device],
    )


def _direct(known: Known) -> Draw:
    assert known.survey is not None
    return from_distribution(lb_near_optimal(known.survey), known, known.survey)


def _by_norm(known: Known) -> Draw:
    assert known.survey is not None
    return from_distribution(norm_proxy(known.survey), known)


SAMPLINGS = {
    "uniform": Sampling(Partial(_uniform)),
    "samples": Sampling(Partial(_by_samples)),
    "direct": Sampling(Partial(_direct), survey=GRAD),
    "norm": Sampling(Partial(_by_norm), survey=NORM),
}


def sampling(wanted: str | Sampling | Callable[[Known], Any]) -> Sampling:
    """A sampling by its name, or your own; a plain function uses neither a survey nor a memory."""
    if isinstance(wanted, str):
        return SAMPLINGS[choose("sampling", wanted, SAMPLINGS)]
    made = wanted if isinstance(wanted, Sampling) else Sampling(wanted)
    if not callable(made.weigh):
        raise InputError("sampling", wanted, f"should be one of {', '.join(SAMPLINGS)}, or a function of `Known`")
    survey = None if made.survey is None else upload(made.survey)
    if survey is not None and (late := set(survey.needs) - set(BEFORE_WORK)):
        expected = f"should need none of {', '.join(sorted(late))}: a survey comes before the devices work"
        raise InputError("survey", survey.name, expected)
    return Sampling(compiled(made.weigh), survey, made.memory)


def draw(u: Array, P: Array, K: int, replacement: bool) -> Multiset:
    """K devices from the distribution P [N]: independently, or one after another without replacement.

    `u` are random numbers between 0 and 1: K of them, or N without replacement.
    """
    if replacement:
        total = jnp.cumsum(P)
        chosen = jnp.minimum(jnp.searchsorted(total, u * total[-1], side="right"), len(P) - 1)
    else:
        # the K largest of log P + Gumbel noise are a draw without replacement from P
        _, chosen = jax.lax.top_k(jnp.log(P) - jnp.log(-jnp.log(u)), K)
    return _multiset(chosen)


def draw_uniform(words: Array, N: int, K: int, replacement: bool) -> Multiset:
    """K of N devices with equal chances, at a cost that does not grow with N.

    `words` are random: K of them or, without replacement, two: the key of a permutation whose first K are taken.
    """
    if replacement:
        return _multiset(below(N, words))
    return _multiset(shuffled(words, 0, jnp.arange(K), N))


def draw_by_samples(words: Array, start: Array, samples: Array | int) -> Multiset:
    """Devices in proportion to their samples, with replacement: owners of random rows. Device k's begin at start[k]."""
    return _multiset(jnp.searchsorted(start, below(samples, words), side="right") - 1)


def _multiset(chosen: Array) -> Multiset:
    device = jnp.sort(chosen.astype(jnp.int32))
    fresh = jnp.concatenate([jnp.array([True]), device[1:] != device[:-1]])
    times = jnp.where(fresh, jnp.sum(device[:, None] == device[None, :], axis=1), 0)
    return Multiset(device, times.astype(jnp.float32))
