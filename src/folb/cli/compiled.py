"""The cache of compiled programs: jax never replaces an entry that is damaged, and warns in every command."""

from __future__ import annotations

import re
import warnings
import zlib
from pathlib import Path
from typing import Any

WARNING = re.compile("Error reading persistent compilation cache entry for '([^']+)'")


def drop_damaged(home: Path) -> None:
    """From now on, remove entries that a killed process left half written, in place of jax's warnings about them."""
    usual = warnings.showwarning

    def show(message: Warning | str, *about: Any, **more: Any) -> None:
        program = WARNING.match(str(message))
        entries = [path for path in home.iterdir() if path.name.startswith(f"{program[1]}-")] if program else []
        damaged = [path for path in entries if _is_damaged(path)]
        for path in damaged:
            path.unlink(missing_ok=True)  # jax is about to compile the program, and then writes it again
        if not damaged:
            usual(message, *about, **more)

    warnings.showwarning = show


def _is_damaged(entry: Path) -> bool:
    """Whether an entry cannot be unpacked. An entry in another format than zlib's is removed, too."""
    try:
        zlib.decompress(entry.read_bytes())
    except (OSError, zlib.error):
        return True
    return False
