"""Collectives on flat buffers of one group, by the fastest primitive of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm import collectives
from dshard.comm.peer_failure import not_begun, wait_for, wait_for_pairs
from dshard.comm.runtime import Group
from dshard.comm.traced_collectives import traced
from dshard.errors import ShapeError
from dshard.placements import ReduceOp

T = TypeVar("T")
HALF = {torch.float16, torch.bfloat16}
# dtypes that every backend moves; the others travel as bytes
_MOVES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
}
_SUMS = {torch.float64, torch.float32, torch.int64, torch.int32}
# gloo's own all_gather copies what it received once more, so the parts are broadcast into place, all at once; where
# they are this small, one exchange of copies takes less time than the start of so many broadcasts; between hosts whose
# ranks share a link, its ring sends least over that link
_FEW_BYTES = 2**18
_NUMBER = 2**24  # the tag of messages that reduce a number, which no other message has


def all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Flat chunk -> the flat chunks of all ranks, rank `i` giving `sizes[i]` elements; nothing is padded."""
    if x.dtype not in _MOVES:
        return all_gather(x.view(torch.uint8), [size * x.itemsize for size in sizes], group).view(x.dtype)
    eager, equal_sizes = not traced(x), sizes.count(sizes[0]) == len(sizes)
    if equal_sizes and (group.backend == "nccl" or group.spread or not eager):
        out = collectives.gather(x, len(sizes), group)
        return out if group.slots is None else from_slots(out, sizes, group.slots)
    if eager and _sends_in_pairs(group):
        return _exchange_in_pairs([x] * len(sizes), x, sizes, group)
    if not eager or (group.backend != "nccl" and sum(sizes) * x.itemsize <= _FEW_BYTES):
        if equal_sizes and sizes[0]:  # as every rank then finds, so all may leave the sizes out
            out = collectives.share(x, len(sizes), group)
            return out if group.slots is None else from_slots(out, sizes, group.slots)
        return all_to_all(x.repeat(len(sizes)), [sizes[group.index]] * len(sizes), sizes, group)
    out = x.new_empty(sum(sizes))
    parts = out.split(list(sizes))
    parts[group.index].copy_(x)
    slots = range(len(sizes)) if group.slots is None else group.slots
    works = [group.process_group.broadcast(part, slot) for part, slot in zip(parts, slots, strict=True) if part.numel()]
    wait_all(works, group)
    return out


def in_pairs(group: Group) -> bool:
    """Whether point-to-point messages are faster than the backend's all_to_all in this group: see `exchange`."""
    return group.hosts > 1 and group.backend == "gloo"


def _sends_in_pairs(group: Group) -> bool:
    """Whether an all_gather or all_to_all of the group is sent in point-to-point messages."""
    # gloo's own collectives would need copies where the process group has another order than the group
    return in_pairs(group) or (group.backend == "gloo" and group.slots is not None)


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


def _exchange_in_pairs(send: Sequence[Tensor], like: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Exchange pieces in point-to-point messages; return the received ones, of these `sizes`, one after the other."""
    out = like.new_empty(sum(sizes))
    recv, slots = out.split(list(sizes)), group.slots or range(len(sizes))
    wait_for_pairs(begin_exchange(by_slot(send, slots), by_slot(recv, slots), group), group)
    return out


def begin_exchange(send: Sequence[Tensor], recv: Sequence[Tensor], group: Group, tag: int = 0) -> list[dist.Work]:
    """Begin an all_to_all in point-to-point messages between the ranks of a group; pieces in process group order."""
    here = group.index if group.slots is None else group.slots[group.index]
    try:
        return exchange(send, recv, here, group.process_group, tag)
    except RuntimeError as error:
        raise not_begun(error, group) from error


def wait_all(works: list[dist.Work], group: Group) -> None:
    """Wait for collectives of the group that have begun."""
    for work in works:
        wait_for(work, group)


def all_to_all(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group) -> Tensor:
    """Flat pieces for each rank -> flat pieces from each rank; the sizes may all differ, and be zero."""
    if x.dtype not in _MOVES:
        scale = x.itemsize
        received = all_to_all(x.view(torch.uint8), [s * scale for s in send], [r * scale for r in recv], group)
        return received.view(x.dtype)
    if _sends_in_pairs(group) and not traced(x):
        return _exchange_in_pairs(x.split(list(send)), x, recv, group)
    if group.slots is None:
        return collectives.swap(x, send, recv, group)
    slots = group.slots
    received = collectives.swap(to_slots(x, send, slots), by_slot(send, slots), by_slot(recv, slots), group)
    return from_slots(received, recv, group.slots)


def reduce_scatter(x: Tensor, send: Sequence[int], op: ReduceOp, group: Group) -> Tensor:
    """Flat pieces for each rank -> the reduction of this rank's piece over all ranks.

    Where the backend has no reduce_scatter, or the pieces differ in size, the pieces are exchanged and reduced locally:
    the same bytes, and half precision is summed in single.
    """
    if len(group.ranks) == 1:
        return x.clone()
    return reduced(exchange_terms(x, send, op, group), send[group.index], op)


def exchange_terms(x: Tensor, send: Sequence[int], op: ReduceOp, group: Group) -> Tensor:
    """Flat pieces for each rank -> the terms of this rank's piece, or their reduction if the backend reduces them."""
    native = group.backend == "nccl" or (group.backend != "gloo" and traced(x))
    if native and len(set(send)) == 1 and reduces(x.dtype, op, group.backend):
        pieces = x if group.slots is None else to_slots(x, send, group.slots)
        return collectives.scatter(pieces, op, len(send), group)
    return all_to_all(x, send, [send[group.index]] * len(send), group)


def reduced(terms: Tensor, size: int, op: ReduceOp) -> Tensor:
    """Flat terms of `size` elements each, or their reduction already -> the reduction."""
    return terms if terms.numel() == size else reduce(terms.view(-1, size), op)


def all_reduce(x: Tensor, op: ReduceOp, group: Group) -> Tensor:
    """Flat terms -> the flat reduction of the terms of all ranks, the same to the bit on each."""
    if len(group.ranks) == 1:
        return x.clone()
    if reduces(x.dtype, op, group.backend):
        return collectives.reduce(x, op, group)
    n, size = len(group.ranks), x.numel()
    step = -(-size // n)
    sizes = [min((i + 1) * step, size) - min(i * step, size) for i in group.slots or range(n)]
    return all_gather(reduce_scatter(x, sizes, op, group), sizes, group)


def reduce_number(x: Tensor, op: ReduceOp, group: Group) -> Tensor:
    """An all_reduce of one element over gloo that no other collective can be mistaken for, if a rank calls it alone.

    gloo distinguishes collectives of one kind by their order alone, and ends the process of a rank that receives more
    than it expects.
    """
    x, n = x.reshape(1), len(group.ranks)
    terms = x.new_empty(n)
    recv, slots = list(movable(terms).chunk(n)), group.slots or range(n)
    works = begin_exchange([movable(x)] * n, by_slot(recv, slots), group, _NUMBER)
    wait_for_pairs(works, group, "all_reduce of a number")
    return reduce(terms.view(n, 1), op)


def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Flat tensor -> the flat tensor of the group's rank number `source`, on all ranks."""
    if x.dtype not in _MOVES:
        return broadcast(x.view(torch.uint8), source, group).view(x.dtype)
    return collectives.broadcast(x, source if group.slots is None else group.slots[source], group)


def scatter(x: Tensor | None, sizes: Sequence[int], source: int, like: Tensor, group: Group) -> Tensor:
    """Flat pieces on the group's rank number `source` -> piece `i` on rank number `i`; dtype and device of `like`."""
    out = like.new_empty(sizes[group.index])
    if group.index == source:
        assert x is not None
        parts = x.split(list(sizes))
        out.copy_(parts[source])
        works = [
            dist.isend(movable(part), rank, group.process_group)
            for i, (part, rank) in enumerate(zip(parts, group.ranks, strict=True))
            if i != source and part.numel()
        ]
    else:
        works = [dist.irecv(movable(out), group.ranks[source], group.process_group)] if out.numel() else []
    wait_for_pairs([work for work in works if work is not None], group)
    return out


def permute(x: Tensor, target: int, source: int, size: int, group: Group) -> Tensor:
    """Flat tensor to the group's rank number `target` -> `size` elements from its rank number `source`."""
    n = len(group.ranks)
    send = [x.numel() if i == target else 0 for i in range(n)]
    recv = [size if i == source else 0 for i in range(n)]
    return all_to_all(x, send, recv, group)


def reduce(terms: Tensor, op: ReduceOp) -> Tensor:
    """Terms along dim 0 -> their reduction, in the terms' own dtype; half precision is reduced in single.

    Raises:
        ShapeError: the max or min of complex numbers, or the mean of integers.
    """
    dtype = terms.dtype
    wide = terms.to(torch.float32) if dtype in HALF else terms
    match op:
        case "sum":
            return wide.sum(0).ne(0) if dtype == torch.bool else wide.sum(0, dtype=wide.dtype).to(dtype)
        case "product":
            return wide.prod(0).ne(0) if dtype == torch.bool else wide.prod(0, dtype=wide.dtype).to(dtype)
        case "avg":
            total = wide.sum(0)  # whole numbers and truth values are summed in int64
            exact = dtype.is_floating_point or dtype.is_complex
            return total.div_(len(terms), rounding_mode=None if exact else "floor").to(dtype)
        case "max" | "min":
            if dtype.is_complex:
                raise ShapeError(f"a pending {op} of {dtype}: complex numbers have no order; use sum, avg or product")
            return (wide.amax(0) if op == "max" else wide.amin(0)).to(dtype)


def by_slot(sizes: Sequence[T], slots: Sequence[int]) -> list[T]:
    """Items in the order of the group -> the items in the order of the process group.

    >>> by_slot([10, 20, 30], [2, 0, 1])
    [20, 30, 10]
    """
    return [sizes[i] for i in sorted(range(len(slots)), key=slots.__getitem__)]


def to_slots(x: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Flat pieces in the order of the group -> the pieces in the order of the process group."""
    pieces = x.split(list(sizes))
    return torch.cat([pieces[i] for i in sorted(range(len(slots)), key=slots.__getitem__)])


def from_slots(x: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Flat pieces in the order of the process group -> the pieces in the order of the group, which `sizes` has."""
    pieces = x.split(by_slot(sizes, slots))
    return torch.cat([pieces[slot] for slot in slots])


def reduces(dtype: torch.dtype, op: ReduceOp, backend: str) -> bool:
    """Whether the backend itself reduces as torch does on one device: in this dtype, and keeping NaNs."""
    if op in ("max", "min") or (op == "avg" and not dtype.is_floating_point):
        return False
    return dtype in _SUMS or (backend == "nccl" and dtype in HALF)


def movable(x: Tensor) -> Tensor:
    """A view of `x` in a dtype that every backend sends."""
    return x if x.dtype in _MOVES else x.view(torch.uint8)
