"""`python -m folb`."""

import sys

from folb.cli.main import main

sys.exit(main())
