"""The algorithms, as compositions of their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from jax.tree_util import Partial

from folb.core import rules
from folb.core.algorithm import Algorithm, Constructor, Origin, compose, named
from folb.core.gradient import source
from folb.core.guard import guard
from folb.core.rules import Rule
from folb.core.samplings import SAMPLINGS
from folb.errors import InputError, check_number, choose

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def _listed(constructor: Constructor) -> Constructor:
    made = named(constructor)
    ALGORITHMS[constructor.__name__] = made
    return made


Averaging = Annotated[Literal["simple", "samples"], "weights of the average: 1/K as in (2), or n_k as in (1)"]


if TYPE_CHECKING:
    Sampling: TypeAlias = str
    OneByOne: TypeAlias = str
else:
    Sampling = SAMPLINGS.among(lambda kind: not kind.naive)
    OneByOne = SAMPLINGS.among(
        lambda kind: kind().one_by_one, "P_k: uniform, or a device's share of the samples, among the free devices"
    )


Gradient = Annotated[
    Literal["exact", "sketch", "proxy"], "what stands for grad F_k: itself, a sketch of it, or -Delta_k / (lr J_k)"
]


Sketch = Annotated[int | None, "m: how many numbers gradient=sketch sends; by default 256"]


Bits = Annotated[int | None, "bits of each of these numbers: 1, 2, 4, 8 or 32; by default 8"]


Mu = Annotated[float, "weight of the proximal term (3); with 0, local work is as in FedAvg"]


Psi = Annotated[float, "discount for inexact local work (18)"]


Guarded = Annotated[bool, "bound every device's weight, whatever it reports, and never reverse an update"]


Cap = Annotated[float, "c of the bound c/K on a device's weight, if guarded"]


NaiveRule = Annotated[Literal["mean", "signed"], "aggregation: (2) or (5)"]


def _average(averaging: str) -> Rule:
    return {"simple": rules.mean, "samples": rules.samples}[choose("averaging", averaging, ("simple", "samples"))]


@_listed
def fedavg(*, averaging: Averaging = "simple", sampling: Sampling = "uniform", **common: Any) -> Algorithm:
    """FedAvg (McMahan et al.): local SGD and the average (2)."""
    return compose(_average(averaging), sampling=sampling, **common)


@_listed
def fedprox(
    *,
    mu: Mu = 1.0,
    averaging: Averaging = "simple",
    sampling: Sampling = "uniform",
    **common: Any,
) -> Algorithm:
    """FedProx (Li et al.): the proximal local objective (3) and the average (2)."""
    return compose(_average(averaging), mu=mu, sampling=sampling, **common)


def _against_drift(memory: str, says: str) -> Callable[..., Algorithm]:
    """FedAvg with a memory against drift (`folb.core.drift`), under the memory's name."""

    def make(*, averaging: Averaging = "simple", sampling: Sampling = "uniform", **common: Any) -> Algorithm:
        other = common.get("memory")
        if other not in (None, memory):
            expected = f"is fixed: {memory} has a memory of its own; use fedavg with this memory"
            raise InputError("memory", other, expected)
        settings: dict[str, Any] = {**common, "memory": memory}
        made = compose(_average(averaging), sampling=sampling, **settings)
        return replace(made, origin=Origin(settings={"memory": memory}))

    make.__name__ = make.__qualname__ = memory
    make.__doc__ = says
    return _listed(make)


scaffold = _against_drift("scaffold", "SCAFFOLD (Karimireddy et al., 2020): control variates; local steps g - c_k + c.")
feddyn = _against_drift(
    "feddyn", "FedDyn (Acar et al., 2021): local objectives regularised by each device's past updates."
)
fedvarp = _against_drift(
    "fedvarp", "FedVARP (Jhunjhunwala et al., 2022): a device's last update stands in for it while it is away."
)
fedcm = _against_drift("fedcm", "FedCM (Xu et al., 2021): local steps mixed with the last round's mean step.")
mimelite = _against_drift(
    "mimelite", "MimeLite with momentum (Karimireddy et al., 2021): local steps with the server's frozen momentum."
)
ghbm = _against_drift("ghbm", "GHBM (Zaccone et al., 2025): local steps with the momentum of the last tau rounds.")
adabest = _against_drift(
    "adabest", "AdaBest (Varno et al., 2022): local bias estimates that fade while a device is away."
)


@_listed
def fednova(*, averaging: Averaging = "simple", sampling: Sampling = "uniform", **common: Any) -> Algorithm:
    """FedNova (Wang et al., 2020): updates divided by the number of local steps, then averaged."""
    by = {"simple": rules.fednova, "samples": rules.fednova_by_samples}
    made = compose(by[choose("averaging", averaging, by)], sampling=sampling, **common)
    if not (step := made.solver.step).one_size:
        raise InputError("local_step", step.name, "should be sgd or momentum: FedNova needs steps of one size")
    return made


@_listed
def fedacg(
    *,
    mu: Mu = 0.01,
    averaging: Averaging = "simple",
    sampling: Sampling = "uniform",
    **common: Any,
) -> Algorithm:
    """FedACG (Kim et al., 2024): devices start ahead, from w + beta m, and stay near it (mu)."""
    server = common.get("server", "plain")
    if server not in ("plain", "lookahead"):
        raise InputError("server", server, "is fixed: fedacg has server=lookahead; use fedprox with this server")
    settings: dict[str, Any] = {**common, "server": "lookahead"}
    made = compose(_average(averaging), mu=mu, sampling=sampling, **settings)
    return replace(made, origin=Origin(settings={"server": "lookahead"}))


@_listed
def accord(
    *,
    lr: Annotated[float, "step size of the local solver in the first two rounds"] = 0.04,
    averaging: Averaging = "simple",
    sampling: Sampling = "samples",
    replacement: Annotated[bool, "true: draw with replacement, as in Algorithm 1; false: without"] = False,
    beta: Annotated[float, "momentum of the server"] = 0.85,
    stretch: Annotated[float, "how far the server's update is stretched; 0.5: as long as a device's"] = 0.5,
    step_size: Annotated[
        Literal["consensus", "agreement", "cosine", "step", "inverse", "constant"] | None,
        "how the server changes lr from round to round",
    ] = "consensus",
    average: Annotated[Literal["none", "ema", "last_two"], "the model that is evaluated and kept"] = "ema",
    average_rate: Annotated[float | None, "rate of average=ema: the weight of earlier models; by default 0.6"] = None,
    **common: Any,
) -> Algorithm:
    """Accord, which needs no tuning: the agreement of rounds and of devices sets the step size.

    Devices are drawn by their samples, start ahead as in FedACG, and the server's step is as long as a device's. The
    model that is kept is a mean over rounds.
    """
    server = common.pop("server", "plain")
    if server not in ("plain", "lookahead"):
        raise InputError("server", server, "is fixed: accord has server=lookahead; use fedavg with this server")
    rate = 0.6 if average == "ema" and average_rate is None else average_rate
    made = compose(
        _average(averaging),
        lr=lr,
        sampling=sampling,
        replacement=replacement,
        server="lookahead",
        beta=beta,
        stretch=stretch,
        step_size=step_size,
        average=average,
        average_rate=rate,
        **common,
    )
    return replace(made, origin=Origin(settings={"server": "lookahead"}))


@_listed
def fedbuff(
    *,
    concurrency: Annotated[int | None, "M: devices that work at any time; by default K"] = None,
    mu: Mu = 0.0,
    averaging: Averaging = "simple",
    sampling: OneByOne = "uniform",
    **common: Any,
) -> Algorithm:
    """FedBuff (Nguyen et al., 2022): nobody waits; every K updates, weighed by their age, make a step."""
    M = common.get("K", 10) if concurrency is None else concurrency
    made = compose(_average(averaging), mu=mu, sampling=sampling, concurrency=M, **common)
    return replace(made, origin=Origin(settings={"concurrency": M}))


@_listed
def fedasync(
    *,
    concurrency: Annotated[int, "M: devices that work at any time"] = 10,
    K: Annotated[int, "replies per step of the server"] = 1,
    mu: Mu = 0.005,
    server_lr: Annotated[float, "alpha: how much of a device's model is mixed into the server's"] = 0.6,
    averaging: Averaging = "simple",
    sampling: OneByOne = "uniform",
    **common: Any,
) -> Algorithm:
    """FedAsync (Xie et al., 2019): each model that comes back is mixed in, w <- (1 - alpha s) w + alpha s w_k."""
    if concurrency is None:
        raise InputError("concurrency", None, "should be a number: the devices of fedasync do not wait")
    settings: dict[str, Any] = {**common, "K": K, "concurrency": concurrency, "server_lr": server_lr}
    return compose(_average(averaging), mu=mu, sampling=sampling, mixing=True, **settings)


def _naive(rule: str) -> Rule:
    return {"mean": rules.mean, "signed": rules.signed}[choose("rule", rule, ("mean", "signed"))]


@_listed
def fednu_direct(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Any) -> Algorithm:
    """FedNu with the LB-near-optimal selection (7), computed from the gradients of all N devices."""
    return compose(_naive(rule), mu=mu, sampling="direct", **common)


@_listed
def fednu_norm(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Any) -> Algorithm:
    """FedNu with P_k proportional to ||grad F_k||, the approximation of (7) in Sec. III-D."""
    uploads = ("grad",) if rule == "signed" else ()
    return compose(_naive(rule), mu=mu, sampling="norm", uploads=uploads, **common)


@_listed
def folb(
    *,
    mu: Mu = 0.01,
    sampling: Sampling = "uniform",
    gradient: Gradient = "exact",
    sketch: Sketch = None,
    bits: Bits = None,
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Any,
) -> Algorithm:
    """FOLB with one set of devices (13): the version of the paper's experiments."""
    made = compose(rules.folb, mu=mu, sampling=sampling, gradient=source(gradient, sketch, bits), **common)
    return _guarded(made, guarded, cap)


@_listed
def folb_two_set(
    *,
    mu: Mu = 0.01,
    gradient: Gradient = "exact",
    sketch: Sketch = None,
    bits: Bits = None,
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Any,
) -> Algorithm:
    """FOLB with two independent sets of devices (9), Algorithm 2."""
    made = compose(rules.folb_two_set, mu=mu, uploads=("second",), gradient=source(gradient, sketch, bits), **common)
    return _guarded(made, guarded, cap)


@_listed
def folb_hetero(
    *,
    mu: Mu = 0.01,
    psi: Psi = 0.1,
    sampling: Sampling = "uniform",
    gradient: Gradient = "exact",
    sketch: Sketch = None,
    bits: Bits = None,
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Any,
) -> Algorithm:
    """FOLB, heterogeneity-aware (18), exactly as printed."""
    found = source(gradient, sketch, bits)
    return _guarded(_hetero(rules.folb_hetero, psi, mu=mu, sampling=sampling, gradient=found, **common), guarded, cap)


@_listed
def folb_never_flip(
    *,
    mu: Mu = 0.01,
    psi: Psi = 0.1,
    sampling: Sampling = "uniform",
    gradient: Gradient = "exact",
    sketch: Sketch = None,
    bits: Bits = None,
    guarded: Guarded = False,
    cap: Cap = 2.0,
    **common: Any,
) -> Algorithm:
    """(18) with a discount that shrinks a weight to zero at most, and never changes its sign."""
    found = source(gradient, sketch, bits)
    return _guarded(
        _hetero(rules.folb_never_flip, psi, mu=mu, sampling=sampling, gradient=found, **common), guarded, cap
    )


def _hetero(rule: Callable[..., Any], psi: Any, **settings: Any) -> Algorithm:
    check_number("psi", psi, lambda psi: psi >= 0, "should be at least 0")
    return compose(Partial(rule, psi=psi), uploads=("gamma",), **settings)


def _guarded(algorithm: Algorithm, guarded: bool, cap: Any) -> Algorithm:
    if not isinstance(guarded, bool):
        raise InputError("guarded", guarded, "should be True or False")
    check_number("cap", cap, lambda cap: cap >= 1, "should be at least 1")
    return guard(algorithm, cap) if guarded else algorithm


GROUPS = {  # as `folb list` shows them
    "without tuning": ("accord",),
    "averages": ("fedavg", "fedprox", "fednova", "fedacg"),
    "without waiting": ("fedbuff", "fedasync"),
    "with a memory against drift": ("scaffold", "feddyn", "fedvarp", "fedcm", "mimelite", "ghbm", "adabest"),
    "FOLB and FedNu (Nguyen et al., 2021)": (
        *("folb", "folb_two_set", "folb_hetero", "folb_never_flip"),
        *("fednu_direct", "fednu_norm"),
    ),
}
