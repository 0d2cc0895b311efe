"""The page of the defence, made only from its files and stored results. Every sentence about results is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from folb import atomic
from folb.atomic import claimed
from folb.core.robust import ROBUST, different_devices
from folb.results import summary
from folb.results.run import HELD
from folb_studies.arena import standings
from folb_studies.arena.cells import NEVER
from folb_studies.arena.contest import SHARE
from folb_studies.arena.entries import MADE, typed
from folb_studies.arena.standings import FINAL, NOT_RUN
from folb_studies.defence import loss_plot
from folb_studies.defence.losses import LIARS, MOST, SLOWER, Losses, Standing
from folb_studies.defence.opponents import HONEST, PACE, Dataset

PAGE, PICTURE = "study.md", "study.png"
GUIDE = "../attacks.md"


def write(losses: Losses, home: Path) -> None:
    """Write the page and the picture."""
    atomic.directory(home)
    linked = (home / GUIDE).is_file()  # else the page is not in docs
    files = {PAGE: ("\n".join(_page(losses, linked)) + "\n").encode()}
    if losses.cells:
        files[PICTURE] = loss_plot.draw(losses)
    with claimed(home):  # another process may have other rules, and write the same page
        for name, content in files.items():
            atomic.replace(home / name, content)


def _page(losses: Losses, linked: bool) -> Iterator[str]:
    guide = f"[Devices that lie]({GUIDE})" if linked else "`docs/attacks.md` of folb's repository"
    wanted = len(losses.cells) + len(losses.absent)
    yield "# Which rule bears which attack\n"
    yield (
        f"{len(losses.rules)} rules on {len(losses.datasets)} datasets, each under all attacks and without one. "
        f"{guide} says what the rules and the attacks are. "
        f"{len(losses.cells)} of {wanted} combinations of a rule, a dataset and a share of liars have been run.\n"
    )
    if losses.cells:
        yield f"![The largest loss of each rule, by dataset and share of liars]({PICTURE})\n"
    yield "## The goal\n"
    yield (
        f"With {LIARS} % colluding liars a default should lose at most {100 * MOST:g} points against the same rule "
        f"without an attack, under every attack, and without one need at most {SLOWER:g} times the rounds of FedAvg.\n"
    )
    for dataset in losses.datasets:
        if dataset.goal:
            yield f"**{dataset.title}.** {' '.join(sentences(losses, dataset))}\n"
    yield from _goal(losses)
    yield "## How it is measured\n"
    yield from _rules(losses)
    for dataset in losses.datasets:
        yield from _dataset(losses, dataset)
    yield "## What is not here\n"
    yield from _absent(losses)
    yield "## Run it again\n"
    again = typed("defend", losses.file)
    part = "mnist-2" if losses.file is None else losses.datasets[0].name
    yield (
        f"```\n{again}\n{again} --only {part} --rules median,krum --shares 0,20   # a part of it\n"
        f"{again} --pages-only   # the page again, from the stored results{MADE * (losses.file is None)}\n```"
    )


def sentences(losses: Losses, dataset: Dataset) -> Iterator[str]:
    """Which rule comes nearest to the goal on a dataset, and by how much it misses."""
    known = losses.standings(dataset)
    if not known:
        yield "Not run."
        return
    if len(known) < len(losses.rules):
        yield f"{len(known)} of {len(losses.rules)} rules have been run."
    met = [standing for standing in known if standing.met]
    yield f"{_several(met)} the goal." if met else "No rule meets the goal."
    yield f"The nearest is {_said(known[0])}"
    without = next((standing for standing in known if not standing.rule.own_samples), None)
    if known[0].rule.own_samples and without is not None:
        yield f"It needs samples of the server. Of the rules without, the nearest is {_said(without)}"


def _several(met: Sequence[Standing]) -> str:
    names = [standing.rule.title for standing in met]
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{text[0].upper()}{text[1:]} {'meets' if len(names) == 1 else 'meet'}"


def _said(standing: Standing) -> str:
    lost, over = 100 * standing.loss.value, 100 * (standing.loss.value - MOST)
    text = f"{standing.rule.title}: it loses at most {lost:.1f} points (`{standing.attack}`), "
    text += f"{over:.1f} too many" if over > 0 else "which is allowed"
    if standing.pace is None:
        return f"{text}; its rounds without an attack are not known."
    pace = math.exp(standing.pace.value)
    text += f", and without an attack it needs {pace:.2f} times the rounds of FedAvg, "
    return text + (f"{pace - SLOWER:.2f} too many." if pace > SLOWER else "which is allowed.")


def _goal(losses: Losses) -> Iterator[str]:
    yield (
        f"The largest loss with {LIARS} % liars in points, and the attack; rounds to the target without liars, "
        "relative to FedAvg:\n"
    )
    yield f"| rule | {' | '.join(f'{dataset.name}: loss | rounds' for dataset in losses.datasets)} |"
    yield f"|---{'|---|---' * len(losses.datasets)}|"
    for rule in losses.rules:
        cells = []
        for dataset in losses.datasets:
            standing, pace = losses.standing(dataset, rule), losses.pace(dataset, rule)
            lost = NOT_RUN if standing is None else f"{standings.text(standing.loss, FINAL)} ({standing.attack})"
            cells += [lost, NOT_RUN if pace is None else standings.text(pace)]
        yield f"| {rule.title} (`{rule.name}`) | {' | '.join(cells)} |"
    yield ""


def _rules(losses: Losses) -> Iterator[str]:
    yield (
        f"- **Accuracy** is the mean of a run's last {HELD} evaluations. The tables have the mean over the seeds.\n"
        "- **A loss** is the accuracy of the same rule with the same seed and no attack, less that under the attack. "
        "The intervals are Student's, 95 %, over the seeds. The largest of many losses is a little too large: it is "
        "chosen by the numbers that then give it.\n"
        f"- **Rounds** are those from which the target is held without liars: {100 * SHARE:g} % of the accuracy that "
        f"FedAvg ends with. A run that never holds it counts with {NEVER} times its rounds. The ratio is the geometric "
        "mean over seeds.\n"
        "- **The nearest rule** is the one for which the larger of two numbers is smallest: its largest loss over "
        f"{100 * MOST:g} points, and its rounds over {SLOWER:g} times those of FedAvg.\n"
        "- **Liars** are the devices with the lowest numbers, so the same in all seeds. How many of them a round has "
        "is chance: of 10 devices, with 20 % liars, half or more lie in about one round of thirty.\n"
        "- **Settings.** Nothing is tuned. These assume the true share of liars, which favours them: "
        f"{_informed(losses)}.\n"
    )
    yield "| dataset | rounds | evaluated, under attack | seeds | liars | target | settings |"
    yield "|---|---|---|---|---|---|---|"
    for dataset in losses.datasets:
        target = losses.target(dataset)
        given = ", ".join(_settings(dataset.set))
        yield (
            f"| {dataset.title} (`{dataset.name}`) | {dataset.rounds} | every {dataset.evaluate_every} | "
            f"{len(dataset.seeds)} | {_percents(dataset.shares)} | "
            f"{NOT_RUN if target is None else f'{100 * target:.1f} %'} | {given} |"
        )
    yield ""


def _settings(given: Mapping[str, Any], part: str = "") -> Iterator[str]:
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{key}.")
        else:
            yield f"{part}{key} = {summary.spelt(value)}"


def _informed(losses: Losses) -> str:
    return ", ".join(rule.title for rule in losses.rules if rule.informed) or "none"


def _percents(shares: Sequence[int]) -> str:
    return f"{', '.join(map(str, shares))} %"


def _dataset(losses: Losses, dataset: Dataset) -> Iterator[str]:
    yield f"## {dataset.title}\n"
    shares = [share for share in dataset.shares if losses.attacks(dataset, share)]
    if not shares:
        yield "Not run.\n"
    for share in shares:
        yield f"{share} % of the devices lie: accuracy in %, and the largest loss in points.\n"
        attacks = losses.attacks(dataset, share)
        yield f"| rule | {' | '.join(attacks)} | largest loss |\n|---{'|---' * len(attacks)}|---|"
        for rule in losses.rules:
            worst = losses.largest(dataset, rule, share)
            if worst is None:
                continue
            cells = [_percent(losses.accuracy(dataset, rule, share, name)) for name in attacks]
            yield f"| {rule.title} | {' | '.join(cells)} | {100 * worst[1].value:.1f} |"
        yield ""
    if shares:
        yield "The backdoor's rate in %, in brackets without an attack; the liars' largest part of all weight in %:\n"
        heads = [f"{share} %: rate | weight" for share in shares]
        yield f"| rule | {' | '.join(heads)} |\n|---{'|---|---' * len(shares)}|"
        for rule in losses.rules:
            if all((dataset.name, rule.name, share) in losses.absent for share in shares):
                continue
            cells = [_gained(losses, dataset, rule.name, share) for share in shares]
            yield f"| {rule.title} | {' | '.join(cells)} |"
        yield ""


def _gained(losses: Losses, dataset: Dataset, rule: str, share: int) -> str:
    cell = losses.cells.get((dataset.name, rule, share))
    if cell is None or "backdoor" not in cell["attacks"]:
        return f"{NOT_RUN} | {NOT_RUN}"
    rates = [_percent([value or 0.0 for value in cell["attacks"][name]["backdoor"]]) for name in ("backdoor", HONEST)]
    weights = {name: one["weight"] or 0.0 for name, one in cell["attacks"].items() if name != HONEST}
    most = max(weights, key=lambda name: weights[name])
    return f"{rates[0]} ({rates[1]}) | {100 * weights[most]:.1f} ({most})"


def _percent(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{100 * mean(values):.1f}"


def _few(losses: Losses) -> str:
    """The rules, datasets and shares of liars with fewer devices a round than the rule needs."""
    backdoors: dict[tuple[str, str], list[int]] = {}
    for (where, name, share), cell in losses.cells.items():
        dataset = next(one for one in losses.datasets if one.name == where)
        rule = next(one for one in losses.rules if one.name == name)
        if share == PACE or "robust" not in rule.set:
            continue
        how = ROBUST.changed(None, {"": rule.set["robust"], "liars": share / 100 if rule.informed else None})
        if not how.enough(different_devices(cell["devices"], dataset.set["select.K"])):
            backdoors.setdefault((rule.title, dataset.title), []).append(share)
    return "; ".join(f"{rule} on {dataset} ({_percents(shares)})" for (rule, dataset), shares in backdoors.items())


def _absent(losses: Losses) -> Iterator[str]:
    lines = []
    for dataset in losses.datasets:
        alike: dict[tuple[int, ...], list[str]] = {}
        for rule in losses.rules:
            shares = tuple(n for where, name, n in losses.absent if (where, name) == (dataset.name, rule.name))
            alike.setdefault(shares, []).append(rule.title)
        for shares, titles in alike.items():
            who = [f"{_percents([share for share in shares if share != PACE])} liars"] if shares[-1:] > (PACE,) else []
            if what := who + ["the pace"] * (PACE in shares):
                lines.append(f"- Not run on {dataset.title}: {', '.join(titles)} ({' and '.join(what)}).")
    if few := _few(losses):
        lines.append(f"- Run before folb refused it, since among so few replies the liars decide: {few}.")
    lines.append("- Buckets, networks, and runs on Flower, where a reply that is not finite is refused.")
    yield "\n".join(lines) + "\n"
