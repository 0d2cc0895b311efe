"""The defence: rules against attacks on datasets, with 10 to 40 % liars, and what each rule loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from folb.data.source_files import MissingError
from folb.errors import InputError
from folb_studies.defence import battles
from folb_studies.defence.opponents import Battle
from folb_studies.draws import Complete, planning
from folb_studies.results import Results

__all__ = ["execute_plan"]


def execute_plan(
    wanted: Sequence[Battle],
    results: Results,
    complete: Complete,
    tell: Callable[[str], None],
    file: Path | None = None,
) -> None:
    """Fight the battles that have no results. Several processes with different battles may share one file of them.

    `file` is the user's own, which the datasets are from: each is planned before the first run.
    """
    results.check()
    if file is not None:
        for battle in {battle.dataset.name: battle for battle in reversed(wanted)}.values():
            with planning(file, battle.dataset.name):
                battles.check(battle)
    missing: dict[str, MissingError] = {}
    for i, battle in enumerate(wanted, start=1):
        where = f"{battle.name} ({i} of {len(wanted)})"
        if battle.dataset.name in missing:
            continue
        if battles.stored(results, battle) is not None:
            tell(f"{where} is done already")
            continue
        try:
            results.keep(battle.name, battles.fought(battle, complete))
        except MissingError as error:
            tell(f"{battle.dataset.name} is left out: {error}")
            missing[battle.dataset.name] = error
            continue
        except InputError as error:
            if error.field != "select.K":
                raise
            tell(f"{where} is left out: {error}")  # among so few replies the liars decide
            continue
        tell(f"{where} is done")
    if wanted and {battle.dataset.name for battle in wanted} <= set(missing):  # nothing to make a page from
        raise next(iter(missing.values()))
