"""Windows of keys: each rank receives only the keys that its queries reach by a block mask, often its neighbours'.

The windows of all ranks are concatenated in one distributed tensor, each padded to the longest, so that attention to
them is local. Gradients of a window are sent to the owners of its keys, which sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import Program, Request, Session, begin, flat_exchange, request_alone, run_program, sum_dtype
from dshard.core.signature import Context
from dshard.core.spec import contiguous_spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.rules.attention_blocks import Reach


@dataclass(frozen=True, slots=True)
class KeyWindows:
    """The windows of ranks along mesh `axes`, the only ones that shard queries and keys of these `lengths` (dim 2)."""

    queries: Layout
    keys: Layout
    axes: tuple[str, ...]
    lengths: tuple[int, int]
    reach: Reach

    def own(self, at: Coordinate) -> range:
        """The keys that the rank at a coordinate stores."""
        return self.keys.dim_range(2, self.lengths[1], at)

    def window(self, at: Coordinate) -> range:
        """The keys that the queries of the rank at a coordinate may see."""
        return self.reach.of(self.queries.dim_range(2, self.lengths[0], at))

    @property
    def longest(self) -> int:
        """The length of the longest window, to which all are padded."""
        return max(len(self.window(at)) for at in self.keys.mesh.coordinates())

    def received(self, back: bool = False) -> int:
        """The most keys that a rank receives, or with `back` the most keys whose gradients it receives."""
        source, target = (self.window, self.own) if back else (self.own, self.window)
        return max(
            sum(len(_shared(source(peer), target(at))) for peer in self.peers(at) if peer != at)
            for at in self.keys.mesh.coordinates()
        )

    def peers(self, at: Coordinate) -> Sequence[Coordinate]:
        """The ranks that hold the other keys, in the order of their group."""
        return self.keys.mesh.peers(self.axes, at)

    def shape(self, keys: Shape) -> Shape:
        """The global shape of the windows of all ranks, for keys or values of this shape."""
        mesh = self.keys.mesh
        return (*keys[:2], self.longest * prod(mesh.shape[mesh.axis(axis)] for axis in self.axes), keys[3])


def windowed(windows: KeyWindows, tensors: Sequence[Wrapper]) -> tuple[Wrapper, ...]:
    """The windows of sharded keys and values, as distributed tensors."""
    return _Moved.apply(windows, False, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Moved(torch.autograd.Function):
    """Keys -> windows, or with `back` windows -> the sum of all windows' copies of a key: each the other's adjoint."""

    @staticmethod
    def forward(ctx: Context, windows: KeyWindows, back: bool, *tensors: Wrapper) -> tuple[Wrapper, ...]:
        ctx.windows, ctx.back, ctx.shapes = windows, back, [tuple(x.shape) for x in tensors]
        ctx.set_materialize_grads(True)

        def program(at: Coordinate, space: Session, parts: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
            return _move(windows, back, at, space, parts)

        results = run_program(windows.keys.mesh, program, [x._local_tensor for x in tensors])
        out = []
        for x, local in zip(tensors, results, strict=True):
            spec, shape = x._spec, (*x.shape[:2], windows.lengths[1], x.shape[3]) if back else windows.shape(x.shape)
            out.append(wrap(local, contiguous_spec(windows.keys, shape, spec.dtype, spec.device)))
        return tuple(out)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        layout = ctx.windows.keys
        moved = [redistribute(as_distributed(grad, layout), layout) for grad in grads]
        return (None, None, *_Moved.apply(ctx.windows, not ctx.back, *moved))  # type: ignore[no-untyped-call]


def _move(
    windows: KeyWindows, back: bool, at: Coordinate, space: Session, tensors: Sequence[Tensor]
) -> Program[tuple[Tensor, ...]]:
    """The program of one rank: send rows of keys and values from their owners to the windows, or `back`."""
    source, target = (windows.window, windows.own) if back else (windows.own, windows.window)
    have, want, peers = source(at), target(at), windows.peers(at)
    there = [_shared(have, target(peer)) if peer != at else range(0) for peer in peers]
    here = [_shared(source(peer), want) if peer != at else range(0) for peer in peers]
    like = tensors[0]
    widths = [x.shape[0] * x.shape[1] * x.shape[3] for x in tensors]
    pieces = [_rows(x, rows, have).flatten() for rows in there for x in tensors]
    buffer = torch.cat(pieces) if pieces else like.new_empty(0)
    send, recv = (tuple(sum(widths) * len(rows) for rows in each) for each in (there, here))
    step = flat_exchange(windows.keys.mesh, windows.axes, at, send, recv, "permute")
    request = Request(step, buffer, space.take((sum(recv),), like), None)
    arriving = yield from begin(request_alone(request, space))
    length = len(want) if back else windows.longest
    dtype = sum_dtype(like.dtype) if back else like.dtype
    results = [x.new_zeros((*x.shape[:2], length, x.shape[3]), dtype=dtype) for x in tensors]
    kept = _shared(have, want)
    for x, out in zip(tensors, results, strict=True):
        _rows(out, kept, want).copy_(_rows(x, kept, have))
    arrived = yield from arriving
    start = 0
    for rows in here:
        for x, out, width in zip(tensors, results, widths, strict=True):
            part = arrived[start : start + width * len(rows)]
            start += len(part)
            _rows(out, rows, want).add_(part.view(*x.shape[:2], len(rows), x.shape[3]))
    space.give(arrived)
    return tuple(out.to(like.dtype) for out in results)


def _shared(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _rows(x: Tensor, rows: range, of: range) -> Tensor:
    """A view of the positions `rows` of a tensor that has the positions `of`."""
    return x.narrow(2, rows.start - of.start, len(rows)) if rows else x[:, :, :0]
