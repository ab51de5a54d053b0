"""Asynchronous redistribution: a plan as collective operations, each from buffer to buffer, begun and finished apart.

A program is a generator that yields the request of each collective when it begins, and is sent the function that waits
for its end. One program serves ranks with processes, where collectives run beside the computation, ranks simulated in
one process, and runs without data, which find the memory that the program needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from dshard.comm.runtime import Group
from dshard.comm.transfer import Local, Message, span_of, view_of
from dshard.comm.transport import HALF, reduce, reduces
from dshard.comm.workspace import Session
from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import ReduceOp, chunk
from dshard.redistribute import (
    AllGather,
    AllReduce,
    Messages,
    Panel,
    Pend,
    Plan,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
    after,
    axes_of,
    inside,
    messages,
    numel,
    sizes_received,
)

GroupOf: TypeAlias = Callable[[tuple[str, ...]], Group | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """One collective of a panel, or of a whole local tensor.

    `give` are the regions sent, one after the other, `take` those received, of a tensor of `shape`; None for the flat
    tensor. `terms`, where not 0, is the number of equal pieces that arrive and are reduced. `event` names the
    collective to listeners, `elements` is how many it receives.
    """

    message: Message
    give: tuple[Region, ...] | None
    take: tuple[Region, ...] | None
    shape: Shape
    terms: int = 0
    event: str = ""
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A collective to begin: it sends `buffer` and receives in `out`. `loan` returns to the pool once it has ended."""

    leg: CollectiveOp
    buffer: Tensor
    out: Tensor
    loan: Tensor | None = None


Wait: TypeAlias = Callable[[], object]
Program: TypeAlias = Generator[Request, Wait, T]


@dataclass(slots=True)
class InFlight:
    """A local tensor in flight: the request that has begun, the function that waits for it, and the remaining steps."""

    value: Tensor
    request: Request | None
    wait: Wait
    rest: Sequence[CollectiveOp | Local]


def send_receive(
    mesh: Mesh, axis: int, at: Coordinate, to: int, source: int, x: Tensor, shape: Shape, group_of: GroupOf
) -> CollectiveOp:
    """Pass `x` to the rank at index `to` of a mesh axis, and receive a tensor of `shape` from the one at `source`."""
    name, n = (mesh.names[axis],), mesh.shape[axis]
    send = tuple(x.numel() if i == to else 0 for i in range(n))
    recv = tuple(prod(shape) if i == source else 0 for i in range(n))
    elements = 0 if source == at[axis] else prod(shape)
    message = Message("all_to_all", mesh, name, mesh.group(name, at), at[axis], None, send, recv, elements)
    op = CollectiveOp(message, None, None, shape, event="permute", elements=elements)
    group = group_of(name)
    return op if group is None or group.slots is None else in_slots(op, group.slots)


def begin(legs: Sequence[CollectiveOp | Local], x: Tensor, space: Session) -> Program[InFlight]:
    """Run the local steps of `legs` on the local tensor `x` up to the first collective, and begin that."""
    for i, leg in enumerate(legs):
        if isinstance(leg, CollectiveOp):
            request = _pack(leg, x, space)
            wait = yield request
            return InFlight(x, request, wait, legs[i + 1 :])
        x = leg(x)
    return InFlight(x, None, _no_wait, ())


def finish(flight: InFlight, space: Session) -> Program[Tensor]:
    """Wait for the collective in flight and run the remaining steps; the result may be a buffer of `space`."""
    while flight.request is not None:
        flight.wait()
        local = _unpack(flight.request, space)
        flight = yield from begin(flight.rest, local, space)
        if flight.request is not None:
            flight.request = _with_returned_buffer(flight.request, local, space)
    return flight.value


def _with_returned_buffer(request: Request, x: Tensor, space: Session) -> Request:
    """Return the buffer `x` to `space`: now if it was copied, else when the request completes."""
    if request.loan is None and same_memory(request.buffer, x):
        return replace(request, loan=x)
    space.give(x)
    return request


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def collective_ops_of(
    plan: Plan, panel: Panel | None, coordinate: Coordinate, dtype: torch.dtype, backend: str, group_of: GroupOf
) -> tuple[CollectiveOp | Local, ...]:
    """The steps of the rank at `coordinate` that redistribute a panel, or the full tensor for None, by `plan`."""
    full = Panel(0, (range(plan.shape[0]),)) if plan.shape else None
    selected = full if panel is None else panel
    ops: list[CollectiveOp | Local] = []
    for step, layout in plan.stages():
        ops += _compile(step, layout, plan.shape, selected, coordinate, dtype, backend, group_of)
    return tuple(ops)


def _compile(
    step: Step,
    layout: Layout,
    shape: Shape,
    panel: Panel | None,
    at: Coordinate,
    dtype: torch.dtype,
    backend: str,
    group_of: GroupOf,
) -> list[CollectiveOp | Local]:
    mesh, result_layout = layout.mesh, after(step, layout)
    ranks = mesh.group(axes_of(step), at)
    regions = messages(step, layout, shape, at) if panel is None else panel.messages(step, layout, shape, at)
    if isinstance(step, Slice):
        return [_narrow(layout, result_layout, shape, panel, at)] if len(ranks) > 1 else []
    if isinstance(step, Pend):
        first = at[mesh.axis(step.axis)] == 0
        return [] if first or step.op == "avg" else [torch.zeros_like]
    assert regions is not None
    if len(ranks) == 1:
        return [_view(regions.send[0])] if isinstance(step, ReduceExchange) else []
    elements = sum(sizes_received(step, layout, shape, at, regions))
    message = Message(
        "all_to_all",
        mesh,
        axes_of(step),
        ranks,
        ranks.index(mesh.rank(at)),
        step.op if isinstance(step, ReduceScatter | ReduceExchange | AllReduce) else None,
        tuple(map(numel, regions.send)),
        tuple(map(numel, regions.recv)),
        elements,
    )
    result_shape = () if panel is None and not shape else result_layout.local_shape(shape, at)
    if panel is not None:
        result_shape = panel.shape(result_layout, shape, at)
    ops = _collective_ops(step, message, regions, result_shape, dtype, backend)
    group = group_of(axes_of(step))
    return [op if group is None or group.slots is None else in_slots(op, group.slots) for op in ops]


def _collective_ops(
    step: Step, message: Message, regions: Messages, shape: Shape, dtype: torch.dtype, backend: str
) -> list[CollectiveOp]:
    n, elements = len(message.ranks), message.received
    if isinstance(step, AllReduce):
        if step.op == "sum" and reduces(dtype, step.op, backend):
            all_reduce = replace(message, collective="all_reduce")
            return [CollectiveOp(all_reduce, None, None, shape, event="all_reduce", elements=elements)]
        return _exchange_and_gather(message, shape)
    if isinstance(step, AllGather):
        gather = replace(message, collective="all_gather")
        return [CollectiveOp(gather, None, regions.recv, shape, event="all_gather", elements=elements)]
    if not isinstance(step, ReduceScatter | ReduceExchange):
        return [CollectiveOp(message, regions.send, regions.recv, shape, event="all_to_all", elements=elements)]
    if backend == "nccl" and len(set(message.send)) == 1 and reduces(dtype, step.op, backend):
        scatter = replace(message, collective="reduce_scatter")
        return [CollectiveOp(scatter, regions.send, None, shape, event="reduce_scatter", elements=elements)]
    pieces = replace(message, recv=message.recv * n)
    return [CollectiveOp(pieces, regions.send, None, shape, n, "reduce_scatter", elements)]


def _exchange_and_gather(message: Message, shape: Shape) -> list[CollectiveOp]:
    """An all_reduce by an exchange of chunks, a local reduction and an all_gather: where the backend cannot reduce."""
    n, size = len(message.ranks), prod(shape)
    sizes = tuple(len(chunk(size, n, i)) for i in range(n))
    own = sizes[message.index]
    exchange = replace(message, send=sizes, recv=(own,) * n)
    gather = replace(message, collective="all_gather", send=(own,), recv=sizes, op=None)
    return [
        CollectiveOp(exchange, None, None, (own,), n, "all_reduce", message.received),
        CollectiveOp(gather, None, None, shape),
    ]


def in_slots(leg: CollectiveOp, slots: Sequence[int]) -> CollectiveOp:
    """The operation with its peers in the order of the process group, whose `slots` are given."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    m = leg.message

    def sort(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(items[i] for i in order) if len(items) == len(order) else items

    give = leg.give if leg.give is None else sort(leg.give)
    if leg.give is None and len(m.send) == len(order) and leg.terms:
        starts = [sum(m.send[:i]) for i in range(len(m.send))]
        give = sort(tuple((range(a, a + n),) for a, n in zip(starts, m.send, strict=True)))
    take = leg.take if leg.take is None else sort(leg.take)
    if leg.take is None and m.collective == "all_gather":
        starts = [sum(m.recv[:i]) for i in range(len(m.recv))]
        take = sort(tuple((range(a, a + n),) for a, n in zip(starts, m.recv, strict=True)))
    message = replace(m, ranks=sort(m.ranks), index=slots[m.index], send=sort(m.send), recv=sort(m.recv))
    return replace(leg, message=message, give=give, take=take)


def _narrow(src: Layout, dst: Layout, shape: Shape, panel: Panel | None, at: Coordinate) -> Local:
    region = inside(dst.region(shape, at), src.region(shape, at))
    if panel is not None:
        region = panel.region(region, src.dim_range(panel.dim, shape[panel.dim], at).start)
    return _view(region)


def _view(region: Region) -> Local:
    return lambda x: view_of(x, region)


def _pack(leg: CollectiveOp, x: Tensor, space: Session) -> Request:
    message = leg.message
    match message.collective:
        case "all_gather":
            out = space.take((sum(message.recv),), x)
            own_chunk = out.split(list(message.recv))[message.index]
            own_chunk.view(x.shape).copy_(x)
            return Request(leg, own_chunk, out)
        case "all_reduce":
            out = space.take((x.numel(),), x)
            out.view(x.shape).copy_(x)
            return Request(leg, out, out)
        case "all_to_all" | "reduce_scatter":
            buffer = flat(leg.give, x, space)
            out = space.take((sum(message.recv),), x)
            return Request(leg, buffer, out, None if same_memory(buffer, x) else buffer)


def flat(pieces: Sequence[Region] | None, x: Tensor, space: Session) -> Tensor:
    """The pieces of `x` one after the other, flat; a view of `x` where its memory has them in this order."""
    if pieces is None:
        pieces = [tuple(map(range, x.shape))]
    elif pieces and len(pieces[0]) == 1:  # of a tensor that is sent flat
        x = x.reshape(-1)
    if x.is_contiguous() and _in_order(pieces, tuple(x.shape)):
        return x.view(-1)
    sizes = [numel(piece) for piece in pieces]
    out = space.take((sum(sizes),), x)
    for part, piece in zip(out.split(sizes), pieces, strict=True):
        if part.numel():
            part.view(tuple(map(len, piece))).copy_(view_of(x, piece))
    return out


def _unpack(request: Request, space: Session) -> Tensor:
    leg, result = request.leg, request.out
    if request.loan is not None:
        space.give(request.loan)
    if leg.terms:
        assert leg.message.op is not None
        result = reduced(result.view(leg.terms, -1), leg.message.op, space)
    if leg.take is None:
        return result.view(leg.shape)
    shape = leg.shape if len(leg.take[0]) == len(leg.shape) else (prod(leg.shape),)
    if _in_order(leg.take, shape):
        return result.view(leg.shape)
    out = space.take(shape, result)
    for part, piece in zip(result.split([numel(piece) for piece in leg.take]), leg.take, strict=True):
        if part.numel():
            view_of(out, piece).copy_(part.view(tuple(map(len, piece))))
    space.give(result)
    return out.view(leg.shape)


def reduced(terms: Tensor, op: ReduceOp, space: Session) -> Tensor:
    """Reduce the rows of a buffer of `space` into another, and return the first; half precision is summed in single."""
    if op not in ("sum", "avg"):  # an operand completed before it is multiplied
        out = space.take((terms.shape[1],), terms)
        out.copy_(reduce(terms, op))
        space.give(terms)
        return out
    wide = torch.float32 if terms.dtype in HALF else terms.dtype
    total = space.take((terms.shape[1],), terms, wide)
    torch.sum(terms, 0, dtype=wide, out=total)
    if op == "avg":
        exact = wide.is_floating_point or wide.is_complex
        total.div_(len(terms), rounding_mode=None if exact else "floor")
    out = total
    if wide != terms.dtype:
        out = space.take((terms.shape[1],), terms)
        out.copy_(total)
        space.give(total)
    space.give(terms)
    return out


def _in_order(pieces: Sequence[Region], shape: Shape) -> bool:
    """Whether the pieces, one after the other, are all elements of a contiguous tensor of `shape` in memory order."""
    return span_of([piece for piece in pieces if numel(piece)], shape) == range(prod(shape))


def _no_wait() -> None: ...
