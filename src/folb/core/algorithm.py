"""The record of an algorithm, and `compose`, which builds one.

The keywords of a constructor are its settings, on the command line and in Python. The numbers among them (mu, psi, lr,
server_lr) are leaves of the record, so `jax.vmap` can sweep them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import jax

from folb.core import average as averages
from folb.core import drift, selection, tree
from folb.core import liars as attacks
from folb.core import local_step as local_steps
from folb.core import robust as robust_rules
from folb.core import step_size as step_sizes
from folb.core.average import Average, server_model
from folb.core.gradient import Source
from folb.core.liars import Attack
from folb.core.local_step import LocalStep
from folb.core.memory import DeviceMemory, device_memory
from folb.core.rules import Rule
from folb.core.selection import Known, Sampling, Selection
from folb.core.server_step import AVERAGES, ServerStep, server_step
from folb.core.solver import Solver
from folb.core.step_size import StepSize
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA, Upload, upload
from folb.errors import InputError, check, check_whole, choose


@dataclass(frozen=True, eq=False)
class Origin:
    """The name and the settings that an algorithm was made with, only for the record.

    They are in the static part of a pytree, where unequal values would mean separate programs. So all origins are
    equal: FedAvg, and FedProx with any mu, share one program.
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
    """One federated algorithm, as the parts it is made of."""

    selection: Selection
    solver: Solver
    rule: Rule
    server: ServerStep
    uploads: tuple[Upload, ...] = ()  # what its devices send besides their update
    memory: DeviceMemory | None = None  # what the server remembers about devices
    gradient: Source | None = None  # where a rule that weighs by gradients gets them from
    step_size: StepSize | None = None  # how the server changes the devices' step size; None: it does not
    average: Average = field(default_factory=server_model)  # the model that is evaluated and kept
    attack: Attack | None = None  # what some devices report in place of the truth: only in the simulator
    root: int | None = field(default=None, metadata={"static": True})  # samples of the server, if the rule needs some
    clamp_gamma: bool = field(default=True, metadata={"static": True})
    origin: Origin = field(default_factory=Origin, metadata={"static": True})

    @property
    def name(self) -> str:
        """The constructor's name."""
        return self.origin.name

    def sends(self, name: str) -> bool:
        """Whether its devices send the upload of that name."""
        return any(upload.name == name for upload in self.uploads)


class Common(TypedDict, total=False):
    """The settings that every algorithm has; `compose` holds their defaults."""

    K: Annotated[int, "devices per round"]
    replacement: Annotated[bool, "draw a multiset with replacement (Algorithm 1), or a set without"]
    lr: Annotated[float, "step size of the local solver"]
    batch: Annotated[int, "samples per mini-batch"]
    unit: Annotated[
        Literal["step", "epoch", "gradient"], "a unit of work: a mini-batch step, an epoch, a full-gradient step"
    ]
    local_step: Annotated[Literal["sgd", "momentum", "delta_sgd"] | None, "a device's step; by default sgd"]
    local_beta: Annotated[float | None, "beta of local_step=momentum; by default 0.9"]
    local_gamma: Annotated[float | None, "gamma of local_step=delta_sgd; by default 2"]
    local_delta: Annotated[float | None, "delta of local_step=delta_sgd; by default 0.1"]
    candidates: Annotated[int | None, "d of power_of_choice and remembered_loss: K of d are chosen; by default 2 K"]
    memory: Annotated[
        Literal["scaffold", "feddyn", "fedvarp", "fedcm", "mimelite", "ghbm", "adabest"] | None,
        "what the server remembers of devices; by default nothing",
    ]
    option: Annotated[
        Literal["1", "2"] | None, "how memory=scaffold renews c_k: 1, by a gradient; 2, the default, by the update"
    ]
    memory_alpha: Annotated[float | None, "alpha of memory=feddyn (by default 0.01) or fedcm (0.1)"]
    memory_tau: Annotated[int | None, "how many rounds memory=ghbm looks back; by default 10, and best about N/K"]
    memory_beta: Annotated[float | None, "beta of memory=mimelite, ghbm or adabest; by default 0.9"]
    memory_mu: Annotated[float | None, "mu of memory=adabest: how much an update counts; by default 0.02"]
    server: Annotated[
        Literal["plain", "momentum", "nesterov", "lookahead", "adagrad", "adam", "yogi", "fedexp"], "the server's step"
    ]
    server_lr: Annotated[float | None, "step size of the server; by default 1; 0.01 for adam, yogi; 0.1 for adagrad"]
    beta: Annotated[float | None, "momentum of the server, beta_1 of adam and yogi; by default 0.9; 0.85 for lookahead"]
    stretch: Annotated[
        float | None, "of lookahead: how far an update is stretched; 0.5: as long as a device's; by default not at all"
    ]
    beta2: Annotated[float | None, "beta_2 of adam and yogi; by default 0.99"]
    eps: Annotated[float | None, "eps of adam, yogi, adagrad and fedexp; by default 0.001"]
    bias_correction: Annotated[
        bool | None, "of adam and yogi: yes, as optax, by default; no, as Reddi et al. print them"
    ]
    eps_decay: Annotated[float | None, "by what fedexp multiplies eps in each round; by default 0.996"]
    step_size: Annotated[
        Literal["agreement"] | None, "how the server changes lr from round to round; by default it does not"
    ]
    step_gain: Annotated[float | None, "of step_size=agreement: how fast lr changes; by default 1.25"]
    step_goal: Annotated[
        float | None, "of step_size=agreement: the cosine between rounds at which lr stays; by default 0.2"
    ]
    average: Annotated[
        Literal["none", "ema", "last_two"] | None,
        "evaluate and keep an average of the server's models; by default last_two for fedexp, none for others",
    ]
    average_rate: Annotated[float | None, "rate of average=ema: the weight of earlier models; by default 0.7"]
    robust: Annotated[
        Literal[
            "median",
            "trimmed_mean",
            "krum",
            "multi_krum",
            "geometric_median",
            "centred_clipping",
            "norm_bound",
            "fltrust",
        ]
        | None,
        "what stands in for the mean of the updates, if devices may lie; by default the mean stays",
    ]
    liars: Annotated[float | None, "of robust: the share of devices that may lie; by default 0.2"]
    bucket: Annotated[int | None, "of robust: means of so many replies, at random, are what it sees; by default of 1"]
    root: Annotated[int | None, "of robust=fltrust: training samples that the server has, too; by default 100"]
    attack: Annotated[
        Literal[
            "honest",
            "flipped",
            "flipped_x1000",
            "inflated",
            "inflated_back",
            "not_finite",
            "noise",
            "reversed",
            "grazing",
            "alie",
            "ipm",
            "min_max",
            "min_sum",
            "labels",
            "backdoor",
            "adaptive",
            "gamma",
            "loss",
        ]
        | None,
        "what lying devices do, in the simulator (docs/attacks.md); by default all are honest",
    ]
    attackers: Annotated[
        float | None, "of attack: the share of devices that lie, those with the lowest numbers; by default 0.2"
    ]
    clamp_gamma: Annotated[bool, "keep gamma_k within [0, 1]"]


def compose(
    rule: Rule,
    *,
    mu: Any = 0.0,
    sampling: str | Sampling | Callable[[Known], Any] = "uniform",
    candidates: int | None = None,
    local_step: str | LocalStep | Callable[..., Any] | None = None,
    local_beta: Any = None,
    local_gamma: Any = None,
    local_delta: Any = None,
    uploads: Sequence[str | Upload] = (),
    gradient: Source | None = None,
    memory: str | DeviceMemory | None = None,
    option: str | None = None,
    memory_alpha: Any = None,
    memory_tau: int | None = None,
    memory_beta: Any = None,
    memory_mu: Any = None,
    K: int = 10,
    replacement: bool = True,
    lr: Any = 0.01,
    batch: int = 10,
    unit: str = "step",
    server: str | ServerStep = "plain",
    server_lr: Any = None,
    beta: Any = None,
    stretch: Any = None,
    beta2: Any = None,
    eps: Any = None,
    bias_correction: bool | None = None,
    eps_decay: Any = None,
    step_size: str | StepSize | None = None,
    step_gain: Any = None,
    step_goal: Any = None,
    average: str | Average | None = None,
    average_rate: Any = None,
    robust: str | None = None,
    liars: Any = None,
    bucket: int | None = None,
    root: int | None = None,
    attack: str | None = None,
    attackers: Any = None,
    clamp_gamma: bool = True,
) -> Algorithm:
    """Build an algorithm from its parts, and check every setting.

    Each part is a name from `folb list`, or your own object: a `Sampling`, a `LocalStep`, some `Upload`s, a
    `DeviceMemory`, a rule, a `ServerStep`, a `StepSize`, an `Average`. "second" among the uploads draws S_2 of
    Algorithm 2, whose devices send only their gradients.
    """
    check_whole("K", K, 1, 10**4)  # a round has a K x K table of repeats, which would get too large
    check_whole("batch", batch, 1, 10**6)
    for name, flag in (("replacement", replacement), ("clamp_gamma", clamp_gamma)):
        if not isinstance(flag, bool):
            raise InputError(name, flag, "should be True or False")
    check("mu", mu, lambda mu: mu >= 0, "should be at least 0")
    check("lr", lr, lambda lr: lr > 0, "should be more than 0")
    choose("unit", unit, ("step", "epoch", "gradient"))
    chosen = selection.sampling(sampling, K, candidates)
    asked: Any = uploads
    remembers = drift.memory(
        memory,
        option=option,
        memory_alpha=memory_alpha,
        memory_tau=memory_tau,
        memory_beta=memory_beta,
        memory_mu=memory_mu,
    )
    kept = () if not isinstance(remembers, DeviceMemory) else remembers.uploads
    if not isinstance(uploads, str):
        asked = [*([] if gradient is None or gradient.upload is None else [gradient.upload]), *uploads]
        names = {one if isinstance(one, str) else one.name for one in asked if isinstance(one, str | Upload)}
        asked += [one for one in dict.fromkeys((*kept, *chosen.uploads)) if one not in names]
    sent = tuple(_uploads(asked, clamp_gamma))
    second = "second" in uploads
    if second and gradient is None and GRAD not in sent:
        expected = "should have 'grad' with 'second': a device in both sets sends its gradient once"
        raise InputError("uploads", uploads, expected)
    if gradient is not None and gradient.upload != GRAD and GRAD in sent:
        expected = "should be exact: this memory, or an upload, asks for the whole gradient anyway"
        raise InputError("gradient", "proxy" if gradient.upload is None else gradient.upload.name, expected)
    if chosen.memory and remembers is None and chosen.keeps is None:
        raise InputError("memory", None, "should be a DeviceMemory: the sampling looks at one")
    step = local_steps.local_step(local_step, beta=local_beta, gamma=local_gamma, delta=local_delta)
    shifts = isinstance(remembers, DeviceMemory) and remembers.shift is not None
    if step.apply is local_steps.delta_sgd:
        if gradient is not None and gradient.works:
            raise InputError("gradient", "proxy", "should be exact or sketch: the steps of delta_sgd have no one size")
        if isinstance(remembers, DeviceMemory) and remembers.one_size:
            raise InputError(
                "local_step", "delta_sgd", f"should be sgd or momentum: memory={memory} divides by their size"
            )
    if second and gradient is not None and gradient.works and shifts:
        raise InputError("gradient", "proxy", "should be exact or sketch: S_2 works without the shift of this memory")
    if second and chosen.candidates is not None:
        raise InputError("sampling", sampling, "should be uniform: S_2 would be the devices of S_1 again")
    joined = device_memory(remembers, chosen.keeps)
    if joined is not None:
        lr, mu = lr * joined.pace, mu + joined.prox
    if isinstance(server, str) and average is None:
        average = AVERAGES.get(server)
    made = Algorithm(
        selection=Selection(K, replacement, replace(chosen, keeps=None), second),
        solver=Solver(lr, mu, batch, unit, step),
        rule=tree.compiled(rule),
        server=server_step(
            server,
            lr=server_lr,
            beta=beta,
            stretch=stretch,
            beta2=beta2,
            eps=eps,
            bias_correction=bias_correction,
            eps_decay=eps_decay,
        ),
        uploads=sent,
        memory=joined,
        gradient=gradient,
        step_size=step_sizes.step_size(step_size, gain=step_gain, goal=step_goal),
        average=averages.average(average, average_rate),
        attack=attacks.attack(attack, attackers),
        root=robust_rules.root(robust, root),
        clamp_gamma=clamp_gamma,
    )
    return robust_rules.robust(made, robust, liars, bucket)


def _uploads(wanted: Sequence[str | Upload], clamp_gamma: bool) -> Iterator[Upload]:
    if isinstance(wanted, str):
        raise InputError("uploads", wanted, "should be a list of uploads")
    seen: set[str] = set()
    for one in wanted:
        if one == "second":
            continue
        found = upload(one)
        if found.name in seen:
            raise InputError("uploads", found.name, "is listed twice")
        seen.add(found.name)
        if "mean" in found.needs:
            raise InputError("uploads", found.name, "needs 'mean', which only a run of two phases sends")
        yield UNCLAMPED_GAMMA if found is GAMMA and not clamp_gamma else found


Constructor = TypeVar("Constructor", bound=Callable[..., Algorithm])


def named(constructor: Constructor) -> Constructor:
    """Give the algorithms of `constructor` its name, and a record of their settings."""

    parameters = inspect.signature(constructor).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        common = inspect.signature(compose).parameters
        usual = {name: common[name].default for name in Common.__annotations__}
        known = usual | known  # an algorithm may have defaults of its own

    @functools.wraps(constructor)
    def make(**settings: Any) -> Algorithm:
        for name in settings:
            choose(f"setting of {constructor.__name__}", name, known)
        made = constructor(**settings)  # what it fixes by itself is in its origin
        return replace(made, origin=Origin(constructor.__name__, known | settings | dict(made.origin.settings)))

    make.named_by_folb = True  # type: ignore[attr-defined]
    return make  # type: ignore[return-value]
