"""The algorithms, as compositions of their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_type_hints

from folb.core import rules
from folb.core.algorithm import Algorithm, Constructor, Origin, compose, named
from folb.core.gradient import GRADIENTS
from folb.core.guard import Guard, guard
from folb.core.part import Part, name_of, settings_of
from folb.core.rules import AVERAGING, FedNova, Mean, Rule
from folb.errors import InputError, choose

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def _listed(constructor: Constructor) -> Constructor:
    made = named(constructor)
    ALGORITHMS[constructor.__name__] = made
    return made


Sampling = Annotated[
    Literal["uniform", "samples", "poisson", "power_of_choice", "remembered_loss", "oort", "clusters"],
    "P_k. uniform: equal chances; samples: a device's share of the samples; poisson: each device by itself, with "
    "chance K/N; power_of_choice, remembered_loss: the K of some candidates with the largest loss, reported now or "
    "last time; oort: by use and speed; clusters: one device of each of K clusters",
]
OneByOne = Annotated[
    Literal["uniform", "samples"], "P_k: uniform, or a device's share of the samples, among the free devices"
]
Mu = Annotated[float, "weight of the proximal term (3); with 0, local work is as in FedAvg"]
Averaging = Annotated[Literal["simple", "samples"], AVERAGING]
NaiveRule = Annotated[Literal["mean", "signed"], "aggregation: (2) or (5)"]


def _keywords(kind: type[Part]) -> dict[str, tuple[Any, Any]]:
    """The settings of a class of parts: their types with a line of help, and their defaults."""
    hints, known = get_type_hints(kind), settings_of(kind).items()
    return {name: (Annotated[hints[name], one.metadata["meaning"]], one.default) for name, one in known}


GUARDED = "bound every device's weight, whatever it reports, and never reverse an update"
WEIGHED: dict[str, tuple[Any, Any]] = {  # what a rule that weighs by gradients has besides
    "gradient": (Annotated[Literal[tuple(GRADIENTS.parts)], GRADIENTS.meaning], "exact"),
    **{name: (hint, None) for name, hint in GRADIENTS.numbers.items()},
    "guarded": (Annotated[bool, GUARDED], False),
    **_keywords(Guard),
}


def _algorithm(
    name: str, rule: type[Rule], says: str, *, mu: float | None = None, fixed: Mapping[str, str] | None = None
) -> Callable[..., Algorithm]:
    """A constructor: a rule with its settings, draws by `sampling` (of one set), its own mu, and what it fixes."""
    own, weighs, fixed = _keywords(rule), "grad" in rule.uploads, dict(fixed or {})
    keywords = {
        **({} if mu is None else {"mu": (Mu, mu)}),
        **own,
        **({} if rule.second else {"sampling": (Sampling, "uniform")}),
        **(WEIGHED if weighs else {}),
    }

    def make(**given: Any) -> Algorithm:
        for field, value in fixed.items():
            if given.get(field, value) not in (signature(compose).parameters[field].default, value):
                raise InputError(field, given[field], f"is fixed: {name} has {field}={value}; use fedavg with this one")
        settings = {field: usual for field, (_, usual) in keywords.items()} | given | fixed
        guarded, cap = settings.pop("guarded", False), settings.pop("cap", 2.0)
        if not isinstance(guarded, bool):
            raise InputError("guarded", guarded, "should be True or False")
        Guard(cap).check()
        made = compose(rule(**{field: settings.pop(field) for field in own}), **settings)
        return guard(made, cap) if guarded else made

    parameters = [Parameter(field, Parameter.KEYWORD_ONLY, default=usual) for field, (_, usual) in keywords.items()]
    made: Any = make
    made.__signature__ = Signature([*parameters, Parameter("common", Parameter.VAR_KEYWORD)])
    made.__annotations__ = {field: hint for field, (hint, _) in keywords.items()}
    made.__name__ = made.__qualname__ = name
    made.__doc__ = says
    return _listed(made)


fedavg = _algorithm("fedavg", Mean, "FedAvg (McMahan et al.): local SGD and the average (2).")
fedprox = _algorithm(
    "fedprox", Mean, "FedProx (Li et al.): the proximal local objective (3) and the average (2).", mu=1.0
)
scaffold, feddyn, fedvarp, fedcm, mimelite, ghbm, adabest = (
    _algorithm(name, Mean, says, fixed={"memory": name})
    for name, says in {
        "scaffold": "SCAFFOLD (Karimireddy et al., 2020): control variates; local steps g - c_k + c.",
        "feddyn": "FedDyn (Acar et al., 2021): local objectives regularised by each device's past updates.",
        "fedvarp": "FedVARP (Jhunjhunwala et al., 2022): a device's last update stands in for it while it is away.",
        "fedcm": "FedCM (Xu et al., 2021): local steps mixed with the last round's mean step.",
        "mimelite": "MimeLite with momentum (Karimireddy et al., 2021): local steps with the server's frozen momentum.",
        "ghbm": "GHBM (Zaccone et al., 2025): local steps with the momentum of the last tau rounds.",
        "adabest": "AdaBest (Varno et al., 2022): local bias estimates that fade while a device is away.",
    }.items()
)
fednova = _algorithm(
    "fednova", FedNova, "FedNova (Wang et al., 2020): updates divided by the number of local steps, then averaged."
)
fedacg = _algorithm(
    "fedacg",
    Mean,
    "FedACG (Kim et al., 2024): devices start ahead, from w + beta m, and stay near it (mu).",
    mu=0.01,
    fixed={"server": "lookahead"},
)


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
        Mean(averaging),
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
    return compose(Mean(averaging), mu=mu, sampling=sampling, concurrency=M, **common)


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
    return compose(Mean(averaging), mu=mu, sampling=sampling, mixing=True, **settings)


def _naive(rule: str) -> Rule:
    known: dict[str, type[Rule]] = {"mean": Mean, "signed": rules.Signed}
    return known[choose("rule", rule, known)]()


@_listed
def fednu_direct(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Any) -> Algorithm:
    """FedNu with the LB-near-optimal selection (7), computed from the gradients of all N devices."""
    return compose(_naive(rule), mu=mu, sampling="direct", **common)


@_listed
def fednu_norm(*, mu: Mu = 0.01, rule: NaiveRule = "mean", **common: Any) -> Algorithm:
    """FedNu with P_k proportional to ||grad F_k||, the approximation of (7) in Sec. III-D."""
    return compose(_naive(rule), mu=mu, sampling="norm", **common)


folb, folb_two_set, folb_hetero, folb_never_flip = (
    _algorithm(name_of(rule), rule, says, mu=0.01)
    for rule, says in {
        rules.Folb: "FOLB with one set of devices (13): the version of the paper's experiments.",
        rules.FolbTwoSet: "FOLB with two independent sets of devices (9), Algorithm 2.",
        rules.FolbHetero: "FOLB, heterogeneity-aware (18), exactly as printed.",
        rules.FolbNeverFlip: "(18) with a discount that shrinks a weight to zero at most, and never changes its sign.",
    }.items()
)


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
