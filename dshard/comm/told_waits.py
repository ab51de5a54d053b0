"""Waits of ranks for each other: deadlocks, and long waits, told on stderr once for each call.

It is told in which call a rank waits, and for which ranks. Where a wait stops the host, it tells by itself. Over NCCL
the host waits in a later call, such as `.item()`: there a thread watches the calls that come through here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread, get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dshard.comm import store_messages
from dshard.comm.process_groups import Group, this_world
from dshard.comm.user_code import user_call
from dshard.errors import ArgumentError
from dshard.validate import as_number


@dataclass(frozen=True, slots=True)
class Waiting:
    """The record of a rank that waits: its group and collective, and how often it has waited on each group."""

    rank: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    counts: Mapping[str, int]
    text: str

    @property
    def number(self) -> int:
        """The number of this wait among the waits on its group."""
        return self.counts[self.group]


def stuck(waiting: Mapping[int, Waiting]) -> set[int]:
    """The deadlocked ranks. A rank that is not in `waiting` is assumed to reach every collective.

    A collective that all its ranks have reached ends. A waiting rank goes on once the ranks that it waits for do.
    """
    progressing: set[int] = set()
    while True:
        next_ranks = {
            rank
            for rank, w in waiting.items()
            if rank not in progressing
            and _can_go_on(w, [waiting[peer] for peer in w.ranks if peer != w.rank and peer in waiting], progressing)
        }
        if not next_ranks:
            return set(waiting) - progressing
        progressing |= next_ranks


def _can_go_on(here: Waiting, others: Sequence[Waiting], progressing: Collection[int]) -> bool:
    passed = 0
    for other in others:
        count = other.counts.get(here.group, 0)
        if count < here.number:
            if other.rank not in progressing:
                return False
        elif count > here.number or other.group != here.group:
            passed += 1
        elif other.kind != here.kind:
            return False
    return passed < len(here.ranks) - 1


def _of_environment() -> float:
    text = os.environ.get("DSHARD_WAIT_SECONDS", "10")
    try:
        return as_number(float(text), "DSHARD_WAIT_SECONDS", ArgumentError, infinite=True)
    except ValueError:
        raise ArgumentError(f"DSHARD_WAIT_SECONDS={text}: give a number of seconds above 0, or inf") from None


_AFTER = [_of_environment()]
WAITING, _SEEN = "dshard/waiting/{}", "dshard/seen/{}"
"""The keys under which a rank stores where it waits, and where it has last waited for long."""
_TOLD: set[str] = set()
_WATCHED: dict[int, tuple[float, Group]] = {}
"""By thread: since when its host may wait for the ranks of a group over NCCL."""
_LAST: list[Group] = []
"""The group of the last collective for which the host has not waited, if there is one."""


def tell_waits(seconds: float) -> None:
    """Tell on stderr of waits for other ranks that take longer; 10 seconds by default, or DSHARD_WAIT_SECONDS.

    `math.inf` tells of none. A wait ends with an error at the time limit of the process group in any case.
    """
    as_number(seconds, "seconds", ArgumentError, infinite=True)
    _AFTER[0] = seconds


def own_wait(group: Group, kind: str = "collective", frame: FrameType | None = None) -> Waiting:
    """The record of a wait of this rank for the group, in the user's call, or that of the thread at `frame`."""
    counts = {key: count[0] for key, count in this_world().waits.items()}
    return Waiting(dist.get_rank(), group.key, group.ranks, kind, counts, f"{user_call(frame)}, {kind} {group}")


def tell_if_long(here: Waiting, since: float) -> None:
    """Put down where this rank waits, and tell of it once, if it has waited for long by now."""
    store_messages.put(_SEEN.format(here.rank), here.text)
    if monotonic() - since < _AFTER[0] or here.text in _TOLD:
        return
    _TOLD.add(here.text)
    waits = {rank: store_messages.peek(WAITING.format(rank)) for rank in here.ranks if rank != here.rank}
    missing = [rank for rank, w in waits.items() if w is None or w.counts.get(here.group, 0) < here.number]
    seen = {rank: store_messages.peek(_SEEN.format(rank)) for rank in missing[:4]}
    known = "".join(f"; rank {rank} last waited in {text}" for rank, text in seen.items() if text)
    print(
        f"dshard: rank {here.rank} has waited {monotonic() - since:.0f} s in {here.text}, for rank "
        f"{', '.join(map(str, missing)) or 'none'}{known}. Either they take long, or never come: what all ranks have "
        "a part of is called by all, and its result used where it is wanted",
        file=sys.stderr,
        flush=True,
    )


def host_wait(wait: Callable[[], Any], group: Group) -> Any:
    """Call `wait`, in which the host may wait for the ranks of the group; a thread tells if it takes long."""
    if _LAST:
        _LAST[0] = group
    else:
        _LAST.append(group)
        Thread(target=_watch, name="dshard-long-waits", daemon=True).start()
    thread = get_ident()
    _WATCHED[thread] = monotonic(), group
    try:
        return wait()
    finally:
        del _WATCHED[thread]


def read_number(local: Tensor) -> bool | int | float | complex:
    """`local.item()`, in which the host may wait for a collective that was begun before."""
    return host_wait(local.item, _LAST[0]) if _LAST else local.item()


def _watch() -> None:
    while True:
        sleep(min(_AFTER[0] / 4, 1.0))
        for thread, (since, group) in list(_WATCHED.items()):
            if monotonic() - since >= _AFTER[0] and dist.is_initialized():
                tell_if_long(own_wait(group, frame=sys._current_frames().get(thread)), since)
