"""The algorithms: each a selection, a local solver, an aggregation rule and a server step.

The keywords of a constructor are its settings, on the command line as in Python; the numbers among them (mu,
psi, lr, server_lr) are leaves of the record, so `jax.vmap` sweeps them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack

import jax
from jax.tree_util import Partial

from folb import rules
from folb.device import Solver
from folb.errors import InputError, check, check_whole, choose
from folb.guard import guard
from folb.rules import Rule
from folb.selection import Selection
from folb.server import SERVERS, Server

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

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


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


def _listed(constructor: Constructor) -> Constructor:
    made = named(constructor)
    ALGORITHMS[constructor.__name__] = made
    return made


Averaging = Annotated[Literal["simple", "samples"], "weights of the average: 1/K as in (2), or n_k as in (1)"]
Sampling = Annotated[Literal["uniform", "samples"], "P_k: uniform, or a device's share of the samples"]
Mu = Annotated[float, "weight of the proximal term (3); 0 makes local work that of FedAvg"]
Psi = Annotated[float, "discount for inexact local work (18)"]
Guarded = Annotated[bool, "bound every device's weight, whatever it reports, and never turn an update round"]
Cap = Annotated[float, "c of the bound c/K on a device's weight, where guarded"]
NaiveRule = Annotated[Literal["mean", "signed"], "aggregation: (2) or (5)"]


def _average(averaging: str) -> Rule:
    return {"simple": rules.mean, "samples": rules.samples}[choose("averaging", averaging, ("simple", "samples"))]


@_listed
def fedavg(*, averaging: Averaging = "simple", sampling: Sampling = "uniform", **common: Unpack[Common]) -> Algorithm:
    """FedAvg (McMahan et al.): local SGD and the average (2)."""
    return compose(_average(averaging), sampling=sampling, **common)


@_listed
def fedprox(
    *,
    mu: Mu = 1.0,
    averaging: Averaging = "simple",
    sampling: Sampling = "uniform",
    **common: Unpack[Common],
) -> Algorithm:
    """FedProx (Li et al.): the proximal local objective (3) and the average (2)."""
    return compose(_average(averaging), mu=mu, sampling=sampling, **common)


def _naive(rule: str) -> Rule:
    return {"mean": rules.mean, "signed": rules.signed}[choose("rule", rule, ("mean", "signed"))]


@_listed
def fednu_direct(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Unpack[Common]) -> Algorithm:
    """FedNu with the LB-near-optimal selection (7), computed from the gradients of all N devices."""
    return compose(_naive(rule), mu=mu, sampling="direct", **common)


@_listed
def fednu_norm(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Unpack[Common]) -> Algorithm:
    """FedNu with P_k proportional to ||grad F_k||, the stand-in for (7) of Sec. III-D."""
    uploads = ("grad",) if rule == "signed" else ()
    return compose(_naive(rule), mu=mu, sampling="norm", uploads=uploads, **common)


@_listed
def folb(
    *,
    mu: Mu = 0.01,
    sampling: Sampling = "uniform",
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FOLB with one set of devices (13): the version of the paper's experiments."""
    return _guarded(compose(rules.folb, mu=mu, sampling=sampling, uploads=("grad",), **common), guarded, cap)


@_listed
def folb_two_set(*, mu: Mu = 0.01, guarded: Guarded = False, cap: Cap = 2.0, **common: Unpack[Common]) -> Algorithm:
    """FOLB with two independent sets of devices (9), Algorithm 2."""
    return _guarded(compose(rules.folb_two_set, mu=mu, uploads=("grad", "second"), **common), guarded, cap)


@_listed
def folb_hetero(
    *,
    mu: Mu = 0.01,
    psi: Psi = 0.1,
    sampling: Sampling = "uniform",
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FOLB, heterogeneity-aware (18), exactly as printed."""
    return _guarded(_hetero(rules.folb_hetero, psi, mu=mu, sampling=sampling, **common), guarded, cap)


@_listed
def folb_never_flip(
    *,
    mu: Mu = 0.01,
    psi: Psi = 0.1,
    sampling: Sampling = "uniform",
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Unpack[Common],
) -> Algorithm:
    """(18) with a discount that shrinks a weight to zero and never past it."""
    return _guarded(_hetero(rules.folb_never_flip, psi, mu=mu, sampling=sampling, **common), guarded, cap)


def _hetero(rule: Callable[..., Any], psi: Any, **settings: Any) -> Algorithm:
    check("psi", psi, lambda psi: psi >= 0, "should be at least 0")
    return compose(Partial(rule, psi=psi), uploads=("grad", "gamma"), **settings)


def _guarded(algorithm: Algorithm, guarded: bool, cap: Any) -> Algorithm:
    if not isinstance(guarded, bool):
        raise InputError("guarded", guarded, "should be True or False")
    check("cap", cap, lambda cap: cap >= 1, "should be at least 1")
    return guard(algorithm, cap) if guarded else algorithm
