"""Asynchronous collectives on flat buffers: on the process group itself, or functional ones while torch traces.

Each function begins a collective with the buffer to send and the one to receive in, allocated if None, and returns a
function that waits for its end and returns the buffer received. torch's functional collectives pass several layers of
Python, which cost more than the start of the collective; only traced tensors take them, as torch.compile knows no
others. On a device with streams a wait blocks the current stream, not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm.collective import Collective, by_slot
from dshard.comm.peer_failure import EXCHANGE, MessagesInFlight, not_begun, wait_for
from dshard.comm.process_groups import Group, this_world
from dshard.comm.traced_collectives import keep_collectives_apart, sent_in_its_pass
from dshard.placements import ReduceOp

Wait: TypeAlias = Callable[[], Tensor]
Begin: TypeAlias = Callable[[Tensor, Tensor | None], Wait]
_c10d = torch.ops._c10d_functional


class Factor(NamedTuple):
    """The right operand of a matmul fused with a collective, and the dim that is gathered or scattered.

    That is a dim of the left operand if that is gathered, else of the result, which is reduce-scattered. `gathered`
    receives the left operand as it was multiplied, where that is wanted.
    """

    right: Tensor
    dim: int
    gathers: bool
    gathered: list[Tensor] | None = None


REDUCTIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT}
"""The reductions that backends have."""


def _with_op(options: Any, op: str) -> Any:
    options.reduceOp = REDUCTIONS[op]
    return options


_ALL_REDUCE = {op: _with_op(dist.AllreduceOptions(), op) for op in REDUCTIONS}
_REDUCE_SCATTER = {op: _with_op(dist.ReduceScatterOptions(), op) for op in REDUCTIONS}


def gather(n: int, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat chunk -> the chunks of all `n` ranks, in the order of the process group; all of one size."""
    if out is None:
        out = x.new_empty(n * x.numel())
    return partial(_ended, group, out, group.process_group._allgather_base(out, x.contiguous()))


def share(n: int, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat chunk -> the chunks of all `n` ranks, by an all_to_all of copies; all of one size."""
    if out is None:
        out = x.new_empty(n * x.numel())
    return partial(_ended, group, out, group.process_group.alltoall_base(out, torch.cat([x] * n), [], []))


def swap(send: Sequence[int], recv: Sequence[int], group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat pieces for each rank -> flat pieces from each, in the order of the process group."""
    if out is None:
        out = x.new_empty(sum(recv))
    work = group.process_group.alltoall_base(out, x.contiguous(), list(recv), list(send))
    return partial(_ended, group, out, work)


def gather_by_broadcasts(sizes: Sequence[int], group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat chunk -> the chunks of all ranks, of these `sizes`, each broadcast into place, all at once.

    If the backend would run collectives one after the other, they are coalesced, as in torch's own all_gather there.
    """
    if out is None:
        out = x.new_empty(sum(sizes))
    parts, pg = out.split(list(sizes)), group.process_group
    parts[group.index].copy_(x)
    pairs = [each for each in zip(parts, group.slots or range(len(sizes)), strict=True) if each[0].numel()]
    if not group.backend.coalesces or not pairs:
        return partial(_ended, group, out, *[pg.broadcast(part, slot) for part, slot in pairs])
    pg._start_coalescing(x.device)
    try:
        for part, slot in pairs:
            pg.broadcast(part, slot)
    finally:
        work = pg._end_coalescing(x.device)
    return partial(_ended, group, out, work)


def gather_by_messages(sizes: Sequence[int], group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat chunk -> the chunks of all ranks, of these `sizes`, in one group of messages from each rank to each."""
    if out is None:
        out = x.new_empty(sum(sizes))
    parts, nothing = list(out.split(list(sizes))), out[:0]
    parts[group.index].copy_(x)
    parts[group.index] = nothing
    send = [x.contiguous() if part is not nothing else nothing for part in parts]
    slots = group.slots or range(len(sizes))
    return partial(_ended, group, out, group.process_group.alltoall(by_slot(parts, slots), by_slot(send, slots)))


def scatter_reduced(op: ReduceOp, n: int, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Equal flat pieces for each of `n` ranks, in process group order -> the reduction of this rank's piece."""
    if out is None:
        out = x.new_empty(x.numel() // n)
    work = group.process_group._reduce_scatter_base(out, x.contiguous(), _REDUCE_SCATTER[op])
    return partial(_ended, group, out, work)


def reduce(op: ReduceOp, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Terms -> their reduction over all ranks, in a tensor of the same shape; `out` may be `x` itself."""
    if out is None:
        out = x.clone() if x.is_contiguous() else x.contiguous()
    elif out is not x:
        out.copy_(x)
    return partial(_ended, group, out, group.process_group.allreduce([out], _ALL_REDUCE[op]))


def broadcast(slot: int, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat tensor -> the flat tensor of rank number `slot` of the process group, on all its ranks."""
    out = x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)
    return partial(_ended, group, out, group.process_group.broadcast(out, slot))


def scatter(sizes: Sequence[int], root: int, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Flat pieces on rank number `root` of the group -> piece `i` on rank number `i`, in point-to-point messages."""
    if out is None:
        out = x.new_empty(sizes[group.index])
    if group.index == root:
        parts = x.contiguous().split(list(sizes))
        out.copy_(parts[root])
        pairs = [*zip(parts, group.ranks, strict=True)]
        sent = [(part, rank) for part, rank in pairs if rank != pairs[root][1] and len(part)]
        works = [dist.isend(part, rank, group.process_group) for part, rank in sent]
    else:
        works = [dist.irecv(out, group.ranks[root], group.process_group)] if out.numel() else []
    return MessagesInFlight([work for work in works if work is not None], group, out)


def exchange(
    send: Sequence[Tensor], recv: Sequence[Tensor], here: int, pg: dist.ProcessGroup, tag: int = 0
) -> list[dist.Work]:
    """Begin an all_to_all in point-to-point messages: send a piece to each rank, and receive one from each.

    `here` is the number of this rank in the process group. gloo announces over the connection of two ranks that one of
    them may send, behind all data in flight there. In its own all_to_all ranks send before they announce: of two ranks
    that do not begin at the same moment the earlier one must wait until the later one has sent all its data, and a slow
    link is used in one direction at a time. This function posts the receives, which announce, first. Empty pieces are
    not sent.
    """
    peers = [*range(here + 1, len(recv)), *range(here)]
    works = [pg.recv([recv[peer]], peer, tag) for peer in reversed(peers) if recv[peer].numel()]
    works += [pg.send([send[peer]], peer, tag) for peer in peers if send[peer].numel()]
    recv[here].copy_(send[here])
    return works


def exchange_pieces(
    send: Sequence[Tensor], out: Tensor, sizes: Sequence[int], group: Group, tag: int = 0, kind: str = EXCHANGE
) -> Wait:
    """Flat pieces for each rank of the group -> those of these `sizes` from each, in point-to-point messages."""
    slots = group.slots or range(len(sizes))
    pieces = by_slot(send, slots), by_slot(out.split(list(sizes)), slots)
    try:
        works = exchange(*pieces, slots[group.index], group.process_group, tag)
    except RuntimeError as error:
        raise not_begun(error, group) from error
    return MessagesInFlight(works, group, out, kind)


def multiply(factor: Factor, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """A chunk of the left operand, or all of it -> the product, or this rank's chunk of its sum over the ranks.

    torch's kernels for symmetric memory run on the current stream, which waits for the other ranks; the host does not.
    They want a chunk to gather contiguous with `dim` first, and at a multiple of 16 bytes.
    """
    right, dim, gathers, wanted = factor
    if gathers:
        x = x.movedim(dim, 0).contiguous().movedim(0, dim)
        x = x.clone() if x.storage_offset() * x.itemsize % 16 else x
        whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [right], dim, group.name, return_A=wanted is not None
        )
        if wanted is not None:
            wanted.append(whole)
    else:
        product = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, right, "sum", dim, group.name)
    return lambda: product


def functional(c: Collective, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """A collective while torch traces, with pieces in the order of the process group."""
    n, name = len(c.ranks), group.name
    keep_collectives_apart()
    this_world().named[name] = group  # of several meshes with this process group, errors name the axes of this one
    with sent_in_its_pass():
        result = _functional(c, n, name, x)

    def wait() -> Tensor:
        with sent_in_its_pass():
            received: Tensor = _c10d.wait_tensor(result)
        return received if out is None else out.copy_(received)

    return wait


def _functional(c: Collective, n: int, name: str, x: Tensor) -> Tensor:
    match c.kind:
        case "all_gather" if len(set(c.recv)) == 1:
            result = _c10d.all_gather_into_tensor(x, n, name)
        case "all_gather":
            result = _c10d.all_to_all_single(x.repeat(n), list(c.recv), [x.numel()] * n, name)
        case "all_to_all":
            result = _c10d.all_to_all_single(x, list(c.recv), list(c.send), name)
        case "reduce_scatter":
            result = _c10d.reduce_scatter_tensor(x, c.op, n, name)
        case "all_reduce":
            result = _c10d.all_reduce(x, c.op, name)
        case "broadcast":
            result = _c10d.broadcast(x, c.root, name)
        case "scatter":
            raise AssertionError("a graph sends no whole tensors")
    begun: Tensor = result
    return begun


def _ended(group: Group, out: Tensor, *works: dist.Work) -> Tensor:
    for work in works:
        wait_for(work, group)
    return out
