"""`split` and `chunk` of a sharded dim: each piece has the tensor's layout, by an exchange of missing elements only.

So a projection that computes queries, keys and values at once, sharded as one tensor, leaves each of them sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.core.call import AlternativePlan, Call, LocalOp
from dshard.core.moves import run_on_ranks
from dshard.core.spec import spec_of
from dshard.core.view_sync import part_of
from dshard.ops.exchange import IndexExchange, Move, Moves, exchange_locals, index_exchange, planned_exchanges
from dshard.ops.small_reductions import split_axes


def _pieces(call: Call) -> AlternativePlan | None:
    """`x.split(sizes, dim)`: views with memory of their own. One exchange for all where every piece shards evenly."""
    spec, dim = call.specs[0], call.dim()
    layout, mesh, n = spec.layout, spec.layout.mesh, spec.shape[dim]
    sizes = [out.shape[dim] for out in call.outs]
    ranks = prod(mesh.shape[axis] for axis in split_axes(layout, (dim,)))
    if ranks == 1 or len(sizes) < 2 or min(sizes) < 1:
        return None
    ends = list(accumulate(sizes, initial=0))
    even = not any(size % ranks for size in sizes)
    moves = (
        [_dealt(sizes, ends, ranks)] if even else [(Move(0, range(*ends[i : i + 2]), 0),) for i in range(len(sizes))]
    )
    lengths = [n] if even else sizes
    exchanges = [
        IndexExchange(layout, (spec.shape,), dim, each, length) for each, length in zip(moves, lengths, strict=True)
    ]
    local_sizes = [size // ranks for size in sizes]
    specs = [spec_of(layout, tuple(out.shape), out.stride(), out.dtype, spec.device) for out in call.outs]

    def cut(at: object) -> LocalOp:
        return lambda local: list(local.split(local_sizes, dim))

    def run(x: Any, *_: object, **__: object) -> list[Any]:
        locals_: Sequence[Tensor] = [exchange_locals(exchange, (x._local_tensor,)) for exchange in exchanges]
        if even:
            locals_ = run_on_ranks(mesh, cut, tuple(locals_), {})
        views = []
        for i, (local, piece) in enumerate(zip(locals_, specs, strict=True)):
            first = x.storage_offset() + call.outs[i].storage_offset()
            rest = (dim, *ends[i : i + 2], 1)
            views.append(part_of(x, local, piece, first, torch.ops.aten.slice.Tensor, rest))
        return views

    sent = planned_exchanges(exchanges, spec.itemsize)
    return AlternativePlan((layout,), (layout,) * len(sizes), run, exchanges=sent)


def _dealt(sizes: Sequence[int], starts: Sequence[int], ranks: int) -> Moves:
    """The moves that give each rank its chunk of each piece."""
    moves, at = [], 0
    for rank in range(ranks):
        for start, size in zip(starts, sizes, strict=False):
            n = size // ranks
            moves.append(Move(0, range(start + rank * n, start + (rank + 1) * n), at))
            at += n
    return tuple(moves)


PIECES = index_exchange(_pieces)
