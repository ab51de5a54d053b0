"""`python -m dshard.cli`."""

import sys

from dshard.cli import script

sys.exit(script())
