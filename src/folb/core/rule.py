"""What a rule is: it sees a whole round, and makes the update of the model. A device may load this: it has no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from folb.core.part import Part
from folb.core.upload import Upload
from folb.errors import InputError
from folb.typing import Params

if TYPE_CHECKING:
    from jax import Array


class Round(NamedTuple):
    """What the server knows when it closes a round; each field is stacked over the slots of S_1.

    A field that the algorithm does not ask its devices to upload is None.
    """

    params: Params  # w^t, the server's model, not stacked
    times: Array  # times in the multiset, 0 for a slot without a usable reply
    size: Array  # n_k
    correction: Array  # p_k / P_k: corrects a mean over draws from P to the objective (1)
    delta: Params  # w_k less the model that the device was sent: w^t, unless the server step looks ahead
    grad: Params | None = None  # grad F_k(w^t)
    gamma: Array | None = None
    inner: Array | None = None  # <grad f(w^t), grad F_k(w^t)>, exact, if there was a survey of all devices
    second: Gradients | None = None  # what S_2 sent, for (9)
    reference: Params | None = None  # grad_1 f(w^t), if it should differ from (10) of `grad`
    trusted: Params | None = None  # the server's own update, if it has samples: not stacked
    device: Array | None = None  # whose replies these are: for attacks, not for rules
    sent: Mapping[str, Any] = {}  # further uploads, by name
    t: Any = None  # the number of the round
    N: Any = None  # how many devices there are
    steps: Any = None  # local steps of each slot's device; with momentum, their total weight
    lr: Any = None  # size of those steps; one for each slot, if rounds do not wait
    shared: Any = ()  # the server's part of the memory of devices
    own: Any = ()  # the part of each slot's device, stacked
    key: Any = None  # two random words that all devices of the round share
    start: Params | None = None  # the model that devices were sent, not stacked
    shift: Params | None = None  # what each device added to its gradients, stacked, if it was sent such a term
    compared: Params | None = None  # the updates, in the same form as `grad`, if that is not the model's
    downhill: Params | None = None  # what each device was to descend along, in the same form, if not `grad` + `shift`
    staleness: Any = None  # steps of the server since the device started, if rounds do not wait
    starts: Params | None = None  # the model that each device started from, stacked, if they may differ
    seconds: Any = None  # from the start of the round until each reply came
    update: Any = None  # what the rule made of the round: for server steps and memories
    noise: Any = None  # of a private round, before it is scaled
    mean_square: Array | None = None  # of the updates' lengths, if no single update may be seen
    noise_square: Array | None = None  # how long the noise in the update is, on average, squared


class Gradients(NamedTuple):
    """The gradients of one multiset of devices: all that S_2 of Algorithm 2 sends."""

    grad: Params
    times: Array
    correction: Array
    device: Array | None = None
    steps: Any = None  # local steps, if they had to work for it


class Update(NamedTuple):
    """The round's step `delta`, and the weight each slot's update got in it: delta = sum_k weights_k kept_k Delta_k."""

    delta: Params
    weights: Array
    kept: Array | float = 1.0  # what was kept of each update's length, if the rule shortened some


def as_printed(inner: Any, discount: Any) -> Any:
    """I_k of (18), inner - discount: a discount larger than the inner product reverses a device's update."""
    return inner - discount


def never_flipped(inner: Any, discount: Any) -> Any:
    """The discount shrinks |I_k| to zero at most: the sign never changes."""
    xp = inner.__array_namespace__()
    return xp.sign(inner) * xp.maximum(xp.abs(inner) - discount, 0.0)


class Rule(Part):
    """What the server makes of a round. A rule of your own is a class of this base with `update`."""

    needed = ("update",)
    uploads: ClassVar[tuple[str | Upload, ...]] = ()  # what it needs of each device besides the update
    second: ClassVar[bool] = False  # whether it needs gradients of a second set of devices: that of Algorithm 2
    surveyed: ClassVar[bool] = False  # whether a survey of all gradients gives what its uploads would
    one_size: ClassVar[bool] = False  # whether it divides by the number of local steps, which then have one size
    even: ClassVar[Any] = False  # whether it is the mean (2), which a sum of updates alone gives
    by_samples: ClassVar[Any] = False  # whether a device's own claim, its number of samples, is its weight
    # the numbers, by name, with which a device computes its own `importance`; None if its reply and g are not enough
    alone: ClassVar[Any] = None

    def importance(self, inner: Array, gamma: Any, square: Array) -> Array:
        """I_k from <grad F_k, g>, gamma_k and ||g||^2, where g is the mean gradient: of a rule that weighs by it."""
        raise NotImplementedError

    def update(self, round: Round) -> Update:
        raise NotImplementedError

    def check(self, spelt: Any = str) -> None:
        super().check(spelt)
        wanted = self.uploads
        if isinstance(wanted, str) or not isinstance(wanted, Sequence):
            raise InputError("rule: uploads", wanted, "should be a list of uploads")
        if self.second and "grad" not in wanted:
            expected = "should have 'grad' with `second`: a device in both sets sends its gradient once"
            raise InputError("rule: uploads", wanted, expected)
