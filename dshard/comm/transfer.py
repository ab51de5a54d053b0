"""One step of a plan on one rank: pack, one collective, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from dshard.comm.traced_collectives import joined, traced
from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import ReduceOp
from dshard.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Pend,
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

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Local = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of one rank: flat buffers, with sizes in elements for each rank of its group.

    `received` is the number of elements that come from peers.
    """

    collective: Collective
    mesh: Mesh
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    op: ReduceOp | None
    send: tuple[int, ...]
    recv: tuple[int, ...]
    received: int


@dataclass(frozen=True, slots=True)
class Transfer(Message):
    """A collective with the functions that pack a local tensor into its buffer and unpack its result."""

    pack: Local
    unpack: Local


def compile_step(
    step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate, *, owned: bool = False
) -> Local | Transfer | None:
    """Compile `step` for the rank at `coordinate`: local work, a transfer, or None on an axis of one rank.

    An `owned` tensor was made by an earlier step, and may be written to.
    """
    mesh = layout.mesh
    axes = axes_of(step)
    ranks = mesh.group(axes, coordinate)
    regions = messages(step, layout, shape, coordinate)
    if len(ranks) == 1:
        own_region = regions.send[0] if regions is not None and isinstance(step, ReduceExchange) else None
        return (
            None
            if own_region is None
            else lambda x: view_of(x, own_region).clone(memory_format=torch.contiguous_format)
        )
    match step:
        case Slice(_, dst):
            slice_region = inside(dst.region(shape, coordinate), layout.region(shape, coordinate))
            return lambda x: view_of(x, slice_region).clone(memory_format=torch.contiguous_format)
        case Pend(axis, op):
            return _term(op, coordinate[mesh.axis(axis)] == 0, owned)
        case AllGather():
            collective: Collective = "all_gather"
        case ReduceScatter() | ReduceExchange():
            collective = "reduce_scatter"
        case AllReduce():
            collective = "all_reduce"
        case AllToAll() | Exchange():
            collective = "all_to_all"
    assert regions is not None
    return Transfer(
        collective,
        mesh,
        axes,
        ranks,
        ranks.index(mesh.rank(coordinate)),
        step.op if isinstance(step, ReduceScatter | ReduceExchange | AllReduce) else None,
        tuple(map(numel, regions.send)),
        tuple(map(numel, regions.recv)),
        sum(sizes_received(step, layout, shape, coordinate, regions)),
        _pack(regions.send, layout.local_shape(shape, coordinate)),
        _unpack(regions.recv, after(step, layout).local_shape(shape, coordinate)),
    )


def _term(op: ReduceOp, first: bool, owned: bool) -> Local:
    """Replicate -> Partial(op): the terms of the ranks reduce to the value, exactly, in any dtype."""
    match op:
        case "sum" if not first:
            return Tensor.zero_ if owned else torch.zeros_like
        case "product" if not first:
            return partial(Tensor.fill_, value=1) if owned else torch.ones_like
        case _:
            return _same if owned else torch.clone


def _same(x: Tensor) -> Tensor:
    return x


def _pack(pieces: Sequence[Region], shape: Shape) -> Local:
    """A function that flattens the pieces of a local tensor of `shape` one after the other; a view where possible."""
    full = [piece for piece in pieces if numel(piece)]
    span = span_of(full, shape)
    if span is not None:
        start, stop = span.start, span.stop
        return Tensor.flatten if stop - start == prod(shape) else lambda x: x.reshape(-1)[start:stop]
    sizes, shapes = [numel(piece) for piece in full], [tuple(map(len, piece)) for piece in full]
    dim = _cut_dim(full, shape)
    if dim is not None and _all_equal(sizes):  # one strided copy, where a copy for each piece costs the host much more
        cut = (*shape[:dim], len(full), shape[dim] // len(full), *shape[dim + 1 :])
        return lambda x: x.view(cut).movedim(dim, 0).flatten()  # a dim is always cut by a view

    def gather(x: Tensor) -> Tensor:
        if traced(x):
            return torch.cat([view_of(x, piece).reshape(-1) for piece in full])
        out = x.new_empty(sum(sizes))
        for part, piece, size in zip(out.split(sizes), full, shapes, strict=True):
            part.view(size).copy_(view_of(x, piece))
        return out

    return gather


def _unpack(pieces: Sequence[Region], shape: Shape) -> Local:
    """A function that makes a local tensor of `shape` from its pieces, flat and in order; a view where possible."""
    full = [piece for piece in pieces if numel(piece)]
    if span_of(full, shape) is not None:
        return lambda flat: flat.view(shape)
    sizes, shapes = [numel(piece) for piece in full], [tuple(map(len, piece)) for piece in full]
    dim = _cut_dim(full, shape)
    if dim is not None and _all_equal(sizes):
        return lambda flat: flat.view(len(full), *shapes[0]).movedim(0, dim).contiguous().view(shape)

    def place(flat: Tensor) -> Tensor:
        parts = [part.view(size) for part, size in zip(flat.split(sizes), shapes, strict=True)]
        if dim is not None:
            return torch.cat(parts, dim)
        if traced(flat):
            concatenated = joined(parts, full)
            if concatenated is not None:
                return concatenated
        out = flat.new_empty(shape)
        for part, piece in zip(parts, full, strict=True):
            view_of(out, piece).copy_(part)
        return out

    return place


def _cut_dim(pieces: Sequence[Region], shape: Shape) -> int | None:
    """The one dim along which the pieces divide a tensor of `shape`, in order; None if there is no such dim.

    >>> _cut_dim([(range(3), range(0, 3)), (range(3), range(3, 4))], (3, 4))
    1
    """
    cut = [dim for dim, size in enumerate(shape) if len(pieces[0][dim]) != size]
    if len(cut) != 1:
        return None
    end = 0
    for piece in pieces:
        for dim, part in enumerate(piece):
            if dim != cut[0] and part != range(shape[dim]):
                return None
        if piece[cut[0]].start != end:
            return None
        end = piece[cut[0]].stop
    return cut[0] if end == shape[cut[0]] else None


def _all_equal(sizes: Sequence[int]) -> bool:
    return sizes.count(sizes[0]) == len(sizes)


def span_of(pieces: Sequence[Region], shape: Shape) -> range | None:
    """The range of a contiguous tensor's memory that the pieces fill in order; None if they do not follow each other.

    >>> span_of([(range(1, 2), range(3)), (range(2, 3), range(3))], (4, 3))
    range(3, 9)
    """
    span = range(0)
    for piece in pieces:
        first = next((dim for dim, part in enumerate(piece) if len(part) != 1), len(shape))
        if any(len(part) != size for part, size in zip(piece[first + 1 :], shape[first + 1 :], strict=True)):
            return None
        start = sum(part.start * prod(shape[dim + 1 :]) for dim, part in enumerate(piece))
        if span and start != span.stop:
            return None
        span = range(span.start if span else start, start + numel(piece))
    return span


def view_of(x: Tensor, region: Region) -> Tensor:
    """A view of the elements of `x` within `region`."""
    for dim, indices in enumerate(region):
        x = x.narrow(dim, indices.start if indices else 0, len(indices))
    return x
