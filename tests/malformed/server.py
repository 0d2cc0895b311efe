"""So many rounds that every kind of malformed reply comes in."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp
from kinds import SHAPES, spoilers

from folb import algorithms, system
from folb.flower import FederatedStrategy, arrays

app = ServerApp()


@app.main()
def main(grid, context):
    """Run them, and leave the model beside their record."""
    directory, codec = Path(context.run_config["directory"]), context.run_config["codec"]
    strategy = FederatedStrategy(
        algorithms.folb_hetero(select={"K": 4, "replacement": False}, local={"lr": 0.1}, compress_up=codec or None),
        system=system.fixed(work=2),
        min_available_nodes=4,
        min_replies=1,  # the honest one is enough
        deadline=60.0,
        directory=directory,
    )
    start = {name: np.full(shape, 0.1, np.float32) for name, shape in SHAPES.items()}
    result = strategy.start(grid, arrays(start), num_rounds=-(-len(spoilers(codec)) // 3))
    np.savez(directory / "model.npz", **{name: array.numpy() for name, array in result.arrays.items()})
