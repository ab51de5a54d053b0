"""`python -m dshard`."""

import sys

from dshard.tools.cli import script

sys.exit(script())
