"""A rank on which an operator fails, perhaps on it alone, tells the ranks that would wait for it.

What torch refuses for its values, such as an index out of range, only the rank that holds them can see. It raises, and
leaves word in the store that the ranks met at; right calls send nothing more than before. A rank that waits for
another in a collective looks there when the wait is long, and raises the same kind of error. A rank that
caught its error and goes on to a collective of its own takes its word back, and ranks that have failed as often as the
other need not heed it: they failed alike. Not what ranks send each other in pairs: gloo gives up such a message when it
is waited for in vain, so there the time limit of the process group holds.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from dshard.comm import mail
from dshard.comm.runtime import Group, simulated_ranks
from dshard.errors import DShardError

PATIENCE = timedelta(seconds=2)
"""How long a rank waits before it looks, and again."""

_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (IndexError, RuntimeError, TypeError, ValueError)}
_FAILURES: Counter[str] = Counter()
_LEFT: list[str] = []


def tell_failure(error: Exception) -> None:
    """Leave word that this rank has raised `error`, for ranks that it may have left waiting.

    What dshard refuses, it refuses on all ranks, before anything is sent: nobody waits.
    """
    if isinstance(error, DShardError) or simulated_ranks() is not None or not dist.is_initialized():
        return
    if dist.get_world_size() == 1 or "gloo" not in dist.get_backend():
        return
    key = _key(dist.get_rank())
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    _FAILURES[key] += 1
    mail.leave(key, (_FAILURES[key], kind, f"{error} (on rank {dist.get_rank()}, which this rank waited for)"))
    _LEFT[:] = [key]


def wait_for(work: dist.Work, group: Group) -> None:
    """Wait for a collective of the group, unless one of its ranks has failed and not gone on.

    Raises:
        Exception: of the kind that was raised on another rank; or what the process group says.
    """
    if group.backend != "gloo":
        work.wait()
        return
    while _LEFT:
        mail.leave(_LEFT.pop(), None)
    while not _over(work, group):
        pass


def _over(work: dist.Work, group: Group) -> bool:
    """Whether a collective has ended well, after some patience."""
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        if work.is_completed():
            raise
        for rank in group.ranks:
            failures, kind, text = mail.peek(_key(rank)) or (0, "", "")
            if failures > _FAILURES[_key(dist.get_rank())]:
                raise _KINDS[kind](text) from error
        return False
    return True


def _key(rank: int) -> str:
    return f"dshard/failed/{rank}"
