"""The paper's theory in numbers: each check gives values for its cases, and the draw of the data for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from folb import data, models
from folb.core import algorithms
from folb.data.federation import Federation
from folb.simulation.play import play, start
from folb.simulation.problem import problem as brought
from folb.typing import NDArray
from folb_studies import theory
from folb_studies.paper import quadratics

Found = dict[str, Any]


def theorem_1(cases: int) -> Found:
    """Random quadratics in which (4), (6) and (8) are false.

    Three fifths are at random, one fifth has devices against each other, and one is exact.
    """
    fifth = cases // 5
    with jax.enable_x64(True):
        tried = quadratics.cases(0, cases - 2 * fifth) + quadratics.cases(1, fifth, against=True)
        return _cases(quadratics.theorem_1(tried + quadratics.cases(2, fifth, exact=True)))


def theorem_2(cases: int) -> Found:
    """Random quadratics in which the rule (9) does not attain (8)."""
    with jax.enable_x64(True):
        tried = quadratics.cases(9, cases, exact=True, scale=2.0, spread=3.0)
        return _cases({"(9) attains (8)": quadratics.theorem_2(tried)})


def one_set(cases: int) -> Found:
    """Random quadratics in which (14) is false."""
    with jax.enable_x64(True):
        return _cases(quadratics.one_set(quadratics.cases(10, cases, exact=True)))


def theorem_3(cases: int) -> Found:
    """Random quadratics in which (15) is false, by the range of mu."""
    with jax.enable_x64(True):
        counts = quadratics.theorem_3(11, cases)
    false = {name: by_psi["printed"] for name, by_psi in counts.items()}
    after, printed, _ = quadratics.large_K()  # a case made for it: mu = 0.75, K = 10
    middle = "1/K < mu <= 1"
    return _cases(false | {middle: np.append(false[middle], after > printed)})


def near_optimal(cases: int) -> Found:
    """The share of the possible gain from selection that (7) reaches."""
    with jax.enable_x64(True):
        return _cases({"(7)": quadratics.near_optimal(14, cases)})


def hetero_selection(cases: int) -> Found:
    """Random quadratics in which (17) is false with the printed psi."""
    with jax.enable_x64(True):
        return _cases({"(17)": quadratics.hetero_selection(quadratics.cases(13, cases)).printed})


def against_fedprox(cases: int) -> Found:
    """Random quadratics in which (8) is not the smaller of the two bounds that Sec. III-C compares."""
    with jax.enable_x64(True):
        compared = quadratics.against_fedprox(15, cases)
    objectives = {"uniform": "f the mean of all F_k", "p_k": "f with weights p_k"}
    return _cases(
        {f"{objectives[name]}, K = {k}": false for name, one in compared.items() for k, false in one.larger.items()}
    )


def _cases(values: dict[str, NDArray]) -> Found:
    """Every case is a draw of its own."""
    return {
        "values": {name: np.round(rates.astype(float), 5).tolist() for name, rates in values.items()},
        "draws": {},
    }


def lemma_1(dataset: str, draws: int = 10, steps: int = 50, K: int = 10) -> Found:
    """Left side / right side of (11) and (12) for a dataset's devices along gradient descent, for each draw.

    It is the geometric mean over the steps. A second value tells whether (12) is false at any of them.
    """
    squares, sums, false = [], [], []
    for draw in range(draws):
        federation = data.load(dataset, sizes="published", draw=draw)
        w = np.zeros(610)
        sides = []
        for _ in range(steps + 1):
            g = logistic_gradients(federation, w)
            sides.append((theory.squares_lemma(g @ g.T, K), theory.sum_lemma(g @ g.T, K)))
            w = w - 0.5 * g.mean(axis=0)
        logs = np.log(sides)  # [steps, 2 statements, 2 sides]
        ratios = logs[..., 0] - logs[..., 1]
        squares.append(float(np.exp(ratios[:, 0].mean())))
        sums.append(float(np.exp(ratios[:, 1].mean())))
        false.append(float(ratios[:, 1].max() > 0))
    values = {"(11) left/right": squares, "(12) left/right": sums, "(12)": false}
    return {"values": {name: np.round(numbers, 5).tolist() for name, numbers in values.items()}, "draws": {}}


def logistic_gradients(federation: Federation, w: NDArray) -> NDArray:
    """grad F_k of multinomial logistic regression on the synthetic data, [N, 61 x 10]."""
    train, rows = federation.train, []
    W = w.reshape(61, 10)
    for first, size in zip(train.start, train.size, strict=True):
        x = np.column_stack([train.x[first : first + size], np.ones(size)])
        z = x @ W
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(size), train.y[first : first + size]] -= 1
        rows.append((x.T @ p / size).ravel())
    return np.array(rows)


def correlation(
    dataset: str, draws: int = 10, rounds: int = 30, seeds: int = 10, mu: float = 1.0, unit: Any = "epoch"
) -> Found:
    """Spearman's correlation of the decrease that (4) promises for a round with the real decrease of f.

    "over rounds": along a run of FedProx, a point for each round, the mean over `seeds` selections from the same w^t.
    "over selections": at each w^t over the selections, then the mean over the rounds.
    """
    algorithm = algorithms.fedprox(local={"mu": mu, "lr": 0.01, "unit": unit})
    model, step = None, jax.jit(play)
    over_rounds, over_selections = [], []
    for draw in range(draws):
        federation = data.load(dataset, sizes="published", draw=draw)
        model = model or models.logistic(federation.shape, federation.classes)
        problem = brought(federation, model)
        state = start(problem, algorithm, 0)
        promised, decrease, within = [], [], []
        for t in range(1, rounds + 1):
            constants = theory.estimate(problem, state.params, 20)
            audit = theory.audit(problem, algorithm, state.params, seeds=range(seeds), t=t, constants=constants)
            promised.append(audit.promised)
            decrease.append(audit.decrease)
            within.append(spearman(-audit.bound, -audit.after))
            state, _ = step(problem, algorithm, state, 0, t)
        over_rounds.append(spearman(np.array(promised), np.array(decrease)))
        over_selections.append(float(np.mean(within)))
    values = {"over rounds": over_rounds, "over selections": over_selections}
    return {"values": {name: np.round(audit, 5).tolist() for name, audit in values.items()}, "draws": {}}


def spearman(x: NDArray, y: NDArray) -> float:
    """The correlation of the ranks; 0 if one side is constant."""
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    if len(np.unique(x)) == 1 or len(np.unique(y)) == 1:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


CHECKS: dict[str, Callable[..., Found]] = {
    make.__name__: make
    for make in (
        theorem_1,
        theorem_2,
        one_set,
        theorem_3,
        near_optimal,
        hetero_selection,
        against_fedprox,
        lemma_1,
        correlation,
    )
}
