"""What folb finds in a folder, and data, is read from regular files only: to open a pipe could wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """`path`, unless it is a pipe, a device or a socket: an OSError. To read a directory fails anyway."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return path
