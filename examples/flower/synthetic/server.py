"""The server: FOLB, or any other algorithm of folb, for the logistic model on Synthetic_1_1."""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from folb import algorithms, data
from folb.flower import FederatedStrategy, arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and save the model beside their record."""
    settings = context.run_config
    federation = data.load("synthetic_1_1", devices=settings["devices"])  # only for the evaluation
    train, test = federation.train, federation.test

    def evaluate(t: int, record: ArrayRecord) -> MetricRecord:
        weight, bias = record["weight"].numpy(), record["bias"].numpy()
        scores = train.x @ weight + bias
        scores -= scores.max(axis=1, keepdims=True)
        loss = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(train.y)), train.y]
        hits = (test.x @ weight + bias).argmax(axis=1) == test.y
        return MetricRecord({"accuracy": float(hits.mean()), "loss": float(loss.mean())})

    directory = Path(str(settings["directory"]))
    strategy = FederatedStrategy(
        algorithms.ALGORITHMS[str(settings["algorithm"])](select={"K": settings["k"]}, local={"lr": settings["lr"]}),
        seed=settings["seed"],
        deadline=settings["deadline"],
        wait=settings["wait"],
        min_available_nodes=settings["min-available-nodes"],
        directory=directory,
        dataset="synthetic_1_1",
        model="logistic",
    )
    model = {"weight": np.zeros((60, 10), np.float32), "bias": np.zeros(10, np.float32)}
    result = strategy.start(grid, arrays(model), num_rounds=settings["rounds"], evaluate_fn=evaluate)
    np.savez(directory / "model.npz", **{name: array.numpy() for name, array in result.arrays.items()})
