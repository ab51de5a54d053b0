"""A log of the operators that run during a call of one of torch's functions: the fast path specialises calls by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from dshard.comm import Scoped

CallRecord: TypeAlias = tuple[Any, Any, tuple[Any, ...], dict[str, Any], Any]
"""An executable, or None for an operator without one; the operator, its arguments by position and name, its result."""

WATCHED: Scoped[list[CallRecord], tuple[list[CallRecord], ...]] = Scoped("watched", tuple)
"""The logs to which the calls of this thread and asynchronous task are appended."""

CALL_LOG: Sequence[object] = WATCHED.anywhere
"""Empty while no thread keeps a log."""


def log(record: CallRecord) -> None:
    """Append a call to the logs of this thread."""
    for records in WATCHED.value():
        records.append(record)
