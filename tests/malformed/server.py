"""So many rounds that every kind of malformed reply comes in."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp
from kinds import KINDS, SHAPES

from folb import algorithms, system
from folb.flower import FederatedStrategy, arrays

app = ServerApp()


@app.main()
def main(grid, context):
    """Run them, and leave the model beside their record."""
    directory = Path(context.run_config["directory"])
    strategy = FederatedStrategy(
        algorithms.folb_hetero(K=4, replacement=False, lr=0.1),
        system=system.fixed(work=2),
        min_available_nodes=4,
        deadline=60.0,
        directory=directory,
    )
    start = {name: np.full(shape, 0.1, np.float32) for name, shape in SHAPES.items()}
    result = strategy.start(grid, arrays(start), num_rounds=-(-len(KINDS) // 3))
    np.savez(directory / "model.npz", **{name: array.numpy() for name, array in result.arrays.items()})
