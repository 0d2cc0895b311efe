"""Metrics, each a value: how it is computed, for which models, its words in tables and pictures, what is better."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from folb.errors import InputError, check, choose

ACCURACY, FAIRNESS = "accuracy", "fairness"
CLASSES, NUMBERS = "classes", "numbers"
TOP = re.compile("top([1-9][0-9]{0,4})")
PLAIN = re.compile("[A-Za-z][A-Za-z0-9_]{0,39}")
GIVEN = {
    "y": "the labels of the test samples",
    "predicted": "what the model predicts for them",
    "scores": "a score for each sample and class",
    "classes": "the number of classes",
    "own": "each device's own accuracy, or mean squared error; NaN for a device without test samples",
}
TAKEN = (  # names that records, tables and exports have for something else
    *("run", "algorithm", "seed", "round", "rounds_to_target", "held_from", "note", "test_accuracy", "train_loss"),
    *("loss", "judged", "bytes_up", "bytes_down", "seconds", "updated", "target", "epsilon", "devices", "times"),
    *("weights", "inner", "gamma", "work", "lr", "attack", "own", "lost", "lost_devices", "rejected_devices", "length"),
)


@dataclass(frozen=True)
class Metric:
    """A figure of the model on all test samples, computed by jax within the program of the run.

    `compute` returns one number, from some of these arguments, by name: y, predicted, scores, classes, own
    (`folb.measures.GIVEN` says what they are).
    """

    name: str
    compute: Callable[..., Any] | str  # the name of a function of folb.metric_functions: that module needs jax
    words: str = ""  # for pictures
    short: str = ""  # the heading of a column
    unit: str = ""  # "%": a share from 0 to 1, which is shown in per cent
    lower: bool = False  # lower is better
    task: str = ""  # "classes" or "numbers", if it is for such models only
    factor: float = 1.0  # for people: values are shown times this
    says: str = ""  # for `folb list parts`
    parts: tuple[str, ...] = ()  # if it has several numbers, their names
    fixed: tuple[tuple[str, Any], ...] = ()  # further arguments of `compute`

    def __post_init__(self) -> None:
        if self.unit == "%":
            object.__setattr__(self, "factor", 100.0)
        for field in ("words", "short"):
            object.__setattr__(self, field, getattr(self, field) or str(self.name).replace("_", " "))

    @property
    def own(self) -> bool:
        """Whether a user wrote it."""
        return not isinstance(self.compute, str)

    @property
    def function(self) -> Callable[..., Any]:
        if callable(self.compute):
            return self.compute
        from folb import metric_functions

        return getattr(metric_functions, self.compute)

    @property
    def needs(self) -> tuple[str, ...]:
        """The arguments that it is given: all that have no value yet."""
        known = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in known if p.default is p.empty and p.name not in dict(self.fixed))

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        value = self.function(**{name: given[name] for name in self.needs}, **dict(self.fixed))
        return dict(value._asdict()) if self.parts else {self.name: value}

    def text(self, value: float, digits: int = 1) -> str:
        """The value as people read it: a share with so many decimals, any other with four significant digits."""
        shown = f"{100 * value:.{digits}f}" if self.is_share else f"{self.factor * value:.4g}"
        return f"{shown} {self.unit}" if self.unit else shown

    def goal(self, target: float) -> str:
        """A target as headings show it."""
        return f"{100 * target:g} %" if self.is_share else f"{target:g}"

    @property
    def axis(self) -> str:
        """The name of its axis in a picture."""
        return f"{self.words} ({self.unit})" if self.unit else self.words

    @property
    def is_share(self) -> bool:
        """Whether it is from 0 to 1, and shown in per cent."""
        return self.unit == "%"

    @property
    def worsened(self) -> str:
        """The heading of the column that counts how often it got much worse: see `Run.drops`."""
        return "rises > 5 %" if self.lower else "drops > 5 points"


OWN = ("own_mean", "own_worst", "own_variance")  # what `fairness` measures
_SPREAD = "the mean, the worst decile and the variance of the devices' own accuracies (or squared errors)"
_AREA = "the area under the ROC curve; of more than two classes, the mean of one against the rest"
_MSE, _MAE = (f"the mean {what} error of a regression" for what in ("squared", "absolute"))
_ALL = (
    Metric(ACCURACY, "accuracy", "test accuracy", unit="%", task=CLASSES),
    Metric(FAIRNESS, "fairness", says=_SPREAD, parts=OWN),
    Metric("f1", "f1", "macro F1", "F1", "%", task=CLASSES, says="macro F1: the mean over the classes"),
    Metric("auc", "auc", "AUC", "AUC", "%", task=CLASSES, says=_AREA),
    Metric("mse", "mse", "mean squared error", "MSE", lower=True, task=NUMBERS, says=f"{_MSE}; it is always measured"),
    Metric("mae", "mae", "mean absolute error", "MAE", lower=True, task=NUMBERS, says=_MAE),
)
REGISTRY = {one.name: one for one in _ALL}
KNOWN = {name: one for name, one in REGISTRY.items() if not one.parts}  # those that a model may be judged by


def top(k: int) -> Metric:
    """How often the label is among the k highest scores."""
    says = "how often the label is among the five highest scores, or as many as the number says"
    words = f"top-{k} accuracy", f"top {k}"
    return Metric(f"top{k}", "top", *words, "%", task=CLASSES, says=says, fixed=(("k", k),))


def listed() -> dict[str, str]:
    """What users may ask for besides the accuracy, and what it is."""
    return {one.name: one.says for one in (*_ALL[1:4], top(5), *_ALL[4:])}


def is_regression(judged_by: str) -> bool:
    """Whether a model that is judged by this predicts numbers, and not classes."""
    return judged_by in KNOWN and KNOWN[judged_by].task == NUMBERS


@cache
def measure(name: str, judged_by: str = ACCURACY) -> Metric:
    """What is known of a figure in records of runs whose models are judged by `judged_by`."""
    if number := TOP.fullmatch(name):
        return top(int(number[1]))
    if name not in OWN:
        return KNOWN[choose("metrics", name, [*KNOWN, *OWN])]
    numbers = is_regression(judged_by)
    of, what = (KNOWN["mse"], "error") if numbers else (KNOWN[ACCURACY], "accuracy")
    if name == "own_mean":
        return replace(of, name=name, words=f"mean {what} of the devices", short="devices' mean")
    if name == "own_worst":
        return replace(of, name=name, words=f"{what} of the worst decile of devices", short="worst decile")
    unit, factor = ("", 1.0) if numbers else ("points²", 1e4)
    words = f"variance of the devices' {what}"
    return Metric(name, FAIRNESS, words, "devices' variance", unit, lower=True, factor=factor)


def is_measure(name: object) -> bool:
    """Whether records may have it besides the accuracy, as a figure that folb knows."""
    return isinstance(name, str) and ((name in KNOWN and name != ACCURACY) or name in OWN or bool(TOP.fullmatch(name)))


def measured(metrics: Iterable[Metric]) -> tuple[str, ...]:
    """The names of the numbers that these metrics have: `fairness` has three."""
    return tuple(name for metric in metrics for name in metric.parts or (metric.name,))


def checked(metrics: object) -> tuple[str, ...]:
    """The names that were asked for, if all are known, or of a user's file, and different."""
    if not isinstance(metrics, list | tuple):
        raise InputError("metrics", metrics, "should be a list of names, such as fairness, f1, auc or top5")
    for name in metrics:
        if not (isinstance(name, str) and (TOP.fullmatch(name) or ".py:" in name)):
            choose("metrics", name, [FAIRNESS, *KNOWN, "top5"])
    check("metrics", list(metrics), len(set(metrics)) == len(metrics), "should be different")
    return tuple(metrics)


def chosen(metrics: Sequence[str | Metric | Callable[..., Any]]) -> tuple[Metric, ...]:
    """The metrics that were asked for: by name, or a user's own function or `Metric`."""
    checked([one for one in metrics if not callable(one)] if isinstance(metrics, list | tuple) else metrics)
    wanted = tuple(_own(one) if callable(one) else REGISTRY.get(one) or measure(one) for one in metrics)
    names = [one.name for one in wanted]
    check("metrics", names, len(set(names)) == len(names), "should be different")
    return wanted


def _own(given: Metric | Callable[..., Any]) -> Metric:
    """A user's own metric, checked; a function is called by its name, and its docstring says what it is."""
    if not isinstance(given, Metric):
        name = getattr(given, "__name__", type(given).__name__)
        given = Metric(name, given, words=(inspect.getdoc(given) or "").partition("\n")[0].rstrip("."))
    if not given.own and (given in REGISTRY.values() or TOP.fullmatch(given.name)):
        return given
    what = f"metrics: {given.name}"
    check(what, given.name, PLAIN.fullmatch, "should have a name of at most 40 letters, digits and _")
    if given.name in (*REGISTRY, *OWN, *TAKEN) or TOP.fullmatch(given.name):
        raise InputError(what, given.name, "should have another name: folb has something of this name")
    if not callable(given.compute) or given.parts:
        raise InputError(what, given.compute, f"should be computed by a function of {', '.join(GIVEN)}")
    if given.task not in ("", CLASSES, NUMBERS):
        raise InputError(f"{what}: task", given.task, "should be classes or numbers, or empty for both")
    try:
        needs = given.needs
    except (TypeError, ValueError) as error:
        raise InputError(what, given.compute, f"should be a function with named arguments: {error}") from error
    for name in needs:
        choose(f"{what}: argument", name, GIVEN)
    return given


FACTS = {"name": str, "words": str, "short": str, "unit": str, "lower": bool, "factor": float}


def facts(metrics: Iterable[Metric]) -> list[dict[str, Any]]:
    """How the users' own among these metrics are shown, for the record of a run."""
    return [{field: getattr(one, field) for field in FACTS} for one in metrics if one.own]


def are_facts(value: object) -> bool:
    """Whether a record may say this of users' own metrics."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and one.keys() == FACTS.keys()
        and all(isinstance(one[field], kind) for field, kind in FACTS.items())
        and PLAIN.fullmatch(one["name"]) is not None
        and 0 < one["factor"] < 1e30
        for one in value
    )


def as_shown(known: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Users' own metrics from the record of a run, by name. They cannot be computed: their file may be gone."""
    return {one["name"]: Metric(compute=_gone, **one) for one in known}


def _gone() -> None:
    """In place of the function of a recorded metric."""
