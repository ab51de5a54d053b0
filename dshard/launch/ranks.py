"""Ranks started on this host for one job; the parent receives their messages while they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from dshard.errors import RankError
from dshard.launch.processes import Answer, Failure, Kind, Processes, failures_of, request, send

T = TypeVar("T")
Send: TypeAlias = Callable[[Any], None]
Job: TypeAlias = Callable[[int, str, Send], T]

PATIENCE = 180.0  # seconds without a message from any rank, after which all are killed
GRACE = 1.0  # seconds to wait for other failures after the first: the first to arrive need not be the cause
SCREEN = 16  # lines of a rank's traceback that are shown


def run_ranks(job: Job[T], n: int, on_message: Callable[[Any], object] = print, patience: float = PATIENCE) -> list[T]:
    """Start `n` processes that each call `job(rank, meet, send)`; `on_message` gets each message that they send.

    The results are in rank order. `meet` is the `init_method` of their process group. No process outlives this call.

    Raises:
        RankError: a rank raised, was killed, or all were silent for `patience` seconds.
    """
    processes = Processes(n)
    try:
        meet = (processes.folder / "meet").as_uri()
        requests = [request(_run, job, rank, meet) for rank in range(n)]
        outcomes = processes.call(requests, patience, on_message=on_message, grace=GRACE)
    finally:
        processes.close()
    failures = failures_of(outcomes)
    if failures:
        raise RankError(_cause(failures, patience))
    return [outcome.value for outcome in outcomes if isinstance(outcome, Answer)]


def _run(job: Job[T], rank: int, meet: str) -> T:
    os.dup2(2, 1)  # libraries must not print into the parent's output
    return job(rank, meet, send)


def _cause(failures: dict[int, Failure], patience: float) -> str:
    """The text of the failure that caused the others: a process that died without a message, else the first error."""
    rank = min(failures, key=lambda rank: (failures[rank].kind, failures[rank].when))
    first = failures[rank]
    match first.kind:
        case Kind.EXITED:
            return f"rank {rank} failed: its process ended with exit {first.what.removeprefix('exited with ')}"
        case Kind.RAISED:
            return f"rank {rank} failed: {screenful(first)}"
        case Kind.WAITING:
            ranks = ", ".join(map(str, failures))
            return f"ranks {ranks} said nothing for {patience:.0f} s and were stopped: they wait for one another"


def screenful(failure: Failure) -> str:
    """The text of an error on one screen: its message, and below it the end of its traceback."""
    frames = [line for line in failure.where.splitlines() if line.startswith(" ") and line.strip(" ^~")]
    return "\n".join([*failure.what.removeprefix("raised ").splitlines()[:SCREEN], "", *frames[-SCREEN:]])
