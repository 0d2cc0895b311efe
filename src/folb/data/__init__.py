"""The datasets: by name, or from a user's own files."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_type_hints

from folb.data import cifar, femnist, leaf, mapped, mnist, sent140, shakespeare, synthetic, tabular
from folb.data.federation import Federation
from folb.errors import InputError, choose

DATASETS: dict[str, Callable[..., Federation]] = {
    "synthetic": synthetic.synthetic,
    "synthetic_iid": synthetic.synthetic_iid,
    "synthetic_1_1": synthetic.fixed(1, 1),
    "mnist": mnist.mnist,
    "femnist": femnist.femnist,
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "shakespeare": shakespeare.shakespeare,
    "sent140": sent140.sent140,
}


# the files that a dataset is read from, by name; the others are generated
RAW_FILES: dict[str, Callable[[], list[Path]]] = {
    "mnist": mnist.raw_files,
    "femnist": lambda: femnist.found("any")[1],
    "cifar10": functools.partial(cifar.raw_files, cifar.CIFAR10),
    "cifar100": functools.partial(cifar.raw_files, cifar.FINE),
    "shakespeare": shakespeare.raw_files,
    "sent140": sent140.raw_files,
}


class Defaults(NamedTuple):
    """What is used with a dataset by default."""

    model: str = "logistic"
    lr: float = 0.01  # of every algorithm
    mu: float = 1.0  # of FedProx
    target: float = 0.7  # test accuracy


# from the public FedProx code, except for CIFAR, which it does not have; docs/datasets.md has the rule of the targets
DEFAULTS = {
    "synthetic_iid": Defaults(target=0.45),
    "mnist": Defaults("logistic", 0.03, 1.0, target=0.8),
    "femnist": Defaults("logistic", 0.003, 1.0, target=0.25),
    "cifar10": Defaults("resnet", 0.05, 0.01, target=0.5),
    "cifar100": Defaults("resnet", 0.05, 0.01, target=0.2),
    "shakespeare": Defaults("char_lstm", 0.8, 0.001, target=0.2),
    "sent140": Defaults("sentiment_lstm", 0.3, 0.01),
}


def defaults(name: str | os.PathLike[str]) -> Defaults:
    """The model, lr, mu and target that go with the dataset of that name or path."""
    return DEFAULTS.get(os.fspath(name).lower(), Defaults())


def load(name: str | os.PathLike[str], **settings: object) -> Federation:
    """The federation of that name or path; see `constructor`."""
    make = constructor(name)
    for setting in settings:
        choose(f"setting of {os.fspath(name)}", setting, inspect.signature(make).parameters)
    return make(**settings)


def constructor(name: str | os.PathLike[str]) -> Callable[..., Federation]:
    """A function that makes the federation; its keywords are the dataset's settings.

    `name` is one of DATASETS (in upper or lower case), synthetic_A_B for any alpha and beta, or a path: of an .npz
    file, a table (.csv, .csv.gz or .parquet), a LEAF directory or json file, or a directory of .npy files, which are
    mapped, not read.
    """
    name = os.fspath(name)
    known = name.lower()
    if known in DATASETS:
        return DATASETS[known]
    if numbers := _alpha_beta(known):
        return synthetic.fixed(*numbers)
    if os.path.exists(name):
        read = _reader(name)
        make = functools.partial(read, name)
        make.__doc__ = read.__doc__
        make.__annotations__ = get_type_hints(read, include_extras=True)
        return make
    if os.sep in name or "/" in name or known.endswith((".npz", *tabular.SUFFIXES, *leaf.SUFFIXES)):
        raise InputError("dataset", name, "no such file or directory")
    return DATASETS[choose("dataset", known, DATASETS)]


def located(name: str) -> str:
    """The standard form of a dataset's name, or the absolute path of a user's own files."""
    known = name.lower()
    if known in DATASETS:
        return known
    if numbers := _alpha_beta(known):
        return "synthetic_{:g}_{:g}".format(*numbers)
    return os.path.abspath(name) if os.path.exists(name) else name


def _alpha_beta(name: str) -> tuple[float, float] | None:
    try:
        family, alpha, beta = name.split("_")
        return (float(alpha), float(beta)) if family == "synthetic" else None
    except ValueError:
        return None


def _reader(path: str) -> Callable[..., Federation]:
    if mapped.is_mapped(path):
        return mapped.load
    if os.path.isdir(path) or path.lower().endswith(leaf.SUFFIXES):
        return leaf.load
    if path.lower().endswith(".npz"):
        return tabular.load_arrays
    if path.lower().endswith(tabular.SUFFIXES):
        return tabular.load
    known = "an .npz, a LEAF .json or .json.gz, a directory of LEAF or .npy files, or a .csv, .csv.gz or .parquet"
    raise InputError("dataset", path, f"should be {known}")
