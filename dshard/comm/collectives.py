"""Collectives on flat buffers: called on the process group itself, or as functional collectives while torch traces.

torch's functional collectives pass several layers of Python, which cost more than the start of the collective. Only
traced tensors, which have no memory yet, take them, because torch.compile knows them alone. A wait lets the current
stream of a device wait, not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm.peer_failure import wait_for
from dshard.comm.runtime import Group
from dshard.placements import ReduceOp

_c10d = torch.ops._c10d_functional
_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT}


def _all_reduce_options(op: str) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


def _reduce_scatter_options(op: str) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _OPS[op]
    return options


_ALL_REDUCE = {op: _all_reduce_options(op) for op in _OPS}
_REDUCE_SCATTER = {op: _reduce_scatter_options(op) for op in _OPS}


def gather(x: Tensor, n: int, group: Group) -> Tensor:
    """Flat chunk -> the chunks of all `n` ranks, in the order of the process group; all of one size."""
    if type(x) is not Tensor:
        return _wait(_c10d.all_gather_into_tensor(x, n, group.name))
    out = x.new_empty(n * x.numel())
    wait_for(group.process_group._allgather_base(out, x.contiguous()), group)
    return out


def swap(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group) -> Tensor:
    """Flat pieces for each rank -> flat pieces from each, in the order of the process group."""
    if type(x) is not Tensor:
        return _wait(_c10d.all_to_all_single(x, list(recv), list(send), group.name))
    out = x.new_empty(sum(recv))
    wait_for(group.process_group.alltoall_base(out, x.contiguous(), list(recv), list(send)), group)
    return out


def share(x: Tensor, n: int, group: Group) -> Tensor:
    """Flat chunk -> the chunks of all `n` ranks, by an all_to_all of copies; all of one size."""
    out = x.new_empty(n * x.numel())
    wait_for(group.process_group.alltoall_base(out, torch.cat([x] * n), [], []), group)
    return out


def scatter(x: Tensor, op: ReduceOp, n: int, group: Group) -> Tensor:
    """Equal flat pieces for each of `n` ranks, in process group order -> the reduction of this rank's piece."""
    if type(x) is not Tensor:
        return _wait(_c10d.reduce_scatter_tensor(x, op, n, group.name))
    out = x.new_empty(x.numel() // n)
    wait_for(group.process_group._reduce_scatter_base(out, x.contiguous(), _REDUCE_SCATTER[op]), group)
    return out


def reduce(x: Tensor, op: ReduceOp, group: Group) -> Tensor:
    """Flat terms -> their reduction over all ranks."""
    if type(x) is not Tensor:
        return _wait(_c10d.all_reduce(x, op, group.name))
    out, work = begin_reduce(x, op, group)
    wait_for(work, group)
    return out


def begin_reduce(x: Tensor, op: ReduceOp, group: Group, *, own: bool = False) -> tuple[Tensor, dist.Work]:
    """Begin an all_reduce; return its result and its work. With `own` it may overwrite `x`."""
    out = x.contiguous() if own or not x.is_contiguous() else x.clone()
    return out, group.process_group.allreduce([out], _ALL_REDUCE[op])


def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Flat tensor -> the flat tensor of rank number `source` of the process group, on all its ranks."""
    if type(x) is not Tensor:
        return _wait(_c10d.broadcast(x, source, group.name))
    out = x.clone(memory_format=torch.contiguous_format)
    wait_for(group.process_group.broadcast(out, source), group)
    return out


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _c10d.wait_tensor(x)
    return out
