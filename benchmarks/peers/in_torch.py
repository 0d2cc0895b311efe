"""The networks and the evaluation in PyTorch, for the libraries that build on it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import Array, Scores, Work, load


class Images(nn.Sequential):  # type: ignore[misc]
    """conv 32, conv 64, dense 128, the class scores."""

    def __init__(self, initial: dict[str, Array]) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 28)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 62)),
        )
        hidden = initial["hidden.weight"].reshape(7, 7, 64, 128).transpose(3, 2, 0, 1)  # channels first here
        put(self[1], initial["first.weight"].transpose(3, 2, 0, 1), initial["first.bias"])
        put(self[4], initial["second.weight"].transpose(3, 2, 0, 1), initial["second.bias"])
        put(self[8], hidden.reshape(128, -1), initial["hidden.bias"])
        put(self[10], initial["scores.weight"].T, initial["scores.bias"])


class Text(nn.Module):  # type: ignore[misc]
    """An embedding, two LSTM layers, and the scores after the last character."""

    def __init__(self, initial: dict[str, Array]) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(80, 8), nn.LSTM(8, 256, 2, batch_first=True)
        self.scores = nn.Linear(256, 80)
        put(self.scores, initial["scores.weight"].T, initial["scores.bias"])
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor(initial["embedding"]))
            for i, layer in enumerate(("first", "second")):
                into, own, bias, second = self.lstm.all_weights[i]
                into.copy_(torch.tensor(initial[f"{layer}.input"].T))
                own.copy_(torch.tensor(initial[f"{layer}.recurrent"].T))
                bias.copy_(torch.tensor(initial[f"{layer}.bias"]))
                second.zero_()
                second.requires_grad_(False)  # if it were trained, too, the first one's step would double

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 80] -> [batch, 80]."""
        return self.scores(self.lstm(self.embedding(x))[0][:, -1])


def put(layer: Any, weight: Array, bias: Array) -> None:
    """Set a layer's parameters."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))


def network(work: Work) -> nn.Module:
    """A work's network, as it starts."""
    if work.name == "cnn":
        return Images(work.initial)
    if work.name == "lstm":
        return Text(work.initial)
    linear = nn.Linear(*work.initial["weight"].shape)
    put(linear, work.initial["weight"].T, work.initial["bias"])
    return linear


class Tensors:
    """A work's samples as tensors."""

    def __init__(self, work: Work) -> None:
        self.x, self.x_test = torch.from_numpy(work.x), torch.from_numpy(work.x_test)
        self.y, self.y_test = torch.from_numpy(work.y).long(), torch.from_numpy(work.y_test).long()
        self.block = work.block

    def scores(self, model: nn.Module) -> Scores:
        """The training loss and the test accuracy."""
        loss, hits = 0.0, 0
        with torch.no_grad():
            for x, y in zip(self.x.split(self.block), self.y.split(self.block), strict=True):
                loss += float(cross_entropy(model(x), y, reduction="sum"))
            for x, y in zip(self.x_test.split(self.block), self.y_test.split(self.block), strict=True):
                hits += int((model(x).argmax(1) == y).sum())
        return Scores(loss / len(self.y), hits / len(self.y_test))


@cache
def loaded(name: str, path: str) -> tuple[Work, Tensors, nn.Module]:
    """What a worker process keeps from one device to the next: the work, its samples and a network."""
    work = load(name, path)
    return work, Tensors(work), network(work)
