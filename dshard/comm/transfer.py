"""What one rank does in one step of a plan: pack, one collective, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.placements import ReduceOp
from dshard.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Messages,
    Pend,
    ReduceScatter,
    Slice,
    Step,
    after,
    axes_of,
    messages,
    received,
)

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Local = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one rank sees it: flat buffers, with sizes in elements for each rank of its group."""

    collective: Collective
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    op: ReduceOp | None
    send: tuple[int, ...]
    recv: tuple[int, ...]
    received: int
    pack: Local
    unpack: Local


def compile_step(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Local | Transfer | None:
    """What the rank at `coordinate` does for `step`: local work, a transfer, or nothing on an axis of one rank."""
    mesh = layout.mesh
    axes = axes_of(step)
    ranks = mesh.group(axes, coordinate)
    if len(ranks) == 1:
        return None
    match step:
        case Slice(_, dim):
            return _slice(dim, layout, after(step, layout), shape, coordinate)
        case Pend(axis, op):
            return _term(op, coordinate[mesh.axis(axis)] == 0)
        case AllGather():
            collective: Collective = "all_gather"
        case ReduceScatter():
            collective = "reduce_scatter"
        case AllReduce():
            collective = "all_reduce"
        case AllToAll():
            collective = "all_to_all"
    moved = messages(step, layout, shape, coordinate)
    assert moved is not None
    return Transfer(
        collective,
        axes,
        ranks,
        ranks.index(mesh.rank(coordinate)),
        step.op if isinstance(step, ReduceScatter | AllReduce) else None,
        tuple(map(prod, moved.send)),
        tuple(map(prod, moved.recv)),
        received(step, layout, shape, coordinate),
        _pack(moved),
        _unpack(moved),
    )


def _slice(dim: int, src: Layout, dst: Layout, shape: Sequence[int], coordinate: Coordinate) -> Local:
    whole, kept = (layout.dim_range(dim, shape[dim], coordinate) for layout in (src, dst))
    start, length = (kept.start - whole.start if kept else 0), len(kept)
    return lambda x: x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _term(op: ReduceOp, first: bool) -> Local:
    """Replicate -> Partial(op): the terms reduce to the value, exactly, in any dtype."""
    match op:
        case "sum":
            return torch.clone if first else torch.zeros_like
        case "product":
            return torch.clone if first else torch.ones_like
        case "avg" | "max" | "min":
            return torch.clone


def _pack(moved: Messages) -> Local:
    dim = moved.split
    if dim is None or _leads(moved.send, dim):
        return _flat
    sizes = [piece[dim] for piece in moved.send]
    return lambda x: torch.cat([part.reshape(-1) for part in x.split(sizes, dim)])


def _unpack(moved: Messages) -> Local:
    dim, pieces = moved.join, moved.recv
    if dim is None:
        return lambda flat: flat.view(pieces[0])
    if _leads(pieces, dim):
        shape = (*pieces[0][:dim], sum(piece[dim] for piece in pieces), *pieces[0][dim + 1 :])
        return lambda flat: flat.view(shape)
    sizes = [prod(piece) for piece in pieces]
    return lambda flat: torch.cat(
        [part.view(piece) for part, piece in zip(flat.split(sizes), pieces, strict=True)], dim
    )


def _leads(pieces: Sequence[Shape], dim: int) -> bool:
    """Whether pieces along `dim` lie one after the other in memory: all dims before it have size one."""
    return prod(pieces[0][:dim]) == 1


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1)
