"""Three rounds with an encoded model, and encoded updates with error feedback."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from folb import algorithms, system
from folb.flower import FederatedStrategy, arrays

ROUNDS = 3

app = ServerApp()


def run(grid, directory):
    """Run them, and leave the model beside their record."""
    strategy = FederatedStrategy(
        algorithms.fedavg(K=4, replacement=False, lr=0.1, compress_up="top_k", keep=0.2, compress_down="int8"),
        system=system.fixed(work=2),
        min_available_nodes=4,
        deadline=60.0,
        directory=directory,
    )
    start = {"weight": np.full((4, 3), 0.1, np.float32), "bias": np.zeros(3, np.float32)}
    model = {
        name: array.numpy() for name, array in strategy.start(grid, arrays(start), num_rounds=ROUNDS).arrays.items()
    }
    np.savez(directory / "model.npz", **model)
    return model


@app.main()
def main(grid, context):
    """The directory is a setting of the run."""
    run(grid, Path(context.run_config["directory"]))
