"""Rehearsed modules: Python runs the forward pass, and what its calls do is run at once from a record.

Design: docs/design/0025-rehearsed-modules.md
"""

from dshard.rehearsal.module import Rehearsal, rehearsal_of, rehearsing
