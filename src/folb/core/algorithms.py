"""The algorithms by name: each a value, made of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from folb.core.algorithm import SLOTS, USUAL, Algorithm, flattened, hints, raise_unknown
from folb.core.part import Slot, described
from folb.core.samplings import SAMPLINGS
from folb.errors import InputError

OF_WEIGHERS = ("gradient", "guard")  # slots of rules that weigh by gradients
FIXED = ("memory", "server", "local")  # slots whose part makes an algorithm what it is, if it names one
NAMES: dict[str, tuple[str, ...]] = {  # the parts that an algorithm may have by name, unless it says otherwise
    "select": tuple(name for name, kind in SAMPLINGS.parts.items() if not kind.naive),
}


@dataclass(eq=False, repr=False)
class Named:
    """An algorithm by its name: what it is made of, and what users may change of that."""

    made: Algorithm
    says: str
    only: Mapping[str, Sequence[str]]  # the names that some slots may have, besides a user's own; a single one is fixed
    proximal: bool = True  # whether local objectives have the term (3)
    own: bool = False  # whether it is of a user's file, with every slot

    def __post_init__(self) -> None:
        self.name, self.__doc__ = self.made.name, self.says

    def __repr__(self) -> str:
        return f"folb.algorithms.{self.name}"

    def __call__(self, **settings: Any) -> Algorithm:
        """The algorithm with other settings, given as to `folb.Algorithm`."""
        given = flattened(settings)
        for path, value in given.items():
            slot = path.partition(".")[0]
            if slot not in (*self._slots, *USUAL.others.settings, "uploads"):
                raise_unknown(f"setting of {self.name}", path, self.settings)
            if path in self.only:
                self._check_choice(SLOTS[path], value)
            if path == "concurrency" and value is None and self.made.asynchrony is not None:
                raise InputError(path, value, f"should be a number, or K: the devices of {self.name} do not wait")
        made = self.made.replace(**given)
        if not self.proximal and (mu := made.settings.get("local.mu")):
            raise InputError("local.mu", mu, f"is for algorithms with a proximal term, and {self.name} has none")
        return made

    def _check_choice(self, slot: Slot[Any], value: Any) -> None:
        """Raise for a part of folb that this algorithm may not have in the slot, or for none."""
        if slot.record is not None and isinstance(value, slot.record):
            value = slot.part_of(value)
        kind = value if isinstance(value, type) else type(value)
        known = {kind: name for name, kind in slot.parts.items()}
        name = value if isinstance(value, str) else known.get(kind, "none" if value is None and slot.optional else None)
        names = self.only[slot.name]
        if name is not None and name not in names:
            one = f"is fixed: {self.name} has {slot.name}={names[0]}; use another algorithm with this one"
            raise InputError(slot.name, name, one if len(names) == 1 else f"should be one of {', '.join(names)}")

    @property
    def _slots(self) -> list[str]:
        weighs = "grad" in self.made.rule.uploads and not self.made.rule.surveyed
        return [name for name in SLOTS if weighs or self.own or name not in OF_WEIGHERS]

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Its settings by their paths: the type with a line of help, and the default."""
        usual, known = self.made.settings, hints()
        settings: dict[str, Any] = {}
        for name in self._slots:
            slot, names = SLOTS[name], self.only.get(name)
            if names is None or len(names) > 1 or name == "rule":  # a user's own rule is free
                settings[name] = slot.choice(names)
            own = slot.fields_of(names)
            settings |= {path: known[path] for path in slot.fields if path in own}
            if (inside := slot.part_of(self.made.origin.parts[name])) is not None:
                settings |= {slot.spelt(field): hint for field, hint in described(type(inside)).items()}
        settings |= {path: known[path] for path in USUAL.others.settings}
        if not self.proximal:
            settings.pop("local.mu")
        fixed = {name for name, names in self.only.items() if len(names) == 1}
        return {
            path: (hint if path in SLOTS or path.partition(".")[0] in fixed else known.get(path, hint), usual.get(path))
            for path, hint in settings.items()
        }


ALGORITHMS: dict[str, Named] = {}


def _named(
    name: str, says: str, only: Mapping[str, Sequence[str]] | None = None, *, mu: float | None = None, **settings: Any
) -> Named:
    """An algorithm under its name; it is made of the usual parts, and of these. With `mu` it has a proximal term."""
    made = Algorithm(**settings, **({} if mu is None else {"local.mu": mu}))
    fixed = {slot: (part,) for slot, part in flattened(settings).items() if slot in FIXED}
    own = {"rule": (made.rule.name,), **NAMES, **fixed, **(only or {})}
    ALGORITHMS[name] = Named(called(made, name), says, own, proximal=mu is not None)
    return ALGORITHMS[name]


def called(made: Algorithm, name: str) -> Algorithm:
    return made.but(origin=replace(made.origin, name=name))


fedavg = _named("fedavg", "FedAvg (McMahan et al.): local SGD and the average (2).")
fedprox = _named("fedprox", "FedProx (Li et al.): the proximal local objective (3) and the average (2).", mu=1.0)
scaffold, feddyn, fedvarp, fedcm, mimelite, ghbm, adabest = (
    _named(name, says, memory=name)
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
fednova = _named(
    "fednova",
    "FedNova (Wang et al., 2020): updates divided by the number of local steps, then averaged.",
    rule="fednova",
)
fedacg = _named(
    "fedacg",
    "FedACG (Kim et al., 2024): devices start ahead, from w + beta m, and stay near it (mu).",
    server="lookahead",
    mu=0.01,
)
fedexprox = _named(
    "fedexprox",
    "FedExProx-GraDS (Li et al., 2024): FedProx, and the server goes further where updates disagree.",
    server="fedexprox",
    mu=1.0,
)
fedmuon = _named(
    "fedmuon",
    "FedMuon (Takezawa et al., 2026): orthogonal local steps along a momentum with control variates.",
    memory="fedmuon",
    local={"name": "orthogonal", "beta": 0.9},
)
fedpac = _named(
    "fedpac",
    "FedPAC in its Muon form (Liu et al., 2026): orthogonal local steps that share a momentum and a direction.",
    memory="fedpac",
    local={"name": "aligned", "beta": 0.9},
)
accord = _named(
    "accord",
    "Accord, which needs no tuning: rounds and devices that agree, or a network's length, set the step size.\n\n"
    "Devices are drawn by their samples, start ahead as in FedACG, and the server's step is as long as a device's. In "
    "a network's hidden matrices all directions become about equally long. The kept model is a mean over rounds.",
    select={"name": "samples", "replacement": False},
    local={"lr": 0.04},
    server={"name": "lookahead", "beta": 0.85, "stretch": 0.5},
    step_size="by_model",
    whiten="orthogonal",
    average={"name": "ema", "rate": 0.6},
)
fedbuff = _named(
    "fedbuff",
    "FedBuff (Nguyen et al., 2022): nobody waits; every K updates, weighed by their age, make a step.",
    {"select": ("uniform", "samples")},
    concurrency="K",
    mu=0.0,
)
fedasync = _named(
    "fedasync",
    "FedAsync (Xie et al., 2019): each model that comes back is mixed in, w <- (1 - alpha s) w + alpha s w_k.",
    {"select": ("uniform", "samples")},
    select={"K": 1},
    server={"lr": 0.6},
    concurrency=10,
    mixing=True,
    mu=0.005,
)
fednu_direct, fednu_norm = (
    _named(f"fednu_{name}", says, {"select": (name,), "rule": ("mean", "signed")}, select=name, mu=0.01)
    for name, says in {
        "direct": "FedNu with the LB-near-optimal selection (7), computed from the gradients of all N devices.",
        "norm": "FedNu with P_k proportional to ||grad F_k||, the approximation of (7) in Sec. III-D.",
    }.items()
)
folb, folb_two_set, folb_hetero, folb_never_flip = (
    _named(name, says, rule=name, mu=0.01)
    for name, says in {
        "folb": "FOLB with one set of devices (13): the version of the paper's experiments.",
        "folb_two_set": "FOLB with two independent sets of devices (9), Algorithm 2.",
        "folb_hetero": "FOLB, heterogeneity-aware (18), exactly as printed.",
        "folb_never_flip": "(18) with a discount that shrinks a weight to zero at most, and never changes its sign.",
    }.items()
)


GROUPS = {  # as `folb list` shows them
    "without tuning": ("accord",),
    "averages": ("fedavg", "fedprox", "fednova", "fedacg", "fedexprox"),
    "without waiting": ("fedbuff", "fedasync"),
    "with a memory against drift": ("scaffold", "feddyn", "fedvarp", "fedcm", "mimelite", "ghbm", "adabest"),
    "with orthogonal local steps": ("fedmuon", "fedpac"),
    "FOLB and FedNu (Nguyen et al., 2021)": (
        *("folb", "folb_two_set", "folb_hetero", "folb_never_flip"),
        *("fednu_direct", "fednu_norm"),
    ),
}
