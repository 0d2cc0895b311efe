"""The work on Apple's pfl: FederatedAveraging and SCAFFOLD on its simulated backend, with PyTorch, in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from in_torch import Tensors, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightingStrategy
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy
from work import BATCH, K, Scores, measure, shuffled_rows, task

asked = task()
work, data = asked.work, Tensors(asked.work)


class Network(torch.nn.Module):  # type: ignore[misc]
    """The network with the two methods that pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = network(work)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, for its gradient."""
        return cross_entropy(self.scores(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, wanted: str = "") -> dict[str, Any]:
        """The wanted metric of a block of the evaluation: pfl adds the blocks up.

        In the first round pfl also evaluates every device, which no other library does: there, no metric is wanted.
        """
        if not wanted:
            return {"nothing": Weighted(0, 1)}
        with torch.no_grad():
            scores = self.scores(x)
        if wanted == "loss":
            return {wanted: Weighted(float(cross_entropy(scores, y, reduction="sum")), len(y))}
        return {wanted: Weighted(int((scores.argmax(1) == y).sum()), len(y))}


class Model(PyTorchModel):  # type: ignore[misc]
    """pfl's network, with SCAFFOLD's local steps as in the paper.

    pfl's updates are w_k - w, so its c_k and c have the sign opposite to the paper's. But its steps are g - c_k + c,
    too, and training diverges. With c_k and c exchanged, its steps are the paper's, at the same cost.
    """

    def do_multiple_epochs_of(self, *given: Any, **more: Any) -> Any:
        """The local steps of a device."""
        if work.name == "scaffold":
            more["local_c"], more["server_c"] = more["server_c"], more["local_c"]
        return super().do_multiple_epochs_of(*given, **more)


class BySamples(WeightingStrategy):  # type: ignore[misc]
    """A device's weight is the number of its samples, not of those that it was given for a round."""

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> tuple[Any, Metrics]:
        """Weight a device's update."""
        stats.reweight(int(work.size[user_context.user_id]))
        return stats, Metrics()


class Evaluation(TrainingProcessCallback):  # type: ignore[misc]
    """pfl's own evaluation callback looks at the model before the first round, and not after the last."""

    scores: Scores

    def __init__(self, every: int) -> None:
        self.every = every
        self.params = NNEvalHyperParams(local_batch_size=work.block)
        self.train = PyTorchTensorDataset((data.x, data.y), eval_kwargs={"wanted": "loss"})
        self.test = PyTorchTensorDataset((data.x_test, data.y_test), eval_kwargs={"wanted": "accuracy"})

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Called after each round."""
        if (central_iteration + 1) % self.every == 0:
            loss = model.evaluate(self.train, eval_params=self.params)[StringMetricName("loss")]
            accuracy = model.evaluate(self.test, eval_params=self.params)[StringMetricName("accuracy")]
            self.scores = Scores(loss.overall_value, accuracy.overall_value)
        return False, Metrics()


def run(rounds: int, every: int) -> Scores:
    """Some rounds of it."""
    rng = np.random.default_rng(asked.seed)

    def cohorts() -> Iterator[int]:
        while True:
            yield from (int(k) for k in rng.choice(work.N, K, replace=False))

    def device(k: int) -> PyTorchTensorDataset:
        """pfl makes at most one pass over what it is given: the round's batches, already shuffled."""
        rows = torch.from_numpy(shuffled_rows(rng, work, k).reshape(-1))
        return PyTorchTensorDataset((data.x[rows], data.y[rows]), user_id=k)

    module, evaluation = Network(), Evaluation(every)
    numbers: dict[str, Any] = {
        "central_num_iterations": rounds,
        "evaluation_frequency": rounds + 1,
        "train_cohort_size": K,
        "val_cohort_size": 0,
    }
    if work.name == "scaffold":
        numbers |= {"population": work.N, "use_gradient_as_control_variate": False}
        params = SCAFFOLDParams(**numbers, user_state_storage=InMemoryUserStateStorage())
        algorithm, weighting = SCAFFOLD(), []
        amount = {"local_num_epochs": 1, "local_num_steps": None}  # it counts passes only: one has all the batches
    else:
        algorithm, params, weighting = FederatedAveraging(), NNAlgorithmParams(**numbers), [BySamples()]
        amount = {"local_num_epochs": None, "local_num_steps": work.settings.steps}
    algorithm.run(
        algorithm_params=params,
        backend=SimulatedBackend(
            training_data=FederatedDataset(device, cohorts().__next__), val_data=None, postprocessors=weighting
        ),
        model=Model(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            **amount,
            local_learning_rate=work.settings.lr,
            local_batch_size=BATCH,
        ),
        callbacks=[evaluation],
        send_metrics_to_platform=False,
    )
    return evaluation.scores


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    measure(asked, run, version("pfl"))
