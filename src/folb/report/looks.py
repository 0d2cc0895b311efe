"""How a curve looks: an algorithm has one colour and dash in every picture, and on the page. And titles in words."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

# page.css has the same colours, and others for dark mode; a test compares them
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#b88000", "#3a93c4", "#333333")
DASHES = ((), (7, 3), (2.5, 2.5), (9, 3, 2.5, 3), (4, 2))
STROKE = 1.8  # the width of a line on the page, which its dashes are made for
SHADES = (("#ffffff", 0.0), ("#1b1f24", 0.45), ("#ffffff", 0.35))  # what is mixed in: nothing, ink, paper

# a line for each dash: names and colours; algorithms that are often in one picture have different colours
BY_DASH = (
    {"folb": 0, "accord": 3, "fedmuon": 5},
    {"fedprox": 1, "feddyn": 6, "fedasync": 4, "fednu_direct": 3, "fedpac": 0},
    {"fedavg": 2, "fedacg": 5, "adabest": 3, "folb_two_set": 6, "fedexprox": 1},
    {"scaffold": 4, "fedvarp": 1, "mimelite": 0, "ghbm": 6, "folb_never_flip": 3},
    {"fednova": 5, "fedbuff": 3, "fedcm": 2, "folb_hetero": 4, "fednu_norm": 6},
)
ALGORITHMS = {name: (colour, dash) for dash, own in enumerate(BY_DASH) for name, colour in own.items()}
OTHERS = range(3, len(COLOURS))  # the colours of the user's own algorithms: not those of FOLB, FedProx and FedAvg


class Look(NamedTuple):
    """Positions in `COLOURS`, `DASHES` and `SHADES`."""

    colour: int
    dash: int
    shade: int = 0

    @property
    def style(self) -> str:
        """The classes of the page's stylesheet."""
        return f"colour{self.colour} dash{self.dash} shade{self.shade}"

    @property
    def ink(self) -> str:
        other, share = SHADES[self.shade]
        parts = zip(bytes.fromhex(COLOURS[self.colour][1:]), bytes.fromhex(other[1:]), strict=True)
        return "#" + bytes(round((1 - share) * own + share * mixed) for own, mixed in parts).hex()

    @property
    def line(self) -> dict[str, Any]:
        """The colour and dash of a line, as matplotlib has them: in units of its width."""
        dash = tuple(length / STROKE for length in DASHES[self.dash])
        return {"color": self.ink, "linestyle": (0, dash) if dash else "-"}


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """The look of each label of a picture: the algorithm's own for its first, other dashes and shades for the rest.

    A label is an algorithm's name and, after a space, the settings that distinguish it from others of that name.
    """
    names = {label: label.partition(" ")[0] for label in labels}
    first = {name: label for label, name in reversed(names.items())}
    chosen: dict[str, Look] = {}
    turns = range(len(DASHES) * len(SHADES))
    # folb's own algorithms always keep their look; the first label of another one only gives way to these
    for label in sorted(names, key=lambda label: (first[names[label]] != label, names[label] not in ALGORITHMS)):
        own, taken = _own(names[label]), set(chosen.values())
        others = (Look(own.colour, (own.dash + turn) % len(DASHES), turn % len(SHADES)) for turn in turns)
        chosen[label] = next((look for look in others if look not in taken), own)
    return {label: chosen[label] for label in names}


def _own(name: str) -> Look:
    if name in ALGORITHMS:
        return Look(*ALGORITHMS[name])
    number = crc32(name.encode("utf-8", "replace"))  # the same in every process
    return Look(OTHERS[number % len(OTHERS)], number // len(OTHERS) % len(DASHES))


MODELS = {
    "logistic": "logistic regression",
    "linear": "linear regression",
    "mlp": "perceptron",
    "cnn": "CNN",
    "lenet": "LeNet-5",
    "resnet": "ResNet",
    "char_lstm": "LSTM on characters",
    "sentiment_lstm": "LSTM on words",
}


def title(dataset: str, model: str) -> str:
    """The dataset and the model of an experiment; the user's own by their files' names."""
    dataset, model = (os.path.basename(name) or name for name in (dataset, model))
    return f"{dataset}, {MODELS.get(model, model)}"
