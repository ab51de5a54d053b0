"""One job on all ranks of a process group, which exists meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from dshard.comm import share_cores
from dshard.errors import MeshError, RankError
from dshard.launch.ranks import Send, run_ranks, screenful

T = TypeVar("T")
Tell: TypeAlias = Callable[[Any], None]
Work: TypeAlias = Callable[[Tell], T]

RANKS = 4


def run(work: Work[T], tell: Tell, *, ranks: int, device: str) -> T:
    """Call `work(tell)` on every rank; what it returned on rank 0, or here if this process is a rank itself.

    On rank 0 `tell` is called in this process with what the work tells, on others it goes nowhere. Work that is to run
    on ranks started here is pickled, and so are its result and what it tells.

    Raises:
        RankError: a rank failed; the message names it.
    """
    if joining():
        return _join(work, tell, device)
    heard: _Heard[T] = _Heard(tell)
    run_ranks(partial(_as_rank, work, ranks, device), ranks, heard)
    assert heard.done is not None
    return heard.done.result


def joining() -> bool:
    """Whether a launcher has started the ranks already, so that this process is one of them."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def reporting() -> bool:
    """Whether this process is the one that talks to the user."""
    return not joining() or os.environ["RANK"] == "0"


def choose_ranks(asked: int | None, device: str) -> int:
    """As many ranks as asked or as the launcher started; else four, or fewer if on CUDA there are fewer GPUs.

    Raises:
        MeshError: the launcher started another number of ranks than was asked.
    """
    if joining():
        started = int(os.environ["WORLD_SIZE"])
        if asked not in (None, started):
            raise MeshError(f"asked for {asked} ranks, but the launcher started {started}: leave --ranks out")
        return started
    return asked or (max(1, min(RANKS, torch.cuda.device_count())) if device == "cuda" else RANKS)


def choose_device(asked: str, ranks: int) -> str:
    """What was asked; for "auto", CUDA if each rank of this host can have a GPU of its own, else the CPU.

    Raises:
        MeshError: CUDA was asked for, and there are fewer GPUs than ranks.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < here:
        raise MeshError(f"{here} ranks on CUDA need a GPU each and this host has {gpus}: ask for fewer, or for the CPU")
    if asked == "auto":
        return "cuda" if gpus >= here else "cpu"
    return asked


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    """The last that rank 0 says."""

    result: T


@dataclass(slots=True)
class _Heard(Generic[T]):
    """What the ranks have sent: what was told is passed on, the result is kept."""

    tell: Tell
    done: _Done[T] | None = None

    def __call__(self, message: Any) -> None:
        if isinstance(message, _Done):
            self.done = message
        else:
            self.tell(message)


def _join(work: Work[T], tell: Tell, device: str) -> T:
    try:
        return _in_group(work, tell, device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    except Exception as error:
        raise RankError(f"rank {os.environ['RANK']} failed: {screenful(error)}") from error


def _as_rank(work: Work[T], ranks: int, device: str, rank: int, meet: str, send: Send) -> None:
    result = _in_group(work, send, device, rank, init_method=meet, rank=rank, world_size=ranks)
    if rank == 0:
        send(_Done(result))


def _in_group(work: Work[T], tell: Tell, device: str, local_rank: int, **group: Any) -> T:
    """Do the work as one rank of a process group, which exists meanwhile."""
    share_cores()
    own = None
    if device == "cuda":
        own = torch.device("cuda", local_rank)
        torch.cuda.set_device(own)
    dist.init_process_group("gloo" if own is None else "nccl", device_id=own, **group)
    result = work(tell if dist.get_rank() == 0 else _silent)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _silent(told: object) -> None:
    """What the ranks that do not report have to say."""
