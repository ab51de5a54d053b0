"""The data of collectives, moved over gloo as bytes and reduced on each rank, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.tools.nccl_contract.operation import Bytes

Gloo: TypeAlias = Any
"""A gloo backend, whose stubs lack its methods."""
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def gather(gloo: Gloo, x: Bytes, size: int) -> list[Bytes]:
    """Bytes of one size on all ranks -> those of each rank."""
    if not x.numel():
        return [x] * size
    out = x.new_empty(size * x.numel())
    gloo._allgather_base(out, x).wait()
    return list(out.chunk(size))


def exchange(gloo: Gloo, pieces: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
    """Bytes for each rank -> bytes from each."""
    out = torch.empty(sum(sizes), dtype=torch.uint8)
    gloo.alltoall_base(out, torch.cat(list(pieces)), list(sizes), [piece.numel() for piece in pieces]).wait()
    return list(out.split(list(sizes)))


def broadcast(gloo: Gloo, x: Bytes, root: int) -> Bytes:
    """The bytes of the root, on all ranks."""
    if x.numel():
        options = dist.BroadcastOptions()
        options.rootRank = root
        gloo.broadcast([x], options).wait()
    return x


def reduce(terms: Sequence[Bytes], dtype: torch.dtype, op: Any) -> Bytes:
    """The bytes of each rank's term -> those of their reduction; half precision is summed in single."""
    if not terms[0].numel():
        return terms[0]
    rows = torch.stack(list(terms)).view(dtype)
    return _reduced(rows.to(_WIDE.get(dtype, dtype)), op).to(dtype).contiguous().view(torch.uint8)


def _reduced(rows: Tensor, op: Any) -> Tensor:
    if rows.dtype == torch.bool:  # a sum is a maximum there, as torch has it
        return rows.all(0) if op == dist.ReduceOp.PRODUCT or op == dist.ReduceOp.MIN else rows.any(0)
    if op == dist.ReduceOp.MAX:
        return rows.amax(0)
    if op == dist.ReduceOp.MIN:
        return rows.amin(0)
    if op == dist.ReduceOp.PRODUCT:
        return rows.prod(0, dtype=rows.dtype)
    total = rows.sum(0, dtype=rows.dtype)
    if op == dist.ReduceOp.AVG:
        whole = not (total.is_floating_point() or total.is_complex())
        return total.div(len(rows), rounding_mode="trunc" if whole else None)
    return total
