"""`python -m dshard`."""

import sys

from dshard.cli import script

sys.exit(script())
