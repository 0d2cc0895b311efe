"""The advice of the front page: sentences that follow from verdicts.

The file `front.toml` has their layout, and for each sentence the claim that it follows from and a wording for each
outcome. So no sentence can say more than the stored results do, and none can become outdated. A wording may have

    {count} {total}  in how many conditions the claim holds, such as "3 of 21"; how many there are
    {often}          the share of these: Seldom, Sometimes or Mostly
    {left}           in how many more it is not known, in brackets, or nothing
    {held} {rest}    the conditions in which it holds; the others, with their effects
    {behind}         in how many conditions a comparison goes the other way
    {effect} {value} the least and the greatest effect with their intervals, or without
    {runs}           the runs of a condition

A sentence about something that was not run is left out, and its claim is named at the end.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from folb.results import summary
from folb_studies.paper import verdicts
from folb_studies.paper.figure_files import Front, Sentence
from folb_studies.paper.verdicts import Verdict

WIDTH = 120


def text(
    front: Front, paper: Sequence[Verdict], beside: Sequence[Verdict], documents: Mapping[str, Mapping[str, Any]]
) -> str:
    """The advice, from the verdicts on the paper's claims and on others, and from the results by figure:arm."""
    known = {f"{verdict.claim.figure}:{verdict.claim.id}": verdict for verdict in (*paper, *beside)}
    said = {"table": _table(front, documents), "readings": _readings(paper)}
    unknown = []
    for name, sentence in front.sentences.items():
        verdict = known.get(sentence.claim)
        said[name] = "" if verdict is None else say(sentence, verdict)
        if not said[name]:
            unknown.append(sentence.claim if verdict is None else verdict.claim.says)
    paragraphs = [_paragraph(one, said) for one in front.advice.strip().split("\n\n")]
    if unknown:
        paragraphs.append(
            _wrapped("Not run here, and so not decided: " + " ".join(f'"{one}"' for one in dict.fromkeys(unknown)))
        )
    return "\n\n".join(filter(None, paragraphs))


def say(sentence: Sentence, verdict: Verdict) -> str:
    """The wording for the verdict's outcome; "" if nothing was run."""
    word = outcome(verdict)
    if word == "untested":
        return ""
    wording = getattr(sentence, word) or sentence.fails
    return str(wording.format_map(_fields(verdict)))


def outcome(verdict: Verdict) -> str:
    """The verdict in a word. A claim that does not hold is "fails" only if a comparison speaks against it."""
    if verdict.word == verdicts.FAILS:
        against = sum(_against(verdict))
        return "fails" if against else "unclear" if verdict.conditions else "unreached"
    return {verdicts.HOLDS: "holds", verdicts.PARTLY: "partly", verdicts.UNTESTED: "untested"}[verdict.word]


def _against(verdict: Verdict) -> list[bool]:
    """For each condition, whether a comparison goes the other way."""
    return [
        any(verdicts.contrary(verdict.claim, effect) for effect in condition.effects.values())
        for condition in verdict.conditions
    ]


def _fields(verdict: Verdict) -> dict[str, str]:
    claim, conditions = verdict.claim, verdict.conditions
    held = [condition.name for condition in conditions if condition.holds]
    effects = [effect for condition in conditions for effect in condition.effects.values()]
    left = [
        f"{len(names)} {words}"
        for names, words in ((verdict.unreached, "more in which no run arrives"), (verdict.untested, "more not run"))
        if names
    ]
    values = [_value(verdict, effect) for effect in sorted(effects)]
    return {
        "count": f"{len(held)} of {len(conditions)}",
        "total": str(len(conditions)),
        "often": _often(len(held), len(conditions)),
        "left": f" ({', '.join(left)})" if left else "",
        "held": verdicts.common(held, [condition.name for condition in conditions]) if held else "",
        "rest": "; ".join(
            f"{condition.name} ({', '.join(verdicts.effect_text(claim, one) for one in condition.effects.values())})"
            for condition in conditions
            if not condition.holds
        ),
        "behind": str(sum(_against(verdict))),
        "effect": verdict.effect,
        "value": "" if not values else values[0] if values[0] == values[-1] else f"from {values[0]} to {values[-1]}",
        "runs": str(max((effect.runs for effect in effects), default=0)),
    }


def _often(count: int, total: int) -> str:
    return "Seldom" if 4 * count <= total else "Mostly" if 4 * count >= 3 * total else "Sometimes"


def _value(verdict: Verdict, effect: summary.Effect) -> str:
    return re.sub(r" \[.*?\]", "", verdicts.effect_text(verdict.claim, effect))


def _readings(judged: Sequence[Verdict]) -> str:
    """How many of the paper's comparisons hold with each of the two averages."""
    held: dict[str, list[bool]] = {"rule.weights=samples": [], "rule.weights=equal": []}
    for verdict in judged:
        for condition in verdict.conditions if verdict.claim.compares else ():
            for average, conditions in held.items():
                if average in condition.name.split(", "):
                    conditions.append(condition.holds)
    if not all(held.values()):
        return ""
    samples, simple = (f"{sum(conditions)} of {len(conditions)}" for conditions in held.values())
    return (
        f"Of the paper's comparisons {samples} hold against baselines weighted by samples, as in the code that it "
        f"builds on, and {simple} against simple averages, as in its text."
    )


def _table(front: Front, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The median rounds to the target, a row for each of some arms."""
    lines = [f"| | {' | '.join(front.columns)} | runs |", "|---" * (len(front.columns) + 2) + "|"]
    for name, arm in front.rows.items():
        document = documents.get(arm)
        if document is None:
            cells = ["not run"] * (len(front.columns) + 1)
        else:
            rounds = document["experiment"]["rounds"]
            columns = [document["algorithms"][verdicts.label(document, one)]["runs"] for one in front.columns.values()]
            cells = [verdicts.rounds_text(summary.median_round(runs["rounds"]), rounds) for runs in columns]
            draws, seeds = document["draws"], len(document["experiment"]["seeds"])
            cells.append(f"{draws} draws × {seeds}" if draws else str(seeds))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _paragraph(layout: str, said: Mapping[str, str]) -> str:
    filled = layout.format_map(said).strip()
    if filled.startswith("|"):
        return filled
    if not any(said[name] for name in re.findall(r"{(\w+)}", layout)) and "{" in layout:
        return ""  # a heading alone
    return _wrapped(filled)


def _wrapped(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
