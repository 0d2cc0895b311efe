"""Three rounds, with an encoded model and encoded updates unless the run says otherwise."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from folb import algorithms, system
from folb.flower import FederatedStrategy, arrays

ROUNDS = 3

app = ServerApp()


def run(grid, directory, nodes=4, inputs=4, up="top_k", down="int8"):
    """Run them on so many nodes, and leave the model beside their record. Error feedback is as the codec has it."""
    keep = 0.2 if up == "top_k" else None
    codecs = {"compress_up": up or None, "compress_down": down or None, "compress_up.keep": keep}
    strategy = FederatedStrategy(
        algorithms.fedavg(select={"K": nodes, "replacement": False}, local={"lr": 0.1 / inputs}, **codecs),
        system=system.fixed(work=2),
        min_available_nodes=nodes,
        deadline=60.0,
        directory=directory,
    )
    start = {"weight": np.full((inputs, 3), 0.1, np.float32), "bias": np.zeros(3, np.float32)}
    model = {
        name: array.numpy() for name, array in strategy.start(grid, arrays(start), num_rounds=ROUNDS).arrays.items()
    }
    np.savez(directory / "model.npz", **model)
    return model


@app.main()
def main(grid, context):
    """The directory, the size of the model and the codecs are settings of the run."""
    settings = dict(context.run_config)
    run(grid, Path(settings.pop("directory")), **settings)
