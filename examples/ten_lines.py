"""Compare three algorithms and draw their curves."""

from folb import algorithms, data, models, plot, simulate

federation = data.load("synthetic_1_1")
model = models.logistic(federation.shape, federation.classes)
contenders = [algorithms.folb(), algorithms.fedprox(local={"mu": 1.0}), algorithms.fedavg(rule={"weights": "samples"})]
runs = simulate(federation, model, contenders, rounds=100, seeds=range(3))
for run in runs:
    print(run.algorithm, run.seed, run.rounds_to(0.7), f"{run.final:.3f}", run.bytes_up.sum())
plot(runs, "curves.png", target=0.7)
