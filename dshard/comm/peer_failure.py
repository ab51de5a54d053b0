"""Failures of a rank, published in the store so that ranks which wait for it raise instead of waiting forever.

Only the rank that holds the values can see errors that depend on them, such as an index out of range. It publishes a
record in the store of the process group, and raises; successful calls send nothing. A rank that waits long in a
collective reads the records of its peers, and raises the same kind of error. The failed rank raises once the others
have failed too, or after a time limit: else it might begin another collective while they wait in the skipped one. A
rank that recovers clears its record; ranks with equal failure counts ignore each other's records, as they failed alike.

A rank that waits long also publishes where it waits. So each rank can detect a deadlock by itself, and its error says
which rank waits where. A rank that computes for long is no error.

gloo aborts point-to-point messages when a wait for them times out: another thread waits for those, until the time limit
of the process group.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the built-in one from Python 3.11
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread, local
from time import monotonic, sleep
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from dshard.comm import store_messages
from dshard.comm.backends import waits_on_host
from dshard.comm.process_groups import Group, backend_name, disconnect, this_world
from dshard.comm.runtime import has_processes, is_planning
from dshard.comm.told_waits import WAITING, Waiting, host_wait, own_wait, stuck, tell_if_long
from dshard.errors import DShardError, PeerError, ReplayError
from dshard.torch_private import autograd_engine, graph_task_id, stop_recomputation

PATIENCE = timedelta(seconds=1)
"""The time for which a rank waits before it reads the records of its peers again."""

_CHECKS = 5  # of the records, before a wait for what all others say to have sent is given up

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (IndexError, PeerError, ReplayError, NotImplementedError, RuntimeError, TypeError, ValueError)
}
EXCHANGE = "exchange in pairs"
_NAMES = {0: "broadcast", 1: "all_reduce", 4: "all_gather", 5: "all_gather", 9: "reduce_scatter"}
"""Names of collectives by torch's numbers; all other numbers are exchanges."""
_LEFT: list[str] = []
_UNNAMED: list[str] = []  # records of a failure whose error is not known yet
_GIVEN_UP: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # because of which error
_UNWANTED: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()  # messages in flight
_OWN = local()  # a waiting thread for each thread, so that no wait queues behind that of another


@dataclass(frozen=True, slots=True)
class Failed:
    """The record of a rank that failed for the `count`th time; `rank` is the one on which the error was first raised.

    An empty `kind` says that the rank has recovered. `waited` counts its waits on each group before its own error.
    """

    count: int
    kind: str
    text: str
    rank: int
    waited: Mapping[str, int] = field(default_factory=dict)


def publish_failure(error: Exception, ranks: Collection[int] = ()) -> None:
    """Publish that this rank has raised `error`, and wait, up to a limit, until `ranks` have failed, too."""
    if isinstance(error, stop_recomputation):  # no failure: a checkpoint ends its second forward pass so
        return
    # dshard's own errors, and what torch refuses without data, are raised on all ranks before anything is sent
    of_all = isinstance(error, DShardError) and not isinstance(error, PeerError | ReplayError)
    if of_all or is_published(error):
        return
    if _has_others():
        leave_word(error)
        if hasattr(error, "_raised_by_all"):
            return
        _wait_for_failures(ranks)
        if any(word.kind and word.rank == dist.get_rank() for word in _failure_records(ranks)):
            this_world().strayed = str(error)


def _has_others() -> bool:
    """Whether there are other ranks that read the records of this one; a search for a plan is of its rank alone."""
    return has_processes() and not is_planning() and dist.get_world_size() > 1 and waits_on_host(backend_name())


def watch_backward(x: Tensor, ranks: Collection[int]) -> None:
    """Publish errors of every backward pass that reaches the plain tensor `x`, wherever it has begun."""
    if x.grad_fn is not None and _has_others():
        x.grad_fn.register_prehook(partial(_watch, ranks))


def _watch(ranks: Collection[int], grads: object) -> None:
    task = graph_task_id()
    if task >= 0 and getattr(_OWN, "task", None) != task:
        _OWN.task = task
        autograd_engine.queue_callback(_Backward(ranks))


class _Backward:
    """Callback of one backward pass: called if the pass succeeds; deleted uncalled, it publishes a failure."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks, self._failures, self._ended = ranks, this_world().failures, False

    def __call__(self) -> None:
        self._ended = True

    def __del__(self) -> None:
        if self._ended or sys.is_finalizing() or not _has_others() or self._failures < this_world().failures:
            return
        leave_word(RuntimeError("its backward pass has failed"))
        _UNNAMED.append(_key(dist.get_rank()))
        _wait_for_failures(self._ranks)


def mark_raised_by_all(error: Exception) -> None:
    """Mark an error that every rank raises by itself before it sends anything."""
    with contextlib.suppress(AttributeError):
        error._raised_by_all = True  # type: ignore[attr-defined]


def is_published(error: BaseException) -> bool:
    """Whether this error has been published, or was raised because of a published one."""
    return hasattr(error, "_published")


def is_from_peer(error: BaseException) -> bool:
    """Whether the error was raised because of another rank."""
    return isinstance(error, PeerError) or hasattr(error, "_failed")


def leave_word(error: BaseException) -> None:
    """Publish in the store that this rank has raised `error`."""
    rank = dist.get_rank()
    key = _key(rank)
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    this_world().failures += not _UNNAMED
    _UNNAMED.clear()
    first: Failed = getattr(error, "_failed", None) or Failed(0, kind, str(error), rank)
    waited = {} if is_from_peer(error) else {group: count[0] for group, count in this_world().waits.items()}
    store_messages.put(key, Failed(this_world().failures, first.kind, first.text, first.rank, waited))
    with contextlib.suppress(AttributeError):
        error._published = True  # type: ignore[attr-defined]
    _LEFT[:] = [key]


def _wait_for_failures(ranks: Collection[int]) -> list[int]:
    """Wait until `ranks` have failed as often as this rank; return those that have not by the time limit."""
    own_rank, end, pause = dist.get_rank(), monotonic() + 3 * PATIENCE.total_seconds(), 0.001
    left = [rank for rank in ranks if rank != own_rank]
    while True:
        left = [rank for rank in left if _failures(rank) < this_world().failures]
        if not left or monotonic() > end:
            return left
        sleep(pause)
        pause = min(2 * pause, 0.05)


def _failures(rank: int) -> int:
    return max((word.count for word in _failure_records([rank])), default=0)


def _failure_records(ranks: Collection[int]) -> list[Failed]:
    """The failure records of those of `ranks` that are not this rank."""
    others = (rank for rank in ranks if rank != dist.get_rank())
    return [record for rank in others for record in [store_messages.peek(_key(rank))] if record is not None]


def wait_for(work: dist.Work, group: Group) -> None:
    """Wait for a collective of the group; raise if one of its ranks has failed and not recovered.

    Raises:
        Exception: of the kind that was raised on another rank.
    """
    if not group.backend.waits_on_host:
        host_wait(work.wait, group)
        return
    group.waits[0] += 1
    if _LEFT:
        _clear_failure()
    try:
        try:
            work.wait(PATIENCE)
        except RuntimeError:
            kind = _NAMES.get(int(work._get_op_type()), "exchange")  # type: ignore[attr-defined]
            _wait_on(partial(work.wait, PATIENCE), work.is_completed, group, kind)
    except BaseException as error:
        _give_up(error, group)
        raise


class MessagesInFlight:
    """Point-to-point messages of the group in flight: a call waits for them and returns the tensor that they fill.

    gloo reads a connection no further where the buffer of its next message is gone, so that nothing arrives behind it:
    messages that are deleted before they were waited for are kept, and waited for when the next ones have begun.

    Raises:
        Exception: of the kind that was raised on another rank.
    """

    __slots__ = ("_group", "_kind", "_out", "_unwanted", "_works")

    def __init__(self, works: list[dist.Work], group: Group, out: Tensor, kind: str = EXCHANGE) -> None:
        self._works, self._group, self._out, self._kind = works, group, out, kind
        self._unwanted = _UNWANTED.setdefault(group.process_group, [])
        if self._unwanted:
            late, self._unwanted[:] = [*self._unwanted], []
            _wait_for_pairs(late, group, kind)

    def __call__(self) -> Tensor:
        works, self._works = self._works, []
        _wait_for_pairs(works, self._group, self._kind)
        return self._out

    def __del__(self) -> None:
        if self._works and self._group.backend.waits_on_host:
            self._unwanted += self._works


def _wait_for_pairs(works: list[dist.Work], group: Group, kind: str) -> None:
    """Wait for point-to-point messages of the group; the list is emptied, which releases the tensors sent."""
    if not group.backend.waits_on_host:
        host_wait(partial(_wait_all, works), group)
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
        try:
            wait()
        except (RuntimeError, Late):
            _wait_on(wait, ended.done, group, kind)
    except BaseException as error:
        del _OWN.waits  # its thread may be held by what will not come
        _give_up(error, group)
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
        store_messages.put(key, Failed(this_world().failures, "", "", dist.get_rank()))


def _wait_on(wait: Callable[[], object], over: Callable[[], bool], group: Group, kind: str) -> None:
    """Wait repeatedly after the first timeout, and check in between whether the wait can ever end."""
    here, since = own_wait(group, kind), monotonic() - PATIENCE.total_seconds()
    store_messages.put(WAITING.format(here.rank), here)
    seen: dict[int, Waiting] = {}
    try:
        for checks in itertools.count():
            if _has_ended(wait, over, here, _GIVEN_UP.get(group.process_group)):
                return
            _check_peers(here, checks)
            seen = _peer_waits(here, seen)
            tell_if_long(here, since)
    finally:
        store_messages.put(WAITING.format(here.rank), None)


def _give_up(error: BaseException, group: Group) -> None:
    """Publish an error that ended a wait, such as KeyboardInterrupt, and close the connections of the group."""
    if not isinstance(error, Exception):
        error = PeerError(f"{own_wait(group).text}: the program has ended the wait")
    if not is_published(error):
        leave_word(error)
    _GIVEN_UP.setdefault(group.process_group, str(error))
    disconnect(group)  # a rank has left out what the others began: what comes next would be taken for that


def not_begun(error: Exception, group: Group) -> Exception:
    """The error to raise if the backend refuses to begin point-to-point messages of the group."""
    return _wait_error(error, own_wait(group, EXCHANGE), _GIVEN_UP.get(group.process_group))


def _has_ended(wait: Callable[[], object], over: Callable[[], bool], here: Waiting, given_up: str | None) -> bool:
    """Wait once more, up to the timeout; whether the collective has completed."""
    try:
        wait()
    except (RuntimeError, Late):
        if not over():
            return False
        try:
            wait()  # it may have ended just now
        except (RuntimeError, Late) as error:
            raise _wait_error(error, here, given_up) from error
    return True


def _wait_error(error: Exception, here: Waiting, given_up: str | None) -> Exception:
    """The error to raise if the backend aborted a collective of the group."""
    # the backend does not say whether a rank has ended or the time limit is over
    given_up = given_up or this_world().strayed
    if given_up is not None:
        return PeerError(f"{here.text}: these ranks are out of step since this error: {given_up}")
    known = this_world().failures
    failed = _first_failure(here, known)
    if failed is not None:  # who leaves a group closes its connections once it has left word
        return _as_raised_on_peer(failed, here)
    leave_word(PeerError(f"{here.text}: {error}"))
    silent = ", ".join(map(str, _wait_for_failures(here.ranks)))
    failed = _first_failure(here, known)
    if failed is not None and (failed.kind != "PeerError" or not silent):
        peer_error = _as_raised_on_peer(failed, here)
    else:
        peer_error = PeerError(
            f"{here.text}: {f'rank {silent} has ended or does not answer; ' if silent else ''}{error}"
        )
    peer_error._published = True  # type: ignore[attr-defined]
    return peer_error


def _check_peers(here: Waiting, checks: int) -> None:
    """Raise the error of a rank of the group that has failed more often than this rank, and so does not come here.

    A rank that failed after this collective has sent its part, which some more checks let arrive.
    """
    known = this_world().failures
    failed = _first_failure(here, known)
    if failed is None:
        return
    passed = all(each.waited.get(here.group, 0) >= here.number for each in _failures_ahead(here, known))
    if not passed or checks == _CHECKS:
        raise _as_raised_on_peer(failed, here)


def _first_failure(here: Waiting, known: int) -> Failed | None:
    """The record of a rank of the group that has failed more than `known` times and not recovered, or None.

    Errors of operators take precedence over the errors of ranks that waited for them.
    """
    return min(_failures_ahead(here, known), key=lambda failed: failed.kind == "PeerError", default=None)


def _failures_ahead(here: Waiting, known: int) -> list[Failed]:
    records = _failure_records(here.ranks)
    return [failed for failed in records if failed.kind and failed.rank != here.rank and failed.count > known]


def _as_raised_on_peer(failed: Failed, here: Waiting) -> Exception:
    whence = f"(on rank {failed.rank}, which this rank waited for)"
    mine = "" if failed.text.startswith(here.text) else f"{here.text}: "
    error = _KINDS[failed.kind](f"{mine}{failed.text} {whence}")
    error._failed = failed  # type: ignore[attr-defined]
    return error


def _peer_waits(here: Waiting, seen: Mapping[int, Waiting]) -> dict[int, Waiting]:
    """The waits of all ranks on which this rank depends, directly or by the ranks of their groups."""
    waits: dict[int, Waiting] = {}
    queue, visited = [*here.ranks], set[int]()
    while queue:
        rank = queue.pop()
        peer_wait: Waiting | None = (
            None if rank in visited else here if rank == here.rank else store_messages.peek(WAITING.format(rank))
        )
        visited.add(rank)
        if peer_wait is not None:
            waits[rank] = peer_wait
            queue += peer_wait.ranks
    unchanged = {rank: waiting for rank, waiting in waits.items() if rank == here.rank or seen.get(rank) == waiting}
    if here.rank in stuck(unchanged):
        others = sorted({f"rank {w.rank} waits in {w.text}" for w in unchanged.values() if w.rank != here.rank})
        raise PeerError(
            f"{here.text}: not all these ranks come to it, for {'; '.join(others)}. All ranks of a mesh call the same "
            "operators in the same order: call this one on all of them, and use its result where it is wanted"
        )
    return waits


def waits_ahead(rank: int) -> bool:
    """Whether `rank` waits for this one in a collective that this one has not reached."""
    peer: Waiting | None = store_messages.peek(WAITING.format(rank))
    if peer is None or dist.get_rank() not in peer.ranks:
        return False
    return peer.number > this_world().waits.get(peer.group, [0])[0]


def _key(rank: int) -> str:
    return f"dshard/failed/{rank}"
