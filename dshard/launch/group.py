"""Run a job on all ranks of a process group that exists only for the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from dshard.errors import MeshError, RankError
from dshard.launch.processes import (
    Failure,
    FailureKind,
    Processes,
    ReturnValue,
    failures_of,
    raised,
    request,
    send,
    share_cores,
)

T = TypeVar("T")
Send: TypeAlias = Callable[[Any], None]
Job: TypeAlias = Callable[[int, str, Send], T]

PATIENCE = 180.0  # seconds without a message from any rank, after which all are killed
GRACE = 1.0  # seconds to wait for other failures after the first: the first to arrive need not be the cause
SCREEN = 16  # lines of a rank's traceback that are shown


def run_ranks(job: Job[T], n: int, on_message: Callable[[Any], object] = print, patience: float = PATIENCE) -> list[T]:
    """Start `n` processes that each call `job(rank, meet, send)`; `on_message` gets each message that they send.

    The results are in rank order. `meet` is the `init_method` of their process group. No process outlives this call.
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
    return [outcome.value for outcome in outcomes if isinstance(outcome, ReturnValue)]


def _run(job: Job[T], rank: int, meet: str) -> T:
    os.dup2(2, 1)  # libraries must not print into the parent's output
    return job(rank, meet, send)


def _cause(failures: dict[int, Failure], patience: float) -> str:
    """The text of the failure that caused the others: a process that died without a message, else the first error."""
    rank = min(failures, key=lambda rank: (failures[rank].kind, failures[rank].when))
    first = failures[rank]
    match first.kind:
        case FailureKind.EXITED:
            return f"rank {rank} failed: its process ended with exit {first.what.removeprefix('exited with ')}"
        case FailureKind.RAISED:
            return f"rank {rank} failed: {screenful(first)}"
        case FailureKind.WAITING:
            ranks = ", ".join(map(str, failures))
            return f"ranks {ranks} said nothing for {patience:.0f} s and were stopped: they wait for one another"


def screenful(failure: Failure) -> str:
    """The text of an error on one screen: its message, and below it the end of its traceback."""
    frames = [line for line in failure.where.splitlines() if line.startswith(" ") and line.strip(" ^~")]
    return "\n".join([*failure.what.removeprefix("raised ").splitlines()[:SCREEN], "", *frames[-SCREEN:]])


Work: TypeAlias = Callable[[Send], T]

RANKS = 4
MOST_RANKS = 64
"""Ranks that are started on a host of fewer cores."""


def run(work: Work[T], receive: Send, *, ranks: int, device: str) -> T:
    """Call `work(send)` on every rank; return its result on rank 0, or on this rank if this process is one.

    `receive` is called in this process with the messages that the work on rank 0 sends; those of other ranks are
    dropped. On ranks started here the work, its result and its messages are pickled.

    Raises:
        RankError: a rank failed; the message names it.
    """
    if is_launched():
        return _join(work, receive, device)
    result, *_ = run_ranks(partial(_as_rank, work, ranks, device), ranks, receive)
    assert result is not None
    return result[0]


def is_launched() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_reporting() -> bool:
    """Whether this process writes output for the user: it is rank 0, or starts the ranks."""
    return not is_launched() or os.environ["RANK"] == "0"


def choose_ranks(ranks: int | None, device: str) -> int:
    """The number of ranks: as requested, or as the launcher started; else four, or on CUDA at most one for each GPU."""
    if is_launched():
        started = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, started):
            raise MeshError(f"asked for {ranks} ranks, but the launcher started {started}: leave --ranks out")
        return started
    most = max(MOST_RANKS, os.cpu_count() or 1)
    if ranks is not None and ranks > most:
        raise MeshError(
            f"{ranks:,} ranks are too many processes for this host: ask for at most {most}, or start more on several "
            "hosts with torchrun"
        )
    return ranks or (max(1, min(RANKS, torch.cuda.device_count())) if device == "cuda" else RANKS)


def choose_device(device: str, ranks: int, share_gpus: bool = False) -> str:
    """The device type: as requested; for "auto", CUDA if each rank of this host can have its own GPU, else the CPU.

    With `share_gpus` several ranks started here may be asked to share a GPU.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    may_share = share_gpus and gpus > 0 and not is_launched()
    if device == "cuda" and gpus < local_ranks and not may_share:
        need = "1 rank on CUDA needs a GPU" if local_ranks == 1 else f"{local_ranks} ranks on CUDA need a GPU each"
        raise MeshError(f"{need} and this host has {gpus}: ask for {'fewer, or for ' * (gpus > 0)}the CPU")
    if device == "auto":
        return "cuda" if gpus >= local_ranks else "cpu"
    return device


def _join(work: Work[T], receive: Send, device: str) -> T:
    try:
        return _in_group(work, receive, device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    except Exception as error:
        raise RankError(f"rank {os.environ['RANK']} failed: {screenful(raised(error))}") from error


def _as_rank(work: Work[T], ranks: int, device: str, rank: int, meet: str, send: Send) -> tuple[T] | None:
    result = _in_group(work, send, device, rank, init_method=meet, rank=rank, world_size=ranks)
    return (result,) if rank == 0 else None


def _in_group(work: Work[T], send: Send, device: str, local_rank: int, **group: Any) -> T:
    """Run the work as one rank of a process group, created before and destroyed after it."""
    share_cores()
    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", local_rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu, **group)
    result = work(send if dist.get_rank() == 0 else lambda message: None)
    dist.barrier()
    dist.destroy_process_group()
    return result
