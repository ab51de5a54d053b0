"""Launch collectives: by the fastest primitive of the group's backend, and tell listeners of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from dshard.comm import collectives
from dshard.comm.collective import MOVES, Collective, CollectiveReport, Kind, by_slot, collectives_for, reduce
from dshard.comm.collectives import Begin, Wait
from dshard.comm.events import LISTENERS, emit, measuring
from dshard.comm.recorded_calls import RECORDERS, recorded_begin
from dshard.comm.runtime import Group
from dshard.comm.traced_collectives import traced
from dshard.cost import sends_pieces_in_messages
from dshard.mesh import Mesh
from dshard.placements import ReduceOp

T = TypeVar("T")
# gloo's own all_gather copies what it received once more, so the parts are broadcast into place, all at once; where
# they are this small, one exchange of copies takes less time than the start of so many broadcasts; between hosts whose
# ranks share a link, its ring sends least over that link
_FEW_BYTES = 2**18
_NUMBER = 2**24  # the tag of messages that reduce a number, which no other message has


def launch(c: Collective, x: Tensor, group: Group, out: Tensor | None = None) -> Wait:
    """Begin a collective that sends the flat `x` and receives in `out`; returns the function that waits for it.

    The wait returns the buffer received: `out`, or a new one. Listeners hear of the collective when it begins; those
    that measure make it end first.
    """
    begin = primitive(c, x.dtype, group, is_traced=traced(x))
    if RECORDERS:
        begin = recorded_begin(c, begin)
    return begin(x, out) if c.report is None or not LISTENERS else report(c.report, group, begin, x, out)


def report(what: CollectiveReport, group: Group, begin: Begin, x: Tensor, out: Tensor | None = None) -> Wait:
    """Begin a collective of the group, and tell listeners: before it, or with its seconds after its end."""
    if traced(x):
        return begin(x, out)
    nbytes, load = what.elements * x.itemsize, what.load_of(x.itemsize)
    if not measuring():
        emit(what.collective, what.mesh, group.axes, nbytes, load=load)
        return begin(x, out)
    received, seconds = timed(group, x.device, lambda: begin(x, out)())
    emit(what.collective, what.mesh, group.axes, nbytes, seconds, load)
    return lambda: received


def timed(group: Group, device: torch.device, call: Callable[[], T]) -> tuple[T, float]:
    """The result of `call`, which all ranks of the group begin together, and its seconds."""
    all_reduce(torch.zeros(1, device=device), "sum", group)
    synchronize(device)
    begin = perf_counter()
    out = call()
    synchronize(device)
    return out, perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for all work that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def primitive(c: Collective, dtype: torch.dtype, group: Group, *, is_traced: bool) -> Begin:
    """The function that begins a collective by the fastest primitive of the group's backend."""
    if dtype not in MOVES:
        begin = primitive(c.in_bytes(dtype.itemsize), torch.uint8, group, is_traced=is_traced)
        return partial(_in_bytes, begin, dtype, is_traced)
    if is_traced:
        return _in_slot_order(c, group, lambda c: partial(collectives.functional, c, group))
    match c.kind:
        case "all_gather":
            return _all_gather(c, dtype, group)
        case "all_to_all" if _sends_in_pairs(group):
            return lambda x, out: _exchange_in_pairs(x.contiguous().split(list(c.send)), out, c.recv, group)
        case "all_to_all":
            return _in_slot_order(c, group, lambda c: partial(collectives.swap, c.send, c.recv, group))
        case "reduce_scatter":
            n, op = len(c.send), c.op
            assert op is not None
            return _in_slot_order(c, group, lambda c: partial(collectives.scatter_reduced, op, n, group))
        case "all_reduce":
            assert c.op is not None
            return partial(collectives.reduce, c.op, group)
        case "broadcast":
            return _in_slot_order(c, group, lambda c: partial(collectives.broadcast, c.root, group))
        case "scatter" if group.backend.tags:
            return partial(collectives.scatter, c.send, c.root, group)
        case "scatter":  # a call of all ranks, as the first one of a group has to be: some pieces may be empty
            return primitive(_from_root(c), dtype, group, is_traced=False)


def _all_gather(c: Collective, dtype: torch.dtype, group: Group) -> Begin:
    n, sizes, equal = len(c.recv), c.recv, len(set(c.recv)) == 1
    if equal and (group.backend.gathers_in_place or group.spread):
        return _in_slot_order(c, group, lambda c: partial(collectives.gather, n, group))
    if _sends_in_pairs(group):
        return lambda x, out: _exchange_in_pairs([x.contiguous()] * n, out, sizes, group)
    by_broadcasts = partial(collectives.gather_by_broadcasts, sizes, group)
    if group.backend.gathers_in_place:
        in_messages = sends_pieces_in_messages(c.kind, max(sizes) * dtype.itemsize, group.spread)
        return partial(collectives.gather_by_messages, sizes, group) if in_messages else by_broadcasts
    if equal and sizes[0]:  # as every rank then finds, so all may leave the sizes out
        by_copies = _in_slot_order(c, group, lambda c: partial(collectives.share, n, group))
    else:
        swap = primitive(replace(c, kind="all_to_all", send=c.send * n), dtype, group, is_traced=False)
        by_copies = lambda x, out: swap(x.repeat(n), out)  # noqa: E731
    nbytes = sum(sizes) * dtype.itemsize
    return lambda x, out: (by_copies if nbytes <= _FEW_BYTES and out is None else by_broadcasts)(x, out)


def _from_root(scatter: Collective) -> Collective:
    """A scatter as an all_to_all in which only the root sends."""
    n, is_root = len(scatter.ranks), scatter.index == scatter.root
    recv = tuple(scatter.recv[0] if i == scatter.root else 0 for i in range(n))
    return replace(scatter, kind="all_to_all", send=scatter.send if is_root else (0,) * n, recv=recv)


def _exchange_in_pairs(send: Sequence[Tensor], out: Tensor | None, sizes: Sequence[int], group: Group) -> Wait:
    return collectives.exchange_pieces(send, send[0].new_empty(sum(sizes)) if out is None else out, sizes, group)


def _sends_in_pairs(group: Group) -> bool:
    """Whether an all_gather or all_to_all of the group is sent in point-to-point messages: see `exchange`."""
    # gloo's own collectives would need copies where the process group has another order than the group
    return group.backend.pairs_between_hosts and (group.hosts > 1 or group.slots is not None)


def _in_bytes(begin: Begin, dtype: torch.dtype, is_traced: bool, x: Tensor, out: Tensor | None) -> Wait:
    wait = begin(bytes_of(x), None if out is None else out.view(torch.uint8))
    if dtype is torch.bool and is_traced and out is None:  # inductor's code for CPUs cannot take bytes for truths
        return lambda: wait().to(dtype)
    return lambda: wait().view(dtype)


def _in_slot_order(c: Collective, group: Group, begin_of: Callable[[Collective], Begin]) -> Begin:
    """Begin a collective whose primitive takes pieces in the order of the process group; copy them if it differs."""
    slots = group.slots
    if slots is None:
        return begin_of(c)
    send, recv = (tuple(by_slot(s, slots)) if len(s) == len(slots) else s for s in (c.send, c.recv))
    begin = begin_of(replace(c, send=send, recv=recv, root=slots[c.root]))

    def begin_sorted(x: Tensor, out: Tensor | None) -> Wait:
        if len(send) == len(slots):
            x = torch.cat(by_slot(x.split(list(c.send)), slots))
        if len(recv) != len(slots):
            return begin(x, out)
        wait = begin(x, None)

        def wait_and_sort() -> Tensor:
            pieces = wait().split(list(recv))
            return torch.cat([pieces[slot] for slot in slots], out=out)

        return wait_and_sort

    return begin_sorted


# -- collectives that are run at once; with a mesh, listeners hear of them


def run_now(c: Collective, x: Tensor, group: Group) -> Tensor:
    """The flat result of a collective, run as the collectives that the backend needs for it."""
    for each, terms in collectives_for(c, x.dtype, group.backend):
        x = launch(each, x, group)()
        if terms:
            x = reduce(x.view(terms, -1), each.op or "sum")
    return x


def all_gather(x: Tensor, sizes: Sequence[int], group: Group, mesh: Mesh | None = None) -> Tensor:
    """Flat chunk -> the flat chunks of all ranks, rank `i` giving `sizes[i]` elements; nothing is padded."""
    return begin_all_gather(x, sizes, group, mesh)()


def begin_all_gather(x: Tensor, sizes: Sequence[int], group: Group, mesh: Mesh | None = None) -> Wait:
    """Begin an `all_gather`; the function that waits for it."""
    received = sum(sizes) - sizes[group.index]
    return launch(_collective("all_gather", [sizes[group.index]], sizes, group, mesh, received), x, group)


def all_to_all(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group) -> Tensor:
    """Flat pieces for each rank -> flat pieces from each rank; the sizes may all differ, and be zero."""
    return run_now(_collective("all_to_all", send, recv, group), x, group)


def reduce_scatter(x: Tensor, send: Sequence[int], op: ReduceOp, group: Group) -> Tensor:
    """Flat pieces for each rank -> the reduction of this rank's piece over all ranks."""
    return run_now(replace(_collective("reduce_scatter", send, [send[group.index]], group), op=op), x, group)


def all_reduce(x: Tensor, op: ReduceOp, group: Group) -> Tensor:
    """Flat terms -> the flat reduction of the terms of all ranks, the same to the bit on each."""
    return run_now(replace(_collective("all_reduce", [x.numel()], [x.numel()], group), op=op), x, group)


def broadcast(x: Tensor, root: int, group: Group, mesh: Mesh | None = None) -> Tensor:
    """Flat tensor -> the flat tensor of the group's rank number `root`, on all ranks."""
    received = 0 if group.index == root else x.numel()
    c = _collective("broadcast", [x.numel()], [x.numel()], group, mesh, received)
    return run_now(replace(c, root=root), x, group)


def scatter(x: Tensor, sizes: Sequence[int], root: int, group: Group, mesh: Mesh | None = None) -> Tensor:
    """Flat pieces on the rank number `root` of the group -> piece `i` on rank number `i`; elsewhere `x` is empty."""
    own = sizes[group.index]
    c = _collective("scatter", sizes, [own], group, mesh, 0 if group.index == root else own)
    return run_now(replace(c, root=root), x, group)


def permute(x: Tensor, target: int, source: int, size: int, group: Group) -> Tensor:
    """Flat tensor to the group's rank number `target` -> `size` elements from its rank number `source`."""
    n = len(group.ranks)
    send = [x.numel() if i == target else 0 for i in range(n)]
    return all_to_all(x, send, [size if i == source else 0 for i in range(n)], group)


def _collective(
    kind: Kind, send: Sequence[int], recv: Sequence[int], group: Group, mesh: Mesh | None = None, received: int = 0
) -> Collective:
    report = None if mesh is None else CollectiveReport(kind, mesh, received)
    return Collective(kind, group.axes, group.ranks, group.index, tuple(send), tuple(recv), report=report)


def reduce_number(op: ReduceOp, group: Group, x: Tensor, out: Tensor | None) -> Wait:
    """Begin an all_reduce of one element over gloo whose messages cannot match those of another collective.

    So a rank may call it alone, while gloo tells collectives of one kind apart by their order alone, and ends the
    process of a rank that receives more than it expects.
    """
    x, n = x.reshape(1), len(group.ranks)
    terms = x.new_empty(n)
    received, kind = movable(terms), "all_reduce of a number"
    wait = collectives.exchange_pieces([movable(x)] * n, received, [received.numel() // n] * n, group, _NUMBER, kind)

    def wait_and_reduce() -> Tensor:
        wait()
        return reduce(terms.view(n, 1), op)

    return wait_and_reduce


def movable(x: Tensor) -> Tensor:
    """A view of `x` in a dtype that every backend sends."""
    return x if x.dtype in MOVES else bytes_of(x)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of `x` along its last dim; a view if its elements are adjacent in memory."""
    x = x.resolve_conj().contiguous()
    if x.stride(-1) != 1:  # of a dim of size one, contiguous with any stride
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x.view(torch.uint8)
