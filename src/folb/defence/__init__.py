"""The defence: rules against attacks on datasets, with 10 to 40 % liars, and what each rule loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from folb import atomic
from folb.data.source_files import MissingError
from folb.defence import battles
from folb.defence.opponents import Battle
from folb.experiments.draws import Complete

__all__ = ["carry_out", "home"]


def home() -> Path:
    """Where results and the page go by default."""
    documents = Path("docs/attacks")
    return documents if documents.is_dir() else Path("defence")


def carry_out(wanted: Sequence[Battle], home: Path, complete: Complete, tell: Callable[[str], None]) -> None:
    """Fight the battles whose results are not in `home`. Several processes with different battles may share it."""
    atomic.directory(home / "results")
    missing: dict[str, MissingError] = {}
    for i, battle in enumerate(wanted, start=1):
        where = f"{battle.name} ({i} of {len(wanted)})"
        if battle.dataset.name in missing:
            continue
        if battles.stored(home, battle) is not None:
            tell(f"{where} is done already")
            continue
        try:
            path = battles.keep(home, battle, battles.fought(battle, complete))
        except MissingError as error:
            tell(f"{battle.dataset.name} is left out: {error}")
            missing[battle.dataset.name] = error
            continue
        tell(f"{where} is done: {path}")
    if wanted and {battle.dataset.name for battle in wanted} <= set(missing):  # nothing to make a page from
        raise next(iter(missing.values()))
