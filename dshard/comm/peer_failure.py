"""A rank on which an operator fails, perhaps on it alone, tells the ranks that would wait for it.

What torch refuses for its values, such as an index out of range, only the rank that holds them can see. It raises, and
leaves word in the store that the ranks met at; right calls send nothing more than before. A rank that waits for
another in a collective looks there when the wait is long, and raises the same kind of error. The rank that failed
raises when the others have heard, or after some patience: else it might go on to another collective while they wait
in the one that it left out. Where it does go on it takes its word back, and ranks that have failed as often as the
other need not heed it: they failed alike.

A rank that waits long also says where it waits. Ranks that wait for each other in different collectives, one of which
another rank has left out, would wait forever: each finds that out by itself, and says who is where. That a rank
computes for long is no error.

What ranks send each other in pairs gloo gives up when it is waited for with a limit: there another thread waits, and
stays behind until the time limit of the process group.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the built-in one from Python 3.11
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread, local
from time import monotonic, sleep
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm import store
from dshard.comm.runtime import Group, disconnect, simulated_ranks, this_world
from dshard.comm.user_code import user_call
from dshard.errors import DShardError, PeerError

PATIENCE = timedelta(seconds=1)
"""How long a rank waits before it looks, and again."""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (IndexError, PeerError, RuntimeError, TypeError, ValueError)
}
_NAMES = {0: "broadcast", 1: "all_reduce", 4: "all_gather", 5: "all_gather", 9: "reduce_scatter"}
"""Of torch's numbers of collectives; the others exchange."""
_LEFT: list[str] = []
_UNNAMED: list[str] = []  # the same where the error is not known yet
_GIVEN_UP: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # because of which error
_OWN = local()  # each thread has another wait for it, so that none waits behind what a third has begun


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank says that has failed for the `count`th time; `rank` is the one on which the error was first raised.

    Without a `kind` it has gone on.
    """

    count: int
    kind: str
    text: str
    rank: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a rank waits: in which wait on which group, and on how many of each group it has waited."""

    rank: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    counts: Mapping[str, int]
    text: str

    @property
    def number(self) -> int:
        """Which wait on its group it is."""
        return self.counts[self.group]


def publish_failure(error: Exception, ranks: Collection[int] = ()) -> None:
    """Leave word that this rank has raised `error`, and wait a little until `ranks` have failed, too.

    What dshard refuses, it refuses on all ranks, before anything is sent: nobody waits. Nor for what torch refuses
    without data (`mark_raised_by_all`).
    """
    if (isinstance(error, DShardError) and not isinstance(error, PeerError)) or is_told(error):
        return
    if _has_others():
        leave_word(error)
        if hasattr(error, "_raised_by_all"):
            return
        _unaware(ranks)
        if any(word.kind and word.rank == dist.get_rank() for word in _said(ranks)):
            this_world().strayed = str(error)


def _has_others() -> bool:
    """Whether there are other ranks, which look for word of this one."""
    if simulated_ranks() is not None or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1 and "gloo" in dist.get_backend()


def watch_backward(x: Tensor, ranks: Collection[int]) -> None:
    """Tell of errors in a backward pass that comes by the plain tensor `x`, wherever it has begun."""
    if x.grad_fn is not None and _has_others():
        x.grad_fn.register_prehook(partial(_watch, ranks))


def _watch(ranks: Collection[int], grads: object) -> None:
    task = torch._C._current_graph_task_id()
    if task >= 0 and getattr(_OWN, "task", None) != task:
        _OWN.task = task
        torch.autograd.Variable._execution_engine.queue_callback(_Backward(ranks))


class _Backward:
    """A backward pass: called at its end if that is good, and else let go."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks, self._failures, self._ended = ranks, this_world().failures, False

    def __call__(self) -> None:
        self._ended = True

    def __del__(self) -> None:
        if self._ended or sys.is_finalizing() or not _has_others() or self._failures < this_world().failures:
            return
        leave_word(RuntimeError("its backward pass has failed"))
        _UNNAMED.append(_key(dist.get_rank()))
        _unaware(self._ranks)


def mark_raised_by_all(error: Exception) -> None:
    """Note that each rank raises this error by itself, for what all know, before it sends anything."""
    with contextlib.suppress(AttributeError):
        error._raised_by_all = True  # type: ignore[attr-defined]


def is_told(error: BaseException) -> bool:
    """Whether word was left of this error, or it was raised because of such word."""
    return hasattr(error, "_told")


def is_heard(error: BaseException) -> bool:
    """Whether it was raised because of another rank."""
    return isinstance(error, PeerError) or hasattr(error, "_failed")


def leave_word(error: BaseException) -> None:
    """Leave word in the store that this rank has raised `error`."""
    rank = dist.get_rank()
    key = _key(rank)
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    this_world().failures += not _UNNAMED
    _UNNAMED.clear()
    first: Failed = getattr(error, "_failed", None) or Failed(0, kind, str(error), rank)
    store.put(key, Failed(this_world().failures, first.kind, first.text, first.rank))
    with contextlib.suppress(AttributeError):
        error._told = True  # type: ignore[attr-defined]
    _LEFT[:] = [key]


def _unaware(ranks: Collection[int]) -> list[int]:
    """Those of the ranks that have not failed as often as this one, after some patience."""
    here, end, pause = dist.get_rank(), monotonic() + 3 * PATIENCE.total_seconds(), 0.001
    left = [rank for rank in ranks if rank != here]
    while True:
        left = [rank for rank in left if _failures(rank) < this_world().failures]
        if not left or monotonic() > end:
            return left
        sleep(pause)
        pause = min(2 * pause, 0.05)


def _failures(rank: int) -> int:
    return max((word.count for word in _said([rank])), default=0)


def _said(ranks: Collection[int]) -> list[Failed]:
    """The words of other ranks among these."""
    others = (rank for rank in ranks if rank != dist.get_rank())
    return [found for rank in others for found in [store.peek(_key(rank))] if found is not None]


def wait_for(work: dist.Work, group: Group) -> None:
    """Wait for a collective of the group, unless one of its ranks has failed and not gone on.

    Raises:
        Exception: of the kind that was raised on another rank.
        PeerError: a rank has ended, or waits for this one in another collective.
    """
    if group.backend != "gloo":
        work.wait()
        return
    group.waits[0] += 1
    if _LEFT:
        _clear_failure()
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        kind = _NAMES.get(int(work._get_op_type()), "exchange")  # type: ignore[attr-defined]
        _wait_on(partial(work.wait, PATIENCE), work.is_completed, group, kind)


def wait_for_pairs(works: list[dist.Work], group: Group, kind: str = "exchange in pairs") -> None:
    """Wait for what ranks of the group send each other in pairs, as `wait_for` does for a collective.

    The list is then empty: what was sent is let go.
    """
    if group.backend != "gloo":
        _wait_all(works)
        return
    group.waits[0] += 1
    if _LEFT:
        _clear_failure()
    if not works:
        return
    if not hasattr(_OWN, "waits"):
        _OWN.waits = SimpleQueue()
        Thread(target=_serve, args=(_OWN.waits,), name="dshard-waits", daemon=True).start()
    ended: Future[None] = Future()
    _OWN.waits.put((works, ended))
    wait = partial(ended.result, PATIENCE.total_seconds())
    try:
        wait()
    except (RuntimeError, Late):
        try:
            _wait_on(wait, ended.done, group, kind)
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


def _clear_failure() -> None:
    _UNNAMED.clear()
    while _LEFT:
        key = _LEFT.pop()
        store.put(key, Failed(this_world().failures, "", "", dist.get_rank()))


def _wait_on(wait: Callable[[], object], over: Callable[[], bool], group: Group, kind: str) -> None:
    """Wait again and again after the first time, and look in between why it may never end."""
    here = _here(group, kind)
    store.put(_waiting(here.rank), here)
    seen: dict[int, Waiting] = {}
    try:
        while not _ended(wait, over, here, _GIVEN_UP.get(group.process_group)):
            _check_peers(here)
            seen = _look_around(here, seen)
    except Exception as error:
        if not is_told(error):
            leave_word(error)
        _GIVEN_UP.setdefault(group.process_group, str(error))
        disconnect(group)  # a rank has left out what the others began: what comes next would be taken for that
        raise
    finally:
        store.put(_waiting(here.rank), None)


def _here(group: Group, kind: str) -> Waiting:
    counts = {key: count[0] for key, count in this_world().waits.items()}
    return Waiting(dist.get_rank(), group.key, group.ranks, kind, counts, f"{user_call()}, {kind} {group}")


def not_begun(error: Exception, group: Group, kind: str = "exchange in pairs") -> Exception:
    """The error where the backend does not even begin what the ranks of the group send each other."""
    return _not_ended(error, _here(group, kind), _GIVEN_UP.get(group.process_group))


def _ended(wait: Callable[[], object], over: Callable[[], bool], here: Waiting, given_up: str | None) -> bool:
    """Whether it has ended well, after some patience.

    Raises:
        PeerError: it has not.
    """
    try:
        wait()
    except (RuntimeError, Late):
        if not over():
            return False
        try:
            wait()  # it may have ended just now
        except (RuntimeError, Late) as error:
            raise _not_ended(error, here, given_up) from error
    return True


def _not_ended(error: Exception, here: Waiting, given_up: str | None) -> Exception:
    """The error where the backend gives up, because a rank has ended or the time is over: it does not know which."""
    given_up = given_up or this_world().strayed
    if given_up is not None:
        return PeerError(f"{here.text}: these ranks are out of step since this error: {given_up}")
    known = this_world().failures
    failed = _first_failure(here, known)
    if failed is not None:  # who leaves a group closes its connections once it has left word
        return _raised_there(failed, here)
    leave_word(PeerError(f"{here.text}: {error}"))
    silent = ", ".join(map(str, _unaware(here.ranks)))
    failed = _first_failure(here, known)
    if failed is not None and (failed.kind != "PeerError" or not silent):
        found = _raised_there(failed, here)
    else:
        found = PeerError(f"{here.text}: {f'rank {silent} has ended or does not answer; ' if silent else ''}{error}")
    found._told = True  # type: ignore[attr-defined]
    return found


def _check_peers(here: Waiting) -> None:
    """Raise what a rank of the group has raised and this one has not."""
    failed = _first_failure(here, this_world().failures)
    if failed is not None:
        raise _raised_there(failed, here)


def _first_failure(here: Waiting, known: int) -> Failed | None:
    """What a rank of the group has raised that has failed more often than is `known`, if it has not gone on.

    Rather an error of an operator than that of a rank which waited for it.
    """
    ahead = [
        failed for failed in _said(here.ranks) if failed.kind and failed.rank != here.rank and failed.count > known
    ]
    return min(ahead, key=lambda failed: failed.kind == "PeerError", default=None)


def _raised_there(failed: Failed, here: Waiting) -> Exception:
    whence = f"(on rank {failed.rank}, which this rank waited for)"
    mine = "" if failed.text.startswith(here.text) else f"{here.text}: "
    error = _KINDS[failed.kind](f"{mine}{failed.text} {whence}")
    error._failed = failed  # type: ignore[attr-defined]
    return error


def _look_around(here: Waiting, seen: Mapping[int, Waiting]) -> dict[int, Waiting]:
    """Where all wait that this rank depends on.

    Raises:
        PeerError: since the last time all that matter have waited where they are, and none would ever go on.
    """
    now: dict[int, Waiting] = {}
    todo, asked = [*here.ranks], set[int]()
    while todo:
        rank = todo.pop()
        found: Waiting | None = None if rank in asked else here if rank == here.rank else store.peek(_waiting(rank))
        asked.add(rank)
        if found is not None:
            now[rank] = found
            todo += found.ranks
    held = {rank: waiting for rank, waiting in now.items() if rank == here.rank or seen.get(rank) == waiting}
    if here.rank in stuck(held):
        others = sorted({f"rank {w.rank} waits in {w.text}" for w in held.values() if w.rank != here.rank})
        raise PeerError(
            f"{here.text}: not all these ranks come to it, for {'; '.join(others)}. All ranks of a mesh call the same "
            "operators in the same order: call this one on all of them, and use its result where it is wanted"
        )
    return now


def stuck(waiting: Mapping[int, Waiting]) -> set[int]:
    """The ranks that will never go on: who is not among those that wait is about to come to each of their collectives.

    One that has all its ranks ends. A rank goes on where those that it lacks do.
    """
    moving: set[int] = set()
    while True:
        more = {rank for rank, w in waiting.items() if rank not in moving and _goes_on(w, _others(w, waiting), moving)}
        if not more:
            return set(waiting) - moving
        moving |= more


def _others(here: Waiting, waiting: Mapping[int, Waiting]) -> Sequence[Waiting]:
    return [waiting[rank] for rank in here.ranks if rank != here.rank and rank in waiting]


def _goes_on(here: Waiting, others: Sequence[Waiting], moving: Collection[int]) -> bool:
    passed = 0
    for other in others:
        count = other.counts.get(here.group, 0)
        if count < here.number:
            if other.rank not in moving:
                return False
        elif count > here.number or other.group != here.group:
            passed += 1
        elif other.kind != here.kind:
            return False
    return passed < len(here.ranks) - 1


def _key(rank: int) -> str:
    return f"dshard/failed/{rank}"


def _waiting(rank: int) -> str:
    return f"dshard/waiting/{rank}"
