"""`python -m dshard.cli`."""

import sys

from dshard.cli import main

sys.exit(main())
