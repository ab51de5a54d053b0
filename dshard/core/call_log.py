"""Operators that ran during a call of one of torch's functions, for who learns how to run it directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from dshard.comm import Scoped

CallRecord: TypeAlias = tuple[Any, Any, tuple[Any, ...], dict[str, Any], Any]
"""An executable or a matmul, or None for what is neither; the operator, its arguments, and what came out."""

WATCHED: Scoped[list[CallRecord], tuple[list[CallRecord], ...]] = Scoped("watched", tuple)
"""The lists to which the calls of this thread and task are written."""

CALL_LOG: Sequence[object] = WATCHED.anywhere
"""Empty while no thread watches."""


def log(record: CallRecord) -> None:
    """Write down a call, for who watches in this thread."""
    for each in WATCHED.value():
        each.append(record)
