"""The equations cited in docstrings are the paper's, (1) to (18), and each has its function."""

import inspect
import re

import pytest

from folb import algorithms, guard, rules, system
from folb.core import round as core_round
from folb.core import samplings, selection
from folb.simulation import play, stacked, survey
from folb.simulation import solve as local
from folb_studies import theory
from folb_studies.theory import audit, bounds, constants

MODULES = (
    *(rules, guard, selection, core_round, system, algorithms, local, play, survey, stacked),
    *(audit, bounds, constants),
)

PAPER = {
    1: theory.objective,
    2: rules.Mean,
    3: local.solve,
    4: theory.mean_bound,
    5: rules.Signed,
    6: theory.signed_bound,
    7: samplings.lb_near_optimal,
    8: theory.lb_near_optimal_bound,
    9: rules.FolbTwoSet,
    10: rules.gradient_estimate,
    11: theory.squares_lemma,
    12: theory.sum_lemma,
    13: rules.Folb,
    14: theory.folb_bound,
    15: theory.hetero_bound,
    16: samplings.lb_near_optimal_hetero,
    17: theory.lb_near_optimal_hetero_bound,
    18: rules.FolbHetero,
}

ALSO = {  # more than one function stands for these
    rules.FolbNeverFlip: 18,
    algorithms.fedavg: 2,
    algorithms.fedprox: 3,
    algorithms.fednu_direct: 7,
    algorithms.fednu_norm: 7,
    algorithms.folb: 13,
    algorithms.folb_two_set: 9,
    algorithms.folb_hetero: 18,
    algorithms.folb_never_flip: 18,
}


def cited(documented):
    """The numbers in parentheses, in order; years and other numbers have more than two digits."""
    return [int(number) for number in re.findall(r"\((\d{1,2})\)", inspect.getdoc(documented) or "")]


def documented():
    """Every module, and every function and class it defines."""
    for module in MODULES:
        yield module
        for value in vars(module).values():
            if callable(value) and getattr(value, "__module__", None) == module.__name__:
                yield value


def test_the_citations_are_the_papers_list():
    assert list(PAPER) == list(range(1, 19))
    assert {number for value in documented() for number in cited(value)} == set(PAPER)


@pytest.mark.parametrize(("number", "function"), PAPER.items(), ids=lambda value: getattr(value, "__name__", value))
def test_each_equation_has_its_function(number, function):
    assert cited(function)[0] == number


def test_other_functions_cite_the_equation_they_are():
    assert {function: cited(function)[0] for function in ALSO} == ALSO


def test_every_algorithm_cites_its_equation_or_another_paper():
    for name, constructor in algorithms.ALGORITHMS.items():
        if name == "accord":  # our own: docs/accord.md has its formulas
            continue
        assert cited(constructor) or re.search(r"\(.+, 20\d\d\)", inspect.getdoc(constructor)), name
