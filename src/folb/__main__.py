"""`python -m folb`."""

import sys

from folb.cli import main

sys.exit(main())
