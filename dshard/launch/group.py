"""Run a job on all ranks of a process group that exists only for the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from dshard.comm import share_cores
from dshard.errors import MeshError, RankError
from dshard.launch.processes import raised
from dshard.launch.ranks import Send, run_ranks, screenful

T = TypeVar("T")
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
    """The number of ranks: as requested, or as the launcher started; else four, or on CUDA at most the number of GPUs.

    Raises:
        MeshError: the launcher started another number of ranks than `ranks`, or they are too many for this host.
    """
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

    Raises:
        MeshError: `device` is "cuda", and there are fewer GPUs than ranks, or none to share.
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
    result = work(send if dist.get_rank() == 0 else _drop)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _drop(message: object) -> None:
    """Drop a message of a rank other than 0."""
