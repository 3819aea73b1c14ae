"""`python -m quire`: the command line."""

import sys

from quire.cli import main

sys.exit(main())
