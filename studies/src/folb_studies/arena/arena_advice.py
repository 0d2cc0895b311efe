"""Which algorithm to use, in a few sentences, and what to know of the numbers.

Each sentence follows from a stored comparison: its numbers and its words.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from statistics import mean

from folb.results.summary import Effect
from folb_studies.arena import contest, standings
from folb_studies.arena.entries import Contender
from folb_studies.arena.standings import ABLATION, FINAL, OURS, RIVALS, Overall, Standings

WIDTH = 120
HIGHER = 0.99  # of what the best published one ends with: another target, to see what the target does
NEAR = 0.95  # a ratio from here on is no advantage
AVERAGED = "averaged"
PUBLISHED = RIVALS["all published"]


def advice(ranks: Standings) -> str:
    """The advice as a paragraph; "" if there is nothing that it could follow from."""
    return "\n".join(textwrap.wrap(" ".join(_sentences(ranks)), WIDTH, break_long_words=False, break_on_hyphens=False))


def _sentences(ranks: Standings) -> Iterator[str]:
    default = _default(ranks)
    if default is None or (whole := ranks.overall(default.name, PUBLISHED)) is None:
        return
    n, likely, rivals = len(whole.ratios), whole.likely, _rivals(ranks)
    averaged = len(rivals) - len(_algorithms(rivals))
    also = f", {averaged} of them also with a mean of the model over rounds" * (averaged > 0)
    where = (
        f"in the mean over {n} datasets. The mean over many others like them is probably {_range(likely)} times "
        f"(95 %), and on a single one it may be {_range(whole.single)} times."
        if n > 1
        else f"over one dataset, {_range(likely)} (95 %)."
    )
    yield (
        f"`{default.name}`, untuned, needs {_words(likely)} the best tuned of {len(_algorithms(rivals))} published "
        f"algorithms{also}: {_times(whole.effect)} times as many {where}"
    )
    if (complete := sum(ratio.whole for ratio in whole.ratios)) < n:
        yield f"Not all of them were run everywhere: on {complete} datasets they were."
    if likely.high < 0:
        yield from _limits(ranks, default)
    if earlier := len(ranks.passed_over):
        yield f"{earlier} of the stored winners were chosen by an earlier measure and are to be run again."


def _limits(ranks: Standings, default: Contender) -> Iterator[str]:
    """Where the default no longer needs clearly less than the best published one."""
    algorithms = _algorithms(_rivals(ranks))
    uniform = _uniform(ranks, default)
    conditions = (
        (
            uniform and ranks.overall(uniform.name, PUBLISHED),
            "with the uniform draw of devices that {drawn} of the {all} have",
        ),
        (ranks.overall(default.name, PUBLISHED, "seconds"), "in simulated seconds"),
        (ranks.higher(default.name, PUBLISHED, HIGHER), "at {share:g} % of the best final accuracy"),
    )
    gone: list[str] = []
    unclear: list[str] = []
    for whole, when in conditions:
        if whole and whole.likely.high >= 0:
            said = when.format(drawn=_drawn(algorithms), all=len(algorithms), share=100 * HIGHER)
            near = whole.effect.value >= math.log(NEAR)
            (gone if near else unclear).append(f"{said} ({_times(whole.effect)} times)")
    if gone:
        yield f"This advantage is gone {_and(gone)}."
    if unclear:
        yield f"It is not certain {_and(unclear)}."


def to_know(ranks: Standings) -> Iterator[str]:
    """What a reader should know before quoting a number, as the lines of a list."""
    notes: dict[str, list[str]] = {}
    for one in ranks.contenders:
        if one.note:
            notes.setdefault(one.note, []).append(f"{one.title} (`{one.name}`)")
    unequal = [f"{'; '.join(titles)}: {note}." for note, titles in notes.items()]
    if unequal := [*unequal, *_retuned(ranks)]:
        yield f"- **Not equal.** {' '.join(unequal)}"
    default = _default(ranks)
    if default is not None:
        yield from _of_ours(ranks, default)
    against = {name: ranks.overall("folb", RIVALS[name]) for name in ("classic", "all published")}
    if (classic := against["classic"]) and (published := against["all published"]):
        yield (
            f"- **FOLB,** tuned, needs {standings.text(classic.effect)} times the rounds of the best classic one, and "
            f"{standings.text(published.effect)} times those of the best of all published."
        )


def _retuned(ranks: Standings) -> Iterator[str]:
    """Which stored winners are not the best of the points that were tried: they were chosen by an earlier measure."""
    if not (lost := ranks.passed_over):
        return
    named = {
        dataset.title: [one.name for one in ranks.contenders if (dataset.name, one.name) in lost]
        for dataset in ranks.datasets
    }
    listed = "; ".join(f"{title}: {', '.join(names)}" for title, names in named.items() if names)
    searches = sum(bool(cell["tried"]) for cell in ranks.cells.values())
    yield (
        f"{len(lost)} of {searches} stored winners were chosen by the median over the tuning runs, and another tried "
        "point is better by the geometric mean. So these contenders may be faster than their numbers here. [The "
        f"settings](settings.md) have both points, and `folb arena` runs these again. {listed}."
    )


def _of_ours(ranks: Standings, default: Contender) -> Iterator[str]:
    uniform = _uniform(ranks, default)
    if uniform is not None and ranks.overall(uniform.name, PUBLISHED):
        wholes = {name: ranks.overall(uniform.name, RIVALS[name]) for name in ("classic", "averaged", "all published")}
        ratios = [f"{standings.text(whole.effect)} ({name})" for name, whole in wholes.items() if whole]
        yield (
            f"- **The draw.** {_drawn(_rivals(ranks))} of {len(_rivals(ranks))} published contenders draw devices "
            f"uniformly, `{default.name}` by their samples. With the uniform draw (`{uniform.name}`) it needs these "
            f"times the rounds of the best: {_and(ratios)}."
        )
    overall = {name: ranks.overall(default.name, RIVALS[name]) for name in ("classic", "all published")}
    known = {name: whole for name, whole in overall.items() if whole and len(whole.ratios) > 1}
    if known:
        many = _and([f"{standings.text(whole.elsewhere)} ({name})" for name, whole in known.items()])
        alone = _and([f"{_range(whole.single)} ({name})" for name, whole in known.items()])
        yield (
            "- **Other datasets.** The intervals over datasets in the tables are for these alone. Over others, "
            f"of which these are a sample (Student's interval of their ratios), `{default.name}` needs these times the "
            f"rounds of the best: {many}. This is a mean over many. On one more dataset: {alone}."
        )
    yield from _of_the_target(ranks, default)


def _of_the_target(ranks: Standings, default: Contender) -> Iterator[str]:
    """How low the target is, and the ratio at a higher one."""
    whole = ranks.higher(default.name, PUBLISHED, HIGHER)
    if whole is None:
        return
    gaps = []
    for dataset in ranks.present:
        rival, _ = ranks.best(dataset.name, PUBLISHED, FINAL)
        if rival is not None:
            cell = ranks.cells[dataset.name, rival]
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


def _default(ranks: Standings) -> Contender | None:
    """Ours with its defaults."""
    return next((one for one in ranks.members([OURS]) if not one.tuned), None)


def _uniform(ranks: Standings, default: Contender) -> Contender | None:
    """The default with the uniform draw, and no other difference."""
    wanted = {**default.set, "select": "uniform"}
    return next(
        (one for one in ranks.members([ABLATION]) if one.algorithm == default.algorithm and one.set == wanted), None
    )


def _rivals(ranks: Standings) -> list[Contender]:
    """The published contenders that were run anywhere."""
    there = {contender for _, contender in ranks.cells}
    return [one for one in ranks.members(PUBLISHED) if one.name in there]


def _algorithms(rivals: Sequence[Contender]) -> list[Contender]:
    """Those that are not another one with a mean over rounds."""
    return [one for one in rivals if AVERAGED not in one.groups]


def _drawn(rivals: Sequence[Contender]) -> int:
    """How many of them draw devices uniformly."""
    return sum(one.set.get("select", "uniform") == "uniform" for one in rivals)


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
