"""The command line: it parses, shows and exits. Each command imports only what it needs."""

import os
import sys
from typing import Any


def interrupted(number: int, frame: Any) -> None:
    """End at Ctrl-C, before a command begins and after it has ended: there is nothing to tidy up."""
    print("folb: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
