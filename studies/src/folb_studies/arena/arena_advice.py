"""Which algorithm to use, in a few sentences. Each follows from a stored comparison: its numbers and its words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from folb.results.effects import Effect
from folb_studies.arena import standings
from folb_studies.arena.standings import FINAL, OURS, RIVALS, Overall, Standings

WIDTH = 120


def advice(found: Standings) -> str:
    """The advice as a paragraph; "" if there is nothing that it could follow from."""
    return "\n".join(textwrap.wrap(" ".join(_sentences(found)), WIDTH, break_long_words=False, break_on_hyphens=False))


def _sentences(found: Standings) -> Iterator[str]:
    default = next((one for one in found.members([OURS]) if not one.tuned), None)
    if default is None or (whole := found.overall(default.name, RIVALS["classic"])) is None:
        return
    yield (
        f"`{default.name}`, untuned, needs {_words(whole.effect)} the best tuned of {_listed(found)}: "
        f"{standings.text(whole.effect)} times as many, over {len(whole.ratios)} datasets ({_span(whole)}; "
        "brackets are 95 % intervals)."
    )
    if (complete := sum(ratio.whole for ratio in whole.ratios)) < len(whole.ratios):
        yield f"Not all of them were run everywhere: on {complete} datasets they were."
    if published := found.overall(default.name, RIVALS["all published"]):
        yield f"Against the best tuned of all published algorithms: {standings.text(published.effect)} times as many."
    for measure, name in (("bytes", "bytes"), ("seconds", "simulated seconds")):
        if part := found.overall(default.name, RIVALS["classic"], measure):
            span = f" ({_span(part)})" if measure == "seconds" else ""
            yield f"To the target it needs {standings.text(part.effect)} times the {name}{span}."
    if accuracy := found.overall(default.name, RIVALS["all published"], FINAL):
        points = standings.text(accuracy.effect, FINAL)
        yield f"Its final accuracy minus that of the best published one: {points} points."
    if folb := found.overall("folb", RIVALS["classic"]):
        yield f"Tuned FOLB needs {standings.text(folb.effect)} times the rounds of the best one."


def _words(effect: Effect) -> str:
    if effect.low <= 0 <= effect.high:
        return "about as many rounds as"
    return f"{'fewer' if effect.high < 0 else 'more'} rounds than"


def _span(whole: Overall) -> str:
    least, most = (math.exp(bound(ratio.effect.value for ratio in whole.ratios)) for bound in (min, max))
    return f"from {least:.2f} to {most:.2f} on single datasets"


def _listed(found: Standings) -> str:
    """The classic contenders that were run anywhere."""
    there = {contender for _, contender in found.cells}
    titles = [one.title for one in found.members(RIVALS["classic"]) if one.name in there]
    return f"{', '.join(titles[:-1])} and {titles[-1]}" if len(titles) > 1 else "".join(titles)
