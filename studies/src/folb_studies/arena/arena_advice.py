"""Which algorithm to use, in a few sentences, and what to know of the numbers.

Each sentence follows from a stored comparison: its numbers and its words.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from statistics import mean

from folb.results.effects import Effect
from folb_studies.arena import contest, standings
from folb_studies.arena.entries import Contender
from folb_studies.arena.standings import ABLATION, FINAL, OURS, RIVALS, Overall, Standings

WIDTH = 120
HIGHER = 0.99  # of what the best published one ends with: another target, to see what the target does
PUBLISHED = RIVALS["all published"]


def advice(found: Standings) -> str:
    """The advice as a paragraph; "" if there is nothing that it could follow from."""
    return "\n".join(textwrap.wrap(" ".join(_sentences(found)), WIDTH, break_long_words=False, break_on_hyphens=False))


def _sentences(found: Standings) -> Iterator[str]:
    default = _default(found)
    if default is None or (whole := found.overall(default.name, PUBLISHED)) is None:
        return
    n = len(whole.ratios)
    likely = whole.elsewhere if n > 1 else whole.effect
    where = f"over {n} datasets, and {{}} times over others like them" if n > 1 else "over one dataset, {}"
    yield (
        f"`{default.name}`, untuned, needs {_words(likely)} the best tuned of {len(_rivals(found))} published "
        f"algorithms: {_times(whole.effect)} times as many {where.format(_range(likely))} (95 %)."
    )
    if (complete := sum(ratio.whole for ratio in whole.ratios)) < n:
        yield f"Not all of them were run everywhere: on {complete} datasets they were."
    if likely.high < 0 and (gone := list(_gone(found, default))):
        listed = f"{', '.join(gone[:-1])}, and {gone[-1]}" if len(gone) > 1 else gone[0]
        yield f"This advantage is gone {listed}."


def _gone(found: Standings, default: Contender) -> Iterator[str]:
    """Where the default no longer needs less than the best published one."""
    uniform = _uniform(found, default)
    conditions = (
        (uniform and found.overall(uniform.name, PUBLISHED), "with the uniform draw that {drawn} of them have"),
        (found.overall(default.name, PUBLISHED, "seconds"), "in simulated seconds"),
        (found.higher(default.name, PUBLISHED, HIGHER), "at {share:g} % of the best final accuracy"),
    )
    for whole, when in conditions:
        if whole and (whole.elsewhere if len(whole.ratios) > 1 else whole.effect).high >= 0:
            yield f"{when.format(drawn=_drawn(found), share=100 * HIGHER)} ({_times(whole.effect)} times)"


def to_know(found: Standings) -> Iterator[str]:
    """What a reader should know before quoting a number, as the lines of a list."""
    notes: dict[str, list[str]] = {}
    for one in found.contenders:
        if one.note:
            notes.setdefault(one.note, []).append(f"{one.title} (`{one.name}`)")
    if notes:
        yield f"- **Not equal.** {' '.join(f'{_and(titles)}: {note}.' for note, titles in notes.items())}"
    default = _default(found)
    if default is not None:
        yield from _of_ours(found, default)
    against = {name: found.overall("folb", RIVALS[name]) for name in ("classic", "all published")}
    if (classic := against["classic"]) and (published := against["all published"]):
        yield (
            f"- **FOLB,** tuned, needs {standings.text(classic.effect)} times the rounds of the best classic one, and "
            f"{standings.text(published.effect)} times those of the best of all published."
        )


def _of_ours(found: Standings, default: Contender) -> Iterator[str]:
    uniform = _uniform(found, default)
    if uniform is not None and found.overall(uniform.name, PUBLISHED):
        wholes = {name: found.overall(uniform.name, RIVALS[name]) for name in ("classic", "averaged", "all published")}
        ratios = [f"{standings.text(whole.effect)} ({name})" for name, whole in wholes.items() if whole]
        yield (
            f"- **The draw.** {_drawn(found)} of {len(_rivals(found))} published contenders draw devices uniformly, "
            f"`{default.name}` by their samples. With the uniform draw (`{uniform.name}`) it needs these times the "
            f"rounds of the best: {_and(ratios)}."
        )
    overall = {name: found.overall(default.name, RIVALS[name]) for name in ("classic", "all published")}
    known = {name: whole for name, whole in overall.items() if whole and len(whole.ratios) > 1}
    if known:
        many = _and([f"{standings.text(whole.elsewhere)} ({name})" for name, whole in known.items()])
        alone = _and([f"{_range(whole.single)} ({name})" for name, whole in known.items()])
        yield (
            "- **Other datasets.** The intervals over datasets in the tables are for these alone. Over others, "
            f"of which these are a sample (Student's interval of their ratios), `{default.name}` needs these times the "
            f"rounds of the best: {many}. This is a mean over many. On one more dataset: {alone}."
        )
    yield from _of_the_target(found, default)


def _of_the_target(found: Standings, default: Contender) -> Iterator[str]:
    """How low the target is, and the ratio at a higher one."""
    whole = found.higher(default.name, PUBLISHED, HIGHER)
    if whole is None:
        return
    gaps = []
    for dataset in found.present:
        rival, _ = found.best(dataset.name, PUBLISHED, FINAL)
        if rival is not None:
            cell = found.cells[dataset.name, rival]
            ends = mean(standings.measured(cell, FINAL).values())
            gaps.append((ends, mean(cell["target"]["reported"].values()), dataset.title))
    ends, target, title = max(gaps, key=lambda gap: gap[0] - gap[1])
    yield (
        f"- **The target** is {100 * contest.SHARE:g} % of what FedAvg ends with, so low where FedAvg is bad. On "
        f"{title} it is {100 * target:.1f} %, where the best published one ends with {100 * ends:.1f} %. At "
        f"{100 * HIGHER:g} % of what the best published one ends with, `{default.name}` needs {_times(whole.effect)} "
        f"times the rounds of the fastest published one ({_span(whole)}). This is from the median accuracy in each "
        "round, and nobody was tuned for it."
    )


def _default(found: Standings) -> Contender | None:
    """Ours with its defaults."""
    return next((one for one in found.members([OURS]) if not one.tuned), None)


def _uniform(found: Standings, default: Contender) -> Contender | None:
    """The default with the uniform draw, and no other difference."""
    wanted = {**default.set, "sampling": "uniform"}
    return next(
        (one for one in found.members([ABLATION]) if one.algorithm == default.algorithm and one.set == wanted), None
    )


def _rivals(found: Standings) -> list[Contender]:
    """The published contenders that were run anywhere."""
    there = {contender for _, contender in found.cells}
    return [one for one in found.members(PUBLISHED) if one.name in there]


def _drawn(found: Standings) -> int:
    """How many of them draw devices uniformly."""
    return sum(one.set.get("sampling", "uniform") == "uniform" for one in _rivals(found))


def _times(effect: Effect) -> str:
    return f"{math.exp(effect.value):.2f}"


def _range(effect: Effect) -> str:
    return f"{math.exp(effect.low):.2f} to {math.exp(effect.high):.2f}"


def _words(effect: Effect) -> str:
    if effect.low <= 0 <= effect.high:
        return "about as many rounds as"
    return f"{'fewer' if effect.high < 0 else 'more'} rounds than"


def _span(whole: Overall) -> str:
    least, most = (math.exp(bound(ratio.effect.value for ratio in whole.ratios)) for bound in (min, max))
    return f"from {least:.2f} to {most:.2f} on single datasets"


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
