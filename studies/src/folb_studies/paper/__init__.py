"""The paper, reproduced: experiment files, the runs of their arms, a verdict for each claim, and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from folb.data.source_files import MissingError
from folb.errors import InputError
from folb_studies.draws import Complete
from folb_studies.paper import arms, figure_files, verdicts
from folb_studies.paper.figure_files import Arm
from folb_studies.paper.pages import Page, write
from folb_studies.results import Results

__all__ = ["document", "execute_plan", "write"]


def execute_plan(
    names: Sequence[str],
    results: Results,
    quick: bool,
    complete: Complete,
    tell: Callable[[str], None],
    only: Sequence[str] = ("*",),
) -> None:
    """Run the arms that the figures have or use and that fit a pattern of `only`. The results go to `results`."""
    wanted: dict[str, Arm] = {}
    for name in names:
        figure = figure_files.read(name, quick)
        everything = [*figure.arms, *figure_files.used(figure, quick)]
        wanted |= {arm.slug: arm for arm in everything}
        for claim in figure.claims:
            if not quick:  # a quick try leaves arms out
                verdicts.check(claim, figure.matching(claim.arms, everything))
    arms.check(results, quick)
    known = list(wanted)
    wanted = {slug: arm for slug, arm in wanted.items() if any(fnmatchcase(slug, pattern) for pattern in only)}
    if not wanted:
        raise InputError("only", list(only), f"should fit one of {', '.join(known)}")
    missing: list[MissingError] = []
    for i, arm in enumerate(wanted.values(), start=1):
        try:
            document = arms.execute_plan(arm, complete)
        except MissingError as error:
            tell(f"{arm.slug} is left out ({i} of {len(wanted)}): {error}")
            missing.append(error)
            continue
        results.keep(arm.slug, document)
        tell(f"{arm.slug} is done ({i} of {len(wanted)})")
    if len(missing) == len(wanted):  # nothing to make pages from
        raise missing[0]


def outdated(names: Sequence[str], results: Results, quick: bool, name: str) -> str:
    """Why the stored results of an arm do not count, or ""."""
    for figure in names:
        for arm in figure_files.read(figure, quick).arms:
            if arm.slug == name:
                return arms.earlier(results, arm)
    return f"of no arm of {', '.join(names)}"


def document(pages: Sequence[Page], quick: bool) -> dict[str, Any]:
    """The verdicts as one JSON-ready document. The effects of ratios are logarithms."""
    return {
        "quick": quick,
        "claims": [
            {
                "figure": page.figure.name,
                "id": verdict.claim.id,
                "claim": verdict.claim.says,
                "verdict": verdict.word,
                "published": verdict.claim.published,
                "logarithmic": verdict.claim.metric in verdicts.RATIOS,
                "conditions": [
                    {
                        "condition": one.name,
                        "against": against,
                        "holds": one.holds,  # of the condition, against all of its opponents
                        "comparison": verdicts.comparison(verdict.claim, effect),  # of this one
                        "ours": one.ours,
                        **effect._asdict(),
                    }
                    for one in verdict.conditions
                    for against, effect in one.effects.items()
                ],
                "untested": list(verdict.untested),
                "unreached": list(verdict.unreached),
            }
            for page in pages
            for verdict in page.verdicts
        ],
    }
