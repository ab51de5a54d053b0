"""Ranks that look soon whether another has failed, not after a second: they are told the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

from dshard.comm import peer_failure


@contextmanager
def looking_soon() -> Iterator[None]:
    """Within the block, or the function that this decorates, a rank that waits for others looks after 0.1 seconds."""
    with patch.object(peer_failure, "PATIENCE", timedelta(seconds=0.1)):
        yield
