"""The record of an algorithm, and `compose`, which builds one.

The keywords of a constructor are its settings, on the command line and in Python. The numbers among them (mu, psi, lr,
server_lr) are leaves of the record, so `jax.vmap` can sweep them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_type_hints

import jax

from folb.core import liars as attacks
from folb.core import local_step as local_steps
from folb.core import privacy as privacies
from folb.core import robust as robust_rules
from folb.core import samplings, selection, tree
from folb.core import staleness as staleness_of
from folb.core.average import AVERAGES, Average, ServerModel
from folb.core.codec import Compression, compression
from folb.core.drift import MEMORIES
from folb.core.gradient import Source
from folb.core.guard import Guard
from folb.core.liars import Attack
from folb.core.local_step import LocalStep
from folb.core.memory import DeviceMemory, device_memory
from folb.core.part import Part, Slot
from folb.core.privacy import Privacy
from folb.core.robust import Robust
from folb.core.rules import Rule
from folb.core.selection import Known, Sampling, Selection
from folb.core.server_step import SERVERS, ServerStep
from folb.core.solver import Solver
from folb.core.staleness import STALENESS, Asynchrony
from folb.core.step_size import STEP_SIZES, StepSize
from folb.core.upload import GAMMA, GRAD, UNCLAMPED_GAMMA, Upload, upload
from folb.errors import InputError, check_number, check_whole, choose


@dataclass(frozen=True, eq=False)
class Origin:
    """The name and the settings that an algorithm was made with, only for the record.

    They are in the static part of a pytree, where unequal values would mean separate programs. So all origins are
    equal: FedAvg, and FedProx with any mu, share one program.
    """

    name: str = "unnamed"
    settings: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()  # those that the code which made it gave

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
    asynchrony: Asynchrony | None = None  # how rounds do not wait; None: they do
    average: Average = field(default_factory=ServerModel)  # the model that is evaluated and kept
    compression: Compression = field(default=Compression(), metadata={"static": True})  # of what is sent
    guard: Guard | None = None  # how a rule's weights are bounded
    robust: Robust | None = None  # what is in place of the rule's mean
    attack: Attack | None = None  # what some devices report in place of the truth: only in the simulator
    privacy: Privacy | None = None  # how it is differentially private; None: it is not
    root: int | None = field(default=None, metadata={"static": True})  # samples of the server, if the rule needs some
    clamp_gamma: bool = field(default=True, metadata={"static": True})
    origin: Origin = field(default_factory=Origin, metadata={"static": True})

    def __repr__(self) -> str:
        given = {
            key: value for key, value in self.origin.settings.items() if isinstance(value, bool | int | float | str)
        }
        return f"Algorithm({', '.join([self.name, *(f'{key}={value}' for key, value in given.items())])})"

    @property
    def name(self) -> str:
        """The constructor's name."""
        return self.origin.name

    @property
    def second_upload(self) -> Upload:
        """What a device of S_2 sends, and nothing else."""
        return GRAD if self.gradient is None else self.gradient.second

    @property
    def second_works(self) -> bool:
        """Whether a device of S_2 has to work for what it sends."""
        return self.gradient is not None and self.gradient.works

    def sends(self, name: str) -> bool:
        """Whether its devices send the upload of that name."""
        return any(upload.name == name for upload in self.uploads)


class Common(TypedDict, total=False):
    """The settings that every algorithm has, besides those of `SLOTS`; `compose` holds their defaults."""

    K: Annotated[int, "devices per round"]
    over_selection: Annotated[
        float | None, "1.3 asks 30 % more devices than K, and ends the round once K have answered; by default 1"
    ]
    replacement: Annotated[bool, "true: draw with replacement, as in Algorithm 1; false: without"]
    lr: Annotated[float, "step size of the local solver"]
    batch: Annotated[int, "samples per mini-batch"]
    unit: Annotated[
        Literal["step", "epoch", "gradient"], "a unit of work: a mini-batch step, an epoch, a full-gradient step"
    ]
    local_step: Annotated[Literal["sgd", "momentum", "delta_sgd", "adam"] | None, "a device's step; by default sgd"]
    local_beta: Annotated[float | None, "beta of local_step=momentum, beta_1 of adam; by default 0.9"]
    local_beta2: Annotated[float | None, "beta_2 of local_step=adam; by default 0.999"]
    local_eps: Annotated[float | None, "eps of local_step=adam; by default 1e-8"]
    local_gamma: Annotated[float | None, "gamma of local_step=delta_sgd; by default 2"]
    local_delta: Annotated[float | None, "delta of local_step=delta_sgd; by default 0.1"]
    candidates: Annotated[int | None, "d of power_of_choice and remembered_loss: K of d are chosen; by default 2 K"]
    exploration: Annotated[float | None, "of sampling=oort: the share of draws for devices not met yet; by default 0.1"]
    concurrency: Annotated[
        int | None, "M: devices that work at any time, and a round takes the next K replies; by default rounds wait"
    ]
    compress_up: Annotated[
        Literal["int8", "int4", "top_k", "random_k", "sign"] | None,
        "the codec of updates, and of gradients sent with them; by default none",
    ]
    compress_down: Annotated[Literal["int8", "int4"] | None, "the codec of the model; by default none"]
    keep: Annotated[
        float | None, "with compress_up=top_k or random_k: the share of the numbers that is sent; by default 0.1"
    ]
    error_feedback: Annotated[
        bool | None,
        "add what a codec left out to the next message; by default with top_k, random_k and sign",
    ]
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
        "what replaces the mean of the updates, if devices may lie; by default the mean is used",
    ]
    liars: Annotated[float | None, "with robust: the share of devices that may lie; by default 0.2"]
    bucket: Annotated[int | None, "with robust: replies are first averaged in random groups of this size; by default 1"]
    root: Annotated[int | None, "with robust=fltrust: training samples that the server has, too; by default 100"]
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
        float | None, "with attack: the share of devices that lie: those numbered from 0 on; by default 0.2"
    ]
    privacy: Annotated[
        Literal["central", "distributed"] | None,
        "differential privacy of devices (docs/privacy.md): who adds the noise, the server or the devices",
    ]
    epsilon: Annotated[
        float | None,
        "with privacy: the budget; by default the noise is such that all rounds together spend it; if noise is set, "
        "the run ends when it is spent",
    ]
    delta: Annotated[float | None, "with privacy: delta, less than 1 / N; by default 0.00001"]
    noise: Annotated[
        float | None,
        "with privacy: the standard deviation of the noise on a sum of updates, in units of clip; by default computed "
        "from epsilon",
    ]
    clip: Annotated[
        float | None, "with privacy: the largest norm of an update; longer updates are clipped to it; by default 1"
    ]
    clip_quantile: Annotated[
        float | None, "with privacy: adapt clip to this quantile of the updates' lengths; by default it stays"
    ]
    clip_gradient: Annotated[
        float | None, "with privacy, for FOLB: the largest norm of a gradient, or of its sketch; by default 1"
    ]
    replay: Annotated[
        bool | None,
        "with privacy, in the simulator: false takes draws and noise from the operating system, so that nobody can "
        "replay the run; by default they follow from the seed",
    ]
    clamp_gamma: Annotated[bool, "keep gamma_k within [0, 1]"]


SLOTS: tuple[Slot[Any], ...] = (MEMORIES, SERVERS, STEP_SIZES, AVERAGES, STALENESS)


@functools.cache
def common_hints() -> dict[str, Any]:
    """The settings that every algorithm has, as types with a line of help: `Common`, and the parts of `SLOTS`."""
    found = get_type_hints(Common, include_extras=True)
    for slot in SLOTS:
        found |= {slot.name: slot.choice, **slot.numbers}
    return found


Given = ParamSpec("Given")


def _recording(make: Callable[Given, Algorithm]) -> Callable[Given, Algorithm]:
    """`make`, but its algorithms record the settings that it was given; of a part, the name of its function."""

    @functools.wraps(make)
    def recorded(*parts: Given.args, **settings: Given.kwargs) -> Algorithm:
        made = make(*parts, **settings)
        known = {name: settings[name] for name in common_hints() if name in settings}
        for slot in SLOTS:  # a part of folb that is given as a value is recorded as one that is given by name
            if isinstance(part := settings.get(slot.name), Part) and type(part) in slot.known:
                known |= {slot.spelt(name): value for name, value in part.settings.items()}
        known = {name: _written(value) for name, value in known.items() if not hasattr(value, "dtype")}
        recorded = {**made.origin.settings, **known}
        return replace(made, origin=replace(made.origin, settings=recorded, given=frozenset(settings)))

    return recorded


def _written(value: Any) -> Any:
    """A setting as a record can hold it: of a part, the name of its function."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Part):
        return value.name
    function = getattr(value, "apply", value)
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(value).__name__)


@_recording
def compose(
    rule: Rule,
    *,
    mu: Any = 0.0,
    sampling: str | Sampling | Callable[[Known], Any] = "uniform",
    candidates: int | None = None,
    exploration: Any = None,
    local_step: str | LocalStep | Callable[..., Any] | None = None,
    local_beta: Any = None,
    local_beta2: Any = None,
    local_eps: Any = None,
    local_gamma: Any = None,
    local_delta: Any = None,
    uploads: Sequence[str | Upload] = (),
    gradient: Source | None = None,
    memory: str | DeviceMemory | None = None,
    K: int = 10,
    over_selection: float | None = None,
    replacement: bool = True,
    lr: Any = 0.01,
    batch: int = 10,
    unit: str = "step",
    server: str | ServerStep = "plain",
    step_size: str | StepSize | None = None,
    average: str | Average | None = None,
    concurrency: int | None = None,
    staleness: str | Callable[[Any], Any] | None = None,
    mixing: bool = False,
    compress_up: str | None = None,
    compress_down: str | None = None,
    keep: float | None = None,
    error_feedback: bool | None = None,
    robust: str | None = None,
    liars: Any = None,
    bucket: int | None = None,
    root: int | None = None,
    attack: str | None = None,
    attackers: Any = None,
    privacy: str | None = None,
    epsilon: Any = None,
    delta: Any = None,
    noise: Any = None,
    clip: Any = None,
    clip_quantile: Any = None,
    clip_gradient: Any = None,
    replay: bool | None = None,
    clamp_gamma: bool = True,
    **numbers: Any,
) -> Algorithm:
    """Build an algorithm from its parts, and check every setting.

    Each part is a name from `folb list`, or your own object: a `Sampling`, a `LocalStep`, some `Upload`s, a
    `DeviceMemory`, a rule, a `ServerStep`, a `StepSize`, an `Average`. "second" among the uploads draws S_2 of
    Algorithm 2, whose devices send only their gradients.
    """
    for name in numbers:
        choose("setting", name, common_hints())
    _check_rule(rule)
    if isinstance(uploads, str) or not isinstance(uploads, Sequence):
        raise InputError("uploads", uploads, "should be a list of uploads")
    check_whole("K", K, 1, selection.MOST)
    check_whole("batch", batch, 1, 10**6)
    for name, flag in (("replacement", replacement), ("clamp_gamma", clamp_gamma)):
        if not isinstance(flag, bool):
            raise InputError(name, flag, "should be True or False")
    check_number("mu", mu, lambda mu: mu >= 0, "should be at least 0")
    check_number("lr", lr, lambda lr: lr > 0, "should be more than 0")
    choose("unit", unit, ("step", "epoch", "gradient"))
    chosen = samplings.sampling(sampling, K, candidates, exploration)
    remembers = MEMORIES.chosen(memory, numbers)
    kept: Any = () if remembers is None else remembers.uploads
    if isinstance(kept, str) or not isinstance(kept, Sequence):
        raise InputError("memory: uploads", kept, "should be a list of uploads")
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
        raise InputError("memory", None, "should be a DeviceMemory: the sampling needs one")
    step = local_steps.local_step(
        local_step, beta=local_beta, beta2=local_beta2, eps=local_eps, gamma=local_gamma, delta=local_delta
    )
    shifts = remembers is not None and remembers.shifts
    if not step.one_size:
        if gradient is not None and gradient.works:
            expected = f"should be exact or sketch: the steps of {step.name} differ in size"
            raise InputError("gradient", "proxy", expected)
        if remembers is not None and remembers.one_size:
            expected = f"should be sgd or momentum: memory={memory} divides by the size of a step"
            raise InputError("local_step", step.name, expected)
    if second and gradient is not None and gradient.works and shifts:
        raise InputError("gradient", "proxy", "should be exact or sketch: S_2 works without the shift of this memory")
    if second and chosen.candidates is not None:
        raise InputError("sampling", sampling, "should be uniform: S_2 would be the devices of S_1 again")
    codecs = compression(compress_up, compress_down, keep, error_feedback)
    if second and gradient is not None and gradient.works and codecs.up is not None:
        raise InputError("gradient", "proxy", "should be exact or sketch with compress_up: S_2 has no error feedback")
    joined = device_memory(remembers, chosen.keeps)
    if joined is not None:
        lr, mu = lr * joined.pace, mu + joined.prox
    asynchronous = staleness_of.asynchrony(concurrency, staleness, mixing, numbers)
    if asynchronous is not None:
        _check_asynchronous(asynchronous.concurrency, sampling, chosen, second, memory, over_selection)
    stepping = SERVERS.part(server, numbers)
    if average is None:
        average = stepping.average
    slots = K if chosen.expected is None else samplings.room(K)
    made = Algorithm(
        selection=selection.over_selected(
            Selection(slots, replacement, replace(chosen, keeps=None), second), over_selection
        ),
        solver=Solver(lr, mu, batch, unit, step),
        rule=tree.compiled(rule),
        server=stepping,
        uploads=sent,
        memory=joined,
        gradient=gradient,
        step_size=STEP_SIZES.chosen(step_size, numbers),
        asynchrony=asynchronous,
        average=AVERAGES.part("none" if average is None else average, numbers),
        compression=codecs,
        attack=attacks.attack(attack, attackers),
        robust=robust_rules.robust(robust, liars, bucket, K),
        root=robust_rules.root(robust, root),
        clamp_gamma=clamp_gamma,
    )
    return privacies.private(
        made,
        privacy,
        {
            "sampling": sampling,
            "memory": memory,
            "robust": robust,
            "attack": attack,
            "concurrency": concurrency,
            "over_selection": over_selection,
            "compress_up": compress_up,
            "compress_down": compress_down,
        },
        replay,
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        clip=clip,
        clip_quantile=clip_quantile,
        clip_gradient=clip_gradient,
    )


def _check_rule(rule: Any) -> None:
    """Raise an `InputError` unless the rule is a function of the round alone."""
    if not callable(rule):
        raise InputError("rule", rule, "should be a function of the round, such as folb.rules.mean")
    try:
        inspect.signature(rule).bind(None)
    except TypeError as error:
        expected = f"should be a function of the round alone ({error}): other arguments are set by "
        raise InputError("rule", _written(rule), f"{expected}jax.tree_util.Partial(rule, name=value)") from None
    except ValueError:  # some compiled functions do not say what they take
        pass


def _check_asynchronous(
    M: int, sampling: Any, chosen: Sampling, second: bool, memory: Any, over_selection: Any
) -> None:
    """Raise an `InputError` for what needs all devices of a round at the same time."""
    if over_selection is not None:
        raise InputError("over_selection", over_selection, "should be None with concurrency: a round does not wait")
    if second:
        raise InputError("concurrency", M, "should be None with a second set: both sets need the same model")
    if memory is not None:
        name = memory if isinstance(memory, str) else "your own"
        raise InputError("memory", name, "should be None with concurrency: a memory of devices changes round by round")
    needs_all = chosen.candidates is not None or chosen.first is not None or chosen.expected is not None
    if chosen.survey is not None or chosen.memory or needs_all:
        expected = "should be uniform, samples or chances of your own with concurrency: devices are drawn one by one"
        raise InputError("sampling", sampling if isinstance(sampling, str) else "your own", expected)


def _uploads(wanted: Sequence[str | Upload], clamp_gamma: bool) -> Iterator[Upload]:
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
        usual = {name: common[name].default if name in common else None for name in common_hints()}
        known = usual | known  # an algorithm may have defaults of its own

    @functools.wraps(constructor)
    def make(**settings: Any) -> Algorithm:
        for name in settings:
            choose(f"setting of {constructor.__name__}", name, known)
        made = constructor(**settings)
        if not isinstance(made, Algorithm):
            raise InputError(constructor.__name__, made, "should make a folb.Algorithm, such as folb.compose(...)")
        recorded = known | settings | dict(made.origin.settings)  # the last are what it fixes in its code
        return replace(made, origin=Origin(constructor.__name__, recorded, frozenset(settings)))

    make.named_by_folb = True  # type: ignore[attr-defined]
    return make  # type: ignore[return-value]
