"""The work as a plain loop in PyTorch, no federated library at all: the floor."""

from __future__ import annotations

import numpy as np
import torch
from in_torch import Tensors, network
from torch.nn.functional import cross_entropy
from work import K, Scores, measure, shuffled_rows, task


def main() -> None:
    """Measure it."""
    asked = task()
    work, data = asked.work, Tensors(asked.work)
    model = network(work)
    parameters = [p for p in model.parameters() if p.requires_grad]
    initial = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.SGD(parameters, lr=work.settings.lr)

    def put(values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)

    def train(rows: torch.Tensor) -> None:
        for batch in rows:
            optimiser.zero_grad()
            cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimiser.step()

    def run(rounds: int, every: int) -> Scores:
        rng = np.random.default_rng(asked.seed)
        w = initial
        for t in range(1, rounds + 1):
            chosen = rng.choice(work.N, K, replace=False)
            total = [torch.zeros_like(p) for p in w]
            for k in chosen:
                put(w)
                train(torch.from_numpy(shuffled_rows(rng, work, k)))
                with torch.no_grad():
                    for s, p in zip(total, parameters, strict=True):
                        s.add_(p, alpha=int(work.size[k]))
            w = [s / int(work.size[chosen].sum()) for s in total]
            if t % every == 0:
                put(w)
                scores = data.scores(model)
        return scores

    measure(asked, run, torch.__version__.partition("+")[0])


if __name__ == "__main__":
    main()
