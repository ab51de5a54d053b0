"""Ranks started on this host for one job; the parent receives their messages while they run."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from dshard.errors import RankError

Send: TypeAlias = Callable[[object], None]
Job: TypeAlias = Callable[[int, str, Send], None]

PATIENCE = 180.0  # seconds without a message from any rank, after which all are killed
GRACE = 1.0  # seconds to wait for other failures after the first: the first to arrive need not be the cause
SCREEN = 16  # lines of a rank's traceback that are shown


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank raised an error, at the time `when`."""

    rank: int
    what: str
    when: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process ended."""

    rank: int
    code: int


@dataclass(slots=True)
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection[Any, Any]


def run_ranks(job: Job, n: int, hear: Callable[[Any], None], patience: float = PATIENCE) -> None:
    """Start `n` processes that each call `job(rank, meet, send)`; call `hear` with each message until all have ended.

    `meet` is the `init_method` of their process group. No process outlives this call.

    Raises:
        RankError: a rank raised, was killed, or all were silent for `patience` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="dshard-") as folder:
        meet = (Path(folder) / "meet").as_uri()
        ranks: list[_Rank] = []
        try:
            ranks.extend(_start(rank, job, meet) for rank in range(n))
            _listen(ranks, hear, patience)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def _start(rank: int, job: Job, meet: str) -> _Rank:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports torch once, then forks the ranks: saves seconds for each rank
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(rank, job, meet, theirs), name=f"rank {rank}", daemon=True)
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


def _main(rank: int, job: Job, meet: str, pipe: Connection[Any, Any]) -> None:
    """Run the job as one rank, in its process: an error is sent to the parent, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(2, 1)  # libraries must not print into the parent's output
    try:
        job(rank, meet, pipe.send)
    except BaseException as error:
        with suppress(OSError):
            pipe.send(Raised(rank, screenful(error), time.time()))
        os._exit(1)  # the process group may be waiting for ranks that will never come


def _listen(ranks: list[_Rank], hear: Callable[[Any], None], patience: float) -> None:
    alive = list(ranks)
    for message in _messages(alive, patience):
        match message:
            case Ended(code=0):
                pass
            case Raised() | Ended():
                time.sleep(GRACE)
                raise RankError(_cause([message, *_messages(alive, patience=0.0)]))
            case _:
                hear(message)
    if alive:
        silent = ", ".join(str(rank.number) for rank in alive)
        raise RankError(f"ranks {silent} said nothing for {patience:.0f} s and were stopped: they wait for one another")


def _messages(alive: list[_Rank], patience: float) -> Iterator[object]:
    """Yield the messages of the ranks, until none is left in `alive` or all are silent for `patience` seconds."""
    while alive:
        ready = wait([rank.pipe for rank in alive], patience)
        if not ready:
            return
        for rank in [rank for rank in alive if rank.pipe in ready]:
            message = _receive(rank)
            if isinstance(message, Ended):
                alive.remove(rank)
            yield message


def _receive(rank: _Rank) -> object:
    try:
        return rank.pipe.recv()
    except EOFError:
        rank.process.join()
        return Ended(rank.number, rank.process.exitcode or 0)


def _cause(messages: list[object]) -> str:
    """The text of the failure that caused the others: a process that died without a message, else the first error."""
    raised = [message for message in messages if isinstance(message, Raised)]
    spoke = {message.rank for message in raised}
    for message in messages:
        if isinstance(message, Ended) and message.code and message.rank not in spoke:
            return f"rank {message.rank} failed: its process ended with exit code {message.code}"
    first = min(raised, key=lambda message: message.when)
    return f"rank {first.rank} failed: {first.what}"


def screenful(error: BaseException) -> str:
    """The text of an error on one screen: its message, and below it the end of its traceback."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    lines = [line for line in trace if line.strip(" ^~")]
    return "\n".join([*summary.splitlines()[:SCREEN], "", *lines[-SCREEN:]])
