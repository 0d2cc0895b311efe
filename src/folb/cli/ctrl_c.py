"""What Ctrl-C does while no command runs. `folb.__main__` imports this first, so it imports next to nothing."""

import os
import sys
from typing import Any


def interrupted(number: int, frame: Any) -> None:
    """End before a command begins, and after it has ended. What is registered for the end of the process is not run."""
    print("folb: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
