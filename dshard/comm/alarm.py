"""A rank on which an operator fails, perhaps on it alone, tells the ranks that would wait for it.

What torch refuses for its values, such as an index out of range, only the rank that holds them can see. It raises, and
leaves word in the store that the ranks met at; right calls send nothing more than before. A rank that waits for
another in a collective looks there when the wait is long, and raises the same kind of error. A rank that
caught its error and goes on to a collective of its own takes its word back, and ranks that have failed as often as the
other need not heed it: they failed alike. What ranks send each other in pairs gloo gives up when it is waited for with
a limit: there another thread waits, and stays behind until the time limit of the process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the built-in one from Python 3.11
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread, local

import torch.distributed as dist

from dshard.comm import mail
from dshard.comm.runtime import Group, simulated_ranks
from dshard.errors import DShardError

PATIENCE = timedelta(seconds=2)
"""How long a rank waits before it looks, and again."""

_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (IndexError, RuntimeError, TypeError, ValueError)}
_FAILURES: Counter[str] = Counter()
_LEFT: list[str] = []
_OWN = local()  # each thread has another wait for it, so that none waits behind what a third has begun


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
    _take_back()
    _patiently(partial(work.wait, PATIENCE), work.is_completed, group)


def wait_for_pairs(works: list[dist.Work], group: Group) -> None:
    """Wait for what ranks of the group send each other in pairs, as `wait_for` does for a collective.

    The list is then empty: what was sent is let go.
    """
    if group.backend != "gloo":
        _wait_all(works)
        return
    _take_back()
    if not works:
        return
    if not hasattr(_OWN, "waits"):
        _OWN.waits = SimpleQueue()
        Thread(target=_serve, args=(_OWN.waits,), name="dshard-waits", daemon=True).start()
    ended: Future[None] = Future()
    _OWN.waits.put((works, ended))
    try:
        _patiently(partial(ended.result, PATIENCE.total_seconds()), ended.done, group)
    except Exception:
        del _OWN.waits  # its thread may be held by what will not come
        raise


def _wait_all(works: list[dist.Work]) -> None:
    while works:
        works.pop(0).wait()


def _serve(waits: SimpleQueue[tuple[list[dist.Work], Future[None]]]) -> None:
    while True:
        works, ended = waits.get()
        try:
            _wait_all(works)
        except RuntimeError as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)


def _take_back() -> None:
    while _LEFT:
        mail.leave(_LEFT.pop(), None)


def _patiently(wait: Callable[[], object], over: Callable[[], bool], group: Group) -> None:
    """Wait again and again, until it is over."""
    while not _waited(wait, over, group):
        pass


def _waited(wait: Callable[[], object], over: Callable[[], bool], group: Group) -> bool:
    """Whether it has ended well, after some patience."""
    try:
        wait()
    except (RuntimeError, Late) as error:
        if over():
            raise
        _heed(group, error)
        return False
    return True


def _heed(group: Group, error: Exception) -> None:
    """Raise what a rank of the group has raised and this one has not."""
    for rank in group.ranks:
        failures, kind, text = mail.peek(_key(rank)) or (0, "", "")
        if failures > _FAILURES[_key(dist.get_rank())]:
            raise _KINDS[kind](text) from error


def _key(rank: int) -> str:
    return f"dshard/failed/{rank}"
