"""The record of an algorithm, and what puts one together.

The keywords of a constructor are its settings, on the command line as in Python; the numbers among them (mu,
psi, lr, server_lr) are leaves of the record, so `jax.vmap` sweeps them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import jax
from jax.tree_util import Partial

from folb.core.rules import Rule
from folb.core.selection import Selection
from folb.core.server_step import SERVERS, Server
from folb.core.solver import Solver
from folb.errors import InputError, check, check_whole, choose

UPLOADS = ("grad", "gamma", "second")


@dataclass(frozen=True, eq=False)
class Origin:
    """The name and the settings an algorithm was made with, for the record alone.

    They ride along in the static part of a pytree, where unequal values would mean separate programs. All are
    equal here: FedAvg, and FedProx with any mu, run as one.
    """

    name: str = "unnamed"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Algorithm:
    """One federated algorithm. `uploads` is what its devices send beside their update: of UPLOADS."""

    selection: Selection
    solver: Solver
    rule: Rule
    server: Server
    uploads: tuple[str, ...] = field(default=(), metadata={"static": True})
    clamp_gamma: bool = field(default=True, metadata={"static": True})
    origin: Origin = field(default_factory=Origin, metadata={"static": True})

    @property
    def name(self) -> str:
        """The constructor's name."""
        return self.origin.name


class Common(TypedDict, total=False):
    """The settings that every algorithm has; `compose` holds their defaults."""

    K: Annotated[int, "devices per round"]
    replacement: Annotated[bool, "draw a multiset with replacement (Algorithm 1), or a set without"]
    lr: Annotated[float, "step size of the local solver"]
    batch: Annotated[int, "samples per mini-batch"]
    unit: Annotated[
        Literal["step", "epoch", "gradient"], "a unit of work: a mini-batch step, an epoch, a full-gradient step"
    ]
    server: Annotated[Literal["plain", "momentum", "adam", "yogi", "fedexp"], "the server's step"]
    server_lr: Annotated[float | None, "step size of the server; by default 1, or 0.1 for adam and yogi"]
    clamp_gamma: Annotated[bool, "keep gamma_k within [0, 1]"]


def compose(
    rule: Rule,
    *,
    mu: Any = 0.0,
    sampling: str = "uniform",
    uploads: tuple[str, ...] = (),
    K: int = 10,
    replacement: bool = True,
    lr: Any = 0.01,
    batch: int = 10,
    unit: str = "step",
    server: str = "plain",
    server_lr: Any = None,
    clamp_gamma: bool = True,
) -> Algorithm:
    """Put an algorithm together, checking every setting."""
    check_whole("K", K, 1, 10**4)  # beyond it, a round's K x K table of repeats is no small thing
    check_whole("batch", batch, 1, 10**6)
    for name, flag in (("replacement", replacement), ("clamp_gamma", clamp_gamma)):
        if not isinstance(flag, bool):
            raise InputError(name, flag, "should be True or False")
    check("mu", mu, lambda mu: mu >= 0, "should be at least 0")
    check("lr", lr, lambda lr: lr > 0, "should be more than 0")
    choose("unit", unit, ("step", "epoch", "gradient"))
    choose("sampling", sampling, ("uniform", "samples", "direct", "norm"))
    for upload in uploads:
        choose("uploads", upload, UPLOADS)
    if "second" in uploads and "grad" not in uploads:
        raise InputError(
            "uploads", uploads, "should have 'grad' with 'second': a device in both sets sends its gradient once"
        )
    make = SERVERS[choose("server", server, SERVERS)]
    if server_lr is not None:
        check("server_lr", server_lr, lambda lr: lr > 0, "should be more than 0")
    return Algorithm(
        selection=Selection(K=K, replacement=replacement, sampling=sampling),
        solver=Solver(lr=lr, mu=mu, batch=batch, unit=unit),
        rule=rule if isinstance(rule, Partial) else Partial(rule),
        server=make() if server_lr is None else make(server_lr),
        uploads=uploads,
        clamp_gamma=clamp_gamma,
    )


Constructor = TypeVar("Constructor", bound=Callable[..., Algorithm])


def named(constructor: Constructor) -> Constructor:
    """Give what `constructor` makes its name and a record of its settings."""

    parameters = inspect.signature(constructor).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        known |= {name: inspect.signature(compose).parameters[name].default for name in Common.__annotations__}

    @functools.wraps(constructor)
    def make(**settings: Any) -> Algorithm:
        for name in settings:
            choose(f"setting of {constructor.__name__}", name, known)
        return replace(constructor(**settings), origin=Origin(constructor.__name__, known | settings))

    return make  # type: ignore[return-value]
