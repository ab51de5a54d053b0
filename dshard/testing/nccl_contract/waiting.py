"""Deadlocks of ranks that wait on different communicators, detected by what long-waiting ranks publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from dshard.comm import peek, put
from dshard.testing.nccl_contract.launch_order import Communicator, Launches, Ranks

_KEY = "dshard/nccl_contract/waiting"


@dataclass(frozen=True, slots=True)
class Waiting:
    """An operation in which a rank waits, the `number`th on its communicator, and all operations the rank has begun."""

    what: str
    communicator: Communicator
    ranks: Ranks
    number: int
    begun: Launches


def publish(waiting: Waiting | None) -> None:
    """Publish the operation in which this rank waits, or None when it continues."""
    put(f"{_KEY}/{dist.get_rank()}", waiting)


def deadlock(here: Waiting) -> str:
    """Describe a rank that waits for this one in an operation, while this one waits for it in another; else ""."""
    for rank in here.ranks:
        there: Waiting | None = None if rank == dist.get_rank() else peek(f"{_KEY}/{rank}")
        if there is None or dist.get_rank() not in there.ranks or there.communicator == here.communicator:
            continue
        if not _has_begun(there.begun, here) and not _has_begun(here.begun, there):
            return f"rank {rank} waits in {there.what}, on {there.communicator}, which this rank has not begun"
    return ""


def _has_begun(begun: Mapping[Communicator, object], waiting: Waiting) -> bool:
    count = getattr(begun.get(waiting.communicator), "count", 0)
    return bool(count >= waiting.number)
