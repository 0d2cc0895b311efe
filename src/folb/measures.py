"""What a model is measured by: the names in records, the words in tables and pictures, and which way is better."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from folb.errors import InputError, choose

ACCURACY, FAIRNESS = "accuracy", "fairness"
OF_CLASSES = ("f1", "auc")
OF_NUMBERS = ("mse", "mae")
OWN = ("own_mean", "own_worst", "own_variance")  # what `fairness` measures
TOP = re.compile("top([1-9][0-9]{0,4})")


class Measure(NamedTuple):
    """A figure of an evaluated round. `unit` and `factor` are for people: 0.7 is shown as 70 %."""

    name: str
    words: str
    short: str  # the heading of a column
    factor: float = 1.0
    unit: str = ""
    lower: bool = False  # lower is better

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


def _share(name: str, words: str, short: str) -> Measure:
    return Measure(name, words, short, 100.0, "%")


KNOWN = {
    ACCURACY: _share(ACCURACY, "test accuracy", "accuracy"),
    "f1": _share("f1", "macro F1", "F1"),
    "auc": _share("auc", "AUC", "AUC"),
    "mse": Measure("mse", "mean squared error", "MSE", lower=True),
    "mae": Measure("mae", "mean absolute error", "MAE", lower=True),
}


SAYS = {
    FAIRNESS: "the mean, the worst decile and the variance of the devices' own accuracies (or squared errors)",
    "f1": "macro F1: the mean over the classes",
    "auc": "the area under the ROC curve; of more than two classes, the mean of one against the rest",
    "top5": "how often the label is among the five highest scores, or as many as the number says",
    "mse": "the mean squared error of a regression; it is always measured",
    "mae": "the mean absolute error of a regression",
}


def is_regression(judged_by: str) -> bool:
    """Whether a model that is judged by this predicts numbers, and not classes."""
    return judged_by in OF_NUMBERS


@cache
def measure(name: str, judged_by: str = ACCURACY) -> Measure:
    """What is known of a measure, in runs whose models are judged by `judged_by`."""
    if found := TOP.fullmatch(name):
        return _share(name, f"top-{found[1]} accuracy", f"top {found[1]}")
    if name not in OWN:
        return KNOWN[choose("metrics", name, [*KNOWN, *OWN])]
    numbers = is_regression(judged_by)
    of = measure("mse") if numbers else measure(ACCURACY)
    what = "error" if numbers else "accuracy"
    if name == "own_mean":
        return of._replace(name=name, words=f"mean {what} of the devices", short="devices' mean")
    if name == "own_worst":
        return of._replace(name=name, words=f"{what} of the worst decile of devices", short="worst decile")
    words, short = f"variance of the devices' {what}", "devices' variance"
    if numbers:
        return Measure(name, words, short, lower=True)
    return Measure(name, words, short, 1e4, "points²", lower=True)


def measured(metrics: tuple[str, ...]) -> tuple[str, ...]:
    """The measures that these metrics have: `fairness` has three."""
    return tuple(name for metric in metrics for name in (OWN if metric == FAIRNESS else (metric,)))


def is_measure(name: object) -> bool:
    """Whether records may have it besides the accuracy."""
    return isinstance(name, str) and (name in (*OF_CLASSES, *OF_NUMBERS, *OWN) or TOP.fullmatch(name) is not None)


def checked(metrics: object) -> tuple[str, ...]:
    """The metrics that were asked for, if all are known and different."""
    if isinstance(metrics, str) or not isinstance(metrics, list | tuple):
        raise InputError("metrics", metrics, "should be a list of names, such as fairness, f1, auc or top5")
    for name in metrics:
        if not (isinstance(name, str) and TOP.fullmatch(name)):
            choose("metrics", name, [FAIRNESS, *KNOWN, "top5"])
    if len(set(metrics)) < len(metrics):
        raise InputError("metrics", list(metrics), "should be different")
    return tuple(metrics)
