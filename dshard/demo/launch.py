"""Train on ranks of our own, or on those that a launcher such as torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dshard.demo.data import check_installed
from dshard.demo.ranks import Send, run_ranks, screenful
from dshard.demo.train import Progress, Row, Settings, Tell, train_all
from dshard.errors import MeshError, RankError

Work: TypeAlias = Callable[[Settings, Tell], list[Row]]

RANKS = 4


def run(settings: Settings, tell: Tell, work: Work = train_all) -> list[Row]:
    """Train under each strategy; the rows, on the process that reports. `tell` hears of each step there.

    Raises:
        RankError: a rank failed; the message names it.
        MissingExtra: scikit-learn is not installed.
    """
    check_installed()
    if joining():
        return _join(settings, tell, work)
    told = _Told(tell)
    run_ranks(partial(_as_rank, settings, work), settings.ranks, told)
    return told.rows


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


@dataclass(slots=True)
class _Told:
    """What the ranks have sent: steps are passed on, rows are kept."""

    tell: Tell
    rows: list[Row] = field(default_factory=list)

    def __call__(self, message: Progress | list[Row]) -> None:
        if isinstance(message, Progress):
            self.tell(message)
        else:
            self.rows = message


def _join(settings: Settings, tell: Tell, work: Work) -> list[Row]:
    try:
        return _in_group(settings, tell, work, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    except Exception as error:
        raise RankError(f"rank {os.environ['RANK']} failed: {screenful(error)}") from error


def _as_rank(settings: Settings, work: Work, rank: int, meet: str, send: Send) -> None:
    rows = _in_group(settings, send, work, rank, init_method=meet, rank=rank, world_size=settings.ranks)
    if rank == 0:
        send(rows)


def _in_group(settings: Settings, tell: Tell, work: Work, local_rank: int, **group: Any) -> list[Row]:
    """Do the work as one rank of a process group, which exists meanwhile."""
    torch.set_num_threads(1)  # ranks share the cores, and the model is small
    device = None
    if settings.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl", device_id=device, **group)
    rows = work(settings, tell if dist.get_rank() == 0 else _silent)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _silent(progress: Progress) -> None:
    """What the ranks that do not report have to say."""
