"""The work on FedLab: its standalone pipeline with the serial SGD trainer and the synchronous server."""

from __future__ import annotations

import contextlib
import logging
import random
from importlib.metadata import version

import numpy as np
import torch
from in_torch import Tensors, network
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH, K, Scores, measure, shuffled_rows, task

# FedLab imports torchvision, whose compiled part is missing with a CPU build of torch: declare what it looks for.
with contextlib.suppress(RuntimeError):
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool

asked = task()
work, data = asked.work, Tensors(asked.work)


class Devices:
    """FedLab counts epochs, not steps: one epoch is the round's batches, already shuffled."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(asked.seed)

    def get_dataloader(self, k: int, batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        """The batches of device k."""
        rows = torch.from_numpy(shuffled_rows(self.rng, work, k).reshape(-1))
        return DataLoader(TensorDataset(data.x[rows], data.y[rows]), batch_size=batch_size)


class Trainer(SGDSerialClientTrainer):  # type: ignore[misc]
    """The serial trainer, whose replies also say how many samples a device has."""

    def local_process(self, payload: list[torch.Tensor], id_list: list[int]) -> None:
        """Train each device."""
        for k in id_list:
            trained = self.train(payload[0], self.dataset.get_dataloader(k, self.batch_size))
            self.cache.append([*trained, int(work.size[k])])


class Server(SyncServerHandler):  # type: ignore[misc]
    """The synchronous server, averaging by samples."""

    def global_update(self, buffer: list[tuple[torch.Tensor, int]]) -> None:
        """The new model from the replies."""
        models, sizes = zip(*buffer, strict=True)
        SerializationTool.deserialize_model(self._model, Aggregators.fedavg_aggregate(models, sizes))


class Pipeline(StandalonePipeline):  # type: ignore[misc]
    """The pipeline, evaluated every few rounds."""

    every: int
    scores: Scores

    def evaluate(self) -> None:
        """Called after each round."""
        if self.handler.round % self.every == 0:
            self.scores = data.scores(self.handler.model)


def run(rounds: int, every: int) -> Scores:
    """Some rounds of it."""
    random.seed(asked.seed)  # the server's draw of devices
    trainer = Trainer(network(work), work.N)
    trainer.setup_dataset(Devices())
    trainer.setup_optim(1, BATCH, work.settings.lr)
    pipeline = Pipeline(Server(network(work), rounds, (K + 0.5) / work.N), trainer)
    pipeline.every = every
    pipeline.main()
    return pipeline.scores


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    measure(asked, run, version("fedlab"))
