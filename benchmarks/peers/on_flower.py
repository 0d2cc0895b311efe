"""The work on Flower's simulation runtime: its FedAvg strategy, one virtual node for each device, Ray beneath."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

# before Flower and Ray are imported
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import numpy as np
import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from in_torch import Tensors, loaded, network
from torch.nn.functional import cross_entropy
from work import K, Scores, measure, shuffled_rows, task

asked = task()
name, path, seed = asked.work.name, asked.path, asked.seed
device, server = ClientApp(), ServerApp()


@device.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """A device's part of a round."""
    work, data, model = loaded(name, path)
    k, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=work.settings.lr)
    for batch in torch.from_numpy(shuffled_rows(np.random.default_rng([seed, t, k]), work, k)):
        optimiser.zero_grad()
        cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": int(work.size[k])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def cpu() -> float:
    """CPU seconds of this process and of Ray's."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(t.user + t.system for t in times)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """The server: Ray keeps running between the warm-up and the measured rounds."""
    work, data, model = asked.work, Tensors(asked.work), network(asked.work)
    initial = ArrayRecord(model.state_dict())

    def run(rounds: int, every: int) -> Scores:
        scores = []

        def evaluate(t: int, arrays: ArrayRecord) -> None:
            if t > 0 and t % every == 0:
                model.load_state_dict(arrays.to_torch_state_dict())
                scores.append(data.scores(model))

        strategy = FedAvg(fraction_train=(K + 0.5) / work.N, fraction_evaluate=0.0, min_available_nodes=work.N)
        strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
        return scores[-1]

    measure(asked, run, version("flwr"), cpu=cpu)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    cores = len(os.sched_getaffinity(0))
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "log_to_driver": False},
    }
    run_simulation(server, device, num_supernodes=asked.work.N, backend_config=backend)
