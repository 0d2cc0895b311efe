"""The command `folb`, and `python -m folb`. From here on Ctrl-C gives one line, also while the command is imported."""

import signal
import sys

from folb.cli.ctrl_c import interrupted

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)


def main() -> int:
    """Run the command that the process was started with."""
    from folb.cli import main

    return main.main()


if __name__ == "__main__":
    sys.exit(main())
