"""The server: FOLB, or any other algorithm of folb, for a PyTorch CNN on MNIST."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from network import federation, images, network

from folb import algorithms
from folb.flower import FederatedStrategy, arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and save the model beside their record."""
    settings = context.run_config
    torch.manual_seed(settings["seed"])
    model, shared = network(), federation(settings["partitions"])
    some = slice(None, None, 20)  # of the training images: the loss of all of them would take longer than the round
    train = torch.as_tensor(images(shared, shared.train.x[some])), torch.as_tensor(shared.train.y[some]).long()
    test = torch.as_tensor(images(shared, shared.test.x)), torch.as_tensor(shared.test.y).long()

    @torch.no_grad()
    def evaluate(t: int, record: ArrayRecord) -> MetricRecord:
        model.load_state_dict(record.to_torch_state_dict())
        loss = torch.nn.functional.cross_entropy(model(train[0]), train[1])
        hits = model(test[0]).argmax(dim=1) == test[1]
        return MetricRecord({"accuracy": float(hits.float().mean()), "loss": float(loss)})

    directory = Path(str(settings["directory"]))
    strategy = FederatedStrategy(
        algorithms.ALGORITHMS[str(settings["algorithm"])](select={"K": settings["k"]}, local={"lr": settings["lr"]}),
        seed=settings["seed"],
        deadline=settings["deadline"],
        wait=settings["wait"],
        min_available_nodes=settings["min-available-nodes"],
        directory=directory,
        dataset="mnist",
        model="cnn",
    )
    result = strategy.start(grid, arrays(model), num_rounds=settings["rounds"], evaluate_fn=evaluate)
    torch.save(result.arrays.to_torch_state_dict(), directory / "model.pt")
