"""The paper's theory: the constants of its assumptions, its bounds, and the comparison of rounds with them."""

from folb_studies.theory.audit import Audit, Played, audit
from folb_studies.theory.bounds import (
    Sides,
    corrected_psi,
    fedprox_bound,
    folb_bound,
    hetero_bound,
    lb_near_optimal_bound,
    lb_near_optimal_hetero_bound,
    mean_bound,
    psi,
    signed_bound,
    squares_lemma,
    sum_lemma,
    weights_bound,
)
from folb_studies.theory.constants import Constants, Point, curvature, estimate, objective, survey

__all__ = [
    "Audit",
    "Constants",
    "Played",
    "Point",
    "Sides",
    "audit",
    "corrected_psi",
    "curvature",
    "estimate",
    "fedprox_bound",
    "folb_bound",
    "hetero_bound",
    "lb_near_optimal_bound",
    "lb_near_optimal_hetero_bound",
    "mean_bound",
    "objective",
    "psi",
    "signed_bound",
    "squares_lemma",
    "sum_lemma",
    "survey",
    "weights_bound",
]
