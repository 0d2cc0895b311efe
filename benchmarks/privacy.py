"""What privacy costs: accuracy at each epsilon, compared with Flower's own private FedAvg, and the time of a round.

`study`: accuracy against epsilon on MNIST and FEMNIST, for FedAvg, accord and FOLB with a sketch, 5 seeds each, all
with Poisson draws, an adaptive clip and noise of the server. The results go to docs/privacy/accuracy.json, one part
after the other, so that an interrupted study can be resumed; then it draws docs/privacy/accuracy.png.
`flower`: Flower's DifferentialPrivacyServerSideFixedClipping around its FedAvg, and FedAvg of folb with the same noise,
clip and draws, both on an in-process grid or in the simulator. It prints both, and writes docs/privacy/flower.json.
`cost`: private rounds and plain ones take turns on the same work. It prints a table, and writes
docs/benchmarks/privacy.json. The goal: at most 1.2 times.
`seed`: what someone learns from the seed, the settings and the model after a round, with `replay` and without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import jax
import numpy as np
from growth import HERE, federation, parameters, takes_turns, write

from folb import algorithms, data, models, simulate, system
from folb.core import accountant, privacy, randomness
from folb.core.vector import flat
from folb.report import figures
from folb.report.looks import ALGORITHMS, COLOURS, DASHES
from folb.simulation.problem import problem

DOCS = HERE.parent / "privacy"
EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA, SEEDS = 1e-5, range(1, 6)  # settings were chosen with seed 0
# the devices, K, rounds, mini-batch steps of 10 on each device, and the step size of FedAvg and FOLB
DATASETS: dict[str, dict[str, Any]] = {
    "mnist": {"title": "MNIST, 1,000 devices", "settings": {}, "K": 50, "rounds": 40, "work": 10, "lr": 0.03},
    "femnist": {
        **{"title": "FEMNIST, 367 devices", "settings": {"devices": 367}},
        **{"K": 50, "rounds": 30, "work": 5, "lr": 0.01},
    },
}
TITLES = {"fedavg": "FedAvg", "accord": "accord", "folb": "FOLB, sketch"}


def contender(name: str, about: dict[str, Any], epsilon: float | None) -> Any:
    """An algorithm of the study; without a budget it is not private."""
    given: dict[str, Any] = {"select.K": about["K"], "select": "poisson"}
    if name != "accord":
        given["local.lr"] = about["lr"]
    if name == "folb":
        given["gradient"] = "sketch"
    if epsilon is not None:
        given |= {
            "privacy": "central",
            "privacy.epsilon": epsilon,
            "privacy.delta": DELTA,
            "privacy.clip": 0.3,
            "privacy.clip_quantile": 0.5,
        }
    return algorithms.ALGORITHMS[name](**given)


def study(out: Path, wanted: list[str]) -> None:
    """Run the parts that have no results yet, and draw the picture."""
    path = out / "accuracy.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for dataset in wanted:
        about = DATASETS[dataset]
        there = data.load(dataset, **about["settings"])
        model = models.logistic(there.shape, there.classes)
        for name in TITLES:
            key = f"{dataset} {name}"
            if key in found:
                continue
            contenders = [contender(name, about, epsilon) for epsilon in (*EPSILONS, None)]
            rounds = about["rounds"]
            work = system.fixed(work=about["work"])
            runs = simulate(
                there,
                model,
                contenders,
                rounds=rounds,
                seeds=SEEDS,
                system=work,
                evaluate_every=rounds,
                observe="progress",
            )
            groups = [runs[i * len(SEEDS) : (i + 1) * len(SEEDS)] for i in range(len(contenders))]
            found[key] = {
                "N": there.N,
                **{key: about[key] for key in ("K", "rounds", "work")},
                "lr": None if name == "accord" else about["lr"],  # it sets its own
                "delta": DELTA,
                "accuracy": {
                    "none" if group[0].epsilon is None else f"{epsilon:g}": [round(run.final, 4) for run in group]
                    for epsilon, group in zip((*EPSILONS, 0), groups, strict=True)
                },
                "spent": [round(group[0].epsilon or 0.0, 3) for group in groups[:-1]],
            }
            write(path, found)
            print(key, {e: f"{100 * mean(values):.1f}" for e, values in found[key]["accuracy"].items()}, flush=True)
    (out / "accuracy.png").write_bytes(picture(found))


def picture(found: dict[str, Any]) -> bytes:
    """A panel for each dataset: the mean and the range over the seeds, at each epsilon and without privacy."""
    datasets = [name for name in DATASETS if any(key.startswith(f"{name} ") for key in found)]
    figure, panels = figures.subplots(1, len(datasets), figsize=(5.2 * len(datasets), 3.8), squeeze=False)
    for dataset, axes in zip(datasets, panels[0], strict=True):
        for name, title in TITLES.items():
            if f"{dataset} {name}" not in found:
                continue
            accuracy = found[f"{dataset} {name}"]["accuracy"]
            values = [np.array(own) * 100 for own in accuracy.values()]
            colour, dash = ALGORITHMS[name]
            middle = [own.mean() for own in values]
            spread = [[m - own.min() for m, own in zip(middle, values, strict=True)]]
            spread += [[own.max() - m for m, own in zip(middle, values, strict=True)]]
            line = axes.errorbar(range(len(values)), middle, spread, color=COLOURS[colour], label=title, capsize=3)
            if DASHES[dash]:
                line[0].set_dashes(DASHES[dash])
        axes.set_xticks(range(len(accuracy)), list(accuracy))
        axes.set_xlabel(f"epsilon (delta {DELTA:g})")
        axes.set_ylabel("test accuracy (%)")
        axes.set_title(DATASETS[dataset]["title"], fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0][0].legend(frameon=False, fontsize="small")
    return figures.small(figures.finished(figure, "Accuracy against epsilon, mean and range of 5 seeds", "", "png"))


FLOWER = {"K": 100, "rounds": 40, "clip": 0.3, "lr": 0.03, "epsilon": 8.0, "steps": 10, "batch": 10}


def flower(out: Path) -> None:
    """Flower's private FedAvg and ours: the same data, model, work, noise, clip, and draws without replacement."""
    there = data.load("mnist")
    model = models.logistic(there.shape, there.classes)
    K, rounds, clip, lr = FLOWER["K"], FLOWER["rounds"], FLOWER["clip"], FLOWER["lr"]
    noise = accountant.noise_for(FLOWER["epsilon"], DELTA, "fixed", int(K), there.N, int(rounds))
    ours = algorithms.fedavg(
        select={"K": int(K), "replacement": False},
        local={"lr": lr, "batch": int(FLOWER["batch"])},
        privacy={"name": "central", "noise": noise, "clip": clip},
    )
    work = system.fixed(work=int(FLOWER["steps"]))
    runs = simulate(there, model, ours, rounds=int(rounds), seeds=SEEDS, system=work, evaluate_every=int(rounds))
    mine = [round(run.final, 4) for run in runs]
    theirs = [round(_flower(there, model, noise, seed), 4) for seed in SEEDS]
    found = {"setting": FLOWER, "noise": noise, "folb": mine, "flower": theirs}
    write(out / "flower.json", found)
    for name, values in (("folb", mine), ("Flower", theirs)):
        print(f"{name}: {100 * mean(values):.1f} ± {100 * stdev(values):.1f} %")


def _flower(there: Any, model: Any, noise: float, seed: int) -> float:
    """The accuracy of Flower's strategy after the rounds, on a grid within the process."""
    import logging
    import random

    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from inprocess import InProcessGrid  # type: ignore[import-not-found]

    logging.getLogger("flwr").setLevel(logging.ERROR)
    random.seed(seed)
    np.random.seed(seed)
    x, seen = (
        np.asarray(there.expand(there.table, side.x), np.float32).reshape(len(side.y), -1)
        for side in (there.train, there.test)
    )
    y, start, size = there.train.y, there.train.start, there.train.size
    generator = np.random.default_rng(seed)

    def app(k: int) -> ClientApp:
        rows = np.arange(start[k], start[k] + size[k])
        made = ClientApp()

        @made.train()
        def train(message: Message, context: Context) -> Message:
            w = {name: array.numpy().copy() for name, array in message.content.array_records["arrays"].items()}
            for _ in range(int(FLOWER["steps"])):
                some = generator.choice(rows, min(int(FLOWER["batch"]), len(rows)), replace=False)
                features = x[some]
                z = features @ w["weight"] + w["bias"]
                p = np.exp(z - z.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                p[np.arange(len(some)), y[some]] -= 1
                p /= len(some)
                w["weight"] -= np.float32(FLOWER["lr"]) * (features.T @ p)
                w["bias"] -= np.float32(FLOWER["lr"]) * p.sum(axis=0)
            sent = ArrayRecord({name: Array(value.astype(np.float32)) for name, value in w.items()})
            # by equal weights: its noise is for the mean of K updates
            return Message(RecordDict({"arrays": sent, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

        return made

    K, N = int(FLOWER["K"]), there.N
    plain = FedAvg(
        fraction_train=K / N, fraction_evaluate=0.0, min_train_nodes=K, min_available_nodes=N, min_evaluate_nodes=0
    )
    private = DifferentialPrivacyServerSideFixedClipping(plain, noise, FLOWER["clip"], K)
    begun = model.init(jax.random.key(seed))
    first = ArrayRecord({name: Array(np.asarray(begun[name])) for name in ("weight", "bias")})
    result = private.start(
        InProcessGrid([app(k) for k in range(N)], seed=seed), first, num_rounds=int(FLOWER["rounds"])
    )
    w = {name: array.numpy() for name, array in result.arrays.items()}
    return float(np.mean((seen @ w["weight"] + w["bias"]).argmax(axis=1) == there.test.y))


GOAL, TURNS = 1.2, 5
OWN: dict[str, Any] = {"privacy": "central", "privacy.noise": 1.0}


def cost(out: Path) -> None:
    """Private rounds and plain ones in turns: 20 mini-batch steps of 10 on each of K devices of 1,000."""
    if jax.default_backend() == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    there, found = federation(1000), []
    pairs: dict[str, tuple[Any, Any]] = {}
    for K in (10, 50):
        fixed: dict[str, Any] = {"select.K": K, "select.replacement": False}
        pairs |= {
            f"FedAvg, K={K}": (algorithms.fedavg(**fixed), algorithms.fedavg(**fixed, **OWN)),
            f"FedAvg, adaptive clip, K={K}": (
                algorithms.fedavg(**fixed),
                algorithms.fedavg(**fixed, **OWN, **{"privacy.clip_quantile": 0.5}),
            ),
            f"FedAvg, distributed, K={K}": (
                algorithms.fedavg(**fixed),
                algorithms.fedavg(**fixed, **OWN | {"privacy": "distributed"}),
            ),
            f"accord, K={K}": (
                algorithms.accord(**fixed, select="uniform"),
                algorithms.accord(**fixed, select="uniform", **OWN),
            ),
            f"FOLB, sketch, K={K}": (
                algorithms.folb(**fixed, gradient="sketch"),
                algorithms.folb(**fixed, gradient="sketch", **OWN),
            ),
            f"FedAvg, Poisson draws, K={K}": (
                algorithms.fedavg(select={"name": "poisson", "K": K}),
                algorithms.fedavg(select={"name": "poisson", "K": K}, **OWN),
            ),
        }
    model = models.logistic((60,), 10)
    shared = problem(there, model, system=system.fixed(work=20))
    print(f"{parameters(model)} parameters")
    print(f"{'':32}{'plain, ms':>11}{'private, ms':>13}{'ratio':>22}")
    for name, (plain, private) in pairs.items():
        theirs, ours = takes_turns(shared, plain, 100), takes_turns(shared, private, 100)
        times = [(theirs(), ours()) for _ in range(TURNS)]
        ratios = [own / other for other, own in times]
        middle = [round(median(values), 3) for values in zip(*times, strict=True)]
        told = [round(value, 3) for value in (median(ratios), min(ratios), max(ratios))]
        found.append([name, *middle, *told])
        ratio = "{:.2f} ({:.2f} .. {:.2f})".format(*told)
        print(f"{name:32}{middle[0]:11.2f}{middle[1]:13.2f}{ratio:>22}", flush=True)
    print(f"the largest median ratio is {max(row[3] for row in found):.2f}; the goal is at most {GOAL:g}")
    title = "work, ms a plain round, ms a private round, their ratio, its least and greatest"
    write(out / "privacy.json", {"device": jax.devices()[0].device_kind, "turns": TURNS, title: found})


def seed() -> None:
    """Subtract the noise that follows from the seed from the model after round 1, and compare with the true update."""
    there = data.load("synthetic_1_1", devices=1000, sizes=[20] * 1000)
    model, K = models.logistic(there.shape, there.classes), 50
    start = model.init(jax.random.key(0))
    noise = privacy.normals({"delta": start}, randomness.words(0, 1, randomness.NOISE, 2))["delta"]

    def updates(noise_of: float, replay: bool) -> tuple[Any, Any]:
        """The update of the round with its noise, and without the noise that follows from the seed."""
        made = algorithms.fedavg(
            select={"K": K, "replacement": False},
            local={"lr": 0.001},
            privacy={"name": "central", "noise": noise_of, "replay": replay},
        )
        [run] = simulate(there, model, made, rounds=1)
        seen = flat({name: run.params[name] - start[name] for name in start})
        return seen, seen - flat(noise) * (noise_of / K)

    true = updates(1e-6, True)[1]  # the least noise that is allowed, and this is subtracted, too
    for replay in (True, False):
        seen, guess = updates(1.0, replay)
        lengths = [float(np.linalg.norm(value)) for value in (true, seen - true, guess - true)]
        print("replay={}: update {:.3f} long, noise {:.3f}, error of the guess {:.1e}".format(replay, *lengths))


def main() -> None:
    """Run one of the four."""
    parser = argparse.ArgumentParser(description="What privacy costs.")
    parser.add_argument("what", choices=("study", "flower", "cost", "seed"))
    parser.add_argument("--datasets", default=",".join(DATASETS), help="of the study")
    parser.add_argument("--out", type=Path, help="docs/privacy, or docs/benchmarks for the cost")
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.out or HERE)
        return
    if options.what == "seed":
        seed()
        return
    out = options.out or DOCS
    out.mkdir(parents=True, exist_ok=True)
    if options.what == "study":
        study(out, options.datasets.split(","))
    else:
        flower(out)


if __name__ == "__main__":
    main()
