"""The algorithms, as compositions of their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Unpack

from jax.tree_util import Partial

from folb.core import rules
from folb.core.algorithm import Algorithm, Common, Constructor, compose, named
from folb.core.guard import guard
from folb.core.rules import Rule
from folb.errors import InputError, check, choose

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def _listed(constructor: Constructor) -> Constructor:
    made = named(constructor)
    ALGORITHMS[constructor.__name__] = made
    return made


Averaging = Annotated[Literal["simple", "samples"], "weights of the average: 1/K as in (2), or n_k as in (1)"]


Sampling = Annotated[Literal["uniform", "samples"], "P_k: uniform, or a device's share of the samples"]


Mu = Annotated[float, "weight of the proximal term (3); with 0, local work is as in FedAvg"]


Psi = Annotated[float, "discount for inexact local work (18)"]


Guarded = Annotated[bool, "bound every device's weight, whatever it reports, and never reverse an update"]


Cap = Annotated[float, "c of the bound c/K on a device's weight, if guarded"]


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
    """FedNu with P_k proportional to ||grad F_k||, the approximation of (7) in Sec. III-D."""
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
    """(18) with a discount that shrinks a weight to zero at most, and never changes its sign."""
    return _guarded(_hetero(rules.folb_never_flip, psi, mu=mu, sampling=sampling, **common), guarded, cap)


def _hetero(rule: Callable[..., Any], psi: Any, **settings: Any) -> Algorithm:
    check("psi", psi, lambda psi: psi >= 0, "should be at least 0")
    return compose(Partial(rule, psi=psi), uploads=("grad", "gamma"), **settings)


def _guarded(algorithm: Algorithm, guarded: bool, cap: Any) -> Algorithm:
    if not isinstance(guarded, bool):
        raise InputError("guarded", guarded, "should be True or False")
    check("cap", cap, lambda cap: cap >= 1, "should be at least 1")
    return guard(algorithm, cap) if guarded else algorithm
